"""Tasks of a step: what each waits for, and when it runs if devices wait only for data. No JAX."""

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.timetables import GATHER, HALVES, REDUCE, UPDATE, ActionKind, Timetable

# A task keeps one resource busy: a device, or a link. All tasks of an action are a block: it brings what
# its program needs from host memory, runs the program, and takes away and sends what the program leaves.
# A block has these of all replicas, one after the other, as hosts start them. Behind the actions come the
# blocks that end a step: the replicas of a device meet (a task that takes no time, so that shared cores
# and single passes need to know nothing of replicas), reduce their gradients, update, and gather what
# they have updated.

CORES_OF_TRANSFER = 1.0  # that a copy keeps busy
ENDING = (REDUCE, UPDATE, GATHER)  # what ends a step, in this order

# Tasks that are no programs, numbered behind the kinds of these.
MEET, SEND, LOAD, STORE = range(GATHER + 1, GATHER + 5)


@dataclass(eq=False, slots=True)
class Task:
    """A part of a step, and when it runs. An action's tasks run once per chunk, others once.

    Attributes:
      kind: the kind of program, or MEET, SEND, LOAD or STORE.
      replica: its replica.
      stage: its stage.
      cost: how long it takes alone.
      resource: what it keeps busy; devices are numbered as in `Scenario.ipus_of_replicas`.
      cores: the number of cores that it keeps busy.
      num_runs: how often it runs.
      reads: the tasks whose results it reads, of the same chunk; what ends a step reads the last one's.
      target: the stage to which it sends.
      waits: other resources that must be free before it begins, and how long each takes to start it: its
        host, and for LOAD, what has left before.
      begins: when it began, by chunk; a list, or an array in lock-step.
      ends: when it ended, likewise.
    """

    kind: int
    replica: int
    stage: int
    cost: float
    resource: int
    cores: float
    num_runs: int
    reads: list[Task] = field(default_factory=list)
    target: int | None = None
    waits: tuple[tuple[int, float], ...] = ()
    begins: Any = field(default_factory=list)
    ends: Any = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """The tasks of a step.

    Attributes:
      blocks: by kind and stage, the tasks of an action or of what ends the step, in their order.
      num_resources: the number of devices, hosts and links.
      storing: in execution phases, by stage, the resource that is busy until what has been stored is there.
    """

    blocks: list[list[list[Task]]]
    num_resources: int
    storing: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Task]:
        """All tasks."""
        for of_kind in self.blocks:
            yield from itertools.chain.from_iterable(of_kind)

    @property
    def end(self) -> float:
        """The time when all is done."""
        return max((task.ends[-1] for task in self if task.ends), default=0.0)


def make_step(scenario: Scenario) -> Step:
    """Makes the tasks of a scenario. None has run."""
    return _Maker(scenario).step


