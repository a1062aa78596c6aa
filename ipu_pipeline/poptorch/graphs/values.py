"""The inner values of a model, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error

__all__ = ["find_values", "name_values"]


def name_values(
    graph: torch.fx.Graph, variables: Mapping[torch.fx.Node, str], has_module_names: bool
) -> dict[str, torch.fx.Node]:
    """Names the values that can be looked at.

    Parameters and buffers have torch's names, inputs their names in the graph. An operation's result is
    named after its module and the operation: "layers.0/relu", "layers.0/relu_1". The `NameScope`s around
    it come first: "scope/layers.0/relu".
    """
    names: dict[str, torch.fx.Node] = {}
    scopes: list[str] = []
    for node in graph.nodes:
        if scope := markers.read_scope(node):
            (opened,) = scope
            if opened is not None:
                scopes.append(opened)
            elif scopes:
                scopes.pop()
        if not isinstance(node.meta.get("val"), torch.Tensor) or markers.is_marker(node):
            continue
        name = base = _name(node, variables, has_module_names)
        if scopes and node.op == "call_function":
            name = base = "/".join([*scopes, base])
        number = 0
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names[name] = node
    return names


def _name(node: torch.fx.Node, variables: Mapping[torch.fx.Node, str], has_module_names: bool) -> str:
    if node.op != "call_function":
        return variables.get(node, node.name)
    schema = getattr(node.target, "_schema", None)
    name = node.name if schema is None else schema.name.split("::")[-1]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{stack[-1][0]}/{name}" if has_module_names and stack and stack[-1][0] else name


def find_values(names: Mapping[str, torch.fx.Node], wanted: Sequence[str]) -> list[torch.fx.Node]:
    """Finds values by name."""
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            raise Error(
                f"Options.anchorTensor names {name!r}, which is not a value of the model. Similar names "
                f"are {near}; getTensorNames() of the compiled model has all names."
            )
    return [names[name] for name in wanted]
