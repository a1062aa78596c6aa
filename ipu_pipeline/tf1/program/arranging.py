"""Arranges the replicas of a pipeline or loop, and their IPUs, on the devices that there are.

Each IPU has a device of its own, unless the environment lets the job have fewer than it asks for, because
it goes on without a machine. If there are too few for all replicas, these take turns. If there are too few
for one replica, neighbouring IPUs share a device, such that the most that a device does is as little as
possible.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.engine.fronts import divide_work
from ipu_pipeline.ground.warned import warn_once
from ipu_pipeline.processes.launched import may_have_fewer_ipus
from ipu_pipeline.tf1.program.calls import Call

__all__ = ["Arrangement", "arrange"]


@dataclass(frozen=True)
class Arrangement:
    """Where replicas run.

    Attributes:
      num_replicas: how many there are.
      num_turns: in how many turns they run; see `PipelineOptions`.
      devices: the devices of all replicas that run in the same turn, one replica after the other.
      num_each: how many of these devices each replica has.
    """

    num_replicas: int
    num_turns: int
    devices: Sequence[Any]
    num_each: int

    def of_replica(self, replica: int) -> Sequence[Any]:
        """The devices of a replica."""
        start = replica % (self.num_replicas // self.num_turns) * self.num_each
        return self.devices[start : start + self.num_each]

    def tell(self, name: str) -> None:
        """Warns, once for each name of a pipeline, if there are fewer devices than it asks for."""
        if self.num_turns > 1:
            warn_once(
                f"turns of {name}",
                f"There are devices for {self.num_replicas // self.num_turns} of the {self.num_replicas} "
                f"replicas of {name!r}, so that they take {self.num_turns} turns in each step.",
            )
        num_different = len({*self.of_replica(0)})
        if num_different < self.num_each:
            warn_once(
                f"shared devices of {name}",
                f"There are {num_different} devices for a replica of {name!r}, which has {self.num_each}: "
                "its IPUs share them.",
            )


def arrange(call: Call, devices: Sequence[Any], num_replicas: int) -> Arrangement:
    """Arranges a pipeline or loop.

    Args:
      call: the pipeline or loop.
      devices: the selected ones.
      num_replicas: how many replicas there are.

    Raises:
      ValueError: there are too few devices.
    """
    replication, size = call.replication, call.num_ipus
    if not may_have_fewer_ipus() or replication.count_needed(num_replicas) <= len(devices):
        return Arrangement(num_replicas, 1, replication.choose_devices(devices, num_replicas), size)
    if size <= len(devices):
        divisors = [turns for turns in range(1, num_replicas + 1) if num_replicas % turns == 0]
        num_turns = next(n for n in divisors if replication.count_needed(num_replicas // n) <= len(devices))
        chosen = replication.choose_devices(devices, num_replicas // num_turns)
        return Arrangement(num_replicas, num_turns, chosen, size)
    each = call.runner.options.num_devices_per_ipu
    num_groups = len(devices) // each
    if num_groups == 0:
        raise ValueError(
            f"{call.name!r} computes each stage on {each} devices together, and there are {len(devices)}."
        )
    firsts = divide_work(call.work_by_ipu, num_groups)
    groups = [bisect.bisect_right(firsts, ipu) - 1 for ipu in range(call.runner.num_ipus)]
    shared = [device for group in groups for device in devices[group * each :][:each]]
    return Arrangement(num_replicas, num_replicas, shared, size)
