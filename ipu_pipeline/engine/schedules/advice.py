"""Variants of a scenario, simulated, and the sentence that advises one of them. No JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.clusters import Cluster
from ipu_pipeline.engine.schedules.layer_splits import SentValue, Split, SplitProblem, find_split
from ipu_pipeline.engine.schedules.scenarios import Costs, Layer, Memory, Scenario
from ipu_pipeline.engine.schedules.schedule_arguments import MAX_ACTIONS, named_schedules, schedule_name
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.timetables import ActionKind, ScheduleError, Timetable

# Variants. The costs of a micro-batch and the transfers between stages stay the same: another count
# changes the number of micro-batches, another split moves work between stages, in whole layers if these
# are known.

_MOVED = 0.1  # share of a mean stage, where no layers are known
_LEAST_CHUNKS = 4  # in a step; with fewer, stages would hardly overlap
_MAX_SLOTS = 2**24  # for Sequential, whose devices mostly wait: each has a slot for every time-step
_LEAST_TRIED, _MOST_TRIED = 30, 300_000  # splits, and their actions, of the search for the best one
_ALIKE = 0.005  # of step times: among splits this close, the one that moves least is taken
_COUNTS = (0.5, 2.0, 4.0)  # times the gradient accumulation count


@dataclass(frozen=True)
class Variant:
    """A variant of a scenario: a row of the table of predictions.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> present, *others = engine.what_if(engine.Scenario(costs, "grouped", num_micro_batches=8))
      >>> present.schedule, present.step_time
      ('grouped', 33.0)

    Attributes:
      change: what differs: "" for nothing, "schedule", "gradient accumulation count", "schedule and
        gradient accumulation count", "micro-batches per program", "cluster" or "split"; "even" if all
        stages take equally long, see `make_even`.
      schedule: the name of the schedule, or of its function.
      num_micro_batches: the gradient accumulation count.
      chunk_size: micro-batches that a program handles.
      split: the layers that move, with their old and new stage; "" if none move. Several moves are one
        split.
      step_time: the time of a step, in the unit of the costs.
      samples_per_second: samples per second, with costs in seconds.
      utilisation: the share of the step in which devices compute.
      num_peak_bytes: the most bytes that a device holds; None if not known.
      gain: the gain in samples per second over the unchanged scenario, as a share: 0.1 for a tenth more.
      scenario: the simulated scenario.
      cluster: the difference in the cluster; "" for none.
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
    If execution phases bring anything from host memory, only other counts are simulated, as the transfers
    of the other variants are not known. Replicas are also simulated with shared optimizer state, or without
    if it is shared; the effect on memory is not known.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> variants = engine.what_if(engine.Scenario(costs, "grouped", num_micro_batches=8))
      >>> for variant in sorted(variants, key=lambda variant: variant.step_time)[:2]:
      ...     print(variant.change, variant.step_time)
      schedule and gradient accumulation count 15.0
      schedule and gradient accumulation count 16.0

    Args:
      scenario: the pipeline as it is.
      layers: the layers of each stage, in order; None: the scenario's. A neighbouring split moves the last
        layer of a stage to the next stage, or its first layer to the previous stage. The best split of all
        layers is simulated, too. If no layers are known, a tenth of a mean stage moves.
      counts: gradient accumulation counts; None: half, twice and four times the present one.

    Returns:
      The scenario itself first, then other counts and schedules, then larger chunks, then other clusters,
      then other splits.
      Left out are variants with more actions than a schedule may have, variants that a schedule function or
      timetable cannot handle, and Sequential if making its rows takes long.

    Raises:
      ValueError: there is not one list of layers per stage, or a layer takes more than its stage.
    """
    if layers is not None and len(layers) != scenario.costs.num_stages:
        raise ValueError(
            f"what_if: layers must have a list for each of the {scenario.costs.num_stages} stages; got "
            f"{len(layers)}."
        )
    if layers is not None:
        scenario = dataclasses.replace(scenario, layers=tuple(map(tuple, layers)))
    count, size = scenario.num_micro_batches, scenario.chunk_size
    if counts is None:
        candidates = [round(count * factor) for factor in _COUNTS]
        counts = [candidate for candidate in candidates if candidate >= size and candidate % size == 0]
    baseline = _simulate(scenario, "", "", None)
    rows = [baseline]
    schedules = [scenario.schedule]
    if scenario.host_memory is None:  # execution phases run one after another
        schedules += [name for name in named_schedules() if name != scenario.schedule]
    for schedule in schedules:
        for other_count in dict.fromkeys([count, *counts]):
            is_own = schedule == scenario.schedule
            if is_own and (other_count == count or isinstance(schedule, Timetable)):
                continue
            parts = ["schedule"] * (not is_own)
            parts += ["gradient accumulation count"] * (other_count != count)
            changed = dataclasses.replace(scenario, schedule=schedule, num_micro_batches=other_count)
            slots = changed.num_actions * (len(changed.ipus) if schedule == "sequential" else 1)
            if changed.num_actions <= MAX_ACTIONS and slots <= _MAX_SLOTS:
                with contextlib.suppress(ScheduleError):
                    rows.append(_simulate(changed, " and ".join(parts), "", baseline))
    is_in_phases = scenario.host_memory is not None
    if scenario.costs.host and not is_in_phases and not isinstance(scenario.schedule, Timetable):
        for larger in (2 * size, 4 * size):
            if count % larger == 0 and count // larger >= _LEAST_CHUNKS:
                changed = dataclasses.replace(scenario, chunk_size=larger)
                rows.append(_simulate(changed, "micro-batches per program", "", baseline))
    for name, cluster in _other_clusters(scenario):
        row = _simulate(dataclasses.replace(scenario, cluster=cluster), "cluster", "", baseline)
        rows.append(dataclasses.replace(row, cluster=name))
    splits = {} if is_in_phases else dict(_neighbours(scenario))
    if not is_in_phases and (best := _best_split(scenario)) is not None:
        splits.setdefault(*best)
    rows += [_simulate(changed, "split", split, baseline) for split, changed in splits.items()]
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
        for new_number in (number // 2, number * 2, number * 4):
            if new_number and not num_devices % new_number:
                name = f"{new_number} process{'es' * (new_number > 1)}"
                yield name, dataclasses.replace(cluster, processes=spread(new_number))
    if num_replicas > 1 and any(costs.update) and scenario.training:
        sharing = cluster.shards_optimizer_state
        name = "each replica with all optimizer state" if sharing else "optimizer state shared by replicas"
        yield name, dataclasses.replace(cluster, shards_optimizer_state=not sharing)


def _find_peak(scenario: Scenario) -> int | None:
    """The most that a device holds if all its stages hold their maximum at the same time."""
    if scenario.memory is None:
        return None
    totals = dict.fromkeys(scenario.ipus, 0)
    fullest, memory = scenario.timetable().fullest, scenario.memory
    for stage, ipu in enumerate(scenario.device_mapping):
        sizes = memory.num_held_bytes[stage], memory.num_between_bytes[stage]
        totals[ipu] += scenario.chunk_size * max(
            before * sizes[0] + between * sizes[1] for before, between in fullest[stage]
        )
    return max(totals[ipu] + scenario.memory.num_constant_bytes[ipu] for ipu in scenario.ipus)


def make_even(scenario: Scenario) -> Variant | None:
    """Simulates a scenario whose work is spread evenly over all stages, which no split can beat.

    Example:
      >>> costs = engine.Costs.of(2, forward=[1.0, 3.0], backward=[2.0, 6.0])
      >>> scenario = engine.Scenario(costs, "grouped", num_micro_batches=8)
      >>> schedules.make_even(scenario).step_time
      54.0

    Returns:
      The result, without memory; None if a device has several stages, or there is one stage.
    """
    costs, number = scenario.costs, scenario.costs.num_stages
    if len(set(scenario.device_mapping)) < number or number == 1 or scenario.host_memory is not None:
        return None
    even = dataclasses.replace(
        costs,
        forward=(sum(costs.forward) / number,) * number,
        backward=(sum(costs.backward) / number,) * number,
        weight_gradients=(sum(costs.weight_gradients) / number,) * number,
        update=(sum(costs.update) / number,) * number,
    )
    baseline = _simulate(scenario, "", "", None)
    changed = dataclasses.replace(scenario, costs=even, memory=None, layers=())
    return _simulate(changed, "even", "", baseline)


def _neighbours(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Splits that move one layer of a scenario over one edge."""
    levels, ipus = scenario.levels, scenario.device_mapping
    for stage in range(scenario.costs.num_stages - 1):
        is_alone = levels.count(levels[stage]) == levels.count(levels[stage + 1]) == 1
        if not is_alone or ipus[stage] == ipus[stage + 1]:
            continue
        for source, target in ((stage, stage + 1), (stage + 1, stage)):
            moved = _movable_layer(scenario, source, target)
            if moved is not None:
                yield _describe_moves([([moved], source, target)]), _move(scenario, moved, source, target)


