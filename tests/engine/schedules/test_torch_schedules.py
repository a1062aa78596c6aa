"""PyTorch's own schedules: read, checked, run and compared; and ours, accepted by PyTorch's checker."""

import csv
import types

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from ipu_pipeline.engine import schedules
from tests.support import scheduled

STAGES_ON_A_RANK = {
    "GPipe": (1,),
    "1F1B": (1,),
    "LoopedBFS": (1, 2, 3, 4),
    "Interleaved1F1B": (2, 3, 4),
    "InterleavedZeroBubble": (1, 2, 3, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}


def make_stage(rank, num_stages, num_ranks):
    """What PyTorch's schedules ask of a stage before they run."""
    ranks = {"stage_index": rank, "num_stages": num_stages, "group_size": num_ranks, "group_rank": rank}
    return types.SimpleNamespace(**ranks, is_last=False, submod=None)


def generate(name, num_ranks, num_turns, num_micro_batches):
    """PyTorch's rows of cells; None if it has no such schedule for these numbers."""
    kind = torch_schedules.get_schedule_class(name)
    stage = make_stage(0, num_ranks * num_turns, num_ranks)
    try:
        if issubclass(kind, torch_schedules.PipelineScheduleSingle):
            order = kind(stage, num_micro_batches)._get_pipeline_order()
        else:
            order = kind([stage] * num_turns, num_micro_batches).pipeline_order
    except ValueError:  # these numbers do not fit
        return None
    if name == "1F1B":
        order[num_ranks - 1] = list(map(renumber, order[num_ranks - 1]))
    return [["" if action is None else str(action) for action in order[rank]] for rank in range(num_ranks)]


def renumber(action):
    """Torch 2.13 numbers the last rank's forwards from 1, which its own checker refuses."""
    is_forward = action is not None and action.computation_type is torch_schedules.FORWARD
    return action._replace(microbatch_index=action.microbatch_index - 1) if is_forward else action


def write(cells, path):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(cells)
    return path


def read_all(name, num_turns, ranks, counts, path):
    """Reads what PyTorch generates for these numbers. Returns how many schedules there are."""
    number = 0
    for num_ranks in ranks:
        for num_micro_batches in counts:
            cells = generate(name, num_ranks, num_turns, num_micro_batches)
            if cells is not None:
                found = schedules.read_csv(write(cells, path))
                assert len(found) == num_ranks
                number += 1
    return number


@pytest.mark.parametrize("name", STAGES_ON_A_RANK)
def test_some_of_torch_s_are_read(name, tmp_path):
    assert read_all(name, STAGES_ON_A_RANK[name][-1], (2, 3), (4, 6, 8), tmp_path / "plan.csv") >= 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", STAGES_ON_A_RANK)
def test_torch_s_schedules_equal_a_plain_loop(name, tmp_path):
    path = write(generate(name, 2, STAGES_ON_A_RANK[name][-1], 4), tmp_path / "plan.csv")
    scheduled.check(path, schedules.load_schedule(path).device_mapping, 4)


@pytest.mark.parametrize("name", [*schedules.named_schedules()])
def test_torch_accepts_ours(name, tmp_path):
    num_ipus, one = 3, [0, 1, 2]
    mapping = one
    if name.startswith("looped"):
        mapping = one * 2
    elif name in ("zero_bubble_v", "v_half", "v_min", "dual_pipe_v"):
        mapping = one + one[::-1]
    count, path = 2 * num_ipus + 1, tmp_path / "plan.csv"
    schedules.write_csv(schedules.timetable(name, len(mapping), count, tuple(mapping), True).rows, path)
    stage = make_stage(0, len(mapping), num_ipus)
    runtime = torch_schedules._PipelineScheduleRuntime([stage], count)
    runtime._load_csv(str(path))  # checks, and adds what ranks send, which finds deadlocks
    assert runtime.stage_index_to_group_rank == dict(enumerate(mapping))


@pytest.mark.parametrize("name", ["zero_bubble_v", "dual_pipe_v"])
@pytest.mark.parametrize(("num_ipus", "num_micro_batches"), [(2, 4), (3, 7)])
def test_ours_are_as_torch_s(name, num_ipus, num_micro_batches, tmp_path):
    torch_s = {"zero_bubble_v": "ZBVZeroBubble", "dual_pipe_v": "DualPipeV"}[name]
    path = write(generate(torch_s, num_ipus, 2, num_micro_batches), tmp_path / "plan.csv")
    mapping = (*range(num_ipus), *reversed(range(num_ipus)))
    found, own = (
        schedules.timetable(schedule, 2 * num_ipus, num_micro_batches, mapping, True).rows
        for schedule in (path, name)
    )
    assert [[action for action in row if action] for row in found] == [
        [action for action in row if action] for row in own
    ]
