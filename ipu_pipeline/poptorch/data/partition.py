"""Chooses the rows of a data set for a call, or for one of several processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils.data

__all__ = ["CombiningSampler", "PartSampler", "find_part"]


class CombiningSampler(torch.utils.data.Sampler[list[int]]):
    """Joins a sampler's batches, which are micro-batches, to the batches of calls."""

    def __init__(self, batches: Iterable[list[int]], number: int, drop_last: bool) -> None:
        """Takes the sampler."""
        self._batches, self._number, self._drop_last = batches, number, drop_last

    def __len__(self) -> int:
        batches: Any = self._batches
        whole, rest = divmod(len(batches), self._number)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        left = iter(self._batches)
        while batches := list(itertools.islice(left, self._number)):
            if len(batches) == self._number or not self._drop_last:
                yield list(itertools.chain.from_iterable(batches))


class PartSampler(torch.utils.data.Sampler[int]):
    """Samples one of several equal parts, each contiguous: of the data set, or of a permutation of it."""

    def __init__(self, num_rows: int, part: range, seed: int | None) -> None:
        """Takes arguments that are the same in all processes, and this process's part."""
        self._num_rows = num_rows
        self._part = part
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[int]:
        if self._generator is None:
            return iter(self._part)
        permutation = torch.randperm(self._num_rows, generator=self._generator)
        return iter(permutation[self._part.start : self._part.stop].tolist())


def find_part(num_rows: int, combined_batch_size: int, drop_last: bool, index: int, count: int) -> range:
    """Returns the positions of one part.

    Raises:
      AssertionError: no row may be dropped, and the parts would not be equal.
    """
    if drop_last:
        size = num_rows // (combined_batch_size * count) * combined_batch_size
    elif num_rows % count:
        raise AssertionError(
            f"The number of elements in the dataset ({num_rows}) is not divisible by the number of "
            f"processes ({count}) and drop_last=False. Switch to drop_last=True."
        )
    else:
        size = num_rows // count
    return range(index * size, (index + 1) * size)
