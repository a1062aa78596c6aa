"""Finds what cannot be computed in a graph before anything runs, and reports its place."""

from __future__ import annotations

import operator
import os
import re

import torch
from torch._ops import OpOverload

from ipu_pipeline.poptorch.dtypes import jax_dtype
from ipu_pipeline.poptorch.lowering.control_flow import CONTROL_FLOW
from ipu_pipeline.poptorch.lowering.registry import find_lowering

__all__ = ["describe_place", "describe_unsupported", "find_unsupported", "find_users_frames", "is_users"]

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<text>\S.*))?'
)
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(__file__)),
    "<",  # code without a file, such as what torch makes of a branch
)


def find_unsupported(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Finds nodes without a lowering, or with values that JAX does not have, in sub-graphs, too."""
    found = []
    for node in graph.nodes:
        if node.op == "get_attr":
            module = getattr(graph.owning_module, str(node.target), None)
            if isinstance(module, torch.fx.GraphModule):
                found.extend(find_unsupported(module.graph))
        elif node.op == "call_function" and _reason(node) is not None:
            found.append(node)
    return found


def describe_unsupported(nodes: list[torch.fx.Node]) -> str:
    """Returns the text of an error: each operation once, with the reason and all its places."""
    places: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        key = str(node.target), _reason(node) or "has no lowering for these arguments"
        found = places.setdefault(key, [])
        place = describe_place(node)
        if place not in found:
            found.append(place)
    lines = ["The model uses what cannot be computed:"]
    lines += [f"- {name} {reason}: in {'; in '.join(found)}." for (name, reason), found in places.items()]
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
    for meta in _tensors(node):
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


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in (node, *node.all_input_nodes):
        values = one.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, torch.Tensor):
                found.append(value)
    return found


def _public_name(name: str) -> str:
    """Turns "aten.add.Tensor" into "aten::add.Tensor"."""
    namespace, dot, rest = name.partition(".")
    return f"{namespace}::{rest}" if dot else name
