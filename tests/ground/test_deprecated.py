"""Names that are to go work and warn once, and are gone in the version that they name."""

import warnings

import pytest

import ipu_pipeline
from ipu_pipeline import engine
from ipu_pipeline.ground import user_warnings


def as_numbers(version):
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("name", user_warnings.DEPRECATED_NAMES)
def test_a_name_works_and_warns_once(name, monkeypatch):
    monkeypatch.setattr(user_warnings, "_warned", set())
    instead, until = user_warnings.DEPRECATED_NAMES[name]
    package, _, attribute = name.rpartition(".")
    assert package == "engine"
    with pytest.warns(
        DeprecationWarning, match=f"^{name} is deprecated, .* {until} .*: use {instead}"
    ) as told:
        found = getattr(engine, attribute)
    assert told[0].filename == __file__
    assert found is getattr(engine, instead.removeprefix("engine."))
    with warnings.catch_warnings(action="error"):
        getattr(engine, attribute)
    assert attribute not in dir(engine)


def test_none_is_there_longer_than_it_says():
    for name, (_instead, until) in user_warnings.DEPRECATED_NAMES.items():
        assert as_numbers(ipu_pipeline.__version__) < as_numbers(until), f"take {name} away"
