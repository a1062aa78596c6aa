"""Turns marker equations of a traced function into inputs and outputs.

`get_variable`, `next_rng_key`, `assign` and what enqueues leave markers in a jaxpr (`variables`,
`stage_markers`, `side_outputs`). `hoist` takes them out: what they read becomes inputs, what they assign or
enqueue outputs. With markers a function is traced once, so what it prints appears once. Markers inside the
body of a loop, a conditional or `jax.checkpoint` are reached by building that equation again around a body
that takes the values as arguments; calls of `jax.jit` are inlined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.side_outputs import enqueue_p
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_markers import (
    count_aval,
    key_aval,
    micro_batch_key_p,
    update_count_p,
)
from ipu_pipeline.engine.tracing.variables import (
    assign_variable_p,
    initial_value_p,
    read_variable_p,
    resolve,
)
from ipu_pipeline.ground import jax_compat, jax_core

Body: TypeAlias = "Callable[[Sequence[Any]], list[Any]]"

MARKERS = (
    read_variable_p,
    assign_variable_p,
    initial_value_p,
    micro_batch_key_p,
    update_count_p,
    enqueue_p,
)


@dataclass(frozen=True, eq=False)
class Hoisted:
    """A function whose markers have become inputs and outputs."""

    # takes `[*variables, key if uses_key, *the function's inputs, count if uses_count]` and returns `[*the
    # function's outputs, *assigned values, *enqueued leaves]`
    flat: jaxprs.FlatJaxpr
    variables: tuple[VariableSpec, ...]  # what the function reads or assigns
    assigned: tuple[VariableSpec, ...]  # the variables that it assigns, in the order of the outputs
    # number of what it enqueues -> its number of leaves, in the order of the outputs
    enqueued: dict[int, int]
    uses_key: bool  # whether it draws random keys
    uses_count: bool  # whether it computes with the number of weight updates
    # per variable, in the order of asking: the number of equations of `flat` before the place where it was
    # asked for, and the marker that stood there
    asked: dict[VariableSpec, tuple[int, Any]]


def hoist(
    closed_jaxpr: Any,
    place: str,
    program_names: frames.ProgramNames,
    first_rule: jaxprs.EquationRule | None = None,
) -> Hoisted:
    """Takes the markers out of a traced function."""
    # What the markers become; `rule` fills it in, in the order of the equations.
    reads: dict[VariableSpec, Any] = {}  # the input that holds the value at the start
    latest: dict[VariableSpec, Any] = {}  # the atom that holds the value at this point
    assigned: dict[VariableSpec, None] = {}
    enqueued: dict[int, list[Any]] = {}
    key_inputs: list[Any] = []
    count_inputs: list[Any] = []
    requests: dict[VariableSpec, tuple[int, Any]] = {}
    num_equations = 0
    current: Any = None

    def read(spec: VariableSpec) -> Any:
        if spec not in reads:
            reads[spec] = latest[spec] = variable_input(spec)
            requests[spec] = (num_equations, current)
        return latest[spec]

    def key() -> Any:
        if not key_inputs:
            key_inputs.append(jax_core.Var(key_aval()))
        return key_inputs[0]

    def count() -> Any:
        if not count_inputs:
            count_inputs.append(jax_core.Var(count_aval()))
        return count_inputs[0]

    def write(spec: VariableSpec, value: Any) -> None:
        read(spec)
        latest[spec] = value
        assigned[spec] = None

    initialized: list[tuple[VariableSpec, list[Any]]] = []
    markers = marker_rule(
        place, program_names, read, key, count, write, enqueued.__setitem__, initialized.append
    )

    def rule(equation: Any, inputs: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        nonlocal num_equations, current
        current = equation
        replaced = None if first_rule is None else first_rule(equation, inputs, inline)
        if replaced is None:
            replaced = markers(equation, inputs, inline)
        num_equations += replaced is None
        return replaced

    # The function without markers, with what they became among its inputs and outputs.
    flat = jaxprs.flatten(closed_jaxpr, rule)
    resolve(flat.equations, flat.constants, initialized, place)
    flat = jaxprs.FlatJaxpr(
        [*reads.values(), *key_inputs, *flat.inputs, *count_inputs],
        flat.equations,
        [
            *flat.outputs,
            *(latest[spec] for spec in assigned),
            *(atom for atoms in enqueued.values() for atom in atoms),
        ],
        flat.constants,
    )
    sizes = {number: len(atoms) for number, atoms in enqueued.items()}
    uses_flags = bool(key_inputs), bool(count_inputs)
    return Hoisted(flat, tuple(reads), tuple(assigned), sizes, *uses_flags, requests)


def variable_input(spec: VariableSpec) -> Any:
    """Makes a new jaxpr variable for a variable's value."""
    return jax_core.Var(jax_compat.shaped_array(spec.shape, spec.dtype))


