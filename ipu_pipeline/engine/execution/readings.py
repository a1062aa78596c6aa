"""What the values of a step are: a step is told once (`steps`), and read in several ways.

`Devices` runs it: values are arrays. `compiling.Shapes` compiles it: values are shapes.
`phase_memory.Ghosts` finds what it takes of the devices: values are numbers of bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.constants import Constants
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placing import copy_to, put
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.devices.underway import Underway
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.execution.watched import launch_of
from ipu_pipeline.engine.watching import Launch, Watcher

__all__ = ["Counting", "Devices", "Reading", "WatchedDevices", "store_slots"]


class Reading(Protocol):
    """What the parts of a step do with the values of a column."""

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """The results of a program, for a micro-batch or chunk."""

    def scalar(self, number: int, row: Row) -> Any:
        """An int32 scalar on a row."""

    def copy_to(self, arrays: Sequence[Any], row: Row, tag: Tag | None = None) -> list[Any]:
        """Values that lie together, on another row; see `placing.copy_to`."""

    def put(
        self,
        arrays: Sequence[Any],
        row: Row,
        offloaded: bool = False,
        tag: Tag | None = None,
        partitions: Sequence[PartitionSpec] | None = None,
    ) -> list[Any]:
        """Values on a row, or in host memory for it; see `placing.put`."""

    def underway(self, limit: int | None) -> Underway:
        """Counts pieces of work of which at most so many may be on their way."""


class Devices:
    """Values are arrays, and programs run."""

    def __init__(self, constants: Constants) -> None:
        """Takes what makes scalars."""
        self.scalar: Callable[[int, Row], Any] = constants.scalar
        self.copy_to: Callable[..., list[Any]] = copy_to
        self.put: Callable[..., list[Any]] = put

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts a program."""
        del chunk
        return template.function(*arguments)

    def underway(self, limit: int | None) -> Underway:
        """Counts pieces of work."""
        return Underway(limit)


@dataclass(frozen=True)
class Counting:
    """What micro-batches are called by whoever watches."""

    step: int  # the number of the step, of a loop that of the run
    first: int  # the number of the first micro-batch; of a loop the iteration
    size: int  # how many micro-batches a program handles


class WatchedDevices(Devices):
    """Likewise, with a watcher told."""

    def __init__(self, constants: Constants, watcher: Watcher, runner: Any, counting: Counting) -> None:
        """Begins a step."""
        super().__init__(constants)
        self._watcher, self._runner, self._counting = watcher, runner, counting
        self._launch: Launch | None = None
        self.copy_to = self._copy_to

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts a program."""
        self._launch = None
        if not template.row.is_here:
            return super().launch(template, arguments, chunk)
        self._launch = self.describe(template, chunk)
        results: Sequence[Any] = self._watcher.run(self._launch, template.function, arguments)
        return results

    def launch_jointly(self, template: Template, row: Row, program: Any, arguments: Any, chunk: int) -> Any:
        """Starts a program for all replicas at once, on their row."""
        self._launch = None
        launch = dataclasses.replace(self.describe(template, chunk), devices=row.first_devices)
        return self._watcher.run(launch, program, arguments)

    def describe(self, template: Template, chunk: int) -> Launch:
        """What the watcher is told of a program."""
        counting = self._counting
        first = counting.first + chunk * counting.size
        return launch_of(self._runner, template, counting.step, first, counting.size)

    def _copy_to(self, arrays: Sequence[Any], row: Row, tag: Tag | None = None) -> list[Any]:
        copies = copy_to(arrays, row, tag)
        if self._launch is not None:
            self._watcher.moved(self._launch, row.first_devices, copies)
        return copies


def store_slots(reading: Reading, slots: list[Any], of_rows: Mapping[Row, Sequence[int]]) -> list[Any]:
    """Moves values to host memory, and returns what they are there."""
    made = []
    for row, own in of_rows.items():
        stored = reading.put([slots[slot] for slot in own], row, offloaded=True)
        made += stored
        for slot, value in zip(own, stored, strict=True):
            slots[slot] = value
    return made
