"""The types that jaxprs are made of, from where this version of JAX has them.

`jax.extend.core` has all of them since JAX 0.10; before, some are in `jax.core`. Since JAX 0.11 there is
one type: a jaxpr has its constants, and `ClosedJaxpr` is another name of `Jaxpr`, whose `jaxpr` is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.core
import jax.extend.core
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun, primitives

__all__ = [
    "ClosedJaxpr",
    "DebugInfo",
    "DropVar",
    "Jaxpr",
    "Literal",
    "Primitive",
    "Var",
    "close",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "map_jaxprs",
    "primitives",
    "scan_counts",
]


def _find(name: str) -> Any:
    return getattr(jax.extend.core, name, None) or getattr(jax.core, name)


DebugInfo = _find("DebugInfo")
DropVar = _find("DropVar")
jaxprs_in_params = _find("jaxprs_in_params")


def map_jaxprs(change: Callable[[Any], Any], value: Any) -> Any:
    """Changes the jaxprs in an equation's parameter: one, several in a tuple or list, or none.

    Returns:
      The value with the changed jaxprs. One that stays is the same object, by which JAX knows that it has
      lowered it.
    """
    if type(value) in (tuple, list):
        return type(value)(map_jaxprs(change, part) for part in value)
    if isinstance(value, Jaxpr):
        return change(value)
    if not isinstance(value, ClosedJaxpr):
        return value
    new_jaxpr = change(value.jaxpr)
    return value if new_jaxpr is value.jaxpr else value.replace(jaxpr=new_jaxpr)


def close(jaxpr: Any) -> Any:
    """A `ClosedJaxpr` of a jaxpr without constants, which may be one already."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The number of a scan's first inputs that are constants, and of the next ones that are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _stacked = params["ft_in"].unpack()
    return len(constants), len(carried)
