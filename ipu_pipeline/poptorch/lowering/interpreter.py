"""Computes a functional graph of torch by JAX, node by node.

torch determined the shape and dtype of every result when it made the graph. These are final: results are
cast to the dtype, and their shapes are checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ipu_pipeline.poptorch.dtypes import jax_dtype
from ipu_pipeline.poptorch.lowering.arrays import cast
from ipu_pipeline.poptorch.lowering.control_flow import CONTROL_FLOW
from ipu_pipeline.poptorch.lowering.index_checks import check_node
from ipu_pipeline.poptorch.lowering.registry import Lowering, find_lowering
from ipu_pipeline.poptorch.lowering.unsupported import (
    describe_place,
    describe_unsupported,
    find_unsupported,
)

__all__ = ["describe_unsupported", "find_unsupported", "run_node"]

# They set where a tensor is kept, or the generator of random numbers; here JAX decides both.
_DROPPED = frozenset(
    ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "requires_grad")
)

Read = Callable[[torch.fx.Node], Any]


def run_node(node: torch.fx.Node, read: Read) -> Any:
    """Computes one node of kind "call_function".

    Dtypes are promoted by `jax.numpy_dtype_promotion("standard")`, whatever the caller's setting is. Random
    numbers come from `engine.next_rng_key`.
    """
    if node.target is operator.getitem:
        container, index = node.args
        assert isinstance(container, torch.fx.Node)
        return read(container)[index]
    with jax.numpy_dtype_promotion("standard"):
        try:
            if node.target in CONTROL_FLOW:
                result: Any = CONTROL_FLOW[node.target](node, read, run_graph)
                return _fit(result, node.meta.get("val"), node, None)
            lowering = find_lowering(node.target)
            if lowering is None:
                raise NotImplementedError(describe_unsupported([node]))
            args = torch.fx.node.map_aggregate(node.args, lambda value: _as_jax(value, read))
            kwargs = {
                name: torch.fx.node.map_aggregate(value, lambda value: _as_jax(value, read))
                for name, value in node.kwargs.items()
                if name not in _DROPPED
            }
            check_node(node, args)
            return _fit(lowering.function(*args, **kwargs), node.meta.get("val"), node, lowering)
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"It happened in {describe_place(node)}.")
            raise


def run_graph(module: torch.fx.GraphModule, *values: Any) -> Any:
    """Computes a sub-graph."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    known: dict[torch.fx.Node, Any] = dict(zip(inputs, values, strict=True))
    for node in module.graph.nodes:
        if node.op == "call_function":
            known[node] = run_node(node, known.__getitem__)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], known.__getitem__)
    raise AssertionError("a graph without an output")


def _as_jax(value: Any, read: Read) -> Any:
    if isinstance(value, torch.fx.Node):
        return read(value)
    return jax_dtype(value) if isinstance(value, torch.dtype) else value


def _fit(result: Any, meta: Any, node: torch.fx.Node, lowering: Lowering | None) -> Any:
    """Returns the results in torch's dtypes, after checking their shapes."""
    if isinstance(meta, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(meta):
            _complain(node, lowering, f"{_describe(result)}, not {len(meta)} results")
        used = _used_results(node, len(meta))
        return tuple(
            _fit(value, what, node, lowering) if number in used else None
            for number, (value, what) in enumerate(zip(result, meta, strict=True))
        )
    if not isinstance(meta, torch.Tensor):
        return result
    if callable(result):
        result = result()
    if isinstance(result, (tuple, list)) or result is None:
        _complain(node, lowering, f"{_describe(result)}, not one array")
    array = jnp.asarray(result)
    if array.shape != tuple(meta.shape):
        _complain(node, lowering, f"shape {array.shape}, not {tuple(meta.shape)}")
    return cast(array, jax_dtype(meta.dtype))


def _describe(result: Any) -> str:
    return f"{len(result)} results" if isinstance(result, (tuple, list)) else type(result).__name__


def _used_results(node: torch.fx.Node, count: int) -> set[int]:
    used: set[int] = set()
    for user in node.users:
        if user.target is not operator.getitem:
            return set(range(count))
        if user.users:
            index = user.args[1]
            assert isinstance(index, int)
            used.add(index)
    return used


def _complain(node: torch.fx.Node, lowering: Lowering | None, what: str) -> None:
    if lowering is not None and lowering.is_registered:
        raise ValueError(f"The lowering registered for {node.target} returned {what}.")
    raise AssertionError(f"the lowering of {node.target} returned {what}")
