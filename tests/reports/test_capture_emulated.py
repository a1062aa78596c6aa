"""Traces of emulated devices, whose programs take a time that is known."""

import statistics
from collections import defaultdict

import jax
import pytest

import ipu_pipeline as ipu
from benchmarks.emulation import stages as emulation
from ipu_pipeline import engine
from ipu_pipeline.reports.profile import EventKind, busy_time

pytestmark = pytest.mark.soak

FORWARD_MS, BACKWARD_MS, STAGES, COUNT = 10.0, 20.0, 4, 16


def trace(directory, schedule, forward_ms=FORWARD_MS):
    times = [forward_ms] * STAGES
    pipeline, state, data = emulation.make_pipeline(
        times, [BACKWARD_MS] * STAGES, COUNT, schedule=schedule, dispatch_plan=engine.Chunking()
    )
    state, _outputs = pipeline.step(state, data)
    with ipu.reports.capture(directory) as captured:
        for _step in range(2):
            state, _outputs = pipeline.step(state, data)
            jax.block_until_ready(state.variables)
    return captured.profile


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
def test_times_and_utilisation(tmp_path, schedule):
    """A sleep takes longer than asked by up to a scheduler's tick; the busiest half of the host is ours."""
    profile = trace(tmp_path, schedule)
    lengths = defaultdict(list)
    for event in profile.events:
        if event.kind in (EventKind.FORWARD, EventKind.BACKWARD):
            lengths[event.kind, event.stage].append(event.length / 1e3)
    for (kind, _stage), own in lengths.items():
        asked = FORWARD_MS if kind is EventKind.FORWARD else BACKWARD_MS
        assert len(own) == 2 * COUNT
        assert statistics.median(own) == pytest.approx(asked, rel=0.05)
    computed = [event for event in profile.events if event.kind.is_computation]
    busy = defaultdict(list)
    for event in computed:
        busy[event.step, event.ipu].append(event)
    for step in (1, 2):
        own = [event for event in computed if event.step == step]
        length = max(event.end for event in own) - min(event.begin for event in own)
        utilisation = sum(busy_time(busy[step, ipu_number]) for ipu_number in range(STAGES)) / (
            STAGES * length
        )
        # Balanced stages: COUNT of COUNT + STAGES - 1 time-steps; one IPU at a time if it is sequential.
        expected = 1 / STAGES if schedule == "sequential" else COUNT / (COUNT + STAGES - 1)
        assert utilisation == pytest.approx(expected, rel=0.06)
