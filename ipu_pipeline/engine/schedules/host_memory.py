"""The transfers of execution phases from and to host memory, for the simulator. No JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.schedules.actions import UPDATE, ActionKind
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.ground.checks import is_real

__all__ = ["HostMemory"]

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
                if not (is_number and value >= 0 and math.isfinite(value)):
                    raise ValueError(
                        f"HostMemory: {name} must be finite numbers of at least 0; got {value!r}."
                    )

    def check(self, num_stages: int, num_levels: int, schedule: object) -> None:
        """Checks the phases and sizes against the rest of a scenario.

        Raises:
          ValueError: they do not go together.
        """
        for name in _SIZES:
            if len(getattr(self, name)) not in (0, num_stages):
                raise ValueError(
                    f"HostMemory: {name} must have a number for each of the {num_stages} stages, or none; "
                    f"got {len(getattr(self, name))}."
                )
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
        bandwidth = self.link.bandwidth
        return {
            "phases": {**dataclasses.asdict(self.phases), "of_levels": list(self.phases.of_levels)},
            "link": {
                "latency": self.link.latency,
                "bandwidth": bandwidth if math.isfinite(bandwidth) else None,
            },
            **{name: list(getattr(self, name)) for name in _SIZES},
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> HostMemory:
        """Makes one from a result of `as_dict`; missing entries get their defaults."""
        entries = dict(entries)
        link = dict(entries.pop("link", {}))
        if link.get("bandwidth") is None:
            link["bandwidth"] = math.inf
        return cls(phases=ExecutionPhases(**entries.pop("phases")), link=LinkSpeed(**link), **entries)
