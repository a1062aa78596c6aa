"""The summary of a wrapped model, for people to read: `str` makes tables of 100 columns."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ipu_pipeline.engine.inspect import PipelineSummary, StageDetails, describe_numbers, fold_names
from ipu_pipeline.ground.pytrees import num_bytes
from ipu_pipeline.ground.tables import align, describe_bytes, describe_flop, printable, shorten
from ipu_pipeline.poptorch.graphs.modules import (
    LineUse,
    ModuleUse,
    find_lines,
    find_modules,
    find_spread,
    modules_of_nodes,
    name_parts,
)
from ipu_pipeline.poptorch.graphs.stages import ModelStages

_WIDTH = 100
_MAX_ROWS = 30  # for stages and their modules
_MAX_MODULES = 6  # rows of a stage
_MAX_OPERATIONS = 22  # characters


@dataclass(frozen=True)
class StageModules:
    """The blocks and modules of a stage.

    Attributes:
      blocks: the model's names of its blocks.
      modules: the modules in it.
    """

    blocks: str
    modules: tuple[ModuleUse, ...]


@dataclass(frozen=True)
class ModelSummary:
    """The facts about a wrapped model.

    Attributes:
      facts: what it is and how it is going to run, in lines.
      modules: the model's modules until it is compiled; then `stages` has them.
      pipeline: the engine's summary; None until it is compiled.
      stages: the stages' blocks and modules; empty until it is compiled.
      lines: the user's lines, if they were asked for.
    """

    facts: tuple[str, ...]
    modules: tuple[ModuleUse, ...] = ()
    pipeline: PipelineSummary | None = None
    stages: tuple[StageModules, ...] = ()
    lines: tuple[LineUse, ...] = ()

    def __str__(self) -> str:
        """Makes the tables."""
        if self.pipeline is None:
            return "\n".join([*_wrap(self.facts), *self._describe_modules()])
        before = [self.pipeline.describe_run(), *self.facts, self.pipeline.describe_total().strip()]
        after = ["; ".join(self.pipeline.explain_work()), *self.pipeline.describe_waiting()]
        lines = [*_wrap(before), *self._describe_stages(), *_wrap(["", *after])]
        if self.lines:
            lines += ["", *self._describe_lines()]
        return "\n".join(lines)

    def _describe_modules(self) -> list[str]:
        rows = [(str(m), f"{m.num_parameters:,}", describe_bytes(m.num_bytes)) for m in self.modules]
        return _fit([("modules", "parameters", "size"), *rows], 0, (1, 2))

    def _describe_stages(self) -> list[str]:
        assert self.pipeline is not None
        pairs = list(zip(self.pipeline.stages, self.stages, strict=True))
        is_long = _count_rows(self.stages) > _MAX_ROWS
        rows = [row for stage, parts in pairs for row in _rows_of(stage, parts, is_long)]
        headings = ("stage", "IPU", "modules", "parameters", "size", "forward", "backward")
        num_columns = len(headings) - (not any(row[-1] for row in rows))
        table = [row[:num_columns] for row in (headings, *rows)]
        return _fit(table, 2, range(3, num_columns))

    def _describe_lines(self) -> list[str]:
        rows = []
        for line in self.lines:
            names = [f"{number} {name}" if number > 1 else name for name, number in line.operations.items()]
            place = f"{os.path.basename(line.file)}:{line.line}" if line.file else "elsewhere"
            rows.append(
                (
                    shorten(printable(place), 28),
                    printable(line.text),
                    describe_numbers(line.stages),
                    shorten(", ".join(names), _MAX_OPERATIONS),
                    f"{line.num_primitives:,}",
                    describe_flop(line.num_flop) if line.num_flop else "",
                )
            )
        headings = ("line", "", "stages", "operations of torch", "of JAX", "forward")
        return _fit([headings, *rows], 1, (4, 5))


def summarize_stages(
    stages: ModelStages, pipeline: PipelineSummary, class_name: str, facts: Sequence[str], has_lines: bool
) -> ModelSummary:
    """Summarizes a compiled model."""
    operations = [modules_of_nodes(section.nodes) for section in stages.sections]
    spread = find_spread(operations)
    stage_modules: tuple[StageModules, ...] = ()
    for limit in range(_MAX_MODULES, 0, -1):
        stage_modules = tuple(
            StageModules(
                _name_blocks(section.name),
                find_modules(
                    stage_operations,
                    [(_own_name(v.name), v.shape, num_bytes([v])) for v in details.variables],
                    class_name,
                    spread,
                    limit,
                ),
            )
            for section, stage_operations, details in zip(
                stages.sections, operations, pipeline.stages, strict=True
            )
        )
        if _count_rows(stage_modules) <= _MAX_ROWS:
            break
    lines = find_lines([section.nodes for section in stages.sections]) if has_lines else ()
    pipeline = dataclasses.replace(pipeline, name=class_name, device_word="IPU")
    return ModelSummary(tuple(facts), pipeline=pipeline, stages=stage_modules, lines=lines)


def summarize_module(model: torch.nn.Module, facts: Sequence[str]) -> ModelSummary:
    """Summarizes a model before it is compiled. The arguments are as in `summarize_stages`."""
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    operations = []
    for path, module in model.named_modules():
        if next(module.children(), None) is not None:
            continue
        parts = path.split(".")
        above = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
        operations.append(([(name, classes[name]) for name in above], ""))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sizes = [(name, tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors]
    modules = find_modules(operations, sizes, type(model).__name__, limit=_MAX_MODULES)
    return ModelSummary(tuple(facts), modules=modules)


def _name_blocks(name: str) -> str:
    """Shortens a section's name: common parts of its blocks' names stand once, "blocks a, layer{0..2}"."""
    prefix = "block "
    names = [part.removeprefix(prefix) for part in name.split(", ") if part.startswith(prefix)]
    if len(names) < 2 or len(names) < len(name.split(", ")):
        return name
    return f"blocks {', '.join(text for text, _count, _first in fold_names(names, [None] * len(names)))}"


def _own_name(full_name: str) -> str:
    return full_name.partition("/")[2]


def _count_rows(stages: Sequence[StageModules]) -> int:
    return sum(1 if len(stage.modules) == 1 else 1 + len(stage.modules) for stage in stages)


def _rows_of(stage: StageDetails, parts: StageModules, is_long: bool) -> list[tuple[str, ...]]:
    """Makes the rows of a stage: itself, and its modules if there are several and the table is short."""
    work = tuple(describe_flop(n) if n else "" for n in (stage.num_forward_flop, stage.num_backward_flop))
    size = (f"{stage.num_parameters:,}", describe_bytes(stage.num_parameter_bytes))
    first = (str(stage.index), str(stage.ipu))
    if len(parts.modules) == 1:
        return [(*first, str(parts.modules[0]), *size, *work)]
    if is_long:
        return [(*first, name_parts(parts.modules), *size, *work)]
    rows = [(*first, f"{parts.blocks}:", *size, *work)]
    for module in parts.modules:
        sizes = (f"{module.num_parameters:,}", describe_bytes(module.num_bytes))
        rows.append(("", "", f"  {module}", *(sizes if module.num_parameters else ("", "")), "", ""))
    return rows


def _fit(rows: Sequence[Sequence[str]], column: int, numbers: Sequence[int]) -> list[str]:
    """Makes a table in which one column gets all the width that the others leave."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    room = max(8, _WIDTH - 2 * len(widths) - sum(widths) + widths[column])
    fitted = [[*row[:column], shorten(printable(row[column]), room), *row[column + 1 :]] for row in rows]
    return align(fitted, numbers)


def _wrap(lines: Sequence[str]) -> list[str]:
    """Wraps lines at the number of columns. All but the first are indented."""
    return [
        part
        for number, line in enumerate(lines)
        for part in textwrap.wrap(
            line,
            _WIDTH,
            initial_indent="  " if number else "",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    ]
