"""Reads a plan with shapes for values: what every register will hold, before anything has run.

All micro-batches of some shapes are alike, so each block is followed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipu_pipeline.engine.devices.device_groups import HOST_MEMORY, WHOLE, divided_in_replica
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import Instruction, Op, Plan, Program, Value

__all__ = ["find_shapes", "trace"]


def find_shapes(
    plan: Plan,
    layout: Layout,
    given: Callable[[Value], Any],
    launch: Callable[[Program, Sequence[Any]], Sequence[Any]] | None = None,
) -> dict[Value, Any]:
    """The shape, dtype and sharding of each value."""
    known: dict[Value, Any] = {}
    launch = launch or trace

    def read(value: Value) -> Any:
        if value not in known:
            known[value] = given(value)
        return known[value]

    for block in dict.fromkeys(numbered.block for numbered in plan.blocks):
        for one in block.code:
            if one.op in (Op.FEED, Op.COUNT):
                made = list(map(given, one.writes))
            elif one.op is Op.RUN:
                assert one.program is not None
                made = list(launch(one.program, list(map(read, one.reads))))
            elif one.op in (Op.WAIT, Op.COLLECT):
                made = []
            else:
                made = _move(one, layout, list(map(read, one.reads)))
            known.update(zip(one.writes, made, strict=True))
    return known


def trace(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """The shapes of a program's results."""
    found = jax.eval_shape(program.jitted, *arguments)
    given = program.shardings
    shardings = given if isinstance(given, (list, tuple)) else [given] * len(found)
    whole = program.group.replicated
    return [made.update(sharding=own or whole) for made, own in zip(found, shardings, strict=True)]


def _move(one: Instruction, layout: Layout, values: Sequence[Any]) -> list[Any]:
    """What instructions that compute nothing make of shapes."""
    if one.op is Op.SPLIT:
        number = len(one.writes) // len(values)
        values = [value for value in values for _part in range(number)]
    elif one.op is Op.JOIN:
        values = values[:: len(values) // len(one.writes)]
    found = []
    for value, there in zip(values, one.writes, strict=True):
        value = value.wait() if hasattr(value, "wait") else value
        old, partition = value.sharding, WHOLE
        if isinstance(old, jax.sharding.NamedSharding):
            is_apart = one.op in (Op.LOAD, Op.STORE) and old.mesh == there.group.replicated.mesh
            is_apart = is_apart or one.op is Op.SAME
            partition = old.spec if is_apart else divided_in_replica(old)
            if one.op is Op.SEND or (one.op is Op.LOAD and not is_apart):
                partition = layout.partition(there)
        sharding = there.group.divided(partition)
        kind = HOST_MEMORY if there.is_away else there.group.replicated.memory_kind
        found.append(
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding.with_memory_kind(kind))
        )
    return found