class _Maker:
    def __init__(self, scenario: Scenario) -> None:
        costs, cluster, memory = scenario.costs, scenario.cluster, scenario.host_memory
        stages = range(costs.num_stages)
        blocks: list[list[list[Task]]] = [[[] for _stage in stages] for _kind in range(GATHER + 1)]
        self._first_host = cluster.num_replicas * scenario.num_ipus
        self.step = Step(blocks, self._first_host + cluster.num_processes)
        self._scenario = scenario
        self._halved = scenario.halved if scenario.training else frozenset[int]()
        self._num_chunks = scenario.num_micro_batches // scenario.chunk_size
        # Of programs, by kind and stage; those of replicas together are added when they are made.
        self._costs = [[cost * scenario.chunk_size for cost in of_kind] for of_kind in costs.of_actions]
        self._costs.append([scenario.update(stage) for stage in stages])
        cores = costs.forward_cores, *[costs.backward_cores] * 3, [1.0] * len(stages)
        self._cores = [list(of_kind) for of_kind in cores]
        if scenario.is_fused:
            self._fuse()
        # Of each device: the last programs of its stages, and their updates, in all replicas.
        self._last = {ipu: list[Task]() for ipu in scenario.ipus}
        self._updates = {ipu: list[Task]() for ipu in scenario.ipus}
        if memory is not None:
            self._links = [
                (self._new_resource(), self._new_resource()) for _ipu in range(scenario.num_ipus)
            ]
            self.step.storing = [self._new_resource() for _stage in stages]
            if not memory.phases.keeps_values:  # what any stage leaves counts
                self.step.storing = self.step.storing[:1] * len(stages)
        for replica in range(cluster.num_replicas):
            self._add_replica(replica)
        if cluster.num_replicas > 1 and scenario.training:
            self._join()

    def _new_resource(self) -> int:
        self.step.num_resources += 1
        return self.step.num_resources - 1

    def _fuse(self) -> None:
        """Makes the last stage's forward do what its backward does."""
        back = HALVES[0] if len(self._costs[0]) - 1 in self._halved else ActionKind.BACKWARD
        forwards, backwards = self._costs[ActionKind.FORWARD], self._costs[back]
        cores = self._cores[ActionKind.FORWARD]
        if together := forwards[-1] + backwards[-1]:  # on average
            cores[-1] = (forwards[-1] * cores[-1] + backwards[-1] * self._cores[back][-1]) / together
        forwards[-1], backwards[-1] = together, 0.0

    def _add_replica(self, replica: int) -> None:
        scenario, costs = self._scenario, self._scenario.costs
        stages, levels, is_training = range(costs.num_stages), scenario.levels, scenario.training
        forwards, backs = [], []
        for stage in stages:
            halves = HALVES if stage in self._halved else (ActionKind.BACKWARD,)
            kinds = (ActionKind.FORWARD, *halves) if is_training else (ActionKind.FORWARD,)
            programs = [self._add_program(kind, replica, stage) for kind in kinds]
            for before, after in itertools.pairwise(programs):
                if not (before.cost and after.cost):  # else the order on their device ensures it
                    after.reads.append(before)
            forwards.append(programs[0])
            if is_training:
                backs.append(programs[1])  # what sends to the stages before
                self._last[scenario.device_mapping[stage]].append(programs[-1])
                update = self._add_program(UPDATE, replica, stage)
                self._updates[scenario.device_mapping[stage]].append(update)
        for source in stages:
            first = bisect.bisect_left(levels, levels[source] + 1)
            for target in range(first, bisect.bisect_right(levels, levels[source] + 1)):
                self._send(forwards[source], forwards[target])
                if is_training:
                    self._send(backs[target], backs[source])
        # Values may skip stages, over other edges than those between neighbours.
        for source, target in dict.fromkeys([*costs.transfers, *costs.num_sent_bytes]):
            if levels[target] - levels[source] > 1:
                self._send(forwards[source], forwards[target])
            elif levels[source] - levels[target] > 1 and is_training:
                self._send(backs[source], backs[target])

    def _add_program(self, kind: int, replica: int, stage: int) -> Task:
        """Adds a program, and the transfers between host memory and the device around it."""
        scenario, block = self._scenario, self.step.blocks[kind][stage]
        cost, memory = self._costs[kind][stage], scenario.host_memory
        num_runs = 1 if kind in ENDING else self._num_chunks
        to = away = 0.0
        if memory is not None:
            to, away = memory.time_to(kind, stage), memory.time_from(kind, stage)
        if not (cost or (kind == UPDATE and (to or away))):  # no program: passes on what it reads
            block.append(task := Task(kind, replica, stage, 0.0, self._new_resource(), 0.0, num_runs))
            return task
        device = scenario.ipu_of(replica, scenario.device_mapping[stage])
        task = Task(kind, replica, stage, cost, device, self._cores[kind][stage], num_runs)
        process = scenario.cluster.process_of(device) if memory is None else 0
        wait = self._first_host + process, scenario.costs.host
        if kind in ENDING and (wait,) in [earlier.waits for earlier in block]:
            wait = wait[0], 0.0  # started with another replica of the process
        if memory is not None or scenario.costs.host:
            task.waits = (wait,)
        if to:
            load = Task(LOAD, replica, stage, to, self._links[device][0], 0.0, num_runs)
            load.waits = (wait[0], 0.0), (self.step.storing[stage], 0.0)
            block.append(load)
            task.reads.append(load)
        block.append(task)
        if away:
            block.append(Task(STORE, replica, stage, away, self._links[device][1], 0.0, num_runs, [task]))
        return task

    def _send(self, source: Task, target: Task) -> None:
        """Makes a program read another one's results, over a link if that takes time."""
        replica, stage = source.replica, source.stage
        if time := self._scenario.transfer(replica, (stage, target.stage)):
            link = self._new_resource()
            send = Task(SEND, replica, stage, time, link, CORES_OF_TRANSFER, source.num_runs, [source])
            send.target = target.stage
            self.step.blocks[source.kind][stage].append(send)
            source = send
        target.reads.append(source)

    def _join(self) -> None:
        """Adds what replicas do together, once per device, with its first stage."""
        scenario, mapping = self._scenario, self._scenario.device_mapping
        is_sharded = scenario.cluster.shards_optimizer_state
        for number in (1, 1) if is_sharded else (2, 0):  # half rings to reduce, and to gather
            self._costs.append([number * scenario.half_ring(ipu) for ipu in mapping])
            self._cores.append([0.0] * len(mapping))
        for ipu in scenario.ipus:
            first = mapping.index(ipu)
            reductions = self._meet(REDUCE, first, self._last[ipu])
            for update in self._updates[ipu]:
                update.reads.append(reductions[update.replica])
            self._meet(GATHER, first, self._updates[ipu])

    def _meet(self, kind: int, stage: int, reads: list[Task]) -> list[Task]:
        """Adds programs that begin when all replicas of a device have come this far."""
        meeting = Task(MEET, 0, stage, 0.0, self._new_resource(), 0.0, 1, reads)
        self.step.blocks[kind][stage].append(meeting)
        replicas = range(self._scenario.cluster.num_replicas)
        programs = [self._add_program(kind, replica, stage) for replica in replicas]
        for program in programs:
            program.reads.append(meeting)
        return programs


