"""Convolutions as products of matrices, for a CPU.

XLA's CPU compiler has fast kernels for convolutions of one layout only. It converts others to it in the
entry computation of a program, but not in the bodies of loops (JAX issue 12868), where a gradient of a
kernel, and everything that has channels before lengths, takes 10 to 80 times as long. Groups are slow
everywhere. Products of matrices are fast in any layout and place, so each convolution becomes one: of its
windows as columns (Chellapilla et al. 2006, "High performance convolutional neural networks for document
processing"), made block by block, so that they stay in the processor's cache.
benchmarks/against_torch_models shows the gain. To transpose there and back for XLA's fast kernels took
1.3 to 1.9 times as long (3 x 3; 64 channels of 32 x 32 to 512 of 4 x 4), and did not help with groups.

This comes after differentiation, so that each of a layer's three convolutions gets the form that suits it:

* Few taps (`multiply_windows`; forwards, and gradients of inputs without strides): columns are windows of
  images.
* A dilated image (`scatter_products`; gradients of inputs with strides, and transposed convolutions):
  each element is multiplied by all taps, and the products are added where they belong. No product has a
  zero.
* Few results (`correlate_windows`; gradients of kernels): columns are windows, and the sum goes over
  places.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.flat import has_primitive, is_var, map_atoms, rewriting
from ipu_pipeline.ground import jax_compat, jax_core

_MAX_TAPS = 64  # each tap adds equations; a convolution with more taps stays as it is


@dataclass(frozen=True)
class Convolution:
    """A convolution of images (batch, channels, *lengths) or (batch, *lengths, channels).

    result[n, o, p] = sum over taps k and channels c of image[n, c, p * stride + k * dilation - low] *
    kernel[k, c, o], where the image has `holes` - 1 zeros between elements, and zeros around.
    """

    numbers: jax.lax.ConvDimensionNumbers  # which axis of images, kernel and result is what
    stride: tuple[int, ...]  # by axis of the lengths, like all fields up to `places`
    padding: tuple[tuple[int, int], ...]  # low and high; negative where the image is cut
    holes: tuple[int, ...]  # the image's dilation
    dilation: tuple[int, ...]  # the kernel's
    lengths: tuple[int, ...]  # of the image
    taps: tuple[int, ...]  # lengths of the kernel
    places: tuple[int, ...]  # lengths of the result
    num_channels: int  # of the image
    num_outputs: int  # channels of the result
    feature_groups: int  # the number of groups of channels, each with its own group of outputs
    batch_groups: int  # the same for groups of the batch; the groups' results lie side by side
    precision: Any  # the precision of products
    is_reversed: bool = False  # whether the kernel that is given has its taps in reverse

    @property
    def num_taps(self) -> int:
        """The number of the kernel's taps, over all axes."""
        return math.prod(self.taps)

    @property
    def num_places(self) -> int:
        """The number of the result's places, over all axes."""
        return math.prod(self.places)

    @property
    def is_correlation(self) -> bool:
        """Whether there are fewer places than taps, as in the gradient of a kernel."""
        return self.batch_groups > 1 or (self.feature_groups == 1 and self.num_places < self.num_taps)

    @property
    def has_many_windows(self) -> bool:
        """Whether it stays a convolution, because its windows would make the program too large."""
        return (self.num_places if self.is_correlation else self.num_taps) > _MAX_TAPS

    def can_reverse(self, axes: Sequence[int]) -> bool:
        """Whether it can take a kernel that is not yet reversed along these axes."""
        is_all = set(axes) == set(self.numbers.rhs_spec[2:])
        return is_all and not self.is_correlation and not self.has_many_windows

    def without_holes(self) -> Convolution:
        """The same convolution of the image that `dilate` returns."""
        lengths = ((n - 1) * holes + 1 for n, holes in zip(self.lengths, self.holes, strict=True))
        return dataclasses.replace(self, lengths=tuple(lengths), holes=(1,) * len(self.holes))

    def is_better_scattered(self, image: Any, kernel: Any) -> bool:
        """Whether products of each element take less time than windows, where both are possible.

        It depends on how much larger than the image the columns and the products are. Also, windows need a
        transposed kernel if it is reversed, which takes long in the first layout. The limits are measured.
        """
        if self.num_channels == self.feature_groups > 1:
            return False
        products = self.num_outputs * math.prod(self.lengths)
        columns = self.num_channels * self.num_places
        if not self.is_reversed:
            return 2 * products <= columns
        is_last = Layout.of(self.numbers.lhs_spec, self.numbers.lhs_spec[1]).is_last
        return products <= 2 * columns and not (is_last and kernel.size > image.size)


