"""Makers of plans: of a step along a schedule, and of the optimizer's first state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placement import put
from ipu_pipeline.engine.devices.xla_settings import NO_OPTIONS
from ipu_pipeline.engine.jaxprs import has_shard_map
from ipu_pipeline.engine.plan import passes
from ipu_pipeline.engine.plan.lowering import (
    COUNTED,
    Code,
    Key,
    Layout,
    Programs,
    accumulator,
    assigned,
    first_replica,
    list_programs,
    lower_micro_batch,
    lower_update,
    pick,
    source_at,
    state_leaf,
    update_results,
)
from ipu_pipeline.engine.plan.plan import (
    ALL,
    Block,
    Instruction,
    Laid,
    Op,
    Plan,
    Program,
    Registers,
    Results,
    Value,
)
from ipu_pipeline.engine.plan.run import Cursor, Linker, run
from ipu_pipeline.engine.programs.accumulation import Collecting
from ipu_pipeline.engine.programs.stage_programs import (
    Binding,
    BindingKind,
    Bindings,
    ChunkForm,
    StagePrograms,
    chunk_programs,
)
from ipu_pipeline.engine.schedules.clusters import ExecutionPhases
from ipu_pipeline.engine.schedules.timetables import Action, ActionKind
from ipu_pipeline.engine.tracing.stage_meshes import uses_replicas
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind
from ipu_pipeline.engine.updates.update_programs import find_read

FEED, NUMBERS = ("feed",), ("numbers",)  # what registers hold that FEED and COUNT read
FIRST, LAST = "first output", "last output"  # with a place: outputs that stay beyond their micro-batch


@dataclass(frozen=True, eq=False)
class Recipe:
    """The parts of a pipeline's or loop's plans that do not depend on the shapes of micro-batches."""

    stage_programs: Sequence[StagePrograms]  # for one micro-batch
    collecting: Collecting
    carried: Sequence[int]  # in a loop, the places of the outputs that the next iteration takes
    dtypes: Mapping[str, Any]  # of the accumulators of trained variables, by full name
    donates: bool  # whether an update takes the memory of the state before
    may_raise: bool  # whether programs of stages call back into Python
    update_may_raise: bool
    phases: ExecutionPhases | None


class _Ending(NamedTuple):
    """The blocks and values behind the micro-batches of a step."""

    joins: Mapping[DeviceGroup, Block]  # of the replicas' values
    means: Mapping[str, Value]  # of what they accumulated, by key
    waits: Block | None  # for programs in which Python may raise
    update: Block | None
    variables: Mapping[str, Value]  # see `Results`
    leaves: Sequence[Value]
    accumulators: Mapping[str, tuple[Value, ...]]
    updated: tuple[Value, ...]


class Maker:
    """Makes the plans for micro-batches of some shapes.

    Attributes:
      layout: where a step runs.
      programs: the programs of the pipeline, for all shapes.
      registers: gives numbers to the values of the pipeline.
      scope: the number of the shapes, and how many micro-batches a program handles.
      chunk: how many micro-batches a program handles.
      dtypes: of the accumulators of trained variables, by full name.
      fed: by replica, the leaves that FEED brings.
      last_key: the forward of the last stage.
      before: the block that comes first.
      feed: the block that brings a micro-batch.
      blocks: by kind and stage, a micro-batch's program with what goes before and after it.
      first_block: keeps what is read of the first micro-batch's outputs; None if nothing is.
      last_block: the same of the last one's.
      reads: the outputs' places that the optimizer's first state reads, and that the update does.
    """

    def __init__(
        self,
        layout: Layout,
        recipe: Recipe,
        programs: Programs,
        registers: Registers,
        chunk: ChunkForm,
        shapes: int,
        lead: Maker | None = None,
    ) -> None:
        """Lowers a micro-batch, and applies the passes of the features that are used."""
        self.layout, self.programs, self.registers, self.chunk = layout, programs, registers, chunk
        self.dtypes = recipe.dtypes
        # Makers of several shapes share what follows the micro-batches: the lead's.
        self._recipe, self.scope, self._lead = recipe, (shapes, chunk.size), lead or self
        traced, updates = layout.whole.traced, layout.whole.updates
        self.last_key: Key = ActionKind.FORWARD, len(traced.stages) - 1
        inits, steps = ((), ()) if updates is None else (updates.inits, updates.updates)
        self.reads = sorted(find_read(inits)), sorted(find_read(steps))
        chunked = chunk_programs(traced, recipe.stage_programs, chunk.size)
        joint = self._find_joint(chunked)
        replicas = range(layout.num_replicas)
        self.collected: list[tuple[Value, ...]] = []
        self.enqueued: list[list[Value]] = []
        self.code = passes.run_together(layout, [self._lower(chunked, r) for r in replicas], joint)
        self.blocks = {key: Block(key, tuple(code), self.scope) for key, code in self.code.items()}
        firsts = [instruction for r in replicas for instruction in self._pick(r, FIRST, self.reads[0], 0)]
        lasts = [
            instruction for r in replicas for instruction in self._pick(r, LAST, self._last_places, -1)
        ]
        self.first_block, self.last_block = (
            Block(name, tuple(code), self.scope) if code else None
            for name, code in ((FIRST, firsts), (LAST, lasts))
        )
        code = [instruction for block in self.code.values() for instruction in block]
        self.feed = self._make_feed([*code, *firsts, *lasts])
        parts = passes.replica_parts(layout, [*code, *firsts, *lasts])
        self.before = Block("state of replicas", tuple(parts), self.scope)
        self._endings: dict[bool, _Ending] = {}
        self._phase_ends: dict[tuple[Key, ...], Block] = {}

    # A micro-batch.

    def _lower(self, chunked: Sequence[StagePrograms], replica: int) -> Code:
        layout, recipe, placement = self.layout, self._recipe, self.layout.whole
        find_program = functools.partial(
            self.programs.of_stage, self.scope, placement=layout.homes[replica]
        )
        code = lower_micro_batch(layout, replica, chunked, find_program)
        group = self._last_group(replica)
        collected = [source_at(source, group, replica) for source in recipe.collecting.sources]
        outputs = [self._output(replica, place) for place in (*self.reads[0], *self._last_places)]
        code = passes.send_results(code, [*collected, *outputs])
        size, is_summed = self.chunk.num_stacked, recipe.collecting.is_summed
        code, collection, lists = passes.collect(
            code, collected, is_summed, size, self.programs, self.last_key
        )
        self.collected.append(collection)
        self.enqueued.append([lists[leaf] for leaf in sorted(lists)])
        home = passes.at_home(layout)
        if recipe.phases is not None:
            empties = not recipe.phases.keeps_values
            if not (empties or placement.offloads_in_micro_batches):
                home = _identity
            return passes.in_phases(code, self.phase_of, empties, placement.offloads_activations, home)
        if placement.offloads_activations:
            code = passes.leave_activations(code)
        if placement.offloads_in_micro_batches:
            code = {
                key: passes.load_and_store(block, home, number)
                for number, (key, block) in enumerate(code.items(), 1)
            }
        return code

    @property
    def _limits_phases(self) -> bool:
        """Whether the host waits for execution phases."""
        return self._recipe.phases is not None and self._recipe.phases.num_ahead is not None

    def phase_of(self, key: Key) -> Any:
        """The execution phase of a program."""
        assert self._recipe.phases is not None
        return self._recipe.phases.find(key[0], self.layout.whole.traced.levels[key[1]])

    def _find_joint(self, chunked: Sequence[StagePrograms]) -> dict[Key, Program]:
        """The programs that compute with other replicas' values, for the devices of all replicas."""
        placement, programs = self.layout.whole, dict[Key, Program]()
        bindings = Bindings(placement.traced, placement.accumulator_plan.keys)
        listed = list_programs(chunked) if self.layout.num_replicas > 1 else []
        joint = {key[1] for key, source in listed if uses_replicas(source.equations)}
        for key, source in listed:
            stage = placement.traced.stages[key[1]]
            if key[1] not in joint and not uses_replicas(stage.flat.equations):
                continue
            reason = (
                f"{stage.place} computes with other replicas (cross_replica_sum, replica_index or "
                "synchronized batch normalization)"
            )
            if placement.groups[key[1]].is_divided:
                raise ValueError(
                    f"{reason}, which does not go with tensor_parallel and num_replicas both above 1. "
                    "Leave one of the three out."
                )
            if has_shard_map(stage.flat.equations):
                raise ValueError(
                    f"{reason}, and with jax.shard_map, which do not go together with num_replicas above "
                    "1. Put them into stages of their own."
                )
            arguments, results = bindings.arguments(key[1], source), bindings.results(key[1], source)
            programs[key] = self.programs.of_stage(
                self.scope, *key, source, arguments, results, placement=placement, is_joint=True
            )
        return programs

    def _last_group(self, replica: int) -> DeviceGroup:
        return self.layout.homes[replica].groups[-1]

    @property
    def _last_places(self) -> list[int]:
        """The places of the outputs of the last micro-batch that are read behind it."""
        return list(dict.fromkeys((*self.reads[1], *self._recipe.carried)))

    def _output(self, replica: int, place: int) -> Value:
        outputs = self.layout.whole.traced.outputs
        return source_at(outputs[place], self._last_group(replica), replica)

    def _pick(self, replica: int, name: str, places: Sequence[int], number: int) -> Iterator[Instruction]:
        """Keeps outputs of the first or last micro-batch beyond it; `number`: its place in a chunk."""
        group, stacks = self._last_group(replica), list[tuple[Value, Value]]()
        for place in places:
            pair = self._output(replica, place), Value((name, place), group, replica)
            if self.chunk.size == 1 or pair[0].micro_batch == ALL:
                yield Instruction(Op.SAME, pair[:1], pair[1:], group, None, replica, 0)
            else:
                stacks.append(pair)
        if stacks:
            program = self.programs.between(group, pick(number), "pick")
            reads, writes = zip(*stacks, strict=True)
            yield Instruction(Op.RUN, reads, writes, group, program, replica, 0)

    def _make_feed(self, code: Sequence[Instruction]) -> Block:
        """Makes the block that brings leaves and numbers to each group that reads them, in all replicas."""
        replicas = range(self.layout.num_replicas)
        fed: list[dict[Value, None]] = [{} for _replica in replicas]
        counted: list[dict[Value, None]] = [{} for _replica in replicas]
        for value in (value for instruction in code for value in instruction.reads):
            kind = passes.kind_of(value)
            if kind is BindingKind.VALUE and value.what.key.kind == "element":
                if not value.is_away and not value.copy:
                    fed[value.replica][value] = None
            elif kind is BindingKind.SCALAR and value.what.key in COUNTED:
                counted[value.replica][value] = None
        self.fed = [list(values) for values in fed]
        instructions = []
        for replica in replicas:
            group = self._last_group(replica)
            for op, content, values in ((Op.FEED, FEED, fed), (Op.COUNT, NUMBERS, counted)):
                if op is Op.FEED or any(counted):
                    source, writes = Value(content, group, replica), tuple(values[replica])
                    instructions.append(
                        Instruction(op, (source,), writes, None, None, replica, 0, self.chunk.size)
                    )
        # FEED before COUNT: what has other shapes is noticed before anything is counted.
        instructions.sort(key=lambda instruction: instruction.op)
        return Block("feed", tuple(instructions), self.scope)

    # The whole step.

    def make(
        self,
        order: Sequence[Action],
        count: int,
        is_full: bool = True,
        makers: Sequence[Maker] | None = None,
    ) -> Plan:
        """The plan of a step."""
        makers = [self] * count if makers is None else makers
        ending = self._lead.find_ending(is_full)
        fed, now = set[int](), (0, None)
        laid = Laid(maker.before for maker in dict.fromkeys(makers))
        phase_keys: list[Key] = []  # the programs of the execution phase that runs now
        for kind, stage, micro_batch in order:
            key, maker = (kind, stage), makers[micro_batch]
            block = maker.blocks.get(key)
            if block is None:
                continue  # there is nothing to compute
            if micro_batch not in fed:  # while the previous phase still runs
                fed.add(micro_batch)
                laid.add(maker.feed, micro_batch)
            if self._limits_phases:
                if phase_keys and now != (micro_batch, maker.phase_of(key)):
                    laid.add(self._end_phase(tuple(phase_keys)), now[0])
                    phase_keys = []
                now = micro_batch, maker.phase_of(key)
                phase_keys.append(key)
            laid.add(block, micro_batch)
            if key == maker.last_key:
                if micro_batch == 0 and maker.first_block is not None:
                    laid.add(maker.first_block, 0)
                if micro_batch == count - 1 and maker.last_block is not None:
                    laid.add(maker.last_block, micro_batch)
        if phase_keys:
            laid.add(self._end_phase(tuple(phase_keys)), now[0])
        self._add_joins(laid, ending)
        num_kept = len(laid.blocks)
        if ending.update is not None:
            laid.add(ending.update)
        replicas = range(self.layout.num_replicas)
        results = Results(
            ending.variables,
            ending.leaves,
            ending.accumulators,
            self.collected,
            self.enqueued,
            [
                {place: kept_output(self.layout, FIRST, r, place) for place in self.reads[0]}
                for r in replicas
            ],
            [
                tuple(kept_output(self.layout, LAST, r, place) for place in self._recipe.carried)
                for r in replicas
            ],
            ending.updated,
        )
        return self.registers.number(laid, num_kept, results)

    def _end_phase(self, keys: tuple[Key, ...]) -> Block:
        """Makes the block that ends an execution phase that has run these programs."""
        if keys not in self._phase_ends:
            code = passes.end_phase(instruction for key in keys for instruction in self.code[key])
            self._phase_ends[keys] = Block("end of phase", tuple(code), self.scope)
        return self._phase_ends[keys]

    def _add_joins(self, laid: Laid, ending: _Ending) -> None:
        """Puts what joins replicas behind the last block that it waits for.

        At the end, if programs may raise before memory is taken, or several processes join their values.
        """
        recipe = self._recipe
        is_late = recipe.may_raise or recipe.phases is not None
        last = [] if ending.waits is None else [ending.waits]
        waiting: dict[Block, set[Value]] = {}  # -> what it reads
        for group, block in ending.joins.items():
            if is_late or group.is_joined:
                last.append(block)
            else:
                arriving = [i for i in block.code if i.op in (Op.JOIN, Op.LOAD)]
                waiting[block] = {value for instruction in arriving for value in instruction.reads}
        behind: list[tuple[int, Block]] = []
        written: dict[Block, set[Value]] = {}  # -> what it writes
        for place in reversed(range(len(laid.blocks) if waiting else 0)):
            block = laid.blocks[place]
            if block not in written:
                written[block] = {value for instruction in block.code for value in instruction.writes}
            for join in [join for join, reads in waiting.items() if reads & written[block]]:
                behind.append((place + 1, join))
                del waiting[join]
            if not waiting:
                break
        for join in (*waiting, *last):
            laid.add(join)
        for place, join in behind:  # the last places first
            laid.insert(place, join)

    def make_joins(self) -> Plan:
        """The plan that joins what replicas have accumulated and assigned; it leaves the means of both."""
        ending = self.find_ending(True)
        means = {key: (ending.means[key],) for key in self.accumulator_keys}
        variables = {name: ending.variables[name] for name in self.assigned_names}
        laid = Laid(ending.joins.values())
        return self.registers.number(
            laid, len(laid.blocks), Results(variables, (), means, (), (), (), (), ())
        )

    @property
    def assigned_names(self) -> list[str]:
        """The full names of variables that stages assign."""
        return sorted({spec.name for stage in self.layout.whole.traced.stages for spec in stage.assigned})

    def find_ending(self, is_full: bool) -> _Ending:
        """Makes, once, what follows the micro-batches of a step; arguments as in `make`."""
        if is_full not in self._endings:
            self._endings[is_full] = self._make_ending(is_full)
        return self._endings[is_full]

    @property
    def accumulator_keys(self) -> list[str]:
        """The keys of all accumulators; none without training."""
        if self.layout.whole.updates is None:
            return []
        return [*self._recipe.dtypes, *self.layout.whole.accumulator_plan.extra]

    def _make_ending(self, is_full: bool) -> _Ending:
        layout, recipe, placement, programs = self.layout, self._recipe, self.layout.whole, self.programs
        home, replicas, keys = passes.at_home(layout), range(layout.num_replicas), self.accumulator_keys
        names = self.assigned_names
        # Joining the replicas.
        gradients = {key: accumulator(layout, key, 0) for key in keys}
        variables = {name: assigned(layout, name, 0) for name in names}
        joins: dict[DeviceGroup, Block] = {}
        if layout.num_replicas > 1:
            joining = layout if is_full else dataclasses.replace(layout, joins_assigned=False)
            joined, gradients, variables = passes.reduce(joining, programs, keys if is_full else [], names)
            joins = {
                group: Block(f"join {group.ipu}", tuple(passes.load_and_store(code, home, 2)))
                for group, code in joined.items()
            }
        accumulators = {key: tuple(home(accumulator(layout, key, r)) for r in replicas) for key in keys}
        # Waiting for programs that may raise, before any memory is taken.
        waited: list[Value] = []
        if recipe.may_raise:
            waited += [v for values in accumulators.values() for v in values]
            waited += [assigned(layout, name, r) for name in names for r in replicas]
            waited += [v for r in replicas for v in (*self.collected[r], *self.enqueued[r])]
            waited += [kept_output(layout, LAST, r, place) for r in replicas for place in self._last_places]
        waits = Block("wait", (Instruction(Op.WAIT, tuple(waited), (), None),)) if waited else None
        # The weight update.
        leaves: list[Value] = []
        updated: tuple[Value, ...] = ()
        update: list[Instruction] = []
        if placement.updates is not None:
            leaves = [home(state_leaf(layout, n)) for n in range(len(placement.updates.state_leaves))]
        if placement.updates is not None and is_full:
            update, outputs = read_outputs(layout, programs, LAST, self.reads[1])
            find_program = functools.partial(
                programs.of_update,
                placement=placement,
                donate=recipe.donates,
                may_raise=recipe.update_may_raise,
            )
            update += lower_update(
                layout, placement.updates.updates, find_program, programs, gradients, outputs
            )
            new_values = update_results(update)
            update = passes.place_update(layout, update)
            update = passes.load_and_store(update, home, 3, ({}, 3, lambda _value: True))
            if self._limits_phases:
                update = passes.wait_for_updates(update)
            if recipe.update_may_raise:  # the host hears of an error where it waits
                runs = [instruction for instruction in update if instruction.op is Op.RUN]
                results = tuple(value for instruction in runs for value in instruction.writes)
                update.append(Instruction(Op.WAIT, results, (), None))
            enqueued: dict[int, Value] = {}
            for target, value in new_values.items():
                if isinstance(target, str):
                    accumulators[target] = (home(value),)
                elif target.kind == UpdateKind.PARAMETER:
                    variables[target.key] = home(value)
                elif target.kind == UpdateKind.STATE:
                    leaves[target.key] = home(value)
                elif target.kind == UpdateKind.ENQUEUED:
                    enqueued[target.key] = value
                elif target.kind == UpdateKind.GRADIENT and layout.num_replicas == 1:
                    accumulators[target.key] = (home(value),)
            updated = tuple(enqueued[number] for number in sorted(enqueued))
        block = Block("update", tuple(update)) if update else None
        return _Ending(joins, gradients, waits, block, variables, leaves, accumulators, updated)