def marker_rule(
    place: str,
    program_names: frames.ProgramNames,
    read: Callable[[VariableSpec], Any],
    key: Callable[[], Any],
    count: Callable[[], Any],
    write: Callable[[VariableSpec, Any], None],
    enqueue: Callable[[int, list[Any]], None],
    initialize: Callable[[tuple[VariableSpec, list[Any]]], None],
) -> jaxprs.EquationRule:
    """A rule for `jaxprs.flatten` that takes markers out."""

    def check_new(serial: int, event: str) -> None:
        if serial in program_names.markers:
            raise ValueError(
                f"{place}: {event} in a function that JAX has traced once and used twice, as it does with "
                "jax.jit, jax.checkpoint and scan bodies that are called again. Both calls would get the "
                "same. Give each call a function of its own (lambda x: f(x)), or do it outside of it; a "
                "stage needs no jax.jit inside, it is jitted as a whole."
            )
        program_names.markers.add(serial)

    def rule(equation: Any, inputs: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        if equation.primitive is read_variable_p:
            spec = equation.params["spec"]
            check_new(equation.params["serial"], f"variable {spec.name} was asked for")
            return [read(spec)]
        if equation.primitive is micro_batch_key_p:
            check_new(equation.params["serial"], "a random key was asked for")
            return [key()]
        if equation.primitive is update_count_p:
            return [count()]
        if equation.primitive is assign_variable_p:
            write(equation.params["spec"], inputs[0])
            return list(equation.outvars)
        if equation.primitive is initial_value_p:
            initialize((equation.params["spec"], inputs))
            return list(equation.outvars)
        if equation.primitive is enqueue_p:
            check_new(equation.params["serial"], "metric or enqueue was called")
            enqueue(equation.params["index"], inputs)
            return list(equation.outvars)
        if not contains(equation, MARKERS):
            return None
        rebuilt = _rebuild(equation, place, program_names)
        arguments = [read(spec) for spec in rebuilt.variables]
        arguments += [key()] if rebuilt.uses_key else []
        arguments += [count()] if rebuilt.uses_count else []
        outputs = inline(rebuilt.closed_jaxpr, arguments + inputs)
        num_outputs = len(equation.outvars)
        side_outputs = iter(outputs[num_outputs:])
        for spec in rebuilt.assigned:
            write(spec, next(side_outputs))
        for number, size in rebuilt.enqueued.items():
            enqueue(number, [next(side_outputs) for _leaf in range(size)])
        return outputs[:num_outputs]

    return rule


def contains(equation: Any, primitives: Collection[Any]) -> bool:
    """Whether an equation's bodies contain one of the primitives anywhere."""
    return any(
        inner.primitive in primitives or contains(inner, primitives)
        for jaxpr in jax_core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


@dataclass(frozen=True, eq=False)
class _Rebuilt:
    """An equation with a body, built again to take `[*variables, key and count if used, *inputs]`."""

    closed_jaxpr: Any
    variables: tuple[VariableSpec, ...]
    assigned: tuple[VariableSpec, ...]
    enqueued: dict[int, int]
    uses_key: bool
    uses_count: bool


def _rebuild(equation: Any, place: str, program_names: frames.ProgramNames) -> _Rebuilt:
    name = equation.primitive.name
    params = equation.params
    call: Callable[[list[Body], list[Any]], list[Any]]
    if name in jaxprs.CHECKPOINTS:
        bodies = [jax_core.close(params["jaxpr"])]
        call = functools.partial(_call_checkpoint, params)
    elif name == "scan":
        bodies, call = [params["jaxpr"]], functools.partial(_call_scan, params)
    elif name == "while":
        bodies = [params["cond_jaxpr"], params["body_jaxpr"]]
        call = functools.partial(_call_while, params)
    elif name == "cond":
        bodies, call = list(params["branches"]), _call_cond
    else:
        raise ValueError(
            f"{place}: get_variable, next_rng_key, assign, metric, enqueue or update_count is called "
            f"inside the body of {name}, where it cannot be reached. Call it outside and pass the value in "
            "as an argument."
        )
    by_body: dict[int, Hoisted] = {}  # branches may be the same function, traced once
    for body in bodies:
        if id(body) not in by_body:
            by_body[id(body)] = hoist(body, place, program_names)
    hoisted = [by_body[id(body)] for body in bodies]
    assigned = {spec: None for body in hoisted for spec in body.assigned}
    if assigned and name not in jaxprs.CHECKPOINTS:
        raise ValueError(
            f"{place}: variable {next(iter(assigned)).name} is assigned inside the body of {name}. "
            "Return the value from the body and assign it outside."
        )
    enqueued = {number: size for body in hoisted for number, size in body.enqueued.items()}
    if enqueued and name not in jaxprs.CHECKPOINTS:
        raise ValueError(
            f"{place}: metric or enqueue is called inside the body of {name}, where the value cannot be "
            "reached. Return the value from the body, and call it outside."
        )
    variables = tuple({spec: None for body in hoisted for spec in body.variables})
    uses_key = any(body.uses_key for body in hoisted)
    uses_count = any(body.uses_count for body in hoisted)
    num_shared = len(variables) + uses_key + uses_count

    def call_rebuilt(*arguments: Any) -> list[Any]:
        shared, inputs = arguments[:num_shared], arguments[num_shared:]
        values = dict(zip(variables, shared, strict=False))

        def body_function(body: Hoisted) -> Body:
            hoisted_values = [values[spec] for spec in body.variables]
            hoisted_values += [shared[len(variables)]] if body.uses_key else []
            count = [shared[-1]] if body.uses_count else []
            return lambda operands: jaxprs.close(body.flat)(*hoisted_values, *operands, *count)

        return call([body_function(body) for body in hoisted], list(inputs))

    shared_avals = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in variables]
    shared_avals += [jaxprs.aval_struct(key_aval())] * uses_key
    shared_avals += [jaxprs.aval_struct(count_aval())] * uses_count
    input_avals = [jaxprs.aval_struct(atom.aval) for atom in equation.invars]
    closed_jaxpr = jax.make_jaxpr(call_rebuilt)(*shared_avals, *input_avals)
    return _Rebuilt(closed_jaxpr, variables, tuple(assigned), enqueued, uses_key, uses_count)


def _call_checkpoint(params: dict[str, Any], bodies: list[Body], inputs: list[Any]) -> list[Any]:
    checkpointed = jax.checkpoint(
        lambda *operands: bodies[0](operands),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return list(checkpointed(*inputs))


def _call_scan(params: dict[str, Any], bodies: list[Body], inputs: list[Any]) -> list[Any]:
    num_consts, num_carry = jax_core.scan_counts(params)
    consts, inputs = inputs[:num_consts], inputs[num_consts:]

    def body(carry: list[Any], element: list[Any]) -> tuple[list[Any], list[Any]]:
        results = bodies[0]([*consts, *carry, *element])
        return results[:num_carry], results[num_carry:]

    carry, stacked = jax.lax.scan(
        body,
        inputs[:num_carry],
        inputs[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _call_while(params: dict[str, Any], bodies: list[Body], inputs: list[Any]) -> list[Any]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = inputs[:first], inputs[first:second], inputs[second:]
    return list(
        jax.lax.while_loop(
            lambda values: bodies[0]([*cond_consts, *values])[0],
            lambda values: bodies[1]([*body_consts, *values]),
            carry,
        )
    )


def _call_cond(bodies: list[Body], inputs: list[Any]) -> list[Any]:
    branches = [lambda *operands, body=body: body(operands) for body in bodies]
    return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
