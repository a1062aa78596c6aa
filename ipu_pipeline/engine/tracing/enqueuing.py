"""Values that a traced function hands out while its program runs, to somebody outside of the program.

`enqueue` leaves a marker in the jaxpr being traced, as variables do, and notes in the function's frame what
it marks. What traces the function turns the markers into outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine.tracing.frames import Enqueued, Frame
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_compat

__all__ = ["enqueue", "enqueue_p", "first_leaves"]

enqueue_p = jex_core.Primitive("enqueue")


@enqueue_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _enqueue_abstract(*leaves: Any, index: int, serial: int) -> Any:
    del leaves, index, serial
    return jax_compat.shaped_array((), np.dtype(np.int32))  # nobody reads it; a marker needs a result


jax_compat.end_derivatives(enqueue_p)


def enqueue(frame: Frame, target: Any, value: Any) -> None:
    """Records what the function being traced enqueues, at this point of its trace.

    Args:
      frame: the function's, which may enqueue. If it is traced again, nothing is recorded.
      target: whom it is for.
      value: a pytree of arrays. Nothing is differentiated through it.
    """
    if frame.is_traced_again:
        return
    assert frame.enqueued is not None
    leaves, tree = jax.tree.flatten(value)
    avals = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    frame.enqueued.append(Enqueued(target, tree, avals))
    leaves = [jax_compat.as_operand(leaf) for leaf in leaves]
    enqueue_p.bind(*leaves, index=len(frame.enqueued) - 1, serial=next(serial_numbers))


def first_leaves(entries: Sequence[Enqueued]) -> list[int]:
    """The number of each entry's first leaf, if leaves are numbered through; and at the end how many."""
    return list(itertools.accumulate((len(entry.avals) for entry in entries), initial=0))
