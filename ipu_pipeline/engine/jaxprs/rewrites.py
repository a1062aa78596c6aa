"""Rewrites of flat jaxprs: scans over layers taken apart, and one loss in place of several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.flat import (
    Atom,
    Equation,
    FlatJaxpr,
    InlineFunction,
    Var,
    aval_struct,
    close,
    flatten,
    fresh,
    is_var,
    replace_atoms,
    variables_in,
)
from ipu_pipeline.ground import jax_compat, jax_core

# Scans over layers are taken apart, so that a model can be cut between two of their iterations.
#
# A scan over layers is one whose iterations have parameters of their own, stacked on a first axis: the
# scan's `xs` has an input that is a parameter, or such an input in another dtype. Its iterations are
# written out, and the parameter becomes as many inputs as there are iterations. Other scans, over time or
# over parts of a sequence, share their parameters and stay as they are. So does one with more iterations
# than models have layers.

_MOST_LAYERS = 256  # that a scan over layers may have; more iterations are over something else
_CASTS = ("convert_element_type", "copy", "copy_p")


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A jaxpr without scans over layers.

    Attributes:
      flat: the jaxpr. Its inputs are the parameters and values that stay whole, in the original order, and
        then the slices of the others.
      origins: for each input the number of the original's, and which slice of it; None for all of it.
    """

    flat: FlatJaxpr
    origins: list[tuple[int, int | None]]


def unroll_layers(flat: FlatJaxpr, parameters: Collection[Var]) -> Unrolled:
    """Writes out the iterations of all scans over layers."""
    casts = _find_casts(flat, parameters)
    sizes: dict[Var, int] = {}  # parameter -> its number of slices
    for equation in flat.equations:
        for var in _stacked(equation, casts):
            sizes[casts[var][0]] = equation.params["length"]
    slices = {
        var: [
            jax_core.Var(jax_compat.shaped_array(var.aval.shape[1:], var.aval.dtype)) for _n in range(size)
        ]
        for var, size in sizes.items()
    }

    def rule(equation: Equation, inputs: list[Atom], inline: InlineFunction) -> list[Atom] | None:
        is_over_layers = bool(_stacked(equation, casts))
        return _unroll(equation, inputs, inline, casts, slices) if is_over_layers else None

    unrolled = flatten(close(flat).closed_jaxpr, rule)
    unrolled = dataclasses.replace(unrolled, equations=_used(unrolled.equations, unrolled.outputs))
    readers = (*(equation.invars for equation in unrolled.equations), unrolled.outputs)
    read_atoms = {var for atoms in readers for var in variables_in(atoms)}
    equations: list[Equation] = []
    for old, new in zip(flat.inputs, unrolled.inputs, strict=True):
        if old in slices and new in read_atoms:  # what reads all of it
            equations += _stack(slices[old], new)
    full = [
        (number, var) for number, var in enumerate(unrolled.inputs) if flat.inputs[number] not in slices
    ]
    parts = [
        (number, place, var)
        for number, old in enumerate(flat.inputs)
        for place, var in enumerate(slices.get(old, ()))
    ]
    return Unrolled(
        FlatJaxpr(
            [*(var for _number, var in full), *(var for *_place, var in parts)],
            equations + unrolled.equations,
            unrolled.outputs,
            unrolled.constants,
        ),
        [*((number, None) for number, _var in full), *((number, place) for number, place, _var in parts)],
    )


def _find_casts(flat: FlatJaxpr, parameters: Collection[Var]) -> dict[Var, tuple[Var, list[Equation]]]:
    """The variables that are parameters, or these in other dtypes, with the equations that cast them."""
    chains: dict[Var, tuple[Var, list[Equation]]] = {
        var: (var, []) for var in flat.inputs if var in parameters
    }
    for equation in flat.equations:
        source = equation.invars[0] if equation.primitive.name in _CASTS else None
        if source is not None and is_var(source) and source in chains:
            origin, casts = chains[source]
            chains[equation.outvars[0]] = origin, [*casts, equation]
    return chains


def _stacked(equation: Equation, casts: Collection[Var]) -> list[Var]:
    """The stacked parameters of a scan; none if it is not one over layers, or has no iterations."""
    if equation.primitive.name != "scan" or not 0 < equation.params["length"] <= _MOST_LAYERS:
        return []
    params = equation.params
    xs = equation.invars[sum(jax_core.scan_counts(params)) :]
    return [atom for atom in xs if is_var(atom) and atom in casts]


