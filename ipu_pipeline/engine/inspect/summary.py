"""The cost of each stage of a pipeline or loop, as a table with at most 40 lines.

If all layers of all stages do not fit, each stage's layers share a line, and then equal stages do, too.
The table has more lines only if that many stages all differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect.estimates import Bubble
from ipu_pipeline.engine.inspect.facts import Layer, PipelineDetails, StageDetails
from ipu_pipeline.engine.inspect.layers import find_layers, select_layers
from ipu_pipeline.ground.pytrees import num_bytes
from ipu_pipeline.ground.tables import align, describe_bytes, describe_flop, printable, shorten

_MAX_LINES = 40
_MAX_LAYERS = 6  # lines per stage
_MAX_NAME = 36  # characters
_MAX_SHARED = 4  # lines
_HEADINGS = (
    *("stage", "device", "layers", "parameters", "size", "sends"),
    *("returns", "holds", "in flight", "keeps", "forward", "backward"),
)
_NUMBERS = range(3, len(_HEADINGS))


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineSummary(PipelineDetails):
    """The cost of each stage of a pipeline or loop; `str` formats it as a table of about 40 lines at most.

    Layers are variable scopes; equal ones share a line, such as `block_{3..8}`, as do equal stages of a
    long pipeline. A variable of several stages is listed with the first, and below the table. Per
    micro-batch, a stage sends values to other devices, returns gradients to them, and holds values from its
    forward to its backward, fewer with recomputation; "keeps" is this size times the micro-batches in
    flight. Operations are counted from the equations, ten per element except for matrix products and
    convolutions: use them to compare stages, not as times. The bubble is the share of a step in which
    devices wait for each other, simulated with these operations, without transfers and the host's time.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> print(engine.inspect.summarize(pipeline))
      Pipeline: 2 stages on 2 devices, schedule grouped, 2 micro-batches per execution, no training
        46 parameters, 184 B
        stage  device  layers   parameters   size  sends   forward
        0      0       dense            36  144 B   32 B  248 flop
        1      1       dense_1          10   40 B          92 flop
      per micro-batch: sends to other devices
      forward: estimated operations
      bubble: 42.2% of a step, estimated from these operations (33.3% if all actions took equally long)
      busiest device: 0, with 73% of all operations
      dispatch: one micro-batch per program: ...

    Attributes:
      schedule: the schedule's name, in words if it is a user's function; empty for loops.
      bubble: the estimated bubble; None if everything is on one device, or the number of micro-batches is
        not known.
    """

    bubble: Bubble | None

    def __str__(self) -> str:
        """Formats the table."""
        ending = [*self._describe_shared(), *self._describe_rest()]
        rows = _describe_stages(self.stages, _MAX_LINES - len(ending) - 3)
        columns = [
            number
            for number in range(len(_HEADINGS))
            if number in (0, 1, 2, 3, 4) or any(row[number] for row in rows)
        ]
        headings = [self.device_word if text == "device" else text for text in _HEADINGS]
        table = [[row[number] for number in columns] for row in (headings, *rows)]
        numbers = [place for place, number in enumerate(columns) if number in _NUMBERS]
        return "\n".join([self.describe_run(), self.describe_total(), *align(table, numbers), *ending])

    def describe_run(self) -> str:
        """Describes stages, devices, the schedule, and the number of micro-batches."""
        stages = _count_text(len(self.stages), "stage" if self.unit == "micro-batch" else "part")
        where = _count_text(self.num_ipus, self.device_word)
        if self.num_devices_per_ipu > 1:
            where = (
                f"{_count_text(self.num_ipus, 'group')} of {self.num_devices_per_ipu} {self.device_word}s"
            )
        parts = [f"{stages} on {where}"]
        if self.schedule:
            parts.append(f"schedule {self.schedule}")
        if self.unit != "micro-batch":
            parts.append(
                f"a weight update every {_count_text(self.num_micro_batches or 1, self.unit)}"
                if self.trains
                else "no training"
            )
        else:
            count = self.num_micro_batches
            number = "as many micro-batches as a run says"
            if count is not None:
                number = _count_text(count * self.num_serialized, self.unit)
            parts.append(f"{number} per {'weight update' if self.trains else 'execution, no training'}")
            if self.num_serialized > 1:
                parts.append(f"{self.num_serialized} at a time")
            if self.chunk_size > 1:
                parts.append(f"{self.chunk_size} per program")
        return f"{printable(self.name)}: {', '.join(parts)}"

    def describe_total(self) -> str:
        """Describes the number of parameters and their size."""
        total, trained = self.num_parameters, self.num_trained
        text = f"  {_count_text(total, 'parameter')}, {describe_bytes(self.num_parameter_bytes)}"
        if not self.trains:
            return text
        return f"{text}, {'all' if trained == total else f'{trained:,}'} trained"

    def _describe_shared(self) -> list[str]:
        lines = []
        for shared in self.shared[:_MAX_SHARED]:
            size = describe_bytes(num_bytes(shared.variables))
            names = _short_name(shared.variables[0].name, 60)
            if len(shared.variables) > 1:
                names = _name_layers(find_layers(shared.variables), 60)
                size = f"{len(shared.variables)} variables, {size}"
            lines.append(f"shared: {names} ({size}) by stages {describe_numbers(shared.stages)}")
        remaining = self.shared[_MAX_SHARED:]
        if remaining:
            text = _count_text(sum(len(shared.variables) for shared in remaining), "other variable")
            lines.append(f"shared: {text} by other stages")
        return lines

    def _describe_rest(self) -> list[str]:
        lines = []
        levels = [stage.level for stage in self.stages]
        parallel = [
            describe_numbers([stage.index for stage in self.stages if stage.level == level])
            for level in dict.fromkeys(levels)
            if levels.count(level) > 1
        ]
        if parallel:
            lines.append(f"parallel: stages {'; '.join(parallel)}")
        moved = [
            (f"sends to other {self.device_word}s", any(stage.num_sent_bytes for stage in self.stages)),
            ("returns gradients to them", any(stage.num_returned_bytes for stage in self.stages)),
            ("holds values until its backward", any(stage.num_held_bytes for stage in self.stages)),
        ]
        if any(is_there for _text, is_there in moved):
            text = ", ".join(text for text, is_there in moved if is_there)
            lines.append(f"per {self.unit}: {text}")
        explained = []
        if moved[-1][1]:
            most = "" if self.num_micro_batches is not None else " at most"
            explained.append(f"keeps: values held for all {_plural(self.unit)} in flight{most}")
        explained += self.explain_work()
        lines += ["; ".join(explained)] if explained else []
        lines += self.describe_waiting()
        if self.cuts:
            lines.append(self.cuts)
        if self.dispatch:
            lines.append(f"dispatch: {self.dispatch}")
        return lines

    def explain_work(self) -> list[str]:
        """Explains the operations of stages, in parts of a line."""
        if any(stage.num_backward_flop for stage in self.stages):
            last = self.stages[-1]
            work = "input gradients" if last.is_halved else "both"
            ending = f"the last stage does {work} in its forward"
            return ["forward, backward: estimated operations", *[ending] * last.is_fused]
        has_work = any(stage.num_flop for stage in self.stages)
        return ["forward: estimated operations"] * has_work

    def describe_waiting(self) -> list[str]:
        """Describes the bubble in lines, and operations that are not counted."""
        lines = []
        uncounted = sorted(frozenset[str]().union(*(stage.uncounted for stage in self.stages)))
        if uncounted:
            lines.append(f"operations of {shorten(printable(', '.join(uncounted)), 80)} are not counted")
        lines.append(f"bubble: {self._describe_bubble()}")
        if self.bubble is not None and self.bubble.longest_share is not None:
            share = f"{self.bubble.longest_share:.0%} of all operations"
            lines.append(f"busiest {self.device_word}: {self.bubble.longest_ipu}, with {share}")
        return lines

    def _describe_bubble(self) -> str:
        bubble = self.bubble
        if self.num_ipus == 1:
            return f"none, as everything is on one {self.device_word}"
        if bubble is None:
            return "it depends on the number of micro-batches"
        if bubble.share is None:
            return f"{bubble.lock_step_share:.1%} of a step's time-steps"
        equal = f"{bubble.lock_step_share:.1%} if all actions took equally long"
        return f"{bubble.share:.1%} of a step, estimated from these operations ({equal})"


def _describe_stages(stages: Sequence[StageDetails], limit: int) -> list[tuple[str, ...]]:
    """The rows of the table, at most `limit` if possible."""
    for num_layers in range(_MAX_LAYERS, 0, -1):
        rows = [row for stage in stages for row in _describe_run([stage], num_layers)]
        if len(rows) <= limit:
            return rows
    runs: list[list[StageDetails]] = []
    for stage in stages:
        if runs and _common_cells(runs[-1][-1]) == _common_cells(stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return [row for run in runs for row in _describe_run(run, 1)]


def _common_cells(stage: StageDetails) -> tuple[str, ...]:
    """The cells that stages that share a row have in common."""
    return (*_cells_of_size(stage.num_parameters, stage.num_parameter_bytes), *_cells_of_work(stage))


def _describe_run(stages: Sequence[StageDetails], num_layers: int) -> list[tuple[str, ...]]:
    """The rows of stages that look the same and are shown as one."""
    first, last = stages[0], stages[-1]
    number = str(first.index) if first is last else f"{first.index}..{last.index}"
    ipus = describe_numbers(list(dict.fromkeys(stage.ipu for stage in stages)))
    layers = first.layers if first is last else find_layers(v for stage in stages for v in stage.variables)
    selected = select_layers(layers, num_layers)
    if len(selected) > num_layers or len(selected) == 1:
        selected = []
    name = _name_layers(layers, _MAX_NAME) if not selected else f"{len(selected)} layers:"
    held_cells: list[str] = ["", "", ""]
    if any(stage.num_held_bytes for stage in stages):
        in_flight = _join_ends(str(first.in_flight), str(last.in_flight))
        live = _join_ends(describe_bytes(first.num_live_bytes), describe_bytes(last.num_live_bytes))
        held_cells = [describe_bytes(first.num_held_bytes), in_flight, live]
    sent, returned, _holds, forward, backward = _cells_of_work(first)
    times = "" if first is last else f"{len(stages)} x "
    parameters, size = _cells_of_size(first.num_parameters, first.num_parameter_bytes)
    work = [sent, returned, *held_cells, forward, backward]
    rows: list[tuple[str, ...]] = [(number, ipus, name, times + parameters, size, *work)]
    for layer in selected:
        layer_name = f"  {_short_name(layer.name, _MAX_NAME - 2)}"
        cells = _cells_of_size(layer.num_parameters, layer.num_bytes)
        rows.append(("", "", layer_name, *cells, *[""] * len(work)))
    return rows


def _join_ends(first: str, last: str) -> str:
    return first if first == last else f"{first}..{last}"


def _cells_of_size(num_parameters: int, size: int) -> tuple[str, str]:
    return f"{num_parameters:,}", describe_bytes(size)


def _cells_of_work(stage: StageDetails) -> tuple[str, str, str, str, str]:
    sent, returned, holds = (
        describe_bytes(number) if number else ""
        for number in (stage.num_sent_bytes, stage.num_returned_bytes, stage.num_held_bytes)
    )
    forward, backward = (
        describe_flop(number) if number else ""
        for number in (stage.num_forward_flop, stage.num_backward_flop)
    )
    return sent, returned, holds, forward, backward


def _name_layers(layers: Sequence[Layer], width: int) -> str:
    """The names of layers, with their common beginning once; a single layer in more detail."""
    names = [layer.name for layer in select_layers(layers, 1)]
    ends = [place + 1 for place, character in enumerate(min(names, default="")) if character in "/."]
    begins = [names[0][:end] for end in reversed(ends) if all(n[:end] == names[0][:end] for n in names)]
    common = begins[0] if begins else ""
    if len(names) > 1 and common:
        names = [f"{common}({', '.join(name[len(common) :] for name in names)})"]
    return _short_name(", ".join(names), width) or "none"


def _short_name(name: str, width: int) -> str:
    return shorten(printable(name), width)


def describe_numbers(numbers: Sequence[int]) -> str:
    """Describes ascending numbers, with consecutive ones as a range: `0, 2..5`.

    Example:
      >>> engine.inspect.describe_numbers([0, 2, 3, 4, 5])
      '0, 2..5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return ", ".join(parts)


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"
