"""Convolutions as products of matrices, for a CPU.

XLA's CPU compiler has fast kernels for convolutions of one layout only. It brings others into it in the
entry computation of a program, but not in the bodies of loops (JAX issue 12868), where a gradient of a
kernel, and everything that has channels before lengths, takes 10 to 80 times as long. Groups are slow
everywhere. Products of matrices are fast in any layout and place, so each convolution becomes one: of its
windows as columns (Chellapilla et al. 2006, "High performance convolutional neural networks for document
processing"), made block by block, so that they stay in the processor's cache.
benchmarks/against_torch_models has what it is worth.

This comes after differentiation, so that each of a layer's three convolutions gets the form that suits it:

* Few taps (`_gathered`; forwards, and gradients of inputs without strides): columns are windows of images.
* A dilated image (`_scattered`; gradients of inputs with strides, and transposed convolutions): each
  element is multiplied by all taps, and the products are added where they belong. None is with a zero.
* Few results (`_correlated`; gradients of kernels): columns are windows, and the sum goes over places.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from ipu_pipeline.engine.jaxprs.flat import has_primitive, map_atoms

__all__ = ["has_convolutions", "with_fast_convolutions"]

_NAME = "conv_general_dilated"
_MAX_TAPS = 64  # a window is so many equations; one of more taps stays a convolution
_BLOCK_BYTES = 3 * 2**20  # of columns at a time: what a core's share of the last cache holds, about
_FEW_PLACES = 256  # with fewer places of an image the images of a block go into one product


def has_convolutions(jaxpr: Any) -> bool:
    """Whether there is a convolution in a `Jaxpr`, or in one within it."""
    return any(has_primitive(equation, _NAME) for equation in jaxpr.eqns)


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function that computes the same with the convolutions in it as products, in loops and branches too.

    Args:
      function: of arrays, to a list of arrays. It is traced each time the result is called.
    """

    def called(*arguments: Any) -> list[Any]:
        closed_jaxpr = jax.make_jaxpr(function)(*arguments)
        results: list[Any] = jex_core.jaxpr_as_fun(_rewrite(closed_jaxpr))(*arguments)
        return results

    return called


def _rewrite(closed_jaxpr: Any) -> Any:
    """A `ClosedJaxpr` with the convolutions in it as products."""
    return closed_jaxpr.replace(jaxpr=_rewrite_open(closed_jaxpr.jaxpr))


def _rewrite_open(jaxpr: Any) -> Any:
    equations: list[Any] = []
    reversals: dict[Any, Any] = {}  # what is reversed along axes -> the equation
    for equation in jaxpr.eqns:
        if equation.primitive is lax.rev_p:
            reversals[equation.outvars[0]] = equation
        convolution = _read(equation)
        if convolution is None:
            params = {name: _rewrite_parameter(value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=params))
        else:
            image, kernel = equation.invars
            reversal = None if isinstance(kernel, jex_core.Literal) else reversals.get(kernel)
            if reversal is not None and convolution.can_reverse(reversal.params["dimensions"]):
                convolution = dataclasses.replace(convolution, is_reversed=True)
                kernel = reversal.invars[0]
            equations += _inline(convolution.compute, equation, (image, kernel))
    return jaxpr.replace(eqns=equations)


def _rewrite_parameter(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_rewrite_parameter, value)) if type(value) in (tuple, list) else value
    if isinstance(value, jex_core.ClosedJaxpr):
        return _rewrite(value) if has_convolutions(value.jaxpr) else value
    if isinstance(value, jex_core.Jaxpr):
        return _rewrite_open(value) if has_convolutions(value) else value
    return value


def _inline(function: Callable[[Any, Any], Any], equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """The equations of a function of some atoms, which give an equation's output."""
    structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in inputs]
    # No part of it is a call: a computation of its own would be one in the compiled program, too.
    traced = jax.make_jaxpr(function)(*structs)
    known = dict(zip(traced.jaxpr.invars, inputs, strict=True))
    (result,) = traced.jaxpr.outvars
    known[result] = equation.outvars[0]
    assert not traced.consts
    made = []
    for inner in traced.jaxpr.eqns:
        atoms = map_atoms(known, inner.invars)
        for var in inner.outvars:
            known.setdefault(var, var if isinstance(var, jex_core.DropVar) else jex_core.Var(var.aval))
        made.append(
            inner.replace(
                invars=atoms,
                outvars=[known[var] for var in inner.outvars],
                source_info=equation.source_info,
            )
        )
    return made