def _unroll(
    equation: Equation,
    inputs: list[Atom],
    inline: InlineFunction,
    casts: dict[Var, tuple[Var, list[Equation]]],
    slices: dict[Var, list[Var]],
) -> list[Atom]:
    """Writes out the iterations of a scan."""
    params = equation.params
    body, length = params["jaxpr"], params["length"]
    num_consts, num_carry = jax_core.scan_counts(params)
    first = num_consts + num_carry
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:first], inputs[first:]
    originals = equation.invars[first:]

    def compute(function: Callable[..., Any], *atoms: Atom) -> Atom:
        return inline(jax.make_jaxpr(function)(*(aval_struct(atom.aval) for atom in atoms)), list(atoms))[0]

    def element(number: int, original: Atom, atom: Atom) -> Atom:
        if not is_var(original) or original not in casts:
            return compute(lambda value: jax.lax.index_in_dim(value, number, keepdims=False), atom)
        origin, equations = casts[original]
        part: Atom = slices[origin][number]
        for cast in equations:
            dtype = cast.outvars[0].aval.dtype
            part = compute(lambda value, dtype=dtype: jax.lax.convert_element_type(value, dtype), part)
        return part

    stacked: list[list[Atom]] = [[] for _result in equation.outvars[num_carry:]]
    numbers = range(length)
    for number in reversed(numbers) if params["reverse"] else numbers:
        elements = [element(number, *pair) for pair in zip(originals, xs, strict=True)]
        results = inline(body, [*consts, *carry, *elements])
        carry = results[:num_carry]
        for iterations, result in zip(stacked, results[num_carry:], strict=True):
            iterations.append(result)
    if params["reverse"]:
        stacked = [iterations[::-1] for iterations in stacked]
    return [*carry, *(compute(lambda *values: jnp.stack(values), *iterations) for iterations in stacked)]


def _stack(slices: list[Var], stacked: Var) -> list[Equation]:
    """The equations that make all of a parameter of its slices."""
    avals = [aval_struct(var.aval) for var in slices]
    flat = flatten(jax.make_jaxpr(lambda *values: jnp.stack(values))(*avals))
    renamed = {**dict(zip(flat.inputs, slices, strict=True)), flat.outputs[0]: stacked}

    return [
        e.replace(invars=replace_atoms(renamed, e.invars), outvars=replace_atoms(renamed, e.outvars))
        for e in flat.equations
    ]


def _used(equations: list[Equation], outputs: list[Atom]) -> list[Equation]:
    """The equations whose results are read, or that have effects."""
    required = set(variables_in(outputs))
    kept_equations = []
    for equation in reversed(equations):
        if equation.effects or any(var in required for var in equation.outvars):
            kept_equations.append(equation)
            required.update(variables_in(equation.invars))
    return kept_equations[::-1]


# One loss in place of several that train different variables.
#
# The sum of all losses has the wrong gradient, because a loss may depend on variables that another loss
# trains. So the equations that compute a loss from those variables are copied, with the gradients stopped
# there, and the copies are summed. XLA computes each copy and its original only once.


def join_losses(
    flat: FlatJaxpr, losses: Sequence[Atom], frozen: Sequence[Collection[Var]]
) -> tuple[FlatJaxpr, Atom]:
    """Adds a loss whose gradients are those of several losses together.

    Returns:
      The function with more equations, and the loss among their results.
    """
    equations = list(flat.equations)
    parts = [_stop(flat, equations, loss, fixed) for loss, fixed in zip(losses, frozen, strict=True)]
    dtype = functools.reduce(jnp.promote_types, [part.aval.dtype for part in parts])
    total, constants = _append(
        equations, lambda *values: sum(value.astype(dtype) for value in values), parts, equations[-1]
    )
    return FlatJaxpr(flat.inputs, equations, flat.outputs, {**flat.constants, **constants}), total


def _stop(flat: FlatJaxpr, equations: list[Any], loss: Atom, frozen: Collection[Var]) -> Atom:
    """Appends a copy of what computes a loss from frozen inputs. Returns the loss of the copy."""
    env: dict[Any, Any] = {}
    for equation in _needed_for(flat, loss):
        operands = variables_in(equation.invars)
        for var in operands:
            if var in frozen and var not in env:
                env[var], _constants = _append(equations, jax.lax.stop_gradient, [var], equation)
        if not any(var in env for var in operands):
            continue
        if equation.effects:
            raise NotImplementedError(
                "minimize was called several times, and what computes a loss from variables that another "
                "one trains prints or calls back within a loop, a branch or jax.checkpoint "
                f"({equation.primitive.name}), which would happen twice. Do that outside, or train in two "
                "loops."
            )
        copies = fresh(equation.outvars)
        env.update(zip(equation.outvars, copies, strict=True))
        equations.append(equation.replace(invars=replace_atoms(env, equation.invars), outvars=copies))
    return replace_atoms(env, [loss])[0]


def _needed_for(flat: FlatJaxpr, loss: Atom) -> list[Equation]:
    """The equations that a loss depends on, in their order."""
    required, equations = set(variables_in([loss])), []
    for equation in reversed(flat.equations):
        if any(var in required for var in equation.outvars):
            equations.append(equation)
            required |= set(variables_in(equation.invars))
    return equations[::-1]


def _append(
    equations: list[Any], function: Any, arguments: Sequence[Atom], like: Equation
) -> tuple[Atom, dict[Any, Any]]:
    """Appends a function's equations, in the scopes of another one. Returns its result and constants."""
    avals = [aval_struct(atom.aval) for atom in arguments]
    added = flatten(jax.make_jaxpr(function)(*avals))
    env: dict[Any, Any] = dict(zip(added.inputs, arguments, strict=True))
    for equation in added.equations:
        invars = replace_atoms(env, equation.invars)
        equations.append(jax_compat.in_place_of(like, equation.replace(invars=invars)))
    (result,) = added.outputs
    return env.get(result, result), added.constants