@dataclass(frozen=True)
class Windows:
    """Equal windows of an array, by axis."""

    low: tuple[int, ...]  # zeros before the array
    num: tuple[int, ...]  # the number of windows
    apart: tuple[int, ...]  # from one window's beginning to the next one's
    size: tuple[int, ...]  # the number of elements of a window
    step: tuple[int, ...]  # from one element to the next one

    def of(self, array: Any, first_axis: int) -> list[Any]:
        """Returns the windows in order; their axes are those from `first_axis` on."""
        padded = self._pad(array, first_axis)
        parts = []
        for place in itertools.product(*map(range, self.num)):
            starts, limits, steps = [0] * array.ndim, list(padded.shape), [1] * array.ndim
            for i, index in enumerate(place):
                starts[first_axis + i] = index * self.apart[i]
                limits[first_axis + i] = starts[first_axis + i] + self._spans[i]
                steps[first_axis + i] = self.step[i]
            parts.append(jax.lax.slice(padded, starts, limits, steps))
        return parts

    def map_rows(self, function: Callable[[list[Any]], Any], array: Any, first_axis: int) -> Any:
        """Applies a function to the windows in each place of the first axis, and stacks the results."""
        padded = self._pad(array, first_axis)
        row = Windows((0,) * len(self.num), (1, *self.num[1:]), self.apart, self.size, self.step)

        def at(index: Any) -> Any:
            start = index * self.apart[0]
            part = jax.lax.dynamic_slice_in_dim(padded, start, self._spans[0], first_axis)
            return function(row.of(part, first_axis))

        return jax.lax.map(at, jnp.arange(self.num[0]))

    @property
    def _spans(self) -> list[int]:
        """The number of elements from a window's first one to its last one."""
        return [(size - 1) * step + 1 for size, step in zip(self.size, self.step, strict=True)]

    def _pad(self, array: Any, first_axis: int) -> Any:
        """Pads the array with zeros, as far as the windows reach."""
        config = [(0, 0, 0)] * array.ndim
        for i, span in enumerate(self._spans):
            length = (self.num[i] - 1) * self.apart[i] + span
            config[first_axis + i] = (self.low[i], length - self.low[i] - array.shape[first_axis + i], 0)
        return jax.lax.pad(array, jnp.zeros((), array.dtype), config)


