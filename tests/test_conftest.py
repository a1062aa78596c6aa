"""What `make test` leaves out of a test's cases."""

import itertools
from types import SimpleNamespace

from tests.conftest import cover_values, name_arguments


def test_every_value_of_each_argument_stays():
    cases = [
        {"schedule": schedule, "stages": stages, "optimizer": optimizer}
        for schedule, stages, optimizer in itertools.product("abc", "1234", "xy")
    ]
    kept = [cases[number] for number in sorted(cover_values(cases))]
    assert len(kept) == 4
    for argument in cases[0]:
        assert {case[argument] for case in kept} == {case[argument] for case in cases}


def test_all_cases_with_one_argument_stay():
    assert cover_values([{"n": "1"}, {"n": "2"}, {"n": "3"}]) == {0, 1, 2}
    assert cover_values([{"n": "1"}, {"n": "1"}]) == {0}


def test_functions_are_values_like_others():
    cases = [
        name_arguments(SimpleNamespace(params={"number": number, "function": function}))
        for number, function in itertools.product((1, 2), (min, max, lambda: 0))
    ]
    assert len(cover_values(cases)) == 3
