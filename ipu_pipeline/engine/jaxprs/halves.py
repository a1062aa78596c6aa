"""Halves of what computes two sets of results; the second one repeats nothing of the first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.flat import (
    CHECKPOINTS,
    Atom,
    Equation,
    ExtractedJaxpr,
    FlatJaxpr,
    InlineFunction,
    Var,
    aval_struct,
    close,
    dependents,
    extract,
    flatten,
    variables_in,
)
from ipu_pipeline.ground import jax_core

# Cheaper to compute again than to keep, where the operand is smaller than the result ...
_CHEAP = ("broadcast_in_dim", "convert_element_type")
# ... and where it is as large: kept, XLA would have to write down a value that it otherwise reads in place.
_OTHER_VIEWS = ("transpose", "reshape", "squeeze", "expand_dims", "rev")
# A half of a scan that carries nothing and has only these does all iterations at once. As a loop it took
# 1.4 times as long: XLA's CPU compiler copies what an iteration reads and writes.
_AT_ONCE = {
    *("add", "add_any", "sub", "mul", "div", "neg", "integer_pow", "exp", "tanh", "logistic", "max", "min"),
    *("select_n", "convert_element_type", "dot_general", "reduce_sum", "reduce_max", "broadcast_in_dim"),
    *_OTHER_VIEWS,
}


def find_computed(flat: FlatJaxpr, outputs: Iterable[Atom], stored: Collection[Var] = ()) -> list[Equation]:
    """The equations that compute some outputs."""
    required = set(variables_in(outputs))
    equations = []
    for equation in reversed(flat.equations):
        if any(var in required and var not in stored for var in equation.outvars):
            equations.append(equation)
            required.update(variables_in(equation.invars))
    return equations[::-1]


def find_kept(computed: Iterable[Equation], varying: Collection[Var]) -> set[Var]:
    """The variables that a second half may take from the first, instead of computing them."""
    return {
        var
        for equation in computed
        for var in equation.outvars
        if equation.effects or (var in varying and not _is_cheap(equation))
    }


def _is_cheap(equation: Equation) -> bool:
    if equation.primitive.name in _OTHER_VIEWS:
        return True
    if equation.primitive.name not in _CHEAP:
        return False
    (result,) = equation.outvars
    operands = [var for var in variables_in(equation.invars) if hasattr(var.aval, "dtype")]
    return sum(_num_bytes(var) for var in operands) < _num_bytes(result)


def _num_bytes(var: Var) -> int:
    return int(var.aval.size) * int(var.aval.dtype.itemsize)


def take_apart(closed_jaxpr: Any, first: Collection[int], roots: Collection[int] | None = None) -> Any:
    """Takes equations apart that compute results of both halves.

    Returns:
      A `ClosedJaxpr` with the same inputs and results.
    """
    flat = flatten(closed_jaxpr)
    atoms = [atom for place, atom in enumerate(flat.outputs) if place in first]
    depending = None if roots is None else dependents(flat, [flat.inputs[place] for place in roots])
    return close(_take_apart(flat, atoms, depending)).closed_jaxpr


def _take_apart(flat: FlatJaxpr, first: Sequence[Atom], depending: Collection[Var] | None) -> FlatJaxpr:
    required = set(variables_in(first))
    halves: dict[int, Any] = {}  # the number of an equation -> what takes its place
    for number in reversed(range(len(flat.equations))):
        equation = flat.equations[number]
        first_places = [place for place in _used_places(equation) if equation.outvars[place] in required]
        if not first_places:
            continue
        second_places = [place for place in _used_places(equation) if place not in first_places]
        is_in = depending is None or any(var in depending for var in equation.outvars)
        make = _find_maker(equation) if second_places and is_in and not equation.effects else None
        apart = None if make is None else make(equation, first_places, second_places)
        if apart is None:
            required.update(variables_in(equation.invars))
        else:
            halves[id(equation)] = apart.closed_jaxpr
            required.update(variables_in(equation.invars[place] for place in apart.read_first))
    if not halves:
        return flat

    def rule(equation: Equation, inputs: list[Atom], inline: InlineFunction) -> list[Atom] | None:
        closed_jaxpr = halves.get(id(equation))
        return None if closed_jaxpr is None else _in_place(equation, inline(closed_jaxpr, inputs))

    return flatten(close(flat).closed_jaxpr, rule)


@dataclass(frozen=True, eq=False)
class _Apart:
    """The two halves of an equation."""

    closed_jaxpr: Any  # takes the equation's inputs, returns those of its results that something reads
    read_first: Sequence[int]  # the places of the inputs that the first half reads


def _used_places(equation: Equation) -> list[int]:
    """The places of an equation's results that something reads."""
    return [n for n, var in enumerate(equation.outvars) if not isinstance(var, jax_core.DropVar)]