@dataclass(frozen=True)
class _Convolution:
    """A convolution of images (batch, channels, *lengths) or (batch, *lengths, channels).

    result[n, o, p] = sum over taps k and channels c of image[n, c, p * stride + k * dilation - low] *
    kernel[k, c, o], where the image has `holes` - 1 zeros between elements, and zeros around.

    Attributes:
      numbers: which axis of images, kernel and result is what.
      stride: by axis of the lengths, as all that follows.
      padding: low and high; negative where the image is cut.
      holes: the image's dilation.
      dilation: the kernel's.
      lengths: of the image.
      taps: lengths of the kernel.
      places: lengths of the result.
      num_channels: of the image.
      num_outputs: channels of the result.
      feature_groups: channels and outputs are in so many groups, of which each goes with one.
      batch_groups: the batch and the outputs are, and the groups' results are beside each other.
      precision: of products.
      is_reversed: whether the kernel that is given has its taps in reverse.
    """

    numbers: lax.ConvDimensionNumbers
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    holes: tuple[int, ...]
    dilation: tuple[int, ...]
    lengths: tuple[int, ...]
    taps: tuple[int, ...]
    places: tuple[int, ...]
    num_channels: int
    num_outputs: int
    feature_groups: int
    batch_groups: int
    precision: Any
    is_reversed: bool = False

    @property
    def num_taps(self) -> int:
        """Of the kernel, over all axes."""
        return math.prod(self.taps)

    @property
    def num_places(self) -> int:
        """Of the result, over all axes."""
        return math.prod(self.places)

    @property
    def is_correlation(self) -> bool:
        """Whether there are fewer places than taps, as in the gradient of a kernel."""
        return self.batch_groups > 1 or (self.feature_groups == 1 and self.num_places < self.num_taps)

    @property
    def has_many_windows(self) -> bool:
        """Whether it stays a convolution, as so many windows would make too large a program."""
        return (self.num_places if self.is_correlation else self.num_taps) > _MAX_TAPS

    def can_reverse(self, axes: Sequence[int]) -> bool:
        """Whether it can take a kernel that is not yet reversed along these axes."""
        is_all = set(axes) == set(self.numbers.rhs_spec[2:])
        return is_all and not self.is_correlation and not self.has_many_windows

    def compute(self, image: Any, kernel: Any) -> Any:
        """The result, in the form that suits it."""
        if self.has_many_windows:
            return _canonical(self, image, kernel)
        if self.is_correlation:
            if max(self.holes) > 1 and max(self.dilation) > 1:
                return _correlated(self.without_holes(), _dilate(self, image), kernel)
            return _correlated(self, image, kernel)
        if max(self.stride) == 1 and (max(self.holes) > 1 or self._is_better_scattered(image, kernel)):
            return _scattered(self, image, kernel)
        if max(self.holes) > 1:
            return _gathered(self.without_holes(), _dilate(self, image), kernel)
        return _gathered(self, image, kernel)

    def without_holes(self) -> _Convolution:
        """That of the image that `_dilate` gives."""
        lengths = ((n - 1) * holes + 1 for n, holes in zip(self.lengths, self.holes, strict=True))
        return dataclasses.replace(self, lengths=tuple(lengths), holes=(1,) * len(self.holes))

    def _is_better_scattered(self, image: Any, kernel: Any) -> bool:
        """Whether products of each element take less time than windows, where both are possible.

        What counts is how much larger than the image columns and products are; and that windows go with a
        transposed kernel if that is reversed, which takes long in the first layout. Limits are measured.
        """
        products = self.num_outputs * math.prod(self.lengths)
        columns = self.num_channels * self.num_places
        if not self.is_reversed:
            return 2 * products <= columns
        is_last = _Layout.of(self.numbers.lhs_spec, self.numbers.lhs_spec[1]).is_last
        return products <= 2 * columns and not (is_last and kernel.size > image.size)


