"""The examples in docstrings of public names: each name has one, and they do what they say."""

import doctest
import importlib
import inspect

import jax
import pytest

from ipu_pipeline import config
from tests.docs.test_site import reference

HOMES = reference.find_homes()


def objects_of(module):
    """The public objects that a module documents, and what is public in its classes."""
    found = importlib.import_module(module)
    for (of, name), home in HOMES.items():
        if not of == home == module:
            continue
        value = getattr(found, name)
        if not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for inner, member in vars(value).items():
                if not inner.startswith("_"):
                    yield f"{name}.{inner}", getattr(member, "__func__", member)


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


@pytest.mark.parametrize("module", reference.PUBLIC)
def test_examples_of(module, tmp_path, monkeypatch):
    """All lines before the first one of which something else came than what it says."""
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    preamble = "".join(f">>> {line}\n" for line in reference.PREAMBLE.splitlines() if line)
    failures = []
    for name, value in objects_of(reference.full_name(module)):
        if example := reference.example_in(value.__doc__):
            assert example.startswith(">>> "), f"the example of {name}"
            test = doctest.DocTestParser().get_doctest(preamble + example, {}, name, None, 0)
            config.reset_ipu_configuration()
            with jax.numpy_dtype_promotion("standard"):
                runner.run(test, out=failures.append)
    assert not failures, "\n".join(failures)
