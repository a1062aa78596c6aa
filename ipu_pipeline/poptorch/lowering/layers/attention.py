"""Attention as one operation, because torch's decomposition depends on the device that it runs on."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.random_numbers import drop
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


@lowers("scaled_dot_product_attention", keep=True)
def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Takes queries (..., heads, targets, features), keys and values (..., heads, sources, features).

    Scores and their softmax have at least 32 bits. A target whose sources are all masked gets zeros.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(x, repeats, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=widen(query[:0]).dtype) * scale
    if is_causal:
        attn_mask = jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
    if attn_mask is None:
        weights = jax.nn.softmax(scores, -1)
    else:
        is_boolean = attn_mask.dtype == jnp.bool_
        scores = jnp.where(attn_mask, scores, -jnp.inf) if is_boolean else scores + widen(attn_mask)
        has_source = jnp.any(scores > -jnp.inf, -1, keepdims=True)
        weights = jnp.where(has_source, jax.nn.softmax(jnp.where(has_source, scores, 0), -1), 0)
    weights = weights.astype(value.dtype)
    return jnp.matmul(drop(weights, dropout_p)[0] if dropout_p else weights, value)