def _in_place(equation: Equation, atoms: Sequence[Atom]) -> list[Atom]:
    """Puts atoms in the places of results that something reads."""
    remaining = iter(atoms)
    return [var if isinstance(var, jax_core.DropVar) else next(remaining) for var in equation.outvars]


def _find_maker(equation: Equation) -> Callable[[Equation, list[int], list[int]], _Apart | None] | None:
    if equation.primitive.name in CHECKPOINTS:
        return _halve_checkpoint
    return {"scan": _halve_scan, "cond": _halve_conditional}.get(equation.primitive.name)


def _trace(equation: Equation, halved: Callable[..., dict[int, Any]], read_first: Iterable[int]) -> _Apart:
    """Makes an `_Apart` of a function that returns results by place."""

    def function(*inputs: Any) -> list[Any]:
        results = halved(*inputs)
        return [results[place] for place in _used_places(equation)]

    avals = [aval_struct(atom.aval) for atom in equation.invars]
    return _Apart(jax.make_jaxpr(function)(*avals), sorted(read_first))


@dataclass(frozen=True, eq=False)
class _Body:
    """A body, cut in two."""

    flat: FlatJaxpr
    saved: list[Var]  # what the second half takes from the first, after the results of that
    first: ExtractedJaxpr
    second: ExtractedJaxpr

    def places(self, program: ExtractedJaxpr) -> list[int]:
        """The places of the body's inputs that a half reads, without what it takes from the other."""
        read_vars = set(program.inputs)
        if program is self.second:
            read_vars -= set(self.saved)
        return [place for place, var in enumerate(self.flat.inputs) if var in read_vars]

    def call(
        self, program: ExtractedJaxpr, inputs: Mapping[int, Any], saved: Sequence[Any] = ()
    ) -> list[Any]:
        """Returns the results of a half; `inputs` by place."""
        env = {self.flat.inputs[place]: value for place, value in inputs.items()}
        env.update(zip(self.saved if saved else (), saved, strict=True))
        return program(*(env[var] for var in program.inputs))


def _cut(
    flat: FlatJaxpr,
    first: Sequence[int],
    second: Sequence[int],
    invariant: int = 0,
    carried: Iterable[int] = (),
) -> _Body:
    """Cuts a body by the places of its results."""
    flat = _take_apart(flat, [flat.outputs[place] for place in first], None)
    outputs = [flat.outputs[place] for place in first]
    keepable = find_kept(find_computed(flat, outputs), dependents(flat, flat.inputs[invariant:]))
    keepable |= {flat.inputs[place] for place in carried}
    program = extract(flat, [flat.outputs[place] for place in second], keepable)
    saved = [var for var in program.inputs if var in keepable]
    return _Body(flat, saved, extract(flat, [*outputs, *saved]), program)


def _halve_checkpoint(equation: Equation, first: list[int], second: list[int]) -> _Apart | None:
    """Makes the first half a checkpoint, too; what that computes again is kept for the second."""
    params = equation.params
    body = _cut(flatten(jax_core.close(params["jaxpr"])), first, second)
    avals = [aval_struct(var.aval) for var in body.flat.inputs]
    inner = jax.make_jaxpr(lambda *values: body.call(body.first, dict(enumerate(values))))(*avals)
    if inner.consts:
        return None

    def halved(*inputs: Any) -> dict[int, Any]:
        results = equation.primitive.bind(*inputs, **{**params, "jaxpr": inner.jaxpr})
        second_results = body.call(body.second, dict(enumerate(inputs)), results[len(first) :])
        return dict(zip([*first, *second], [*results[: len(first)], *second_results], strict=True))

    return _trace(equation, halved, range(len(avals)))


