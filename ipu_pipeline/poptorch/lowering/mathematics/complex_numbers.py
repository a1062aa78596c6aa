"""Complex numbers, made, taken apart and conjugated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, is_complex, is_inexact
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []

lowers("complex")(jax.lax.complex)
lowers("conj", "_conj", "conj_physical", "_conj_physical")(lambda x: jnp.conj(x) if is_complex(x) else x)
lowers("resolve_conj", "resolve_neg", "_conj_copy", "lift")(lambda x: x)
lowers("_neg_view", "_neg_view_copy")(jnp.negative)
lowers("real")(jnp.real)
lowers("imag")(jnp.imag)


@lowers("view_as_real", "view_as_real_copy")
def _view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


@lowers("view_as_complex", "view_as_complex_copy")
def _view_as_complex(x: Array) -> Array:
    return jax.lax.complex(x[..., 0], x[..., 1])


@lowers("polar")
def _polar(length: Array, angle: Array) -> Array:
    return jax.lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


@lowers("angle")
def _angle(x: Array) -> Array:
    """Computes angles: for reals 0 or pi (NaN for NaN), without a gradient. At 0 the gradient is 0."""
    if is_complex(x):
        safe = jnp.where(x == 0, 1, x)
        return jnp.where(x == 0, jnp.angle(jax.lax.stop_gradient(x)), jnp.arctan2(safe.imag, safe.real))
    made = jnp.where(x < 0, jnp.pi, 0.0)
    return jnp.where(jnp.isnan(x), x, made) if is_inexact(x) else made
