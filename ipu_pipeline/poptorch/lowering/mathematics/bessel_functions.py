"""Bessel functions as integrals.

Sources: Abramowitz and Stegun, Handbook of Mathematical Functions (1964): 9.1.21 for J, 9.1.88 for Y (its
sum of J's is brought into the integral), 9.2.5 to 9.2.10 for large arguments, 9.6.24 for K. The integrals
are sums by the trapezoidal rule, which converges exponentially for them (Trefethen and Weideman, SIAM
Review 56, 2014).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, to_float
from ipu_pipeline.poptorch.lowering.registry import lowers_without_gradient

__all__: list[str] = []

_NUM_NODES = 64  # enough for arguments up to where the expansion takes over
_ASYMPTOTIC_FROM = 25
_ANGLES = np.pi * (np.arange(_NUM_NODES) + 0.5) / _NUM_NODES
_SINES = np.sin(_ANGLES)
_ORDERS = np.arange(1, 33)
# The sum over k of (-1)^k cos(2 k angle) / k, at each angle.
_LOGARITHMS = np.cos(2 * np.outer(_ANGLES, _ORDERS)) @ ((-1.0) ** _ORDERS / _ORDERS)


def _integral(order: int, weights: np.ndarray, x: Array) -> Array:
    """Returns the mean over angles of J's integrand with weights."""
    sines, factors = (jnp.asarray(values, x.dtype) for values in (_SINES, weights / _NUM_NODES))

    def add(number: Array, total: Array) -> Array:
        sine, factor = sines[number], factors[number]
        wave = jnp.cos(x * sine) if order == 0 else sine * jnp.sin(x * sine)
        return total + factor * wave

    return jax.lax.fori_loop(0, _NUM_NODES, add, jnp.zeros_like(x))


def _expansion(order: int, x: Array, wave: tuple[str, str]) -> Array:
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
    near = _integral(order, np.ones(_NUM_NODES), jnp.where(is_large, 0, size))
    far = _expansion(order, jnp.where(is_large, size, _ASYMPTOTIC_FROM), ("cos", "sin"))
    made = jnp.where(is_large, far, near)
    made = jnp.where(jnp.isinf(x), 0, jnp.where(jnp.isnan(x), x, made))
    return jnp.where(x < 0, -made, made) if order else made


def _bessel_y(order: int, x: Array) -> Array:
    x = to_float(x)
    is_large = x > _ASYMPTOTIC_FROM
    small = jnp.where(is_large | ~(x > 0), 1, x)
    logarithm = jnp.log(small / 2) + np.euler_gamma
    near = logarithm * _bessel_j(order, small) - 2 * _integral(order, _LOGARITHMS, small)
    if order:  # the derivative of the function of order 0, with the other sign
        near = near - _bessel_j(0, small) / small
    far = _expansion(order, jnp.where(is_large, x, _ASYMPTOTIC_FROM), ("sin", "cos"))
    made = jnp.where(is_large, far, 2 / np.pi * near)
    made = jnp.where(x == jnp.inf, 0, made)
    return jnp.where(x > 0, made, jnp.where(x == 0, -jnp.inf, jnp.nan))


def _bessel_k(order: int, x: Array) -> Array:
    """exp(x) K(x): the integral of exp(x (1 - cosh t)) cosh(order t) over t from 0 to where it vanishes."""
    x = to_float(x)
    positive = jnp.where(x > 0, x, 1)
    count = 96
    end = jnp.arccosh(1 + 110 / positive)
    step = end / count

    def add(number: Array, total: Array) -> Array:
        t = number * step
        # cosh t - 1, without cancellation
        return total + jnp.exp(-2 * positive * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t)

    made = step * jax.lax.fori_loop(1, count, add, jnp.full_like(x, 0.5))
    return jnp.where(x > 0, made, jnp.where(x == 0, jnp.inf, jnp.nan))


for _order in (0, 1):
    lowers_without_gradient(f"special_bessel_j{_order}", functools.partial(_bessel_j, _order))
    lowers_without_gradient(f"special_bessel_y{_order}", functools.partial(_bessel_y, _order))
    _scaled = functools.partial(_bessel_k, _order)
    lowers_without_gradient(f"special_scaled_modified_bessel_k{_order}", _scaled)
    lowers_without_gradient(
        f"special_modified_bessel_k{_order}",
        functools.partial(lambda scaled, x: jnp.where(x > 0, jnp.exp(-x), 1) * scaled(x), _scaled),
    )


lowers_without_gradient("special_spherical_bessel_j0", lambda x: jnp.sinc(to_float(x) / np.pi))
