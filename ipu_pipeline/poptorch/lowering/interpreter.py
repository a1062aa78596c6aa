"""Computes a functional graph of torch by JAX, node by node.

torch determined the shape and dtype of every result when it made the graph. These are final: results are
cast to the dtype, and their shapes are checked. Bodies of loops and conditionals are sub-graphs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverload

from ipu_pipeline.engine.inspect import Work, count_work
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.poptorch.dtypes import jax_dtype
from ipu_pipeline.poptorch.lowering.arrays import cast
from ipu_pipeline.poptorch.lowering.random_numbers import loop_iteration
from ipu_pipeline.poptorch.lowering.registry import Lowering, find_lowering

# They set where a tensor is kept, or the generator of random numbers; here JAX decides both.
_DROPPED = frozenset(
    ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "requires_grad")
)

ReadNode = Callable[[torch.fx.Node], Any]  # returns a node's value


def run_node(node: torch.fx.Node, read_node: ReadNode) -> Any:
    """Computes one node of kind "call_function".

    Dtypes are promoted by `jax.numpy_dtype_promotion("standard")`, whatever the caller's setting is. Random
    numbers come from `engine.next_rng_key`.
    """
    if node.target is operator.getitem:
        container, index = node.args
        assert isinstance(container, torch.fx.Node)
        return read_node(container)[index]
    with jax.numpy_dtype_promotion("standard"):
        try:
            if node.target in CONTROL_FLOW:
                result: Any = CONTROL_FLOW[node.target](node, read_node)
                return _fit(result, node.meta.get("val"), node, None)
            lowering = find_lowering(node.target)
            if lowering is None:
                raise NotImplementedError(describe_unsupported([node]))
            args = torch.fx.node.map_aggregate(node.args, lambda value: _as_jax(value, read_node))
            kwargs = {
                name: torch.fx.node.map_aggregate(value, lambda value: _as_jax(value, read_node))
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
    node_values: dict[torch.fx.Node, Any] = dict(zip(inputs, values, strict=True))
    for node in module.graph.nodes:
        if node.op == "call_function":
            node_values[node] = run_node(node, node_values.__getitem__)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], node_values.__getitem__)
    raise AssertionError("a graph without an output")


def _as_jax(value: Any, read_node: ReadNode) -> Any:
    if isinstance(value, torch.fx.Node):
        return read_node(value)
    return jax_dtype(value) if isinstance(value, torch.dtype) else value


def _fit(result: Any, meta: Any, node: torch.fx.Node, lowering: Lowering | None) -> Any:
    """Returns the results in torch's dtypes, after checking their shapes."""
    if isinstance(meta, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(meta):
            _complain(node, lowering, f"{_describe(result)}, not {len(meta)} results")
        used_numbers = _used_results(node, len(meta))
        return tuple(
            _fit(value, result_meta, node, lowering) if number in used_numbers else None
            for number, (value, result_meta) in enumerate(zip(result, meta, strict=True))
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
    numbers: set[int] = set()
    for user in node.users:
        if user.target is not operator.getitem:
            return set(range(count))
        if user.users:
            index = user.args[1]
            assert isinstance(index, int)
            numbers.add(index)
    return numbers


def _complain(node: torch.fx.Node, lowering: Lowering | None, mismatch: str) -> None:
    if lowering is not None and lowering.is_registered:
        raise ValueError(f"The lowering registered for {node.target} returned {mismatch}.")
    raise AssertionError(f"the lowering of {node.target} returned {mismatch}")


# Control flow: torch's cond, while_loop, scan and map by JAX's. Their bodies are sub-graphs.


def _sub_graph(node: torch.fx.Node, attribute: Any) -> torch.fx.GraphModule:
    assert isinstance(attribute, torch.fx.Node)
    assert attribute.op == "get_attr"
    module = getattr(node.graph.owning_module, str(attribute.target))
    assert isinstance(module, torch.fx.GraphModule)
    return module


def _operand_values(args: Any, read_node: ReadNode) -> list[Any]:
    """Reads the operands: nodes' values, and numbers unchanged."""
    return [read_node(arg) if isinstance(arg, torch.fx.Node) else arg for arg in args]


def _body(node: torch.fx.Node, attribute: Any) -> Callable[..., tuple[Any, ...]]:
    module = _sub_graph(node, attribute)
    return lambda *values: tuple(run_graph(module, *values))


def _cond(node: torch.fx.Node, read_node: ReadNode) -> Any:
    predicate, then_graph, else_graph, operands = node.args
    value: Any = read_node(predicate) if isinstance(predicate, torch.fx.Node) else predicate
    branches = [_body(node, attribute) for attribute in (then_graph, else_graph)]
    if isinstance(value, bool):
        return branches[0 if value else 1](*_operand_values(operands, read_node))
    return jax.lax.cond(value.reshape(()), *branches, *_operand_values(operands, read_node))


def _while_loop(node: torch.fx.Node, read_node: ReadNode) -> Any:
    condition, body, carried, fixed = node.args
    extra = _operand_values(fixed, read_node)
    test, step = _sub_graph(node, condition), _body(node, body)

    def continues(values: tuple[Any, ...]) -> Any:
        result = run_graph(test, *values, *extra)
        result = result[0] if isinstance(result, (tuple, list)) else result
        return result.reshape(())

    def again(numbered: Any) -> Any:
        number, values = numbered
        with loop_iteration(number):
            return number + 1, step(*values, *extra)

    start = jnp.zeros((), jnp.int32), tuple(_operand_values(carried, read_node))
    return jax.lax.while_loop(lambda numbered: continues(numbered[1]), again, start)[1]


def _scan(node: torch.fx.Node, read_node: ReadNode) -> Any:
    combine, initial, rows, fixed = node.args
    extra, carry = _operand_values(fixed, read_node), tuple(_operand_values(initial, read_node))
    step = _body(node, combine)

    def body(carry: tuple[Any, ...], numbered: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        number, row = numbered
        with loop_iteration(number):
            results = step(*carry, *row, *extra)
        return results[: len(carry)], results[len(carry) :]

    last, results_by_row = jax.lax.scan(body, carry, _numbered(_operand_values(rows, read_node)))
    return (*last, *results_by_row)


def _map(node: torch.fx.Node, read_node: ReadNode) -> Any:
    body, rows, fixed = node.args
    extra, step = _operand_values(fixed, read_node), _body(node, body)

    def apply(numbered: Any) -> tuple[Any, ...]:
        number, row = numbered
        with loop_iteration(number):
            return step(*row, *extra)

    return jax.lax.map(apply, _numbered(_operand_values(rows, read_node)))


def _numbered(rows: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the rows that a loop goes over, with the number of each iteration."""
    return jnp.arange(rows[0].shape[0], dtype=jnp.int32), tuple(rows)


def _invoke(node: torch.fx.Node, read_node: ReadNode) -> Any:
    body, *named_operands = node.args
    operands = named_operands[1:]  # after the name of the sub-graph
    return _body(node, body)(*_operand_values(operands, read_node))


_operators = torch.ops.higher_order

CONTROL_FLOW: dict[Any, Callable[[torch.fx.Node, ReadNode], Any]] = {
    _operators.cond: _cond,
    _operators.while_loop: _while_loop,
    _operators.scan: _scan,
    _operators.map_impl: _map,
    _operators.invoke_subgraph: _invoke,
}


# Operations that cannot be computed, which are found before anything runs, and places in the user's code.

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<text>\S.*))?'
)
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,  # not torch_geometric beside it
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<",  # code without a file, such as what torch makes of a branch
)


def find_unsupported(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Finds nodes without a lowering, or with values that JAX does not have, in sub-graphs, too."""
    unsupported = []
    for node in graph.nodes:
        if node.op == "get_attr":
            module = getattr(graph.owning_module, str(node.target), None)
            if isinstance(module, torch.fx.GraphModule):
                unsupported.extend(find_unsupported(module.graph))
        elif node.op == "call_function" and _reason(node) is not None:
            unsupported.append(node)
    return unsupported


def describe_unsupported(nodes: list[torch.fx.Node]) -> str:
    """Returns the text of an error: each operation once, with the reason and all its places."""
    places: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        key = str(node.target), _reason(node) or "has no lowering for these arguments"
        node_places = places.setdefault(key, [])
        place = describe_place(node)
        if place not in node_places:
            node_places.append(place)
    lines = ["The model uses what cannot be computed:"]
    lines += [
        f"- {name} {reason}: in {'; in '.join(node_places)}."
        for (name, reason), node_places in places.items()
    ]
    if any(reason == _NO_LOWERING for name, reason in places):
        name = next(name for name, reason in places if reason == _NO_LOWERING)
        lines.append(
            "Say how JAX computes an operation with poptorch.register_lowering, as in "
            f'poptorch.register_lowering("{_public_name(name)}", function); or write the model without it.'
        )
    return "\n".join(lines)


def describe_place(node: torch.fx.Node) -> str:
    """Returns the module, and the line of the user's code, in which a node was made."""
    stack = node.meta.get("nn_module_stack") or {}
    modules = [(path, getattr(kind, "__name__", None) or str(kind)) for path, kind in stack.values()]
    path, kind = modules[-1] if modules else ("", "the model")
    kind = kind.rpartition(".")[2]
    module = f"module {path!r} ({kind})" if path else f"module {kind}" if modules else kind
    frames = find_users_frames(node.meta.get("stack_trace") or "")
    if not frames:
        return module
    frame = frames[-1]
    text = f": {frame['text'].strip()}" if frame["text"] else ""
    return f"{module}, {frame['file']}:{frame['line']}{text}"


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not file.startswith(_NOT_THE_USERS)


def find_users_frames(text: str) -> list[re.Match[str]]:
    """Finds frames of a traceback that are neither torch's nor ours, with `file`, `line` and `text`."""
    return [frame for frame in _FRAME.finditer(text) if is_users(frame["file"])]


_NO_LOWERING = "has no lowering"


def _reason(node: torch.fx.Node) -> str | None:
    """Returns why a node cannot be computed, or None if it can."""
    target = node.target
    if target is operator.getitem or target in CONTROL_FLOW:
        return None
    for meta in _tensors_around(node):
        try:
            jax_dtype(meta.dtype)
        except TypeError:
            return f"makes or takes a tensor of {meta.dtype}, which is not supported"
        if meta.layout != torch.strided:
            return f"makes or takes a tensor of layout {meta.layout}, which is not supported"
    if find_lowering(target) is not None:
        return None
    if not isinstance(target, OpOverload):
        return "is one of torch's operators on whole graphs, or on shapes, that is not supported"
    if torch.Tag.dynamic_output_shape in target.tags:
        return "makes a tensor whose shape depends on values, which a compiled program cannot have"
    if torch.Tag.data_dependent_output in target.tags:
        return "takes a value out of a tensor (as .item(), int() or an `if` do) while the model is compiled"
    return _NO_LOWERING


def _tensors_around(node: torch.fx.Node) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for neighbour in (node, *node.all_input_nodes):
        values = neighbour.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
    return tensors


def _public_name(name: str) -> str:
    """Turns "aten.add.Tensor" into "aten::add.Tensor"."""
    namespace, dot, operation = name.partition(".")
    return f"{namespace}::{operation}" if dot else name


# Indices out of range while a model runs. A compiled program cannot raise: it passes the least and the
# greatest index of each operation to the host, which keeps those out of range until `take` is called.

# Operations that take (tensor, indices of rows), (tensor, dimension, indices), and (tensor, indices by
# dimension), where indices may count from the end.
_OF_ROWS = frozenset(("embedding", "_embedding_bag", "_embedding_bag_forward_only"))
_ALONG_DIMENSION = frozenset(
    (
        "gather",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    )
)
_BY_LIST = frozenset(("index", "index_put", "_unsafe_index", "_unsafe_index_put"))

_current_checks: contextvars.ContextVar[IndexChecks | None] = contextvars.ContextVar(
    "index_checks", default=None
)


class IndexChecks:
    """The indices out of range of a model's runs."""

    def __init__(self) -> None:
        """Starts with none."""
        self._errors: dict[str, None] = {}  # texts, in the order in which they came

    def made(self) -> contextlib.AbstractContextManager[None]:
        """Makes operations that are traced in the `with` block check their indices."""
        return bound(_current_checks, self)

    def take(self) -> str | None:
        """Waits for all checks. Returns the text of the first error since the last call, or None."""
        jax.effects_barrier()
        errors, self._errors = self._errors, {}
        return next(iter(errors), None)

    def note(self, operation: str, size: int, lowest: int, least: Any, greatest: Any) -> None:
        """Notes an index if it is out of range."""
        has = f"indices from {lowest} to {size - 1}" if size else "no elements"
        for index in (int(least), int(greatest)):
            if not lowest <= index < size:
                text = f"An index is out of range in {operation}: {index}, where the tensor has {has}."
                self._errors[text] = None


def check_node(node: torch.fx.Node, args: Sequence[Any]) -> None:
    """Makes an operation's indices be checked when it runs, if checks are on."""
    checks = _current_checks.get()
    if checks is None:
        return
    name = str(node.target._schema.name).split("::")[-1]  # type: ignore[union-attr]  # noqa: SLF001
    for size, lowest, index in _find_indices(name, args):
        if index.size and jnp.issubdtype(index.dtype, jnp.integer):
            note = functools.partial(checks.note, f"{name} in {describe_place(node)} ", size, lowest)
            jax.debug.callback(note, jnp.min(index), jnp.max(index))


def _find_indices(name: str, args: Sequence[Any]) -> Iterator[tuple[int, int, jax.Array]]:
    """Yields a dimension's size, its lowest valid index, and the indices into it."""
    if name == "_linear_cross_entropy_batch_chunked":
        _x, weight, target, _bias, _weight, _reduction, ignored = args[:7]
        yield weight.shape[0], 0, jnp.where(target == ignored, 0, target)
    elif name in _OF_ROWS:
        yield args[0].shape[0], 0, args[1]
    elif name in _ALONG_DIMENSION:
        yield (args[0].shape[args[1]] if args[0].ndim else 1), 0, args[2]
    elif name in _BY_LIST:
        axis = 0
        for index in args[1]:
            if index is not None and index.dtype != jnp.bool_:
                yield args[0].shape[axis], -args[0].shape[axis], index
            axis += index.ndim if index is not None and index.dtype == jnp.bool_ else 1


# Counts of what operations become in JAX.


def count_lowered(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, Work]:
    """Traces the forwards of operations one by one, equal ones only once."""
    work_by_signature: dict[Any, Work] = {}
    work_by_node = {}
    for node in nodes:
        key = _node_signature(node)
        if key not in work_by_signature:
            work_by_signature[key] = _count_node(node)
        work_by_node[node] = work_by_signature[key]
    return work_by_node


def _count_node(node: torch.fx.Node) -> Work:
    inputs = [source for source in node.all_input_nodes if source.op != "get_attr"]

    def run(values: list[Any]) -> Any:
        return run_node(node, dict(zip(inputs, values, strict=True)).__getitem__)

    return count_work(run, [_map_tensors(source.meta.get("val"), _shape_of_tensor) for source in inputs])


def _node_signature(node: torch.fx.Node) -> Any:
    """Returns a key that is equal for operations that become the same. Inner graphs are never equal."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            is_graph = value.op == "get_attr"
            return value if is_graph else repr(_map_tensors(value.meta.get("val"), _shape_of_tensor))
        return repr(value)

    used_results = {str(user.args[1:]) for user in node.users if user.target is operator.getitem}
    arguments = torch.fx.node.map_aggregate(
        (node.args, tuple(node.kwargs.items())), lambda value: describe(value)
    )
    return node.target, str(arguments), frozenset(used_results)


def _shape_of_tensor(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))


def _map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies a function to the tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map_tensors(part, function) for part in value)
    return value
