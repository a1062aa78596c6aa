"""Turns the graph of a model into JSON and back: its nodes one after another.

Reading only makes nodes: nothing is run or imported, the graph does not become Python code, and a node can
only call operations that this library computes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs.capture import WRITES, FunctionalProgram
from ipu_pipeline.poptorch.graphs.partitions import is_check_operation
from ipu_pipeline.poptorch.lowering.interpreter import CONTROL_FLOW, describe_place
from ipu_pipeline.poptorch.lowering.registry import find_lowering, full_name

_PLAIN = (type(None), bool, int, float, str)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_OPERATION = re.compile(r"(\w+)::(\w+)\.(\w+)", re.ASCII)
_OPERATORS: dict[str, Any] = {
    "getitem": operator.getitem,
    **{operation.name(): operation for operation in CONTROL_FLOW},
}
_NAMES = {operation: name for name, operation in _OPERATORS.items()}
_INPUTS = {name: InputKind[name] for name in ("USER_INPUT", "PARAMETER", "BUFFER", "CONSTANT_TENSOR")}
_OUTPUTS = {kind.name: kind for kind in (OutputKind.USER_OUTPUT, *WRITES, OutputKind.USER_INPUT_MUTATION)}


class _Interpreted(torch.fx.GraphModule):
    """A graph that is computed node by node: torch would turn the file's names into Python code."""

    def recompile(self) -> Any:
        """Makes no Python code."""

    def forward(self, *values: Any) -> Any:
        """Computes the graph, as an operand of torch's control flow."""
        return torch.fx.Interpreter(self).run(*values)


def encode_program(program: FunctionalProgram) -> Any:
    """Encodes a model's graph as JSON."""
    signature = program.graph_signature
    return {
        "inputs": [[spec.kind.name, spec.target] for spec in signature.input_specs],
        "outputs": [[spec.kind.name, spec.target] for spec in signature.output_specs],
        "nodes": list(map(_encode_node, program.graph.nodes)),
    }


def _encode_node(node: torch.fx.Node) -> dict[str, Any]:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    data: dict[str, Any] = {
        "op": node.op,
        "name": node.name,
        "modules": [[path, getattr(kind, "__name__", None) or str(kind)] for path, kind in stack],
        "trace": node.meta.get("stack_trace") or "",
    }
    target: Any = node.target
    if node.op == "get_attr":
        inner: Any = getattr(node.graph.owning_module, target)
        return {**data, "nodes": list(map(_encode_node, inner.graph.nodes))}
    if node.op == "call_function":
        data["target"] = _NAMES.get(target) or full_name(target)
        assert _find_operation(data["target"]) is target
    try:
        data["args"] = _encode(list(node.args))
        data["kwargs"] = {name: _encode(value) for name, value in node.kwargs.items()}
        data["value"] = _encode(node.meta.get("val"))
    except TypeError as error:
        raise Error(f"{describe_place(node)} {error}, which a file of a model cannot hold.") from error
    return data


def _encode(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, (list, tuple)):
        parts = [_encode(part) for part in value]
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"takes or makes a {type(value).__name__}")


def decode_program(data: Any) -> FunctionalProgram:
    """Decodes the graph that `encode_program` encoded."""
    module = _decode_graph(data["nodes"])
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    outputs: Any = module.graph.output_node().args[0]
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in (*inputs, *outputs)):
        raise ValueError("an input or an output of its graph is no tensor")
    signature = ExportGraphSignature(
        [
            InputSpec(_INPUTS[kind], TensorArgument(node.name), target, persistent=True)
            for node, (kind, target) in zip(inputs, data["inputs"], strict=True)
        ],
        [
            OutputSpec(_OUTPUTS[kind], TensorArgument(node.name), target)
            for node, (kind, target) in zip(outputs, data["outputs"], strict=True)
        ],
    )
    input_targets = {(spec.target, spec.kind) for spec in signature.input_specs}
    for spec in signature.output_specs:
        kind = {
            OutputKind.BUFFER_MUTATION: InputKind.BUFFER,
            OutputKind.PARAMETER_MUTATION: InputKind.PARAMETER,
        }.get(spec.kind)
        if kind is not None and (spec.target, kind) not in input_targets:
            raise ValueError(f"its graph changes {spec.target!r}, which is no {kind.name.lower()}")
    return FunctionalProgram(module, signature)


