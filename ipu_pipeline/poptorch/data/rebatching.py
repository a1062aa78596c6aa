"""Joins and cuts batches into batches of another number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["rebatch"]


def rebatch(batches: Iterable[Any], num_rows: int, drop_last: bool) -> Iterator[Any]:
    """Yields the rows of some batches in their order, `num_rows` at a time."""
    kept: list[Any] = []
    missing = num_rows
    for batch in batches:
        end, start = _count_rows(batch), 0
        while end - start >= missing:
            yield _join([*kept, _cut(batch, start, start + missing, end)])
            start += missing
            kept, missing = [], num_rows
        if start < end:
            kept.append(_cut(batch, start, end, end))
            missing -= end - start
    if kept and not drop_last:
        yield _join(kept)


def _arrays_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays_of(part)


def _count_rows(batch: Any) -> int:
    counts = {len(array) if array.ndim else 0 for array in _arrays_of(batch)}
    if len(counts) != 1 or 0 in counts:
        shapes = [tuple(array.shape) for array in _arrays_of(batch)]
        raise TypeError(
            "Rebatching: all tensors of a batch must have the same number of rows, in their first "
            f"dimension; got a {type(batch).__name__} with tensors of the shapes {shapes}."
        )
    return counts.pop()


def _rebuild(like: Any, parts: Sequence[Any]) -> Any:
    """Makes a tuple or list of the same type."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _is_by_row(value: Any, num_rows: int) -> bool:
    """Whether a tuple or list has one item per row that is not a tensor, such as strings."""
    return len(value) == num_rows and next(_arrays_of(value), None) is None


def _cut(value: Any, start: int, stop: int, num_rows: int) -> Any:
    if start == 0 and stop == num_rows:
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[start:stop]
    if isinstance(value, dict):
        return {key: _cut(part, start, stop, num_rows) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        if _is_by_row(value, num_rows):
            return value[start:stop]
        return _rebuild(value, [_cut(part, start, stop, num_rows) for part in value])
    return value


def _join(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return _join_parts(batches, [_count_rows(batch) for batch in batches])


def _join_parts(values: Sequence[Any], num_rows: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, dict):
        return {key: _join_parts([value[key] for value in values], num_rows) for key in first}
    if isinstance(first, (tuple, list)):
        if all(_is_by_row(value, count) for value, count in zip(values, num_rows, strict=True)):
            return type(first)(itertools.chain(*values))
        return _rebuild(first, [_join_parts(parts, num_rows) for parts in zip(*values, strict=True)])
    if any(value != first for value in values):
        raise TypeError(
            "Rebatching: batches can be joined if what is not by row is the same in all of them; "
            f"got {' and '.join(map(repr, values))}."
        )
    return first
