"""Convolutions, and their windows as columns."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array, per_dim
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []


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
    made = jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        strides,
        pads,
        lhs_dilation,
        dilation,
        _dimension_numbers(count),
        feature_group_count=groups,
    )
    return made if bias is None else made + bias.reshape(-1, *(1,) * count)


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
        padded[:, :, top : top + ends[0] : stride[0], left : left + ends[1] : stride[1]]
        for top in range(0, dilation[0] * kernel[0], dilation[0])
        for left in range(0, dilation[1] * kernel[1], dilation[1])
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
    (made,) = transpose(batched)
    return made if columns.ndim == 3 else made[0]
