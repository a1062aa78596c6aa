"""Activation functions, with torch's gradients where the pieces of a function meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, as_axis, to_float, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("relu")
def _relu(x: Array) -> Array:
    return jnp.where(x <= 0, 0, x)  # the gradient at 0 is 0, and NaN passes


@lowers("leaky_relu")
def _leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, widen(x) * negative_slope)


@lowers("hardtanh")
def _hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    """Clamps to bounds. Unlike clamp's, the gradient at a bound is 0."""
    low, high = (jnp.asarray(bound, x.dtype) for bound in (min_val, max_val))
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@lowers("hardsigmoid", keep=True)
def _hardsigmoid(x: Array) -> Array:
    x = widen(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5))


@lowers("hardswish", keep=True)
def _hardswish(x: Array) -> Array:
    x = widen(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


@lowers("celu", keep=True)
def _celu(x: Array, alpha: float = 1) -> Array:
    return _elu(x, alpha, 1, 1 / alpha)


@lowers("elu")
def _elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    x = widen(x)
    negative = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x * scale, jnp.expm1(negative * input_scale) * (alpha * scale))


@lowers("gelu")
def _gelu(x: Array, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(widen(x), approximate=approximate == "tanh")


@lowers("silu", keep=True)
def _silu(x: Array) -> Array:
    return jax.nn.silu(widen(x))


@lowers("softplus", keep=True)
def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    """Softplus, the identity above the threshold. torch's decomposition gives NaN where exp overflows."""
    x = widen(x)
    scaled = x * beta
    is_linear = scaled > threshold
    return jnp.where(is_linear, x, jnp.log1p(jnp.exp(jnp.where(is_linear, 0, scaled))) / beta)


@lowers("mish", keep=True)
def _mish(x: Array) -> Array:
    x = widen(x)
    return x * jnp.tanh(jax.nn.softplus(x))


@lowers("log_sigmoid", keep=True)
def _log_sigmoid(x: Array) -> Array:
    return jax.nn.log_sigmoid(widen(x))


@lowers("_softmax")
def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    del half_to_float  # the graph's dtype decides it
    return jax.nn.softmax(to_float(x), as_axis(dim, x.ndim)) if x.ndim else jnp.ones_like(x)


@lowers("_log_softmax")
def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    del half_to_float
    return jax.nn.log_softmax(to_float(x), as_axis(dim, x.ndim)) if x.ndim else jnp.zeros_like(x)


@lowers("_safe_softmax", keep=True)
def _safe_softmax(x: Array, dim: int, *, dtype: Any = None) -> Array:
    """Computes a softmax that is 0 where all elements are minus infinity."""
    del dtype
    is_empty = jnp.all(x == -jnp.inf, as_axis(dim, x.ndim), keepdims=True)
    return jnp.where(is_empty, 0, _softmax(jnp.where(is_empty, 0, to_float(x)), dim))