def _read(equation: Any) -> _Convolution | None:
    """The convolution of an equation; None if it is none, or better stays as it is."""
    if equation.primitive.name != _NAME:
        return None
    image, kernel, result = (var.aval for var in (*equation.invars, *equation.outvars))
    if not 1 <= image.ndim - 2 <= 3 or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    if 0 in (*image.shape, *kernel.shape, *result.shape) or not image.dtype == kernel.dtype == result.dtype:
        return None
    params = equation.params
    numbers = params["dimension_numbers"]
    return _Convolution(
        numbers=numbers,
        stride=tuple(params["window_strides"]),
        padding=tuple(map(tuple, params["padding"])),
        holes=tuple(params["lhs_dilation"]),
        dilation=tuple(params["rhs_dilation"]),
        lengths=tuple(image.shape[axis] for axis in numbers.lhs_spec[2:]),
        taps=tuple(kernel.shape[axis] for axis in numbers.rhs_spec[2:]),
        places=tuple(result.shape[axis] for axis in numbers.out_spec[2:]),
        num_channels=image.shape[numbers.lhs_spec[1]],
        num_outputs=result.shape[numbers.out_spec[1]],
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        precision=params["precision"],
    )


def _dilate(own: _Convolution, image: Any) -> Any:
    """The image with its holes in it."""
    config = [(0, 0, 0)] * image.ndim
    for axis, holes in zip(own.numbers.lhs_spec[2:], own.holes, strict=True):
        config[axis] = (0, 0, holes - 1)
    return lax.pad(image, jnp.zeros((), image.dtype), config)


def _canonical(own: _Convolution, image: Any, kernel: Any) -> Any:
    """A convolution in the layout that is fast everywhere: (N, *lengths, C), (*taps, I, O)."""
    last = image.ndim - 1
    lengths = tuple(range(1, last))
    taps = tuple(range(last - 1))
    made = lax.conv_general_dilated(
        _in_order(image, own.numbers.lhs_spec, (0, last, *lengths)),
        _in_order(kernel, own.numbers.rhs_spec, (last, last - 1, *taps)),
        own.stride,
        own.padding,
        own.holes,
        own.dilation,
        lax.ConvDimensionNumbers((0, last, *lengths), (last, last - 1, *taps), (0, last, *lengths)),
        own.feature_groups,
        own.batch_groups,
        own.precision,
    )
    return _in_order(made, (0, last, *lengths), own.numbers.out_spec)


def _in_order(array: Any, spec: Sequence[int], wanted: Sequence[int]) -> Any:
    """An array transposed so that what `spec` says of its axes holds of those of `wanted`."""
    order = [0] * array.ndim
    for source, target in zip(spec, wanted, strict=True):
        order[target] = source
    return array.transpose(order)


@dataclass(frozen=True)
class _Windows:
    """Equal windows of an array, by axis.

    Attributes:
      low: zeros before the array.
      num: how many windows there are.
      apart: from one window's beginning to the next one's.
      size: how many elements a window has.
      step: from one of them to the next one.
    """

    low: tuple[int, ...]
    num: tuple[int, ...]
    apart: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]

    def of(self, array: Any, first_axis: int) -> list[Any]:
        """The windows in order, along as many axes from `first_axis` on."""
        config = [(0, 0, 0)] * array.ndim
        axes = range(len(self.num))
        spans = [(self.size[i] - 1) * self.step[i] + 1 for i in axes]
        for i in axes:
            length = (self.num[i] - 1) * self.apart[i] + spans[i]
            config[first_axis + i] = (self.low[i], length - self.low[i] - array.shape[first_axis + i], 0)
        padded = lax.pad(array, jnp.zeros((), array.dtype), config)
        found = []
        for place in itertools.product(*map(range, self.num)):
            starts, limits, steps = [0] * array.ndim, list(padded.shape), [1] * array.ndim
            for i in axes:
                starts[first_axis + i] = place[i] * self.apart[i]
                limits[first_axis + i] = starts[first_axis + i] + spans[i]
                steps[first_axis + i] = self.step[i]
            found.append(lax.slice(padded, starts, limits, steps))
        return found


