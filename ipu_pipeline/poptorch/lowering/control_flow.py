"""Computes torch's cond, while_loop, scan and map by JAX's. Their bodies are sub-graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ipu_pipeline.poptorch.lowering.random_numbers import repeated

__all__ = ["CONTROL_FLOW"]

Read = Callable[[torch.fx.Node], Any]
RunGraph = Callable[..., Any]


def _sub_graph(node: torch.fx.Node, attribute: Any) -> torch.fx.GraphModule:
    assert isinstance(attribute, torch.fx.Node)
    assert attribute.op == "get_attr"
    module = getattr(node.graph.owning_module, str(attribute.target))
    assert isinstance(module, torch.fx.GraphModule)
    return module


def _values(args: Any, read: Read) -> list[Any]:
    """Reads the operands: nodes' values, and numbers unchanged."""
    return [read(arg) if isinstance(arg, torch.fx.Node) else arg for arg in args]


def _body(node: torch.fx.Node, attribute: Any, run_graph: RunGraph) -> Callable[..., tuple[Any, ...]]:
    module = _sub_graph(node, attribute)
    return lambda *values: tuple(run_graph(module, *values))


def _cond(node: torch.fx.Node, read: Read, run_graph: RunGraph) -> Any:
    predicate, then_graph, else_graph, operands = node.args
    value: Any = read(predicate) if isinstance(predicate, torch.fx.Node) else predicate
    branches = [_body(node, attribute, run_graph) for attribute in (then_graph, else_graph)]
    if isinstance(value, bool):
        return branches[0 if value else 1](*_values(operands, read))
    return jax.lax.cond(value.reshape(()), *branches, *_values(operands, read))


def _while_loop(node: torch.fx.Node, read: Read, run_graph: RunGraph) -> Any:
    condition, body, carried, fixed = node.args
    extra = _values(fixed, read)
    test, step = _sub_graph(node, condition), _body(node, body, run_graph)

    def continues(values: tuple[Any, ...]) -> Any:
        result = run_graph(test, *values, *extra)
        result = result[0] if isinstance(result, (tuple, list)) else result
        return result.reshape(())

    def again(numbered: Any) -> Any:
        number, values = numbered
        with repeated(number):
            return number + 1, step(*values, *extra)

    start = jnp.zeros((), jnp.int32), tuple(_values(carried, read))
    return jax.lax.while_loop(lambda numbered: continues(numbered[1]), again, start)[1]


def _scan(node: torch.fx.Node, read: Read, run_graph: RunGraph) -> Any:
    combine, initial, rows, fixed = node.args
    extra, carry = _values(fixed, read), tuple(_values(initial, read))
    step = _body(node, combine, run_graph)

    def body(carry: tuple[Any, ...], numbered: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        number, row = numbered
        with repeated(number):
            results = step(*carry, *row, *extra)
        return results[: len(carry)], results[len(carry) :]

    last, made = jax.lax.scan(body, carry, _numbered(_values(rows, read)))
    return (*last, *made)


def _map(node: torch.fx.Node, read: Read, run_graph: RunGraph) -> Any:
    body, rows, fixed = node.args
    extra, step = _values(fixed, read), _body(node, body, run_graph)

    def apply(numbered: Any) -> tuple[Any, ...]:
        number, row = numbered
        with repeated(number):
            return step(*row, *extra)

    return jax.lax.map(apply, _numbered(_values(rows, read)))


def _numbered(rows: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the rows that a loop goes over, with the number of each iteration."""
    return jnp.arange(rows[0].shape[0], dtype=jnp.int32), tuple(rows)


def _invoke(node: torch.fx.Node, read: Read, run_graph: RunGraph) -> Any:
    body, *rest = node.args
    operands = rest[1:]  # after the name of the sub-graph
    return _body(node, body, run_graph)(*_values(operands, read))


_operators = torch.ops.higher_order

# The operations, each with a function of the node, a reader of values, and a runner of sub-graphs.
CONTROL_FLOW: dict[Any, Callable[[torch.fx.Node, Read, RunGraph], Any]] = {
    _operators.cond: _cond,
    _operators.while_loop: _while_loop,
    _operators.scan: _scan,
    _operators.map_impl: _map,
    _operators.invoke_subgraph: _invoke,
}