# When tasks run, if devices wait only for data.
#
# The host of each process starts programs in the order of the timetable, and runs ahead of the devices. A
# task begins at the latest of three times: it has been started, its resource has finished the previous
# one, and all that it reads has arrived. So one pass in the order of the timetable finds them all,
# without events.
#
# In execution phases the host waits, where another phase or update begins, until all but `num_ahead` of
# those before have ended and what they leave has arrived in host memory. What a stage leaves there (or,
# where all of a micro-batch goes through host memory, any stage) must have arrived before anything of the
# stage is brought.
#
# Devices that share cores slow each other down, so no end is known before others have begun: another
# pass, 4 to 8 times slower, goes forward in time. While running tasks would keep more cores busy than
# there are, all are slowed down by that factor: egalitarian processor sharing (Kleinrock, "Time-shared
# Systems: A theoretical treatment", 1967) of tasks that may be wider than a core. All are served at the
# same rate, so the service of a task that never ends is a clock for all of them: a task ends when it
# shows what it showed at its begin, plus the task's cost. This spares a look at each running task at each
# event.

_LAST = -1  # the chunk that what ends a step reads

Order: TypeAlias = "Iterable[tuple[int, int, int]]"  # kind, stage and chunk of blocks


def run_step(scenario: Scenario, timetable: Timetable) -> Step:
    """Makes the tasks of a scenario and finds when each runs, in the order of a timetable."""
    step = make_step(scenario)
    stages = range(scenario.costs.num_stages)
    order = itertools.chain(timetable.order, itertools.product(ENDING, stages, [_LAST]))
    if scenario.cores is None:
        _run_in_order(step, scenario, order)
    else:
        _SharedCores(step, order).run(scenario.cores)
    return step


def _run_in_order(step: Step, scenario: Scenario, order: Order) -> None:
    free = [0.0] * step.num_resources
    if scenario.host_memory is not None:
        order = _in_phases(step, scenario, order, free)
    blocks = [
        [
            [
                (
                    task.resource,
                    task.cost,
                    [source.ends for source in task.reads],
                    task.waits,
                    task.begins.append,
                    task.ends.append,
                )
                for task in block
            ]
            for block in of_kind
        ]
        for of_kind in step.blocks
    ]
    for kind, stage, chunk in order:
        for resource, cost, reads, waits, add_begin, add_end in blocks[kind][stage]:
            begin = free[resource]
            for blocker, start in waits:
                started = free[blocker] = free[blocker] + start
                if started > begin:
                    begin = started
            for ends in reads:
                arrival = ends[chunk]
                if arrival > begin:
                    begin = arrival
            end = free[resource] = begin + cost
            add_begin(begin)
            add_end(end)


