"""The best layout of a GPT on so many devices.

Of all layouts it is known how long a step takes at least. They are simulated in that order, until none of
the rest can be faster than the fastest so far: so the best one is the best of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ipu_pipeline.engine.schedules import Cluster, Costs, Scenario, predict_step_time
from ipu_pipeline.engine.schedules.simulator import find_bubble
from ipu_pipeline.engine.schedules.tasks import run_step
from scaling.gpt import Device, Gpt, Stage, split

__all__ = ["Found", "Layout", "Shares", "find_layouts", "search", "shares"]

MICRO_BATCH_SIZES = (1, 2, 4, 8)
SCHEDULES = ("grouped", "interleaved")


@dataclass(frozen=True)
class Layout:
    """How a GPT is laid out on devices.

    Attributes:
      model: the GPT.
      device: what it runs on.
      num_stages: one per device of a replica.
      num_replicas: how many.
      micro_batch_size: sequences of a micro-batch.
      schedule: "grouped" or "interleaved".
      recompute: whether stages recompute.
      sharded: whether replicas share the optimizer's state.
      by_stage: whether neighbouring devices are replicas of a stage, and not stages of a replica.
    """

    model: Gpt
    device: Device
    num_stages: int
    num_replicas: int
    micro_batch_size: int
    schedule: str
    recompute: bool
    sharded: bool
    by_stage: bool

    @property
    def num_micro_batches(self) -> int:
        """Of a replica."""
        return self.model.num_sequences // (self.num_replicas * self.micro_batch_size)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages."""
        return split(self.model, self.num_stages, recompute=self.recompute)

    @cached_property
    def num_bytes(self) -> float:
        """What the device that holds most holds."""
        moments = 8 / (self.num_replicas if self.sharded else 1)
        found = []
        for place, stage in enumerate(self.stages):
            hops = self.num_stages - place
            in_flight = min(self.num_micro_batches, 2 * hops - 1 if self.schedule == "grouped" else hops)
            activations = in_flight * stage.held_bytes + stage.temporary_bytes
            found.append(stage.num_parameters * (8 + moments) + self.micro_batch_size * activations)
        return max(found)

    @property
    def fits(self) -> bool:
        """Whether all devices have the memory."""
        return self.num_bytes <= self.device.num_bytes

    @cached_property
    def scenario(self) -> Scenario:
        """What is simulated, in seconds."""
        own, device, size = self.stages, self.device, self.micro_batch_size
        costs = Costs.of(
            self.num_stages,
            forward=[stage.forward * size / device.operations for stage in own],
            backward=[stage.backward * size / device.operations for stage in own],
            update=[28 * stage.num_parameters / device.memory_bandwidth for stage in own],
            host=device.host,
            num_sent_bytes=float(self.model.sent_bytes * size),
            num_gradient_bytes=[4.0 * stage.num_parameters for stage in own],
        )
        return Scenario(costs, self.schedule, self.num_micro_batches, cluster=self._cluster())

    def _cluster(self) -> Cluster:
        replicas, stages = range(self.num_replicas), range(self.num_stages)
        places = [
            (stage * self.num_replicas + replica) if self.by_stage else (replica * self.num_stages + stage)
            for replica in replicas
            for stage in stages
        ]
        return Cluster(
            self.num_replicas,
            tuple(place // self.device.per_process for place in places),
            self.device.within,
            self.device.between,
            self.sharded,
        )

    @cached_property
    def least_time(self) -> float:
        """A step cannot be shorter.

        A stage begins when the first micro-batch has come through those before it. Then it has its own
        work. After that comes what ends its step, and its last gradients go back through those before it.
        """
        scenario, costs = self.scenario, self.scenario.costs
        halves = [scenario.half_ring(stage) for stage in range(self.num_stages)]
        closing = [2 * half + scenario.update(stage) for stage, half in enumerate(halves)]
        before, found = 0.0, 0.0
        for stage in range(self.num_stages):
            one = costs.forward[stage] + costs.backward[stage]
            back = sum(costs.backward[:stage])
            after = max(closing[stage], back + closing[0])
            found = max(found, before + self.num_micro_batches * one + after)
            before += costs.forward[stage]
        return found

    @cached_property
    def step_time(self) -> float:
        """As it is simulated."""
        return predict_step_time(self.scenario)


@dataclass(frozen=True)
class Shares:
    """What the devices' time goes into; together 1.

    Attributes:
      compute: programs.
      bubble: ramps and unequal stages.
      links: waiting for results and gradients.
      host: waiting for programs to be started.
      unused: devices that have no stage.
    """

    compute: float
    bubble: float
    links: float
    host: float
    unused: float


@dataclass(frozen=True)
class Found:
    """The best layout.

    Attributes:
      best: it; None if none fits.
      num_layouts: of how many.
      num_fitting: how many of these fit.
    """

    best: Layout | None
    num_layouts: int
    num_fitting: int


def find_layouts(model: Gpt, device: Device, num_devices: int) -> Iterator[Layout]:
    """All layouts of a GPT on devices, some of which may be left over.

    The number of replicas is a power of two. They have as many stages as there are devices for, or fewer if
    that makes the slowest stage no slower.
    """
    for power in range(num_devices.bit_length()):
        num_replicas = 2**power
        most = min(num_devices // num_replicas, model.num_blocks + 1)
        for recompute in (False, True):
            slowest = {
                number: max(s.forward + s.backward for s in split(model, number, recompute=recompute))
                for number in range(most // 2 + 1, most + 1)
            }
            for number in [n for n in slowest if n == most // 2 + 1 or slowest[n] < slowest[n - 1]]:
                for size, schedule in itertools.product(MICRO_BATCH_SIZES, SCHEDULES):
                    if model.num_sequences % (num_replicas * size):
                        continue
                    if number == 1 and schedule != "grouped":
                        continue  # one stage has nothing to order
                    for sharded, by_stage in itertools.product((False, True), repeat=2):
                        if num_replicas > 1 or not (sharded or by_stage):
                            yield Layout(
                                model,
                                device,
                                number,
                                num_replicas,
                                size,
                                schedule,
                                recompute,
                                sharded,
                                by_stage,
                            )


def search(model: Gpt, device: Device, num_devices: int) -> Found:
    """Finds the fastest layout that fits."""
    layouts = list(find_layouts(model, device, num_devices))
    fitting = sorted(
        (layout for layout in layouts if layout.fits), key=lambda one: (one.least_time, one.num_bytes)
    )
    best, limit = None, float("inf")
    for layout in fitting:
        if layout.least_time >= limit:
            break
        if layout.step_time < limit:
            best, limit = layout, layout.step_time
    return Found(best, len(layouts), len(fitting))


def shares(layout: Layout, num_devices: int) -> Shares:
    """What the devices' time goes into."""
    scenario = layout.scenario
    timetable = scenario.timetable()
    step = run_step(scenario, timetable)
    bubble = find_bubble(scenario, timetable, step)
    whole = num_devices * step.end
    used = layout.num_replicas * layout.num_stages
    work = sum(scenario.work_of_ipus().values())
    idle = bubble.ramp_up + bubble.ramp_down + bubble.imbalance
    return Shares(
        work / whole, idle / whole, bubble.transfers / whole, bubble.host / whole, 1 - used / num_devices
    )
