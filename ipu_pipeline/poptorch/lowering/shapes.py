"""Makes arrays, and moves, pads or selects elements at places that are known before a program runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.lowering.arrays import Array, Dims, as_axes, as_axis
from ipu_pipeline.poptorch.lowering.registry import lowers

# New arrays. The graph's results decide their dtypes. Memory that torch leaves unset is 0 here.


@lowers("full")
def _full(size: Sequence[int], value: Any, *, dtype: Any = None) -> Array:
    return jnp.full(tuple(size), value, dtype)


@lowers("full_like")
def _full_like(x: Array, value: Any, *, dtype: Any = None) -> Array:
    return jnp.full(x.shape, value, x.dtype if dtype is None else dtype)


@lowers("fill")
def _fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype)


@lowers("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: Any = None) -> Array:
    return jnp.asarray(value, dtype)


@lowers("empty", "zeros", "empty_permuted", "empty_strided")
def _zeros(size: Sequence[int], layout: Any = None, *, dtype: Any = None) -> Array:
    del layout
    return jnp.zeros(tuple(size), dtype)


@lowers("ones")
def _ones(size: Sequence[int], *, dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype)


@lowers("empty_like", "zeros_like")
def _zeros_like(x: Array, *, dtype: Any = None) -> Array:
    return jnp.zeros(x.shape, dtype or x.dtype)


@lowers("ones_like")
def _ones_like(x: Array, *, dtype: Any = None) -> Array:
    return jnp.ones(x.shape, dtype or x.dtype)


@lowers("arange.start_step")
def _arange(start: float, end: float, step: float = 1, *, dtype: Any = None) -> Array:
    """Computes `start + number * step`, which rounds as in torch."""
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        count = len(range(start, end, step))
    else:
        count = max(0, math.ceil((end - start) / step))
    wide = jnp.result_type(float) if dtype is None or jnp.issubdtype(dtype, jnp.floating) else dtype
    return jax.lax.iota(wide, count) * step + start


@lowers("eye", keep=True)
def _eye(n: int, m: int | None = None, *, dtype: Any = None) -> Array:
    return jnp.eye(n, n if m is None else m, dtype=dtype)


@lowers("tril", keep=True)
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lowers("triu", keep=True)
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


# Elements moved or selected.


@lowers("view.default", "reshape", "_unsafe_view", "_reshape_alias")
def _view(x: Array, size: Sequence[int], stride: Sequence[int] | None = None) -> Array:
    del stride
    return x.reshape(tuple(size))


@lowers("expand")
def _expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    del implicit
    new = len(size) - x.ndim
    return jnp.broadcast_to(
        x, [x.shape[dim - new] if length == -1 else length for dim, length in enumerate(size)]
    )


@lowers("permute")
def _permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, [as_axis(dim, x.ndim) for dim in dims])


@lowers("t")
def _t(x: Array) -> Array:
    return x.T


@lowers("transpose.int")
def _transpose(x: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers("unsqueeze")
def _unsqueeze(x: Array, dim: int) -> Array:
    return jnp.expand_dims(x, dim)


@lowers("squeeze")
def _squeeze(x: Array, dim: Dims = None) -> Array:
    axes = range(x.ndim) if dim is None else as_axes(dim, x.ndim) if dim != [] else ()
    return x.squeeze(tuple(axis for axis in axes if x.shape[axis] == 1))


@lowers("flip")
def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, [as_axis(dim, x.ndim) for dim in dims]) if x.ndim else x


@lowers("roll", keep=True)
def _roll(x: Array, shifts: int | Sequence[int], dims: Dims = ()) -> Array:
    if x.size == 0:
        return x
    shift = tuple([shifts] if isinstance(shifts, int) else shifts)
    if not isinstance(dims, int) and not dims:
        return jnp.roll(x, shift[0])
    return jnp.roll(x, shift, as_axes(dims, x.ndim))


@lowers("repeat")
def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


@lowers("cat")
def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Concatenates arrays. As in torch, vectors of no elements are left out, whatever the others' shape."""
    joined = [x for x in tensors if x.shape != (0,)] or [tensors[0]]
    return jnp.concatenate(joined, as_axis(dim, joined[0].ndim))


@lowers("stack")
def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(tensors, dim)