def _in_phases(
    step: Step, scenario: Scenario, order: Order, free: list[float]
) -> Iterator[tuple[int, int, int]]:
    """Makes the host wait where another phase or update begins: changes `free` while blocks run."""
    assert scenario.host_memory is not None
    phases = scenario.host_memory.phases
    before = collections.deque[float]()  # ends of phases that may not be over
    current: object = None
    end = 0.0  # of the phase, with what it leaves
    for kind, stage, chunk in order:
        block = step.blocks[kind][stage]
        if not block or not block[0].waits:  # not a program
            yield kind, stage, chunk
            continue
        phase = stage if kind == UPDATE else (chunk, *phases.find(ActionKind(kind), scenario.levels[stage]))
        if phase != current:
            if current is not None:
                before.append(end)
            while phases.num_ahead is not None and len(before) > phases.num_ahead:
                host, _start = block[0].waits[0]
                free[host] = max(free[host], before.popleft())
            if kind == UPDATE and isinstance(current, tuple):
                before.clear()  # updates are counted separately
            current, end = phase, 0.0
        yield kind, stage, chunk
        for task in block:
            if task.kind != SEND:
                end = max(end, task.ends[-1])
            if task.kind == STORE:
                free[step.storing[stage]] = max(free[step.storing[stage]], task.ends[-1])


class _SharedCores:
    def __init__(self, step: Step, order: Order) -> None:
        resources = range(step.num_resources)
        # What is still to run on each resource: tasks, chunks, and when the host has started them.
        self._queues = [collections.deque[tuple[Task, int, float]]() for _resource in resources]
        self._is_busy = [False for _resource in resources]
        self._readers: dict[Task, list[int]] = {task: [] for task in step}  # the resources of these
        self._now = 0.0
        self._served = 0.0
        self._demand = 0.0
        self._running: list[tuple[float, int]] = []  # the service clock at a task's end, and its resource
        self._timers: list[tuple[float, int]] = []  # when to look at a resource again
        for task in step:
            for source in task.reads:
                self._readers[source].append(task.resource)
        hosts = [0.0 for _resource in resources]
        for kind, stage, chunk in order:
            for task in step.blocks[kind][stage]:
                started = 0.0
                for host, start in task.waits:
                    started = hosts[host] = hosts[host] + start
                self._queues[task.resource].append((task, chunk, started))

    def run(self, cores: float) -> None:
        for resource in range(len(self._queues)):
            self._begin(resource)
        running, timers = self._running, self._timers
        while running or timers:
            rate = cores / self._demand if self._demand > cores else 1.0
            end = self._now + (running[0][0] - self._served) / rate if running else float("inf")
            if timers and timers[0][0] <= end:
                time, resource = heapq.heappop(timers)
                self._served += (time - self._now) * rate
                self._now = time
                self._begin(resource)
                continue
            self._served, resource = heapq.heappop(running)
            self._now = end
            task, _chunk, _started = self._queues[resource].popleft()
            self._demand = self._demand - task.cores if running else 0.0
            self._is_busy[resource] = False
            task.ends.append(end)
            for reader in self._readers[task]:
                self._begin(reader)
            self._begin(resource)

    def _begin(self, resource: int) -> None:
        """Begins the next task of a resource if all is there; if only time is missing, sets a timer."""
        if self._is_busy[resource] or not self._queues[resource]:
            return
        task, chunk, started = self._queues[resource][0]
        for source in task.reads:
            if len(source.ends) < (source.num_runs if chunk == _LAST else chunk + 1):
                return  # the task that makes it looks here again
        if started > self._now:
            heapq.heappush(self._timers, (started, resource))
            return
        self._is_busy[resource] = True
        self._demand += task.cores
        task.begins.append(self._now)
        heapq.heappush(self._running, (self._served + task.cost, resource))
