"""Counts the operations of a function, and estimates by counts what stages take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.inspect.facts import PipelineDetails
from ipu_pipeline.engine.jaxprs.costs import count_operations, count_primitives
from ipu_pipeline.engine.planning.choosing import HOST_SECONDS, nominal_speed
from ipu_pipeline.engine.schedules.costs import Costs, Edge
from ipu_pipeline.engine.tracing import frames

__all__ = ["Work", "count_costs", "count_work"]

_PER_TRAINED = 10.0  # operations of a weight update per element


class Work(NamedTuple):
    """The operations of a function.

    Attributes:
      num_primitives: the number of JAX primitives, before XLA fuses any.
      num_flop: estimated floating-point operations, see `jaxprs.costs.count_operations`.
    """

    num_primitives: int
    num_flop: float


def count_work(function: Callable[..., Any], *arguments: Any) -> Work:
    """Traces a function as part of a stage, and counts its operations. Runs nothing.

    Example:
      >>> engine.inspect.count_work(lambda x: x @ x, np.ones([64, 64], np.float32))
      Work(num_primitives=1, num_flop=524288.0)

    Args:
      function: the function; it may use `get_variable` and `next_rng_key`.
      *arguments: its arguments, or their shapes and dtypes.
    """
    stage = frames.Frame(frames.ProgramNames(), training=False, place="an operation", is_stage=True)
    with frames.frame(stage):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return Work(count_primitives(jaxpr), count_operations(jaxpr))


def count_costs(details: PipelineDetails) -> Costs:
    """Estimates the costs of a pipeline's stages from counted operations, in seconds.

    Transfers are included only if each stage has its own device, because the bytes of stages that share a
    device are not known separately.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(4)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> costs = engine.inspect.count_costs(engine.inspect.find_facts(pipeline))
      >>> costs.num_stages
      2
    """
    speed, stages = nominal_speed("cpu"), details.stages
    stage_of = {stage.ipu: stage.index for stage in stages}
    is_told_apart = len(stage_of) == len(stages)
    transfers: dict[Edge, float] = {
        (stage_of[edge.source], stage_of[edge.target]): speed.per_transfer
        + (edge.num_forward_bytes + edge.num_backward_bytes) * speed.per_byte
        for edge in details.edges
        if is_told_apart and edge.source is not None
    }
    return Costs.of(
        len(stages),
        forward=[stage.forward_operations * speed.per_operation + speed.per_dispatch for stage in stages],
        backward=[
            stage.backward_operations * speed.per_operation
            + (0.0 if stage.is_fused or not stage.backward_operations else speed.per_dispatch)
            for stage in stages
        ],
        weight_gradients=[
            stage.weight_operations * speed.per_operation
            if stage.is_halved
            else stage.backward_operations * speed.per_operation / 2
            for stage in stages
        ],
        update=[_PER_TRAINED * stage.num_trained * speed.per_operation for stage in stages],
        transfer=transfers,
        host=HOST_SECONDS,
        is_fused=stages[-1].is_fused,
    )
