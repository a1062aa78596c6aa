"""docs/poptorch_operators.md is true: operators of torch's own database do what it says."""

import re
from pathlib import Path

import pytest
import torch

from tests.support import operator_database
from tests.support.operator_database import CRASHED, ELSEWHERE, PASSED, REFUSED, WRONG

torch.set_num_threads(1)

PAGE = Path(__file__).parents[3] / "docs" / "poptorch_operators.md"
ROW = re.compile(r"^\| `(\S+)` \| ([^|]+) \| (yes)? ?\| ?(.*?) ?\|$", re.MULTILINE)
OUTCOMES = {
    name: (kind, gradient == "yes", why) for name, kind, gradient, why in ROW.findall(PAGE.read_text())
}
NAMES = sorted(OUTCOMES)
EACH_RUN, IN_SHARES, SHARE = 100, 16, 3  # unmarked one in 100; of the others one share of 16


def check(names, count=2):
    """By that many of the database's inputs of each."""
    found = operator_database.measure(names, count)
    assert {name: (o.kind, o.has_gradient, o.why) for name, o in found.items()} == {
        name: OUTCOMES[name] for name in names
    }


def test_the_page_has_every_operator_and_none_is_wrong():
    assert set(OUTCOMES) == set(operator_database.operators())
    kinds = [kind for kind, _gradient, _why in OUTCOMES.values()]
    assert not {WRONG, CRASHED} & set(kinds)
    assert kinds.count(PASSED) >= 620
    assert kinds.count(ELSEWHERE) == 5  # what torch compiles for a GPU
    assert all(why for kind, _gradient, why in OUTCOMES.values() if kind == REFUSED)
    assert f"{kinds.count(PASSED)} {PASSED}" in PAGE.read_text()


def test_operators_do_what_the_page_says():
    check(NAMES[::EACH_RUN], 1)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(2))
def test_more_operators_do_what_the_page_says(part):
    check([name for name in NAMES[SHARE::IN_SHARES] if name not in NAMES[::EACH_RUN]][part::2])
