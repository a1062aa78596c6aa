"""Simulates other schedules, gradient accumulation counts and splits. No JAX.

Each is simulated with IPUs that wait only for data, as the engine's do. The costs of a micro-batch are
those that are known: another count changes the number of micro-batches, another split moves work between
neighbouring stages. Another cluster has the same devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import ScheduleError
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import Cluster
from ipu_pipeline.engine.schedules.costs import Memory
from ipu_pipeline.engine.schedules.named import named_schedules, schedule_name
from ipu_pipeline.engine.schedules.scenarios import Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.timetables import MAX_ACTIONS

__all__ = ["Layer", "Variant", "what_if"]

_MOVED = 0.1  # share of a mean stage, where no layers are known
_LEAST_CHUNKS = 4  # in a step; with fewer, stages would hardly overlap
_MAX_SLOTS = 2**24  # for Sequential, whose IPUs mostly wait: each has a slot for every time-step
_COUNTS = (0.5, 2.0, 4.0)  # times the gradient accumulation count


@dataclass(frozen=True)
class Layer:
    """A part of a stage that another stage could have.

    Attributes:
      name: its name, for people.
      forward: its part of the stage's forward, in the unit of the costs.
      backward: its part of the stage's backward, in the unit of the costs.
      num_constant_bytes: what it always takes of its IPU's memory.
      num_held_bytes: what it holds for each micro-batch in flight.
    """

    name: str
    forward: float
    backward: float = 0.0
    num_constant_bytes: int = 0
    num_held_bytes: int = 0


@dataclass(frozen=True)
class Variant:
    """A variant of a scenario: a row of the table of predictions.

    Attributes:
      change: what differs: "" for nothing, "schedule", "gradient accumulation count", "schedule and
        gradient accumulation count", "micro-batches per program", "cluster" or "split".
      schedule: the name of the schedule, or of its function.
      num_micro_batches: the gradient accumulation count.
      chunk_size: micro-batches that a program handles.
      split: what moves, from which stage to which; "" for nothing.
      step_time: the time of a step, in the unit of the costs.
      samples_per_second: samples per second, with costs in seconds.
      utilisation: the share of the step in which IPUs compute.
      num_peak_bytes: the most that an IPU holds; None if that is not known.
      gain: the gain in samples per second over the unchanged scenario, as a share: 0.1 for a tenth more.
      scenario: what was simulated.
      cluster: what is different about the cluster; "" for nothing.
    """

    change: str
    schedule: str
    num_micro_batches: int
    chunk_size: int
    split: str
    step_time: float
    samples_per_second: float
    utilisation: float
    num_peak_bytes: int | None
    gain: float
    scenario: Scenario
    cluster: str = ""


def what_if(
    scenario: Scenario,
    layers: Sequence[Sequence[Layer]] | None = None,
    counts: Sequence[int] | None = None,
) -> list[Variant]:
    """Simulates variants of a scenario that differ in one thing, or in the schedule and the count.

    Larger chunks are simulated if the host takes time to start programs. Half, twice and four times the
    number of processes are simulated where there are replicas or processes, and all have equally many
    devices in a row.
    Where execution phases bring anything from host memory, only other counts are simulated: what the other
    variants would bring is not known here.
    Replicas are also simulated with shared optimizer state, or without if it is shared. The effect on
    memory is not known here.

    Args:
      scenario: the pipeline as it is.
      layers: the layers of each stage, in order. Then a neighbouring split moves the last layer of a stage
        to the next one, or the first layer to the one before. None: it moves a tenth of a mean stage.
      counts: gradient accumulation counts; None: half, twice and four times the present one.

    Returns:
      The scenario itself first, then other counts and schedules, then larger chunks, then other clusters,
      then other splits.
      Variants are left out that have more actions than a schedule may have, or that a schedule function or
      timetable cannot do, and Sequential where writing it down takes long.

    Raises:
      ValueError: there is not one list of layers per stage, or a layer takes more than its stage.
    """
    if layers is not None and len(layers) != scenario.costs.num_stages:
        raise ValueError(
            f"what_if: layers must have a list for each of the {scenario.costs.num_stages} stages; got "
            f"{len(layers)}."
        )
    count, size = scenario.num_micro_batches, scenario.chunk_size
    if counts is None:
        found = [round(count * factor) for factor in _COUNTS]
        counts = [other for other in found if other >= size and other % size == 0]
    own = _simulate(scenario, "", "", None)
    rows = [own]
    schedules = [scenario.schedule]
    if scenario.host_memory is None:  # execution phases run one after another
        schedules += [name for name in named_schedules() if name != scenario.schedule]
    for schedule in schedules:
        for other in dict.fromkeys([count, *counts]):
            is_own = schedule == scenario.schedule
            if is_own and (other == count or isinstance(schedule, Timetable)):
                continue
            parts = ["schedule"] * (not is_own)
            parts += ["gradient accumulation count"] * (other != count)
            changed = dataclasses.replace(scenario, schedule=schedule, num_micro_batches=other)
            slots = changed.num_actions * (len(changed.ipus) if schedule == "sequential" else 1)
            if changed.num_actions <= MAX_ACTIONS and slots <= _MAX_SLOTS:
                with contextlib.suppress(ScheduleError):
                    rows.append(_simulate(changed, " and ".join(parts), "", own))
    is_in_phases = scenario.host_memory is not None
    if scenario.costs.host and not is_in_phases and not isinstance(scenario.schedule, Timetable):
        for larger in (2 * size, 4 * size):
            if count % larger == 0 and count // larger >= _LEAST_CHUNKS:
                changed = dataclasses.replace(scenario, chunk_size=larger)
                rows.append(_simulate(changed, "micro-batches per program", "", own))
    for name, cluster in _other_clusters(scenario):
        row = _simulate(dataclasses.replace(scenario, cluster=cluster), "cluster", "", own)
        rows.append(dataclasses.replace(row, cluster=name))
    for split, changed in () if is_in_phases else _neighbours(scenario, layers):
        rows.append(_simulate(changed, "split", split, own))
    return rows


def _simulate(scenario: Scenario, change: str, split: str, before: Variant | None) -> Variant:
    step_time = predict_step_time(scenario)
    work = sum(scenario.work_of_ipus().values())
    rate = scenario.num_samples / step_time if step_time else float("inf")
    schedule = scenario.schedule
    return Variant(
        change,
        "timetable" if isinstance(schedule, Timetable) else schedule_name(schedule),
        scenario.num_micro_batches,
        scenario.chunk_size,
        split,
        step_time,
        rate,
        work / (len(scenario.ipus_of_replicas) * step_time) if step_time else 0.0,
        _find_peak(scenario),
        0.0 if before is None or not step_time else rate / before.samples_per_second - 1.0,
        scenario,
    )


def _other_clusters(scenario: Scenario) -> Iterator[tuple[str, Cluster]]:
    """Clusters of the same devices that differ in one thing, each with a name for it."""
    cluster, costs = scenario.cluster, scenario.costs
    num_replicas, number = cluster.num_replicas, cluster.num_processes
    num_devices = num_replicas * scenario.num_ipus

    def spread(num_processes: int) -> tuple[int, ...]:
        return Cluster.of(num_replicas, scenario.num_ipus, num_processes).processes

    is_alone = num_devices == scenario.num_ipus and number == 1
    if (
        costs.host
        and not is_alone
        and not num_devices % number
        and cluster.processes in ((), spread(number))
    ):
        for other in (number // 2, number * 2, number * 4):
            if other and not num_devices % other:
                name = f"{other} process{'es' * (other > 1)}"
                yield name, dataclasses.replace(cluster, processes=spread(other))
    if num_replicas > 1 and any(costs.update) and scenario.training:
        sharing = cluster.shards_optimizer_state
        name = "each replica with all optimizer state" if sharing else "optimizer state shared by replicas"
        yield name, dataclasses.replace(cluster, shards_optimizer_state=not sharing)


def _find_peak(scenario: Scenario) -> int | None:
    """The most that an IPU holds if all its stages hold their maximum at the same time."""
    if scenario.memory is None:
        return None
    held = dict.fromkeys(scenario.ipus, 0)
    fullest, memory = scenario.timetable().fullest, scenario.memory
    for stage, ipu in enumerate(scenario.device_mapping):
        sizes = memory.num_held_bytes[stage], memory.num_between_bytes[stage]
        held[ipu] += scenario.chunk_size * max(
            before * sizes[0] + between * sizes[1] for before, between in fullest[stage]
        )
    return max(held[ipu] + scenario.memory.num_constant_bytes[ipu] for ipu in scenario.ipus)


def _neighbours(
    scenario: Scenario, layers: Sequence[Sequence[Layer]] | None
) -> Iterator[tuple[str, Scenario]]:
    """Splits that move one layer of a scenario over one edge."""
    levels, ipus = scenario.levels, scenario.device_mapping
    for stage in range(scenario.costs.num_stages - 1):
        is_alone = levels.count(levels[stage]) == levels.count(levels[stage + 1]) == 1
        if not is_alone or ipus[stage] == ipus[stage + 1]:
            continue
        for source, target in ((stage, stage + 1), (stage + 1, stage)):
            moved = _to_move(scenario, layers, source, target)
            if moved is not None:
                name = f"{moved.name} from stage {source} to {target}"
                yield name, _move(scenario, moved, source, target)


def _to_move(
    scenario: Scenario, layers: Sequence[Sequence[Layer]] | None, source: int, target: int
) -> Layer | None:
    """The layer that leaves a stage; None if the stage would be left without layers or work."""
    costs = scenario.costs
    if layers is not None:
        if len(layers[source]) < 2:
            return None
        return layers[source][-1 if target > source else 0]
    one = costs.forward[source] + costs.backward[source]
    share = _MOVED * (sum(costs.forward) + sum(costs.backward)) / costs.num_stages
    if share >= one:
        return None
    part = share / one
    held = 0 if scenario.memory is None else round(part * scenario.memory.num_held_bytes[source])
    return Layer(
        f"{_MOVED:.0%} of a mean stage",
        part * costs.forward[source],
        part * costs.backward[source],
        0,
        held,
    )


def _move(scenario: Scenario, layer: Layer, source: int, target: int) -> Scenario:
    def moved(name: str, values: tuple[float, ...], amount: float) -> tuple[float, ...]:
        changed = list(values)
        changed[source] -= amount
        changed[target] += amount
        if changed[source] < -1e-9 * values[source]:
            raise ValueError(
                f"what_if: the layers of a stage must not take more than the stage; the {name} of stage "
                f"{source} takes {values[source]}, that of its layer {layer.name!r} {amount}."
            )
        changed[source] = max(0.0, changed[source])
        return tuple(changed)

    costs, memory = scenario.costs, scenario.memory
    share = costs.weight_gradients[source] / costs.backward[source] if costs.backward[source] else 0.0
    costs = dataclasses.replace(
        costs,
        forward=moved("forward", costs.forward, layer.forward),
        backward=moved("backward", costs.backward, layer.backward),
        weight_gradients=moved("backward", costs.weight_gradients, share * layer.backward),
    )
    if memory is not None:
        constant, held = list(memory.num_constant_bytes), list(memory.num_held_bytes)
        between = list(memory.num_between_bytes)
        for stage, sign in ((source, -1), (target, 1)):
            constant[scenario.device_mapping[stage]] += sign * layer.num_constant_bytes
            held[stage] += sign * layer.num_held_bytes
            between[stage] = max(0, between[stage] + sign * layer.num_held_bytes)
        memory = Memory(tuple(constant), tuple(held), tuple(between))
    return dataclasses.replace(scenario, costs=costs, memory=memory)
