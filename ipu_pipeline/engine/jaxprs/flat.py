"""Flat jaxprs: calls of `jax.jit` inlined, dependencies found, and programs cut out of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.ground import jax_compat, jax_core

# Everything here rewrites equations and never evaluates or retraces them, so names, source lines and
# custom rules stay with their equations. The exception is a jaxpr with arrays that are written in place
# (`jax.new_ref`). A write has no output that later reads could depend on, so JAX traces such a jaxpr again,
# with equations that return the new values.

# jax.extend.core carries no type annotations, so to the type checker these are Any; the names are for
# the reader. An atom is a variable of a jaxpr or a literal.
Var: TypeAlias = Any
Atom: TypeAlias = Any
Equation: TypeAlias = Any
InlineFunction: TypeAlias = "Callable[[Any, list[Atom]], list[Atom]]"
EquationRule: TypeAlias = "Callable[[Equation, list[Atom], InlineFunction], list[Atom] | None]"
CHECKPOINTS = ("checkpoint", "remat", "remat2")  # names of jax.checkpoint's primitive over time
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
}
_REFERENCES = ("new_ref", "empty_ref")


@dataclass(frozen=True, eq=False)
class FlatJaxpr:
    """Equations without inner calls of `jax.jit`."""

    inputs: list[Var]  # the input variables
    equations: list[Equation]  # in an order in which they can be evaluated
    outputs: list[Atom]  # variables or literals
    constants: dict[Var, Any]  # the variables that stand for constant arrays, with their values

    @functools.cached_property
    def makers(self) -> dict[Var, int]:
        """The place of the equation that makes each variable."""
        return {var: place for place, equation in enumerate(self.equations) for var in equation.outvars}


@dataclass(frozen=True, eq=False)
class ExtractedJaxpr:
    """A jaxpr cut out of another one.

    Attributes:
      closed_jaxpr: the jaxpr to evaluate.
      inputs: the original jaxpr's variables that the program's arguments stand for.
    """

    closed_jaxpr: Any
    inputs: list[Var]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Evaluates the program, also under a transformation."""
        results: list[Any] = jax_core.jaxpr_as_fun(self.closed_jaxpr)(*arguments)
        return results


