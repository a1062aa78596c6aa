"""Counts what programs cost, from their equations. Nothing is compiled or measured.

XLA's own analysis (`cost_analysis` of a lowered or compiled program) counts the body of a loop once,
whatever its number of turns: 524,290 flops for a scan of ten products of 64 x 64 matrices (jax 0.10.2,
CPU), where there are ten times as many. Stages that scan over layers would look cheap.

The cost of a foreign function is not in its equation: `jax.ffi.ffi_call`, a Pallas kernel, a callback into
Python, a factorization of LAPACK's, a primitive that JAX does not have. It may be anything, so it is named
and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ipu_pipeline.ground import jax_core

# A product of matrices does many operations per element that it reads. Anything else is bound by memory,
# where an element takes about as long as this number of a product's operations.
_PER_ELEMENT = 10.0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# JAX's own primitives whose work is not proportional to elements: most are calls of LAPACK on a CPU.
_UNCOUNTED = _words(
    "cholesky eig eigh hessenberg householder_product lu qr schur svd triangular_solve tridiagonal "
    "tridiagonal_solve"
)
_PRIMITIVES = {
    value
    for value in vars(jax_core.primitives).values()
    if isinstance(value, jax_core.Primitive) and value.name not in _UNCOUNTED
}
# JAX has these too, and `jax.extend.core.primitives` does not list them.
_UNLISTED = _words(
    "accum_grad_in_ref addupdate broadcast_to checkpoint closed_call composite core_closed_call "
    "custom_jvp_call_jaxpr custom_vmap_call dce_sink dimension_size empty empty_ref freeze from_edtype "
    "iota_2x32_shape jit layout_constraint linear_call lu_pivots_to_permutation mulhi new_ref "
    "optimization_barrier pbroadcast philox2x32 philox4x32 pin pjit platform_index psum_invariant pvary "
    "ragged_dot_general random_clone random_unwrap random_wrap reciprocal reduce_scatter remat remat2 "
    "remat_opt reshard run_state scaled_dot scatter-sub shard_map split stack stage threefry4x32 tie tile "
    "to_edtype unpin unstack with_memory_space_constraint zeros_like"
)


def count_operations(jaxpr: Any) -> float:
    """Estimates how long a jaxpr takes, in floating-point operations of a product of matrices.

    A product, or a convolution, has 2 x (elements of the result) x (elements that are summed up for each).
    A conditional counts as its longest branch, and a loop without a known number of turns as one turn.
    """
    return count_equations(jaxpr.eqns)


def count_equations(equations: Iterable[Any]) -> float:
    """The same as `count_operations`, for equations of a jaxpr."""
    return sum((_count(equation) for equation in equations), 0.0)


def count_primitives(jaxpr: Any) -> int:
    """The number of equations in a jaxpr and its inner jaxprs, without equations that only wrap a jaxpr."""
    number = 0
    for equation in jaxpr.eqns:
        inner = _inner(equation)
        number += sum(count_primitives(getattr(body, "jaxpr", body)) for body in inner)
        number += not inner or equation.primitive.name in ("cond", "scan", "while")
    return number


def find_uncounted(jaxpr: Any) -> frozenset[str]:
    """Names of what takes an unknown time for `count_operations`, in a jaxpr or in one within it."""
    names: set[str] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if equation.primitive in _PRIMITIVES or name in _UNLISTED:
            for inner in _inner(equation):
                names |= find_uncounted(getattr(inner, "jaxpr", inner))
        else:
            target = equation.params.get("target_name")
            names.add(name if target is None else f"{name}({target})")
    return frozenset(names)


def _inner(equation: Any) -> list[Any]:
    """The jaxprs of an equation, open or closed."""
    jaxprs = []
    for value in equation.params.values():
        values = value if isinstance(value, (list, tuple)) else [value]
        jaxprs += [item for item in values if hasattr(item, "eqns")]
    return jaxprs


def _count(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _right), _batch = params["dimension_numbers"]
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
