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
IN_SHARES, SHARE = 16, 3  # `make thorough` has one share of 16, `make soak` all


def test_the_page_has_no_operator_that_is_wrong():
    kinds = [kind for kind, _gradient, _why in OUTCOMES.values()]
    assert not {WRONG, CRASHED} & set(kinds)
    assert kinds.count(PASSED) >= 620
    assert kinds.count(ELSEWHERE) == 5  # what torch compiles for a GPU
    assert all(why for kind, _gradient, why in OUTCOMES.values() if kind == REFUSED)
    assert f"{kinds.count(PASSED)} {PASSED}" in PAGE.read_text()


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(share, marks=pytest.mark.thorough if share == SHARE else pytest.mark.soak)
        for share in range(IN_SHARES)
    ],
)
@pytest.mark.parametrize("part", range(2))
def test_operators_do_what_the_page_says(part, share):
    """torch's database takes seconds to import: `make test` has the operators of the corners' test."""
    assert set(OUTCOMES) == set(operator_database.operators())
    names = NAMES[share::IN_SHARES][part::2]
    found = operator_database.measure(names, 2)
    assert {name: (o.kind, o.has_gradient, o.why) for name, o in found.items()} == {
        name: OUTCOMES[name] for name in names
    }
