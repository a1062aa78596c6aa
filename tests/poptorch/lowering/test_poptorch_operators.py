"""Operators of torch's database do what operators.toml says; docs/poptorch_operations.md counts them."""

import re

import pytest
import torch

from tests.support import operator_database
from tests.support.operator_database import CRASHED, ELSEWHERE, PASSED, RANDOM, REFUSED, WRONG
from tests.support.programs import ROOT

torch.set_num_threads(1)

OUTCOMES = operator_database.read_outcomes()
NAMES = sorted(OUTCOMES)
IN_SHARES, SHARE = 16, 3  # `make thorough` has one share of 16, `make soak` all


def test_no_operator_is_wrong_and_the_page_counts_and_names_them():
    by_kind = {}
    for name, outcome in OUTCOMES.items():
        by_kind.setdefault(outcome.kind, []).append(name)
    assert not {WRONG, CRASHED} & set(by_kind)
    assert len(by_kind[PASSED]) >= 620
    assert len(by_kind[ELSEWHERE]) == 5  # what torch compiles for a GPU
    assert all(outcome.why for outcome in OUTCOMES.values() if outcome.kind == REFUSED)
    page = (ROOT / "docs" / "poptorch_operations.md").read_text()
    section = page.partition("\n## torch's operators\n")[2].partition("\n## ")[0]
    with_gradients = sum(OUTCOMES[name].has_gradient for name in by_kind[PASSED])
    assert f"{len(OUTCOMES)} operators" in section
    told = f"| compute as torch does: {len(by_kind[PASSED])}, {with_gradients} of them with gradients |"
    assert told in section
    rows = re.findall(r"^\| ([^:|]+): (\d+) \| (`.*) \|$", section, re.MULTILINE)
    told = {"draw": RANDOM, "refused, ": REFUSED, "refused by torch": ELSEWHERE}
    for start, kind in told.items():
        named = []
        for text, count, names in rows:
            if text.startswith(start):
                named += re.findall(r"`(\S+)`", names)
                assert int(count) == len(names.split())
        assert sorted(named) == sorted(by_kind[kind]), kind


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(share, marks=pytest.mark.thorough if share == SHARE else pytest.mark.soak)
        for share in range(IN_SHARES)
    ],
)
@pytest.mark.parametrize("part", range(2))
def test_operators_do_what_was_measured(part, share):
    """torch's database takes seconds to import: `make test` has the operators of the corners' test."""
    assert set(OUTCOMES) == set(operator_database.operators())
    names = NAMES[share::IN_SHARES][part::2]
    assert operator_database.measure(names, 2) == {name: OUTCOMES[name] for name in names}
