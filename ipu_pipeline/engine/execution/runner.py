"""Runs a pipeline or loop over several devices: its stages are programs of their own, in columns.

A column is a replica's part: its programs on its devices, and its micro-batches; micro-batch k of replica r
is element k * R + r of the data. A step is a list of actions (`steps`), made from the schedule once and
followed in each step. Dispatch is asynchronous: the host runs ahead of the devices, which wait only for
data. A weight update ends the step, on the groups of all replicas.

A loop runs one iteration at a time. Each replica has its own carried values; what it accumulates, and the
variables that its stages assign, stay its own until the next weight update, or the end of the run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax

from ipu_pipeline.engine.devices.compiler_options import CompilerOptions
from ipu_pipeline.engine.devices.feeds import Supply, Take, shapes_of
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.threads import warn_unless_one_is_free
from ipu_pipeline.engine.execution import watched
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.compiling import compile_ahead
from ipu_pipeline.engine.execution.contract import Iterated, Request, Runner
from ipu_pipeline.engine.execution.held import Held
from ipu_pipeline.engine.execution.lowering import Lowering, ProgramKey
from ipu_pipeline.engine.execution.measured_costs import (
    Measured,
    make_measured,
    time_stages,
    time_transfers,
    time_updates,
)
from ipu_pipeline.engine.execution.mixed_steps import (
    MixedRun,
    ProgramsOfShapes,
    feed_mixed,
    peek_alike,
    share,
)
from ipu_pipeline.engine.execution.outputs import Accumulated, Taken, join_accumulated
from ipu_pipeline.engine.execution.phase_memory import PhasedStep, find_brought, find_host_memory
from ipu_pipeline.engine.execution.replicas import (
    Dealer,
    Reduced,
    Replicas,
    TogetherRun,
    gather_outputs,
    join_collected,
    join_handed,
)
from ipu_pipeline.engine.execution.steps import ColumnRun, Observer, StepAction, StepRun, follow
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.planning.chunking import ONE_BY_ONE, Chunking
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.chunks import ChunkForm, chunk_programs
from ipu_pipeline.engine.programs.collecting import Collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.clusters import LinkSpeed
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.schedules.host_memory import HostMemory
from ipu_pipeline.engine.state import Handed, OfReplicas, Progress, RunState
from ipu_pipeline.engine.tracing.keys import as_int32
from ipu_pipeline.engine.updates.environment import UpdateCounts

__all__ = ["ColumnRunner"]


@dataclass(frozen=True, eq=False)
class Stepped:
    """The results of a step's micro-batches."""

    columns: list[Accumulated]  # one per replica
    reduced: Reduced  # what has been joined; empty with one replica


@dataclass(frozen=True, eq=False)
class PendingStep:
    """Micro-batches that a pipeline has run, or that a loop is about to run."""

    request: Request  # the request that they are a part of
    count: int  # the number of micro-batches per replica
    stepped: Stepped | None  # their results; None in a loop, which has not run yet
    elements: Sequence[Sequence[Any]] = ()  # in a loop, what each replica takes from the feed


