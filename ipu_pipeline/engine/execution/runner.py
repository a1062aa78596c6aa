"""Runs a pipeline or loop over several devices by plans, one for each number of micro-batches.

Micro-batch k of replica r is element k * R + r of the data. Dispatch is asynchronous: the host runs ahead
of the devices, which wait only for data. A weight update ends the step, on the groups of all replicas.
Before it each replica has programs of its own: joint ones would make the replicas wait for each other at
every action, and XLA's client for CPUs runs such programs one at a time.

A loop runs one iteration at a time. Each replica has its own carried values; what it accumulates, and the
variables that its stages assign, stay its own until the next weight update, or the end of the run.

Where micro-batches have several shapes, there is a runner for each of them. The first one leads: it is
given all micro-batches, and does the weight updates. A step runs micro-batches of the same shapes by their
runner's plan, up to the first one with others; then another plan goes on with the same registers. Once a
step has had several shapes, plans are made for the shapes of each step. Execution phases stay those of one
of the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.device_groups import split
from ipu_pipeline.engine.devices.feeds import OtherShapes, Supply, Take, gather, shapes_of
from ipu_pipeline.engine.devices.placement import put, put_host_copies
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.xla_settings import CompilerOptions, warn_unless_one_is_free
from ipu_pipeline.engine.execution.compilation import compile_ahead, jit_zeros
from ipu_pipeline.engine.execution.contract import Iterated, Request, Runner
from ipu_pipeline.engine.execution.measured_costs import (
    Measured,
    make_measured,
    time_stages,
    time_transfers,
    time_updates,
)
from ipu_pipeline.engine.execution.observation import HeldBytes, watched_take, with_measurements
from ipu_pipeline.engine.execution.replica_data import (
    Dealer,
    FeedSlot,
    ReplicaFeed,
    ReplicaOutputs,
    gather_outputs,
    join_collected,
    join_handed,
)
from ipu_pipeline.engine.option_types import ONE_BY_ONE, Chunking
from ipu_pipeline.engine.plan.lowering import Layout, Programs
from ipu_pipeline.engine.plan.maker import FEED, NUMBERS, Maker, Recipe
from ipu_pipeline.engine.plan.memory import Sizes, Step, find_brought, find_host_memory, find_shapes
from ipu_pipeline.engine.plan.passes import UNDERWAY
from ipu_pipeline.engine.plan.plan import ALL, Plan, Registers, Value
from ipu_pipeline.engine.plan.run import Cursor, Linked, Linker, Numbers, Underway, run, watched
from ipu_pipeline.engine.planning.memory_records import Brought
from ipu_pipeline.engine.programs.accumulation import Collecting
from ipu_pipeline.engine.programs.stage_programs import (
    Binding,
    BindingKind,
    ChunkForm,
    StagePrograms,
    ValueKind,
)
from ipu_pipeline.engine.schedules.clusters import ExecutionPhases, HostMemory, LinkSpeed
from ipu_pipeline.engine.schedules.timetables import Action, Timetable
from ipu_pipeline.engine.state import Handed, OfReplicas, PipelineState, Progress
from ipu_pipeline.engine.tracing.stage_markers import as_int32, key_aval
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

_MAX_PLANS = 8  # that are kept, where the number of micro-batches is only known when the pipeline runs


@dataclass(frozen=True, eq=False)
class ReadyPlan:
    """A plan with its blocks linked, ready to be run."""

    plan: Plan
    blocks: list[list[Linked]]
    version: int  # of the functions in the blocks, see `Linker`
    is_watched: bool = True  # whether a watcher is told of it


@dataclass(eq=False)
class PendingPlan:
    """Micro-batches that have run, or in a loop are about to, and whose weight update has not."""

    request: Request
    count: int  # micro-batches per replica
    ready: ReadyPlan | None  # whose weight update is left; None in a loop
    registers: list[Any]
    elements: Sequence[Sequence[Any]] = ()  # in a loop, what each replica takes from the feed


class PlanRunner(Runner[PendingPlan]):
    """Runs a pipeline or loop over several devices.

    Attributes:
      maker: makes the plans.
      feeds: puts the micro-batches of each replica on its devices.
      dealer: deals out micro-batches to the replicas.
      linker: finds the functions of plans.
      cursor: where the last step is that was begun; None before the first one.
      held_bytes: by replica, what measures the stages' memory; empty unless `observe_held` was called.
      has_identical_keys: whether all replicas draw the same random numbers as a single one would.
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
        accumulator_dtypes: Mapping[str, Any],
        dispatch_plan: Chunking = ONE_BY_ONE,
        iterated: Iterated | None = None,
        phases: ExecutionPhases | None = None,
        lead: PlanRunner | None = None,
        other: PlanRunner | None = None,
        shapes: int = 0,
        joins_assigned: bool = True,
        has_identical_keys: bool = False,
    ) -> None:
        """Jits the programs; XLA compiles each at its first call.

        `lead` is the runner that leads; None: this one. `other` is any other runner of the pipeline, whose
        programs and registers it shares. `shapes` is the number of the shapes.
        """
        super().__init__(placement, programs, iterated, homes)
        traced, updates = placement.traced, placement.updates
        if iterated is None:  # in a pipeline, `fetch` waits for what stages call
            self.waits_for_python = updates is not None and updates.has_callbacks
        self.of_shapes: list[PlanRunner] = self.of_shapes if lead is None else lead.of_shapes
        self.make_single: Callable[[], PlanRunner] = lambda: self
        self.shapes, self._lead, self._make_timetable = shapes, lead or self, make_timetable
        self.cursor: Cursor | None = None
        self.held_bytes: list[HeldBytes] = []
        self._mixes = False  # whether plans are made for the shapes of each step
        self._chunk, self._collecting = ChunkForm(dispatch_plan.chunk_size), collecting
        self.has_identical_keys = has_identical_keys
        # Plans.
        carried = [] if iterated is None else [traced.outputs.index(source) for source in iterated.carried]
        recipe = Recipe(
            self.programs,
            collecting,
            carried,
            accumulator_dtypes if updates is not None else {},
            donate and not self.waits_for_python,
            self.has_callbacks,
            self.waits_for_python,
            phases,
        )
        self.maker: Maker = Maker(
            Layout(placement, homes, joins_assigned),
            recipe,
            Programs(options, not self.has_callbacks) if other is None else other.maker.programs,
            Registers() if other is None else other.maker.registers,
            self._chunk,
            shapes,
            None if lead is None else lead.maker,
        )
        self._phases = phases
        # The feed.
        self.feeds = [
            ReplicaFeed(
                home,
                [FeedSlot(value.what.key.index, value.group) for value in fed],
                self._chunk,
                len(carried),
                shapes,
            )
            for home, fed in zip(homes, self.maker.fed, strict=True)
        ]
        self.dealer = Dealer(placement, self.feeds, self._chunk.size)
        alone = len(homes) == 1
        self._place_element = self.feeds[0].feed.add if alone else self.dealer.place_element
        # Steps.
        self.linker: Linker = (
            Linker(self.maker.layout, collecting.collect) if other is None else other.linker
        )
        last = [home.groups[-1] for home in homes if collecting.is_summed]
        self._make_sums = [group.program(jit_zeros(collecting.avals, group.replicated)) for group in last]
        self._ready: dict[Any, ReadyPlan] = {}
        self._compiled_for: Any = None  # the kind of random key; None before
        self._output_replicas = list(range(len(homes)))  # the replicas whose outputs this process hands on
        self._gathers_outputs = True
        self._key: tuple[Any, list[Any]] | None = None  # the last random key, and the replicas' keys
        if len(homes) > 1:
            warn_unless_one_is_free(placement.groups)

    @property
    def chunk_size(self) -> int:
        """The number of micro-batches that a program handles."""
        return self._chunk.size

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.homes)

    def follow(self, make_timetable: Callable[[int], Timetable]) -> None:
        """Follows other timetables from the next step on."""
        self._make_timetable = make_timetable
        self._ready.clear()

    def like(self, source: PlanRunner) -> Self:
        """Takes over the settings of a runner for the same shapes. Returns itself."""
        self.kept, self.note = source.kept, source.note
        return self

    def observe_held(self) -> Sequence[list[int]]:
        """Starts measuring what stages hold, per replica and stage."""
        self.held_bytes = [HeldBytes(replica, len(self.programs)) for replica in range(self.num_replicas)]
        return [measurement.peaks for measurement in self.held_bytes]

    def keep_outputs(self) -> None:
        """Leaves the replicas' outputs in their processes, each of which hands on its own."""
        groups = [home.groups[0] for home in self.homes]
        for replica, group in enumerate(groups):
            if processes := group.processes[1:]:
                raise ValueError(
                    f"gathers_outputs=False needs each replica in one process; replica {replica} is in "
                    f"{1 + len(processes)}. Give each process the devices of whole replicas."
                )
        replicas = [replica for replica, group in enumerate(groups) if group.is_here]
        self._output_replicas = replicas or self._output_replicas
        self._gathers_outputs = False

    # Micro-batches.

    @property
    def takes_elements(self) -> bool:
        """Whether a replica reads micro-batches in this process."""
        return any(feed.takes_elements for feed in self.feeds)

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Places a micro-batch for the replica whose turn it seems to be; `fetch` decides."""
        return self._place_element(leaves)

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Puts the micro-batches of one update, of all replicas, on the devices that read them."""
        shapes = set(map(shapes_of, elements))
        if len(shapes) > 1:
            return list(elements)  # each is there already
        return self.of_shapes[min(shapes, default=0)].dealer.place_ahead(elements)

    def check_other(self, runner: PlanRunner) -> None:
        """Checks a runner for other shapes, before this one leads it."""
        if self.maker.code.keys() != runner.maker.code.keys():
            raise ValueError(
                f"Stages have other programs {runner.note} than for the first micro-batch: a stage whose "
                "inputs have no gradient has no backward. Let all shapes go the same way."
            )

    def num_waiting(self, total: int, every: int) -> int:
        """Four chunks, as the host takes several before devices are busy, or one iteration of a loop.

        Where a replica is in several processes, it is all of a step's, which are there before it begins
        (`agree_on_elements`).
        """
        del total
        if self.iterated is not None:
            return 1
        return max(4 * self._chunk.size, every if self.homes[0].has_peers else 0)

    def num_fetched(self, total: int, every: int) -> int:
        """The number of waiting micro-batches of all replicas."""
        return self.num_replicas * self.num_waiting(total, every)

    # Plans.

    def find_plan(self, num_chunks: int, is_full: bool = True) -> Plan:
        """The plan of a step of some chunks, or of an iteration of a loop."""
        return self.maker.make(self._make_timetable(num_chunks).order, num_chunks, is_full)

    def find_micro_batch(self) -> Plan:
        """The plan of one micro-batch or chunk, in the order of its programs, and of an update."""
        return self.maker.make([Action(kind, stage, 0) for kind, stage in self.maker.code], 1)

    def find(self, num_chunks: int, is_full: bool = True) -> ReadyPlan:
        """The plan of `find_plan`, ready to be run; the last ones are kept."""
        key = num_chunks, is_full
        ready = self._ready.get(key)
        if ready is not None and ready.version != self.linker.version:
            ready = self._ready[key] = self._link(ready.plan)
        if ready is None:
            if len(self._ready) >= _MAX_PLANS:
                self._ready.pop(next(iter(self._ready), None), None)
            plan = self.find_plan(num_chunks, is_full)
            ready = self._ready[key] = self._link(plan)
        return ready

    def _link(self, plan: Plan) -> ReadyPlan:
        version = self.linker.version  # before the functions, which another thread may let be forgotten
        return ReadyPlan(plan, self.linker.link(plan), version)

    def compile(self, state: PipelineState, request: Request) -> None:
        """Compiles the programs of a step, and of its weight update."""
        del request
        kind = state.key.dtype
        if self._compiled_for == kind:
            return
        programs = self.maker.programs
        if self._compiled_for is not None and self._lead is self:
            for program in programs:
                programs.forget_compiled(program)
        compiled = compile_ahead(
            self.find_micro_batch(),
            self.maker.layout,
            functools.partial(self._find_struct, state.key),
            self._chunk.size,
            not self.has_callbacks,
            self.kept,
            self.note,
        )
        self.temporary_bytes, self.residual_bytes = compiled
        self._compiled_for = kind
        self.linker.forget()  # programs have other functions

    def forget_trials(self) -> None:
        """Drops the programs that runners with other sizes of chunks have compiled."""
        self.maker.programs.keep_stages(self.maker.scope)
        self.linker.forget()

    def _find_struct(self, key: Any, value: Value) -> Any:
        """The shape, dtype and sharding of a value that is given or fed. `key`: a random key."""
        placement, label, group = self.placement, value.what, value.group
        shape: tuple[int, ...] = ()
        dtype: Any = np.int32
        sharding = group.replicated
        if isinstance(label, UpdateValue):
            if label.kind == UpdateKind.STATE:
                assert placement.updates is not None
                aval = placement.updates.state_leaves[label.key].aval
                shape, dtype, sharding = aval.shape, aval.dtype, placement.sharding_of_leaf(label.key)
        elif type(label) is tuple:
            aval = self._collecting.avals[label[1]]  # a sum
            shape, dtype = aval.shape, aval.dtype
        elif label.kind is BindingKind.VARIABLE:
            spec = placement.traced.variables[label.key]
            shape, dtype, sharding = spec.shape, spec.dtype, placement.sharding_of_variable(label.key)
        elif label.kind is BindingKind.ACCUMULATOR:
            name = self.maker.layout.variable_of(label.key)
            shape, dtype = placement.traced.variables[name].shape, self.maker.dtypes[name]
            sharding = placement.sharding_in_program(name, group)
        elif label.kind is BindingKind.INPUT:
            aval = placement.traced.aval(Source("input", label.key))
            shape, dtype = aval.shape, aval.dtype
        elif label.kind is BindingKind.KEY_NUMBER:
            dtype = np.uint32
        elif label.kind is BindingKind.SCALAR:
            if label.key is ValueKind.KEY:
                shape, dtype = key.shape, key.dtype
            elif label.key is ValueKind.LOSS_SCALE:
                dtype = np.float32
        else:
            aval = placement.traced.aval(label.key)
            shape, dtype = (*self._chunk.axes, *aval.shape), aval.dtype
        if value.is_away:
            sharding = sharding.with_memory_kind(group.host.memory_kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def measure(
        self, host: float = 0.0, *, with_updates: bool = False, with_skips: bool = False
    ) -> Measured:
        """Measures what programs, transfers and updates take, each alone, on zeros."""
        plan, layout = self.find_micro_batch(), self.maker.layout
        structs = find_shapes(plan, layout, functools.partial(self._find_struct, key_aval()))
        return make_measured(
            len(self.programs),
            time_stages(plan, structs),
            time_transfers(plan, layout.homes[0].groups, structs, with_skips=with_skips),
            time_updates(plan, self.placement.updates, structs) if with_updates else {},
            self._chunk.size,
            host,
        )

    # Registers before a step.

    def fill(self, plan: Plan, registers: list[Any], state: PipelineState, request: Request) -> None:
        """Fills the registers of given values, unless they are filled already."""
        registers += [None] * (len(plan.names) - len(registers))
        if self.placement.has_peers:
            self.placement.begin_step()
        keys = self.fold(state.key)
        leaves = jax.tree.leaves(state.optimizer_state)
        sums: dict[int, list[Any]] = {}
        for register, value in plan.given.items():
            label = value.what
            if registers[register] is not None:
                continue
            if isinstance(label, Binding):
                registers[register] = self._find_given(value, state, request, keys)
            elif isinstance(label, UpdateValue):
                if label.kind == UpdateKind.STATE:
                    registers[register] = leaves[label.key] if leaves else None
                else:
                    is_count = label.kind == UpdateKind.COUNT
                    count = request.every if is_count else int(as_int32(state.update_count))
                    registers[register] = self.placement.constants.scalar(count, value.group)
            elif label[0] == "sum":
                if value.replica not in sums:
                    sums[value.replica] = self._make_sums[value.replica]()
                registers[register] = sums[value.replica][label[1]]
            elif value == UNDERWAY:
                assert self._phases is not None
                registers[register] = Underway(self._phases.num_ahead)
            elif label == ("collected",):
                registers[register] = []
            elif label == NUMBERS:
                registers[register] = Numbers(request.iteration, state.num_accumulated)
            elif label != FEED and label[0] != "first output":
                raise AssertionError(f"Nothing has written {value}.")

    def _find_given(self, value: Value, state: PipelineState, request: Request, keys: Sequence[Any]) -> Any:
        """The value of a binding before a step."""
        (kind, key), group, replica = value.what, value.group, value.replica
        if kind is BindingKind.VARIABLE:
            return state.variables[key]
        if kind is BindingKind.ACCUMULATOR:
            parts = state.accumulators[key]
            return parts[replica] if self.num_replicas > 1 else parts
        if kind is BindingKind.ASSIGNED:
            return self._split(state.variables[key])[replica]
        if kind is BindingKind.ENQUEUED:
            return []
        constants = self.homes[replica].constants
        if kind is BindingKind.KEY_NUMBER:
            return constants.key_number(key, group)
        if kind is BindingKind.INPUT:
            tag = self.placement.tag(f"input {key} to {group.ipu} of replica {replica}")
            input_value = request.of_replica(replica).inputs[key]
            return put_host_copies([input_value], group, tag=tag)[0]
        if key is ValueKind.KEY:
            return constants.key(keys[replica], group)
        if key is ValueKind.LOSS_SCALE:
            scale = self.placement.loss_scale(state.optimizer_state)
            if self.num_replicas > 1 and isinstance(scale, jax.Array):
                scale = self._split(scale)[replica]
            tag = self.placement.tag(f"loss scale to {group.ipu} of replica {replica}")
            return put([scale], group, tag=tag)[0]
        count = state.execution_count if key is ValueKind.EXECUTION_COUNT else state.update_count
        return put([as_int32(count)], group)[0]

    def fold(self, key: Any) -> list[Any]:
        """The key of each replica. The last ones are remembered: steps use the same."""
        if self.num_replicas == 1 or self.has_identical_keys:
            return [key] * self.num_replicas
        if self._key is None or self._key[0] is not key:
            folded = [jax.random.fold_in(key, np.uint32(number)) for number in range(self.num_replicas)]
            self._key = key, folded
        return self._key[1]

    def _split(self, array: Any) -> list[Any]:
        """Each replica's part of an array."""
        groups = {group.devices[0]: group for home in self.homes for group in home.groups}
        return split(array, [groups[device] for device in array.sharding.mesh.devices[:, 0]])

    # Running.

    def describe_start(self, places: Sequence[str]) -> str:
        """The program that the host starts, or started last, in words; `places` name the stages."""
        return "" if self.cursor is None else self.cursor.describe(places)

    def fetch(self, state: PipelineState, request: Request, take: Take) -> PendingPlan:
        """Runs the micro-batches of an update. In a loop it only takes an iteration's micro-batches."""
        self.compile(state, request)
        if self.iterated is not None:
            # Processes without a device of the loop hear how it ends.
            takes = self.dealer.take_everywhere(take, 1, tells_outsiders=False)
            elements = _of_each(ReplicaFeed.take_iteration, self.feeds, takes)
            return PendingPlan(request, 1, None, [], elements)
        supply = take if isinstance(take, Supply) else Supply(take)
        registers: list[Any] = []
        num_done, ready = 0, None
        while num_done < request.every:
            if self._mixes and self._phases is None:
                ready, number = self._run_mixed(state, request, supply, registers, num_done), request.every
            else:
                runner = self.of_shapes[supply.next_shapes()] if self.of_shapes[1:] else self
                runner = runner.make_single() if self._mixes else runner
                ready, number = runner.run_alike(state, request, supply, registers, num_done)
                if number < request.every:
                    changes_within_chunk = number == num_done and supply.next_shapes() == runner.shapes
                    self._mixes |= changes_within_chunk or (number > num_done and self._phases is None)
                    if self._phases is not None:
                        supply.give_back(_take_alike(supply, number, self.num_replicas))
            num_done = number
        assert ready is not None
        return PendingPlan(request, request.every, ready, registers)

    def run_alike(
        self, state: PipelineState, request: Request, supply: Supply, registers: list[Any], num_done: int
    ) -> tuple[ReadyPlan, int]:
        """Runs micro-batches of a step up to the first one with other shapes.

        Returns:
          The plan, and the number of micro-batches that are complete then.
        """
        self.compile(state, request)
        size, count = self._chunk.size, request.every
        takes = self.dealer.take_everywhere(supply.alike(self.shapes), count)
        nexts = _of_each(ReplicaFeed.feed_from, self.feeds, takes)
        assert num_done % size == 0
        ready, first = self.find(count // size), num_done // size
        plan, begin = ready.plan, 0
        cursor = self.begin(ready, state, request, nexts, registers)
        blocks = self.observed_blocks(ready, cursor, registers)
        if first:
            pairs = zip(blocks, plan.micro_batches, strict=True)
            blocks = [code if number == ALL or number >= first else [] for code, number in pairs]
            begin = _run_before(plan, blocks, registers)
        try:
            run(cursor.over(blocks, begin, plan.num_kept), registers)
        except OtherShapes:
            place = cursor.place
            end = plan.micro_batches[place]
            # Those that have begun are completed.
            for number in range(place, plan.num_kept):
                if 0 <= plan.micro_batches[number] < end:
                    run(cursor.over(blocks, number, number + 1), registers)
            return ready, end * size
        return ready, count

    def _run_mixed(
        self, state: PipelineState, request: Request, supply: Supply, registers: list[Any], num_done: int
    ) -> ReadyPlan:
        """Runs the remaining micro-batches of a step, whose shapes may differ.

        The plans of all shapes have the same order, and the same frames for micro-batches. So a micro-batch
        is run by the blocks that the plan of its shapes has for it.
        """
        single: PlanRunner = self.make_single()
        number = self.num_replicas
        placed: list[Sequence[Any]] = [()] * number
        nexts = [functools.partial(placed.__getitem__, replica) for replica in range(number)]
        ready = single.find(request.every)
        cursor, plan = single.begin(ready, state, request, nexts, registers), ready.plan
        blocks = list(single.observed_blocks(ready, cursor, registers))
        take = watched_take(supply, cursor.step, num_done)
        of_runners: dict[PlanRunner, Mapping[Any, Any]] = {}
        of_micro_batches: dict[int, Mapping[Any, Any]] = {}

        def begin(runner: PlanRunner) -> Mapping[Any, Any]:
            """Begins what runs micro-batches of some shapes. Returns its blocks by name and number."""
            runner.compile(state, request)
            ready_plan = runner.find(request.every)
            runner.fill(ready_plan.plan, registers, state, request)
            watched_blocks = runner.observed_blocks(ready_plan, cursor, registers)
            _run_before(ready_plan.plan, watched_blocks, registers)
            # The watcher has heard of the wait for the feed when a micro-batch's shapes are known.
            parts = ready_plan.plan.blocks, ready_plan.plan.micro_batches, watched_blocks, ready_plan.blocks
            return {
                (numbered.block.name, n): unseen if numbered.block.name == "feed" else block
                for numbered, n, block, unseen in zip(*parts, strict=True)
            }

        for place in range(plan.num_kept):
            chunk, name = plan.micro_batches[place], plan.blocks[place].block.name
            if place == 0 or 0 <= chunk < num_done:
                continue  # shapes have each their own first block
            if chunk != ALL:
                if chunk not in of_micro_batches:
                    elements = _take_alike(take, chunk, number)
                    runner = self.of_shapes[shapes_of(elements[0])].make_single()
                    if runner not in of_runners:
                        of_runners[runner] = begin(runner)
                    placed[:] = runner.dealer.place_alone(elements)
                    of_micro_batches[chunk] = of_runners[runner]
                blocks[place] = of_micro_batches[chunk][name, chunk]
            run(cursor.over(blocks, place, place + 1), registers)
        return ready

    def begin(
        self,
        ready: ReadyPlan,
        state: PipelineState,
        request: Request,
        nexts: Sequence[Callable[[], Sequence[Any]]],
        registers: list[Any],
    ) -> Cursor:
        """Fills registers. `nexts` give the micro-batches of each replica, on its devices."""
        self.fill(ready.plan, registers, state, request)
        for register, value in ready.plan.given.items():
            if value.what == FEED:
                registers[register] = nexts[value.replica]
        step = int(as_int32(state.execution_count))
        cursor = Cursor(ready.plan, step, request.iteration, self._chunk.size)
        self._lead.cursor = self.linker.cursor = cursor
        return cursor

    def run_kept(self, ready: ReadyPlan, registers: list[Any], cursor: Cursor) -> None:
        """Runs the blocks that leave the state as it is."""
        blocks = self.observed_blocks(ready, cursor, registers)
        run(cursor.over(blocks, 0, ready.plan.num_kept), registers)

    def observed_blocks(self, ready: ReadyPlan, cursor: Cursor, registers: list[Any]) -> list[list[Linked]]:
        """The blocks of a plan, with what tells a watcher and what measures held bytes."""
        blocks = self._watched_blocks(ready, cursor)
        if self._lead.held_bytes:
            numbers = self.maker.registers
            blocks = with_measurements(ready.plan, blocks, self._lead.held_bytes, numbers, registers)
        return blocks

    def _watched_blocks(self, ready: ReadyPlan, cursor: Cursor) -> list[list[Linked]]:
        """The blocks of a plan, with what tells a watcher, if there is one."""
        watcher = watching.current()
        if watcher is None or not ready.is_watched:
            return ready.blocks
        return watched(ready.plan, ready.blocks, watcher, self._lead, cursor)

    def run(self, state: PipelineState, pending: PendingPlan) -> Progress:
        """Runs the weight update on the replicas' results. In a loop it runs the iteration first."""
        request, registers, ready = pending.request, pending.registers, pending.ready
        is_full = state.num_accumulated + pending.count == request.every
        if ready is None:
            ready = self.find(1, is_full)
            nexts = [
                feed.feed_iteration(elements, request.of_replica(replica))
                for replica, (feed, elements) in enumerate(zip(self.feeds, pending.elements, strict=True))
            ]
            self.run_kept(ready, registers, self.begin(ready, state, request, nexts, registers))
        plan, size = ready.plan, self._chunk.size
        state = self._with_first_state(state, plan, registers)
        if self.placement.has_peers:
            self.placement.begin_step()
        step = int(as_int32(state.execution_count))
        cursor = Cursor(plan, step, request.iteration, size)
        self.linker.cursor = cursor
        run(cursor.over(self._watched_blocks(ready, cursor), plan.num_kept, len(plan.blocks)), registers)
        results, get = plan.results, registers.__getitem__
        accumulators = {key: tuple(map(get, numbers)) for key, numbers in results.accumulators.items()}
        if self.num_replicas == 1:
            accumulators = {key: parts[0] for key, parts in accumulators.items()}
        outputs = [self._outputs_of(plan, replica, registers) for replica in range(self.num_replicas)]
        if self.placement.has_peers and self.num_replicas > 1 and self._gathers_outputs:
            outputs = gather_outputs(self.placement, outputs)
        handed_on = [outputs[replica] for replica in self._output_replicas]
        carried = [list(map(get, numbers)) for numbers in results.carried]
        return Progress(
            self.advance(
                state,
                {name: get(register) for name, register in results.variables.items()},
                list(map(get, results.leaves)),
                accumulators,
                pending.count,
                request.every,
            ),
            carried[0] if len(carried) == 1 else list(map(OfReplicas, zip(*carried, strict=True))),
            [join_collected(parts) for parts in zip(*(part.collected for part in handed_on), strict=True)],
            pending.count * (1 if self.iterated is not None else self.num_replicas),
            [join_handed(parts) for parts in zip(*(part.enqueued for part in handed_on), strict=True)],
            [Handed(list(map(get, results.updated)), None)] if results.updated else [],
        )

    def _outputs_of(self, plan: Plan, replica: int, registers: Sequence[Any]) -> ReplicaOutputs:
        """The values that a replica has collected and enqueued."""
        values = [registers[register] for register in plan.results.collected[replica]]
        collected = values[0] if values and not self._collecting.is_summed else []
        if self._collecting.is_summed:
            collected = [self._collecting.collect(values, None)]
        lists = [registers[register] for register in plan.results.enqueued[replica]]
        enqueued = [
            Handed([entry.value for entry in leaves], leaves[0].size) for leaves in zip(*lists, strict=True)
        ]
        return ReplicaOutputs(collected, enqueued)

    def _with_first_state(self, state: PipelineState, plan: Plan, registers: list[Any]) -> PipelineState:
        """Makes the optimizer's state, if there is none, from the first micro-batch's outputs."""
        if self.placement.updates is None or state.optimizer_state is not None:
            return state
        get = registers.__getitem__
        firsts = [{place: get(number) for place, number in leaf.items()} for leaf in plan.results.first]
        state = self.with_optimizer(state, firsts)
        leaves = jax.tree.leaves(state.optimizer_state)
        for register, value in plan.given.items():
            if isinstance(value.what, UpdateValue) and value.what.kind == UpdateKind.STATE:
                registers[register] = leaves[value.what.key]
        return state

    # State.

    def settle(self, state: PipelineState) -> PipelineState:
        """The state at the end of a loop's run: the same for all replicas, as after a weight update.

        Accumulators become their means over the replicas, from which each replica goes on: since they are
        linear in the gradients, the mean at the weight update is the same.
        """
        if self.num_replicas == 1:
            return state
        plan, registers = self.maker.make_joins(), list[Any]()
        self.fill(plan, registers, state, Request((), 1, 1, 1))
        cursor = Cursor(plan, int(as_int32(state.execution_count)), 0, 1)
        self.linker.cursor = cursor
        run(cursor.over(self.linker.link(plan), 0, len(plan.blocks)), registers)
        joined = {name: registers[register] for name, register in plan.results.variables.items()}
        means = {key: registers[register] for key, (register,) in plan.results.accumulators.items()}
        return dataclasses.replace(state, variables={**state.variables, **joined}, accumulators=means)

    def make_accumulators(
        self, dtypes: Mapping[str, Any], initial: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes accumulators, per replica: zeros, or what `settle` left."""
        if self.num_replicas == 1:
            return super().make_accumulators(dtypes, initial)
        if initial:
            placed = self.placement.make_accumulators(dtypes, initial)
            return {key: tuple(self._split(value)) for key, value in placed.items()}
        accumulators = [home.make_accumulators(dtypes) for home in self.homes]
        return {key: tuple(part[key] for part in accumulators) for key in accumulators[0]}

    # Memory.

    def find_brought(self, every: int) -> Mapping[int, Brought]:
        """The memory that execution phases bring, by device, in each replica."""
        if self._phases is None:
            return {}
        count, ahead = every // self.chunk_size, self._phases.num_ahead
        if ahead is not None:
            count = min(count, 2 + ahead)  # more micro-batches have no other moments
        return find_brought(self._step(count))

    def find_host_memory(self, link: LinkSpeed) -> HostMemory | None:
        """The transfers of execution phases, for the simulator; None without phases."""
        return None if self._phases is None else find_host_memory(self._step(2), link)

    def _step(self, count: int) -> Step:
        assert self._phases is not None
        layout, maker = self.maker.layout, self.maker
        sizes = Sizes(layout, self.programs, self.chunk_size, self.residual_bytes, dict(maker.dtypes))
        return Step(self.find_plan(count), layout, self._phases, sizes)


def _run_before(plan: Plan, blocks: Sequence[Sequence[Linked]], registers: list[Any]) -> int:
    """Runs the first blocks, without instructions whose results are there. Returns the next block."""
    place = 0
    while plan.micro_batches[place] == ALL:
        code = [linked for linked in blocks[place] if any(registers[n] is None for n in linked[2])]
        run(iter([code]), registers)
        place += 1
    return place


def _take_alike(take: Take, number: int, num_replicas: int) -> Sequence[Any]:
    """Takes a micro-batch of each replica, which must have the same shapes; `number`: its number."""
    elements = gather(take, num_replicas, num_replicas)
    check_alike(list(map(shapes_of, elements)), number)
    return elements


def check_alike(shapes: Sequence[Any], number: int) -> None:
    """Raises if the replicas' micro-batches of some number have different shapes."""
    num_replicas = len(shapes)
    if len(set(shapes)) > 1:
        raise ValueError(
            f"Micro-batches {number * num_replicas} to {(number + 1) * num_replicas - 1} of a step go to "
            f"the {num_replicas} replicas at the same time, so they must have the same shapes; they have "
            f"different ones. Group the data so that {num_replicas} in a row are alike "
            f"(datasets.Buckets does, with in_a_row={num_replicas})."
        )


def _of_each(
    function: Callable[[ReplicaFeed, Take], Any], feeds: Sequence[ReplicaFeed], takes: Sequence[Take]
) -> list[Any]:
    """Calls a function for each replica's feed and take. Returns the results.

    Raises the first error once all were tried, since other processes wait for each of them.
    """
    results, errors = [], []
    for feed, take in zip(feeds, takes, strict=True):
        try:
            results.append(function(feed, take))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
