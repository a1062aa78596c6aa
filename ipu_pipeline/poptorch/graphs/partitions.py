"""Cuts a graph at the markers of its blocks: into sections, which make stages, and into phases."""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error

# Sections.

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


# Phases.


def cut_into_phases(
    graph: torch.fx.Graph,
    place: Callable[[Sequence[BlockId]], Sequence[Placement]],
    needs_last_alone: bool = False,
) -> list[list[Section]]:
    """Cuts a graph. All blocks of a stage are one section, wherever the model opens them.

    Operations after a block belong to it. Operations before the first block belong to the first block.
    """
    nodes, blocks = find_blocks(graph)
    if not blocks:
        raise Error("No active Block, all the ops must belong to a Block. Open those that the phases name.")
    placed = dict(zip(blocks, place(list(blocks.values())), strict=True))
    where = next(iter(placed.values()))
    stage_of: dict[torch.fx.Node, Placement] = {}
    names: dict[int, list[str]] = {}
    for node in nodes:
        if node in placed:
            where, name = placed[node], blocks[node].name
            if name not in names.setdefault(where.stage, []):
                names[where.stage].append(name)
        else:
            stage_of[node] = where
    if not stage_of:
        return [[Section("the model", where.ipu, ())]]
    placements = {where.stage: where for where in stage_of.values()}
    sections = {
        stage: Section(", ".join(names[stage]), where.ipu, (), where.phase)
        for stage, where in placements.items()
    }
    reads = _find_reads(stage_of, sections)
    levels: list[list[Section]] = []
    for phase in sorted({section.phase for section in sections.values()}):
        stages = [stage for stage, section in sorted(sections.items()) if section.phase == phase]
        for generation in _find_generations(stages, reads, sections, phase):
            levels.append(_merge(generation, sections, stage_of))
    last = levels[-1]
    if len(last) > 1 or needs_last_alone:
        levels.append([Section("what the model returns", last[0].ipu, (), last[0].phase)])
    return _without_gaps(levels)


def _find_reads(
    stage_of: Mapping[torch.fx.Node, Placement], sections: Mapping[int, Section]
) -> dict[int, set[int]]:
    """Finds the stages whose values each stage reads."""
    reads: dict[int, set[int]] = {stage: set() for stage in sections}
    for node, where in stage_of.items():
        for operand in node.all_input_nodes:
            maker = stage_of.get(operand)
            if maker is None or maker.stage == where.stage:
                continue
            if maker.phase > where.phase:
                raise Error(
                    f"{_capitalized(sections[where.stage].name)}, in phase {where.phase}, reads what "
                    f"{sections[maker.stage].name} makes, in phase {maker.phase}, which comes later. Put "
                    "them into one phase, or in the opposite order."
                )
            reads[where.stage].add(maker.stage)
    return reads


def _find_generations(
    stages: Sequence[int],
    reads: Mapping[int, Iterable[int]],
    sections: Mapping[int, Section],
    phase: int,
) -> list[list[int]]:
    """Sorts the stages of a phase into groups that read only what earlier groups make."""
    phase_stages = set(stages)
    sorter = graphlib.TopologicalSorter(
        {stage: phase_stages.intersection(reads[stage]) for stage in stages}
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = ", ".join(sections[stage].name for stage in dict.fromkeys(error.args[1]))
        raise Error(
            f"In phase {phase} each of these stages reads what the next one makes, in a circle: {circle}. "
            "Make one stage of their blocks, or cut one of them into two."
        ) from None
    generations = []
    while sorter.is_active():
        ready = sorter.get_ready()
        generations.append(sorted(ready))
        sorter.done(*ready)
    return generations


def _merge(
    stages: Sequence[int],
    sections: Mapping[int, Section],
    stage_of: Mapping[torch.fx.Node, Placement],
) -> list[Section]:
    """Makes sections of independent stages. Stages on one IPU, which runs them in turn, are merged."""
    merged = []
    for ipu in dict.fromkeys(sections[stage].ipu for stage in stages):
        ipu_stages = [stage for stage in stages if sections[stage].ipu == ipu]
        merged.append(
            dataclasses.replace(
                sections[ipu_stages[0]],
                name=", ".join(sections[stage].name for stage in ipu_stages),
                nodes=tuple(node for node, where in stage_of.items() if where.stage in ipu_stages),
            )
        )
    return merged


def _without_gaps(levels: Sequence[Sequence[Section]]) -> list[list[Section]]:
    """Renumbers the phases without gaps, because a model may not open the blocks of a phase."""
    numbers = {phase: number for number, phase in enumerate(sorted({level[0].phase for level in levels}))}
    return [
        [dataclasses.replace(section, phase=numbers[section.phase]) for section in level]
        for level in levels
    ]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
