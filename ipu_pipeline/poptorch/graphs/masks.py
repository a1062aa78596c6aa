"""Boolean masks as indices, by the places of their true elements.

How many there are is a value that a model asks for, see `example_values`. `x[mask] = f(y[mask])` needs no
number: it is `where(mask, f(y), x)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.graphs.partitions import is_check

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default)  # noqa: SLF001  # torch's name

FindPlaces = Callable[[torch.Tensor], list[torch.Tensor]]


def is_mask(item: Any) -> bool:
    """Whether a part of an index is a mask."""
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) and bool(item.dim())


def takes_rows(x: torch.Tensor, items: tuple[Any, ...], value: Any) -> bool:
    """Whether `x[items] = value` puts different values where masks are true, or has other indices, too."""
    numbers = [number for number, item in enumerate(items) if isinstance(item, (torch.Tensor, list))]
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


def put_where(graph: torch.fx.Graph) -> None:
    """Turns `x[mask] = f(y[mask])` into `where(mask, f(y), x)`, for functions of single elements.

    f gets ones where the mask is false, so that its gradients there are finite. What a count is expected to
    be is removed with the last use of the places.
    """
    counts = {node: node.args[1] for node in graph.nodes if node.target is markers.places_operation()}
    numbers: dict[Any, int] = {}  # equal for nodes that are computed alike
    alike: dict[str, int] = {}
    whole: dict[Any, Any] = {}  # f(y[mask]) -> what identifies the mask, f(y)
    for node in list(graph.nodes) if counts else ():
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda operand: f"%{numbers[operand]}")
        name = node.name if node.is_impure() else str((node.target, arguments))
        numbers[node] = alike.setdefault(name, len(alike))
        keys = {whole.get(operand, (None, None))[0] for operand in node.all_input_nodes}
        with graph.inserting_before(node):
            key, mask = _read_mask(node, numbers)
            if key is not None and node.target is _aten.index.Tensor:
                ones = _add(node, _aten.ones_like.default, node.args[0])
                whole[node] = key, _add(node, _aten.where.self, mask, node.args[0], ones)
            elif key is not None and True not in node.args[3:]:
                value_key, value = whole.get(node.args[2], (None, None))
                if value_key == key:
                    node.target, node.args = _aten.where.self, (mask, value, node.args[0])
            elif _is_of_elements(node) and len(keys) == 1 and None not in keys:
                operands = torch.fx.map_arg(node.args, lambda operand: whole[operand][1])
                whole[node] = *keys, _add(node, node.target, *operands, **node.kwargs)
    graph.eliminate_dead_code(lambda node: node.is_impure() and not is_check(node))
    for count in [count for places, count in counts.items() if not places.users]:
        for user in [user for user in count.users if markers.read_expected(user)]:
            graph.erase_node(user)


def _read_mask(node: Any, numbers: Mapping[Any, int]) -> tuple[Any, Any]:
    """Finds the mask whose places index a node's first operand. Returns what identifies it, and its node.

    The mask gets the operand's dimensions that follow its own.
    """
    if node.target not in (_aten.index.Tensor, _aten.index_put.default):
        return None, None
    indices, shape = node.args[1], node.args[0].meta["val"].shape
    axis = next(axis for axis, index in enumerate(indices) if index is not None)
    places = indices[axis].args[0] if indices[axis].target is operator.getitem else indices[axis]
    if places.target is not markers.places_operation():
        return None, None
    mask = places.args[0]
    key = numbers[mask], axis, shape
    end = axis + mask.meta["val"].dim()
    is_whole = [
        index is not None and index.args == (places, n) for n, index in enumerate(indices[axis:end])
    ]
    if not all(is_whole) or any(index is not None for index in indices[end:]):
        return None, None
    for _dimension in shape[end:]:
        mask = _add(node, _aten.unsqueeze.default, mask, -1)
    return key, mask


def _is_of_elements(node: Any) -> bool:
    """Whether a node computes each element of its result from one of each operand."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _COPIES
    return is_pointwise and not node.is_impure()


def _add(place: Any, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """Adds a node that has the place of another one in the user's program."""
    node: torch.fx.Node = place.graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg(args, lambda operand: operand.meta["val"])
    node.meta = {**place.meta, "val": target(*values, **kwargs)}
    return node