def _halve_conditional(equation: Equation, first: list[int], second: list[int]) -> _Apart | None:
    """Cuts each branch. They share what is kept, of which the branch that is taken leaves some as zeros."""
    if equation.params.get("branches_platforms") is not None:  # which are not for every platform
        return None
    bodies = [_cut(flatten(branch), first, second) for branch in equation.params["branches"]]
    saved: list[jax.ShapeDtypeStruct] = []
    saved_places = [_share(saved, [aval_struct(var.aval) for var in body.saved]) for body in bodies]
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in saved):
        return None

    def take_first(number: int, *values: Any) -> list[Any]:
        results = bodies[number].call(bodies[number].first, dict(enumerate(values)))
        by_place = dict(zip(saved_places[number], results[len(first) :], strict=True))
        zeros = (jnp.zeros(aval.shape, aval.dtype) for aval in saved)
        return [*results[: len(first)], *(by_place.get(place, zero) for place, zero in enumerate(zeros))]

    def take_second(number: int, values: Sequence[Any], all_saved: Sequence[Any]) -> list[Any]:
        body_saved = [all_saved[place] for place in saved_places[number]]
        return bodies[number].call(bodies[number].second, dict(enumerate(values)), body_saved)

    def halved(index: Any, *inputs: Any) -> dict[int, Any]:
        numbers = range(len(bodies))
        results = jax.lax.switch(index, [functools.partial(take_first, n) for n in numbers], *inputs)
        second_results = jax.lax.switch(
            index, [functools.partial(take_second, n) for n in numbers], inputs, results[len(first) :]
        )
        return dict(zip([*first, *second], [*results[: len(first)], *second_results], strict=True))

    return _trace(equation, halved, range(len(equation.invars)))


def _share(slots: list[jax.ShapeDtypeStruct], avals: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
    """Finds a slot of its own for each shape and dtype, and adds those that are missing."""
    places: list[int] = []
    for aval in avals:
        like = (aval.shape, aval.dtype)
        free = (n for n, slot in enumerate(slots) if n not in places and (slot.shape, slot.dtype) == like)
        places.append(next(free, len(slots)))
        if places[-1] == len(slots):
            slots.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return places


def _can_be_at_once(program: ExtractedJaxpr) -> bool:
    return all(equation.primitive.name in _AT_ONCE for equation in program.closed_jaxpr.jaxpr.eqns)


def _halve_scan(equation: Equation, first: list[int], second: list[int]) -> _Apart:
    """Makes both halves scans; what the second takes of each iteration is stacked."""
    num_consts, num_carry = jax_core.scan_counts(equation.params)
    flat = flatten(equation.params["jaxpr"])
    results, begins = set(first), set[int]()  # with what iterations of the first half carry
    while True:
        read_vars = set(extract(flat, [flat.outputs[place] for place in sorted(results)]).inputs)
        begins = {n for n in range(num_carry) if flat.inputs[num_consts + n] in read_vars} | {
            n for n in results if n < num_carry
        }
        if begins <= results:
            break
        results |= begins
    first = sorted(results)
    carried_first = [place for place in first if place < num_carry]
    carried_inputs = [num_consts + place for place in carried_first]
    results = {place for place in second if place not in first}
    while True:  # the same for the second half, which is cut anew whenever it carries more
        body = _cut(flat, first, sorted(results), num_consts, carried_inputs)
        carried = {place - num_consts for place in body.places(body.second)} & set(range(num_carry))
        if carried <= results:
            break
        results |= carried
    second = sorted(results)
    carried_second = [place for place in second if place < num_carry]

    def run(
        program: ExtractedJaxpr, inputs: Sequence[Any], carried: Sequence[int], saved: Sequence[Any]
    ) -> list[Any]:
        places = body.places(program)
        consts = {place: inputs[place] for place in places if place < num_consts}
        stacks = {place: inputs[place] for place in places if place >= num_consts + num_carry}

        def step(carry: Sequence[Any], element: tuple[dict[int, Any], Sequence[Any]]) -> Any:
            env = {num_consts + place: value for place, value in zip(carried, carry, strict=True)}
            results = body.call(program, {**consts, **env, **element[0]}, element[1])
            return results[: len(carried)], results[len(carried) :]

        elements = (stacks, list(saved))
        if not carried and jax.tree.leaves(elements) and _can_be_at_once(program):
            at_once: list[Any] = jax.vmap(lambda element: step((), element)[1])(elements)
            return at_once
        carry, ys = jax.lax.scan(
            step,
            [inputs[num_consts + place] for place in carried],
            elements,
            **{name: equation.params[name] for name in ("length", "reverse", "unroll")},
        )
        return [*carry, *ys]

    def halved(*inputs: Any) -> dict[int, Any]:
        first_results = run(body.first, inputs, carried_first, ())
        second_results = run(body.second, inputs, carried_second, first_results[len(first) :])
        return dict(zip([*first, *second], [*first_results[: len(first)], *second_results], strict=True))

    return _trace(equation, halved, {*body.places(body.first), *carried_inputs})
