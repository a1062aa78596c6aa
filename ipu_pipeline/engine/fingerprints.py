"""What a pipeline is, in a few texts that several processes compare before its first step.

Functions cannot be compared, but what was traced of them: which operations, in which order, on which
shapes. What differs only in numbers that functions hold, as a learning rate, is not found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from ipu_pipeline.engine.planning.dispatch_plans import DispatchPlan
from ipu_pipeline.engine.schedules.checking import Timetable

__all__ = ["agree", "describe"]


def agree(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: DispatchPlan | None,
    devices: Sequence[Any],
) -> None:
    """Compares a pipeline with that of the other processes, if there are any; all of them call it.

    Args:
      built: its stages and optimizer.
      options: what else was said.
      mapping: the IPU of each stage.
      timetable: of a step.
      plan: how actions become dispatches; None where everything is one program.
      devices: of the IPUs of all replicas.

    Raises:
      ValueError: it is not the same in all processes.
      ProcessError: another process has ended, or does not go on.
    """
    others = peers.current()
    if others is not None:
        where = ", ".join(f"{device.platform} {device.id}" for device in devices)
        others.agree(
            "pipeline", {**describe(built, options, mapping, timetable, plan), "the devices": where}
        )


def describe(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: DispatchPlan | None,
) -> dict[str, str]:
    """What a pipeline is, by what each text is about; arguments as in `agree`."""
    traced, updates = built.traced, built.updates
    found = {
        "the number of stages": str(len(traced.stages)),
        "device_mapping": str(list(mapping)),
        "num_replicas": str(options.num_replicas),
        "num_micro_batches": str(options.num_micro_batches),
        "the micro-batch": _describe_leaves(traced.element),
        "the inputs of a step": _describe_leaves(traced.inputs),
        "the schedule": _describe_schedule(options.schedule, timetable),
        "micro-batches per program": str(None if plan is None else plan.chunk_size),
        "the reduction": str(options.reduction),
        "recompute": str(options.recompute),
        "offload": str(options.offload),
        "num_serialized": str(options.num_serialized),
        "tensor_parallel": f"{options.num_devices_per_ipu} devices, {dict(built.partitions)}",
    }
    for stage in traced.stages:
        found[f"the variables of {stage.place}"] = ", ".join(map(repr, stage.variables)) or "none"
        lines = list(_describe_operations(stage.flat.equations))
        found[f"the program of {stage.place}"] = f"{len(lines)} operations ({_digest(lines)})"
    if updates is not None:
        leaves = [f"{leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in updates.state_leaves]
        found["the optimizer's state"] = ", ".join(leaves) or "none"
        found["the programs of the weight update"] = ", ".join(program.name for program in updates.updates)
    return found


def _describe_leaves(tree: Any) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)) or "nothing"


def _describe_schedule(schedule: Any, timetable: Timetable) -> str:
    lines = [str(row) for row in timetable.rows]
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__)
    return f"{name} ({_digest(lines)})"


def _describe_operations(equations: Iterable[Any]) -> Iterator[str]:
    for equation in equations:
        operands = [str(v.val) if isinstance(v, jex_core.Literal) else v.aval for v in equation.invars]
        results = [variable.aval for variable in equation.outvars]
        yield f"{equation.primitive} {[*map(_of_aval, operands)]} {[*map(_of_aval, results)]}"
        for body in jex_core.jaxprs_in_params(equation.params):
            yield from _describe_operations(body.eqns)


def _of_aval(value: Any) -> str:
    return (
        value if isinstance(value, str) else f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}"
    )


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
