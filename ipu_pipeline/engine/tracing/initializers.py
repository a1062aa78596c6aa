"""Initializers by their names in Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["find_initializer", "glorot_uniform"]


def glorot_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """TensorFlow 1's default initializer, for every rank: uniform between -limit and limit.

    The limit is sqrt(6 / (fan_in + fan_out)). For rank 2 and more the fans are JAX's; for rank 1 both are
    the size, and for a scalar both are 1.

    Source: tf.glorot_uniform_initializer of TensorFlow 1.15; Glorot and Bengio (2010).
    """
    if len(shape) >= 2:
        return jax.nn.initializers.glorot_uniform()(key, shape, dtype)
    fan = shape[0] if shape else 1
    scaled = jax.nn.initializers.variance_scaling(1 / fan, "fan_in", "uniform")
    return scaled(key, (1, fan), dtype).reshape(shape)


def _random_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -0.05, 0.05)


def _orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    wide = np.promote_types(dtype, np.float32)  # there is no QR decomposition in 16 bits
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


_INITIALIZERS: dict[str, Callable[[], Any]] = {
    "glorot_normal": jax.nn.initializers.glorot_normal,
    "glorot_uniform": lambda: glorot_uniform,
    "he_normal": jax.nn.initializers.he_normal,
    "he_uniform": jax.nn.initializers.he_uniform,
    "lecun_normal": jax.nn.initializers.lecun_normal,
    "lecun_uniform": jax.nn.initializers.lecun_uniform,
    "normal": lambda: jax.nn.initializers.normal(0.05),
    "ones": lambda: jax.nn.initializers.ones,
    "orthogonal": lambda: _orthogonal,
    "random_normal": lambda: jax.nn.initializers.normal(0.05),
    "random_uniform": lambda: _random_uniform,
    "uniform": lambda: _random_uniform,
    "zeros": lambda: jax.nn.initializers.zeros,
}


def find_initializer(initializer: Any) -> Any:
    """Finds an initializer by its name; anything but a string is left to `get_variable`."""
    if not isinstance(initializer, str):
        return initializer
    if initializer not in _INITIALIZERS:
        raise ValueError(
            f"There is no initializer {initializer!r}; there are {', '.join(_INITIALIZERS)}, or give a "
            "function or an array."
        )
    return _INITIALIZERS[initializer]()
