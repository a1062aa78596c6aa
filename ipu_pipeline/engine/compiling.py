"""Compiles the programs of a step before its first run, several at a time.

A jitted function compiles at its first call, one after another as the step goes along. Here each is lowered
with the shapes that it will be called with, and XLA compiles them in threads; the calls find them compiled
(JAX keeps an executable with what was lowered).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.dispatches import Dispatch, Plan
from ipu_pipeline.engine.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.residence import Residence

__all__ = ["compile_ahead"]


def compile_ahead(
    plan: Plan,
    order: Sequence[Dispatch],
    prepared: Sequence[Sequence[Any]],
    accumulators: Mapping[str, Any],
    residence: Residence,
    update_functions: Sequence[Any],
    chunk_size: int,
) -> None:
    """Compiles what a step dispatches, and its weight update.

    Args:
      plan: the programs of micro-batches.
      order: what is dispatched: a fused program may not be, where there are few micro-batches.
      prepared: of each, the arguments that stay the same during a step, None for others.
      accumulators: by key.
      residence: where state lives.
      update_functions: the programs of the weight update, jitted.
      chunk_size: how many micro-batches a program handles.
    """
    threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
    compiled: list[Future[Any]] = []

    def start(function: Any, arguments: Sequence[Any]) -> None:
        compiled.append(threads.submit(function.lower(*arguments).compile))

    try:
        used = {template.index for template, _chunks in order}
        results = _start_templates(plan, used, prepared, accumulators, residence, chunk_size, start)
        if residence.updates is not None:
            _start_updates(residence, accumulators, update_functions, results, start)
        for future in compiled:
            future.result()
    finally:  # after an error or an interrupt, what has not begun is not waited for
        threads.shutdown(wait=False, cancel_futures=True)


def _start_templates(
    plan: Plan,
    used: Collection[int],
    prepared: Sequence[Sequence[Any]],
    accumulators: Mapping[str, Any],
    residence: Residence,
    chunk_size: int,
    start: Any,
) -> list[Any]:
    """Starts the programs of micro-batches. Returns what the last stage returns, for one micro-batch."""
    traced = residence.traced
    element = jax.tree.leaves(traced.element)
    slots: list[Any] = [None] * plan.num_slots
    for leaf, row, slot in plan.feed_slots:
        shape = element[leaf].shape if chunk_size == 1 else (chunk_size, *element[leaf].shape)
        slots[slot] = _struct(shape, element[leaf].dtype, row)
    for template in plan.templates.values():  # fused ones come last
        row = template.row
        arguments = list(prepared[template.index])
        for place, key in enumerate(template.accumulators):
            arguments[place] = _struct(accumulators[key].shape, accumulators[key].dtype, row)
        for place, name in template.variables:
            if name in residence.offloaded:
                spec = traced.variables[name]
                arguments[place] = _struct(spec.shape, spec.dtype, row)
        for part in template.parts:
            for place, slot in part.loads:
                arguments[place] = slots[slot]
            for place in (*part.micro_batches, *part.accumulated):
                arguments[place] = _struct((), np.int32, row)
        if template.index in used:
            start(template.function, arguments)
        if len(template.parts) > 1:
            continue
        results = jax.eval_shape(template.function, *arguments)
        (part,) = template.parts
        moved = [
            (place, slot)
            for _row, places, to in part.transfers
            for place, slot in zip(places, to, strict=True)
        ]
        for place, slot in (*part.stores, *moved):
            slots[slot] = results[place].update(sharding=plan.slot_rows[slot].replicated)
    return list(traced.output_avals)


def _start_updates(
    residence: Residence,
    accumulators: Mapping[str, Any],
    functions: Sequence[Any],
    outputs: Sequence[Any],
    start: Any,
) -> None:
    updates = residence.updates
    assert updates is not None
    sent: dict[int, Any] = {}
    for program, function in zip(updates.updates, functions, strict=True):
        row = residence.rows[program.stage]
        arguments = []
        for value in program.arguments:
            if value.kind == UpdateKind.COUNT:
                arguments.append(_struct((), np.int32, row))
                continue
            if value.kind == UpdateKind.PARAMETER:
                known: Any = residence.traced.variables[value.key]
            elif value.kind == UpdateKind.GRADIENT:
                known = accumulators[value.key]
            elif value.kind == UpdateKind.STATE:
                known = updates.state_leaves[value.key].aval
            elif value.kind == UpdateKind.OUTPUT:
                known = outputs[value.key]
            else:
                known = sent[value.key]
            arguments.append(_struct(known.shape, known.dtype, row))
        start(function, arguments)
        for value, result in zip(program.results, jax.eval_shape(function, *arguments), strict=True):
            if value.kind == UpdateKind.SENT:
                sent[value.key] = result


def _struct(shape: Sequence[int], dtype: Any, row: Row) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row.replicated)
