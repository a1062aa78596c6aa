"""Linear algebra: products and factorizations of matrices, and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, is_complex, is_inexact, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

# Matrix products.


@lowers("mm", "bmm", "mv", "dot")
@lowers("matmul", keep=True)  # torch's decomposition copies a matrix that a batch shares
def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b)


@lowers("linear", keep=True)  # so does that of linear
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    # Not `x @ weight.T`, which keeps a copy for the backward: the transposed weights.
    product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + bias


def _scaled_addition(product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Makes `beta * c + alpha * product(a, b)`. If beta is 0, c is not read, and its NaNs do not count."""

    def compute(c: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
        result = product(a, b)
        if not is_inexact(result):  # torch truncates the factors, too
            alpha, beta = int(alpha), int(beta)
        if beta == 1 and alpha == 1:
            return result + c
        scaled = widen(result) * alpha
        return jnp.broadcast_to(scaled if beta == 0 else scaled + widen(c) * beta, result.shape)

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
        product = rows @ matrices
    elif rows.ndim == 2 and matrices.ndim == 3:
        product = _grouped_product(rows, matrices, ends)
    else:
        raise NotImplementedError(
            f"torch.nn.functional.grouped_mm with offs takes rows and matrices of 2 and 3 dimensions; "
            f"got {rows.ndim} and {matrices.ndim}."
        )
    return product if bias is None else product + bias


for _name in ("addmm", "addmv", "baddbmm"):
    lowers(_name)(_scaled_addition(jnp.matmul))
lowers("addbmm", keep=True)(_scaled_addition(lambda a, b: jnp.einsum("bij,bjk->ik", a, b)))
lowers("addr", keep=True)(_scaled_addition(jnp.outer))


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


# Factorizations, and operations that use them. An input that is an error in torch, such as a matrix without
# a Cholesky factor, gives NaN or infinities, because a compiled program cannot raise. Functions that also
# return whether they failed (`cholesky_ex`, `inv_ex`) return 1 then, and 0 otherwise.

_stop = jax.lax.stop_gradient


def _adjoint(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _failure(matrices: Array) -> Array:
    """Returns a number for each result matrix: 1 if it has elements that are not finite, else 0."""
    return jnp.any(~jnp.isfinite(_stop(matrices)), (-2, -1)).astype(jnp.int32)


def _singular(lu: Array) -> Array:
    """Returns the number, from 1, of each matrix's first 0 on the diagonal; 0 without any."""
    is_zero = jnp.diagonal(_stop(lu), axis1=-2, axis2=-1) == 0
    if is_zero.shape[-1] == 0:
        return jnp.zeros(lu.shape[:-2], jnp.int32)
    return jnp.where(jnp.any(is_zero, -1), jnp.argmax(is_zero, -1) + 1, 0)


def _hermitian(x: Array, upper: bool) -> Array:
    """Makes a matrix from one triangle, with a gradient for both triangles, as in torch."""
    triangle = jnp.triu(x) if upper else jnp.tril(x)
    mirrored = _adjoint(jnp.triu(x, 1) if upper else jnp.tril(x, -1))
    halves = (x + _adjoint(x)) / 2
    return halves + _stop(triangle + mirrored - halves)


@lowers("_linalg_check_errors")
def _check_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


@lowers("cholesky")
def _cholesky(x: Array, upper: bool = False) -> Array:
    factor = jax.lax.linalg.cholesky(_hermitian(x, upper), symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@lowers("linalg_cholesky_ex")
def _cholesky_ex(x: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    del check_errors
    factor = _cholesky(x, upper)
    return factor, _failure(factor)


def _triangular(a: Array, b: Array, *, upper: bool, adjoint: bool = False, unit: bool = False) -> Array:
    """Solves `a x = b`, or the same with a's adjoint. Batches of matrices are broadcast."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    if 0 in b.shape:
        return b
    return jax.lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=not upper,
        transpose_a=adjoint,
        conjugate_a=adjoint and is_complex(a),
        unit_diagonal=unit,
    )


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


@lowers("linalg_solve_triangular")
def _solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    if left:
        return _triangular(a, b, upper=upper, unit=unitriangular)
    return _transposed(_triangular(_transposed(a), _transposed(b), upper=not upper, unit=unitriangular))


@lowers("triangular_solve")
def _triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    if transpose:
        a, upper = _transposed(a), not upper
    solution = _triangular(a, b, upper=upper, unit=unitriangular)
    a = _transposed(a) if transpose else a
    return solution, jnp.broadcast_to(a, (*solution.shape[:-2], *a.shape[-2:]))


@lowers("cholesky_solve", "_cholesky_solve_helper")
def _cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    half = _triangular(factor, b, upper=upper, adjoint=upper)
    return _triangular(factor, half, upper=upper, adjoint=not upper)


@lowers("cholesky_inverse")
def _cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    return _cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowers("linalg_qr")
def _qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Factors a wide matrix's square part, which JAX can differentiate, and computes the rest of R."""
    rows, columns = x.shape[-2:]
    if mode == "complete" and rows > columns:
        q, r = jnp.linalg.qr(x, "complete")
    else:
        q, r = jnp.linalg.qr(x[..., :rows], "reduced")
        if rows < columns:
            r = jnp.concatenate([r, _adjoint(q) @ x[..., rows:]], -1)
    return (jnp.zeros((0,), x.dtype) if mode == "r" else q), r


def _complete_basis(q: Array, size: int) -> Array:
    """Completes orthonormal columns to a square matrix by others without a gradient."""
    missing = size - q.shape[-1]
    if missing == 0:
        return q
    more = jnp.linalg.qr(_stop(q), "complete")[0][..., q.shape[-1] :]
    return jnp.concatenate([q, more], -1)


@lowers("_linalg_svd")
def _svd(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, ...]:
    del driver
    if not compute_uv:
        return jnp.zeros((0,), x.dtype), jnp.linalg.svd(x, compute_uv=False), jnp.zeros((0,), x.dtype)
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    if full_matrices:
        u = _complete_basis(u, x.shape[-2])
        vh = _adjoint(_complete_basis(_adjoint(vh), x.shape[-1]))
    return u, s, vh


@lowers("_linalg_eigh")
def _eigh(x: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    vectors, values = jax.lax.linalg.eigh(_hermitian(x, UPLO.upper() == "U"), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


def _as_complex(x: Array) -> Array:
    return x.astype(jnp.result_type(x, jnp.complex64))


def _eigenvalues(x: Array) -> Array:
    if x.size == 0:
        return _as_complex(x.reshape(x.shape[:-1]))
    return jax.lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


lowers("linalg_eigvals", "_linalg_eigvals", keep=True)(_eigenvalues)


@lowers("linalg_eig")
def _eig(x: Array) -> tuple[Array, Array]:
    """Eigenvectors have length 1, so their gradient leaves out what would change it."""
    if x.size == 0:
        return _as_complex(x.reshape(x.shape[:-1])), _as_complex(x)
    values, vectors = jax.lax.linalg.eig(
        x, compute_left_eigenvectors=False, compute_right_eigenvectors=True, enable_eigvec_derivs=True
    )
    return values, vectors


@lowers("linalg_lu_factor_ex")
def _lu_factor(x: Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    del check_errors
    if not pivot:
        raise NotImplementedError("An LU factorization without pivoting is not supported: use pivot=True.")
    lu, pivots, _permutation = jax.lax.linalg.lu(x)
    return lu, pivots + 1, _singular(lu)


def _unpack(lu: Array) -> tuple[Array, Array]:
    rows, columns = lu.shape[-2:]
    size = min(rows, columns)
    lower = jnp.tril(lu[..., :size], -1) + jnp.eye(rows, size, dtype=lu.dtype)
    return lower, jnp.triu(lu[..., :size, :])


def _permutation_matrix(permutation: Array, dtype: Any) -> Array:
    return _transposed(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype))


@lowers("linalg_lu")
def _lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    lu, pivots, _info = _lu_factor(x, pivot=pivot)
    return _lu_unpack(lu, pivots)


@lowers("lu_unpack")
def _lu_unpack(
    lu: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    nothing = jnp.zeros((0,), lu.dtype)
    lower, upper = _unpack(lu) if unpack_data else (nothing, nothing)
    if not unpack_pivots:
        return nothing, lower, upper
    permutation = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2])
    return _permutation_matrix(permutation, lu.dtype), lower, upper


@lowers("linalg_lu_solve")
def _lu_solve(lu: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    if not left:  # x a = b is a^H x^H = b^H
        return _adjoint(_lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))
    permutation = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2])
    matrix = _permutation_matrix(permutation, lu.dtype)
    if adjoint:
        half = _triangular(lu, b, upper=True, adjoint=True)
        return matrix @ _triangular(lu, half, upper=False, adjoint=True, unit=True)
    half = _triangular(lu, _transposed(matrix) @ b, upper=False, unit=True)
    return _triangular(lu, half, upper=True)


def _solve(a: Array, b: Array) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return b if 0 in b.shape else jnp.linalg.solve(a, b)


@lowers("_linalg_solve_ex")
def _solve_ex(a: Array, b: Array, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    del check_errors
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    wide = b[..., None] if is_vector else b
    solution = _solve(a, wide) if left else _transposed(_solve(_transposed(a), _transposed(wide)))
    factors = _lazily(lambda: jax.lax.linalg.lu(_stop(a)))
    return (
        solution[..., 0] if is_vector else solution,
        lambda: factors()[0],
        lambda: factors()[1] + 1,
        lambda: _singular(factors()[0]),
    )


def _lazily(compute: Any) -> Any:
    results: list[Any] = []

    def get() -> Any:
        if not results:
            results.append(compute())
        return results[0]

    return get


@lowers("linalg_inv_ex")
def _inv_ex(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    del check_errors
    inverse = x if x.size == 0 else jnp.linalg.inv(x)
    return inverse, _failure(inverse)


@lowers("_linalg_det")
def _det(x: Array) -> tuple[Any, ...]:
    factors = _lazily(lambda: jax.lax.linalg.lu(x))
    determinant = jnp.ones(x.shape[:-2], x.dtype) if x.shape[-1] == 0 else jnp.linalg.det(x)
    return determinant, lambda: factors()[0], lambda: factors()[1] + 1


@lowers("_linalg_slogdet")
def _slogdet(x: Array) -> tuple[Any, ...]:
    factors = _lazily(lambda: jax.lax.linalg.lu(x))
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, lambda: factors()[0], lambda: factors()[1] + 1


def _reflect(vectors: Array, tau: Array, x: Array, in_order: bool, conjugates: bool) -> Array:
    """Applies Householder reflections `1 - tau v v^H` one after another."""
    count = tau.shape[-1]
    vectors = jnp.tril(vectors[..., :count], -1) + jnp.eye(vectors.shape[-2], count, dtype=vectors.dtype)
    tau = jnp.conj(tau) if conjugates else tau

    def step(number: Array, x: Array) -> Array:
        place = number if in_order else count - 1 - number
        vector = jax.lax.dynamic_slice_in_dim(vectors, place, 1, -1)
        factor = jax.lax.dynamic_slice_in_dim(tau, place, 1, -1)[..., None]
        return x - factor * vector * (_adjoint(vector) @ x)

    return jax.lax.fori_loop(0, count, step, x)


@lowers("linalg_householder_product")
def _householder_product(vectors: Array, tau: Array) -> Array:
    eye = jnp.broadcast_to(
        jnp.eye(vectors.shape[-2], vectors.shape[-1], dtype=vectors.dtype), vectors.shape
    )
    return _reflect(vectors, tau, eye, in_order=False, conjugates=False)


@lowers("ormqr")
def _ormqr(vectors: Array, tau: Array, x: Array, left: bool = True, transpose: bool = False) -> Array:
    if left:
        return _reflect(vectors, tau, x, in_order=transpose, conjugates=transpose)
    return _adjoint(_reflect(vectors, tau, _adjoint(x), in_order=not transpose, conjugates=not transpose))


@lowers("geqrf")
def _geqrf(x: Array) -> tuple[Array, Array]:
    reflectors, tau = jnp.linalg.qr(x, "raw")
    return _transposed(reflectors), tau


@lowers("linalg_pinv.atol_rtol_tensor")
def _pinv(
    x: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False
) -> Array:
    """Computes a pseudo-inverse. Singular values up to the larger tolerance count as 0."""
    if x.size == 0:
        return _transposed(jnp.zeros_like(x))
    if hermitian:  # one triangle is read, but both have their own gradients
        x = x + _stop(_hermitian(x, upper=False) - x)
    largest = jnp.linalg.svd(_stop(x), compute_uv=False)[..., 0]
    floor = jnp.finfo(x.dtype).eps * max(x.shape[-2:])
    relative = (floor if atol is None else 0.0) if rtol is None else rtol
    if rtol is None and atol is not None:
        relative = jnp.where(atol > 0, 0.0, floor)
    absolute = 0.0 if atol is None else atol / jnp.where(largest == 0, 1, largest)
    return jnp.linalg.pinv(x, rtol=jnp.maximum(relative, absolute))


# Fourier transforms; torch's other ones are made of these three. Each goes over its dimensions one by one,
# because XLA's own transforms take at most three. `normalization` is 0 for none, 1 to divide by the root of
# the number of elements, 2 to divide by that number.

_FORWARD, _INVERSE = "backward", "forward"  # NumPy's names of the scalings that give each no factor


def _scaled_transform(x: Array, shape: Sequence[int], dim: Sequence[int], normalization: int) -> Array:
    count = math.prod(shape[axis] for axis in dim)
    return x / (1, math.sqrt(count), count)[normalization]


@lowers("_fft_c2c")
def _c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    transform = x
    for axis in dim:
        transform = (
            jnp.fft.fft(transform, axis=axis)
            if forward
            else jnp.fft.ifft(transform, axis=axis, norm=_INVERSE)
        )
    return _scaled_transform(transform, x.shape, dim, normalization)


@lowers("_fft_r2c")
def _r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    *outer_dims, last = dim
    transform = (jnp.fft.rfft if onesided else jnp.fft.fft)(x, axis=last)
    return _scaled_transform(_c2c(transform, outer_dims, 0, True), x.shape, dim, normalization)


@lowers("_fft_c2r")
def _c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    *outer_dims, last = dim
    transform = jnp.fft.irfft(_c2c(x, outer_dims, 0, False), last_dim_size, axis=last, norm=_INVERSE)
    return _scaled_transform(transform, transform.shape, dim, normalization)
