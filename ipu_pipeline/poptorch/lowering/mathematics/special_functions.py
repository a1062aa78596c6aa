"""Special functions: JAX's, and orthogonal polynomials by their recurrences.

Sources: the recurrences are in Abramowitz and Stegun, Handbook of Mathematical Functions (1964), chapter
22. The sum for erfcx is from Matta and Reichel, Mathematics of Computation 25 (1971).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy import special

from ipu_pipeline.poptorch.lowering.arrays import Array, to_float
from ipu_pipeline.poptorch.lowering.registry import lowers, lowers_without_gradient

__all__: list[str] = []

_stop = jax.lax.stop_gradient


def _floats(function: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a function convert its arrays and numbers to floating point."""
    return lambda *args: function(*(to_float(jnp.asarray(arg)) for arg in args))


_jax_has: dict[str, Callable[..., Array]] = {
    "i0": special.i0,
    "special_entr": special.entr,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtr": special.ndtr,
    "special_ndtri": special.ndtri,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
    "igamma": lambda a, x: special.gammainc(_stop(a), x),
    "igammac": lambda a, x: special.gammaincc(_stop(a), x),
    "special_xlog1py": special.xlog1py,
    "special_zeta": lambda s, q: special.zeta(_stop(s), q),
}
for _name, _function in _jax_has.items():
    lowers(_name, keep=True)(_floats(_function))


@lowers("digamma")
def _digamma(x: Array) -> Array:
    return _polygamma(0, x)


@lowers("polygamma")
def _polygamma(n: int, x: Array) -> Array:
    """Computes polygamma. Negative numbers are reflected, as JAX's values or gradients are wrong there."""
    x = to_float(x)
    is_negative = x < 0
    positive = jnp.where(is_negative, 1 - x, x)
    made = special.polygamma(n, positive) if n else special.digamma(positive)
    cotangent: Callable[[Array], Array] = _cotangent
    for _ in range(n):
        cotangent = _derivative(cotangent)
    reflected = made * (-1) ** n - cotangent(jnp.where(is_negative, x, 0.5))
    return jnp.where(is_negative, reflected, made)


def _cotangent(x: Array) -> Array:
    """Computes pi / tan(pi x), whose period is 1."""
    return jnp.pi / jnp.tan(jnp.pi * (x - _stop(jnp.round(x))))


def _derivative(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns the derivative of an elementwise function."""
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@lowers("special_erfcx")
@_floats
def _erfcx(x: Array) -> Array:
    """exp(x²) erfc(x): from x = 1 on a sum of exp(-t²) / (x² + t²), minus the residue at the pole."""
    is_large, step = x >= 1, 0.5
    large = jnp.where(is_large, x, 1)
    squares = [(number * step) ** 2 for number in range(1, 13)]
    total = 1 / large**2 + 2 * sum(jnp.exp(-square) / (large**2 + square) for square in squares)
    pole = jnp.pi / step
    near = jnp.minimum(large, pole)
    residue = jnp.where(large < pole, 2 * jnp.exp(near**2 - 2 * pole * near), 0)
    residue = residue / -jnp.expm1(-2 * pole * near)
    small = jnp.where(is_large, 0, x)
    direct = jnp.exp(small**2) * special.erfc(small)
    return jnp.where(is_large, step * large / jnp.pi * total - residue, direct)


Coefficients = Callable[[Array], tuple[Array, Array, Array]]

# p[k + 1] = (a x + b) p[k] - c p[k - 1], with p[0] = 1 and p[1] = d x + e, and a, b, c as functions of k.
_CHEBYSHEV: Coefficients = lambda k: (2 + 0 * k, 0 * k, 1 + 0 * k)  # noqa: E731  # a row of the table
_POLYNOMIALS: dict[str, tuple[float, float, Coefficients]] = {
    "chebyshev_polynomial_t": (1, 0, _CHEBYSHEV),
    "chebyshev_polynomial_u": (2, 0, _CHEBYSHEV),
    "chebyshev_polynomial_v": (2, -1, _CHEBYSHEV),
    "chebyshev_polynomial_w": (2, 1, _CHEBYSHEV),
    "hermite_polynomial_h": (2, 0, lambda k: (2 + 0 * k, 0 * k, 2 * k)),
    "hermite_polynomial_he": (1, 0, lambda k: (1 + 0 * k, 0 * k, k)),
    "laguerre_polynomial_l": (-1, 1, lambda k: (-1 / (k + 1), (2 * k + 1) / (k + 1), k / (k + 1))),
    "legendre_polynomial_p": (1, 0, lambda k: ((2 * k + 1) / (k + 1), 0 * k, k / (k + 1))),
}


def _polynomial(factor: float, number: float, coefficients: Coefficients, x: Array, n: Array) -> Array:
    """Computes polynomials of the degrees n, which are truncated; 0 for negative degrees."""
    x, degree = jnp.broadcast_arrays(x, jnp.trunc(n))

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, before, now = state
        a, b, c = coefficients(k)
        after = jnp.where(degree > k, (a * x + b) * now - c * before, now)
        return k + 1, jnp.where(degree > k, now, before), after

    first = jnp.where(degree > 0, factor * x + number, jnp.ones_like(x))
    most = jnp.max(degree, initial=0)
    made = jax.lax.while_loop(
        lambda state: state[0] < most, step, (jnp.ones_like(most), jnp.ones_like(x), first)
    )[2]
    return jnp.where(degree < 0, 0, made)


def _shifted(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, n: function(2 * x - 1, n)


for _name, _row in _POLYNOMIALS.items():
    _compute = functools.partial(_polynomial, *_row)
    lowers_without_gradient(f"special_{_name}", _compute)
    if _name.startswith("chebyshev"):
        lowers_without_gradient(f"special_shifted_{_name}", _shifted(_compute))