@lowers("split_with_sizes")
def _split(x: Array, sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    return tuple(
        jax.lax.slice_in_dim(x, start, end, axis=as_axis(dim, x.ndim))
        for start, end in zip(starts, ends, strict=True)
    )


@lowers("unbind")
def _unbind(x: Array, dim: int = 0) -> tuple[Array, ...]:
    return tuple(_select(x, dim, index) for index in range(x.shape[dim]))


@lowers("select.int")
def _select(x: Array, dim: int, index: int) -> Array:
    axis = as_axis(dim, x.ndim)
    return jax.lax.index_in_dim(x, index % x.shape[axis], axis, keepdims=False)


def _places(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[int, range]:
    axis = as_axis(dim, x.ndim)
    return axis, range(x.shape[axis])[slice(start, end, step)]


@lowers("slice.Tensor")
def _slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    axis, places = _places(x, dim, start, end, step)
    return jax.lax.slice_in_dim(x, places.start, max(places.start, places.stop), places.step, axis)


def _at(axis: int, where: slice | int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * axis, where)


@lowers("slice_scatter", keep=True)
def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    axis, places = _places(x, dim, start, end, step)
    source = jnp.broadcast_to(source, (*x.shape[:axis], len(places), *x.shape[axis + 1 :])).astype(x.dtype)
    if not places:
        return x
    if places.step == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, source, places.start, axis)
    return x.at[_at(axis, slice(places.start, places.stop, places.step))].set(source)


@lowers("select_scatter", keep=True)
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    axis = as_axis(dim, x.ndim)
    source = jnp.expand_dims(source, axis).astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, source, index % x.shape[axis], axis)


@lowers("diagonal")
def _diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("diagonal_scatter", keep=True)
def _diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    axes = as_axis(dim1, x.ndim), as_axis(dim2, x.ndim)
    moved = jnp.moveaxis(x, axes, (-2, -1))
    count = np.diagonal(np.empty(moved.shape[-2:]), offset).shape[0]
    steps = np.arange(count)
    moved = moved.at[..., steps + max(-offset, 0), steps + max(offset, 0)].set(source.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), axes)


@lowers("unfold", keep=True)
def _unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    """Makes windows along a dimension the last one, by joining slices of windows, or of places in them."""
    if x.ndim == 0:
        return x.reshape(1)[:size]
    axis = as_axis(dimension, x.ndim)
    count = (x.shape[axis] - size) // step + 1
    if count <= size:
        windows = [jax.lax.slice_in_dim(x, i * step, i * step + size, axis=axis) for i in range(count)]
        return jnp.moveaxis(jnp.stack(windows, axis), axis + 1, -1)
    ends = (count - 1) * step + 1
    return jnp.stack([jax.lax.slice_in_dim(x, i, i + ends, step, axis) for i in range(size)], -1)


@lowers("view.dtype")
def _view_dtype(x: Array, dtype: Any) -> Array:
    """Reinterprets bits as another dtype. The last dimension makes up for different sizes."""
    old, new = x.dtype.itemsize, np.dtype(dtype).itemsize
    if x.dtype == dtype:
        return x
    if bool in (x.dtype, dtype) or "c" in (x.dtype.kind, np.dtype(dtype).kind):
        raise NotImplementedError(
            f"view({np.dtype(dtype).name}) of {x.dtype.name}: JAX reinterprets the bits of real numbers "
            "only. torch.view_as_real and torch.view_as_complex do so for complex numbers."
        )
    if new > old:
        x = x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old)
    parts = jax.lax.bitcast_convert_type(x, dtype)
    return parts.reshape(*x.shape[:-1], x.shape[-1] * old // new) if new < old else parts


@lowers("resize")
def _resize(x: Array, size: Sequence[int]) -> Array:
    """Takes the first elements. Missing ones, which torch leaves unset, are 0."""
    flat = x.reshape(-1)[: math.prod(size)]
    return jnp.pad(flat, (0, math.prod(size) - flat.size)).reshape(tuple(size))


# Padding by a constant, a reflection, the edge, or the other end.

_PADDING_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _by_dimension(x: Array, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Sorts padding by dimension: torch's list begins with the last one."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


@lowers("constant_pad_nd")
def _constant_pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Pads by a constant. A negative number removes elements."""
    return jax.lax.pad(
        x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in _by_dimension(x, pad)]
    )


def _pad_by_mode(x: Array, pad: Sequence[int], mode: str) -> Array:
    pairs = _by_dimension(x, pad)
    padded = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in pairs], _PADDING_MODES[mode])
    cut = [(min(low, 0), min(high, 0), 0) for low, high in pairs]
    return (
        jax.lax.pad(padded, jnp.zeros((), x.dtype), cut)
        if any(low or high for low, high, inner in cut)
        else padded
    )


@lowers("pad", keep=True)
def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    if mode == "constant":
        return _constant_pad(x, pad, 0 if value is None else value)
    return _pad_by_mode(x, pad, mode)


@lowers("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", keep=True)
def _reflection_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad_by_mode(x, padding, "reflect")


@lowers("replication_pad1d", "replication_pad2d", "replication_pad3d", keep=True)
def _replication_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad_by_mode(x, padding, "replicate")
