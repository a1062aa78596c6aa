"""Times the programs of a micro-batch and the transfers between stages, one at a time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ipu_pipeline.engine.devices.constants import Constants
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placing import copy_to
from ipu_pipeline.engine.execution.steps import Devices
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.costs import Costs, Edge

__all__ = ["TimedDevices", "make_costs"]


class TimedDevices(Devices):
    """The reading that runs programs one at a time, and times them. Times are in seconds.

    Attributes:
      programs: (kind, stage) -> what each run of the program has taken.
      transfers: edge -> what each transfer has taken.
    """

    def __init__(self, constants: Constants, groups: Sequence[DeviceGroup]) -> None:
        """Begins without times.

        Args:
          constants: as in `Devices`.
          groups: the group of each stage.
        """
        super().__init__(constants)
        self._groups = groups
        self._last: Template | None = None
        self.programs: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        self.transfers: dict[Edge, list[float]] = defaultdict(list)

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Runs a program."""
        results: Sequence[Any] = self._run(template, super().launch, template, arguments, chunk)
        return results

    def launch_jointly(
        self, template: Template, group: DeviceGroup, program: Any, arguments: Any, chunk: int
    ) -> Any:
        """Runs a program of all replicas."""
        return self._run(template, super().launch_jointly, template, group, program, arguments, chunk)

    def _run(self, template: Template, launch: Any, *arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        results = jax.block_until_ready(launch(*arguments))
        self.programs[template.kind, template.stage].append(time.perf_counter() - begin)
        self._last = template
        return results

    def copy_to(self, values: Sequence[Any], group: DeviceGroup, tag: Tag | None = None) -> list[Any]:
        """Copies arrays to another group, and waits for them."""
        jax.block_until_ready(values)
        begin = time.perf_counter()
        copies: list[Any] = jax.block_until_ready(copy_to(values, group, tag))
        taken = time.perf_counter() - begin
        if self._last is not None and (target := self._find_target(self._last, group)) is not None:
            self.transfers[self._last.stage, target].append(taken)
        return copies

    def _find_target(self, template: Template, group: DeviceGroup) -> int | None:
        """The nearest stage on a group that takes what a program sends there."""
        stage, last = template.stage, len(self._groups) - 1
        goes_back = template.kind is not ActionKind.FORWARD or stage == last
        way = range(stage - 1, -1, -1) if goes_back else range(stage + 1, last + 1)
        return next((other for other in way if self._groups[other] is group), None)


def make_costs(
    num_stages: int,
    programs: Mapping[tuple[ActionKind, int], Sequence[float]],
    transfers: Mapping[Edge, Sequence[float]],
    chunk_size: int,
) -> Costs:
    """Makes costs for a micro-batch from the times of chunks: their medians, without the first ones.

    Transfers that skip stages are left out: they are there before what goes through the stages, but for
    stages so short that their times are noise.

    Args:
      num_stages: the number of stages.
      programs: see `TimedDevices`.
      transfers: see `TimedDevices`.
      chunk_size: the micro-batches of a chunk.
    """

    def of(kind: ActionKind) -> list[float]:
        return [_median(programs.get((kind, stage), ())) / chunk_size for stage in range(num_stages)]

    inputs, weights = of(ActionKind.INPUT_GRADIENTS), of(ActionKind.WEIGHT_GRADIENTS)
    return Costs.of(
        num_stages,
        forward=of(ActionKind.FORWARD),
        backward=[one + other for one, other in zip(inputs, weights, strict=True)],
        weight_gradients=weights,
        transfer={
            edge: _median(taken) / chunk_size
            for edge, taken in transfers.items()
            if abs(edge[0] - edge[1]) == 1
        },
    )


def _median(taken: Sequence[float]) -> float:
    return statistics.median(taken[1:] or taken) if taken else 0.0
