"""One loss in place of several that train different variables.

The gradient of the sum of all losses would be another one: a loss may depend on variables that another one
trains. So what computes a loss from those is copied, with their gradients stopped, and the sum is that of
the copies. XLA computes a copy and its original once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.flat import Atom, Equation, FlatJaxpr, Var, aval_struct, flatten, fresh
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["join_losses"]


def join_losses(
    flat: FlatJaxpr, losses: Sequence[Atom], frozen: Sequence[Collection[Var]]
) -> tuple[FlatJaxpr, Atom]:
    """Adds a loss whose gradients are those of several losses together.

    Returns:
      The function with more equations, and the loss among their results.
    """
    equations = list(flat.equations)
    parts = [_stop(flat, equations, loss, own) for loss, own in zip(losses, frozen, strict=True)]
    dtype = functools.reduce(jnp.promote_types, [part.aval.dtype for part in parts])
    total, constants = _append(
        equations, lambda *values: sum(value.astype(dtype) for value in values), parts, equations[-1]
    )
    return FlatJaxpr(flat.inputs, equations, flat.outputs, {**flat.constants, **constants}), total


def _stop(flat: FlatJaxpr, equations: list[Any], loss: Atom, frozen: Collection[Var]) -> Atom:
    """Appends a copy of what computes a loss from frozen inputs. Returns the loss of the copy."""
    known: dict[Any, Any] = {}
    for equation in _needed_for(flat, loss):
        read = [atom for atom in equation.invars if not isinstance(atom, jax_core.Literal)]
        for var in read:
            if var in frozen and var not in known:
                known[var], _constants = _append(equations, jax.lax.stop_gradient, [var], equation)
        if not any(var in known for var in read):
            continue
        if equation.effects:
            raise NotImplementedError(
                "minimize was called several times, and what computes a loss from variables that another "
                "one trains prints or calls back within a loop, a branch or jax.checkpoint "
                f"({equation.primitive.name}), which would happen twice. Do that outside, or train in two "
                "loops."
            )
        copies = fresh(equation.outvars)
        known.update(zip(equation.outvars, copies, strict=True))
        invars = [
            atom if isinstance(atom, jax_core.Literal) else known.get(atom, atom)
            for atom in equation.invars
        ]
        equations.append(equation.replace(invars=invars, outvars=copies))
    return loss if isinstance(loss, jax_core.Literal) else known.get(loss, loss)


def _needed_for(flat: FlatJaxpr, loss: Atom) -> list[Equation]:
    """The equations that a loss depends on, in their order."""
    needed, found = set() if isinstance(loss, jax_core.Literal) else {loss}, []
    for equation in reversed(flat.equations):
        if any(var in needed for var in equation.outvars):
            found.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, jax_core.Literal)}
    return found[::-1]


def _append(
    equations: list[Any], function: Any, arguments: Sequence[Atom], like: Equation
) -> tuple[Atom, dict[Any, Any]]:
    """Appends a function's equations, in the scopes of another one. Returns its result and constants."""
    avals = [aval_struct(atom.aval) for atom in arguments]
    added = flatten(jax.make_jaxpr(function)(*avals))
    known: dict[Any, Any] = dict(zip(added.inputs, arguments, strict=True))
    for equation in added.equations:
        invars = [
            atom if isinstance(atom, jax_core.Literal) else known.get(atom, atom)
            for atom in equation.invars
        ]
        equations.append(jax_compat.in_place_of(like, equation.replace(invars=invars)))
    (result,) = added.outputs
    return known.get(result, result), added.constants