class _Layout(NamedTuple):
    """How arrays of (outer, groups, inner, *lengths) lie: so, or as (outer, *lengths, groups, inner)."""

    is_last: bool
    num_axes: int

    @classmethod
    def of(cls, spec: Sequence[int], inner: int) -> _Layout:
        """That in which an array is transposed least, of which an axis is to be the inner one."""
        return cls(inner > min(spec[2:]), len(spec) - 2)

    @property
    def lengths(self) -> int:
        """The first axis of the lengths."""
        return 1 if self.is_last else 3

    @property
    def groups(self) -> int:
        """The axis of the groups; the inner one is behind it."""
        return 1 + self.num_axes if self.is_last else 1

    def split(self, array: Any, outer: int, inner: int, lengths: Sequence[int], num_groups: int) -> Any:
        """An array in this layout, from axes of one that has groups and inner together."""
        order = (outer, *lengths, inner) if self.is_last else (outer, inner, *lengths)
        array = array.transpose(order)
        axis = self.groups
        grouped = (num_groups, array.shape[axis] // num_groups)
        return array.reshape(*array.shape[:axis], *grouped, *array.shape[axis + 1 :])

    def join(self, array: Any, spec: Sequence[int]) -> Any:
        """The inverse, where a spec says in which order outer, groups with inner, and lengths are."""
        axis = self.groups
        joined = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
        last = joined.ndim - 1
        own = (0, last, *range(1, last)) if self.is_last else tuple(range(joined.ndim))
        return _in_order(joined, own, spec)


def _gathered(own: _Convolution, image: Any, kernel: Any) -> Any:
    spec, groups = own.numbers.lhs_spec, own.feature_groups
    layout = _Layout.of(spec, spec[1])
    images = layout.split(image, spec[0], spec[1], spec[2:], groups)
    low = tuple(low for low, _high in own.padding)
    windows = _Windows(low, own.taps, own.dilation, own.places, own.stride)

    def of(images: Any) -> list[Any]:
        """The windows, in the order of the kernel's taps."""
        found = windows.of(images, layout.lengths)
        return found[::-1] if own.is_reversed else found

    if own.num_channels == groups > 1:
        made = sum(
            window * weights
            for window, weights in zip(of(_widen(images)), _by_tap(own, kernel, layout), strict=True)
        )
        return layout.join(made.astype(image.dtype), own.numbers.out_spec)
    # The columns are in the order in which kernels usually lie beside such images, and need not be moved:
    # tap by tap the channels if these are last, else channel by channel the taps.
    weights = _split_kernel(own, kernel, "OTI" if layout.is_last else "OIT")
    weights = weights.reshape(*weights.shape[:2], -1)
    is_plain = own.num_taps == 1 and not layout.is_last and own.num_places >= _FEW_PLACES

    def product(images: Any) -> Any:
        columns = _stack(layout, of(images))
        return _multiply(own, layout, weights, 2, columns, is_plain).astype(image.dtype)

    num_bytes = own.num_taps * own.num_places * own.num_channels * image.dtype.itemsize
    if is_plain:
        made = product(images)
    else:
        made = _map_blocks(product, images, _block_size(images.shape[0], num_bytes))
    return layout.join(made, own.numbers.out_spec)


def _scattered(own: _Convolution, image: Any, kernel: Any) -> Any:
    spec, groups = own.numbers.lhs_spec, own.feature_groups
    layout = _Layout.of(spec, spec[1])
    images = layout.split(image, spec[0], spec[1], spec[2:], groups)
    is_plain = not layout.is_last and math.prod(own.lengths) >= _FEW_PLACES

    def place(parts: Sequence[Any]) -> Any:
        """The sum of what each tap gives, each where it belongs."""
        total = None
        taps = list(itertools.product(*map(range, own.taps)))
        for tap, part in zip(taps[::-1] if own.is_reversed else taps, parts, strict=True):
            config = [(0, 0, 0)] * part.ndim
            for i, axis in enumerate(range(layout.lengths, layout.lengths + layout.num_axes)):
                low = own.padding[i][0] - tap[i] * own.dilation[i]
                length = (part.shape[axis] - 1) * own.holes[i] + 1
                config[axis] = (low, own.places[i] - low - length, own.holes[i] - 1)
            placed = lax.pad(part, jnp.zeros((), part.dtype), config)
            total = placed if total is None else total + placed
        return total

    if own.num_channels == groups > 1:
        made = place([_widen(images) * weights for weights in _by_tap(own, kernel, layout)])
        return layout.join(made.astype(image.dtype), own.numbers.out_spec)
    # The order is that of the kernels of forwards, whose gradients have their inputs for outputs.
    weights = _split_kernel(own, kernel, "TOI" if layout.is_last else "IOT")
    shape = list(weights.shape)
    channels, tap_axis = (2, 0) if layout.is_last else (1, 1)
    flat = (
        weights.reshape(groups, -1, shape[3]) if layout.is_last else weights.reshape(groups, shape[1], -1)
    )
    parted = shape[1:3] if layout.is_last else shape[2:]

    def product(images: Any) -> Any:
        made = _multiply(own, layout, flat, channels, images, is_plain)
        inner = layout.groups + 1
        made = made.reshape(*made.shape[:inner], *parted, *made.shape[inner + 1 :])
        taps = range(own.num_taps)
        parts = [lax.index_in_dim(made, tap, inner + tap_axis, keepdims=False) for tap in taps]
        return place(parts).astype(image.dtype)

    num_bytes = own.num_taps * own.num_outputs * math.prod(own.lengths) * image.dtype.itemsize
    made = _map_blocks(product, images, _block_size(images.shape[0], num_bytes))
    return layout.join(made, own.numbers.out_spec)


def _correlated(own: _Convolution, image: Any, kernel: Any) -> Any:
    (batch, channels, *lengths), (outputs, inputs, *taps) = own.numbers.lhs_spec, own.numbers.rhs_spec
    groups = own.batch_groups
    layout = _Layout.of(own.numbers.lhs_spec, batch)
    images = layout.split(image, channels, batch, lengths, groups)
    kernels = layout.split(kernel, inputs, outputs, taps, groups)
    low = tuple(low for low, _high in own.padding)
    if max(own.holes) > 1:
        # By windows of the kernel, which has no holes: place * stride + tap - low = index * holes, so
        # tap = (places - 1 - place) * stride + index * holes - ((places - 1) * stride - low), in reverse.
        low = tuple((n - 1) * s - p for n, s, p in zip(own.places, own.stride, low, strict=True))
        windows = _Windows(low, own.places, own.stride, own.lengths, own.holes)
        made = _correlate(own, layout, windows, kernels, images)
        made = jnp.flip(made, range(3, made.ndim)).swapaxes(1, 2)
    else:
        windows = _Windows(low, own.places, own.stride, own.taps, own.dilation)
        made = _correlate(own, layout, windows, images, kernels)
    made = made.swapaxes(0, 1)  # (batch, groups, outputs, *places)
    return _Layout(False, layout.num_axes).join(made, own.numbers.out_spec)


def _correlate(own: _Convolution, layout: _Layout, windows: _Windows, images: Any, kernels: Any) -> Any:
    """Products summed over outer axes and lengths: (groups, inner of images, of kernels, *windows)."""
    inner = layout.groups + 1
    summed = (0, *range(layout.lengths, layout.lengths + layout.num_axes))
    num_groups, num_images, num_kernels = images.shape[inner - 1], images.shape[inner], kernels.shape[inner]
    dtype, wide = images.dtype, _sum_dtype(images.dtype)
    if num_images == 1 and num_groups > 1:
        images, kernels = _widen(images), _widen(kernels)
        # XLA's sums are over one element after another; its products with vectors are vectorized.
        ones = jnp.ones([kernels.shape[axis] for axis in summed], wide)
        numbers = ((summed, tuple(range(ones.ndim))), ((), ()))
        parts = [
            lax.dot_general(window * kernels, ones, numbers)
            for window in windows.of(images, layout.lengths)
        ]
        return jnp.stack(parts, -1).astype(dtype).reshape(num_groups, 1, num_kernels, *windows.num)

    def product(images: Any, kernels: Any) -> Any:
        columns = _stack(layout, windows.of(images, layout.lengths))
        numbers = ((summed, summed), ((layout.groups,), (layout.groups,)))
        pair = (columns, kernels) if layout.is_last else (kernels, columns)
        return lax.dot_general(*pair, numbers, own.precision, preferred_element_type=wide)

    num_bytes = math.prod((*windows.num, *windows.size, num_groups, num_images)) * dtype.itemsize
    size = _block_size(images.shape[0], num_bytes)
    if size == images.shape[0]:
        made = product(images, kernels)
    else:
        blocks = [_cut(array, size) for array in (images, kernels)]
        zeros = jnp.zeros(jax.eval_shape(product, *(block[0] for block in blocks)).shape, wide)
        made, _nothing = lax.scan(
            lambda total, given: (total + product(*given), None), zeros, tuple(blocks)
        )
    made = made.astype(dtype)
    if layout.is_last:
        made = made.reshape(num_groups, *windows.num, num_images, num_kernels)
        return jnp.moveaxis(made, (-2, -1), (1, 2))
    return made.reshape(num_groups, num_kernels, num_images, *windows.num).swapaxes(1, 2)


def _split_kernel(own: _Convolution, kernel: Any, order: str) -> Any:
    """(groups, *order): outputs O and channels I of a group, and taps T."""
    outputs, channels, *taps = own.numbers.rhs_spec
    groups = own.feature_groups
    axes: dict[str, Sequence[int]] = {"O": (outputs,), "I": (channels,), "T": taps}
    sizes = {"O": own.num_outputs // groups, "I": own.num_channels // groups, "T": own.num_taps}
    moved = kernel.transpose([axis for letter in order for axis in axes[letter]])
    before = [sizes[letter] for letter in order[: order.index("O")]]
    behind = [sizes[letter] for letter in order[order.index("O") :]]
    return jnp.moveaxis(moved.reshape(*before, groups, *behind), len(before), 0)


def _by_tap(own: _Convolution, kernel: Any, layout: _Layout) -> list[Any]:
    """The weights of each tap, of a kernel with one channel, for multiplication by an image."""
    weights = _widen(_split_kernel(own, kernel, "TOI")[..., 0])
    spread = weights if layout.is_last else weights.reshape(*weights.shape, *(1,) * layout.num_axes)
    return [spread[:, tap] for tap in range(own.num_taps)]


def _stack(layout: _Layout, windows: Sequence[Any]) -> Any:
    """Windows, their inner axes as one: window by window where that is the last, else windows inside."""
    axis = layout.groups + 1
    if len(windows) == 1:
        return windows[0]
    if layout.is_last:
        return lax.concatenate(windows, axis)
    stacked = jnp.stack(windows, axis + 1)
    return stacked.reshape(*stacked.shape[:axis], -1, *stacked.shape[axis + 2 :])


def _multiply(
    own: _Convolution, layout: _Layout, weights: Any, axis: int, columns: Any, is_plain: bool
) -> Any:
    """Columns times weights: the outputs in the place of the channels.

    Args:
      own: the convolution.
      layout: of the columns and of the result.
      weights: (groups, outputs, channels), or the last two the other way round.
      axis: that of the weights' channels.
      columns: the inner axis has the channels.
      is_plain: whether each image is a product of its own.

    Returns:
      The outputs, of the dtype of sums.
    """
    wide = _sum_dtype(columns.dtype)
    inner = layout.groups + 1
    if layout.is_last:
        made = lax.dot_general(
            columns,
            weights,
            (((inner,), (axis,)), ((inner - 1,), (0,))),
            own.precision,
            preferred_element_type=wide,
        )
        return jnp.moveaxis(made, 0, -2)
    if is_plain:
        weights = jnp.broadcast_to(weights, (columns.shape[0], *weights.shape))
        numbers = (((axis + 1,), (2,)), ((0, 1), (0, 1)))
        return lax.dot_general(weights, columns, numbers, own.precision, preferred_element_type=wide)
    made = lax.dot_general(
        weights, columns, (((axis,), (2,)), ((0,), (1,))), own.precision, preferred_element_type=wide
    )
    return jnp.moveaxis(made, 2, 0)


def _sum_dtype(dtype: Any) -> Any:
    """Of sums of products: those of narrow floats are wide, and rounded once."""
    return jnp.float32 if dtype.itemsize < 4 else dtype


def _widen(array: Any) -> Any:
    return array.astype(_sum_dtype(array.dtype))


def _concatenate(parts: Sequence[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)


def _block_size(number: int, num_bytes: int) -> int:
    """How many of `number` images, each of so many bytes as columns, go into a product."""
    fitting = max(1, _BLOCK_BYTES // num_bytes)
    return max(size for size in range(1, number + 1) if number % size == 0 and size <= fitting)


def _map_blocks(product: Callable[[Any], Any], images: Any, size: int) -> Any:
    """The product of all images, made of so many at a time."""
    if size == images.shape[0]:
        return product(images)
    made = lax.map(product, _cut(images, size))
    return made.reshape(-1, *made.shape[2:])


def _cut(array: Any, size: int) -> Any:
    return array.reshape(-1, size, *array.shape[1:])
