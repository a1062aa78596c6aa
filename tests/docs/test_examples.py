"""The examples in docstrings of public names: each name has one, and they do what they say."""

import importlib
import types

import pytest

import ipu_pipeline as ipu
from tests.support import forked
from tests.support.examples import HOMES, reference
from tests.support.programs import environment


def test_every_module_that_the_package_names_is_in_the_reference():
    modules = {name for name in ipu.__all__ if isinstance(getattr(ipu, name), types.ModuleType)}
    assert modules - set(reference.PUBLIC) == {"ops"}  # whose modules are there by themselves
    assert set(HOMES.values()) == set(map(reference.full_name, reference.PUBLIC))


def test_every_public_name_has_an_example():
    examples = reference.Examples(HOMES)
    without = [
        f"{module}.{name}"
        for (module, name), home in HOMES.items()
        if home == module
        and reference.is_shown(getattr(importlib.import_module(module), name))
        and not examples.has(module, name)
    ]
    assert without == []


# Which modules' examples are run in one process; those of the others together.
TOGETHER = {
    "engine": ("engine", "engine.inspect", "engine.planning", "engine.schedules"),
    "estimators": ("ipu_estimator", "ipu_pipeline_estimator", "layers", "serving"),
    "package": ("", "pipelining_ops", "errors", "datasets"),
}


@pytest.mark.parametrize(
    "group", ["others", *(pytest.param(group, marks=pytest.mark.thorough) for group in TOGETHER)]
)
def test_examples_do_what_they_say(group, tmp_path):
    others = [name for name in reference.PUBLIC if name not in sum(TOGETHER.values(), ())]
    modules = [reference.full_name(name) for name in TOGETHER.get(group, others)]
    code = f"from tests.support import examples\nexamples.main(*{modules})"
    result = forked.run(code, environment(as_tests=True), tmp_path)
    assert (result.stdout, result.returncode) == ("", 0), result.stdout + result.stderr