def _movable_layer(scenario: Scenario, source: int, target: int) -> Layer | None:
    """The layer that leaves a stage; None if the stage would be left without layers or work."""
    costs = scenario.costs
    if scenario.layers:
        stage_layers = scenario.layers[source]
        return None if len(stage_layers) < 2 else stage_layers[-1 if target > source else 0]
    stage_time = costs.forward[source] + costs.backward[source]
    share = _MOVED * (sum(costs.forward) + sum(costs.backward)) / costs.num_stages
    if share >= stage_time:
        return None
    part = share / stage_time
    held_bytes = 0 if scenario.memory is None else round(part * scenario.memory.num_held_bytes[source])
    return Layer(
        f"{_MOVED:.0%} of a mean stage",
        part * costs.forward[source],
        part * costs.backward[source],
        0,
        held_bytes,
    )


def _best_split(scenario: Scenario) -> tuple[str, Scenario] | None:
    """The split of the known layers whose step is shortest; None if that is the present one, or unknown."""
    costs, layers, number = scenario.costs, scenario.layers, scenario.costs.num_stages
    movable = [len(stage_layers) for stage_layers in layers]
    if (
        max(movable, default=0) < 2
        or len(set(scenario.levels)) < number
        or len(scenario.ipus) == 1
        or isinstance(scenario.schedule, Timetable)
    ):
        return None
    # Layers as stages of a problem. A stage whose layers are not known is as good as one layer.
    listed = [
        stage_layers
        or (Layer("", costs.forward[stage], costs.backward[stage], update=costs.update[stage]),)
        for stage, stage_layers in enumerate(layers)
    ]
    homes = [(stage, layer) for stage, stage_layers in enumerate(listed) for layer in stage_layers]
    ends = list(itertools.accumulate(map(len, listed)))
    present = (0, *ends[:-1])
    halves = [
        time / total if total else 0.0
        for time, total in zip(costs.weight_gradients, costs.backward, strict=True)
    ]
    problem = SplitProblem(
        Costs.of(
            len(homes),
            forward=[layer.forward for _stage, layer in homes],
            backward=[layer.backward for _stage, layer in homes],
            weight_gradients=[halves[stage] * layer.backward for stage, layer in homes],
            update=[layer.update for _stage, layer in homes],
            host=costs.host,
            is_fused=costs.is_fused,
        ),
        0.0,
        number,
        scenario.schedule,
        scenario.num_micro_batches,
        scenario.device_mapping,
        scenario.training,
        sent=tuple(
            SentValue(
                ends[source] - 1 if source < target else present[source],
                (present[target] if source < target else ends[target] - 1,),
                seconds,
            )
            for (source, target), seconds in costs.transfers.items()
            if abs(source - target) > 1  # neighbours send each other as much wherever they are cut
        ),
        cores=scenario.cores,
    )
    # The best split, and of those as good the one that moves least.
    most = max(_LEAST_TRIED, _MOST_TRIED // max(scenario.num_actions, 1))
    search = find_split(problem, most, [present])
    alike = [
        split
        for split, judged in ((search.split, search.judged), *search.others)
        if judged <= (1 + _ALIKE) * search.judged
    ]
    stages = [stage for stage, _layer in homes]
    best = min(alike, key=lambda split: _num_moved(problem, split, stages))
    targets = [stage for stage, group in enumerate(problem.groups(best)) for _layer in group]
    # The scenario with these layers moved.
    moves: dict[tuple[int, int], list[Layer]] = {}
    changed = scenario
    for (source, layer), target in zip(homes, targets, strict=True):
        if source != target:
            moves.setdefault((source, target), []).append(layer)
            changed = _move(changed, layer, source, target)
    if not moves or any(not layer.name for moved in moves.values() for layer in moved):
        return None
    groups = [
        tuple(layer for (_home, layer), target in zip(homes, targets, strict=True) if target == stage)
        for stage in range(number)
    ]
    changed = dataclasses.replace(changed, layers=tuple(groups))
    return _describe_moves([(moved, *edge) for edge, moved in moves.items()]), changed


def _num_moved(problem: SplitProblem, split: Split, stages: Sequence[int]) -> int:
    """The number of layers in another stage than before."""
    groups = enumerate(problem.groups(split))
    return sum(stage != stages[layer] for stage, group in groups for layer in group)


def _describe_moves(moves: Sequence[tuple[Sequence[Layer], int, int]]) -> str:
    """Names what moves: the layers, where they are and where they go."""
    texts = []
    for layers, source, target in moves:
        names = [layer.name for layer in layers]
        named = " and ".join(names)
        if len(names) > 2:
            named = f"{names[0]} to {names[-1]} ({len(names)} layers)"
        texts.append(f"{named} from stage {source} to {target}")
    return ", and ".join(texts)


def _move(scenario: Scenario, layer: Layer, source: int, target: int) -> Scenario:
    def moved(name: str, values: tuple[float, ...], amount: float) -> tuple[float, ...]:
        changed = list(values)
        changed[source] -= amount
        changed[target] += amount
        if changed[source] < -1e-9 * max(values):
            raise ValueError(
                f"what_if: the layers of a stage must not take more than the stage; the {name} of stage "
                f"{source} takes {values[source]}, that of its layer {layer.name!r} {amount}."
            )
        changed[source] = max(0.0, changed[source])
        return tuple(changed)

    costs, memory = scenario.costs, scenario.memory
    share = costs.weight_gradients[source] / costs.backward[source] if costs.backward[source] else 0.0
    backward = moved("backward", costs.backward, layer.backward)
    weights = moved("backward", costs.weight_gradients, share * layer.backward)
    costs = dataclasses.replace(
        costs,
        forward=moved("forward", costs.forward, layer.forward),
        backward=backward,
        weight_gradients=tuple(map(min, weights, backward)),
        update=moved("update", costs.update, layer.update),
    )
    if memory is not None:
        constant, held_bytes = list(memory.num_constant_bytes), list(memory.num_held_bytes)
        between = list(memory.num_between_bytes)
        for stage, sign in ((source, -1), (target, 1)):
            constant[scenario.device_mapping[stage]] += sign * layer.num_constant_bytes
            held_bytes[stage] = max(0, held_bytes[stage] + sign * layer.num_held_bytes)
            between[stage] = max(0, between[stage] + sign * layer.num_held_bytes)
        memory = Memory(tuple(constant), tuple(held_bytes), tuple(between))
    layers = [list(stage_layers) for stage_layers in scenario.layers]
    if layers and layer in layers[source]:
        layers[source].remove(layer)
        layers[target].insert(0 if target > source else len(layers[target]), layer)
    return dataclasses.replace(scenario, costs=costs, memory=memory, layers=tuple(map(tuple, layers)))


# Advice.

_LEAST_GAIN = 0.02  # in samples per second; less is not worth a change
_SHOWN = 0.5  # of the time gained: shared cores show a gain of at least this part of it
_ALIKE_GAINS = 0.005  # of gains: among changes this close, one that changes a single thing is advised


@dataclass(frozen=True)
class Advice:
    """Advice on what to change.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> advice = engine.advise(engine.Scenario(costs, "grouped", num_micro_batches=8))
      >>> advice.variant.schedule, round(advice.gain, 2)
      ('zero_bubble', 0.22)

    Attributes:
      sentence: the advice, for people, in a sentence or a few.
      gain: the predicted gain in samples per second, as a share; 0 if no change is worth it.
      variant: the change; None if no change is worth it.
      limiting_stage: the longest stage of the busiest device.
      even: the result if all stages took equally long; None if a device has several stages.
    """

    sentence: str
    gain: float
    variant: Variant | None
    limiting_stage: int
    even: Variant | None = None


def advise(
    scenario: Scenario,
    layers: Sequence[Sequence[Layer]] | None = None,
    variants: Sequence[Variant] | None = None,
    describe: Callable[[float], str] = "{:.4g}".format,
    step: str = "a step",
    shared_cores: float | None = None,
) -> Advice:
    """Advises what to change: the schedule, the split or the chunks, or if these gain nothing, the count.

    A larger gradient accumulation count always helps the pipeline, but it changes the training: weights are
    updated less often. So it comes last.

    Where devices share cores, a better split may gain nothing. So the sentence gives the step time both on
    shared cores and on devices with their own cores.

    Example:
      >>> costs = engine.Costs.of(3, forward=[1.0, 1.0, 3.0], backward=[2.0, 2.0, 6.0])
      >>> scenario = engine.Scenario(costs, "grouped", num_micro_batches=8)
      >>> print(engine.advise(scenario).sentence)
      The schedule zero_bubble instead of grouped would give 5% more samples per second (...

    Args:
      scenario: the pipeline as it is.
      layers: as for `what_if`.
      variants: the result of `what_if`; None: this function calls it.
      describe: formats a time, in the costs' unit, for the sentence.
      step: the words for a step in the sentence.
      shared_cores: the number of cores that the devices share where the pipeline runs now, if the scenario
        assumes that each has its own cores.

    Returns:
      The change with the largest predicted gain, if that is at least 2% more samples per second.
    """
    variants = what_if(scenario, layers) if variants is None else variants
    limiting, even = _find_limiting(scenario), make_even(scenario)
    is_other_count = {
        has_count: [row for row in variants[1:] if ("count" in row.change) == has_count]
        for has_count in (False, True)
    }
    for rows in is_other_count.values():
        best = max(rows, key=lambda row: (row.gain, -row.num_micro_batches), default=None)
        if best is not None and best.gain >= _LEAST_GAIN:
            near = [row for row in rows if row.gain >= best.gain - _ALIKE_GAINS]
            best = min(near, key=lambda row: (" and " in row.change, -row.gain))
            sentence = _say_change(scenario, variants[0], best, limiting, describe, step)
            sentence += _say_beside(scenario, best.scenario, shared_cores, describe)
            return Advice(sentence, best.gain, best, limiting, even)
    if scenario.cores is not None and len(scenario.ipus) > 1:
        alone = advise(dataclasses.replace(scenario, cores=None), layers, describe=describe)
        if alone.variant is not None:
            shared = f"{scenario.cores:g} core{'s' * (scenario.cores != 1)}"
            sentence = (
                f"No simulated change gains {_LEAST_GAIN:.0%} on the {shared} that the devices share. "
                f"On devices with their own cores: {alone.sentence[0].lower()}{alone.sentence[1:]}"
            )
            return Advice(sentence, 0.0, None, limiting, even)
    utilisation = variants[0].utilisation
    sentence = (
        f"No simulated change gains {_LEAST_GAIN:.0%}: devices compute for {utilisation:.0%} of a step, "
        f"and stage {limiting} takes longest."
    )
    if even is not None and even.gain >= _LEAST_GAIN:
        known_layers = scenario.layers if layers is None else layers
        sentence += _say_why_not_even(known_layers[limiting] if known_layers else None, limiting, even.gain)
        sentence += _say_beside(scenario, even.scenario, shared_cores, describe)
    return Advice(sentence, 0.0, None, limiting, even)


def _say_why_not_even(layers: Sequence[Layer] | None, stage: int, gain: float) -> str:
    """The reason why even stages are not advised, though they would gain something."""
    if layers is None:
        why = f"the layers of stage {stage} are not known. Move part of it to its neighbours"
    elif not layers:
        why = f"no part of stage {stage} can be moved alone. Cut it elsewhere"
    elif len(layers) < 2:
        why = f"stage {stage} has no second layer that could move. Make its layer smaller, or cut it in two"
    else:
        why = f"no split into whole layers comes close. Cut a layer of stage {stage} in two"
    return f" Stages that take equally long would give {gain:.0%} more samples per second, but {why}."


def _say_beside(
    scenario: Scenario, changed: Scenario, shared_cores: float | None, describe: Callable[[float], str]
) -> str:
    """The step time where cores are shared, or where they are not; "" if unknown, or the same."""
    cores = shared_cores if scenario.cores is None else None
    if cores is scenario.cores or len(scenario.ipus) == 1:
        return ""
    before, after = (
        predict_step_time(dataclasses.replace(case, cores=cores)) for case in (scenario, changed)
    )
    now, then = describe(before), describe(after)
    if [now, then] == [describe(predict_step_time(case)) for case in (scenario, changed)]:
        return ""
    if cores is None:
        return f" On devices with their own cores it takes {now} now, and {then} then."
    text = f" Here the devices share {cores:g} core{'s' * (cores != 1)}"
    text += f", on which it takes {now} now, and {then} then, if nothing else runs there"
    if before - after > _SHOWN * (predict_step_time(scenario) - predict_step_time(changed)):
        return f"{text}."
    return f"{text}: this machine cannot show the gain on separate devices."


def _find_limiting(scenario: Scenario) -> int:
    work = scenario.work_of_ipus()
    ipu = max(work, key=work.__getitem__)
    stages = [stage for stage, home in enumerate(scenario.device_mapping) if home == ipu]
    return max(stages, key=lambda stage: _work_of(scenario, stage))


def _work_of(scenario: Scenario, stage: int) -> float:
    return sum(scenario.work(kind, stage) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))


