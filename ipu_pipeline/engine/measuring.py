"""Measures the fastest dispatch plan of a pipeline, instead of estimating it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.inspect.pipelines import with_dispatch_plan
from ipu_pipeline.engine.measured_choices import time_in_turns
from ipu_pipeline.engine.option_types import Chunking
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.planning.dispatch_plans import describe_seconds, possible_chunk_sizes
from ipu_pipeline.engine.state import PipelineState


def measure_dispatch_plan(
    pipeline: Pipeline, state: PipelineState, micro_batches: Sequence[Any], *inputs: Any, num_steps: int = 5
) -> Chunking:
    """Measures the dispatch plan with the fastest steps of a pipeline on this machine.

    It compiles and runs every possible plan, each on a copy of the state, which takes long. The result can
    be stored, and passed to a pipeline as `dispatch_plan`. Plans are tried without a limit on memory.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4), layers.Dense(4)],
      ...     num_micro_batches=4,
      ...     loss=jnp.mean,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> batches = [np.ones([2, 8], np.float32)] * 4
      >>> state = pipeline.init(jax.random.key(0), batches[0])
      >>> plan = engine.measure_dispatch_plan(pipeline, state, batches, num_steps=2)
      >>> plan.chunk_size in (1, 2, 4)
      True

    Args:
      pipeline: a pipeline on several devices with a fixed number of micro-batches.
      state: as for `Pipeline.step`; it is not changed.
      micro_batches: the micro-batches of one step.
      *inputs: as for `Pipeline.step`.
      num_steps: how often two steps of each plan are timed, the plans in turn, after a step that compiles;
        the medians are compared.

    Raises:
      ValueError: all stages are on one device.
    """
    pipeline.trace(micro_batches[0], *inputs)
    if pipeline.dispatch_plan is None:
        raise ValueError(
            "measure_dispatch_plan: all stages are on one device, where everything is one program."
        )
    steps = {}
    for chunk_size in possible_chunk_sizes(len(micro_batches), least_chunks=1):
        variant = with_dispatch_plan(pipeline, Chunking(chunk_size))
        steps[chunk_size] = _make_step(variant, state, micro_batches, inputs)
        jax.block_until_ready(steps[chunk_size]())
    medians = time_in_turns(steps, num_steps)
    listed = ", ".join(f"{size} {describe_seconds(seconds)}" for size, seconds in medians.items())
    reason = f"measured, a step by micro-batches per program: {listed}"
    return Chunking(min(medians, key=medians.__getitem__), reason)


def _make_step(
    pipeline: Pipeline, state: PipelineState, micro_batches: Sequence[Any], inputs: Sequence[Any]
) -> Callable[[], Any]:
    """A function that does a step on copies of a state, and returns what the step ends with."""
    pipeline.prepare()
    running = jax.tree.map(jnp.copy, pipeline.place(state))
    placed = pipeline.place_micro_batches(micro_batches)

    def step() -> Any:
        nonlocal running
        running, outputs = pipeline.step(running, placed, *inputs)
        return running, outputs.collected

    return step
