"""Boolean masks as indices, by the places of their true elements.

How many there are is a value that a model asks for, see `example_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FindPlaces = Callable[[torch.Tensor], list[torch.Tensor]]


def is_mask(item: Any) -> bool:
    """Whether a part of an index is a mask."""
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


def takes_rows(x: torch.Tensor, items: tuple[Any, ...], value: Any) -> bool:
    """Whether `x[items] = value` puts different values where masks are true, or has other indices, too."""
    numbers = [
        number
        for number, item in enumerate(items)
        if isinstance(item, list) or is_mask(item) or (isinstance(item, torch.Tensor) and item.dim())
    ]
    if len(numbers) != 1:
        return True
    (number,) = numbers
    if not isinstance(value, torch.Tensor) or not is_mask(items[number]):
        return False
    before, after = items[:number], items[number + 1 :]
    num_indexed = sum(item is not None and item is not Ellipsis for item in (*before, *after))
    num_after = sum(item is None or isinstance(item, slice) for item in after)
    if not any(item is Ellipsis for item in before):
        num_after += x.dim() - num_indexed - items[number].dim()
    row = value.shape
    while row and row[0] == 1:
        row = row[1:]
    return len(row) > num_after


def find_nonzero(find_places: FindPlaces, input: torch.Tensor, *, as_tuple: bool = False) -> Any:
    """Computes `torch.nonzero`."""
    places = find_places(input)
    if as_tuple:
        return tuple(places)
    return torch.stack(places, 1)[:, : input.dim()]


def find_true(find_places: FindPlaces, condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes `torch.where` of a condition alone."""
    return tuple(find_places(condition))


def select(find_places: FindPlaces, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Computes `torch.masked_select`."""
    x, mask = torch.broadcast_tensors(input, mask)
    return x.reshape(x.shape or (1,))[tuple(find_places(mask))]
