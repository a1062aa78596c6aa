"""The costs of a step's actions, in time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ipu_pipeline.ground.checks import is_real

__all__ = ["Costs", "Edge", "Memory"]

Edge: TypeAlias = "tuple[int, int]"  # the stage that sends, and the one that receives


@dataclass(frozen=True)
class Costs:
    """The times of the parts of a step, all in one unit. `Costs.of` makes them from fewer numbers.

    An action of time 0 has no program: nothing is dispatched for it.

    Example:
      >>> costs = engine.Costs.of(3, forward=[1, 2, 1], backward=2)
      >>> costs.backward
      (2.0, 2.0, 2.0)

    Attributes:
      forward: the time of each stage's forward, for one micro-batch.
      backward: the time of each stage's backward, for one micro-batch.
      update: the time of each stage's update, once a step.
      transfers: (sending stage, receiving stage) -> the transfer time of one micro-batch. Forwards send to
        later stages, backwards to earlier ones; missing pairs take 0. A link sends one result at a time,
        while the devices compute.
      host: the time in which the host starts a program; each process has one host.
      forward_cores: the number of cores that each stage's forward keeps busy while it runs alone (CPU time
        divided by wall time). It matters only where devices share cores.
      backward_cores: the same for the backward of each stage.
      is_fused: whether the last stage's forward and backward (input gradients, if the backward is split)
        are one program, which runs where the schedule has the forward. It is so in the engine.
      num_sent_bytes: (sending stage, receiving stage) -> the bytes of one micro-batch. The time to send
        them on the cluster's link is added to `transfers`; it is 0 if both stages are on one device.
      num_gradient_bytes: the gradients of each stage, which replicas average once a step.
      weight_gradients: the time of each stage's weight gradients, a part of `backward`, if the schedule
        splits the backward; empty: half of the backward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    transfers: Mapping[Edge, float] = field(default_factory=dict)
    host: float = 0.0
    forward_cores: tuple[float, ...] = ()
    backward_cores: tuple[float, ...] = ()
    is_fused: bool = True
    num_sent_bytes: Mapping[Edge, float] = field(default_factory=dict)
    num_gradient_bytes: tuple[float, ...] = ()
    weight_gradients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the fields. By default cores are 1, bytes 0, and weight gradients half of the backward."""
        if not self.weight_gradients:
            object.__setattr__(self, "weight_gradients", tuple(time / 2 for time in self.backward))
        for name, default in (("forward_cores", 1.0), ("backward_cores", 1.0), ("num_gradient_bytes", 0.0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * len(self.forward))
        own = ("forward", "backward", "update", "forward_cores", "backward_cores", "num_gradient_bytes")
        for name in (*own, "weight_gradients"):
            values = getattr(self, name)
            if len(values) != len(self.forward):
                raise ValueError(
                    f"Costs: {name} must have a number for each of the {len(self.forward)} stages, as "
                    f"forward has; got {len(values)}: {values!r}. Costs.of spreads one number over all."
                )
            _check_numbers(f"Costs: {name}", values)
        for whole, half in zip(self.backward, self.weight_gradients, strict=True):
            if half > whole:
                raise ValueError(
                    f"Costs: weight_gradients are a part of backward, which takes {self.backward!r}; got "
                    f"{self.weight_gradients!r}."
                )
        if not self.forward:
            raise ValueError("Costs: forward must have a number for each stage; got none.")
        for name in ("forward_cores", "backward_cores"):
            if 0 in getattr(self, name):
                raise ValueError(f"Costs: {name} must be greater than 0; got {getattr(self, name)!r}.")
        _check_numbers("Costs: host", [self.host])
        stages = range(len(self.forward))
        for name in ("transfers", "num_sent_bytes"):
            _check_numbers(f"Costs: {name}", getattr(self, name).values())
            for source, target in getattr(self, name):
                if source not in stages or target not in stages or source == target:
                    raise ValueError(
                        f"Costs: {name} are between two of the {len(stages)} stages, counted from 0; got "
                        f"{(source, target)}."
                    )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def of_actions(self) -> tuple[tuple[float, ...], ...]:
        """The times of the stages' actions, by `ActionKind`."""
        halves = zip(self.backward, self.weight_gradients, strict=True)
        return self.forward, self.backward, tuple(w - half for w, half in halves), self.weight_gradients

    @classmethod
    def of(
        cls,
        num_stages: int,
        *,
        forward: float | Sequence[float],
        backward: float | Sequence[float] = 0.0,
        update: float | Sequence[float] = 0.0,
        transfer: float | Sequence[float] | Mapping[Edge, float] = 0.0,
        host: float = 0.0,
        forward_cores: float | Sequence[float] = 1.0,
        backward_cores: float | Sequence[float] = 1.0,
        is_fused: bool = True,
        num_sent_bytes: float | Sequence[float] | Mapping[Edge, float] = 0.0,
        num_gradient_bytes: float | Sequence[float] = 0.0,
        weight_gradients: float | Sequence[float] | None = None,
    ) -> Costs:
        """Makes costs from one number for all stages or one per stage.

        Args:
          num_stages: the number of stages.
          forward: see the fields.
          backward: see the fields.
          update: see the fields.
          transfer: one number, or one for each pair of neighbouring stages, each for both directions; or as
            in the field `transfers`.
          host: see the fields.
          forward_cores: see the fields.
          backward_cores: see the fields.
          is_fused: see the fields.
          num_sent_bytes: given in the same forms as `transfer`.
          num_gradient_bytes: see the fields.
          weight_gradients: see the fields; None: half of the backward.

        Raises:
          ValueError: there is not one number per stage (or pair of neighbours), or a number is negative or
            not finite.
        """

        def spread(name: str, given: float | Sequence[float], number: int) -> tuple[float, ...]:
            if isinstance(given, (int, float)):
                return (float(given),) * number
            if len(given) != number:
                raise ValueError(
                    f"Costs: {name} must be one number or {number}; got {len(given)}: {given!r}."
                )
            _check_numbers(f"Costs: {name}", given)
            return tuple(map(float, given))

        def by_edge(name: str, given: float | Sequence[float] | Mapping[Edge, float]) -> dict[Edge, float]:
            if isinstance(given, Mapping):
                return dict(given)
            edges = {}
            for stage, value in enumerate(spread(name, given, max(0, num_stages - 1))):
                if value:
                    edges[stage, stage + 1] = edges[stage + 1, stage] = value
            return edges

        return cls(
            spread("forward", forward, num_stages),
            spread("backward", backward, num_stages),
            spread("update", update, num_stages),
            by_edge("transfer", transfer),
            host,
            spread("forward_cores", forward_cores, num_stages),
            spread("backward_cores", backward_cores, num_stages),
            is_fused,
            by_edge("num_sent_bytes", num_sent_bytes),
            spread("num_gradient_bytes", num_gradient_bytes, num_stages),
            () if weight_gradients is None else spread("weight_gradients", weight_gradients, num_stages),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_dict`."""
        return {
            "forward": list(self.forward),
            "backward": list(self.backward),
            "update": list(self.update),
            "transfers": [[*edge, time] for edge, time in self.transfers.items()],
            "host": self.host,
            "forward_cores": list(self.forward_cores),
            "backward_cores": list(self.backward_cores),
            "is_fused": self.is_fused,
            "num_sent_bytes": [[*edge, size] for edge, size in self.num_sent_bytes.items()],
            "num_gradient_bytes": list(self.num_gradient_bytes),
            "weight_gradients": list(self.weight_gradients),
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Costs:
        """Makes costs from a result of `as_dict`; only `forward` is required.

        Raises:
          KeyError: there is no `forward`.
          TypeError: an entry is unknown.
          ValueError: an entry is wrong.
        """
        entries = dict(entries)
        edges = [
            {(source, target): value for source, target, value in entries.pop(name, [])}
            for name in ("transfers", "num_sent_bytes")
        ]
        return cls.of(len(entries["forward"]), transfer=edges[0], num_sent_bytes=edges[1], **entries)


@dataclass(frozen=True)
class Memory:
    """The memory that devices hold, in bytes.

    Example:
      >>> memory = schedules.Memory(num_constant_bytes=(1000, 1000), num_held_bytes=(100, 50))
      >>> costs = engine.Costs.of(2, forward=1.0, backward=2.0)
      >>> scenario = engine.Scenario(costs, num_micro_batches=4, memory=memory)
      >>> engine.simulate(scenario).free_running.peaks[0]
      Peak(ipu=0, num_bytes=1300, time=2.0)

    Attributes:
      num_constant_bytes: for each device, by its number: variables, optimizer state and accumulators; the
        same in each replica.
      num_held_bytes: the bytes that each stage holds per micro-batch from the start of its forward to the
        end of its backward, or of its input gradients if the backward is split.
      num_between_bytes: the bytes that each stage then holds until its weight gradients end; empty: as
        many.

    Raises:
      TypeError: a size is not a number.
      ValueError: a size is negative or not finite, or the stages differ in number.
    """

    num_constant_bytes: tuple[int, ...]
    num_held_bytes: tuple[int, ...]
    num_between_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks the fields, and fills in what is held between halves."""
        if not self.num_between_bytes:
            object.__setattr__(self, "num_between_bytes", self.num_held_bytes)
        if len(self.num_between_bytes) != len(self.num_held_bytes):
            raise ValueError(
                f"Memory: num_between_bytes must have a number for each of the {len(self.num_held_bytes)} "
                f"stages of num_held_bytes; got {len(self.num_between_bytes)}."
            )
        for name in ("num_constant_bytes", "num_held_bytes", "num_between_bytes"):
            _check_numbers(f"Memory: {name}", getattr(self, name))


def _check_numbers(name: str, values: Any) -> None:
    for value in values:
        if not is_real(value):
            raise TypeError(f"{name} must be numbers; got {value!r}.")
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be finite and at least 0; got {value!r}.")
