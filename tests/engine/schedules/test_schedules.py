import itertools

import pytest

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules import Action, ActionKind, ScheduleError, check, timetable
from tests.support.walking import walk

F, B, INPUTS, W = ActionKind
LETTERS = dict(zip("FBIW", ActionKind, strict=True))


def table(text):
    """Rows from a grid: F3 and B3 for micro-batch 3, a dot for waiting; line i is stage i on IPU i."""
    return tuple(
        tuple(
            None if cell == "." else Action(LETTERS[cell[0]], stage, int(cell[1:])) for cell in line.split()
        )
        for stage, line in enumerate(text.strip().splitlines())
    )


GROUPED = table("""
F0 F1 F2 F3 .  F4 .  F5 .  F6 B0 F7 B1 .  B2 .  B3 .  B4 B5 B6 B7
.  F0 F1 F2 .  F3 .  F4 B0 F5 B1 F6 B2 F7 B3 .  B4 .  B5 B6 B7
.  .  F0 F1 .  F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 B7
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
""")
INTERLEAVED = table("""
F0 .  F1 .  F2 .  F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
.  F0 .  F1 .  F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7
.  .  F0 .  F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
""")
SEQUENTIAL = table("""
F0 .  .  .  .  B0 F1 .  .  .  .  B1
.  F0 .  .  B0 .  .  F1 .  .  B1
.  .  F0 B0 .  .  .  .  F1 B1
""")
ZERO_BUBBLE = table("""
F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
.  F0 F1 F2 F3 .  I0 W0 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
.  .  F0 F1 F2 I0 W0 I1 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
""")
FORWARDS = table("""
F0 F1 F2
.  F0 F1 F2
.  .  F0 F1 F2
""")
FORWARDS_ONE_BY_ONE = table("""
F0 .  .  F1
.  F0 .  .  F1
.  .  F0 .  .  F1
""")


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "training", "expected"),
    [
        ("grouped", 8, True, GROUPED),
        ("interleaved", 8, True, INTERLEAVED),
        ("sequential", 2, True, SEQUENTIAL),
        ("zero_bubble", 6, True, ZERO_BUBBLE),
        ("grouped", 3, False, FORWARDS),
        ("interleaved", 3, False, FORWARDS),
        ("zero_bubble", 3, False, FORWARDS),
        ("sequential", 2, False, FORWARDS_ONE_BY_ONE),
    ],
)
def test_staircases(name, num_micro_batches, training, expected):
    num_stages = len(expected)
    mapping = tuple(range(num_stages))
    assert timetable(name, num_stages, num_micro_batches, mapping, training).rows == expected


def test_lengths_and_micro_batches_in_flight():
    for n, g in itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 9, 16)):
        mapping = tuple(range(n))
        grouped = timetable("grouped", n, g, mapping, True)
        assert grouped.num_time_steps == 2 * (g + n - 1)
        assert grouped.in_flight == tuple(min(g, 2 * (n - i) - 1) for i in range(n))
        interleaved = timetable("interleaved", n, g, mapping, True)
        assert interleaved.num_time_steps == 2 * (g + n - 1)
        assert interleaved.in_flight == tuple(min(g, n - i) for i in range(n))
        sequential = timetable("sequential", n, g, mapping, True)
        assert sequential.num_time_steps == 2 * n * g
        assert sequential.in_flight == (1,) * n


def test_zero_bubble_s_formulas():
    for p, m in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 6, 8, 13, 14)):
        found = timetable("zero_bubble", p, m, tuple(range(p)), True)
        assert found.num_time_steps == 3 * m + max(p - 1, 2 * p - 1 - m)
        assert max(found.in_flight) == found.in_flight[0] == min(p, m)
        assert found.halved == frozenset(range(p))


@pytest.mark.parametrize(("num_ipus", "num_micro_batches"), [(2, 4), (3, 6), (4, 12)])
def test_looped_is_megatron_s_schedule(num_ipus, num_micro_batches):
    """For multiples of the number of IPUs, all that Megatron has."""

    def in_turn(kind, ipu, turns):
        """Groups of as many micro-batches as IPUs, each through all stages of the IPU."""
        return [
            Action(kind, turn * num_ipus + ipu, first + place)
            for first in range(0, num_micro_batches, num_ipus)
            for turn in turns
            for place in range(num_ipus)
        ]

    expected = []
    for ipu in range(num_ipus):
        forwards, backwards = in_turn(F, ipu, (0, 1)), in_turn(B, ipu, (1, 0))
        num_first = 2 * (num_ipus - ipu - 1) + num_ipus
        row = forwards[:num_first]
        for forward, backward in zip(forwards[num_first:], backwards, strict=False):
            row += [forward, backward]
        expected.append(row + backwards[max(0, len(forwards) - num_first) :])
    mapping = [*range(num_ipus)] * 2
    rows = schedules.looped(len(mapping), num_micro_batches, mapping)
    assert [list(row) for row in rows] == expected


def test_what_looped_does_not_fit():
    """It goes around the IPUs, and has no parallel stages."""
    for mapping in [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 1, 0), (0, 1, 0)]:
        with pytest.raises(ScheduleError, match=r"goes around the devices several times.*got \["):
            timetable("looped", len(mapping), 4, mapping, True)
    with pytest.raises(ScheduleError, match=r"Looped has no parallel stages.*\[0, 1, 1, 2\]"):
        timetable("looped", 4, 4, (0, 1, 0, 1), True, (0, 1, 1, 2))
    with pytest.raises(ScheduleError, match="stage 1, micro-batch 0 is not one of this pipeline"):
        timetable("grouped", 1, 4, (0, 1), True)


