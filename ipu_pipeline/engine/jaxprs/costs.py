"""What programs cost, counted from their equations. Nothing is compiled or measured.

XLA's own analysis (`cost_analysis` of a lowered or compiled program) counts the body of a loop once,
whatever its number of turns: 524,290 flops for a scan of ten products of 64 x 64 matrices (jax 0.10.2,
CPU), where there are ten times as many. Stages that scan over layers would look cheap.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["count_operations", "has_convolutions"]

# A product of matrices does many operations per element that it reads; anything else is bound by memory,
# where an element takes about as long as so many operations of a product.
_PER_ELEMENT = 10.0


def count_operations(jaxpr: Any) -> float:
    """How long a jaxpr takes, in floating-point operations of a product of matrices.

    A product has 2 x (elements of the result) x (elements that are summed up for each), and so has a
    convolution. A conditional counts as its longest branch, and a loop without a known number of turns as
    one turn.

    Args:
      jaxpr: a `Jaxpr`.
    """
    return sum(_count(equation) for equation in jaxpr.eqns)


def has_convolutions(jaxpr: Any) -> bool:
    """Whether there is a convolution in a jaxpr, or in one within it."""
    return any(
        equation.primitive.name == "conv_general_dilated"
        or any(has_convolutions(getattr(inner, "jaxpr", inner)) for inner in _inner(equation))
        for equation in jaxpr.eqns
    )


def _inner(equation: Any) -> list[Any]:
    """The jaxprs of an equation, open or closed."""
    found = []
    for value in equation.params.values():
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [each for each in values if hasattr(each, "eqns")]
    return found


def _count(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _others), _batch = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        summed = math.prod(shape[place] for place in contracted)
        return 2.0 * _size(equation.outvars[0]) * float(summed)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        num_outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0]) * float(math.prod(kernel) / num_outputs)
    if name == "scan":
        return float(params["length"]) * count_operations(params["jaxpr"].jaxpr)
    if name == "while":
        return count_operations(params["body_jaxpr"].jaxpr)
    if name == "cond":
        return max(count_operations(branch.jaxpr) for branch in params["branches"])
    for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if parameter in params:
            inner = params[parameter]
            return count_operations(getattr(inner, "jaxpr", inner))
    return _PER_ELEMENT * sum(_size(var) for var in equation.outvars)


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))
