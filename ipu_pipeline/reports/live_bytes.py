"""What executors hold of micro-batches in flight, measured from their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.execution.executor import Executor
from ipu_pipeline.engine.execution.replicated import Replicated
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["LiveBytes"]


class LiveBytes:
    """Finds the peak of what each stage holds between forwards and backwards, in bytes.

    Attributes:
      by_replica: per replica and stage; 0 for a stage without a backward of its own, or of another process.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        """Begins to observe.

        Args:
          runner: whose buffers are looked at after each dispatch; what `Pipeline.prepare` returns.

        Raises:
          TypeError: it runs all stages as one program, on one device, and has no buffers between them.
        """
        if isinstance(runner, Replicated):
            columns = runner.columns
        elif isinstance(runner, Executor):
            columns = (runner,)
        else:
            raise TypeError(
                "LiveBytes observes pipelines whose stages are programs of their own; got a "
                f"{type(runner).__name__}."
            )
        self.by_replica = [_observe(column) for column in columns]

    @property
    def peaks(self) -> list[int]:
        """Per stage, of the replica that holds most."""
        return [max(peaks) for peaks in zip(*self.by_replica, strict=True)]


def _observe(executor: Executor) -> list[int]:
    """What will have the peaks of an executor's stages."""
    templates = executor.plan.templates
    num_stages = 1 + max(stage for _kind, stage in templates)
    peaks = [0] * num_stages
    running: list[set[int]] = [set() for _ in range(num_stages)]  # chunks in flight
    # A cotangent comes from the stage behind: it is sent, not held.
    sent = {
        slot for known in templates.values() for _row, _results, slots in known.transfers for slot in slots
    }
    held: dict[int, list[int]] = {}
    for (kind, stage), template in templates.items():
        if kind is ActionKind.BACKWARD:
            forward = {slot for _place, slot in templates[ActionKind.FORWARD, stage].loads}
            read = [slot for _place, slot in template.loads]
            held[stage] = [slot for slot in read if slot in forward or slot not in sent]

    def observe(template: Template, chunk: int, values: Sequence[Sequence[Any] | None]) -> None:
        own = running[template.stage]
        if template.kind is ActionKind.FORWARD:
            own.add(chunk)
        else:
            own.remove(chunk)
        for stage, slots in held.items():
            arrays = [_read(values, number, slot) for number in running[stage] for slot in slots]
            here = (array for array in arrays if array is not None and array.addressable_shards)
            unique = {id(array): array.nbytes for array in here}
            peaks[stage] = max(peaks[stage], sum(unique.values()))

    executor.observer = observe
    return peaks


def _read(values: Sequence[Sequence[Any] | None], chunk: int, slot: int) -> Any:
    slots = values[chunk]
    return None if slots is None else slots[slot]
