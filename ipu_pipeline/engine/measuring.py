"""Measures the fastest dispatch plan of a pipeline, instead of estimating it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.planning.choosing import describe_seconds, possible_chunk_sizes
from ipu_pipeline.engine.planning.chunking import Chunking
from ipu_pipeline.engine.state import PipelineState

__all__ = ["measure_dispatch_plan"]


def measure_dispatch_plan(
    pipeline: Pipeline, state: PipelineState, micro_batches: Sequence[Any], *inputs: Any, num_steps: int = 5
) -> Chunking:
    """Finds the dispatch plan with which a pipeline's steps are fastest, on this machine and now.

    It compiles and runs every possible plan, which takes long. The result can be kept, and given to a
    pipeline as `dispatch_plan`. Chunks are tried without regard to the memory that they take.

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
      pipeline: a pipeline with a fixed number of micro-batches, over several devices.
      state: as for `Pipeline.step`; it stays as it is.
      micro_batches: the micro-batches of one step.
      *inputs: as for `Pipeline.step`.
      num_steps: the number of steps timed with each plan, after one that compiles; the median counts.

    Raises:
      ValueError: all stages are on one device.
    """
    pipeline.trace(micro_batches[0], *inputs)
    if pipeline.dispatch_plan is None:
        raise ValueError(
            "measure_dispatch_plan: all stages are on one device, where everything is one program."
        )
    medians: dict[int, float] = {}
    for chunk_size in possible_chunk_sizes(len(micro_batches)):
        other = pipeline.with_dispatch_plan(Chunking(chunk_size))
        medians[chunk_size] = _time(other, state, micro_batches, inputs, num_steps)
    listed = ", ".join(f"{size} {describe_seconds(seconds)}" for size, seconds in medians.items())
    reason = f"measured, a step by micro-batches per program: {listed}"
    return Chunking(min(medians, key=medians.__getitem__), reason)


def _time(
    pipeline: Pipeline,
    state: PipelineState,
    micro_batches: Sequence[Any],
    inputs: Sequence[Any],
    num_steps: int,
) -> float:
    """The median of the seconds that a step takes."""
    pipeline.prepare()
    running = jax.tree.map(jnp.copy, pipeline.place(state))
    placed = pipeline.place_micro_batches(micro_batches)
    taken = []
    for _step in range(num_steps + 1):
        begin = time.perf_counter()
        running, outputs = pipeline.step(running, placed, *inputs)
        jax.block_until_ready((running, outputs.collected))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])
