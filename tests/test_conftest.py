"""What `make test` leaves out of a test's cases."""

import itertools

from tests.conftest import cover_pairs


def test_all_pairs_of_arguments_stay():
    cases = [
        {"schedule": schedule, "stages": stages, "optimizer": optimizer}
        for schedule, stages, optimizer in itertools.product("abc", "1234", "xy")
    ]
    kept = [cases[number] for number in sorted(cover_pairs(cases))]
    assert len(kept) == 12
    for first, second in itertools.combinations(cases[0], 2):
        assert {(case[first], case[second]) for case in kept} == {
            (case[first], case[second]) for case in cases
        }


def test_every_value_of_a_single_argument_stays():
    assert cover_pairs([{"n": "1"}, {"n": "2"}, {"n": "3"}]) == {0, 1, 2}
    assert cover_pairs([{"n": "1"}, {"n": "1"}]) == {0}
