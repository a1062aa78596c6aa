"""Jaxprs that were traced in a mesh, without it.

JAX notes the mesh of a trace in the type of every value, and mixes no values of different meshes. A program
would take only values of that mesh, also where it computes nothing with it. Here types become what they are
without a mesh. It is left where it means something: in `jax.shard_map`, whose body stays as it is, and in
constraints on how values lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ipu_pipeline.engine.jaxprs.flat import Atom, Equation, Var, has_primitive, is_var
from ipu_pipeline.ground import jax_compat, jax_core

_SHARD_MAP = "shard_map"
_CONSTRAINT = "sharding_constraint"
_RESHARD = "reshard"
_CASTS = ("pvary", "pbroadcast")  # in a body of `shard_map`; they compute nothing


def uses_mesh(equations: Iterable[Equation]) -> bool:
    """Whether equations compute with a mesh, or constrain how values lie on it, at any depth."""
    return any(
        has_primitive(equation, name) for equation in equations for name in (_SHARD_MAP, _CONSTRAINT)
    )


def has_shard_map(equations: Iterable[Equation]) -> bool:
    """Whether equations have a `jax.shard_map` at any depth."""
    return any(has_primitive(equation, _SHARD_MAP) for equation in equations)


def find_other_devices(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Yields the equations, at any depth, that name several devices for values to be on."""
    for equation in equations:
        mesh = getattr(equation.params.get("sharding"), "mesh", equation.params.get("mesh"))
        if isinstance(mesh, Mesh) and mesh.size > 1:
            yield equation
        for body in jax_core.jaxprs_in_params(equation.params):
            yield from find_other_devices(body.eqns)


def find_collectives(equations: Iterable[Equation], axis: str) -> Iterator[Equation]:
    """Yields the equations, at any depth, that compute along a mesh axis or with a number on it."""
    for equation in equations:
        named = [equation.params.get(name, ()) for name in ("axes", "axis_name")]
        names = [part for value in named for part in (value if isinstance(value, tuple) else (value,))]
        if axis in names and equation.primitive.name not in _CASTS:
            yield equation
        for body in jax_core.jaxprs_in_params(equation.params):
            yield from find_collectives(body.eqns, axis)


def without_mesh(closed_jaxpr: Any, *, is_differentiated: bool) -> Any:
    """Takes the mesh out of a jaxpr's types, and drops constraints on a mesh of one device."""
    return _Rewriting(not is_differentiated).close(closed_jaxpr)


class _Rewriting:
    """Rewrites jaxprs; a body that occurs twice stays one."""

    def __init__(self, keeps_rules: bool) -> None:
        self._keeps_rules = keeps_rules
        # identity of what was rewritten -> it, and the new one
        self._known: dict[int, tuple[Any, Any]] = {}

    def close(self, closed_jaxpr: Any) -> Any:
        """A `ClosedJaxpr` without a mesh."""
        if id(closed_jaxpr) not in self._known:
            constants = list(map(jax_compat.array_without_mesh, closed_jaxpr.consts))
            rewritten = jax_core.ClosedJaxpr(self.open(closed_jaxpr.jaxpr), constants)
            self._known[id(closed_jaxpr)] = closed_jaxpr, rewritten
        return self._known[id(closed_jaxpr)][1]

    def open(self, jaxpr: Any) -> Any:
        """A `Jaxpr` without a mesh."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewrite(self, jaxpr: Any) -> Any:
        env: dict[Var, Atom] = {}

        def make(variables: Iterable[Var]) -> list[Var]:
            for var in variables:
                env[var] = var if isinstance(var, jax_core.DropVar) else _without(var)
            return [env[var] for var in variables]

        def read(atoms: Iterable[Atom]) -> list[Atom]:
            return [env[atom] if is_var(atom) else _literal_without(atom) for atom in atoms]

        constants, inputs = make(jaxpr.constvars), make(jaxpr.invars)
        equations = []
        for equation in jaxpr.eqns:
            operands = read(equation.invars)
            if _moves_nothing(equation):
                env[equation.outvars[0]] = operands[0]
                continue
            params = equation.params
            if equation.primitive.name != _SHARD_MAP:
                params = {name: self._change(value) for name, value in params.items()}
            if equation.primitive.name != _CONSTRAINT:  # as of zeros like a value, with that value's type
                params = {name: None if _is_of_mesh(value) else value for name, value in params.items()}
            outputs, context = make(equation.outvars), equation.ctx
            if not (self._keeps_rules and equation.primitive.name.startswith("custom_")):
                context = self._context(context)
            equations.append(equation.replace(invars=operands, outvars=outputs, params=params, ctx=context))
        return jaxpr.replace(
            constvars=constants,
            invars=inputs,
            outvars=read(jaxpr.outvars),
            eqns=equations,
            debug_info=jaxpr.debug_info,  # JAX 0.9 differentiates no loop without it
        )

    def _context(self, context: Any) -> Any:
        if id(context) not in self._known:
            self._known[id(context)] = context, jax_compat.context_without_mesh(context)
        return self._known[id(context)][1]

    def _change(self, value: Any) -> Any:
        if isinstance(value, jax_core.ClosedJaxpr):  # since JAX 0.11 all are
            return self.close(value)
        if isinstance(value, jax_core.Jaxpr):
            return self.open(value)
        if type(value) in (tuple, list) and any(
            isinstance(part, (jax_core.ClosedJaxpr, jax_core.Jaxpr)) for part in value
        ):
            return type(value)(map(self._change, value))
        return value


def _moves_nothing(equation: Equation) -> bool:
    """Whether an equation only says where a value lies, and that says nothing on the mesh of a stage."""
    if equation.primitive.name == _RESHARD:  # axes are automatic, so JAX takes no name of one here
        return _is_of_mesh(equation.params["dst_sharding"])
    return equation.primitive.name == _CONSTRAINT and bool(equation.params["sharding"].num_devices == 1)


def _is_of_mesh(value: Any) -> bool:
    return isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh)


def _without(var: Var) -> Var:
    aval = jax_compat.without_mesh(var.aval)
    return var if aval is var.aval else jax_core.Var(aval)


def _literal_without(literal: Any) -> Any:
    value, aval = jax_compat.array_without_mesh(literal.val), jax_compat.without_mesh(literal.aval)
    return literal if value is literal.val else jax_core.Literal(value, aval)