def read_outputs(
    layout: Layout, programs: Programs, name: str, places: Sequence[int]
) -> tuple[list[Instruction], dict[int, Value]]:
    """Code that brings the first replica's outputs of a micro-batch to all replicas, and their values.

    `name` says of which micro-batch: FIRST or LAST.
    """
    group = layout.whole.groups[-1]
    parts = [[kept_output(layout, name, r, place) for r in range(layout.num_replicas)] for place in places]
    if layout.num_replicas == 1 or not places:
        return [], {place: part for place, (part,) in zip(places, parts, strict=True)}
    joined = tuple(Value(("outputs of replicas", place), group) for place in places)
    outputs = {place: Value(("output", place), group) for place in places}
    program = programs.between(group, first_replica(group.replicated.mesh), "first_replica")
    join = Instruction(Op.JOIN, tuple(value for some in parts for value in some), joined, group)
    return [join, Instruction(Op.RUN, joined, tuple(outputs.values()), group, program)], outputs


def kept_output(layout: Layout, name: str, replica: int, place: int) -> Value:
    """A replica's output of the first or last micro-batch, which stays beyond that."""
    return Value((name, place), layout.homes[replica].groups[-1], replica)


def _identity(value: Value) -> Value:
    return value


# The optimizer's first state, by a plan of its own.


