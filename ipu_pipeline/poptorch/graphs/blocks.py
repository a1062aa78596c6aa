"""A graph cut at the markers of its blocks: which operations make which stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ipu_pipeline.poptorch import markers

__all__ = ["BlockId", "Section", "cut_into_sections", "is_check", "is_check_operation"]

# Checks of torch's that hold for a graph of fixed shapes and dtypes.
_CHECKS = frozenset(("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range"))


class BlockId(NamedTuple):
    """What a model says of a block: its name and its IPU, if it says them."""

    user_id: str | None
    ipu_id: int | None


@dataclass(frozen=True, eq=False)
class Section:
    """Operations that make a stage.

    Attributes:
      name: of its blocks, for errors.
      ipu: its IPU.
      nodes: in the graph's order.
    """

    name: str
    ipu: int
    nodes: tuple[torch.fx.Node, ...]


def cut_into_sections(
    graph: torch.fx.Graph, find_ipus: Callable[[Sequence[BlockId]], Sequence[int]]
) -> list[Section]:
    """Cuts a graph. Blocks on the same IPU that follow each other become one section.

    Operations after a block belong to it. Those before the first block are on IPU 0.

    Args:
      graph: functional, with markers.
      find_ipus: gives the IPU of each block, in the order in which the model opens them.

    Returns:
      The sections, at least one.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_check(node)]
    begins = [node for node in nodes if markers.is_block(node)]
    blocks = [BlockId(*node.args) for node in begins]
    ipus = dict(zip(begins, find_ipus(blocks), strict=True)) if blocks else {}
    parts: list[tuple[int, list[str], list[torch.fx.Node]]] = []  # IPU, blocks and operations
    ipu, name = 0, ""
    for node in nodes:
        if node in ipus:
            ipu, name = ipus[node], _name(BlockId(*node.args))
            continue  # a block without operations is nobody's work
        if not parts or parts[-1][0] != ipu:
            parts.append((ipu, [], []))
        names, inside = parts[-1][1:]
        inside.append(node)
        if name and name not in names:
            names.append(name)
    if not parts:
        return [Section("the model", min(ipus.values(), default=0), ())]
    return [
        Section(", ".join(names) or "what is before the first block", ipu, tuple(inside))
        for ipu, names, inside in parts
    ]


def is_check(node: torch.fx.Node) -> bool:
    """Whether a node is a check of torch's, which no stage makes."""
    return is_check_operation(node.target)


def is_check_operation(operation: Any) -> bool:
    """Whether a node that calls this is a check of torch's."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.name.split("::")[-1] in _CHECKS


def _name(block: BlockId) -> str:
    return f"block on IPU {block.ipu_id}" if block.user_id is None else f"block {block.user_id}"
