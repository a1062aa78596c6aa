"""Runs a pipeline or loop on several replicas: micro-batches in columns, and one weight update for all.

State is one for all replicas, on the rows of their devices. A column is an `Executor` with a row of one
device per stage; micro-batch k of replica r is element k * R + r of the data. The columns start their
programs in turn. Then one program per row joins what they accumulated, and the weight update runs on the
rows as it does on single devices.

A loop runs one iteration at a time. Each replica has its own carried values; what it accumulates, and the
variables that its stages assign, stay its own until the next weight update, or the end of the run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.compiler_options import CompilerOptions
from ipu_pipeline.engine.devices.feeds import Take, gather
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import Row, join, split
from ipu_pipeline.engine.devices.sharding import gather_replicas
from ipu_pipeline.engine.devices.threads import warn_unless_one_is_free
from ipu_pipeline.engine.execution import watched
from ipu_pipeline.engine.execution.agreeing import agree_on_elements
from ipu_pipeline.engine.execution.all_reduce import Parts, join_replicas, take_first
from ipu_pipeline.engine.execution.compiling import compile_ahead
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.execution.dispatching import Accumulated, Dispatching, Gather, Together
from ipu_pipeline.engine.execution.executor import Executor
from ipu_pipeline.engine.execution.gathering import gather_outputs, join_collected, join_handed
from ipu_pipeline.engine.execution.templates import Joint
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.planning.memory_plans import Brought
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.state import Handed, OfReplicas, PipelineState, Progress, RunState
from ipu_pipeline.engine.tracing.keys import as_int32
from ipu_pipeline.engine.tracing.replicas import uses_replicas
from ipu_pipeline.engine.updates.accumulators import Accumulator
from ipu_pipeline.engine.updates.environment import UpdateCounts

__all__ = ["Replicated"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Dealt:
    """A micro-batch that was placed for a replica.

    Attributes:
      replica: which one.
      generation: of the guesses which replica is next.
      element: the micro-batch, as that replica's column takes it.
    """

    replica: int
    generation: int
    element: Any


@dataclass(frozen=True, eq=False)
class PendingReplicas:
    """Micro-batches that a pipeline has run, or that a loop is about to run.

    Attributes:
      request: what they are a part of.
      count: how many there are per replica.
      accumulated: what they gave, per replica; None of a loop.
      elements: of a loop, what each replica takes of the feed.
    """

    request: Request
    count: int
    accumulated: list[Accumulated] | None
    elements: Sequence[Sequence[Any]] = ()


class Replicated(Runner[PendingReplicas]):
    """Runs a pipeline or loop on several replicas.

    Accumulators are tuples here, with an array per replica.

    Attributes:
      has_identical_keys: whether the replicas draw the random numbers that one alone would.
      joins_assigned: whether variables that stages assign are the same in all replicas after an update.
    """

    def __init__(
        self,
        residence: Residence,
        columns: Sequence[Executor],
        donate: bool,
        options: CompilerOptions,
    ) -> None:
        """Jits what the columns have in common.

        Args:
          residence: where the state of all replicas lives.
          columns: what runs the micro-batches of each replica.
          donate: whether an update may reuse the memory of the variables and optimizer state before it.
          options: XLA's, per program.
        """
        super().__init__(residence, columns[0].programs, columns[0].iterated)
        warn_unless_one_is_free(residence.rows)
        self.columns = tuple(columns)
        self._make_joint()
        for column in columns:
            column.told_as, column.gathered = self, residence.sharded
        self._options = options
        if self.iterated is None:  # of a pipeline, `fetch` waits for what stages call
            self.waits_for_python = residence.updates is not None and residence.updates.has_callbacks
        self._weight_update = WeightUpdate(residence, donate, options.update, self.waits_for_python)
        rows = [row for column in columns for row in column.residence.rows]
        self._rows = {row.devices[0]: row for row in rows}
        self.has_identical_keys, self.joins_assigned = False, True
        self._told = list(range(len(columns)))  # the replicas whose outputs this process hands on
        self._gathers_outputs = True
        self._key: tuple[Any, list[Any]] | None = None  # the last random key, and those of the replicas
        self._is_compiled = False
        self._lock = threading.Lock()
        self._num_dealt = self._generation = 0

    def keep_outputs(self) -> None:
        """Leaves what replicas collect and enqueue in their processes, each of which hands on its own.

        Raises:
          ValueError: a replica is in several processes.
        """
        for replica, column in enumerate(self.columns):
            if processes := column.residence.rows[0].processes[1:]:
                raise ValueError(
                    f"gathers_outputs=False needs each replica in one process; replica {replica} is in "
                    f"{1 + len(processes)}. Give each process the devices of whole replicas."
                )
        here = [n for n, column in enumerate(self.columns) if column.residence.rows[0].is_here]
        self._told = here or self._told
        self._gathers_outputs = False

    def _make_joint(self) -> None:
        """Gives the programs of stages that use replicas what all columns call together."""
        traced, rows = self.residence.traced, self.residence.rows
        for key, template in self.columns[0].plan.templates.items():
            stage = traced.stages[template.stage]
            if uses_replicas(stage.flat):
                row = rows[template.stage]
                if row.is_divided:
                    raise ValueError(
                        f"{stage.place} computes with other replicas (cross_replica_sum, replica_index or "
                        "synchronized batch normalization), which does not go with tensor_parallel and "
                        "num_replicas both above 1. Leave one of the three out."
                    )
                joint = Joint(template.jit_jointly(row), row)
                for column in self.columns:
                    column.plan.templates[key].joint = joint

    # Micro-batches.

    @property
    def takes_elements(self) -> bool:
        """Whether a replica reads micro-batches in this process."""
        return any(column.takes_elements for column in self.columns)

    def place_element(self, leaves: Sequence[Any]) -> Dealt:
        """A micro-batch, placed for the replica whose turn it seems to be; `fetch` knows."""
        with self._lock:
            replica, generation = self._num_dealt % len(self.columns), self._generation
            self._num_dealt += 1
        return Dealt(replica, generation, self.columns[replica].place_element(leaves))

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """The micro-batches of one update, of all replicas, on the devices that read them."""
        placed: list[Any] = [None] * len(elements)
        number = len(self.columns)
        for replica, column in enumerate(self.columns):
            own = [self._of_replica(element, replica) for element in elements[replica::number]]
            for place, element in enumerate(column.place_ahead(own)):
                placed[replica + place * number] = Dealt(replica, self._generation, element)
        return placed

    def _of_replica(self, dealt: Any, replica: int) -> Any:
        """What a replica's column takes; placed again if it was placed for another one."""
        if not isinstance(dealt, Dealt):
            return dealt  # there is no feed
        if dealt.replica == replica:
            return dealt.element
        with self._lock:  # the data ended, or began anew, in the middle of a round
            if dealt.generation == self._generation:
                self._generation += 1
                self._num_dealt += replica - dealt.replica
        return self.columns[replica].place_element(dealt.element.leaves)

    def num_fetched(self, total: int, every: int) -> int:
        """As many as all columns fetch."""
        return len(self.columns) * self.columns[0].num_fetched(total, every)

    def num_waiting(self, total: int, every: int) -> int:
        """How many a column has: each device has the micro-batches of one column."""
        return self.columns[0].num_waiting(total, every)

    # Running.

    def find_brought(self, accumulator_dtypes: Mapping[str, Any], every: int) -> Mapping[int, Brought]:
        """What execution phases bring, the same in each replica; arguments as of `plan_memory`."""
        return self.columns[0].find_brought_for(self._weight_update, accumulator_dtypes, every)

    def compile(self, state: RunState, request: Request) -> None:
        """Compiles the programs of all columns, and those of the weight update."""
        if self._is_compiled:
            return
        columns = [
            column.as_column(own, request.of_replica(replica))
            for replica, (column, own) in enumerate(
                zip(self.columns, self._split_state(state), strict=True)
            )
        ]
        chunk = ChunkForm(self.columns[0].chunk_size)
        found = compile_ahead(
            columns, self._weight_update, chunk, self._options, not self.has_callbacks, self.kept
        )
        for column in self.columns:
            column.note_compiled(found)
        self.temporary_bytes, self.residual_bytes = found
        self._is_compiled = True

    def fetch(self, state: RunState, request: Request, take: Take) -> PendingReplicas:
        """Runs the micro-batches of an update, those of all replicas at the same time.

        Of a loop it only gets those of an iteration.
        """
        self.compile(state, request)
        take_of = self._take_everywhere(self._deal(take), 1 if self.iterated else request.every)
        if self.iterated is not None:
            return PendingReplicas(
                request,
                1,
                None,
                self._of_each(lambda replica, column: column.take_iteration(take_of(replica))),
            )
        states = self._split_state(state)

        def accumulate(replica: int, column: Executor) -> Dispatching:
            return column.accumulating(states[replica], request.of_replica(replica), take_of(replica))

        dispatching = self._of_each(accumulate)
        return PendingReplicas(
            request, request.every, self._finish_in_turn(dispatching, state.pipeline.variables)
        )

    def _take_everywhere(self, take_of: Callable[[int], Take], count: int) -> Callable[[int], Take]:
        """Gets so many micro-batches of each replica in all processes, or raises in all of them."""
        if not self.residence.has_peers:
            return take_of
        readers = {
            (replica, device.process_index): device
            for replica, column in enumerate(self.columns)
            for row in column.fed_rows
            for device in row.devices
        }
        if not readers:
            return take_of
        error: Exception | None = None
        taken: list[Iterator[Any]] = []
        for replica, column in enumerate(self.columns):
            elements: list[Any] = []
            if column.is_fed_here:
                try:
                    elements = gather(take_of(replica), count, count)
                except Exception as raised:
                    error = error or raised
            taken.append(iter(elements))
        agree_on_elements(self.residence, list(readers.values()), error)
        return lambda replica: lambda wanted: list(itertools.islice(taken[replica], wanted))

    def _of_each(self, function: Callable[[int, Executor], T]) -> list[T]:
        """What a function of a replica and its column gives for each.

        It raises the first error once all were tried, since other processes wait for each of them.
        """
        found, errors = [], []
        for replica, column in enumerate(self.columns):
            try:
                found.append(function(replica, column))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _deal(self, take: Take) -> Callable[[int], Take]:
        """What gives each replica its micro-batches, dealt out in turn.

        Args:
          take: gives those of all of them.
        """
        number, size = len(self.columns), self.columns[0].chunk_size
        waiting: list[collections.deque[Any]] = [collections.deque() for _column in self.columns]

        def take_of(replica: int) -> Take:
            def take_some(wanted: int) -> list[Any]:
                if not waiting[replica]:
                    for place, element in enumerate(gather(take, number * size, number * size)):
                        if self.columns[place % number].takes_elements:
                            waiting[place % number].append(self._of_replica(element, place % number))
                return [waiting[replica].popleft() for _number in range(min(wanted, len(waiting[replica])))]

            return take_some

        return take_of

    def run(self, state: RunState, pending: PendingReplicas) -> Progress:
        """Joins what the replicas gave, and runs the weight update; of a loop, the iteration before."""
        request, found = pending.request, pending.accumulated
        if found is None:
            found = self._iterate(state, pending)
        parts = found
        if self.residence.has_peers:
            self.residence.begin_step()
        if self._gathers_outputs:
            parts = gather_outputs(self.residence, parts)
        read_first, read_last = self._weight_update.read
        if self.needs_outputs and state.pipeline.optimizer_state is None:
            first = self._first_of([part.first_outputs for part in parts], read_first)
            state = self.with_optimizer(state, first)
        state = self.with_optimizer(state, None)
        before = state.pipeline
        leaves = jax.tree.leaves(before.optimizer_state)
        updated: list[Handed] = []
        step = int(as_int32(before.execution_count))
        assigned = [part.assigned for part in parts]
        accumulated = [part.accumulators for part in parts]
        is_full = state.num_accumulated + pending.count == request.every
        if is_full:
            variables, means, accumulators = self._reduce(accumulated, assigned, step)
        else:
            variables = self._join_assigned(assigned)
            accumulators = {key: tuple(own[key] for own in accumulated) for key in accumulated[0]}
        if is_full and self.residence.updates is not None:
            made = self._weight_update.run(
                before.variables,
                leaves,
                means,
                self._first_of([part.last_outputs for part in parts], read_last),
                UpdateCounts(request.every, int(as_int32(before.update_count))),
                watched.watched_updates(self, self._weight_update, step),
            )
            leaves = made.state_leaves
            variables = {**variables, **made.variables}
            updated += [Handed(made.enqueued, None)] * bool(made.enqueued)
        after = self.advance(state, variables, leaves, accumulators, pending.count, request.every)
        told = [parts[replica] for replica in self._told]
        return Progress(
            after,
            [OfReplicas(values) for values in zip(*(part.carried for part in parts), strict=True)],
            [join_collected(some) for some in zip(*(part.collected for part in told), strict=True)],
            pending.count * (len(self.columns) if self.iterated is None else 1),
            [join_handed(some) for some in zip(*(part.enqueued for part in told), strict=True)],
            updated,
        )

    def _iterate(self, state: RunState, pending: PendingReplicas) -> list[Accumulated]:
        """Runs an iteration of a loop in each replica."""
        states = self._split_state(state)
        dispatching = [
            column.iterating(states[replica], pending.request.of_replica(replica), elements)
            for replica, (column, elements) in enumerate(zip(self.columns, pending.elements, strict=True))
        ]
        return self._finish_in_turn(dispatching, state.pipeline.variables)

    def settle(self, state: RunState) -> RunState:
        """The state at the end of a loop's run: the same for all replicas, as after a weight update.

        Accumulators become their means over the replicas, from which each replica goes on: since they are
        linear in the gradients, the mean at the weight update is the same.
        """
        number, pipeline = len(self.columns), state.pipeline
        parts = {name: self._split(pipeline.variables[name]) for name in self.assigned}
        assigned = [{name: own[replica] for name, own in parts.items()} for replica in range(number)]
        accumulated = [
            {key: own[replica] for key, own in state.accumulators.items()} for replica in range(number)
        ]
        if self.residence.has_peers:
            self.residence.begin_step()
        variables, means, _zeros = self._reduce(
            accumulated, assigned, int(as_int32(pipeline.execution_count))
        )
        pipeline = dataclasses.replace(pipeline, variables={**pipeline.variables, **variables})
        return RunState(pipeline, means, state.num_accumulated)

    def make_accumulators(
        self, dtypes: Mapping[str, Any], known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Accumulators, per replica: zeros, or what `settle` left."""
        if known:
            placed = self.residence.make_accumulators(dtypes, known)
            return {key: tuple(self._split(value)) for key, value in placed.items()}
        made = [column.make_accumulators(dtypes) for column in self.columns]
        return {key: tuple(own[key] for own in made) for key in made[0]}

    def _gather(self, arrays: Sequence[Any], stage: int) -> list[list[Any]]:
        """Variables of a stage, of which the replicas have parts, whole for each replica."""
        whole = gather_replicas(arrays, self.residence.rows[stage])
        return [list(own) for own in zip(*map(self._split, whole), strict=True)]

    def _finish_in_turn(
        self, dispatching: Sequence[Dispatching], variables: Mapping[str, Any]
    ) -> list[Accumulated]:
        """Has the columns, which have the same dispatches, go on by one of them in turn, to the end."""
        found: list[Accumulated] = []
        given: list[Any] = [None] * len(dispatching)
        with contextlib.ExitStack() as stack:
            for one in dispatching:
                stack.callback(one.close)
            while not found:
                together = []
                for one, results in zip(dispatching, given, strict=True):
                    try:
                        together.append(one.send(results))
                    except StopIteration as stop:
                        found.append(stop.value)
                waiting = [one for one in together if isinstance(one, Together)]
                asking = next((one for one in together if isinstance(one, Gather)), None)
                given = [None] * len(dispatching)
                if waiting:
                    given = self._run_together(waiting)
                elif asking is not None:
                    given = self._gather([variables[name] for name in asking.names], asking.stage)
        return found

    def _run_together(self, waiting: Sequence[Together]) -> list[list[Any]]:
        """Runs a program for all replicas at once; returns the results of each."""
        template = waiting[0].template
        joint = template.joint
        assert joint is not None
        given = zip(*(one.arguments for one in waiting), strict=True)
        arguments = [join(parts, joint.row) for parts in given]
        watcher, program = watching.current(), joint.row.program(joint.jitted)
        if watcher is None or not joint.row.is_here:
            made = program(*arguments)
        else:
            size = self.columns[0].chunk_size
            launch = watched.launch_of(self, template, waiting[0].step, waiting[0].first, size)
            launch = dataclasses.replace(launch, devices=joint.row.first_devices)
            made = watcher.run(launch, program, arguments)
        return [list(results) for results in zip(*map(self._split, made), strict=True)]

    # State.

    def _split_state(self, state: RunState) -> list[RunState]:
        """The state as each column has it; of the optimizer's, only the loss scale."""
        pipeline, number = state.pipeline, len(self.columns)
        variables: list[dict[str, Any]] = [{} for _column in self.columns]
        for name in self.residence.traced.variables:
            if name in self.residence.sharded:
                continue
            for own, part in zip(variables, self._split(pipeline.variables[name]), strict=True):
                own[name] = part
        scales = [pipeline.optimizer_state] * number
        updates = self.residence.updates
        if pipeline.optimizer_state is not None:
            assert updates is not None
            leaves: list[list[Any]] = [[0] * len(updates.state_leaves) for _column in self.columns]
            if updates.loss_scale is not None:
                place = updates.loss_scale.leaf
                scale = jax.tree.leaves(pipeline.optimizer_state)[place]
                for own_leaves, part in zip(leaves, self._split(scale), strict=True):
                    own_leaves[place] = part
            scales = [updates.state_tree.unflatten(own_leaves) for own_leaves in leaves]
        return [
            RunState(
                PipelineState(
                    variables[replica],
                    scales[replica],
                    pipeline.update_count,
                    pipeline.execution_count,
                    self._fold(pipeline.key)[replica],
                ),
                {key: parts[replica] for key, parts in state.accumulators.items()},
                state.num_accumulated,
            )
            for replica in range(number)
        ]

    def _split(self, array: Any) -> list[Any]:
        """An array as each column has it."""
        return split(array, [self._rows[device] for device in array.sharding.mesh.devices[:, 0]])

    def _fold(self, key: Any) -> list[Any]:
        """The key of each replica. The last ones are remembered: steps have the same."""
        if self.has_identical_keys:
            return [key] * len(self.columns)
        known = self._key
        if known is None or known[0] is not key:
            folded = [jax.random.fold_in(key, np.uint32(replica)) for replica in range(len(self.columns))]
            known = self._key = (key, folded)
        return known[1]

    # What the replicas gave.

    def _join_assigned(self, assigned: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Variables that stages assigned, of each replica its own, by full name."""
        rows, owners = self.residence.rows, self.residence.traced.owners
        return {name: join([own[name] for own in assigned], rows[owners[name]]) for name in assigned[0]}

    def _reduce(
        self, accumulated: Sequence[Mapping[str, Any]], assigned: Sequence[Mapping[str, Any]], step: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What replicas accumulated and assigned in the step of that number, joined.

        Args:
          accumulated: of each replica, by key; the memory is taken.
          assigned: of each replica, by full name.
          step: for whoever asks how far this process has come.

        Returns:
          Variables that stages assign, by full name: the means of floating ones, else those of the first
          replica; or of each replica its own. Accumulators by key: their means. And zeros in the memory of
          those, per replica.
        """
        rows, owners = self.residence.rows, self.residence.traced.owners
        by_row: dict[Row, Parts] = {}

        def parts_of(stage: int) -> Parts:
            return by_row.setdefault(rows[stage], Parts())

        plan = self.residence.accumulator_plan
        for key in accumulated[0]:
            stage = (plan.extra.get(key) or Accumulator(key, owners[key])).stage
            own = [part[key] for part in accumulated]
            if self.residence.offloads_accumulators:
                columns = [column.residence.rows[stage] for column in self.columns]
                own = [put([array], row)[0] for array, row in zip(own, columns, strict=True)]
            parts_of(stage).accumulators[key] = own
        variables: dict[str, Any] = {}
        if self.joins_assigned:
            for name in assigned[0]:
                parts_of(owners[name]).assigned[name] = [part[name] for part in assigned]
        else:
            variables = self._join_assigned(assigned)
        means: dict[str, Any] = {}
        zeros: dict[str, Any] = {}
        for row, own_parts in by_row.items():
            made = join_replicas(row, own_parts, rows.index(row), step)
            variables |= made.assigned
            means |= made.means
            for key, zero in made.zeros.items():
                (zero,) = put([zero], row, self.residence.offloads_accumulators)
                zeros[key] = tuple(self._split(zero))
        return variables, means, zeros

    def _first_of(self, outputs: Sequence[Sequence[Any]], read: set[Any]) -> list[Any]:
        """The first replica's leaves of what the last stage returned, on its row, where they are read."""
        found: list[Any] = [None] * len(outputs[0])
        row = self.residence.rows[-1]
        if read:
            parts = {place: [leaves[place] for leaves in outputs] for place in sorted(read)}
            for place, value in take_first(row, parts).items():
                found[place] = value
        return found
