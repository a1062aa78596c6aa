"""Which of the last stage's values are wanted, and whether for each micro-batch or as a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.state import Collected
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline
from ipu_pipeline.ground.shapes import check_dtype

__all__ = ["Collecting", "find_sum_dtype", "make_collecting"]


@dataclass(frozen=True, eq=False)
class Collecting:
    """What is collected from the last stage."""

    places: tuple[int, ...]  # positions among the leaves of what the last stage returns
    has_loss: bool  # whether the loss is collected, too, behind them
    sources: tuple[Source, ...]  # the values
    avals: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes; where values are summed, those of the sums
    is_summed: bool  # whether they are summed over the micro-batches of an execution

    def collect(self, values: Sequence[Any], size: int | None) -> Collected:
        """Makes a `Collected` of the values of one micro-batch or sum (size None), or of `size` stacked."""
        num_outputs = len(self.places)
        return Collected(list(values[:num_outputs]), values[num_outputs] if self.has_loss else None, size)


def make_collecting(
    traced: TracedPipeline,
    outputs: bool | Callable[[Any], Sequence[bool]] = True,
    losses: bool = True,
    is_summed: bool = False,
    sum_dtype: Any = None,
    called: str = "sum_dtype",
) -> Collecting:
    """Works out what is collected."""
    known = list(traced.returned_avals)
    chosen = [bool(outputs)] * len(known)
    if callable(outputs):
        chosen = list(outputs(traced.output_tree.unflatten(known)))
        if len(chosen) != len(known):
            raise ValueError(
                f"collect_outputs must return one boolean for each of the {len(known)} leaves of what the "
                f"last stage returns; it returned {len(chosen)}."
            )
    places = tuple(place for place, is_chosen in enumerate(chosen) if is_chosen)
    has_loss = losses and traced.loss is not None
    sources = [traced.outputs[place] for place in places]
    avals = [known[place] for place in places]
    if has_loss and traced.loss is not None:
        sources.append(traced.loss)
        avals += traced.loss_avals
    if is_summed:
        avals = [
            jax.ShapeDtypeStruct(aval.shape, find_sum_dtype(aval, sum_dtype, called)) for aval in avals
        ]
    return Collecting(places, has_loss, tuple(sources), tuple(avals), is_summed)


def find_sum_dtype(aval: jax.ShapeDtypeStruct, wanted: Any, argument: str) -> np.dtype[Any]:
    """The dtype in which an output is summed over micro-batches."""
    what = f"an output of the last stage, {aval.dtype.name}{list(aval.shape)}"
    is_boolean = aval.dtype == np.bool_
    if not is_boolean and not jnp.issubdtype(aval.dtype, jnp.number):
        raise ValueError(f"{argument}: {what}, cannot be summed; do not collect it (mask it out).")
    if callable(wanted) and not isinstance(wanted, type):
        wanted = wanted(aval)
    if wanted is None and is_boolean:
        raise ValueError(
            f"{argument}: {what}, has no sum of its own dtype; give one, for example int32, which counts."
        )
    dtype = np.dtype(aval.dtype) if wanted is None else check_dtype(wanted, argument)
    order = (jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(one: Any) -> int:
        return next((number for number, kind in enumerate(order) if jnp.issubdtype(one, kind)), -1)

    if rank(dtype) < max(0, rank(aval.dtype)):
        raise ValueError(f"{argument}: {what}, is summed in a dtype that can hold it; got {dtype.name}.")
    return dtype
