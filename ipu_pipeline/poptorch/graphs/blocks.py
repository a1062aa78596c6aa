"""Cuts a graph into stages at the markers of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ipu_pipeline.poptorch import markers

__all__ = [
    "BlockId",
    "Placement",
    "Section",
    "cut_into_sections",
    "find_blocks",
    "is_check",
    "is_check_operation",
]

# torch's checks that always hold for a graph of fixed shapes and dtypes.
_CHECKS = frozenset(("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range"))


class BlockId(NamedTuple):
    """A block's name and IPU, where the model sets them."""

    user_id: str | None
    ipu_id: int | None

    @property
    def name(self) -> str:
        """The name of the block, for errors."""
        return f"block on IPU {self.ipu_id}" if self.user_id is None else f"block {self.user_id}"


@dataclass(frozen=True)
class Placement:
    """The stage of a block, its IPU, and in phased executions its phase, all from 0."""

    stage: int
    ipu: int
    phase: int = 0


@dataclass(frozen=True, eq=False)
class Section:
    """Operations that make a stage."""

    name: str  # the names of its blocks, for errors
    ipu: int  # its IPU
    nodes: tuple[torch.fx.Node, ...]  # in the graph's order
    phase: int = 0  # the phase that it runs in, from 0; 0 without phases


def cut_into_sections(
    graph: torch.fx.Graph,
    place: Callable[[Sequence[BlockId]], Sequence[Placement]],
    has_several: bool = False,
) -> list[Section]:
    """Cuts a graph. Consecutive blocks on the same IPU become one section.

    Operations after a block belong to it. Operations before the first block are on IPU 0.
    """
    nodes, blocks = find_blocks(graph)
    placed = dict(zip(blocks, place(list(blocks.values())), strict=True)) if blocks else {}
    parts: list[tuple[Placement, list[str], list[torch.fx.Node]]] = []  # blocks and operations
    first = next(iter(placed.values()), None)
    where, name = Placement(-1, 0) if first is None or first.ipu else first, ""
    for node in nodes:
        if node in placed:
            where, name = placed[node], blocks[node].name
            continue  # no stage is needed for a block without operations
        if not parts or where.ipu != parts[-1][0].ipu or (has_several and where != parts[-1][0]):
            parts.append((where, [], []))
        names, inside = parts[-1][1:]
        inside.append(node)
        if name and name not in names:
            names.append(name)
    if not parts:
        return [Section("the model", min((where.ipu for where in placed.values()), default=0), ())]
    return [
        Section(", ".join(names) or "what is before the first block", where.ipu, tuple(inside))
        for where, names, inside in parts
    ]


def find_blocks(graph: torch.fx.Graph) -> tuple[list[torch.fx.Node], dict[torch.fx.Node, BlockId]]:
    """Returns the nodes that compute, with the markers, and the blocks by the markers that begin them."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_check(node)]
    return nodes, {node: BlockId(*node.args) for node in nodes if markers.is_block(node)}


def is_check(node: torch.fx.Node) -> bool:
    """Whether a node is one of torch's checks, which no stage runs."""
    return is_check_operation(node.target)


def is_check_operation(operation: Any) -> bool:
    """Whether a node that calls this operation is one of torch's checks."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.name.split("::")[-1] in _CHECKS
