"""Where the replicas of a pipeline run: processes, and the links between their devices. No JAX.

A link takes its latency, and then the bytes over its bandwidth. Each device has its own links, so devices
do not delay each other's transfers.

Replicas average their gradients once per weight update: a stage's gradients go around a ring of R devices,
one per replica. A reduce-scatter and an all-gather take R-1 rounds each, and in a round each device
sends an R-th of the bytes to the next one. So each takes (R-1) (latency + bytes / R / bandwidth) of the
slowest link, and together they are an all-reduce: 2 (R-1) / R of the bytes, which is the least possible
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Where
each replica keeps an R-th of the optimizer's state, the update comes between the two, and each does an R-th
of it (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.ground.checks import is_int, is_real

__all__ = ["Cluster", "LinkSpeed"]


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a link.

    Example:
      >>> engine.LinkSpeed(latency=1e-6, bandwidth=1e9).time(1_000_000)
      0.001001

    Attributes:
      latency: the time until the first byte arrives, in the unit of the costs.
      bandwidth: bytes per unit of time.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name, value in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if not is_real(value):
                raise TypeError(f"LinkSpeed: {name} must be a number; got {value!r}.")
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise ValueError(f"LinkSpeed: latency must be finite and at least 0; got {self.latency!r}.")
        if not self.bandwidth > 0:
            raise ValueError(
                f"LinkSpeed: bandwidth must be greater than 0 (infinite: only the latency counts); got "
                f"{self.bandwidth!r}."
            )

    def time(self, num_bytes: float) -> float:
        """Returns the time to send `num_bytes`; 0 for no bytes."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True)
class Cluster:
    """The replicas of a pipeline, their processes and links. `Cluster.of` spreads the devices evenly.

    Example:
      >>> cluster = engine.Cluster.of(num_replicas=2, num_ipus=4, num_processes=2)
      >>> cluster.num_processes
      2

    Attributes:
      num_replicas: copies of the pipeline, each with its own devices and micro-batches.
      processes: the process that starts each device's programs, from 0. The devices of replica 0 come
        first, by device, then those of replica 1, and so on. Empty: one process has all.
      within: the links between devices of one process.
      between: the links between devices of different processes.
      shards_optimizer_state: whether each replica keeps and updates its share of the optimizer's state.
    """

    num_replicas: int = 1
    processes: tuple[int, ...] = ()
    within: LinkSpeed = LinkSpeed()
    between: LinkSpeed = LinkSpeed()
    shards_optimizer_state: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        _check_count("num_replicas", self.num_replicas)
        object.__setattr__(self, "processes", tuple(self.processes))
        for process in self.processes:
            if not is_int(process, 0):
                raise ValueError(
                    f"Cluster: processes must be integers from 0, one per device; got {process!r}."
                )
        found = set(self.processes)
        if found and max(found) >= len(found):
            missing = min(set(range(max(found))) - found)
            raise ValueError(
                f"Cluster: processes must be counted from 0 without a gap; process {missing} has no device."
            )
        if self.shards_optimizer_state and self.num_replicas == 1:
            raise ValueError(
                "Cluster: shards_optimizer_state needs several replicas to share the state; num_replicas "
                "is 1. Leave it out."
            )

    @classmethod
    def of(
        cls,
        num_replicas: int,
        num_ipus: int,
        num_processes: int = 1,
        *,
        within: LinkSpeed | None = None,
        between: LinkSpeed | None = None,
        shards_optimizer_state: bool = False,
    ) -> Cluster:
        """Makes a cluster whose processes have equally many devices, one after another.

        Args:
          num_replicas: copies of the pipeline.
          num_ipus: the number of devices of each replica.
          num_processes: the number of processes; it divides the number of all devices.
          within: see the fields.
          between: see the fields.
          shards_optimizer_state: see the fields.

        Raises:
          ValueError: the devices cannot be spread evenly, or a number is less than 1.
        """
        for name, value in (
            ("num_replicas", num_replicas),
            ("num_ipus", num_ipus),
            ("num_processes", num_processes),
        ):
            _check_count(name, value)
        number = num_replicas * num_ipus
        if number % num_processes:
            raise ValueError(
                f"Cluster: num_processes must divide the number of devices, {number}; got {num_processes}."
            )
        size = number // num_processes
        processes = tuple(device // size for device in range(number)) if num_processes > 1 else ()
        speeds = {"within": within or LinkSpeed(), "between": between or LinkSpeed()}
        return cls(num_replicas, processes, **speeds, shards_optimizer_state=shards_optimizer_state)

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return max(self.processes, default=0) + 1

    def process_of(self, device: int) -> int:
        """The process of a device, by its number."""
        return self.processes[device] if self.processes else 0

    def speed_between(self, devices: set[int]) -> LinkSpeed:
        """The slowest link between any of these devices."""
        return self.within if len({self.process_of(device) for device in devices}) == 1 else self.between

    def half_ring(self, devices: set[int], num_bytes: float) -> float:
        """The time of a reduce-scatter or an all-gather among these devices, one of each replica."""
        number = len(devices)
        return (number - 1) * self.speed_between(devices).time(num_bytes / number)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_dict`; an infinite bandwidth is None."""

        def describe(speed: LinkSpeed) -> dict[str, float | None]:
            bandwidth = speed.bandwidth if math.isfinite(speed.bandwidth) else None
            return {"latency": speed.latency, "bandwidth": bandwidth}

        return {
            "num_replicas": self.num_replicas,
            "processes": list(self.processes),
            "within": describe(self.within),
            "between": describe(self.between),
            "shards_optimizer_state": self.shards_optimizer_state,
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Cluster:
        """Makes a cluster from a result of `as_dict`; missing entries get their defaults."""
        entries = dict(entries)
        for name in ("within", "between"):
            speed = dict(entries.pop(name, {}))
            if speed.get("bandwidth") is None:
                speed["bandwidth"] = math.inf
            entries[name] = LinkSpeed(**speed)
        return cls(**{**entries, "processes": tuple(entries.get("processes", ()))})


def _check_count(name: str, value: Any) -> None:
    if not is_int(value, 1):
        raise ValueError(f"Cluster: {name} must be an integer of at least 1; got {value!r}.")
