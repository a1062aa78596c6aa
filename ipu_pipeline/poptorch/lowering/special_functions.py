"""Special functions: JAX's, orthogonal polynomials by recurrences, and Bessel functions as integrals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special

from ipu_pipeline.poptorch.lowering.arrays import Array, to_float
from ipu_pipeline.poptorch.lowering.registry import lowers, lowers_without_gradient

# Sources: the recurrences are in Abramowitz and Stegun, Handbook of Mathematical Functions (1964), chapter
# 22. The sum for erfcx is from Matta and Reichel, Mathematics of Computation 25 (1971).

_stop = jax.lax.stop_gradient


def _floats(function: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a function convert its arrays and numbers to floating point."""
    return lambda *args: function(*(to_float(jnp.asarray(arg)) for arg in args))


_JAX_FUNCTIONS: dict[str, Callable[..., Array]] = {
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
for _name, _function in _JAX_FUNCTIONS.items():
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
    direct = special.polygamma(n, positive) if n else special.digamma(positive)
    cotangent: Callable[[Array], Array] = _cotangent
    for _ in range(n):
        cotangent = _derivative(cotangent)
    reflected = direct * (-1) ** n - cotangent(jnp.where(is_negative, x, 0.5))
    return jnp.where(is_negative, reflected, direct)


def _cotangent(x: Array) -> Array:
    """Computes pi / tan(pi x), whose period is 1."""
    return jnp.pi / jnp.tan(jnp.pi * (x - _stop(jnp.round(x))))


def _derivative(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns the derivative of an elementwise function."""
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@lowers("special_erfcx")
@_floats
def _erfcx(x: Array) -> Array:
    """Computes exp(x²) erfc(x): from x = 1 on a sum of exp(-t²) / (x² + t²), less the pole's residue."""
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
    result = jax.lax.while_loop(
        lambda state: state[0] < most, step, (jnp.ones_like(most), jnp.ones_like(x), first)
    )[2]
    return jnp.where(degree < 0, 0, result)


def _shifted(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, n: function(2 * x - 1, n)


for _name, _row in _POLYNOMIALS.items():
    _compute = functools.partial(_polynomial, *_row)
    lowers_without_gradient(f"special_{_name}", _compute)
    if _name.startswith("chebyshev"):
        lowers_without_gradient(f"special_shifted_{_name}", _shifted(_compute))


# Bessel functions as integrals.
#
# Sources: Abramowitz and Stegun, Handbook of Mathematical Functions (1964): 9.1.21 for J, 9.1.88 for Y (its
# sum of J's is brought into the integral), 9.2.5 to 9.2.10 for large arguments, 9.6.24 for K. The integrals
# are sums by the trapezoidal rule, which converges exponentially for them (Trefethen and Weideman, SIAM
# Review 56, 2014).

_NUM_NODES = 64  # enough for arguments up to where the expansion takes over
_ASYMPTOTIC_FROM = 25
_ANGLES = np.pi * (np.arange(_NUM_NODES) + 0.5) / _NUM_NODES
_SINES = np.sin(_ANGLES)
_ORDERS = np.arange(1, 33)
# The sum over k of (-1)^k cos(2 k angle) / k, at each angle.
_LOGARITHMS = np.cos(2 * np.outer(_ANGLES, _ORDERS)) @ ((-1.0) ** _ORDERS / _ORDERS)


def _bessel_integral(order: int, weights: np.ndarray, x: Array) -> Array:
    """Returns the mean over angles of J's integrand with weights."""
    sines, factors = (jnp.asarray(values, x.dtype) for values in (_SINES, weights / _NUM_NODES))

    def add(number: Array, total: Array) -> Array:
        sine, factor = sines[number], factors[number]
        wave = jnp.cos(x * sine) if order == 0 else sine * jnp.sin(x * sine)
        return total + factor * wave

    return jax.lax.fori_loop(0, _NUM_NODES, add, jnp.zeros_like(x))


def _hankel_expansion(order: int, x: Array, wave: tuple[str, str]) -> Array:
    """Computes Hankel's expansion, with `wave` ("cos", "sin") for J and ("sin", "cos") for Y."""
    even, odd, term = jnp.ones_like(x), jnp.zeros_like(x), jnp.ones_like(x)
    for number in range(1, 11):
        term = term * (4 * order**2 - (2 * number - 1) ** 2) / (8 * number * x)
        sign = -1 if number % 4 in (2, 3) else 1
        even, odd = (even, odd + sign * term) if number % 2 else (even + sign * term, odd)
    # The angle is x - (2 order + 1) pi / 4: its cosine and sine are computed from x's.
    shift = (2 * order + 1) * np.pi / 4
    cosine = jnp.cos(x) * np.cos(shift) + jnp.sin(x) * np.sin(shift)
    sine = jnp.sin(x) * np.cos(shift) - jnp.cos(x) * np.sin(shift)
    waves = {"cos": cosine, "sin": sine}
    odd = odd if wave[0] == "sin" else -odd
    return jnp.sqrt(2 / (np.pi * x)) * (even * waves[wave[0]] + odd * waves[wave[1]])


def _bessel_j(order: int, x: Array) -> Array:
    x = to_float(x)
    size = jnp.abs(x)
    is_large = size > _ASYMPTOTIC_FROM
    near = _bessel_integral(order, np.ones(_NUM_NODES), jnp.where(is_large, 0, size))
    far = _hankel_expansion(order, jnp.where(is_large, size, _ASYMPTOTIC_FROM), ("cos", "sin"))
    result = jnp.where(is_large, far, near)
    result = jnp.where(jnp.isinf(x), 0, jnp.where(jnp.isnan(x), x, result))
    return jnp.where(x < 0, -result, result) if order else result


def _bessel_y(order: int, x: Array) -> Array:
    x = to_float(x)
    is_large = x > _ASYMPTOTIC_FROM
    small = jnp.where(is_large | ~(x > 0), 1, x)
    logarithm = jnp.log(small / 2) + np.euler_gamma
    near = logarithm * _bessel_j(order, small) - 2 * _bessel_integral(order, _LOGARITHMS, small)
    if order:  # the derivative of the function of order 0, with the other sign
        near = near - _bessel_j(0, small) / small
    far = _hankel_expansion(order, jnp.where(is_large, x, _ASYMPTOTIC_FROM), ("sin", "cos"))
    result = jnp.where(is_large, far, 2 / np.pi * near)
    result = jnp.where(x == jnp.inf, 0, result)
    return jnp.where(x > 0, result, jnp.where(x == 0, -jnp.inf, jnp.nan))


def _bessel_k(order: int, x: Array) -> Array:
    """Computes exp(x) K(x), the integral of exp(x (1 - cosh t)) cosh(order t) over t until it vanishes."""
    x = to_float(x)
    positive = jnp.where(x > 0, x, 1)
    count = 96
    end = jnp.arccosh(1 + 110 / positive)
    step = end / count

    def add(number: Array, total: Array) -> Array:
        t = number * step
        # cosh t - 1, without cancellation
        return total + jnp.exp(-2 * positive * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t)

    integral = step * jax.lax.fori_loop(1, count, add, jnp.full_like(x, 0.5))
    return jnp.where(x > 0, integral, jnp.where(x == 0, jnp.inf, jnp.nan))


for _order in (0, 1):
    lowers_without_gradient(f"special_bessel_j{_order}", functools.partial(_bessel_j, _order))
    lowers_without_gradient(f"special_bessel_y{_order}", functools.partial(_bessel_y, _order))
    _scaled_k = functools.partial(_bessel_k, _order)
    lowers_without_gradient(f"special_scaled_modified_bessel_k{_order}", _scaled_k)
    lowers_without_gradient(
        f"special_modified_bessel_k{_order}",
        functools.partial(lambda scaled, x: jnp.where(x > 0, jnp.exp(-x), 1) * scaled(x), _scaled_k),
    )


lowers_without_gradient("special_spherical_bessel_j0", lambda x: jnp.sinc(to_float(x) / np.pi))
