"""Keys of jaxprs: equal if they have the same equations, up to the names of variables.

A key has primitives, shapes and dtypes, parameters, numbers, constants, and which equation reads what. It
has no source lines, and no rules for derivatives: those may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.pytrees import is_key, is_readable

# Their parameters are a jaxpr and rules for transformations, which are made anew at each trace.
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def identify(jaxpr: Any, constants: Sequence[Any] = ()) -> Hashable:
    """The key of a jaxpr, for as long as it lives. What cannot be compared is only equal to itself."""
    if isinstance(jaxpr, jax_core.ClosedJaxpr):
        jaxpr, constants = jaxpr.jaxpr, jaxpr.consts
    numbers: dict[Any, int] = {}

    def define(variables: Sequence[Any]) -> Hashable:
        return tuple((numbers.setdefault(var, len(numbers)), var.aval) for var in variables)

    inputs = define(jaxpr.constvars), define(jaxpr.invars)
    code = [
        (identify_equation(equation, numbers.__getitem__), define(equation.outvars))
        for equation in jaxpr.eqns
    ]
    outputs = [identify_atom(atom, numbers.__getitem__) for atom in jaxpr.outvars]
    return inputs, _identify(constants), tuple(code), tuple(outputs)


def identify_equation(equation: Any, name: Callable[[Any], Hashable]) -> Hashable:
    """The key of an equation but for its results; `name` gives that of a variable that it reads."""
    operands, params = [identify_atom(atom, name) for atom in equation.invars], equation.params
    if equation.primitive.name in _WITH_RULES:
        params = {key: value for key, value in params.items() if _is_jaxpr(value)}
    return equation.primitive, tuple(operands), _identify(params), equation.ctx


def identify_atom(atom: Any, name: Callable[[Any], Hashable]) -> Hashable:
    """The key of a variable, from `name`, or of a literal."""
    if isinstance(atom, jax_core.Literal):
        return _identify(np.asarray(atom.val)), atom.aval
    return name(atom)


def _identify(value: Any) -> Hashable:
    """The key of a parameter or constant. To Python 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if _is_jaxpr(value):
        return identify(value)
    if isinstance(value, Mapping):
        return tuple((key, _identify(part)) for key, part in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_identify, value))
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    if is_array and is_readable(value) and not is_key(value):
        array = np.asarray(value)
        return array.dtype, array.shape, hashlib.sha256(array.tobytes()).digest()
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    return type(value), value if isinstance(value, Hashable) else id(value)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jax_core.Jaxpr, jax_core.ClosedJaxpr))
