"""docs/pipeline_arguments.md: the arguments of `pipeline` as they are, and tests that there are."""

import inspect
import re

from ipu_pipeline.pipelining_ops import pipeline
from tests.support import pages
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "pipeline_arguments.md").read_text()
PARAMETERS = inspect.signature(pipeline).parameters


def rows():
    """The cells of each row, without the head."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_arguments_are_those_of_the_signature():
    assert [len(row) for row in rows()] == [5] * len(PARAMETERS)
    assert [row[0] for row in rows()] == [f"`{name}`" for name in PARAMETERS]


def test_each_row_has_the_default_and_tests_that_exist():
    for (name, default, effect, faults, tests), parameter in zip(rows(), PARAMETERS.values(), strict=True):
        if parameter.default is inspect.Parameter.empty:
            assert default == "required", name
        else:
            assert default == f"`{getattr(parameter.default, 'name', parameter.default)}`", name
        assert effect.endswith("."), name
        assert faults.endswith("."), name
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
        assert ", ".join(f"`{path}::{function}`" for path, function in named) == tests
        assert named, name
        assert [one for one in named if one[1] not in pages.functions_of(ROOT / one[0])] == []
