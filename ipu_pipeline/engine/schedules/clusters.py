"""Clusters on which a pipeline runs: links, replicas, and execution phases that go through host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.schedules.timetables import UPDATE, ActionKind
from ipu_pipeline.ground.checks import is_int, is_real, require

# Replicas, processes and links.
#
# Each device has its own links, so devices do not delay each other's transfers. Replicas average
# gradients once per weight update, around a ring of R devices: a reduce-scatter and an all-gather, each
# of which takes (R-1) (latency + bytes / R / bandwidth) of the slowest link, the least possible
# (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
# Where replicas share the optimizer's state, the update comes between the two (Rajbhandari et al., "ZeRO:
# Memory Optimizations Toward Training Trillion Parameter Models", 2020).


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
            require(is_real(value), f"LinkSpeed: {name} must be a number", value, TypeError)
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise ValueError(f"LinkSpeed: latency must be finite and at least 0; got {self.latency!r}.")
        rule = "LinkSpeed: bandwidth must be greater than 0 (infinite: only the latency counts)"
        require(self.bandwidth > 0, rule, self.bandwidth)

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
        rule = "Cluster: num_replicas must be an integer of at least 1"
        require(is_int(self.num_replicas, 1), rule, self.num_replicas)
        object.__setattr__(self, "processes", tuple(self.processes))
        for process in self.processes:
            rule = "Cluster: processes must be integers from 0, one per device"
            require(is_int(process, 0), rule, process)
        processes = set(self.processes)
        if processes and max(processes) >= len(processes):
            missing = min(set(range(max(processes))) - processes)
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
            require(is_int(value, 1), f"Cluster: {name} must be an integer of at least 1", value)
        number = num_replicas * num_ipus
        rule = f"Cluster: num_processes must divide the number of devices, {number}"
        require(not number % num_processes, rule, num_processes)
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
        return {
            "num_replicas": self.num_replicas,
            "processes": list(self.processes),
            "within": _write_speed(self.within),
            "between": _write_speed(self.between),
            "shards_optimizer_state": self.shards_optimizer_state,
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Cluster:
        """Makes a cluster from a result of `as_dict`; missing entries get their defaults."""
        entries = dict(entries)
        for name in ("within", "between"):
            entries[name] = _read_speed(entries.pop(name, {}))
        return cls(**{**entries, "processes": tuple(entries.get("processes", ()))})


def _write_speed(speed: LinkSpeed) -> dict[str, float | None]:
    bandwidth = speed.bandwidth if math.isfinite(speed.bandwidth) else None
    return {"latency": speed.latency, "bandwidth": bandwidth}


def _read_speed(entries: Mapping[str, Any]) -> LinkSpeed:
    entries = dict(entries)
    if entries.get("bandwidth") is None:
        entries["bandwidth"] = math.inf
    return LinkSpeed(**entries)


# Execution phases.
#
# A micro-batch goes through all phases before the next one begins: forwards phase by phase, and backwards
# in the opposite order. Source: PopTorch's phased execution, and PopART's execution phases.


@dataclass(frozen=True, kw_only=True)
class ExecutionPhases:
    """The phases of a pipeline's levels.

    Example:
      >>> phases = engine.ExecutionPhases(of_levels=(0, 0, 1, 1))

    Attributes:
      of_levels: the phase of each entry of `stages`, ascending from 0 without gaps.
      shares_last: whether the last phase's backwards belong to the phase of its forwards. False needs a
        last entry that is alone in its level and keeps nothing, because the last stage's forward and
        backward are one program, which then starts the backwards.
      num_ahead: the number of earlier phases that may still be on the devices when a phase's data are
        brought there: 0 waits for the previous phase to end, 1 for the phase before that. None: no limit.
      keeps_values: whether values that go from phase to phase stay on the devices. False: they wait in host
        memory, like everything else of a micro-batch.
    """

    of_levels: tuple[int, ...]
    shares_last: bool = True
    num_ahead: int | None = None
    keeps_values: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        object.__setattr__(self, "of_levels", tuple(self.of_levels))
        steps = [
            after - before for before, after in zip((0, *self.of_levels), self.of_levels, strict=False)
        ]
        if not self.of_levels or self.of_levels[0] != 0 or set(steps) - {0, 1}:
            raise ValueError(
                "execution_phases.of_levels must ascend from 0 without gaps, with the phase of each entry "
                f"of stages; got {list(self.of_levels)}."
            )
        if not self.shares_last and self.of_levels[-2:-1] != self.of_levels[-1:]:
            raise ValueError(
                "execution_phases: without shares_last the last phase needs two entries of stages or more, "
                "as the last stage's forward and backward are one program; got the phases "
                f"{list(self.of_levels)}. End with a stage that only returns what it is given."
            )
        is_count = isinstance(self.num_ahead, int) and self.num_ahead >= 0
        if self.num_ahead is not None and not is_count:
            raise ValueError(
                f"execution_phases.num_ahead must be an integer from 0, or None; got {self.num_ahead}."
            )

    def check(self, num_levels: int, schedule: object, num_serialized: int) -> None:
        """Checks the phases against the rest of a pipeline.

        Raises:
          ValueError: they contradict each other.
        """
        if len(self.of_levels) != num_levels:
            raise ValueError(
                f"execution_phases.of_levels must have one phase for each of the {num_levels} entries of "
                f"stages; got {list(self.of_levels)}."
            )
        if schedule != "sequential" or num_serialized > 1:
            raise ValueError(
                'execution_phases need the schedule "sequential" and num_serialized 1, as a micro-batch '
                f"goes through all phases before the next one; got {schedule!r} and {num_serialized}."
            )

    def find(self, kind: ActionKind, level: int) -> tuple[ActionKind, int]:
        """The direction and number of the phase in which a stage of a level has its forward or backward."""
        phase, last = self.of_levels[level], len(self.of_levels) - 1
        if phase < self.of_levels[-1]:
            return kind, phase
        if self.shares_last:
            return ActionKind.FORWARD, phase
        return (ActionKind.BACKWARD if level == last else kind), phase


# Transfers of execution phases from and to host memory.

_KINDS: dict[int, str] = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", UPDATE: "update"}
_SIZES = tuple(f"num_bytes_{way}_{kind}" for way in ("to", "from") for kind in _KINDS.values())


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The bytes that execution phases move from and to host memory. `plan_host_memory` makes it.

    Sizes are per program, which handles a micro-batch or a chunk of them. There is one size per stage;
    empty means zeros.

    Example:
      >>> phases = engine.ExecutionPhases(of_levels=(0, 1))
      >>> memory = engine.HostMemory(phases=phases, num_bytes_to_forward=(1e9, 1e9))

    Attributes:
      phases: the execution phases of the pipeline.
      link: the link between a device and host memory, with the same speed in either direction. All data
        that a program needs are sent together, and so are all that it leaves.
      num_bytes_to_forward: the bytes brought before each stage's forward; weights count only if the phase
        does not have them yet.
      num_bytes_to_backward: the bytes brought before each stage's backward, in the same way.
      num_bytes_to_update: the bytes brought before each stage's update.
      num_bytes_from_forward: the bytes that each stage's forward leaves to host memory.
      num_bytes_from_backward: the bytes that each stage's backward leaves to host memory.
      num_bytes_from_update: the bytes that each stage's update leaves to host memory.
    """

    phases: ExecutionPhases
    link: LinkSpeed = field(default_factory=LinkSpeed)
    num_bytes_to_forward: tuple[float, ...] = ()
    num_bytes_to_backward: tuple[float, ...] = ()
    num_bytes_to_update: tuple[float, ...] = ()
    num_bytes_from_forward: tuple[float, ...] = ()
    num_bytes_from_backward: tuple[float, ...] = ()
    num_bytes_from_update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for name in _SIZES:
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            for value in values:
                is_number = is_real(value)
                rule = f"HostMemory: {name} must be finite numbers of at least 0"
                require(is_number and value >= 0 and math.isfinite(value), rule, value)

    def check(self, num_stages: int, num_levels: int, schedule: object) -> None:
        """Checks the phases and sizes against the rest of a scenario.

        Raises:
          ValueError: they do not go together.
        """
        for name in _SIZES:
            rule = f"HostMemory: {name} must have a number for each of the {num_stages} stages, or none"
            require(len(getattr(self, name)) in (0, num_stages), rule, len(getattr(self, name)))
        # A user's timetable or function may be anything, as long as phases come in their order.
        self.phases.check(num_levels, schedule if isinstance(schedule, str) else "sequential", 1)

    def check_devices(self, cores: float | None, num_replicas: int) -> None:
        """Checks that a scenario has one replica, and devices with cores of their own.

        Raises:
          ValueError: it has not.
        """
        if cores is not None or num_replicas > 1:
            raise ValueError(
                "Scenario: host_memory goes with one replica, and with devices that share no cores; got "
                f"{num_replicas} replicas and cores={cores!r}. Leave it out, or the others."
            )

    def time_to(self, kind: int, stage: int) -> float:
        """The time to bring what a program needs; kinds are forward, backward and update.

        There are no halves of backwards in phases.
        """
        return self._time("to", kind, stage)

    def time_from(self, kind: int, stage: int) -> float:
        """The time to take away what a program leaves."""
        return self._time("from", kind, stage)

    def time_beside(self, moving: float, computing: float) -> float:
        """The time that moving something adds to computing.

        If a phase is brought while the one before runs, both go on at the same time.
        """
        return moving if self.phases.num_ahead == 0 else max(0.0, moving - computing)

    def _time(self, way: str, kind: int, stage: int) -> float:
        name = _KINDS.get(kind)
        values = getattr(self, f"num_bytes_{way}_{name}") if name else ()
        return self.link.time(values[stage]) if values else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_dict`; an infinite bandwidth is None."""
        return {
            "phases": {**dataclasses.asdict(self.phases), "of_levels": list(self.phases.of_levels)},
            "link": _write_speed(self.link),
            **{name: list(getattr(self, name)) for name in _SIZES},
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> HostMemory:
        """Makes one from a result of `as_dict`; missing entries get their defaults."""
        entries = dict(entries)
        link = _read_speed(entries.pop("link", {}))
        return cls(phases=ExecutionPhases(**entries.pop("phases")), link=link, **entries)
