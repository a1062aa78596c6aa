"""Finds where to cut layers into stages: the split whose step takes least. No JAX."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario, StageEdge
from ipu_pipeline.engine.schedules.schedule_arguments import Schedule, SearchedSchedule, timetable
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.tasks import CORES_OF_TRANSFER
from ipu_pipeline.engine.schedules.timetables import Timetable

Split: TypeAlias = "tuple[int, ...]"  # the number of each stage's first layer

_NUM_WAITING = 4  # chunks that the host places ahead
_MAX_WHOLE = 200_000  # actions of a timetable that is made for what stages hold
_NUM_NEXT_BEST = 24  # splits beside the best one that are told
_MAX_SIMULATED = 64  # micro-batches; more only repeat what these do
_MAX_ACTIONS = 3_000_000  # that a search simulates in all: some seconds
_LONGER = 1.25  # than the least longest stage: how long that of a candidate may be
_NUM_CANDIDATES = 8
_NUM_TRIES = 20  # to improve the best split
_JUMPS = (1, 2, 4, 8)  # layers by which a cut moves
_SHARE_OF_OWN = 0.05  # of a step on devices of their own, where devices share cores


@dataclass(frozen=True)
class LayerMemory:
    """The memory of layers, in bytes.

    Attributes:
      num_constant_bytes: what each needs all the time: variables, optimizer state and accumulators.
      num_held_bytes: what each holds from the forward to the backward of a micro-batch, with its inputs.
      num_between_bytes: what each holds between the halves of its backward, per micro-batch.
      num_temporary_bytes: what the programs of each take while they run.
      joined: what several layers hold of a micro-batch, such as one's result that is the next one's input,
        which is there once in a stage: as the layers, and the bytes that each but one of them counts.
      shared: variables of several layers, as the layers and the bytes that each of them counts.
      fed: leaves of the micro-batch, as the layers that read them and the bytes in a micro-batch.
    """

    num_constant_bytes: tuple[int, ...]
    num_held_bytes: tuple[int, ...]
    num_between_bytes: tuple[int, ...]
    num_temporary_bytes: tuple[int, ...]
    joined: tuple[tuple[tuple[int, ...], int], ...] = ()
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    fed: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True)
class SentValue:
    """A value of a micro-batch that layers send each other; each stage gets it once.

    Attributes:
      maker: the layer that makes it.
      readers: the layers that read it.
      seconds: what sending it to one stage takes.
      is_gradient: whether its gradients are sent, from stages with readers to the maker's.
    """

    maker: int
    readers: tuple[int, ...]
    seconds: float
    is_gradient: bool = False


@dataclass(frozen=True)
class FusedPair:
    """Time that two layers save in one stage, since their programs are one.

    Sums of layers alone made a cut within a layer of a transformer look free: an activation function took
    11 ms by itself, and next to nothing within its layer of 8 ms.

    Attributes:
      layers: the two layers.
      forward: seconds of the forward. Where the second is the last layer, whose forward and backward are
        one program, seconds of that.
      backward: seconds of the backward.
      weight_gradients: how much of that is of its second half, where there are halves.
    """

    layers: tuple[int, int]
    forward: float
    backward: float = 0.0
    weight_gradients: float = 0.0


@dataclass(frozen=True, eq=False)
class SplitProblem:
    """Layers that are to become stages.

    Attributes:
      layers: what layers take, as if each were a stage. Their transfers are in `sent`.
      overhead: what the shortest program takes, which each program of a layer includes, and of a stage
        once.
      num_stages: the number of stages; there are at least as many layers.
      schedule: see `Scenario`. A searched one is searched afterwards: splits are judged by "zero_bubble".
      num_micro_batches: per weight update.
      device_mapping: the device of each stage.
      training: whether there are backwards and an update.
      memory: what layers hold; None if that is not known.
      bytes_per_ipu: the most that a device may hold; None: anything.
      chunk_sizes: the numbers of micro-batches per program that the pipeline may choose from, ascending.
      max_chunked_bytes: chunks of several may not make a stage hold more than this of micro-batches.
      sent: what layers send each other.
      fused: what layers save in one stage.
      cores: the number of cores that the devices share; None: each has what it needs.
    """

    layers: Costs
    overhead: float
    num_stages: int
    schedule: Schedule
    num_micro_batches: int
    device_mapping: tuple[int, ...]
    training: bool = True
    memory: LayerMemory | None = None
    bytes_per_ipu: int | None = None
    chunk_sizes: tuple[int, ...] = (1,)
    max_chunked_bytes: int = 0
    sent: tuple[SentValue, ...] = ()
    fused: tuple[FusedPair, ...] = ()
    cores: float | None = None
    _fullest: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = field(  # by the size of chunks
        default_factory=dict, init=False, repr=False
    )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.layers.num_stages

    def sent_from(self, layer: int) -> float:
        """The time to send a layer's results to one stage."""
        return sum(value.seconds for value in self.sent if value.maker == layer)

    @functools.cached_property
    def timetable(self) -> Timetable:
        """The timetable that splits are judged by, of a step or its beginning."""
        return self._make_timetable(self._num_simulated(1))

    def _make_timetable(self, number: int) -> Timetable:
        schedule = "zero_bubble" if isinstance(self.schedule, SearchedSchedule) else self.schedule
        return timetable(schedule, self.num_stages, number, self.device_mapping, self.training)

    def fullest(self, chunk_size: int = 1) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The moments when each stage may hold most in a whole step; see `Timetable.fullest`."""
        if chunk_size not in self._fullest:
            self._fullest[chunk_size] = self._find_fullest(chunk_size)
        return self._fullest[chunk_size]

    def _find_fullest(self, chunk_size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        count, number = self.num_micro_batches // chunk_size, self._num_simulated(chunk_size) // chunk_size
        if count == number or 3 * count * self.num_stages <= _MAX_WHOLE:
            return self._make_timetable(count).fullest
        moments = self._make_timetable(number).fullest
        fewer = self._make_timetable(number - self._num_rounds(1)).fullest
        most = [[max(map(sum, of_stage)) for of_stage in of_stages] for of_stages in (moments, fewer)]
        factors = [count / number if now > then else 1 for now, then in zip(*most, strict=True)]
        return tuple(
            tuple((math.ceil(a * factor), math.ceil(b * factor)) for a, b in of_stage)
            for of_stage, factor in zip(moments, factors, strict=True)
        )

    def _num_rounds(self, chunk_size: int) -> int:
        """The number of micro-batches after which a schedule repeats itself."""
        return chunk_size * len(set(self.device_mapping))

    def _num_simulated(self, chunk_size: int) -> int:
        """The number of micro-batches that are simulated: all, or whole rounds fewer.

        A schedule of the user's may be for one number only.
        """
        if not isinstance(self.schedule, (str, SearchedSchedule)):
            return self.num_micro_batches
        rounds = self._num_rounds(chunk_size)
        surplus = max(0, self.num_micro_batches - max(_MAX_SIMULATED, 2 * self.num_stages, 2 * rounds))
        return self.num_micro_batches - surplus // rounds * rounds

    def groups(self, split: Split) -> list[range]:
        """The layers of each stage."""
        return [range(*ends) for ends in itertools.pairwise((*split, self.num_layers))]

    def _stage_of(self, split: Split) -> list[int]:
        """The stage of each layer."""
        return [stage for stage, group in enumerate(self.groups(split)) for _layer in group]

    @functools.cached_property
    def num_joined_bytes(self) -> npt.NDArray[np.float64]:
        """The bytes that layers i up to, but without, j count more than once, as one stage."""
        # Of what several layers hold, one copy is too many for each two neighbours of them in the stage.
        joined = () if self.memory is None else self.memory.joined
        pairs = ((pair, size) for layers, size in joined for pair in itertools.pairwise(sorted(layers)))
        return self._sum_within(pairs)

    @functools.cached_property
    def num_saved_seconds(self) -> tuple[npt.NDArray[np.float64], ...]:
        """The time that layers i up to, but without, j save: forward, backward and its second half."""
        return tuple(
            self._sum_within((pair.layers, getattr(pair, name)) for pair in self.fused)
            for name in ("forward", "backward", "weight_gradients")
        )

    def _sum_within(self, pairs: Iterable[tuple[tuple[int, ...], float]]) -> npt.NDArray[np.float64]:
        """Sums over the pairs of layers that are among layers i up to, but without, j."""
        sums = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for layers, value in pairs:
            sums[min(layers), max(layers) + 1] += value
        reaching: npt.NDArray[np.float64] = sums[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        return reaching

    def _held(self, group: range) -> int:
        """The bytes that layers hold from forward to backward, as one stage."""
        assert self.memory is not None
        num_bytes = sum(self.memory.num_held_bytes[layer] for layer in group)
        return num_bytes - int(self.num_joined_bytes[group.start, group.stop])

    def costs(self, split: Split, chunk_size: int = 1) -> Costs:
        """The costs of a split's stages for a micro-batch."""
        layers = self.layers

        def joined(times: Sequence[float], saved: float) -> float:
            """The time of several programs as one."""
            nonzero = [time for time in times if time]
            if not nonzero:
                return 0.0
            computing = sum(max(time - self.overhead, 0.0) for time in nonzero)
            return max(computing - saved, 0.0) + min(self.overhead, max(nonzero)) / chunk_size

        halves = self.timetable.halved
        forward, backward, weights, update = [], [], [], []
        busy: tuple[list[float], list[float]] = ([], [])
        for stage, group in enumerate(self.groups(split)):
            inputs = [layers.backward[layer] - layers.weight_gradients[layer] for layer in group]
            second = [layers.weight_gradients[layer] for layer in group]
            first = [layers.forward[layer] for layer in group]
            full_backward = [layers.backward[layer] for layer in group]
            saved = [float(of_kind[group.start, group.stop]) for of_kind in self.num_saved_seconds]
            of_inputs = saved[1] - saved[2]
            if self._is_fused(stage):  # its forward does the backward, too, or its first half
                first += inputs if stage in halves else full_backward
                saved[0] += of_inputs if stage in halves else saved[1]
                inputs, full_backward = [], []
            forward.append(joined(first, saved[0]))
            weights.append(joined(second, saved[2]) if stage in halves else 0.0)
            own_backward = joined(inputs, of_inputs) if stage in halves else joined(full_backward, saved[1])
            backward.append(own_backward + weights[-1])
            update.append(sum(layers.update[layer] for layer in group))
            for cores, times, busy_cores in (
                (layers.forward_cores, layers.forward, busy[0]),
                (layers.backward_cores, layers.backward, busy[1]),
            ):
                total = sum(times[layer] for layer in group)
                busy_cores.append(sum(cores[n] * times[n] for n in group) / total if total else 1.0)
        stage_of = self._stage_of(split)
        transfers: dict[StageEdge, float] = {}
        for value in self.sent:
            maker = stage_of[value.maker]
            for reader in dict.fromkeys(stage_of[layer] for layer in value.readers):
                if self.device_mapping[maker] != self.device_mapping[reader]:
                    edge = (reader, maker) if value.is_gradient else (maker, reader)
                    transfers[edge] = transfers.get(edge, 0.0) + value.seconds
        return Costs.of(
            self.num_stages,
            forward=forward,
            backward=backward,
            weight_gradients=weights if halves else None,
            update=update,
            transfer=transfers,
            host=layers.host,
            forward_cores=busy[0],
            backward_cores=busy[1],
            is_fused=layers.is_fused,
        )

    def judge(self, split: Split) -> float:
        """The time that ranks the split; see `weigh`. On shared cores it is mostly work."""
        costs, number = self.costs(split), self.num_micro_batches
        unshared = self._step_time(costs)
        if self.cores is None:
            return unshared
        cores, times = costs.forward_cores + costs.backward_cores, costs.forward + costs.backward
        work = number * sum(map(operator.mul, cores, times)) + sum(costs.update)
        work += number * CORES_OF_TRANSFER * sum(costs.transfers.values())
        return weigh(unshared, max(unshared, work / self.cores))

    def step_time(self, split: Split, cores: float | None = None, chunk_size: int = 1) -> float:
        """The time of a step. Of a long one the beginning is simulated, and the rest is at its pace.

        That is the pace of the last round, or of the busiest device, if that is slower: while a pipeline
        has micro-batches in stock, it may hide that one.
        """
        return self._step_time(self.costs(split, chunk_size), cores, chunk_size)

    def _step_time(self, costs: Costs, cores: float | None = None, chunk_size: int = 1) -> float:
        def make_scenario(number: int) -> Scenario:
            is_known = chunk_size == 1 and number == self._num_simulated(1)
            return Scenario(
                costs,
                self.timetable if is_known else self._make_timetable(number // chunk_size),
                number,
                device_mapping=self.device_mapping,
                training=self.training,
                chunk_size=chunk_size,
                cores=cores,
            )

        number, rounds = self._num_simulated(chunk_size), self._num_rounds(chunk_size)
        scenario = make_scenario(number)
        step_time = predict_step_time(scenario)
        if number == self.num_micro_batches:
            return step_time
        no_updates = dataclasses.replace(costs, update=(0.0,) * self.num_stages)
        busiest = max(dataclasses.replace(scenario, costs=no_updates).work_of_ipus().values()) / number
        pace = (step_time - predict_step_time(make_scenario(number - rounds))) / rounds
        return step_time + (self.num_micro_batches - number) * max(pace, busiest)

    def live_bytes(self, split: Split, chunk_size: int = 1) -> tuple[int, ...]:
        """The bytes that each stage holds between forwards and backwards; 0 if not known."""
        memory = self.memory
        if memory is None or not self.training:
            return (0,) * self.num_stages
        sizes = []
        for stage, group in enumerate(self.groups(split)):
            before = self._held(group)
            between = sum(memory.num_between_bytes[layer] for layer in group)
            if self._is_fused(stage):
                before, between = 0, between if stage in self.timetable.halved else 0
            moments = self.fullest(chunk_size)[stage]
            sizes.append(chunk_size * max(a * before + b * between for a, b in moments))
        return tuple(sizes)

    def possible_chunk_sizes(self, split: Split) -> list[int]:
        """The numbers of micro-batches per program that a pipeline of this split may choose from."""
        sizes = [1]
        for size in self.chunk_sizes[1:]:
            if max(self.live_bytes(split, size)) > self.max_chunked_bytes:
                break
            sizes.append(size)
        return sizes

    def _is_fused(self, stage: int) -> bool:
        """Whether a stage does its forward and its backward, or the first half of that, in one program."""
        return stage == self.num_stages - 1 and self.layers.is_fused and self.training

    def num_bytes(self, split: Split) -> tuple[int, ...]:
        """The most bytes of each device, whatever chunks are chosen; empty if not known."""
        memory, mapping = self.memory, self.device_mapping
        if memory is None:
            return ()
        number = 1 + max(mapping)
        resident, running = [0] * number, [0] * number
        size = self.possible_chunk_sizes(split)[-1]
        live = self.live_bytes(split, size)
        for stage, group in enumerate(self.groups(split)):
            ipu = mapping[stage]
            temporary = max(memory.num_temporary_bytes[layer] for layer in group)
            if self._is_fused(stage):  # what its layers keep for the backward is among its temporaries
                temporary += self._held(group)
            resident[ipu] += live[stage] + sum(memory.num_constant_bytes[layer] for layer in group)
            running[ipu] = max(running[ipu], temporary)
        stage_of = self._stage_of(split)
        for layers, num_bytes in memory.shared:
            ipus = [mapping[stage_of[layer]] for layer in layers]
            for ipu in set(ipus):
                resident[ipu] -= num_bytes * (ipus.count(ipu) - 1)
        for layers, num_bytes in memory.fed:
            for ipu in {mapping[stage_of[layer]] for layer in layers}:
                resident[ipu] += _NUM_WAITING * size * num_bytes
        return tuple(constant + more for constant, more in zip(resident, running, strict=True))

    def excess(self, split: Split) -> int:
        """The bytes that the fullest device holds beyond the limit."""
        if self.bytes_per_ipu is None or self.memory is None:
            return 0
        return max(0, max(self.num_bytes(split)) - self.bytes_per_ipu)


@dataclass(frozen=True)
class FoundSplit:
    """The result of a search.

    Attributes:
      split: the best split.
      judged: what it is the best by; see `SplitProblem.judge`.
      others: the next best splits that fit, in order, each with that of its own.
      is_exact: whether all splits were simulated.
      num_simulated: the number of splits that were.
    """

    split: Split
    judged: float
    others: tuple[tuple[Split, float], ...]
    is_exact: bool
    num_simulated: int


def even_split(num_layers: int, num_stages: int) -> Split:
    """The split into stages of equally many layers; the first ones have one more."""
    size, more = divmod(num_layers, num_stages)
    return tuple(stage * size + min(stage, more) for stage in range(num_stages))


def weigh(unshared: float, shared: float | None) -> float:
    """The time that ranks a split, computed from its step times on unshared and on shared cores.

    On shared cores the work counts, not its balance: a GPT whose last two operations were an even stage
    copied 98 MiB of logits per micro-batch, and took 1.28 of the time of a cut by hand. A twentieth of the
    other time decides among splits for which cores take the same time.
    """
    return unshared if shared is None else shared + _SHARE_OF_OWN * unshared


def num_simulations(problem: SplitProblem) -> int:
    """The number of splits that can be simulated in some seconds."""
    return max(100, _MAX_ACTIONS // len(problem.timetable.order))


def find_split(problem: SplitProblem, most: int | None = None, initial: Iterable[Split] = ()) -> FoundSplit:
    """Finds the split that is judged best."""
    if not 1 <= problem.num_stages <= problem.num_layers:
        raise ValueError(
            f"num_stages must be from 1 to the number of layers, {problem.num_layers}; got "
            f"{problem.num_stages}."
        )
    search = _Search(problem, num_simulations(problem) if most is None else most)
    num_splits = math.comb(problem.num_layers - 1, problem.num_stages - 1)
    is_exact = num_splits <= search.most
    if is_exact:
        for cuts in itertools.combinations(range(1, problem.num_layers), problem.num_stages - 1):
            search.judge((0, *cuts))
    else:
        even = even_split(problem.num_layers, problem.num_stages)
        for candidate in dict.fromkeys([*initial, *_find_candidates(problem), even]):
            search.improve(candidate)
        search.go_on()
    ranked = sorted(search.judgements.items(), key=lambda item: (item[1], item[0]))
    best, (excess, judged) = ranked[0]
    if excess:
        assert problem.bytes_per_ipu is not None
        raise ValueError(
            "bytes_per_ipu must be enough for the fullest device, which in the best split found has "
            f"{excess + problem.bytes_per_ipu:,} bytes; got {problem.bytes_per_ipu:,}. Raise it, or take "
            "more stages, recomputation or offloading."
        )
    next_best = tuple((split, value) for split, (more, value) in ranked[1 : 1 + _NUM_NEXT_BEST] if not more)
    return FoundSplit(best, judged, next_best, is_exact, len(search.judgements))


@dataclass
class _Search:
    """Simulates splits, each once, and not more than a number of them that does not depend on the clock."""

    problem: SplitProblem
    most: int
    judgements: dict[Split, tuple[int, float]] = field(default_factory=dict)  # excess bytes, judged

    def judge(self, split: Split) -> tuple[int, float]:
        judgement = self.judgements.get(split)
        if judgement is None:
            judgement = self.problem.excess(split), self.problem.judge(split)
            self.judgements[split] = judgement
        return judgement

    def improve(self, split: Split) -> None:
        """Moves cuts for as long as that helps."""
        best = self.judge(split)
        is_better = True
        while is_better:
            is_better = False
            for neighbour in _neighbours(split, self.problem.num_layers):
                if len(self.judgements) >= self.most:
                    return
                judgement = self.judge(neighbour)
                if judgement < best:
                    split, best, is_better = neighbour, judgement, True
                    break

    def go_on(self) -> None:
        """Improves splits drawn near the best one, in the same way each time, until some are no better."""
        random = np.random.default_rng(0)
        num_layers, number = self.problem.num_layers, self.problem.num_stages - 1
        num_tries = _NUM_TRIES
        while num_tries and len(self.judgements) < self.most:
            num_tries -= 1
            best = min(self.judgements, key=lambda split: (self.judgements[split], split))
            drawn = random.normal(best[1:], num_layers / (4 * self.problem.num_stages), number)
            cuts = np.unique(np.clip(np.rint(drawn).astype(int), 1, num_layers - 1))
            if len(cuts) < number:  # some of them fell together
                continue
            before = self.judgements[best]
            self.improve((0, *map(int, cuts)))
            if min(self.judgements.values()) < before:
                num_tries = _NUM_TRIES


def _neighbours(split: Split, num_layers: int) -> Iterator[Split]:
    """The splits that differ in one cut, by one layer in two, and in several neighbouring cuts."""
    cuts = range(1, len(split))

    def moved(changes: Iterable[tuple[int, int]]) -> Split | None:
        shifted = list(split)
        for cut, by in changes:
            shifted[cut] += by
        rises = all(a < b for a, b in itertools.pairwise((*shifted, num_layers)))
        return tuple(shifted) if rises else None

    for jump, cut, sign in itertools.product(_JUMPS, cuts, (1, -1)):
        if (neighbour := moved([(cut, sign * jump)])) is not None:
            yield neighbour
    for (lower, upper), (a, b) in itertools.product(
        itertools.combinations(cuts, 2), itertools.product((1, -1), (1, -1))
    ):
        if (neighbour := moved([(lower, a), (upper, b)])) is not None:
            yield neighbour
    for jump, (first, last) in itertools.product(_JUMPS, itertools.combinations(cuts, 2)):
        for sign in (1, -1):  # all cuts from one to another
            if neighbour := moved([(cut, sign * jump) for cut in range(first, last + 1)]):
                yield neighbour


def _find_candidates(problem: SplitProblem) -> list[Split]:
    """The splits with the least longest stage, and those with a longer one that send less.

    Where memory is limited, stages that alone would hold too much are left out, and if nothing is left, the
    split whose fullest stage holds least.
    """
    alone = _find_loads(problem)
    loads = [alone] * problem.num_stages
    if problem.memory is not None and problem.bytes_per_ipu is not None:
        held_sizes = _find_held(problem, problem.memory)
        loads = [np.where(sizes <= problem.bytes_per_ipu, alone, np.inf) for sizes in held_sizes]
        if _cut_by_longest(loads) is None:
            fullest = _cut_by_longest(held_sizes)
            return [] if fullest is None else [fullest]
    least = _cut_by_longest(loads)
    if least is None:
        return []
    ends = itertools.pairwise((*least, problem.num_layers))
    longest = max(float(alone[first, end]) for first, end in ends)
    sent = _find_sent(problem.sent, problem.num_layers)
    limits = np.linspace(longest, _LONGER * longest, _NUM_CANDIDATES)
    candidates = [_cut_by_sent(loads, sent, float(limit)) for limit in limits]
    return [least, *(split for split in candidates if split is not None)]


def _spread(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The differences of running sums: of layers i up to, but without, j; infinite for no layers."""
    differences: npt.NDArray[np.float64] = sums[None, :] - sums[:, None]
    differences[np.tril_indices(len(sums))] = np.inf
    return differences


def _running_sums(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(list(values))])


def _find_loads(problem: SplitProblem) -> npt.NDArray[np.float64]:
    """The time of layers in one stage, for a micro-batch."""
    layers, overhead = problem.layers, problem.overhead
    programs = [layers.forward, layers.backward] if problem.training else [layers.forward]
    sums = [_running_sums(max(time - overhead, 0.0) for time in times) for times in programs]
    loads = _spread(sum(sums, np.zeros(1))) - sum(problem.num_saved_seconds[: len(programs)])
    return np.maximum(loads, 0.0) + overhead * len(programs)


def _find_held(problem: SplitProblem, memory: LayerMemory) -> list[npt.NDArray[np.float64]]:
    """The bytes of layers as each of the stages, without what `SplitProblem.num_bytes` adds."""
    constant, held_sums = (
        _spread(_running_sums(memory.num_constant_bytes)),
        _running_sums(memory.num_held_bytes),
    )
    is_fused = problem.layers.is_fused and problem.training
    live = _spread(held_sums) - problem.num_joined_bytes
    sizes = []
    for stage in range(problem.num_stages):
        is_last = stage == problem.num_stages - 1 and is_fused
        in_flight = 1 if is_last else max(a for a, _b in problem.fullest()[stage])
        sizes.append(constant + in_flight * np.maximum(live, 0.0) if problem.training else constant)
    return sizes


def _find_sent(sent: Iterable[SentValue], num_layers: int) -> npt.NDArray[np.float64]:
    """The time to send what crosses a cut before each layer."""
    seconds = np.zeros(num_layers + 1)
    for value in sent:
        seconds[value.maker + 1 : max(value.readers) + 1] += value.seconds
    return seconds


def _cut_by_longest(loads: Sequence[npt.NDArray[np.float64]]) -> Split | None:
    """The split whose longest stage is shortest."""
    best = loads[0][0].copy()  # by the end of the last stage
    starts = []
    for load in loads[1:]:
        longest = np.maximum(best[:, None], load)
        starts.append(longest.argmin(axis=0))
        best = longest.min(axis=0)
    return _follow(starts, len(best) - 1) if np.isfinite(best[-1]) else None


def _cut_by_sent(
    loads: Sequence[npt.NDArray[np.float64]], sent: npt.NDArray[np.float64], limit: float
) -> Split | None:
    """The split that sends least, of those whose stages take no longer than a limit."""
    best = np.where(loads[0][0] <= limit, 0.0, np.inf)
    starts = []
    for load in loads[1:]:
        total = (best + sent)[:, None] + np.where(load <= limit, 0.0, np.inf)
        starts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    return _follow(starts, len(best) - 1) if np.isfinite(best[-1]) else None


def _follow(starts: Sequence[npt.NDArray[np.intp]], end: int) -> Split:
    """The split that a dynamic program found, from its last stage back."""
    cuts: list[int] = []
    for of_stage in reversed(starts):
        end = int(of_stage[end])
        cuts.append(end)
    return (0, *reversed(cuts))
