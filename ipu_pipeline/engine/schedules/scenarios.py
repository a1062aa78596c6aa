"""Scenarios to simulate: a schedule, and the time and memory of its actions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ipu_pipeline.engine.schedules.clusters import Cluster, HostMemory
from ipu_pipeline.engine.schedules.order_problems import OrderProblem
from ipu_pipeline.engine.schedules.order_search import Searched, search
from ipu_pipeline.engine.schedules.schedule_arguments import (
    Schedule,
    SearchedSchedule,
    find_schedule,
    timetable,
)
from ipu_pipeline.engine.schedules.timetables import ActionKind, Timetable, check
from ipu_pipeline.ground.checks import is_int, is_real, require

# Costs and memory of actions.

StageEdge: TypeAlias = "tuple[int, int]"  # the stage that sends, and the one that receives


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
    transfers: Mapping[StageEdge, float] = field(default_factory=dict)
    host: float = 0.0
    forward_cores: tuple[float, ...] = ()
    backward_cores: tuple[float, ...] = ()
    is_fused: bool = True
    num_sent_bytes: Mapping[StageEdge, float] = field(default_factory=dict)
    num_gradient_bytes: tuple[float, ...] = ()
    weight_gradients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the fields. By default cores are 1, bytes 0, and weight gradients half of the backward."""
        if not self.weight_gradients:
            object.__setattr__(self, "weight_gradients", tuple(time / 2 for time in self.backward))
        for name, default in (("forward_cores", 1.0), ("backward_cores", 1.0), ("num_gradient_bytes", 0.0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * len(self.forward))
        names = ("forward", "backward", "update", "forward_cores", "backward_cores", "num_gradient_bytes")
        for name in (*names, "weight_gradients"):
            values = getattr(self, name)
            if len(values) != len(self.forward):
                raise ValueError(
                    f"Costs: {name} must have a number for each of the {len(self.forward)} stages, as "
                    f"forward has; got {len(values)}: {values!r}. Costs.of spreads one number over all."
                )
            _check_numbers(f"Costs: {name}", values)
        for total, half in zip(self.backward, self.weight_gradients, strict=True):
            if half > total:
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
        transfer: float | Sequence[float] | Mapping[StageEdge, float] = 0.0,
        host: float = 0.0,
        forward_cores: float | Sequence[float] = 1.0,
        backward_cores: float | Sequence[float] = 1.0,
        is_fused: bool = True,
        num_sent_bytes: float | Sequence[float] | Mapping[StageEdge, float] = 0.0,
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

        def spread(name: str, values: float | Sequence[float], number: int) -> tuple[float, ...]:
            if isinstance(values, (int, float)):
                return (float(values),) * number
            if len(values) != number:
                raise ValueError(
                    f"Costs: {name} must be one number or {number}; got {len(values)}: {values!r}."
                )
            _check_numbers(f"Costs: {name}", values)
            return tuple(map(float, values))

        def by_edge(
            name: str, values: float | Sequence[float] | Mapping[StageEdge, float]
        ) -> dict[StageEdge, float]:
            if isinstance(values, Mapping):
                return dict(values)
            edges = {}
            for stage, value in enumerate(spread(name, values, max(0, num_stages - 1))):
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


# Scenarios.


@dataclass(frozen=True)
class Layer:
    """A layer of a stage, which could be moved to another stage.

    Example:
      >>> blocks = [engine.Layer(f"block{number}", forward=1.0, backward=2.0) for number in range(4)]
      >>> costs = engine.Costs.of(2, forward=[3.0, 1.0], backward=[6.0, 2.0])
      >>> scenario = engine.Scenario(costs, num_micro_batches=8)
      >>> best = max(engine.what_if(scenario, [blocks[:3], blocks[3:]]), key=lambda variant: variant.gain)

    Attributes:
      name: its name, for people.
      forward: its part of the stage's forward, in the unit of the costs.
      backward: its part of the stage's backward, in the unit of the costs.
      num_constant_bytes: the bytes that it takes all the time.
      num_held_bytes: the bytes that it holds for each micro-batch in flight.
      update: its part of the stage's update, in the unit of the costs.
    """

    name: str
    forward: float
    backward: float = 0.0
    num_constant_bytes: int = 0
    num_held_bytes: int = 0
    update: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A step to simulate, of a pipeline or of several replicas of it.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> scenario = engine.Scenario(costs, "interleaved", num_micro_batches=8)
      >>> scenario.num_ipus
      4

    Attributes:
      costs: the costs of its actions.
      schedule: a name, a function as for `Pipeline`, a `SearchedSchedule`, or a checked timetable.
      num_micro_batches: micro-batches of each replica per weight update.
      device_mapping: the device of each stage, from 0; by default the timetable's, or each stage has its
        own.
      levels: the level of each stage, ascending from 0; stages of one level are parallel. By default each
        stage has its own.
      training: whether there are backwards and an update.
      chunk_size: micro-batches that a program handles, one after another. The schedule then orders chunks.
      cores: the number of cores that the devices share; None: each has its own.
      memory: the memory that devices hold; None: not known.
      micro_batch_size: samples in a micro-batch.
      cluster: replicas, processes and links; by default there is one replica in one process.
      host_memory: the transfers of execution phases to and from host memory, with "sequential"; None: there
        are none.
      layers: the layers of each stage, in their order, for `what_if` and `advise`; empty: not known.
    """

    costs: Costs
    schedule: Schedule | Timetable = "grouped"
    num_micro_batches: int = 1
    device_mapping: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    training: bool = True
    chunk_size: int = 1
    cores: float | None = None
    memory: Memory | None = None
    micro_batch_size: int = 1
    cluster: Cluster = field(default_factory=Cluster)
    host_memory: HostMemory | None = None
    layers: tuple[tuple[Layer, ...], ...] = ()

    def __post_init__(self) -> None:
        """Checks the fields."""
        number = self.costs.num_stages
        for name in ("num_micro_batches", "chunk_size", "micro_batch_size"):
            value = getattr(self, name)
            require(is_int(value, 1), f"Scenario: {name} must be an integer of at least 1", value)
        rule = f"Scenario: chunk_size must divide num_micro_batches, which is {self.num_micro_batches}"
        require(not self.num_micro_batches % self.chunk_size, rule, self.chunk_size)
        ipus = _find_ipus(self.schedule, number) if isinstance(self.schedule, Timetable) else range(number)
        for name, default in (("device_mapping", ipus), ("levels", range(number))):
            value = tuple(getattr(self, name)) or tuple(default)
            object.__setattr__(self, name, value)
            rule = f"Scenario: {name} must have a number from 0 for each of the {number} stages"
            require(len(value) == number and min(value) >= 0, rule, value)
        if not isinstance(self.schedule, Timetable):
            object.__setattr__(self, "schedule", find_schedule(self.schedule, "Scenario: schedule"))
        levels = self.levels
        rising = all(0 <= after - before <= 1 for before, after in itertools.pairwise(levels))
        require(levels[0] == 0 and rising, "Scenario: levels must ascend from 0 without a gap", levels)
        if self.is_fused and levels.count(levels[-1]) > 1:
            raise ValueError(
                f"Scenario: the last level must have one stage, or the costs is_fused=False; got levels "
                f"{levels!r}."
            )
        if self.cores is not None and not (self.cores > 0 and math.isfinite(self.cores)):
            raise ValueError(f"Scenario: cores must be greater than 0, or None; got {self.cores!r}.")
        if self.memory is not None:
            sizes = len(self.memory.num_constant_bytes), len(self.memory.num_held_bytes)
            if sizes != (max(self.device_mapping) + 1, number):
                raise ValueError(
                    f"Scenario: memory must have num_constant_bytes for each of "
                    f"{max(self.device_mapping) + 1} devices and num_held_bytes for each of {number} "
                    f"stages; got {sizes[0]} and {sizes[1]}."
                )
        object.__setattr__(self, "layers", tuple(map(tuple, self.layers)))
        rule = f"Scenario: layers must have a list for each of the {number} stages"
        require(len(self.layers) in (0, number), rule, len(self.layers))
        if self.host_memory is not None:
            self.host_memory.check(number, levels[-1] + 1, self.schedule)
            self.host_memory.check_devices(self.cores, self.cluster.num_replicas)
        num_devices = self.cluster.num_replicas * self.num_ipus
        if len(self.cluster.processes) not in (0, num_devices):
            raise ValueError(
                f"Scenario: the cluster must have the process of each of {num_devices} devices "
                f"({self.cluster.num_replicas} replicas of {self.num_ipus} devices); got "
                f"{len(self.cluster.processes)}."
            )

    @property
    def ipus(self) -> tuple[int, ...]:
        """The devices of a replica that have stages."""
        return tuple(sorted(set(self.device_mapping)))

    @property
    def num_ipus(self) -> int:
        """The number of devices of a replica, including those without a stage."""
        return max(self.device_mapping) + 1

    @property
    def ipus_of_replicas(self) -> tuple[int, ...]:
        """The devices with stages, in all replicas: device i of replica r is r times `num_ipus` plus i."""
        return tuple(self.ipu_of(r, ipu) for r in range(self.cluster.num_replicas) for ipu in self.ipus)

    def ipu_of(self, replica: int, ipu: int) -> int:
        """The number of a replica's device among those of all replicas."""
        return replica * self.num_ipus + ipu

    @property
    def is_fused(self) -> bool:
        """Whether forward and backward of the last stage are one program."""
        return self.training and self.costs.is_fused

    @property
    def num_samples(self) -> int:
        """The number of samples of a step."""
        return self.cluster.num_replicas * self.num_micro_batches * self.micro_batch_size

    @property
    def num_actions(self) -> int:
        """The number of actions of the schedule, in all replicas."""
        num_chunks = self.num_micro_batches // self.chunk_size
        return self.cluster.num_replicas * self.costs.num_stages * num_chunks * (2 if self.training else 1)

    @property
    def halved(self) -> frozenset[int]:
        """The stages with a split backward."""
        return self.timetable().halved

    def work(self, kind: ActionKind, stage: int) -> float:
        """The time of all micro-batches of a stage in one direction, or in one half of the backward."""
        is_there = kind is ActionKind.FORWARD or self.training
        return self.costs.of_actions[kind][stage] * self.num_micro_batches if is_there else 0.0

    def update(self, stage: int) -> float:
        """The time of a replica's update of a stage: of all of it, or of the replica's share."""
        sharing = self.cluster.num_replicas if self.cluster.shards_optimizer_state else 1
        return self.costs.update[stage] / sharing if self.training else 0.0

    def transfer(self, replica: int, edge: StageEdge) -> float:
        """The time to send a program's results to another stage, for all its micro-batches."""
        devices = {self.ipu_of(replica, self.device_mapping[stage]) for stage in edge}
        time = self.costs.transfers.get(edge, 0.0) * self.chunk_size
        if len(devices) > 1:
            num_bytes = self.costs.num_sent_bytes.get(edge, 0.0) * self.chunk_size
            time += self.cluster.speed_between(devices).time(num_bytes)
        return time

    def half_ring(self, ipu: int) -> float:
        """The time of a reduce-scatter of a device's gradients; an all-gather takes as long again."""
        mapping, gradients = self.device_mapping, self.costs.num_gradient_bytes
        num_bytes = sum(size for size, home in zip(gradients, mapping, strict=True) if home == ipu)
        devices = {self.ipu_of(replica, ipu) for replica in range(self.cluster.num_replicas)}
        return self.cluster.half_ring(devices, num_bytes) if self.training else 0.0

    def work_of_ipus(self) -> dict[int, float]:
        """The time of each device's programs of a step without any waiting, in all replicas."""
        total = dict.fromkeys(self.ipus, 0.0)
        for stage, ipu in enumerate(self.device_mapping):
            total[ipu] += sum(self.work(kind, stage) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
            total[ipu] += self.update(stage)
        replicas = range(self.cluster.num_replicas)
        return {self.ipu_of(replica, ipu): work for replica in replicas for ipu, work in total.items()}

    def problem(self, num_bytes_per_ipu: int | None = None) -> OrderProblem:
        """Returns what an order is searched for. The scenario's own schedule does not matter.

        A micro-batch of the problem is a chunk. The problem leaves out the host's time, shared cores and
        the communication of replicas, each of which adds to the step time found.

        Args:
          num_bytes_per_ipu: the most that a device may hold, for which `memory` is needed; None: anything.

        Raises:
          ValueError: the scenario has parallel stages, execution phases, no training, or values that skip
            stages and may arrive later than values that go through these; or there is a limit and the
            memory is not known, or the limit is too low.
        """
        costs, memory, number = self.costs, self.memory, self.costs.num_stages
        edges = {*costs.transfers, *costs.num_sent_bytes}
        late = [edge for edge in sorted(edges) if abs(edge[0] - edge[1]) > 1 and self._may_be_late(edge)]
        for is_wrong, rule in (
            (not self.training, "training=True"),
            (len(set(self.levels)) < number, "a level of its own for each stage"),
            (bool(late), f"values that skip stages faster than what goes through these, unlike {late}"),
            (self.host_memory is not None, "no execution phases"),
            (memory is None and num_bytes_per_ipu is not None, "memory, for a limit of bytes"),
        ):
            if is_wrong:
                raise ValueError(
                    f"PipelineSchedule.searched: a search needs a scenario with {rule}; got {self!r}. Or "
                    "take a schedule with a name."
                )
        memory, size = memory or Memory((0,) * self.num_ipus, (0,) * number), self.chunk_size
        forward, _backward, inputs, weights = (
            tuple(size * time for time in times) for times in costs.of_actions
        )
        pairs = list(itertools.pairwise(range(number)))
        problem = OrderProblem(
            num_micro_batches=self.num_micro_batches // size,
            forward=forward,
            input_gradients=inputs,
            weight_gradients=weights,
            device_mapping=self.device_mapping,
            forward_transfers=tuple(self.transfer(0, edge) for edge in pairs),
            backward_transfers=tuple(self.transfer(0, (after, before)) for before, after in pairs),
            updates=tuple(self.update(stage) for stage in range(number)),
            is_fused=self.is_fused,
            num_held_bytes=tuple(size * num_bytes for num_bytes in memory.num_held_bytes),
            num_between_bytes=tuple(size * num_bytes for num_bytes in memory.num_between_bytes),
            num_constant_bytes=memory.num_constant_bytes,
            num_bytes_per_ipu=num_bytes_per_ipu,
        )
        for ipu, least in enumerate(problem.num_least_bytes):
            if num_bytes_per_ipu is not None and least > num_bytes_per_ipu:
                raise ValueError(
                    "PipelineSchedule.searched: bytes_per_ipu must be enough for one micro-batch; device "
                    f"{ipu} needs {least:,} bytes ({problem.num_constant_bytes[ipu]:,} of them all the "
                    f"time), and the limit is {num_bytes_per_ipu:,}. Raise it, or recompute or offload "
                    "activations."
                )
        return problem

    def _may_be_late(self, edge: StageEdge) -> bool:
        """Whether what skips stages may arrive after what goes through them.

        It cannot if its link is free whenever the program that sends has run, and it takes no longer than
        the programs and transfers on the other way.
        """
        source, target = edge
        turn = 1 if target > source else -1
        kind = ActionKind.FORWARD if turn > 0 else ActionKind.INPUT_GRADIENTS
        times = self.costs.of_actions[kind]
        way = range(source, target, turn)
        through = sum(self.transfer(0, (stage, stage + turn)) for stage in way)
        through += self.chunk_size * sum(times[stage] for stage in way[1:])
        busy = times[source]
        if turn < 0 and self.is_fused and source == self.costs.num_stages - 1:
            busy += self.costs.forward[source]
        return self.transfer(0, edge) > min(self.chunk_size * busy, through)

    @functools.cached_property
    def searched(self) -> Searched | None:
        """The result of the search, with its bound; None with another schedule, or without training.

        Raises:
          ValueError: see `problem`.
        """
        if not (isinstance(self.schedule, SearchedSchedule) and self.training):
            return None
        return search(self.problem(self.schedule.bytes_per_ipu))

    def timetable(self) -> Timetable:
        """The checked timetable.

        Raises:
          ScheduleError: `check` finds a fault.
          ValueError: there are too many actions, or the given timetable has another number than the
            scenario, or something cannot be searched.
        """
        num_chunks = self.num_micro_batches // self.chunk_size
        if self.searched is not None:
            return check(self.searched.rows, self.costs.num_stages, num_chunks, self.device_mapping, True)
        if isinstance(self.schedule, Timetable):
            number = self.num_actions // self.cluster.num_replicas + len(self.schedule.halved) * num_chunks
            if len(self.schedule.order) != number or len(self.schedule.in_flight) != self.costs.num_stages:
                raise ValueError(
                    f"Scenario: the timetable must have {number} actions ({self.costs.num_stages} stages, "
                    f"{num_chunks} micro-batches or chunks of them, "
                    f"{'training' if self.training else 'forwards only'}); got {len(self.schedule.order)}."
                )
            return self.schedule
        levels = self.levels
        return timetable(
            self.schedule,
            self.costs.num_stages,
            num_chunks,
            self.device_mapping,
            self.training,
            None if len(set(levels)) == len(levels) else levels,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_dict`.

        Raises:
          ValueError: the schedule has no name.
        """
        limit = None
        if isinstance(self.schedule, SearchedSchedule):
            limit = self.schedule.bytes_per_ipu
        elif not isinstance(self.schedule, str):
            raise ValueError(
                f"Scenario: only a schedule with a name can be written; got {self.schedule!r}."
            )
        return {
            "schedule": str(self.schedule),
            "bytes_per_ipu": limit,
            "num_micro_batches": self.num_micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "device_mapping": list(self.device_mapping),
            "levels": list(self.levels),
            "training": self.training,
            "chunk_size": self.chunk_size,
            "cores": self.cores,
            "costs": self.costs.as_dict(),
            "cluster": self.cluster.as_dict(),
            "layers": [list(map(dataclasses.asdict, layers)) for layers in self.layers],
            "host_memory": None if self.host_memory is None else self.host_memory.as_dict(),
            "memory": None
            if self.memory is None
            else {name: list(sizes) for name, sizes in vars(self.memory).items()},
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Scenario:
        """Makes a scenario from a result of `as_dict`; only the costs of forwards are required.

        Raises:
          ValueError: an entry is missing, unknown or wrong.
        """
        try:
            entries = dict(entries)
            costs = Costs.from_dict(entries.pop("costs"))
            cluster = Cluster.from_dict(entries.pop("cluster", {}))
            memory, host_entries = entries.pop("memory", None), entries.pop("host_memory", None)
            if (limit := entries.pop("bytes_per_ipu", None)) is not None:
                entries["schedule"] = SearchedSchedule(limit)
            host_memory = None if host_entries is None else HostMemory.from_dict(host_entries)
            stages = entries.pop("layers", ())
            layers = tuple(tuple(Layer(**layer) for layer in stage) for stage in stages)
            if memory is not None:
                memory = Memory(**{name: tuple(values) for name, values in dict(memory).items()})
            return cls(
                costs=costs,
                memory=memory,
                cluster=cluster,
                host_memory=host_memory,
                layers=layers,
                **entries,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Scenario: the entries must be those of Scenario.as_dict, with costs and their forward at "
                f"least; {type(error).__name__}: {error}."
            ) from error


def _find_ipus(timetable: Timetable, num_stages: int) -> Sequence[int]:
    ipus = {action.stage: ipu for ipu, row in enumerate(timetable.rows) for action in row if action}
    if sorted(ipus) != list(range(num_stages)):
        raise ValueError(
            f"Scenario: the timetable must have the {num_stages} stages of the costs; it has {len(ipus)}."
        )
    return [ipus[stage] for stage in range(num_stages)]
