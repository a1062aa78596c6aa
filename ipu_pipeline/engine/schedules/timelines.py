"""The times of all events of a simulated step, and results computed from them. No JAX."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ipu_pipeline.engine.schedules.timetables import ActionKind

Array: TypeAlias = "npt.NDArray[Any]"

# By number: those of `ActionKind`, UPDATE, REDUCE and GATHER.
KINDS = (*(kind.words for kind in ActionKind), "update", "reduce", "gather")


class Interval(NamedTuple):
    """An action.

    Attributes:
      kind: "forward", "backward", "input gradients", "weight gradients" or "update"; or a communication of
        replicas, in which no device computes: "reduce" (average gradients) or "gather" (exchange updated
        parts).
      stage: the stage; for communication, the first stage on the device.
      micro_batch: the number of the micro-batch; with several replicas, of the infeed's element, as their
        micro-batches alternate. None for actions after the micro-batches, such as updates.
      ipu: the device; with several replicas, counted through all of them.
      begin: the begin, in the unit of the costs; the step begins at 0.
      end: the end.
    """

    kind: str
    stage: int
    micro_batch: int | None
    ipu: int
    begin: float
    end: float


class Sending(NamedTuple):
    """The transfer of a program's results over a link; times are as in `Interval`.

    Example:
      >>> costs = engine.Costs.of(2, forward=1.0, backward=2.0, transfer=0.5)
      >>> engine.simulate(engine.Scenario(costs, num_micro_batches=2)).free_running.transfers()[0]
      Sending(source=0, target=1, micro_batch=0, begin=1.0, end=1.5)

    Attributes:
      source: the stage that sends.
      target: the stage that receives.
      micro_batch: the first micro-batch of the chunk.
      begin: the begin.
      end: the arrival.
    """

    source: int
    target: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Bubble:
    """The idle time by cause, summed over the devices, in the unit of the costs.

    The causes add up to `total`: the number of devices times the step's time, less the time of their
    programs. In a free-running timeline, a cause counts as the time by which the step would be shorter
    without it, times the number of devices, after the causes below it in the list of attributes are
    removed. In lock-step, shared cores are the excess of time-steps over their slowest action, host and
    transfers the time between time-steps, imbalance the rest of a time-step after the device's own action,
    and ramps are time-steps without an action.

    Example:
      >>> costs = engine.Costs.of(3, forward=1.0, backward=2.0)
      >>> bubble = engine.simulate(engine.Scenario(costs, num_micro_batches=8)).free_running.bubble
      >>> bubble.ramp_up, bubble.ramp_down, bubble.total
      (6.0, 12.0, 18.0)

    Attributes:
      ramp_up: while the pipeline fills.
      ramp_down: while it drains.
      imbalance: due to unequal work of the devices.
      transfers: waiting for results or gradients in transit.
      host: waiting for the host to start a program.
      shared_cores: due to programs that take cores from each other.
    """

    ramp_up: float
    ramp_down: float
    imbalance: float
    transfers: float
    host: float
    shared_cores: float

    @property
    def total(self) -> float:
        """The idle time of all causes."""
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        """The parts by name, in the order of the attributes."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


