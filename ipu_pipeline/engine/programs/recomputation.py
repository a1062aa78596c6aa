"""Recomputation: a stage in segments. The backward gets their inputs, and computes the rest again.

Without checkpoints a stage is one segment, and only its inputs are kept. `recomputation_checkpoint` marks
more values to keep; in the mode RecomputeAndBackpropagateInterleaved the stage is cut there. The backward
then goes through the segments from the last to the first. It recomputes each one when the gradients of what
the segment returns have arrived, so the values that two segments need are never in memory at the same time.

An equation with effects and results (`io_callback`, a loop that prints) runs only once: it is
differentiated as without recomputation, and its results are kept.

A segment is `jax.checkpoint` of a jaxpr. This puts barriers into the backward, so that XLA does not use
values of the forward instead where both are in one program. On a CPU, XLA drops these barriers before it
looks for common subexpressions (seen with jaxlib 0.10.2). The backward of a segment is therefore put into a
conditional there, whose predicate is always true although XLA cannot see that. So is that of a user's own
`jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing.stage_markers import mark_of
from ipu_pipeline.ground import jax_core


def isolate(equation: Any, inputs: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
    """A rule for `jaxprs.flatten` that separates what is recomputed from the forward, also on CPUs."""
    if equation.primitive.name not in jaxprs.CHECKPOINTS or not equation.params["differentiated"]:
        return None
    avals = [jaxprs.aval_struct(atom.aval) for atom in equation.invars]
    floats = [n for n, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating) and aval.size]
    if not floats:
        return None
    body = jax_core.close(equation.params["jaxpr"])

    def recompute(*values: Any) -> list[Any]:
        results: list[Any] = equation.primitive.bind(*values, **equation.params)
        return results

    def recompute_in_conditional(*values: Any) -> list[Any]:
        first = values[floats[0]].ravel()[0]
        bits = jax.lax.bitcast_convert_type(first, f"uint{8 * first.dtype.itemsize}")
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in body.out_avals]
        results: list[Any] = jax.lax.cond(
            (bits | bits.dtype.type(1)) != bits.dtype.type(0),
            lambda operands: jax_core.jaxpr_as_fun(body)(*operands),
            lambda _operands: zeros,
            values,
        )
        return results

    def by_platform(*values: Any) -> list[Any]:
        results: list[Any] = jax.lax.platform_dependent(
            *values, cpu=recompute_in_conditional, default=recompute
        )
        return results

    return inline(jax.make_jaxpr(by_platform)(*avals), inputs)


@dataclass(frozen=True, eq=False)
class _Segment:
    """A part of a stage."""

    function: Callable[..., list[Any]]  # takes the values of `inputs`, returns those of `outputs`
    inputs: Sequence[Any]  # inputs of the stage, and values kept by earlier segments
    outputs: Sequence[Any]  # the stage's outputs that this segment computes, and what it keeps
    saved: Sequence[Any]  # what later segments take instead of computing it


def in_segments(flat: jaxprs.FlatJaxpr, is_cut: bool) -> Callable[..., list[Any]]:
    """Makes a stage compute its values again when it is differentiated."""
    marks = _find_marks(flat) if is_cut else []
    segments = _cut(flat, sorted([*marks, *_find_effects(flat)], key=lambda mark: mark.end))
    saved = {var for segment in segments for var in segment.saved}
    printing = jaxprs.extract(flat, [], saved, lambda equation: saved.isdisjoint(equation.outvars))

    def call(*arguments: Any) -> list[Any]:
        values = dict(zip(flat.inputs, arguments, strict=True))
        for segment in segments:
            results = segment.function(*(values[var] for var in segment.inputs))
            values.update(zip(segment.outputs, results, strict=True))
        printing(*(values[var] for var in printing.inputs))
        return [values[atom] if jaxprs.is_var(atom) else atom.val for atom in flat.outputs]

    return call


class _Mark(NamedTuple):
    """A place where a stage is cut."""

    end: int  # the number of equations before it
    saved: list[Any]  # variables that segments behind it take instead of computing them
    is_recomputed: bool = True  # whether the segment that it ends is computed again


def _find_marks(flat: jaxprs.FlatJaxpr) -> list[_Mark]:
    """The checkpoints."""
    marks: list[_Mark] = []
    before = None
    for number, equation in enumerate(flat.equations):
        mark = mark_of(equation)
        if mark is not None:
            earlier: list[Any] = marks.pop().saved if mark == before else []
            marks.append(_Mark(number + 1, [*earlier, *equation.outvars]))
        before = mark
    return marks


def _find_effects(flat: jaxprs.FlatJaxpr) -> list[_Mark]:
    """Cuts around each equation that has effects and results, which must not run again."""
    read_ids = {id(atom) for equation in flat.equations for atom in equation.invars}
    read_ids |= {id(atom) for atom in flat.outputs}
    computed: set[Any] = set()
    marks = []
    for number, equation in enumerate(flat.equations):
        if equation.effects and any(id(var) in read_ids for var in equation.outvars):
            operands = [var for var in jaxprs.variables_in(equation.invars) if var in computed]
            marks.append(_Mark(number, operands))
            marks.append(_Mark(number + 1, list(equation.outvars), is_recomputed=False))
        computed.update(equation.outvars)
    return marks


def _cut(flat: jaxprs.FlatJaxpr, marks: Sequence[_Mark]) -> list[_Segment]:
    returned = set(jaxprs.variables_in(flat.outputs))
    segments = []
    saved: set[Any] = set()
    first = 0
    for mark in [*marks, _Mark(len(flat.equations), [])]:
        computed = [var for equation in flat.equations[first : mark.end] for var in equation.outvars]
        results = returned.union(mark.saved) - saved
        outputs = [var for var in dict.fromkeys([*computed, *mark.saved]) if var in results]
        part = jaxprs.extract(flat, outputs, saved)
        function = jax.checkpoint(part.__call__) if mark.is_recomputed else part.__call__
        segments.append(_Segment(function, part.inputs, outputs, mark.saved))
        saved.update(mark.saved)
        first = mark.end
    return segments