def _say_change(
    scenario: Scenario,
    before: Variant,
    best: Variant,
    limiting: int,
    describe: Callable[[float], str],
    step: str,
) -> str:
    gain = f"{best.gain:.0%} more samples per second"
    parts = []
    if "schedule" in best.change:
        parts.append(f"the schedule {best.schedule} instead of {before.schedule}")
    if "count" in best.change:
        parts.append(
            f"a gradient accumulation count of {best.num_micro_batches} instead of "
            f"{before.num_micro_batches}"
        )
    if best.change == "cluster":
        before_cluster, cluster = scenario.cluster, best.scenario.cluster
        if before_cluster.num_processes != cluster.num_processes:
            parts.append(f"{best.cluster} instead of {before_cluster.num_processes}")
        else:
            verb = "sharing" if cluster.shards_optimizer_state else "not sharing"
            parts.append(f"{verb} the optimizer state between the replicas")
    if best.change == "micro-batches per program":
        parts.append(f"{best.chunk_size} micro-batches per program (dispatch_plan)")
    if best.change == "split":
        work, total = scenario.work_of_ipus(), sum(scenario.work_of_ipus().values())
        slowest = work[scenario.device_mapping[limiting]] * len(work) / total if total else 1.0
        sentence = f"moving {best.split} would give {gain}"
        if _work_of(best.scenario, limiting) < _work_of(scenario, limiting):
            sentence = (
                f"Stage {limiting} is the bottleneck: its device has {slowest:.2g} times the mean work. "
                f"{sentence[0].upper()}{sentence[1:]}"
            )
    else:
        sentence = f"{' and '.join(parts)} would give {gain}"
    sentence = sentence[0].upper() + sentence[1:]
    sentence += f" ({step} takes {describe(before.step_time)} now, and {describe(best.step_time)} then)"
    if best.num_peak_bytes is not None and before.num_peak_bytes is not None:
        more = best.num_peak_bytes - before.num_peak_bytes
        if more > 0:
            sentence += f"; the fullest device would hold {more:,} bytes more"
    if "count" in best.change:
        count = best.num_micro_batches
        sentence += f". It changes training: each weight update then takes {count} micro-batches"
    return sentence + "."