class ColumnRunner(Runner[PendingStep]):
    """Runs a pipeline or loop over several devices.

    Where micro-batches have several shapes, there is a runner for each of them. The first one leads: it is
    given all micro-batches, and does the weight updates. A step runs micro-batches of the same shapes by
    their runner, up to the first one with others. Once a step has had several, steps are mixed. Execution
    phases stay those of one of the shapes.

    Attributes:
      columns: each runs the micro-batches of a replica.
      replicas: splits state between the columns, and joins their results.
      dealer: deals out micro-batches to the columns.
      lowering: makes the actions of steps.
      weight_update: the weight update that follows the micro-batches.
      make_single: returns the runner for the same shapes whose programs handle one micro-batch each.
    """

    def __init__(
        self,
        placement: StatePlacement,
        homes: Sequence[StatePlacement],
        programs: Sequence[StagePrograms],
        make_timetable: Callable[[int], Timetable],
        donate: bool,
        collecting: Collecting,
        options: CompilerOptions,
        dispatch_plan: Chunking = ONE_BY_ONE,
        iterated: Iterated | None = None,
        phases: ExecutionPhases | None = None,
        lead: ColumnRunner | None = None,
        shapes: int = 0,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        `lead` is the runner that leads; None: this one. `shapes` is the number of the shapes.
        """
        super().__init__(placement, programs, iterated, homes)
        traced, updates = placement.traced, placement.updates
        if iterated is None:  # in a pipeline, `fetch` waits for what stages call
            self.waits_for_python = updates is not None and updates.has_callbacks
        self.of_shapes: list[ColumnRunner] = self.of_shapes if lead is None else lead.of_shapes
        self.make_single: Callable[[], ColumnRunner] = lambda: self
        self._lead = self if lead is None else lead
        self.weight_update: WeightUpdate = (
            WeightUpdate(placement, donate, options.update, self.waits_for_python)
            if lead is None
            else lead.weight_update
        )
        self._mixes = False  # whether micro-batches of a step run one by one, as their shapes have differed
        self._mixed: Lowering | None = None  # the actions of such steps; with phases they stay apart
        self._chunk, self._phases = ChunkForm(dispatch_plan.chunk_size), phases
        self._update_options = options.update
        carried = () if iterated is None else iterated.carried
        own = chunk_programs(traced, self.programs, self._chunk.size)
        self.columns = tuple(
            Column(
                home,
                own,
                self._chunk,
                collecting,
                self.weight_update.read,
                [traced.outputs.index(source) for source in carried],
                options,
                placement.sharded,
                phases,
                not self.has_callbacks,
            )
            for home in homes
        )
        self.shapes, self._make_timetable = shapes, make_timetable
        for column in self.columns:
            column.feed.shapes = shapes
        self.replicas, self._num_stacked = Replicas(placement, self.columns), self._chunk.num_stacked
        self.lowering = Lowering(self.columns, self.replicas, make_timetable, phases, self.has_callbacks)
        if lead is not None:
            self.lowering.observe(lead.lowering.observer)
        self.dealer = Dealer(placement, self.columns, self._chunk.size)
        alone = len(homes) == 1
        self._place_element = self.columns[0].feed.add if alone else self.dealer.place_element
        self._compiled_for: Any = None  # the kind of random key; None before
        self._told = list(range(len(homes)))  # the replicas whose outputs this process hands on
        self._gathers_outputs = True
        if len(homes) > 1:
            warn_unless_one_is_free(placement.groups)

    @property
    def chunk_size(self) -> int:
        """The number of micro-batches that a program handles."""
        return self._chunk.size

    def follow(self, make_timetable: Callable[[int], Timetable]) -> None:
        """Follows other timetables from the next step on."""
        self.lowering.follow(make_timetable)
        self._make_timetable, self._mixed = make_timetable, None

    def like(self, other: ColumnRunner) -> Self:
        """Takes over what was set in a runner for the same shapes. Returns itself."""
        self.replicas.joins_assigned = other.replicas.joins_assigned
        self.replicas.has_identical_keys = other.replicas.has_identical_keys
        self.kept, self.note = other.kept, other.note
        return self

    def observe(self, observer: Observer | None) -> None:
        """Sets the observer of what is held after each program and its transfers. None removes it."""
        for runner in self.of_shapes:
            runner.lowering.observe(observer)
            runner.make_single().lowering.observe(observer)

    def observe_held(self) -> Sequence[list[int]]:
        """Begins to measure what stages hold, with an observer."""
        numbers = range(self.replicas.number)
        held = [Held(functools.partial(self._columns_of, replica)) for replica in numbers]
        self.observe(lambda replica, *program: held[replica].look(*program))
        return [one.peaks for one in held]

    def _columns_of(self, replica: int) -> Iterator[Column]:
        """What runs the micro-batches of a replica, for each of the shapes."""
        for runner in self.of_shapes:
            yield runner.columns[replica]
            yield runner.make_single().columns[replica]

    def order(self, num_chunks: int) -> list[tuple[StepAction, int]]:
        """The actions of a step of `num_chunks` micro-batches, or chunks of them."""
        order = self.lowering.find(num_chunks)
        return [(action, chunk) for actions, chunk in order for action in actions]

    def keep_outputs(self) -> None:
        """Leaves what replicas collect and enqueue in their processes, each of which hands on its own.

        Raises:
          ValueError: a replica is in several processes.
        """
        homes = [column.placement.groups[0] for column in self.columns]
        for replica, group in enumerate(homes):
            if processes := group.processes[1:]:
                raise ValueError(
                    f"gathers_outputs=False needs each replica in one process; replica {replica} is in "
                    f"{1 + len(processes)}. Give each process the devices of whole replicas."
                )
        self._told = [replica for replica, group in enumerate(homes) if group.is_here] or self._told
        self._gathers_outputs = False

    # Micro-batches.

    @property
    def takes_elements(self) -> bool:
        """Whether a replica reads micro-batches in this process."""
        return any(column.takes_elements for column in self.columns)

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Places a micro-batch for the replica whose turn it seems to be; `fetch` decides."""
        return self._place_element(leaves)

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Puts the micro-batches of one update, of all replicas, on the devices that read them."""
        shapes = set(map(shapes_of, elements))
        if len(shapes) > 1:
            return list(elements)  # each is there already
        return self.of_shapes[min(shapes, default=0)].dealer.place_ahead(elements)

    def check_other(self, other: ColumnRunner) -> None:
        """Checks the runner for other shapes, which this one is to lead.

        Raises:
          ValueError: other stages have something to compute for these shapes.
        """
        if self.lowering.actions.keys() != other.lowering.actions.keys():
            raise ValueError(
                f"Stages have other programs {other.note} than for the first micro-batch: a stage whose "
                "inputs have no gradient has no backward. Let all shapes go the same way."
            )

    def num_waiting(self, total: int, every: int) -> int:
        """Four chunks, as the host takes several before devices are busy, or one iteration of a loop.

        Where a replica is in several processes, it is all of a step's, which are there before it begins
        (`agreeing`).
        """
        del total
        if self.iterated is not None:
            return 1
        return max(4 * self._chunk.size, every if self.columns[0].placement.has_peers else 0)

    def num_fetched(self, total: int, every: int) -> int:
        """The number of waiting micro-batches of all columns."""
        return len(self.columns) * self.num_waiting(total, every)

    # Running.

    def compile(self, state: RunState, request: Request) -> None:
        """Compiles the programs of all columns and of the weight update."""
        kind = state.pipeline.key.dtype
        if self._compiled_for == kind:
            return
        for column in self.columns:
            for template in column.plan.templates.values():
                template.function = template.jitted
        states = self.replicas.split_state(state)
        prepared = [
            column.prepare(own, request.of_replica(replica).inputs)[0]
            for replica, (column, own) in enumerate(zip(self.columns, states, strict=True))
        ]
        found = compile_ahead(
            self.replicas,
            states,
            prepared,
            self.lowering.micro_batch,
            self.weight_update if self._lead is self else None,
            self._chunk,
            self._update_options,
            not self.has_callbacks,
            self.kept,
            self.note,
        )
        self.temporary_bytes, self.residual_bytes = found
        self._compiled_for = kind

    def fetch(self, state: RunState, request: Request, take: Take) -> PendingStep:
        """Runs the micro-batches of an update. In a loop it only takes an iteration's micro-batches."""
        self.compile(state, request)
        if self.iterated is not None:
            # Processes without a device of the loop hear how it ends.
            takes = self.dealer.take_everywhere(take, 1, tells_outsiders=False)
            # All takes are tried before the first error is raised: other processes wait for each of them.
            return PendingStep(request, 1, None, _of_each(Column.take_iteration, self.columns, takes))
        supply = take if isinstance(take, Supply) else Supply(take)
        outputs = [column.begin_outputs() for column in self.columns]
        stepped: Stepped | None = None
        done, before = 0, state
        while done < request.every:
            left = dataclasses.replace(request, every=request.every - done, iteration=done)
            if self._mixes and self._phases is None:
                part, number = self._follow_mixed(before, left, supply, outputs), left.every
            else:
                runner = self.of_shapes[supply.next_shapes()] if self.of_shapes[1:] else self
                runner = runner.make_single() if self._mixes else runner
                part, number = runner.follow_alike(before, left, supply, outputs)
                if number < left.every:
                    changes_within_chunk = not number and supply.next_shapes() == runner.shapes
                    self._mixes |= changes_within_chunk or (number > 0 and self._phases is None)
                    if self._phases is not None:
                        peek_alike(supply, done + number, self.replicas.number)
            if not number:
                continue
            done += number
            stepped = part if stepped is None else _join(stepped, part)
            if done < request.every:
                before = self._after(state, stepped, done)
        assert stepped is not None
        return PendingStep(request, request.every, stepped)

    def follow_alike(
        self, state: RunState, request: Request, supply: Supply, outputs: Sequence[Taken]
    ) -> tuple[Stepped, int]:
        """Runs micro-batches of a step up to the first one with other shapes.

        Args:
          state: with what micro-batches before them have accumulated and assigned.
          request: `every` is the number of those that are left, and `iteration` of those before.
          supply: gives the micro-batches.
          outputs: what was taken of outputs, by replica.

        Returns:
          Their results, and the number of those that have run.
        """
        self.compile(state, request)
        num_chunks = request.every // self._chunk.size
        takes = self.dealer.take_everywhere(supply.alike(self.shapes), request.every)
        feeds = _of_each(Column.feed_from, self.columns, takes)
        columns, together = self.begin(state, request, feeds, num_chunks, outputs)
        num_done = follow(self.lowering.find(num_chunks), StepRun(columns, together))
        number = num_chunks if num_done is None else num_done
        stepped = Stepped([column.finish(self._num_stacked) for column in columns], together.reduced)
        return stepped, number * self._chunk.size

    def _follow_mixed(
        self, state: RunState, request: Request, supply: Supply, outputs: Sequence[Taken]
    ) -> Stepped:
        """Runs the micro-batches of a step that are left, whose shapes may differ; arguments as before."""
        if self._mixed is None:
            self._mixed = Lowering(
                self.columns,
                self.replicas,
                self._make_timetable,
                None,
                self.has_callbacks,
                {key: (ProgramsOfShapes(key, self._find_actions),) for key in self.lowering.actions},
                feed_mixed,
            )
        first: list[ColumnRun] = []

        def begin(shapes: int) -> StepRun:
            runner = self.of_shapes[shapes].make_single()
            runner.compile(state, request)
            feeds = [_fed_otherwise] * len(runner.columns)
            columns, together = runner.begin(state, request, feeds, request.every, outputs)
            if not first:
                first.extend(columns)
            return StepRun(list(map(share, columns, first)), together)

        def place(shapes: int, elements: Sequence[Any]) -> list[Sequence[Any]]:
            return self.of_shapes[shapes].make_single().dealer.place_alone(elements)

        step = int(as_int32(state.pipeline.execution_count))
        together = TogetherRun(self.replicas, state.pipeline.variables, step)
        run = MixedRun(
            first,
            together,
            take=watched.watched_take(supply, step, request.iteration),
            num_replicas=self.replicas.number,
            first=request.iteration,
            begin=begin,
            place=place,
        )
        done = request.iteration
        follow(self._mixed.find(done + request.every, num_done=done), run)
        return Stepped([column.finish(None) for column in first], together.reduced)

    def _find_actions(self, shapes: int, key: ProgramKey) -> Sequence[StepAction]:
        return self.of_shapes[shapes].make_single().lowering.actions[key]

    def _after(self, state: RunState, stepped: Stepped, done: int) -> RunState:
        """The state after the first micro-batches of a step, for those that follow them."""
        parts, replicas = stepped.columns, self.replicas
        assigned = replicas.join_assigned([part.assigned for part in parts])
        pipeline = dataclasses.replace(state.pipeline, variables={**state.pipeline.variables, **assigned})
        return RunState(pipeline, replicas.pack([part.accumulators for part in parts]), done)

    def measure(
        self,
        dtypes: Mapping[str, Any],
        host: float = 0.0,
        *,
        with_updates: bool = False,
        with_skips: bool = False,
    ) -> Measured:
        """Measures what programs, transfers and updates take, each alone, on zeros.

        Args:
          dtypes: dtype of each trained variable's accumulators.
          host: how long the host takes to start a program.
          with_updates: whether the programs of a weight update are measured, too; else they take no time.
          with_skips: whether transfers that skip stages are.
        """
        column, own = self.columns[0], self._chunk
        chunked = chunk_programs(self.placement.traced, self.programs, own.size)
        return make_measured(
            len(self.programs),
            time_stages(column.placement, self.programs, chunked, column.plan, own, dtypes),
            time_transfers(column.placement, column.plan, own, with_skips=with_skips),
            time_updates(self.weight_update, dtypes, self._update_options) if with_updates else {},
            own.size,
            host,
        )

    def begin(
        self,
        state: RunState,
        request: Request,
        feeds: Sequence[Callable[[], Sequence[Any]]],
        num_chunks: int,
        outputs: Sequence[Taken],
    ) -> tuple[list[ColumnRun], TogetherRun]:
        """Begins the actions of a step, or of some of its micro-batches."""
        states = self.replicas.split_state(state)
        columns = [
            column.begin(own, request.of_replica(replica), next_chunk, num_chunks, self._lead, taken)
            for replica, (column, own, next_chunk, taken) in enumerate(
                zip(self.columns, states, feeds, outputs, strict=True)
            )
        ]
        step = int(as_int32(state.pipeline.execution_count))
        return columns, TogetherRun(self.replicas, state.pipeline.variables, step)

    def run(self, state: RunState, pending: PendingStep) -> Progress:
        """Runs the weight update on the replicas' results. In a loop it runs the iteration first."""
        request, stepped, replicas = pending.request, pending.stepped, self.replicas
        is_full = state.num_accumulated + pending.count == request.every
        if stepped is None:
            feeds = [
                column.feed_iteration(elements, request.of_replica(replica))
                for replica, (column, elements) in enumerate(
                    zip(self.columns, pending.elements, strict=True)
                )
            ]
            outputs = [column.begin_outputs() for column in self.columns]
            columns, together = self.begin(state, request, feeds, 1, outputs)
            follow(self.lowering.find(1, is_full), StepRun(columns, together))
            stepped = Stepped([column.finish(self._num_stacked) for column in columns], together.reduced)
        parts = stepped.columns
        if self.placement.has_peers and replicas.number > 1:
            self.placement.begin_step()
            if self._gathers_outputs:
                parts = gather_outputs(self.placement, parts)
        read_first, read_last = self.weight_update.read
        first: Sequence[Any] | None = None
        if self.needs_outputs and state.pipeline.optimizer_state is None:
            first = replicas.first_of([part.first_outputs for part in parts], read_first)
        state = self.with_optimizer(state, first)
        before = state.pipeline
        leaves = jax.tree.leaves(before.optimizer_state)
        if is_full and replicas.number > 1:
            reduced = stepped.reduced
            variables, means, accumulators = reduced.assigned, reduced.means, reduced.zeros
        else:
            variables = replicas.join_assigned([part.assigned for part in parts])
            means = accumulators = replicas.pack([part.accumulators for part in parts])
        updated: list[Handed] = []
        if is_full and self.placement.updates is not None:
            made = self.weight_update.run(
                before.variables,
                leaves,
                means,
                replicas.first_of([part.last_outputs for part in parts], read_last),
                UpdateCounts(request.every, int(as_int32(before.update_count))),
                watched.watched_updates(self, self.weight_update, int(as_int32(before.execution_count))),
            )
            leaves, variables = made.state_leaves, {**variables, **made.variables}
            if replicas.number == 1:
                accumulators = made.accumulators
            enqueued = [made.enqueued[number] for number in range(len(made.enqueued))]
            updated += [Handed(enqueued, None)] * bool(enqueued)
        told = [parts[replica] for replica in self._told]
        carried = [part.carried for part in parts]
        return Progress(
            self.advance(state, variables, leaves, accumulators, pending.count, request.every),
            carried[0] if len(carried) == 1 else [OfReplicas(own) for own in zip(*carried, strict=True)],
            [join_collected(some) for some in zip(*(part.collected for part in told), strict=True)],
            pending.count * (1 if self.iterated is not None else len(parts)),
            [join_handed(some) for some in zip(*(part.enqueued for part in told), strict=True)],
            updated,
        )

    def settle(self, state: RunState) -> RunState:
        """The state at the end of a loop's run: the same for all replicas, as after a weight update.

        Accumulators become their means over the replicas, from which each replica goes on: since they are
        linear in the gradients, the mean at the weight update is the same.
        """
        replicas, pipeline = self.replicas, state.pipeline
        if replicas.number == 1:
            return state
        parts = {name: replicas.split(pipeline.variables[name]) for name in self.assigned}
        numbers = range(replicas.number)
        assigned = [{name: own[number] for name, own in parts.items()} for number in numbers]
        accumulated = [{key: own[number] for key, own in state.accumulators.items()} for number in numbers]
        if self.placement.has_peers:
            self.placement.begin_step()
        reduced, step = Reduced(), int(as_int32(pipeline.execution_count))
        for group in dict.fromkeys(self.placement.groups):
            replicas.reduce(group, accumulated, assigned, step, reduced)
        pipeline = dataclasses.replace(pipeline, variables={**pipeline.variables, **reduced.assigned})
        return RunState(pipeline, reduced.means, state.num_accumulated)

    def make_accumulators(
        self, dtypes: Mapping[str, Any], known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes accumulators, per replica: zeros, or what `settle` left."""
        replicas = self.replicas
        if replicas.number == 1:
            return super().make_accumulators(dtypes, known)
        if known:
            placed = self.placement.make_accumulators(dtypes, known)
            return {key: tuple(replicas.split(value)) for key, value in placed.items()}
        return replicas.pack([column.placement.make_accumulators(dtypes) for column in self.columns])

    # Memory.

    def find_brought(self, accumulator_dtypes: Mapping[str, Any], every: int) -> Mapping[int, Brought]:
        """What execution phases bring, by device, in each replica; arguments as for `plan_memory`."""
        step = self._find_phased(accumulator_dtypes)
        return {} if step is None else find_brought(step, every // self.chunk_size)

    def find_host_memory(self, accumulator_dtypes: Mapping[str, Any], link: LinkSpeed) -> HostMemory | None:
        """What execution phases bring and take away, for the simulator; None if nothing."""
        step = self._find_phased(accumulator_dtypes)
        return None if step is None else find_host_memory(step, link)

    def _find_phased(self, accumulator_dtypes: Mapping[str, Any]) -> PhasedStep | None:
        if self._phases is None:
            return None
        return PhasedStep(
            self._phases,
            self.columns[0],
            self.placement,
            self.programs,
            self.lowering.planned,
            self.chunk_size,
            self.residual_bytes,
            accumulator_dtypes,
            donates_accumulators=not self.has_callbacks,
            donates_state=self.weight_update.donates,
        )


def _fed_otherwise() -> Sequence[Any]:
    raise AssertionError("`feed_mixed` feeds micro-batches of several shapes.")


def _join(before: Stepped, after: Stepped) -> Stepped:
    """The results of micro-batches, and of others of the same step that follow them."""
    return Stepped(list(map(join_accumulated, before.columns, after.columns)), after.reduced)


def _of_each(
    function: Callable[[Column, Take], Any], columns: Sequence[Column], takes: Sequence[Take]
) -> list[Any]:
    """Calls a function for each column and its take. Returns the results.

    Raises the first error once all were tried, since other processes wait for each of them.
    """
    found, errors = [], []
    for column, take in zip(columns, takes, strict=True):
        try:
            found.append(function(column, take))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found
