"""Counts what operations of torch become in JAX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import torch

from ipu_pipeline.engine.inspect import Work, count_work
from ipu_pipeline.poptorch.dtypes import jax_dtype
from ipu_pipeline.poptorch.lowering.interpreter import run_node

__all__ = ["count_lowered"]


def count_lowered(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, Work]:
    """Traces the forwards of operations one by one, equal ones only once."""
    known: dict[Any, Work] = {}
    found = {}
    for node in nodes:
        key = _signature(node)
        if key not in known:
            known[key] = _count(node)
        found[node] = known[key]
    return found


def _count(node: torch.fx.Node) -> Work:
    inputs = [read for read in node.all_input_nodes if read.op != "get_attr"]

    def run(values: list[Any]) -> Any:
        return run_node(node, dict(zip(inputs, values, strict=True)).__getitem__)

    return count_work(run, [_map_tensors(read.meta.get("val"), _shape) for read in inputs])


def _signature(node: torch.fx.Node) -> Any:
    """Returns a key that is equal for operations that become the same. Inner graphs are never equal."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            is_graph = value.op == "get_attr"
            return value if is_graph else repr(_map_tensors(value.meta.get("val"), _shape))
        return repr(value)

    read = {str(user.args[1:]) for user in node.users if user.target is operator.getitem}
    arguments = torch.fx.node.map_aggregate(
        (node.args, tuple(node.kwargs.items())), lambda value: describe(value)
    )
    return node.target, str(arguments), frozenset(read)


def _shape(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))


def _map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies a function to the tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map_tensors(part, function) for part in value)
    return value