@pytest.mark.parametrize(
    ("name", "mapping", "training"),
    [
        ("grouped", (0, 1, 0, 1), True),
        ("grouped", (1, 0, 0, 1), True),
        ("interleaved", (0, 1, 1, 2), True),
        ("interleaved", (0, 0, 0, 0), False),
        ("sequential", (1, 0, 0, 1), True),
        ("zero_bubble", (0, 1, 0, 1), True),
        ("zero_bubble", (0, 0, 0, 0), True),
        ("zero_bubble", (0, 1, 1, 2), False),
        ("looped", (0, 1, 0, 1), True),
        ("looped", (0, 0, 0, 0), True),
    ],
)
def test_several_stages_on_one_ipu(name, mapping, training):
    table = timetable(name, 4, 5, mapping, training)
    assert len(table.rows) == max(mapping) + 1
    assert len(table.order) == 4 * 5 * (1 + training * (1 + len(table.halved) // 4))
    walk(table.rows)  # no action waits for ever
    busy = {}
    for action, time_step in zip(table.order, table.time_steps, strict=True):
        assert busy.setdefault((mapping[action.stage], time_step), action) == action


def halves(*kinds):
    return [[Action(kind, 0, 0) for kind in kinds]]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[Action(F, 0, 0)]], "the backward of stage 0, micro-batch 0 is missing"),
        ([[Action(F, 0, 0), Action(F, 0, 0), Action(B, 0, 0)]], "comes twice"),
        ([[Action(F, 0, 1), Action(B, 0, 1)]], "is not one of this pipeline"),
        ([[], [Action(F, 0, 0), Action(B, 0, 0)]], "is on device 1, but its stage is on device 0"),
        ([[(F, 0, 0)]], "a slot must hold an Action or None; slot 0 of device 0 holds"),
        (halves(B, F), "deadlock at time-step 1"),
        (halves(F, INPUTS), "the weight gradients of stage 0, micro-batch 0 is missing"),
        (halves(F, W), "the input gradients of stage 0, micro-batch 0 is missing"),
        (halves(F, W, INPUTS), "deadlock at time-step 2"),
        (halves(F, INPUTS, W, W), "comes twice"),
        (halves(F, INPUTS, W, B), "comes twice"),
    ],
)
def test_bad_schedules(rows, fault):
    with pytest.raises(ScheduleError, match=fault) as error:
        check(rows, 1, 1, (0,), True)
    assert "device 0" in str(error.value)


def test_a_backward_that_is_missing_as_a_whole():
    with pytest.raises(ScheduleError, match="the backward of stage 0, micro-batch 1 is missing"):
        check([[*halves(F, INPUTS, W)[0], Action(F, 0, 1)]], 1, 2, (0,), True)


def test_deadlock_between_two_ipus_shows_the_grid_with_the_step_marked():
    rows = [
        [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)],
    ]
    with pytest.raises(ScheduleError) as error:
        check(rows, 2, 2, (0, 1), True)
    assert str(error.value).splitlines()[-2:] == [
        "device 0: F0.0   [B0.0] F0.1   B0.1",
        "device 1: F1.0   F1.1   B1.0   B1.1",
    ]


def test_a_whole_backward_beside_halves_becomes_both():
    rows = [[Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(INPUTS, 0, 1), Action(W, 0, 1)]]
    found = check(rows, 1, 2, (0,), True)
    assert [(action.kind, action.micro_batch) for action in found.rows[0]] == [
        *((F, 0), (INPUTS, 0), (W, 0)),
        *((F, 1), (INPUTS, 1), (W, 1)),
    ]
    assert found.halved == {0}


def test_the_fullest_moments_of_halves():
    kinds = (F, F, INPUTS, F, INPUTS, W, INPUTS, W, W)
    numbers = (0, 1, 0, 2, 1, 0, 2, 1, 2)
    row = [Action(kind, 0, number) for kind, number in zip(kinds, numbers, strict=True)]
    found = check([row], 1, 3, (0,), True)
    assert found.fullest == (((2, 1), (1, 2)),)
    assert found.in_flight == (3,)


def test_stages_that_are_halved_with_other_counts_are_so_with_any():
    rows = [[Action(F, 0, 0), Action(B, 0, 0)]]
    found = check(rows, 1, 1, (0,), True, halved=frozenset({0}))
    assert [action.kind for action in found.order] == [F, INPUTS, W]
    rows = [[Action(F, 0, 0), Action(INPUTS, 0, 0), Action(W, 0, 0)]]
    with pytest.raises(ScheduleError, match="with 1 micro-batches, stage 0 splits its backward"):
        check(rows, 1, 1, (0,), True, halved=frozenset())


def test_order_of_micro_batches_is_required():
    rows = [[Action(F, 0, 1), Action(F, 0, 0), Action(B, 0, 0), Action(B, 0, 1)]]
    with pytest.raises(ScheduleError, match="comes before micro-batch 0"):
        check(rows, 1, 2, (0,), True)


def test_timetables_are_cached():
    assert timetable("grouped", 4, 8, (0, 1, 2, 3), True) is timetable("grouped", 4, 8, (0, 1, 2, 3), True)


def test_schedules_import_no_jax():
    with open(schedules.__file__) as source:
        assert "jax" not in [line.split()[1] for line in source if line.startswith(("import", "from"))]
