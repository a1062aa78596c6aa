"""What `make test` leaves out of a test's cases."""

import itertools
from types import SimpleNamespace

from tests.conftest import cover, name_arguments


def test_every_value_of_each_argument_stays():
    cases = [
        {"schedule": schedule, "stages": stages, "optimizer": optimizer}
        for schedule, stages, optimizer in itertools.product("abc", "1234", "xy")
    ]
    kept = [cases[number] for number in sorted(cover(cases, 1))]
    assert len(kept) == 4
    for argument in cases[0]:
        assert {case[argument] for case in kept} == {case[argument] for case in cases}


def test_all_cases_with_one_argument_stay():
    assert cover([{"n": "1"}, {"n": "2"}, {"n": "3"}], 1) == {0, 1, 2}
    assert cover([{"n": "1"}, {"n": "1"}], 1) == {0}


def test_every_pair_of_values_stays():
    """And what was taken before counts."""
    cases = [dict(zip("abcd", values, strict=True)) for values in itertools.product("123", repeat=4)]
    begun = cover(cases, 1)
    kept = cover(cases, 2, begun)
    assert begun < kept
    assert len(kept) <= 15
    for first, second in itertools.combinations("abcd", 2):
        assert len({(cases[number][first], cases[number][second]) for number in kept}) == 9
    one = [{"n": "1"}, {"n": "2"}]
    assert cover(one, 2) == {0, 1}


def test_functions_are_values_like_others():
    cases = [
        name_arguments(SimpleNamespace(params={"number": number, "function": function}))
        for number, function in itertools.product((1, 2), (min, max, lambda: 0))
    ]
    assert len(cover(cases, 1)) == 3
