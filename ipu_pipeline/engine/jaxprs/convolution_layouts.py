"""The description of a convolution, and the layouts of its arrays.

`convolutions` reads these from programs, and `convolution_forms` computes them.
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

__all__ = ["Convolution", "Layout", "Windows", "in_order"]

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
        """Whether it stays a convolution, because its windows would make too large a program."""
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
        found = []
        for place in itertools.product(*map(range, self.num)):
            starts, limits, steps = [0] * array.ndim, list(padded.shape), [1] * array.ndim
            for i, index in enumerate(place):
                starts[first_axis + i] = index * self.apart[i]
                limits[first_axis + i] = starts[first_axis + i] + self._spans[i]
                steps[first_axis + i] = self.step[i]
            found.append(jax.lax.slice(padded, starts, limits, steps))
        return found

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
        own = (0, last, *range(1, last)) if self.is_last else tuple(range(joined.ndim))
        return in_order(joined, own, spec)


def in_order(array: Any, spec: Sequence[int], wanted: Sequence[int]) -> Any:
    """Transposes an array so that the axes at `spec` come to be those at `wanted`."""
    order = [0] * array.ndim
    for source, target in zip(spec, wanted, strict=True):
        order[target] = source
    return array.transpose(order)
