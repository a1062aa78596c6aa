"""`checkify.check` in stages: the errors become values that stages hand out, read when a step has run.

A jaxpr with checks cannot be compiled as it is. JAX makes one of it that returns the error beside the
results, at any depth of loops and conditionals, and with the derivatives that the results had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.state import Handed
from ipu_pipeline.engine.tracing.enqueuing import enqueue, find_leaves
from ipu_pipeline.engine.tracing.frames import Enqueued, Frame
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["UserChecks", "find_failed", "hands_out_checks", "with_checks_handed_out"]


@dataclass(frozen=True)
class UserChecks:
    """Stands for the errors of a stage among what stages hand out."""

    place: str


def with_checks_handed_out(closed_jaxpr: Any, frame: Frame) -> Any:
    """Makes a stage's jaxpr hand out the error of its checks for each micro-batch."""
    checked = jax_compat.with_errors_of_checks(jax_core.jaxpr_as_fun(closed_jaxpr))

    def call(*arguments: Any) -> list[Any]:
        error, results = checked(*arguments)
        enqueue(frame, UserChecks(frame.place), jax.tree.map(jax.numpy.asarray, error))
        return list(results)

    return jax.make_jaxpr(call)(*closed_jaxpr.in_avals)


def hands_out_checks(entries: Sequence[Enqueued]) -> bool:
    """Whether stages hand out errors of checks."""
    return any(isinstance(entry.target, UserChecks) for entry in entries)


def find_failed(
    entries: Sequence[Enqueued], handed: Sequence[Handed], num_replicas: int
) -> Exception | None:
    """Finds the first micro-batch of which a check failed. Waits for the checks.

    Returns:
      The error, which names stage and micro-batch; None if there is none.
    """
    for entry, own in find_leaves(entries, UserChecks):
        number = 0
        for part in handed:
            # One after another as in the data: micro-batches, and within each of them the replicas.
            leaves = [
                np.asarray(leaf).reshape(-1, *aval.shape)[: (part.size or 1) * num_replicas]
                for leaf, aval in zip(part.leaves[own], entry.avals, strict=True)
            ]
            for row in zip(*leaves, strict=True):
                message = entry.tree.unflatten(row).get()
                if message is not None:
                    return jax_compat.make_check_error(
                        f"{message}\nThis happened in {entry.target.place}, micro-batch {number}."
                    )
                number += 1
    return None
