"""Finds dependencies in a jaxpr, and cuts programs out of a larger one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.jaxprs.flat import (
    Atom,
    Equation,
    ExtractedJaxpr,
    FlatJaxpr,
    Var,
    aval_struct,
    flatten,
    fresh,
    make_extracted,
)
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["any_equation", "can_reduce", "dependents", "extract", "find_uniform", "reduce", "split_results"]

_SAME_ELEMENTS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy")


def any_equation(equation: Equation) -> bool:
    """Returns True; makes `extract` keep all effects."""
    del equation
    return True


def dependents(flat: FlatJaxpr, roots: Iterable[Var]) -> set[Var]:
    """All variables whose value depends on one of `roots`, including the roots.

    A scan's outputs are looked at one by one: an output that its body computes without the roots does not
    depend on them.
    """
    found = set(roots)
    for equation in flat.equations:
        if _reads(equation, found):
            outputs = equation.outvars
            if len(outputs) > 1 and equation.primitive.name == "scan":
                outputs = [
                    var for place, var in enumerate(outputs) if _reads(reduce(equation, {place}), found)
                ]
            found.update(outputs)
    return found


def _reads(equation: Equation | None, variables: Collection[Var]) -> bool:
    return equation is not None and any(
        not isinstance(atom, jax_core.Literal) and atom in variables for atom in equation.invars
    )


def find_uniform(flat: FlatJaxpr) -> dict[int, np.ndarray[Any, Any]]:
    """The results all of whose elements are one known number, as zeros are: by place, the number."""
    known: dict[Var, Any] = {}

    def find(atom: Atom) -> Any:
        if not isinstance(atom, jax_core.Literal):
            return known.get(atom)
        dtype: Any = aval_struct(atom.aval).dtype
        return np.asarray(atom.val, dtype) if isinstance(dtype, np.dtype) else None

    for equation in flat.equations:
        if equation.primitive.name in _SAME_ELEMENTS and (value := find(equation.invars[0])) is not None:
            known[equation.outvars[0]] = value
    found = {place: find(atom) for place, atom in enumerate(flat.outputs)}
    return {place: value for place, value in found.items() if value is not None and value.ndim == 0}


def can_reduce(equation: Equation) -> bool:
    """Whether `reduce` can be asked for some of the equation's outputs."""
    return equation.primitive in jax_compat.dce_rules


def reduce(equation: Equation, places: Collection[int]) -> Equation | None:
    """Drops an equation's outputs that are not at `places`, and what only they need.

    An equation that cannot be reduced stays as it is.
    """
    reduced: Equation | None = jax_compat.reduce(
        equation, [place in places for place in range(len(equation.outvars))]
    )
    return reduced


def extract(
    flat: FlatJaxpr,
    outputs: Sequence[Atom],
    given: Iterable[Var] = (),
    keep_effects_of: Callable[[Equation], bool] | None = None,
) -> ExtractedJaxpr:
    """The smallest program that computes `outputs`."""
    given = set(given)
    needed = {atom for atom in outputs if not isinstance(atom, jax_core.Literal)}
    kept: list[Equation] = []
    computed: list[Var] = []
    for equation in reversed(flat.equations):
        made = [var for var in equation.outvars if var not in given]
        is_kept = any(var in needed for var in made) or (
            equation.effects and keep_effects_of is not None and keep_effects_of(equation)
        )
        computed += reversed(equation.outvars)
        is_more = any(v not in needed or v in given for v in equation.outvars)
        if is_kept and equation.primitive.name == "scan" and is_more:
            places = {
                place for place, var in enumerate(equation.outvars) if var in needed and var not in given
            }
            equation = reduce(equation, places) or equation
        if is_kept:
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, jax_core.Literal))
    kept.reverse()
    # An equation with several outputs may be kept for one of them while another one is given. The given
    # one is then renamed where it is made, so that readers take the argument.
    renamed = [
        equation.replace(outvars=[fresh([v])[0] if v in given else v for v in equation.outvars])
        for equation in kept
    ]
    inputs = [var for var in flat.inputs if var in needed]
    inputs += [var for var in reversed(computed) if var in given and var in needed]
    constants = {var: value for var, value in flat.constants.items() if var in needed}
    return make_extracted(constants, inputs, renamed, outputs)


def split_results(closed_jaxpr: Any) -> list[Callable[..., Any]]:
    """For each result of a jaxpr, a jitted function that takes all arguments and computes nothing else."""
    flat = flatten(closed_jaxpr)

    def split(output: Atom) -> Callable[..., Any]:
        @jax.jit
        def compute(*arguments: Any) -> Any:
            program = extract(flat, [output])
            given = dict(zip(flat.inputs, arguments, strict=True))
            return program(*(given[var] for var in program.inputs))[0]

        return compute

    return [split(output) for output in flat.outputs]
