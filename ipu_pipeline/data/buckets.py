"""Micro-batches of examples of different lengths, each padded to one of a few lengths, with a mask."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.shapes import describe
from ipu_pipeline.ground.values import cast_exactly

__all__ = ["Buckets"]


class Buckets:
    """Puts examples of about the same length together in micro-batches.

    An example goes to the first bucket that is long enough for it. A bucket with enough examples gives a
    micro-batch. Pipelines compile for each length once; see `max_shapes`. The order is that of the
    examples, always the same.

    Example:
      >>> texts = [np.array([5, 2, 7]), np.array([1, 3])]  # or, for example, a data set of grain
      >>> for tokens, mask in datasets.Buckets(texts, lengths=[4, 8], batch_size=2):
      ...     print(tokens.shape, mask.sum())
      (2, 4) 5.0
    """

    def __init__(
        self,
        examples: Any,
        lengths: Sequence[int],
        batch_size: int,
        *,
        in_a_row: int = 1,
        remainder: Literal["fill", "drop"] = "fill",
        too_long: Literal["raise", "cut", "drop"] = "raise",
        padding: Any = 0,
        length_of: Callable[[Any], int] | None = None,
    ) -> None:
        """Takes the examples; nothing is read yet.

        Args:
          examples: can be iterated over, again for each pass, or is a function that returns an iterator.
            Yields pytrees of arrays, such as the tokens of a text. A leaf whose first axis has the
            example's length is padded along that axis; other leaves have the same shape in all examples.
          lengths: the lengths of the buckets, rising.
          batch_size: examples of a micro-batch.
          in_a_row: how many micro-batches of one length follow each other. Give the number of replicas,
            which need the same shapes at the same time, or the number of micro-batches of a step, so that
            a step has one length.
          remainder: what is done with examples that do not fill their bucket at the end: "fill" adds
            examples of padding only, "drop" leaves them out.
          too_long: what is done with an example that is longer than all buckets: "raise" an error, "cut"
            what does not fit, or "drop" it.
          padding: what is added; a number, or a pytree of numbers like an example.
          length_of: a function from an example to its length. None: the size of the first axis of the
            first leaf that has one.

        Raises:
          ValueError: an argument is not usable.
        """
        given = list(lengths) if np.iterable(lengths) else []
        if not given or not all(is_integer(length, 1) for length in given) or given != sorted(set(given)):
            raise ValueError(
                f"lengths must be at least one integer from 1, in rising order; got {given or lengths}."
            )
        self._lengths = list(map(int, given))
        for name, number in (("batch_size", batch_size), ("in_a_row", in_a_row)):
            if not is_integer(number, 1):
                raise ValueError(f"{name} must be an integer of at least 1; got {number!r}.")
        for name, choice, known in (
            ("remainder", remainder, ("fill", "drop")),
            ("too_long", too_long, ("raise", "cut", "drop")),
        ):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {choice!r}.")
        if hasattr(examples, "__next__"):
            raise ValueError(
                "examples must be something that can be iterated over again, for each pass; got an "
                f"iterator ({type(examples).__name__}). Pass what it was made from, or a function that "
                "returns one."
            )
        self._examples, self._batch_size, self._in_a_row = examples, int(batch_size), int(in_a_row)
        self._remainder, self._too_long, self._padding = remainder, too_long, padding
        self._length_of = length_of

    def __iter__(self) -> Iterator[Any]:
        """Yields micro-batches of one pass over the examples.

        Each has the leaves of `batch_size` examples, padded and stacked on a first axis, and a mask,
        float32 [batch_size, length], 1 for what is in an example and 0 for padding. The mask is the last
        one of a tuple or list, the entry "mask" of a dict, and second in a pair with anything else.

        A micro-batch of padding only, of which there may be some at the end, has a mask of zeros: what
        divides by the sum of the mask should divide by at least 1.
        """
        full = self._batch_size * self._in_a_row
        waiting: list[list[_Example]] = [[] for _length in self._lengths]
        first: _Example | None = None
        is_padded: list[bool] = []  # by leaf
        paddings: list[Any] = []  # by leaf
        has_made = False  # whether there has been a micro-batch
        examples = self._examples() if callable(self._examples) else self._examples
        for number, example in enumerate(examples):
            leaves, tree = jax.tree.flatten(example)
            arrays = [np.asarray(leaf) for leaf in leaves]
            own = _Example(arrays, self._find_length(example, arrays, number), tree)
            fits = [array.ndim > 0 and len(array) == own.length for array in arrays]
            if first is None:
                first, is_padded, paddings = own, fits, self._find_paddings(arrays)
            known = is_padded
            is_padded = [old and new for old, new in zip(known, fits, strict=False)]
            own.check_like(first, is_padded, number)
            if has_made and is_padded != known:
                place = next(leaf for leaf, old in enumerate(known) if old and not fits[leaf])
                raise ValueError(
                    f"Example {number} has the length {own.length} and a leaf {describe(arrays[place])}. "
                    "In all examples before it, this leaf's first axis had the example's length, so that "
                    "it was padded. Give a leaf that is not to be padded a first axis of size 1."
                )
            place = bisect.bisect_left(self._lengths, own.length)
            if place == len(self._lengths):
                if self._too_long == "drop":
                    continue
                place -= 1
            waiting[place].append(own)
            if len(waiting[place]) == full:
                yield from self._make(waiting[place], self._lengths[place], is_padded, paddings)
                waiting[place], has_made = [], True
        for length, some in zip(self._lengths, waiting, strict=True):
            if some and self._remainder == "fill":
                yield from self._make(some, length, is_padded, paddings)

    def _find_length(self, example: Any, arrays: Sequence[Any], number: int) -> int:
        if self._length_of is not None:
            length = int(self._length_of(example))
        else:
            sizes = [array.shape[0] for array in arrays if array.ndim]
            if not sizes:
                raise ValueError(f"Example {number} has no array with an axis; got {example!r}.")
            length = sizes[0]
        if length > self._lengths[-1] and self._too_long == "raise":
            raise ValueError(
                f"Example {number} has the length {length}, and the longest bucket {self._lengths[-1]}. "
                'Give a longer one, or too_long="cut" or "drop".'
            )
        return length

    def _find_paddings(self, arrays: Sequence[Any]) -> list[Any]:
        """What is added to each leaf of an example."""
        values = jax.tree.leaves(self._padding)
        values = values * len(arrays) if len(values) == 1 else values
        if len(values) != len(arrays):
            raise ValueError(
                "padding must be a number, or a pytree of numbers like an example, which has "
                f"{len(arrays)} leaves; got {self._padding!r}."
            )
        pairs = zip(values, arrays, strict=True)
        return [cast_exactly(np.asarray(value), array.dtype, "padding") for value, array in pairs]

    def _make(
        self, some: Sequence[_Example], length: int, is_padded: Sequence[bool], paddings: Sequence[Any]
    ) -> Iterator[Any]:
        """The micro-batches of one bucket."""
        size, known = self._batch_size, some[0]
        for first in range(0, size * self._in_a_row, size):
            mask = np.zeros((size, length), np.float32)
            stacks = []
            for array, is_long, padding in zip(known.arrays, is_padded, paddings, strict=True):
                shape = (length, *array.shape[1:]) if is_long else array.shape
                stacks.append(np.full((size, *shape), padding, array.dtype))
            for row, own in enumerate(some[first : first + size]):
                mask[row, : own.length] = 1
                for stack, array, is_long in zip(stacks, own.arrays, is_padded, strict=True):
                    if is_long:
                        stack[row, : own.length] = array[:length]
                    else:
                        stack[row] = array
            yield _with_mask(jax.tree.unflatten(known.tree, stacks), mask)


@dataclass(frozen=True, eq=False)
class _Example:
    arrays: list[Any]  # its leaves
    length: int
    tree: Any

    def check_like(self, first: _Example, is_padded: Sequence[bool], number: int) -> None:
        """Raises if it cannot be stacked with the first one."""
        if self.tree != first.tree:
            raise ValueError(f"Example {number} has the structure {self.tree}, in place of {first.tree}.")
        for array, known, is_long in zip(self.arrays, first.arrays, is_padded, strict=True):
            own, old = (array.shape[1:], known.shape[1:]) if is_long else (array.shape, known.shape)
            if own != old or array.dtype != known.dtype:
                raise ValueError(
                    f"Example {number} has a leaf {describe(array)}, and the first one {describe(known)}. "
                    "Only the first axis may differ, where it has the example's length."
                )


def _with_mask(examples: Any, mask: Any) -> Any:
    if isinstance(examples, dict):
        if "mask" in examples:
            raise ValueError('An example must not have an entry "mask", which is the one that is added.')
        return {**examples, "mask": mask}
    if isinstance(examples, (tuple, list)) and not hasattr(examples, "_fields"):
        return type(examples)([*examples, mask])
    return examples, mask
