"""Evaluates a jaxpr equation by equation, and finds the equation that made the first nan of a result.

The search goes back from the result: as long as an operand of the equation that made a nan has one
itself, that operand is followed. So a nan that was made and then dropped, as by `jnp.where`, is not found.
Where the equation is a loop, a conditional or a call, the search goes on in its body, in the iteration that
made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.flat import (
    Atom,
    Equation,
    FlatJaxpr,
    Var,
    flatten,
    has_primitive,
    is_var,
    make_extracted,
    variables_in,
)
from ipu_pipeline.ground import jax_core


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A jaxpr whose equations have been evaluated, one after another."""

    flat: FlatJaxpr  # the jaxpr
    values: dict[Var, Any]  # of each variable, its value

    def read(self, atom: Atom) -> Any:
        """The value of an atom."""
        return self.values[atom] if is_var(atom) else atom.val

    @property
    def results(self) -> list[Any]:
        """The values of the jaxpr's outputs."""
        return list(map(self.read, self.flat.outputs))


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of a nan: an equation that made it from operands without one, or an argument."""

    equation: Equation | None = None  # None: an argument has it
    argument: int = -1  # the argument's place


def evaluate(flat: FlatJaxpr, arguments: Sequence[Any]) -> Evaluated:
    """Evaluates a jaxpr, an equation at a time. `jax.debug.print` and its like are left out."""
    values = {**flat.constants, **dict(zip(flat.inputs, arguments, strict=True))}
    evaluated = Evaluated(flat, values)
    for equation in flat.equations:
        if equation.primitive.name == "debug_callback":
            continue
        results = _as_function(equation)(*map(evaluated.read, equation.invars))
        values.update(zip(equation.outvars, results, strict=True))
    return evaluated


def has_nan(value: Any) -> bool:
    """Whether an array has a nan."""
    is_number = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)
    return is_number and bool(jnp.isnan(value).any())


def find_nan(evaluated: Evaluated, atom: Atom) -> Origin:
    """Finds where the nan of an atom comes from."""
    flat = evaluated.flat
    while atom in flat.makers:
        equation = flat.equations[flat.makers[atom]]
        operands = [operand for operand in equation.invars if has_nan(evaluated.read(operand))]
        if not operands:
            values = list(map(evaluated.read, equation.invars))
            return Origin(_look_inside(equation, values, equation.outvars.index(atom)))
        atom = operands[0]
    return Origin(argument=flat.inputs.index(atom) if atom in flat.inputs else -1)


def _as_function(equation: Equation) -> Callable[..., list[Any]]:
    inputs = [jax_core.Var(atom.aval) for atom in equation.invars]
    outputs = [jax_core.Var(var.aval) for var in equation.outvars]
    program = make_extracted({}, inputs, [equation.replace(invars=inputs, outvars=outputs)], outputs)
    if has_primitive(equation, "shard"):  # its mesh has no devices: compiled, it gets those of its operands
        return jax.jit(program.__call__)
    return lambda *values: program(*values)


def _look_inside(equation: Equation, values: Sequence[Any], place: int) -> Equation:
    """The equation within a loop, conditional or call that made the nan of one of its results."""
    parameters, name = equation.params, equation.primitive.name
    if name == "shard_map":  # its body has no meaning on one device
        return equation
    if name == "scan":
        return _look_inside_scan(equation, values)
    if name == "while":
        num_condition, num_body = parameters["cond_nconsts"], parameters["body_nconsts"]
        constants = values[num_condition : num_condition + num_body]
        body, carried = parameters["body_jaxpr"], list(values[num_condition + num_body :])
        run = jax.jit(jax_core.jaxpr_as_fun(body))
        while True:  # an iteration makes a nan, since the loop did
            results = run(*constants, *carried)
            if any(map(has_nan, results)):
                return _look_in_body(body, [*constants, *carried], equation)
            carried = results
    if name == "cond":
        branches = parameters["branches"]
        number = min(max(int(values[0]), 0), len(branches) - 1)
        return _look_in_body(branches[number], values[1:], equation, place)
    bodies: list[Any] = list(jax_core.jaxprs_in_params(parameters))
    for body in bodies:
        closed = jax_core.close(body)
        if len(closed.jaxpr.invars) == len(values) and len(closed.jaxpr.outvars) == len(equation.outvars):
            return _look_in_body(closed, values, equation, place)
    return equation


def _look_inside_scan(equation: Equation, values: Sequence[Any]) -> Equation:
    parameters = equation.params
    num_constants, num_carried = jax_core.scan_counts(parameters)
    length, body = parameters["length"], parameters["jaxpr"]
    constants = list(values[:num_constants])
    carried, stacked = values[num_constants:][:num_carried], values[num_constants + num_carried :]
    run = jax.jit(jax_core.jaxpr_as_fun(body))
    for number in reversed(range(length)) if parameters["reverse"] else range(length):
        arguments = [*constants, *carried, *(leaf[number] for leaf in stacked)]
        results = run(*arguments)
        if any(map(has_nan, results)):
            return _look_in_body(body, arguments, equation)
        carried = results[:num_carried]
    return equation  # computed together with others, it is a nan; alone it is none


def _look_in_body(
    closed: Any, arguments: Sequence[Any], equation: Equation, place: int | None = None
) -> Equation:
    """The equation in a body that made a nan of a result, the first one with a nan if `place` is None."""
    evaluated = evaluate(flatten(closed), arguments)
    outputs = evaluated.flat.outputs if place is None else [evaluated.flat.outputs[place]]
    for atom in variables_in(outputs):
        if has_nan(evaluated.read(atom)):
            return find_nan(evaluated, atom).equation or equation
    return equation
