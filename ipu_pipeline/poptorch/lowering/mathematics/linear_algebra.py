"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, is_inexact, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("mm", "bmm", "mv", "dot")
@lowers("matmul", keep=True)  # torch's decomposition copies a matrix that a batch shares
def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b)


@lowers("linear", keep=True)  # for the same reason
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    # Not `x @ weight.T`, which keeps a copy for the backward: the transposed weights.
    made = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return made if bias is None else made + bias


def _added(product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Makes `beta * c + alpha * product(a, b)`. If beta is 0, c is not read, and its NaNs do not count."""

    def compute(c: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
        made = product(a, b)
        if not is_inexact(made):  # torch truncates the factors, too
            alpha, beta = int(alpha), int(beta)
        if beta == 1 and alpha == 1:
            return made + c
        scaled = widen(made) * alpha
        return jnp.broadcast_to(scaled if beta == 0 else scaled + widen(c) * beta, made.shape)

    return compute


@lowers("transformers::grouped_mm_fallback")
def _grouped_product(rows: Array, matrices: Array, ends: Array) -> Array:
    """Multiplies groups of rows by a matrix each, as for experts. `ends` is where each group ends."""
    sizes = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype)).astype(jnp.int32)
    return jax.lax.ragged_dot(rows, matrices, sizes)


@lowers("_grouped_mm", keep=True)
def _grouped_mm(
    rows: Array, matrices: Array, ends: Array | None = None, bias: Array | None = None, dtype: Any = None
) -> Array:
    del dtype  # the result is cast to it
    if ends is None:
        made = rows @ matrices
    elif rows.ndim == 2 and matrices.ndim == 3:
        made = _grouped_product(rows, matrices, ends)
    else:
        raise NotImplementedError(
            f"torch.nn.functional.grouped_mm with offs takes rows and matrices of 2 and 3 dimensions; "
            f"got {rows.ndim} and {matrices.ndim}."
        )
    return made if bias is None else made + bias


for _name in ("addmm", "addmv", "baddbmm"):
    lowers(_name)(_added(jnp.matmul))
lowers("addbmm", keep=True)(_added(lambda a, b: jnp.einsum("bij,bjk->ik", a, b)))
lowers("addr", keep=True)(_added(jnp.outer))


@lowers("_trilinear")
def _trilinear(
    a: Array,
    b: Array,
    c: Array,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Array:
    """Multiplies three arrays, each with dimensions of 1 put in, and sums over some dimensions."""
    del unroll_dim  # only an order of computation
    ndim = a.ndim + len(expand1)
    terms = []
    for array, expanded in ((a, expand1), (b, expand2), (c, expand3)):
        put_in = {dim % ndim for dim in expanded}
        terms += [array, [dim for dim in range(ndim) if dim not in put_in]]
    summed = {dim % ndim for dim in sumdim}
    return jnp.einsum(*terms, [dim for dim in range(ndim) if dim not in summed])


@lowers("linalg_matrix_exp", keep=True)
def _matrix_exp(x: Array) -> Array:
    return jax.scipy.linalg.expm(x)
