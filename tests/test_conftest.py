"""What `make test` leaves out of a test's cases."""

import itertools

from tests.conftest import cover_values


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
