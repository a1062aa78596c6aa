"""Values that a traced function hands out of its program while the program runs.

`enqueue` leaves a marker in the jaxpr being traced, as variables do, and notes in the function's frame what
it marks. What traces the function turns the markers into outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.tracing.frames import Enqueued, Frame, OutsideOfBodyError, current_frame
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["enqueue", "enqueue_p", "enqueue_to", "find_leaves", "first_leaves"]

enqueue_p = jax_core.Primitive("enqueue")


@enqueue_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _enqueue_abstract(*leaves: Any, index: int, serial: int) -> Any:
    del leaves, index, serial
    return jax_compat.shaped_array((), np.dtype(np.int32))  # never read; a marker needs a result


jax_compat.end_derivatives(enqueue_p)


def enqueue(frame: Frame, target: Any, value: Any) -> None:
    """Records what the function being traced enqueues, at this point of its trace."""
    if frame.is_traced_again:
        return
    assert frame.enqueued is not None
    leaves, tree = jax.tree.flatten(value)
    avals = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    frame.enqueued.append(Enqueued(target, tree, avals))
    leaves = [jax_compat.as_operand(leaf) for leaf in leaves]
    enqueue_p.bind(*leaves, index=len(frame.enqueued) - 1, serial=next(serial_numbers))


def enqueue_to(target: Any, value: Any, what: str, as_array: Callable[[Any], jax.Array]) -> None:
    """Enqueues to a target that takes one element of each stage, iteration or weight update."""
    frame = current_frame(what)
    if frame.enqueued is None and not frame.is_traced_again:
        raise OutsideOfBodyError(
            f"{what} was called in {frame.place}. Call it in a stage of a pipeline, "
            "in the update of its optimizer, or in the body of a loop; ipu.loops.repeat(1, ...) runs a "
            "body once."
        )
    if any(entry.target is target for entry in frame.enqueued or ()):
        raise ValueError(
            f"An {what.partition('.')[0]} can be enqueued to only once in a program: enqueue a tuple or "
            "dict, or use a queue for each value."
        )
    if not jax.tree.leaves(value):
        raise ValueError(f"{what}: value has no arrays; there is nothing to enqueue.")
    enqueue(frame, target, jax.tree.map(as_array, value))


def find_leaves(entries: Sequence[Enqueued], kind: type) -> list[tuple[Enqueued, slice]]:
    """The entries for targets of a kind, and the places of their leaves among those of all entries."""
    return [
        (entry, slice(first, first + len(entry.avals)))
        for entry, first in zip(entries, first_leaves(entries), strict=False)
        if isinstance(entry.target, kind)
    ]


def first_leaves(entries: Sequence[Enqueued]) -> list[int]:
    """The number of each entry's first leaf, if leaves are numbered through; last, the number of leaves."""
    return list(itertools.accumulate((len(entry.avals) for entry in entries), initial=0))