class Layout(NamedTuple):
    """The order of axes: (outer, groups, inner, *lengths) or (outer, *lengths, groups, inner)."""

    is_last: bool
    num_axes: int

    @classmethod
    def of(cls, spec: Sequence[int], inner: int) -> Layout:
        """The layout that needs the least transposing of an array, given the axis that is to be inner."""
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
        """Brings an array, in which groups and inner share an axis, into this layout."""
        order = (outer, *lengths, inner) if self.is_last else (outer, inner, *lengths)
        array = array.transpose(order)
        axis = self.groups
        grouped = (num_groups, array.shape[axis] // num_groups)
        return array.reshape(*array.shape[:axis], *grouped, *array.shape[axis + 1 :])

    def join(self, array: Any, spec: Sequence[int]) -> Any:
        """The inverse; `spec` gives the positions of outer, of groups with inner, and of the lengths."""
        axis = self.groups
        joined = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
        last = joined.ndim - 1
        order = (0, last, *range(1, last)) if self.is_last else tuple(range(joined.ndim))
        return in_order(joined, order, spec)


def in_order(array: Any, spec: Sequence[int], target_spec: Sequence[int]) -> Any:
    """Transposes an array so that the axes at `spec` come to be those at `target_spec`."""
    order = [0] * array.ndim
    for source, target in zip(spec, target_spec, strict=True):
        order[target] = source
    return array.transpose(order)


# The forms: each takes a convolution, an image and a kernel, and gives the result in the dtype of sums.

_BLOCK_BYTES = 3 * 2**20  # of columns at a time: about a core's share of the last-level cache
_MAX_SUMMED = 8  # images whose products are summed in one go; each adds equations
_FEW_TAPS = 9  # in a sum of so few, computing it several times does no harm
_FEW_PLACES = 256  # if an image has fewer places, a block's images go into one product


def dilate(conv: Convolution, image: Any) -> Any:
    """Puts the image's holes into it."""
    config = [(0, 0, 0)] * image.ndim
    for axis, holes in zip(conv.numbers.lhs_spec[2:], conv.holes, strict=True):
        config[axis] = (0, 0, holes - 1)
    return jax.lax.pad(image, jnp.zeros((), image.dtype), config)


def convolve_in_xla(conv: Convolution, image: Any, kernel: Any) -> Any:
    """Convolves in the layout that is fast everywhere: (N, *lengths, C), (*taps, I, O)."""
    last = image.ndim - 1
    lengths = tuple(range(1, last))
    taps = tuple(range(last - 1))
    result = jax.lax.conv_general_dilated(
        in_order(image, conv.numbers.lhs_spec, (0, last, *lengths)),
        in_order(kernel, conv.numbers.rhs_spec, (last, last - 1, *taps)),
        conv.stride,
        conv.padding,
        conv.holes,
        conv.dilation,
        jax.lax.ConvDimensionNumbers((0, last, *lengths), (last, last - 1, *taps), (0, last, *lengths)),
        conv.feature_groups,
        conv.batch_groups,
        conv.precision,
    )
    return in_order(result, (0, last, *lengths), conv.numbers.out_spec)


def multiply_windows(conv: Convolution, image: Any, kernel: Any) -> Any:
    """Multiplies windows of images, as columns, by the kernel. The image must have no holes."""
    spec, groups = conv.numbers.lhs_spec, conv.feature_groups
    layout = Layout.of(spec, spec[1])
    images = layout.split(image, spec[0], spec[1], spec[2:], groups)
    low = tuple(low for low, _high in conv.padding)
    windows = Windows(low, conv.taps, conv.dilation, conv.places, conv.stride)

    def of(images: Any) -> list[Any]:
        """The windows, in the order of the kernel's taps."""
        parts = windows.of(images, layout.lengths)
        return parts[::-1] if conv.is_reversed else parts

    if conv.num_channels == groups > 1:
        by_tap = _by_tap(conv, kernel, layout)

        def add(images: Any) -> Any:
            return sum(window * weights for window, weights in zip(of(images), by_tap, strict=True))

        result = _map_blocks(add, _widen(images), _sum_size(conv, len(images)))
        return layout.join(result, conv.numbers.out_spec)
    # The columns are in the order in which kernels usually lie beside such images, and need not be moved:
    # tap by tap the channels if these are last, else channel by channel the taps.
    weights = _split_kernel(conv, kernel, "OTI" if layout.is_last else "OIT")
    weights = weights.reshape(*weights.shape[:2], -1)
    is_plain = conv.num_taps == 1 and not layout.is_last and conv.num_places >= _FEW_PLACES

    def product(images: Any) -> Any:
        columns = _stack(layout, of(images))
        return _multiply(conv, layout, weights, 2, columns, is_plain)

    num_bytes = conv.num_taps * conv.num_places * conv.num_channels * image.dtype.itemsize
    if is_plain:
        result = product(images)
    else:
        result = _map_blocks(product, images, _block_size(images.shape[0], num_bytes))
    return layout.join(result, conv.numbers.out_spec)


def scatter_products(conv: Convolution, image: Any, kernel: Any) -> Any:
    """Multiplies each element of an image by all taps, and adds up. There must be no strides."""
    spec, groups = conv.numbers.lhs_spec, conv.feature_groups
    layout = Layout.of(spec, spec[1])
    if kernel.size > image.size:
        # With images on the left of products, XLA takes a kernel as it lies; with kernels, not.
        layout = layout._replace(is_last=True)
    images = layout.split(image, spec[0], spec[1], spec[2:], groups)
    is_plain = not layout.is_last and math.prod(conv.lengths) >= _FEW_PLACES

    def place(parts: Sequence[Any]) -> Any:
        """Sums the taps' products, each where it belongs."""
        total = None
        taps = list(itertools.product(*map(range, conv.taps)))
        for tap, part in zip(taps[::-1] if conv.is_reversed else taps, parts, strict=True):
            config = [(0, 0, 0)] * part.ndim
            for i, axis in enumerate(range(layout.lengths, layout.lengths + layout.num_axes)):
                low = conv.padding[i][0] - tap[i] * conv.dilation[i]
                length = (part.shape[axis] - 1) * conv.holes[i] + 1
                config[axis] = (low, conv.places[i] - low - length, conv.holes[i] - 1)
            placed = jax.lax.pad(part, jnp.zeros((), part.dtype), config)
            total = placed if total is None else total + placed
        return total

    if conv.num_channels == groups > 1:
        result = place([_widen(images) * weights for weights in _by_tap(conv, kernel, layout)])
        return layout.join(result, conv.numbers.out_spec)
    # The order is that of forwards' kernels: a gradient's outputs are the forward's inputs.
    has_taps_first = conv.numbers.rhs_spec[2] == 0
    weights = _split_kernel(conv, kernel, "TOI" if has_taps_first else "IOT")
    parted, tap_axis = (weights.shape[1:3], 0) if has_taps_first else (weights.shape[2:], 1)
    flat = weights.reshape(groups, *((-1, weights.shape[3]) if has_taps_first else (weights.shape[1], -1)))
    channels = 2 if has_taps_first else 1

    def product(images: Any) -> Any:
        products = _multiply(conv, layout, flat, channels, images, is_plain)
        inner = layout.groups + 1
        products = products.reshape(*products.shape[:inner], *parted, *products.shape[inner + 1 :])
        taps = range(conv.num_taps)
        parts = [jax.lax.index_in_dim(products, tap, inner + tap_axis, keepdims=False) for tap in taps]
        return place(parts)

    num_bytes = conv.num_taps * conv.num_outputs * math.prod(conv.lengths) * image.dtype.itemsize
    size = min(_block_size(len(images), num_bytes), _sum_size(conv, len(images)))
    result = _map_blocks(product, images, size)
    return layout.join(result, conv.numbers.out_spec)


def correlate_windows(conv: Convolution, image: Any, kernel: Any) -> Any:
    """Multiplies the kernel, as columns, by windows of images. For few places, or groups of the batch."""
    (batch, channels, *lengths), (outputs, inputs, *taps) = conv.numbers.lhs_spec, conv.numbers.rhs_spec
    groups = conv.batch_groups
    by_kernel = max(conv.holes) > 1
    num_windowed = kernel.shape[outputs] if by_kernel else image.shape[batch]
    is_depthwise = num_windowed == groups > 1
    layout = Layout(False, len(lengths)) if is_depthwise else Layout.of(conv.numbers.lhs_spec, batch)
    correlate = _correlate_each if is_depthwise else _correlate
    images = layout.split(image, channels, batch, lengths, groups)
    kernels = layout.split(kernel, inputs, outputs, taps, groups)
    low = tuple(low for low, _high in conv.padding)
    if by_kernel:
        # By windows of the kernel, which has no holes: place * stride + tap - low = index * holes, so
        # tap = (places - 1 - place) * stride + index * holes - ((places - 1) * stride - low), in reverse.
        low = tuple((n - 1) * s - p for n, s, p in zip(conv.places, conv.stride, low, strict=True))
        windows = Windows(low, conv.places, conv.stride, conv.lengths, conv.holes)
        result = correlate(conv, layout, windows, kernels, images)
        result = jnp.flip(result, range(3, result.ndim)).swapaxes(1, 2)
    else:
        windows = Windows(low, conv.places, conv.stride, conv.taps, conv.dilation)
        result = correlate(conv, layout, windows, images, kernels)
    result = result.swapaxes(0, 1)  # (batch, groups, outputs, *places)
    return Layout(False, layout.num_axes).join(result, conv.numbers.out_spec)


def _correlate(conv: Convolution, layout: Layout, windows: Windows, images: Any, kernels: Any) -> Any:
    """Products summed over outer axes and lengths: (groups, inner of images, of kernels, *windows)."""
    inner = layout.groups + 1
    summed = (0, *range(layout.lengths, layout.lengths + layout.num_axes))
    num_groups, num_images, num_kernels = images.shape[inner - 1], images.shape[inner], kernels.shape[inner]
    wide = _sum_dtype(images.dtype)

    def product(images: Any, kernels: Any) -> Any:
        columns = _stack(layout, windows.of(images, layout.lengths))
        numbers = ((summed, summed), ((layout.groups,), (layout.groups,)))
        pair = (columns, kernels) if layout.is_last else (kernels, columns)
        return jax.lax.dot_general(*pair, numbers, conv.precision, preferred_element_type=wide)

    num_bytes = math.prod((*windows.num, *windows.size, num_groups, num_images)) * images.dtype.itemsize
    size = _block_size(images.shape[0], num_bytes)
    products = _sum_blocks(product, images, kernels, size)
    if layout.is_last:
        products = products.reshape(num_groups, *windows.num, num_images, num_kernels)
        return jnp.moveaxis(products, (-2, -1), (1, 2))
    return products.reshape(num_groups, num_kernels, num_images, *windows.num).swapaxes(1, 2)


def _correlate_each(_conv: Convolution, layout: Layout, windows: Windows, images: Any, kernels: Any) -> Any:
    """`_correlate` where each group has one image, with channels before lengths.

    XLA sums one element after another. It vectorizes sums of a few arrays, here one of each image, and
    products with vectors. A loop over windows along the first axis keeps the program small.
    """
    images, kernels = _widen(images), _widen(kernels)
    num_groups, num_kernels = kernels.shape[1:3]
    ones = jnp.ones(math.prod(windows.size), kernels.dtype)

    def product(images: Any, kernels: Any) -> Any:
        def row(row_windows: list[Any]) -> Any:
            sums = (sum(window[i] * kernels[i] for i in range(len(kernels))) for window in row_windows)
            return jnp.stack([total.reshape(num_groups * num_kernels, -1) for total in sums]) @ ones

        rows = windows.map_rows(row, images, layout.lengths)
        return jnp.moveaxis(rows.reshape(-1, num_groups, num_kernels), 0, -1)

    size = _largest_divisor(images.shape[0], _MAX_SUMMED)
    products = _sum_blocks(product, images, kernels, size)
    return products.reshape(num_groups, 1, num_kernels, *windows.num)


def _split_kernel(conv: Convolution, kernel: Any, order: str) -> Any:
    """The kernel as (groups, *order): outputs O and channels I of a group, and taps T."""
    outputs, channels, *taps = conv.numbers.rhs_spec
    groups = conv.feature_groups
    axes: dict[str, Sequence[int]] = {"O": (outputs,), "I": (channels,), "T": taps}
    sizes = {"O": conv.num_outputs // groups, "I": conv.num_channels // groups, "T": conv.num_taps}
    moved = kernel.transpose([axis for letter in order for axis in axes[letter]])
    before = [sizes[letter] for letter in order[: order.index("O")]]
    behind = [sizes[letter] for letter in order[order.index("O") :]]
    return jnp.moveaxis(moved.reshape(*before, groups, *behind), len(before), 0)


def _by_tap(conv: Convolution, kernel: Any, layout: Layout) -> list[Any]:
    """The weights of each tap, of a kernel with one channel, for multiplication by an image."""
    weights = _widen(_split_kernel(conv, kernel, "TOI")[..., 0])
    spread = weights if layout.is_last else weights.reshape(*weights.shape, *(1,) * layout.num_axes)
    return [spread[:, tap] for tap in range(conv.num_taps)]


def _stack(layout: Layout, windows: Sequence[Any]) -> Any:
    """Joins windows' inner axes into one: window by window if that is the last, else windows inside."""
    axis = layout.groups + 1
    if len(windows) == 1:
        return windows[0]
    if layout.is_last:
        return jax.lax.concatenate(windows, axis)
    stacked = jnp.stack(windows, axis + 1)
    return stacked.reshape(*stacked.shape[:axis], -1, *stacked.shape[axis + 2 :])


def _multiply(
    conv: Convolution, layout: Layout, weights: Any, axis: int, columns: Any, is_plain: bool
) -> Any:
    """Multiplies columns by weights: the outputs are in the place of the channels."""
    wide = _sum_dtype(columns.dtype)
    inner = layout.groups + 1
    if layout.is_last:
        products = jax.lax.dot_general(
            columns,
            weights,
            (((inner,), (axis,)), ((inner - 1,), (0,))),
            conv.precision,
            preferred_element_type=wide,
        )
        return jnp.moveaxis(products, 0, -2)
    if is_plain:
        weights = jnp.broadcast_to(weights, (columns.shape[0], *weights.shape))
        numbers = (((axis + 1,), (2,)), ((0, 1), (0, 1)))
        return jax.lax.dot_general(weights, columns, numbers, conv.precision, preferred_element_type=wide)
    products = jax.lax.dot_general(
        weights, columns, (((axis,), (2,)), ((0,), (1,))), conv.precision, preferred_element_type=wide
    )
    return jnp.moveaxis(products, 2, 0)


def _sum_dtype(dtype: Any) -> Any:
    """The dtype of sums of products: sums of narrow floats are wide, and are rounded once."""
    return jnp.float32 if dtype.itemsize < 4 else dtype


def _widen(array: Any) -> Any:
    return array.astype(_sum_dtype(array.dtype))


def _concatenate(parts: Sequence[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else jax.lax.concatenate(parts, axis)


def _block_size(number: int, num_bytes: int) -> int:
    """The number of images, of `number`, that go into a product; each takes `num_bytes` as columns."""
    return _largest_divisor(number, max(1, _BLOCK_BYTES // num_bytes))


def _sum_size(conv: Convolution, number: int) -> int:
    """The number of images, of `number`, that are summed over the taps at a time.

    With many taps it is not all of them, because XLA computes a sum that is not the result of a loop again
    for each operation that takes it.
    """
    return _largest_divisor(number, max(1, number // 2) if conv.num_taps > _FEW_TAPS else number)


def _largest_divisor(number: int, most: int) -> int:
    return max(size for size in range(1, number + 1) if number % size == 0 and size <= most)


def _map_blocks(product: Callable[[Any], Any], images: Any, size: int) -> Any:
    """The product of all images, computed for `size` of them at a time."""
    if size == images.shape[0]:
        return product(images)
    blocks = jax.lax.map(product, _cut(images, size))
    return blocks.reshape(-1, *blocks.shape[2:])


def _sum_blocks(product: Callable[[Any, Any], Any], images: Any, kernels: Any, size: int) -> Any:
    """The product of all images and kernels, summed over blocks of `size`."""
    if size == images.shape[0]:
        return product(images, kernels)
    blocks = (_cut(images, size), _cut(kernels, size))
    zeros = jax.eval_shape(product, *(block[0] for block in blocks))
    result, _nothing = jax.lax.scan(
        lambda total, pair: (total + product(*pair), None), jnp.zeros(zeros.shape, zeros.dtype), blocks
    )
    return result


def _cut(array: Any, size: int) -> Any:
    return array.reshape(-1, size, *array.shape[1:])


_NAME = "conv_general_dilated"


def has_convolutions(jaxpr: Any) -> bool:
    """Whether there is a convolution in a `Jaxpr`, or in a jaxpr within it."""
    return any(has_primitive(equation, _NAME) for equation in jaxpr.eqns)


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Makes a function compute its convolutions as products of matrices, also in loops and branches."""
    return rewriting(function, _rewrite)


def _rewrite(jaxpr: Any) -> Any:
    """Rewrites the convolutions of a `Jaxpr` as products."""
    if not has_convolutions(jaxpr):
        return jaxpr
    equations: list[Any] = []
    reversals: dict[Any, Any] = {}  # result of a reversal -> its equation
    for equation in jaxpr.eqns:
        if equation.primitive.name == "rev":
            reversals[equation.outvars[0]] = equation
        convolution = _read(equation)
        if convolution is None:
            params = {name: jax_core.map_jaxprs(_rewrite, value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=params))
        else:
            image, kernel = equation.invars
            reversal = reversals.get(kernel) if is_var(kernel) else None
            if reversal is not None and convolution.can_reverse(reversal.params["dimensions"]):
                convolution = dataclasses.replace(convolution, is_reversed=True)
                kernel = reversal.invars[0]
            equations += _inline(convolution, equation, (image, kernel))
    return jaxpr.replace(eqns=equations)


def _inline(convolution: Convolution, equation: Any, inputs: tuple[Any, Any]) -> list[Any]:
    """Makes the equations that replace a convolution of an image and a kernel."""
    structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in inputs]
    # No part of it is a call: a computation of its own would be one in the compiled program, too.
    traced = jax.make_jaxpr(functools.partial(_compute, convolution))(*structs)
    env = dict(zip(traced.jaxpr.invars, inputs, strict=True))
    (result,) = traced.jaxpr.outvars
    env[result] = equation.outvars[0]
    assert not traced.consts
    equations = []
    for inner in traced.jaxpr.eqns:
        atoms = map_atoms(env, inner.invars)
        for var in inner.outvars:
            env.setdefault(var, var if isinstance(var, jax_core.DropVar) else jax_core.Var(var.aval))
        equations.append(
            jax_compat.in_place_of(
                equation, inner.replace(invars=atoms, outvars=[env[var] for var in inner.outvars])
            )
        )
    return equations


def _compute(conv: Convolution, image: Any, kernel: Any) -> Any:
    """Computes a convolution in the form that suits it."""
    if conv.has_many_windows:
        return convolve_in_xla(conv, image, kernel)
    # Sums of narrow floats are wide, and are rounded once: here, where XLA sees the result's cast.
    return _product(conv, image, kernel).astype(image.dtype)


def _product(conv: Convolution, image: Any, kernel: Any) -> Any:
    if conv.is_correlation:
        if max(conv.holes) > 1 and max(conv.dilation) > 1:
            return correlate_windows(conv.without_holes(), dilate(conv, image), kernel)
        return correlate_windows(conv, image, kernel)
    if max(conv.stride) == 1 and (max(conv.holes) > 1 or conv.is_better_scattered(image, kernel)):
        return scatter_products(conv, image, kernel)
    if max(conv.holes) > 1:
        return multiply_windows(conv.without_holes(), dilate(conv, image), kernel)
    return multiply_windows(conv, image, kernel)


def _read(equation: Any) -> Convolution | None:
    """Reads an equation's convolution; None if there is none, or if it should stay as it is."""
    if equation.primitive.name != _NAME:
        return None
    image, kernel, result = (var.aval for var in (*equation.invars, *equation.outvars))
    if not 1 <= image.ndim - 2 <= 3 or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    if 0 in (*image.shape, *kernel.shape, *result.shape) or not image.dtype == kernel.dtype == result.dtype:
        return None
    params = equation.params
    numbers = params["dimension_numbers"]
    return Convolution(
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
