"""Layers that torch computes by one operation: convolutions, normalizations, embeddings, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, per_dim, widen
from ipu_pipeline.poptorch.lowering.random_numbers import drop
from ipu_pipeline.poptorch.lowering.reductions import variance
from ipu_pipeline.poptorch.lowering.registry import lowers

# Convolutions, and their windows as columns.


def _dimension_numbers(count: int) -> tuple[str, str, str]:
    letters = "DHW"[3 - count :] if count <= 3 else ""
    return f"NC{letters}", f"OI{letters}", f"NC{letters}"


@lowers("convolution")
def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """Convolves (batch, channels, *lengths) by weights (out, in / groups, *kernel).

    A transposed convolution has weights (in, out / groups, *kernel).
    """
    count = x.ndim - 2
    stride, padding, dilation = (per_dim(values, count) for values in (stride, padding, dilation))
    if transposed:
        extra = per_dim(output_padding, count)
        channels_in, per_group, *kernel = weight.shape
        weight = weight.reshape(groups, channels_in // groups, per_group, *kernel).swapaxes(1, 2)
        weight = weight.reshape(groups * per_group, channels_in // groups, *kernel)
        weight = jnp.flip(weight, range(2, 2 + count))
        reach = [dilation[i] * (kernel[i] - 1) for i in range(count)]
        pads = [(reach[i] - padding[i], reach[i] - padding[i] + extra[i]) for i in range(count)]
        strides, lhs_dilation = (1,) * count, stride
    else:
        pads = [(pad, pad) for pad in padding]
        strides, lhs_dilation = stride, (1,) * count
    outputs = jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        strides,
        pads,
        lhs_dilation,
        dilation,
        _dimension_numbers(count),
        feature_group_count=groups,
    )
    return outputs if bias is None else outputs + bias.reshape(-1, *(1,) * count)


@lowers("im2col", keep=True)
def _im2col(
    x: Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """Turns (batch, channels, height, width) into (batch, channels * kernel, windows)."""
    batched = x if x.ndim == 4 else x[None]
    kernel, dilation, padding, stride = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    padded = jax.lax.pad(
        batched, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in padding)]
    )
    counts = [(padded.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    ends = [(count - 1) * step + 1 for count, step in zip(counts, stride, strict=True)]
    windows = [
        padded[:, :, row : row + ends[0] : stride[0], column : column + ends[1] : stride[1]]
        for row in range(0, dilation[0] * kernel[0], dilation[0])
        for column in range(0, dilation[1] * kernel[1], dilation[1])
    ]
    columns = jnp.stack(windows, 2).reshape(
        batched.shape[0], batched.shape[1] * kernel[0] * kernel[1], counts[0] * counts[1]
    )
    return columns if x.ndim == 4 else columns[0]


@lowers("col2im", keep=True)
def _col2im(
    columns: Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """Computes the transpose of `_im2col`: overlapping windows are summed."""
    kernel = per_dim(kernel_size, 2)
    batched = columns if columns.ndim == 3 else columns[None]
    channels = batched.shape[1] // (kernel[0] * kernel[1])
    image = jax.ShapeDtypeStruct((batched.shape[0], channels, *per_dim(output_size, 2)), columns.dtype)
    transpose = jax.linear_transpose(lambda x: _im2col(x, kernel, dilation, padding, stride), image)
    (images,) = transpose(batched)
    return images if columns.ndim == 3 else images[0]


# Normalizations. Statistics are computed in at least 32 bits.


def _scaled_and_shifted(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * widen(weight)
    return x if bias is None else x + widen(bias)


def _by_channel(x: Array, values: Array | None) -> Array | None:
    """Reshapes one value for each channel (dimension 1) so that it broadcasts."""
    return None if values is None else values.reshape(1, -1, *(1,) * (x.ndim - 2))


def _normalize(x: Array, weight: Array | None, bias: Array | None, mean: Array, inverse: Array) -> Array:
    """Computes `(x - mean) * inverse`, then weight and bias, each with one value per channel."""
    scale = inverse if weight is None else inverse * widen(weight)
    return _scaled_and_shifted(widen(x) - _by_channel(x, mean), _by_channel(x, scale), _by_channel(x, bias))


def _statistics(x: Array, eps: float) -> tuple[Array, Array, Array]:
    """Returns the mean, the variance and the inverse deviation of each channel."""
    squares, mean = variance(x, (0, *range(2, x.ndim)), 0, keepdim=False)
    return mean, squares, jax.lax.rsqrt(squares + eps)


def _constant(mean: Array, inverse: Array) -> tuple[Array, Array]:
    """Returns the statistics as results, which have no gradient in torch (group statistics have)."""
    return jax.lax.stop_gradient(mean), jax.lax.stop_gradient(inverse)


@lowers("_native_batch_norm_legit_functional", keep=True)
def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Uses the batch's statistics in training, and moves the running ones towards them, unbiased."""
    if not training:
        return (
            *_batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps),
            running_mean,
            running_var,
        )
    mean, squares, inverse = _statistics(x, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = squares * (count / max(count - 1, 1))
    moved = [
        (1 - momentum) * widen(old) + momentum * jax.lax.stop_gradient(new)
        for old, new in ((running_mean, mean), (running_var, unbiased))
    ]
    return _normalize(x, weight, bias, mean, inverse), *_constant(mean, inverse), *moved


@lowers("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    del training, momentum
    mean, _, inverse = _statistics(x, eps)
    return _normalize(x, weight, bias, mean, inverse), *_constant(mean, inverse)


@lowers("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Uses only the running statistics. The batch statistics for a backward have no elements."""
    del momentum
    inverse = jax.lax.rsqrt(widen(running_var) + eps)
    nothing = jnp.zeros((0,), jnp.float32)
    return _normalize(x, weight, bias, widen(running_mean), inverse), nothing, nothing


@lowers("native_layer_norm")
def _layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Any, ...]:
    """Normalizes over the last dimensions."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    squares, mean = variance(x, axes, 0, keepdim=True)
    inverse = jax.lax.rsqrt(squares + eps)
    return _scaled_and_shifted((widen(x) - mean) * inverse, weight, bias), *_constant(mean, inverse)


@lowers("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    eps: float,
) -> tuple[Any, ...]:
    """Normalizes over the channels of a group and their planes."""
    grouped = x.reshape(batch, groups, channels // groups * plane)
    squares, mean = variance(grouped, (2,), 0, keepdim=True)
    inverse = jax.lax.rsqrt(squares + eps)
    normalized = ((widen(grouped) - mean) * inverse).reshape(x.shape)
    return (
        _scaled_and_shifted(normalized, _by_channel(x, weight), _by_channel(x, bias)),
        mean.reshape(batch, groups),
        inverse.reshape(batch, groups),
    )


# Rows of a table, and sums, means and maxima of bags of rows.


def _embedded_rows(weight: Array, indices: Array, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    """Takes rows. The padding row's gradient is 0; others may be divided by how often they are taken."""
    rows = weight.at[indices].get(mode="fill", wrap_negative_indices=False)
    if padding_idx >= 0:
        rows = jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
    if scale_grad_by_freq:
        counts = jnp.zeros(weight.shape[0], int).at[indices].add(1)
        rows = _divide_gradient(rows, counts[indices][..., None].astype(rows.dtype))
    return rows


@jax.custom_vjp
def _divide_gradient(x: Array, by: Array) -> Array:
    del by
    return x


_divide_gradient.defvjp(lambda x, by: (x, by), lambda by, gradient: (gradient / by, None))


@lowers("embedding")
def _embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    del sparse  # how torch keeps the gradient
    return _embedded_rows(weight, indices, padding_idx, scale_grad_by_freq)


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Reduces bags: runs of `indices` that begin at `offsets`. Mode 0 takes sums, 1 means, 2 maxima."""
    del sparse
    num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
    places = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    bags = jnp.searchsorted(offsets[:num_bags], places, side="right") - 1
    if include_last_offset:
        bags = jnp.where(places < offsets[-1], bags, num_bags)
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jnp.zeros(num_bags, indices.dtype).at[bags].add(counted.astype(indices.dtype), mode="drop")
    rows = widen(_embedded_rows(weight, indices, padding_idx, scale_grad_by_freq))
    if per_sample_weights is not None:
        rows = rows * widen(per_sample_weights)[:, None]
    empty = jnp.zeros((num_bags, weight.shape[1]), rows.dtype)
    if mode == 2:
        result, positions = _maxima_of_bags(rows, bags, counted, empty)
        return result, bags, sizes, jnp.where(positions < 0, positions, indices[positions])
    total = empty.at[bags].add(jnp.where(counted[:, None], rows, 0), mode="drop")
    if mode == 1:
        total = total / jnp.maximum(sizes, 1)[:, None].astype(total.dtype)
    return total, bags, sizes, jnp.zeros(num_bags, indices.dtype)


def _maxima_of_bags(rows: Array, bags: Array, counted: Array, empty: Array) -> tuple[Array, Array]:
    """Returns each bag's and column's maximum and the first row that has it; 0 and -1 for empty bags."""
    lowest = jnp.full_like(empty, -jnp.inf)
    values = jax.lax.stop_gradient(jnp.where(counted[:, None], rows, -jnp.inf))
    largest = lowest.at[bags].max(values, mode="drop")
    count = rows.shape[0]
    is_largest = counted[:, None] & (values == largest.at[bags].get(mode="fill"))
    places = jnp.where(is_largest, jnp.arange(count)[:, None], count)
    first = jnp.full(empty.shape, count).at[bags].min(places, mode="drop")
    result = jnp.take_along_axis(rows, jnp.minimum(first, count - 1), 0)
    return jnp.where(first < count, result, 0), jnp.where(first < count, first, -1)


# Attention as one operation, because torch's decomposition depends on the device that it runs on.


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