def _decode_graph(data: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    inner: dict[str, torch.fx.GraphModule] = {}
    if [entry["op"] for entry in data].index("output") != len(data) - 1:
        raise ValueError("its graph has nodes behind the output")
    for entry in data:
        op, name = entry["op"], entry["name"]
        if name in nodes or not name.isidentifier():
            raise ValueError(f"a node of its graph has the name {name!r}, which is another's or is none")
        target: Any = name
        args = tuple(_decode(value, nodes) for value in entry.get("args", ()))
        kwargs = {str(key): _decode(value, nodes) for key, value in entry.get("kwargs", {}).items()}
        if op == "get_attr":
            target = f"graph_{len(inner)}"
            inner[target] = _decode_graph(entry["nodes"])
        elif op == "call_function":
            target = _find_operation(entry["target"])
            _check_call(target, args, kwargs)
        elif op not in ("placeholder", "output"):
            raise ValueError(f"its graph has a node {name} of kind {op!r}")
        node = graph.create_node(op, target, args, kwargs, name)
        node.name = name  # torch may have replaced a character
        node.meta = {
            "val": _decode(entry.get("value"), None),
            "nn_module_stack": {
                str(n): (str(path), str(kind)) for n, (path, kind) in enumerate(entry["modules"])
            },
            "stack_trace": str(entry["trace"]),
        }
        nodes[name] = node
    return _Interpreted(inner, graph)


def _find_operation(name: str) -> Any:
    """Finds what a node calls: an operation with a lowering, and never anything else."""
    if name in _OPERATORS:
        return _OPERATORS[name]
    parts = _OPERATION.fullmatch(name)
    operation: Any = torch.ops
    for part in parts.groups() if parts else ():
        operation = getattr(operation, part, None)
    if operation is None:
        raise Error(
            f"The graph in the file calls {name}, which does not exist here. Define it with torch.library, "
            "and register its lowering, before loading the file."
        )
    if not isinstance(operation, OpOverload) or vars(operation)["_schema"].is_mutable:
        raise ValueError(f"its graph calls {name!r}, which is no operation that a graph may have")
    is_ours = operation.namespace == markers.NAMESPACE or is_check_operation(operation)
    if not is_ours and find_lowering(operation) is None:
        raise Error(
            f"The graph in the file calls {name}, which has no lowering here. Say how JAX computes it with "
            "poptorch.register_lowering, before loading the file."
        )
    return operation


def _check_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that an operation accepts these arguments."""
    if target is operator.getitem:
        is_right = len(args) == 2 and isinstance(args[0], torch.fx.Node) and type(args[1]) is int
    elif isinstance(target, OpOverload):
        arguments = vars(target)["_schema"].arguments
        names = [argument.name for argument in arguments if not argument.kwarg_only]
        argument_names = {*names[: len(args)], *kwargs}
        required_names = {argument.name for argument in arguments if not argument.has_default_value()}
        is_right = len(args) <= len(names) and required_names <= argument_names <= {
            argument.name for argument in arguments
        }
    else:
        is_right = not kwargs
    if not is_right:
        raise ValueError(f"its graph calls {target} with arguments that it does not have")


def _decode(data: Any, nodes: Mapping[str, torch.fx.Node] | None) -> Any:
    """Decodes an argument of a node, which may use earlier nodes; without nodes, a node's metadata."""
    if isinstance(data, list):
        return [_decode(part, nodes) for part in data]
    if not isinstance(data, dict):
        if type(data) is int and not -(2**63) <= data < 2**63:
            raise ValueError(f"its graph has the number {data}, which has more than 64 bits")
        return data
    ((kind, of),) = data.items()
    match kind:
        case "node" if nodes and of in nodes:
            return nodes[of]
        case "tuple":
            return tuple(_decode(part, nodes) for part in of)
        case "tensor" if nodes is None:
            dtype, shape = of
            return torch.empty(shape, dtype=_decode({"torch": dtype}, None), device="meta")
        case "torch" if isinstance(value := vars(torch).get(of), _OF_TORCH):
            return value
        case "device":
            return torch.device(of)
        case "complex":
            return complex(*of)
    raise ValueError(f"its graph has {data}, which stands for no value, or for a node that comes later")