class FirstState:
    """Makes the leaves of the optimizer's state at the start."""

    def __init__(self, layout: Layout) -> None:
        """Jits the programs; XLA compiles each at its first call."""
        self._placement = placement = layout.whole
        assert placement.updates is not None
        inits, programs = placement.updates.inits, Programs(NO_OPTIONS, False)
        code, outputs = read_outputs(layout, programs, FIRST, sorted(find_read(inits)))
        find_program = functools.partial(programs.of_init, placement=placement)
        code += lower_update(layout, inits, find_program, programs, {}, outputs)
        new_values, home = update_results(code), passes.at_home(layout)
        code = passes.place_update(layout, code)
        code = passes.load_and_store(code, home, 1, ({}, 1, lambda _value: True))
        values = {leaf.key: home(v) for leaf, v in new_values.items() if leaf.kind == UpdateKind.STATE}
        self._new_leaves = sorted(values)
        results = Results({}, [values[number] for number in self._new_leaves], {}, (), (), (), (), ())
        self._plan = Registers().number(Laid([Block("first state", tuple(code))]), 1, results)
        self._linker = Linker(layout)

    def make(self, variables: Mapping[str, Any], outputs: Sequence[Mapping[int, Any]]) -> list[Any]:
        """The leaves, placed; `outputs`: what the last stage returned first, by replica and place."""
        placement, plan = self._placement, self._plan
        updates = placement.updates
        assert updates is not None
        if placement.has_peers:
            placement.begin_step()
        registers: list[Any] = [None] * len(plan.names)
        for register, value in plan.given.items():
            what = value.what
            if isinstance(what, Binding):
                registers[register] = variables[what.key]
            elif type(what) is tuple and what[0] == FIRST:
                (registers[register],) = put([outputs[value.replica][what[1]]], value.group)
            else:  # a count of what has been before
                registers[register] = placement.constants.scalar(0, value.group)
        self._linker.cursor = cursor = Cursor(plan, 0, 0, 1)
        run(cursor.over(self._linker.link(plan), 0, len(plan.blocks)), registers)
        leaves = [  # made without XLA, which would compile zeros of each shape
            _fill(leaf.aval, updates.initial[number]) if number in updates.initial else None
            for number, leaf in enumerate(updates.state_leaves)
        ]
        for number, register in zip(self._new_leaves, plan.results.leaves, strict=True):
            leaves[number] = registers[register]
        return placement.place_optimizer_state(leaves)


def _fill(aval: Any, number: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array with the same number everywhere. Zeros take no memory before they are read."""
    zeros = np.zeros(aval.shape, aval.dtype)
    if any(number.tobytes()):  # which -0.0 has
        zeros[...] = number
    return zeros