def aval_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` like a variable's abstract value, for tracing on it."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_inlined(equation: Equation) -> bool:
    """Whether `flatten` puts the equation's inner jaxpr in its place."""
    return equation.primitive.name in _INLINED


def flatten(closed_jaxpr: Any, rule: EquationRule | None = None) -> FlatJaxpr:
    """Inlines all calls of `jax.jit`, at any depth outside of other higher-order primitives.

    Equations that write to arrays of `jax.new_ref` are replaced by ones that return the new values.
    """
    if _makes_references(closed_jaxpr.jaxpr):
        closed_jaxpr = jax_compat.discharge(close(_inline_all(closed_jaxpr, None)).closed_jaxpr)
    return _inline_all(closed_jaxpr, rule)


def _makes_references(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in _REFERENCES
        or (
            is_inlined(equation)
            and _makes_references(equation.params[_INLINED[equation.primitive.name]].jaxpr)
        )
        for equation in jaxpr.eqns
    )


def _inline_all(closed_jaxpr: Any, rule: EquationRule | None) -> FlatJaxpr:
    equations: list[Equation] = []
    constants: dict[Var, Any] = {}

    def inline(jaxpr: Any, consts: Sequence[Any], arguments: list[Atom], caller: Any) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = jax_core.Var(var.aval)
            constants[env[var]] = value
        for equation in jaxpr.eqns:
            if caller is not None:
                equation = jax_compat.within_scopes(caller, equation)
            inputs = map_atoms(env, equation.invars)

            def inline_here(inner: Any, arguments: list[Atom], call_equation: Any = equation) -> list[Atom]:
                return inline(inner.jaxpr, inner.consts, arguments, call_equation)

            if is_inlined(equation):
                outputs = inline_here(equation.params[_INLINED[equation.primitive.name]], inputs)
            else:
                replaced = rule(equation, inputs, inline_here) if rule is not None else None
                outputs = fresh(equation.outvars) if replaced is None else replaced
                if replaced is None:
                    equations.append(equation.replace(invars=inputs, outvars=outputs))
            env.update(zip(equation.outvars, outputs, strict=True))
        return map_atoms(env, jaxpr.outvars)

    jaxpr = closed_jaxpr.jaxpr
    inputs = [jax_core.Var(var.aval) for var in jaxpr.invars]
    outputs = inline(jaxpr, closed_jaxpr.consts, list(inputs), None)
    return FlatJaxpr(inputs, equations, outputs, constants)


def lift_captures(closed_jaxpr: Any) -> tuple[Any, list[Any]]:
    """Makes the traced values that a jaxpr captured its first inputs."""
    jaxpr = closed_jaxpr.jaxpr
    constants = list(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))
    captured = {var: value for var, value in constants if jax_compat.is_traced(value)}
    plain_constants = [(var, value) for var, value in constants if var not in captured]
    lifted = make_extracted(dict(plain_constants), [*captured, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)
    return lifted.closed_jaxpr, list(captured.values())


def take_out_constants(
    flat: FlatJaxpr, find_number: Callable[[Any], int | None]
) -> tuple[FlatJaxpr, dict[Var, int]]:
    """Makes some of a flat jaxpr's constants further inputs."""
    all_numbers = {var: find_number(value) for var, value in flat.constants.items()}
    numbers = {var: number for var, number in all_numbers.items() if number is not None}
    constants = {var: value for var, value in flat.constants.items() if var not in numbers}
    return FlatJaxpr([*flat.inputs, *numbers], flat.equations, flat.outputs, constants), numbers


def close(flat: FlatJaxpr) -> ExtractedJaxpr:
    """Makes all of a flat jaxpr a program, with all its inputs."""
    return make_extracted(flat.constants, flat.inputs, flat.equations, flat.outputs)


def has_callbacks(flat: FlatJaxpr) -> bool:
    """Whether a jaxpr calls back into Python, at any depth. An error raised there ends the program."""
    return any(map(calls_back, flat.equations))


def calls_back(equation: Equation) -> bool:
    """Whether an equation calls back into Python, at any depth."""
    return has_primitive(equation, "callback")  # pure_callback, io_callback, debug_callback


def has_primitive(equation: Equation, name: str) -> bool:
    """Whether an equation's primitive, or one inside at any depth, has a given text in its name."""
    if name in equation.primitive.name:
        return True
    bodies = jax_core.jaxprs_in_params(equation.params)
    return any(has_primitive(inner, name) for body in bodies for inner in body.eqns)


def is_var(atom: Atom) -> bool:
    """Whether an atom is a variable, and no literal."""
    return not isinstance(atom, jax_core.Literal)


def variables_in(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are variables, in their order."""
    return [atom for atom in atoms if not isinstance(atom, jax_core.Literal)]


def map_atoms(env: Mapping[Var, Atom], atoms: Iterable[Atom]) -> list[Atom]:
    """The atoms with all variables looked up in `env`; literals stay."""
    return [env[atom] if is_var(atom) else atom for atom in atoms]


def replace_atoms(env: Mapping[Var, Atom], atoms: Iterable[Atom]) -> list[Atom]:
    """The atoms with those variables replaced that `env` has."""
    return [env.get(atom, atom) if is_var(atom) else atom for atom in atoms]


def substitute(flat: FlatJaxpr, replaced: Mapping[Var, Var]) -> FlatJaxpr:
    """Makes a jaxpr read other variables in place of some."""
    return FlatJaxpr(
        [var for var in flat.inputs if replaced.get(var, var) is var],
        [e.replace(invars=replace_atoms(replaced, e.invars)) for e in flat.equations],
        replace_atoms(replaced, flat.outputs),
        flat.constants,
    )


def make_extracted(
    constants: dict[Var, Any], inputs: list[Var], equations: list[Equation], outputs: Sequence[Atom]
) -> ExtractedJaxpr:
    """Makes a program of equations."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    debug_info = jax_core.DebugInfo(
        traced_for="jit", func_src_info="ipu_pipeline", arg_names=None, result_paths=None
    )
    jaxpr = jax_core.Jaxpr(list(constants), inputs, list(outputs), equations, effects, debug_info)
    return ExtractedJaxpr(jax_core.ClosedJaxpr(jaxpr, list(constants.values())), inputs)


def fresh(variables: Iterable[Var]) -> list[Var]:
    """Makes new variables with the same abstract values."""
    return [var if isinstance(var, jax_core.DropVar) else jax_core.Var(var.aval) for var in variables]


# Dependencies, and programs cut out of a jaxpr.

_SAME_ELEMENTS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy")


def any_equation(equation: Equation) -> bool:
    """Returns True; makes `extract` keep all effects."""
    del equation
    return True


def dependents(flat: FlatJaxpr, roots: Iterable[Var]) -> set[Var]:
    """The variables whose value depends on one of `roots`, including the roots.

    A scan's outputs are looked at one by one: an output that its body computes without the roots does not
    depend on them, as weights that a scan over layers casts. The outputs of a conditional are not.
    """
    reached = set(roots)
    for equation in flat.equations:
        if _reads(equation, reached):
            outputs = equation.outvars
            if len(outputs) > 1 and equation.primitive.name == "scan":
                outputs = [
                    var for place, var in enumerate(outputs) if _reads(reduce(equation, {place}), reached)
                ]
            reached.update(outputs)
    return reached


def _reads(equation: Equation | None, variables: Collection[Var]) -> bool:
    return equation is not None and any(atom in variables for atom in variables_in(equation.invars))


def find_uniform(flat: FlatJaxpr) -> dict[int, np.ndarray[Any, Any]]:
    """The results all of whose elements are one known number, as zeros are: by place, the number."""
    env: dict[Var, Any] = {}

    def find(atom: Atom) -> Any:
        if is_var(atom):
            return env.get(atom)
        dtype: Any = aval_struct(atom.aval).dtype
        return np.asarray(atom.val, dtype) if isinstance(dtype, np.dtype) else None

    for equation in flat.equations:
        if equation.primitive.name in _SAME_ELEMENTS and (value := find(equation.invars[0])) is not None:
            env[equation.outvars[0]] = value
    values = {place: find(atom) for place, atom in enumerate(flat.outputs)}
    return {place: value for place, value in values.items() if value is not None and value.ndim == 0}


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
    stored: Iterable[Var] = (),
    keep_effects_of: Callable[[Equation], bool] | None = None,
) -> ExtractedJaxpr:
    """The smallest program that computes `outputs`."""
    stored = set(stored)
    required = set(variables_in(outputs))
    equations: list[Equation] = []
    effects: set[int] = set()
    if keep_effects_of is not None:
        pairs = enumerate(flat.equations)
        effects = {place for place, equation in pairs if equation.effects and keep_effects_of(equation)}
    for place in sorted(_find_behind(flat, required, effects, stored), reverse=True):
        equation = flat.equations[place]
        is_kept = place in effects or any(v in required and v not in stored for v in equation.outvars)
        is_more = any(v not in required or v in stored for v in equation.outvars)
        if is_kept and equation.primitive.name == "scan" and is_more:
            places = {
                place for place, var in enumerate(equation.outvars) if var in required and var not in stored
            }
            equation = reduce(equation, places) or equation
        if is_kept:
            equations.append(equation)
            required.update(variables_in(equation.invars))
    equations.reverse()
    # An equation with several outputs may be kept for one of them while another one is given. The given
    # one is then renamed where it is made, so that readers take the argument.
    renamed = [
        equation.replace(outvars=[fresh([v])[0] if v in stored else v for v in equation.outvars])
        for equation in equations
    ]
    inputs = [var for var in flat.inputs if var in required]
    read = stored & required
    inputs += [var for var in flat.makers if var in read]
    constants = {var: value for var, value in flat.constants.items() if var in required}
    return make_extracted(constants, inputs, renamed, outputs)


def _find_behind(
    flat: FlatJaxpr, variables: Iterable[Var], places: Iterable[int], stored: Collection[Var]
) -> set[int]:
    """The places of some equations, and of all that make what they or some variables need."""
    behind = set(places)
    pending = [*variables, *(var for place in behind for var in variables_in(flat.equations[place].invars))]
    while pending:
        var = pending.pop()
        place = None if var in stored else flat.makers.get(var)
        if place is not None and place not in behind:
            behind.add(place)
            pending += variables_in(flat.equations[place].invars)
    return behind


def rewriting(function: Callable[..., Any], rewrite: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """Makes a function compute what `rewrite` makes of its `Jaxpr`, and of those within it."""

    def rewritten(*arguments: Any) -> list[Any]:
        closed_jaxpr = jax.make_jaxpr(function)(*arguments)
        results: list[Any] = jax_core.jaxpr_as_fun(jax_core.map_jaxprs(rewrite, closed_jaxpr))(*arguments)
        return results

    return rewritten


def split_results(closed_jaxpr: Any) -> list[Callable[..., Any]]:
    """Makes a jitted function for each result of a jaxpr: it takes all arguments and computes only that."""
    flat = flatten(closed_jaxpr)

    def split(output: Atom) -> Callable[..., Any]:
        @jax.jit
        def compute(*arguments: Any) -> Any:
            program = extract(flat, [output])
            env = dict(zip(flat.inputs, arguments, strict=True))
            return program(*(env[var] for var in program.inputs))[0]

        return compute

    return [split(output) for output in flat.outputs]
