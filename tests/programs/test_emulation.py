"""Emulated devices: stages that sleep."""

import json
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from benchmarks import harness
from benchmarks.emulation import run, stages, timing
from ipu_pipeline import engine
from ipu_pipeline.engine.schedules import ActionKind
from tests.support import beside, models

NUM_STAGES, COUNT = 4, 8
FOUR_STAGES = {"forward_ms": [1.0] * 4, "backward_ms": [1.0] * 4}


def make(forward_ms, backward_ms, num_stages=NUM_STAGES, **options):
    return stages.make_pipeline([forward_ms] * num_stages, [backward_ms] * num_stages, COUNT, **options)


def time_steps(emulated, number):
    """Seconds of each step, the first one left out; and the state after them."""
    pipeline, state, micro_batches = emulated
    taken = []
    for _update in range(number + 1):
        begin = time.perf_counter()
        state, outputs = pipeline.step(state, micro_batches)
        jax.block_until_ready((state, outputs.collected))
        taken.append(time.perf_counter() - begin)
    return taken[1:], state


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"device_mapping": [0] * NUM_STAGES}, marks=pytest.mark.thorough),
        pytest.param({"backward_ms": (0.5, 0.5), "schedule": "interleaved"}, marks=pytest.mark.thorough),
        # Equal stages are one executable.
        {"num_stages": 3, "transfer_ms": 0.5, "num_bytes": 65536, "dispatch_plan": engine.Chunking(2)},
        pytest.param({"transfer_ms": 0.5, "device_mapping": [0, 1, 1, 0]}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_equals_a_plain_loop(options, no_cache):
    given = {"forward_ms": 0.5, "backward_ms": 1.0, "optimizer": optax.adam(0.01), **options}
    pipeline, state, step = make(**given)
    plain = models.on_one_device(state)
    for _update in range(2):
        state, outputs = pipeline.step(state, step)
        plain, expected = beside.step_plainly(pipeline, plain, step)
        models.assert_trees_close(outputs.losses, expected.losses)
        models.assert_trees_close(state.variables, plain.variables)
        models.assert_trees_close(state.optimizer_state, plain.optimizer_state)


@pytest.mark.soak
def test_by_default_stages_overlap_and_are_not_chunked(no_cache):
    """In chunks of two a step takes 1.27 of the ideal, and without overlap 2.9."""
    emulated = make(10.0, 20.0)
    plan = emulated.pipeline.dispatch_plan
    assert plan.chunk_size == 1
    assert plan.reason.startswith("measured: ")  # since nothing can be counted of a foreign function
    taken, _state = time_steps(emulated, 3)
    assert min(taken) < 1.2 * (COUNT + NUM_STAGES - 1) * 0.03


@pytest.mark.soak
def test_each_program_is_timed_alone():
    """Stages that differ, a backward in two halves, and transfers on their way for 6 ms."""
    emulated = stages.make_pipeline([2.0, 4.0, 3.0], [8.0, (5.0, 7.0), 6.0], COUNT, transfer_ms=6.0)
    before = jax.tree.map(np.array, emulated.state.variables)
    times = timing.time_programs(*emulated, num_rounds=3)
    asked = {
        (ActionKind.FORWARD, 0): 2e-3,
        (ActionKind.FORWARD, 1): 4e-3,
        (ActionKind.FORWARD, 2): 9e-3,  # both directions of the last stage
        (ActionKind.BACKWARD, 1): 12e-3,  # the halves take turns
        (ActionKind.BACKWARD, 0): 8e-3,
    }
    assert times.programs.keys() == asked.keys()
    for key, seconds in asked.items():
        assert seconds <= times.programs[key] < 2 * seconds + 5e-3, key
    assert times.transfers.keys() == asked.keys() - {(ActionKind.BACKWARD, 0)}  # which sends nothing
    for seconds in times.transfers.values():
        assert 6e-3 <= seconds < 2e-2
    assert times.updates.keys() == {0, 1, 2}
    models.assert_trees_close(jax.tree.map(np.array, emulated.state.variables), before)


def test_the_ideal_is_that_of_the_schedule():
    """Equal stages: (micro-batches + stages - 1) times both directions, and the update of stage 0."""
    emulated = make(0.1, 0.1, dispatch_plan=engine.Chunking())
    kinds = {(ActionKind.FORWARD, 3): 3.0}
    kinds |= {(ActionKind.FORWARD, stage): 1.0 for stage in range(3)}
    kinds |= {(ActionKind.BACKWARD, stage): 2.0 for stage in range(3)}
    times = timing.Times(kinds, {}, {0: 0.5, 3: 0.25})
    ideal = (COUNT + NUM_STAGES - 1) * 3 + 0.5
    assert timing.ideal_seconds(emulated.pipeline, times) == pytest.approx(ideal)


@pytest.mark.soak
def test_transfers_take_time_but_no_time_of_a_device():
    """Two stages of 2 + 2 ms: what is 10 ms on its way delays the ends of a step, and not each action."""
    plain, _state = time_steps(make(2.0, 2.0, num_stages=2), 5)
    delayed, _state = time_steps(make(2.0, 2.0, num_stages=2, transfer_ms=10.0), 5)
    # A link carries one array at a time, so 8 micro-batches are 80 ms on it, and the last gradient 10 more;
    # before the first and after the last one a stage has 2 ms to do, and the last stage 4.
    assert statistics.median(delayed) > statistics.median(plain) + 0.04
    assert min(delayed) > 0.09
    assert min(delayed) < 0.16  # were the devices held meanwhile, 32 + 160 ms at least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_ms": [1.0]}, "an entry per stage; they have 2 and 1"),
        ({"num_bytes": 8000}, "8192 at least.*got 8000"),
        ({"num_bytes": 8193}, "a multiple of 32.*got 8193"),
        ({**FOUR_STAGES, "transfer_ms": 1.0}, "need 10 virtual devices"),
    ],
)
def test_what_cannot_be_emulated_is_refused(options, message):
    given = {"forward_ms": [1.0] * 2, "backward_ms": [1.0] * 2, "num_micro_batches": COUNT, **options}
    with pytest.raises(ValueError, match=message):
        stages.make_pipeline(**given)


def test_one_program_has_no_programs_to_time():
    with pytest.raises(ValueError, match=r"one IPU.*\[0, 0\]"):
        timing.time_programs(*make(0.1, 0.1, num_stages=2, device_mapping=[0, 0]))


def test_the_benchmark_refuses_sides_that_train_something_else():
    whole = [[1.0, 2.0], [3.0, 4.0]]
    losses = {"grouped": whole, "sequential": [[1.0], [5.0]], "gpipe": whole}
    run.check_losses(losses)
    for side, wrong in (("sequential", [[1.1], [5.0]]), ("gpipe", [[1.0, 2.0], [3.0, 4.1]])):
        with pytest.raises(AssertionError, match=side):
            run.check_losses({**losses, side: wrong})


@pytest.mark.soak
def test_the_benchmark_runs_beside_torch(tmp_path):
    """Losses of all sides agree, or it would fail."""
    path = tmp_path / "rows.json"
    options = f"benchmarks.emulation.run --short --cases 2x2 --json {path}".split()
    subprocess.run(
        [sys.executable, "-m", *options], check=True, cwd=harness.ROOT, stdout=subprocess.DEVNULL
    )
    rows = [harness.Row(**row) for row in json.loads(path.read_text())]
    assert [row.target for row in rows] == [1.06, 1.06, 1.06, None]
    assert "torch.distributed.pipelining" in rows[-1].case
    assert all(0.8 < row.value < 2 for row in rows[:3])