class Peak(NamedTuple):
    """The peak memory of a device.

    Example:
      >>> memory = schedules.Memory(num_constant_bytes=(1000, 1000), num_held_bytes=(100, 50))
      >>> costs = engine.Costs.of(2, forward=1.0, backward=2.0)
      >>> scenario = engine.Scenario(costs, num_micro_batches=4, memory=memory)
      >>> max(peak.num_bytes for peak in engine.simulate(scenario).free_running.peaks)
      1300

    Attributes:
      ipu: the device.
      num_bytes: the most bytes that it holds.
      time: the first time at which it holds them.
    """

    ipu: int
    num_bytes: int
    time: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step. Arrays have an entry per action, sorted by begin and then by device.

    Example:
      >>> costs = engine.Costs.of(2, forward=1.0, backward=2.0)
      >>> timeline = engine.simulate(engine.Scenario(costs, num_micro_batches=2)).free_running
      >>> timeline.intervals()[0]
      Interval(kind='forward', stage=0, micro_batch=0, ipu=0, begin=0.0, end=1.0)
      >>> timeline.bubble.ramp_up, timeline.bubble.ramp_down
      (2.0, 4.0)

    Attributes:
      kinds: indices into `KINDS`, int8.
      stages: the stage of the action.
      micro_batches: the micro-batch; -1 for actions after the micro-batches, such as updates.
      ipus: the device on which it runs.
      begins: the begin, in the unit of the costs. Actions that take no time are included.
      ends: the end.
      sendings: arrays with an entry per transfer that takes time, by the names of `Sending`'s attributes.
      step_time: the end of the last event.
      work: the time of the programs of each device with stages, by its number.
      bubble: the idle time of all devices together, by cause.
      memory: the bytes that each device holds, as (times, bytes from then on); empty if not known.
      num_samples: samples of a step.
    """

    kinds: Array
    stages: Array
    micro_batches: Array
    ipus: Array
    begins: Array
    ends: Array
    sendings: Mapping[str, Array]
    step_time: float
    work: Mapping[int, float]
    bubble: Bubble
    memory: Mapping[int, tuple[Array, Array]]
    num_samples: int

    @property
    def utilisation(self) -> float:
        """The share of the step in which devices compute, over all devices; 0 to 1."""
        return sum(self.work.values()) / (len(self.work) * self.step_time) if self.step_time else 0.0

    @property
    def utilisation_of_ipus(self) -> dict[int, float]:
        """The share of the step in which each device computes."""
        return {ipu: work / self.step_time if self.step_time else 0.0 for ipu, work in self.work.items()}

    @property
    def samples_per_second(self) -> float:
        """Samples per second if steps follow each other, with costs in seconds."""
        return self.num_samples / self.step_time if self.step_time else float("inf")

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peak memory of each device; empty if not known."""
        peaks = []
        for ipu, (times, sizes) in self.memory.items():
            place = int(np.argmax(sizes))
            peaks.append(Peak(ipu, int(sizes[place]), float(times[place])))
        return tuple(peaks)

    def intervals(self) -> list[Interval]:
        """The actions, sorted by begin and then by device."""
        columns = (self.kinds, self.stages, self.micro_batches, self.ipus, self.begins, self.ends)
        return [
            Interval(KINDS[kind], stage, micro_batch if micro_batch >= 0 else None, ipu, begin, end)
            for kind, stage, micro_batch, ipu, begin, end in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]

    def transfers(self) -> list[Sending]:
        """The transfers that take time, sorted by begin."""
        columns = [self.sendings[name].tolist() for name in Sending._fields]
        return [Sending(*entry) for entry in zip(*columns, strict=True)]

    def num_bytes_at(self, ipu: int, time: float) -> int:
        """Returns the bytes that a device holds at a time.

        Raises:
          KeyError: the device's memory is not known.
        """
        times, sizes = self.memory[ipu]
        return int(sizes[max(0, bisect.bisect_right(times, time) - 1)])


def concatenate(columns: Sequence[Mapping[str, Array]], names: Sequence[str], *by: str) -> dict[str, Array]:
    """Joins tables, and sorts them."""
    if not columns:
        return {name: np.zeros(0) for name in names}
    joined = {name: np.concatenate([table[name] for table in columns]) for name in names}
    order = np.lexsort([joined[name] for name in reversed(by)])
    return {name: values[order] for name, values in joined.items()}


def memory_of(constant: int, intervals: Sequence[tuple[Array, Array, int]]) -> tuple[Array, Array]:
    """Finds what a device holds over time.

    Returns:
      Times, the first one 0, and the bytes from then on. What ends at a time is gone before anything else
      begins.
    """
    times, changes = [np.zeros(1)], [np.array([constant])]
    for begins, ends, num_bytes in intervals:
        times += [begins, ends]
        changes += [np.full(len(begins), num_bytes), np.full(len(ends), -num_bytes)]
    time, change = np.concatenate(times), np.concatenate(changes)
    order = np.concatenate([[0], np.lexsort((change[1:], time[1:])) + 1])
    sizes, time = np.cumsum(change[order]), time[order]
    is_last = np.append(time[1:] != time[:-1], True)
    return time[is_last], sizes[is_last]
