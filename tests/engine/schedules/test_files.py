"""Schedules in files: what is read and written, and what errors say."""

import re

import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules.timetables import Action, ActionKind, ScheduleError
from tests.support import scheduled

F, B, I, W = ActionKind  # noqa: E741
HALVES = "0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1I1,1W1\n"


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "plan.csv"
        path.write_text(text)
        return path

    return write_text


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            HALVES,
            (
                (Action(F, 0, 0), Action(F, 0, 1), None, Action(I, 0, 0), Action(W, 0, 0), Action(B, 0, 1)),
                (None, Action(F, 1, 0), Action(B, 1, 0), Action(F, 1, 1), Action(I, 1, 1), Action(W, 1, 1)),
            ),
        ),
        (  # what overlaps follows one another
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
            ((Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)),),
        ),
        (  # communication is left out
            "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            ((Action(F, 0, 0), Action(B, 0, 0)), (Action(F, 1, 0), Action(B, 1, 0))),
        ),
        (  # backwards from the last one on are numbered as they come
            "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n",
            tuple(tuple(Action(kind, stage, n) for kind in (F, B) for n in (0, 1)) for stage in (0, 1)),
        ),
    ],
    ids=["halves", "overlapped", "communication", "last first"],
)
def test_cells_become_actions(text, rows, write):
    assert schedules.read_csv(write(text)) == rows


@pytest.mark.parametrize("name", ["interleaved", "looped_zero_bubble", "dual_pipe_v"])
def test_what_is_written_is_read(name, tmp_path):
    mapping = (0, 1, 0, 1) if "looped" in name else (0, 1, 1, 0)
    rows = schedules.timetable(name, 4, 6, mapping, True).rows
    schedules.write_csv(rows, tmp_path / "plan.csv")
    assert schedules.read_csv(tmp_path / "plan.csv") == rows


FAULTS = {
    "0F0,0X0\n": r"rank 0, column 1 \(both from 0\): '0X0' is not an action",
    "0F0,F0\n": "'F0' is not an action",
    "0F0,(0F1;)OVERLAP_F_B\n": "is not an action",
    "0F0,0B0\n\n1F0,1B0\n": "rank 1, column 0 .*the rank has no actions",
    "0F0,0B0\n0F0,0B0\n": "rank 1, column 0 .*stage 0 is on rank 0 already",
    "0F0,0B0,0B0\n": "rank 0, column 2 .*the backward of stage 0, micro-batch 0 comes twice",
    "0F0,0B0,0I0\n": "the input gradients of stage 0, micro-batch 0 comes twice",
    "0B0,0F0\n": "column 0 .*the backward of stage 0, micro-batch 0 comes before the forward",
    "0F0,0W0,0I0\n": "column 1 .*weight gradients of stage 0, micro-batch 0 comes before the input",
    "0F1,0B1,0F0,0B0\n": "column 0 .*comes where micro-batch 0 should",
    "0F0,0B0\n2F0,2B0\n": "the forward of stage 1, micro-batch 0 is missing",
    "0F0,0F1,0B0\n": "rank 0, column 2 .*the backward of stage 0, micro-batch 1 is missing",
    "0F0,0F1,0I0,0W0\n": "the backward of stage 0, micro-batch 1 is missing",
    "0F0,0F1,0I0,0W0,0I1\n": "the weight gradients of stage 0, micro-batch 1 is missing",
    "0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n": "rank 0, column 2 .*comes where micro-batch 1 should",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n": "deadlock at time-step 3: device 0 waits",
    "": "the file is empty",
    "\n\n": "the file is empty",
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults(text, write):
    path = write(text)
    with pytest.raises(ScheduleError, match=f"Schedule {re.escape(str(path))}: .*{FAULTS[text]}"):
        schedules.read_csv(path)


def test_a_fault_is_shown_among_its_neighbours(write):
    with pytest.raises(ScheduleError) as error:
        schedules.read_csv(write("0F0,0F1,0F2,0F3,0F4,0F5,0B7\n1F0,1F1,1F2,1F3,1F4,,1B0\n"))
    assert str(error.value).splitlines()[1:] == [
        "column 3     4     5     6     7     8     9",
        "rank 0 0F3   0F4   0F5   [0B7]",
        "rank 1 1F3   1F4         1B0",
    ]


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match=r"none.csv: the file cannot be read: No such file"):
        schedules.read_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match=r"the file cannot be read: Is a directory"):
        schedules.read_csv(tmp_path)
    (tmp_path / "plan.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="the file is not CSV in UTF-8"):
        schedules.read_csv(tmp_path / "plan.csv")


def test_a_file_is_for_one_pipeline(write):
    path = write(HALVES)
    with pytest.raises(ScheduleError, match=r"2 ranks and 2 stages, mapped as \[0, 1\]; .* as \[0, 0\]"):
        schedules.timetable(path, 2, 2, (0, 0), True)
    with pytest.raises(ScheduleError, match="is for 2 micro-batches per weight update; got 3"):
        schedules.timetable(path, 2, 3, (0, 1), True)


def test_without_training_a_file_s_forwards_are_taken(write):
    table = schedules.timetable(str(write(HALVES)), 2, 2, (0, 1), False)
    assert {action.kind for action in table.order} == {F}


def test_a_changed_file_is_read_again(write):
    assert schedules.timetable(write("0F0,0B0\n"), 1, 1, (0,), True).halved == frozenset()
    assert schedules.timetable(write("0F0,0I0,0W0\n"), 1, 1, (0,), True).halved == {0}


def test_a_pipeline_from_a_file_equals_a_plain_loop(write):
    scheduled.check(str(write(HALVES)), (0, 1), 2)


def test_a_pipeline_reads_a_file_when_it_is_made(write):
    with pytest.raises(ScheduleError, match="'x' is not an action"):
        engine.Pipeline([lambda x: x], num_micro_batches=1, schedule=write("x\n"))


def test_the_name_of_a_file_is_known(write):
    pipeline = engine.Pipeline([lambda x: x], num_micro_batches=1, schedule=write("0F0,0B0\n"))
    assert pipeline.options.schedule.__name__ == "plan.csv"
