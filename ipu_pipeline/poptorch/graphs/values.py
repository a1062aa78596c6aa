"""The values within a model, by name."""

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
    """The values that can be looked at, by name.

    Parameters and buffers have torch's names, inputs those in the graph. What an operation computes is
    called by the module that it is in and the operation: "layers.0/relu", "layers.0/relu_1". Before that
    stand the `NameScope`s around it: "scope/layers.0/relu".
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
    """The values of some names.

    Raises:
      Error: there is none of a name.
    """
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            raise Error(
                f"Options.anchorTensor names {name!r}, which is no value of the model. Near are {near}; "
                "getTensorNames() of the compiled model has all."
            )
    return [names[name] for name in wanted]
