"""The windows of a pooling.

Dimensions that come before the pooled ones (batch, channels) have windows of one element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ipu_pipeline.poptorch.lowering.arrays import per_dim

__all__ = ["Windows", "make_windows"]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows along the pooled dimensions, which are an array's last ones, with one number for each."""

    lengths: tuple[int, ...]  # the array's lengths
    kernel: tuple[int, ...]  # elements in a window
    stride: tuple[int, ...]  # from one window to the next
    # elements before the array; after it there may be fewer or, when rounding up, more
    padding: tuple[int, ...]
    dilation: tuple[int, ...]  # from one element of a window to the next
    counts: tuple[int, ...]  # the numbers of windows

    @property
    def num_dims(self) -> int:
        """The number of pooled dimensions."""
        return len(self.kernel)

    @property
    def are_tiles(self) -> bool:
        """Whether the windows are side by side, all within the array."""
        inside = not any(before or after for before, after in self.pads(self.num_dims))
        return inside and self.stride == self.kernel and set(self.dilation) == {1}

    def pads(self, ndim: int) -> list[tuple[int, int]]:
        """Returns the padding before and after, for all dimensions of an array."""
        pads = []
        for i in range(self.num_dims):
            reach = (self.counts[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
            pads.append((self.padding[i], max(reach - self.lengths[i] - self.padding[i], 0)))
        return [(0, 0)] * (ndim - self.num_dims) + pads

    def spread(self, values: tuple[int, ...], ndim: int) -> tuple[int, ...]:
        """Extends numbers of the pooled dimensions to all of an array's, with 1 for those before."""
        return (1,) * (ndim - self.num_dims) + values


def make_windows(
    shape: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
    num_dims: int,
) -> Windows:
    """Makes the windows of an array of that shape."""
    kernel = per_dim(kernel, num_dims)
    stride = per_dim(stride, num_dims) if stride else kernel
    padding, dilation = per_dim(padding, num_dims), per_dim(dilation, num_dims)
    lengths = shape[len(shape) - num_dims :]
    counts = []
    for i in range(num_dims):
        free = lengths[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        count = free // stride[i] + 1
        if ceil_mode and free % stride[i] and count * stride[i] < lengths[i] + padding[i]:
            count += 1
        counts.append(count)
    return Windows(lengths, kernel, stride, padding, dilation, tuple(counts))
