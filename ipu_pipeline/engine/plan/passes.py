"""Features of a step, each a pass: it takes code, and returns code that does more.

| pass | feature |
| --- | --- |
| `send_results` | stages on several IPUs |
| `collect` | what is collected of the last stage, and what stages enqueue |
| `leave_activations`, `load_and_store` | offloading |
| `in_phases`, `end_phase`, `wait_for_updates` | execution phases |
| `run_together` | replicas, weights that they share out, programs that compute with other replicas |
| `reduce` | joining what replicas accumulated and assigned |
| `place_update` | a weight update over several IPUs; state that is offloaded or shared out |
| `replica_parts` | each replica's part of the state, and copies of variables that stages share |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.plan.lowering import (
    Code,
    Key,
    Layout,
    Programs,
    accumulator,
    add_collected,
    assigned,
    mean_over_replicas,
    spread,
)
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Program, Value, values_in
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

UNDERWAY = Value(("underway",), None)  # a list of what pieces of work make, which devices may not have done


def kind_of(value: Value) -> BindingKind | None:
    """The kind of a value of a stage program; None for others."""
    return value.what.kind if isinstance(value.what, Binding) else None


def send_results(code: Code, collected: Iterable[Value]) -> Code:
    """Sends what a program makes to the other groups where it is read, once it has been started."""
    readers: dict[Any, dict[DeviceGroup, None]] = {}
    reads = [value for block in code.values() for instruction in block for value in instruction.reads]
    for value in [*reads, *collected]:
        readers.setdefault(value.what, {})[value.group] = None
    new_code: Code = {}
    for key, block in code.items():
        targets: dict[DeviceGroup, list[Value]] = {}
        written = [v for instruction in block for v in instruction.writes if v.micro_batch != ALL]
        for value in written:
            for group in readers.get(value.what, ()):
                if group is not value.group:
                    targets.setdefault(group, []).append(value)
        sends = [
            Instruction(
                Op.SEND,
                tuple(values),
                tuple(value._replace(group=group) for value in values),
                group,
                None,
                values[0].replica,
                0,
            )
            for group, values in targets.items()
        ]
        new_code[key] = [*block, *sends]
    return new_code


# Collecting.


def collect(
    code: Code, values: Sequence[Value], is_summed: bool, size: int | None, programs: Programs, last: Key
) -> tuple[Code, tuple[Value, ...], dict[int, Value]]:
    """Collects values of each micro-batch, and what stages enqueue.

    Returns:
      The code; the registers of sums, or of one list; and by number of the leaf, the lists of what is
      enqueued.
    """
    new_code = {key: list(block) for key, block in code.items()}
    collection: tuple[Value, ...] = ()
    if values:
        (group, replica), entries = (values[0].group, values[0].replica), list(values)
        run = functools.partial(Instruction, Op.RUN, group=group, replica=replica, micro_batch=0)
        alike = [] if size is None else [place for place, v in enumerate(entries) if v.micro_batch == ALL]
        if alike:
            reads = tuple(entries[place] for place in alike)
            for place in alike:
                entries[place] = Value(("spread", place), group, replica, 0)
            assert size is not None
            repeat = programs.between(group, spread(size), "spread")
            new_code[last].append(run(reads, tuple(entries[place] for place in alike), program=repeat))
        if is_summed:
            collection = tuple(Value(("sum", place), group, replica) for place in range(len(entries)))
            add = programs.between(group, add_collected, "add", donated=range(len(collection)))
            new_code[last].append(run((*collection, *entries), collection, program=add))
        else:
            collection = (Value(("collected",), group, replica),)
            new_code[last].append(
                Instruction(Op.COLLECT, (*collection, *entries), (), group, None, replica, 0, size=size)
            )
    lists: dict[int, Value] = {}
    for block in new_code.values():
        for instruction in list(block):
            for value in instruction.writes if instruction.op in (Op.RUN, Op.SAME) else ():
                if kind_of(value) is BindingKind.ENQUEUED:
                    enqueued = lists[value.what.key] = value._replace(micro_batch=ALL)
                    origin = value.group, None, value.replica, 0
                    block.append(Instruction(Op.COLLECT, (enqueued, value), (), *origin, size))
    return new_code, collection, lists


# Offloading.


def leave_activations(code: Code) -> Code:
    """Moves what only backwards read from some forward on to host memory, and has them read it there."""
    last: dict[Value, Key] = {}  # -> the last forward that makes or reads it
    read_behind: dict[Value, None] = {}
    for key, block in code.items():
        for instruction in block:
            if key[0] is ActionKind.FORWARD:
                last.update(dict.fromkeys((*instruction.reads, *instruction.writes), key))
            else:
                read_behind.update(dict.fromkeys(instruction.reads))
    leaving = {value: last[value] for value in read_behind if value in last and _is_held(value)}
    new_code: Code = {}
    for key, block in code.items():
        if key[0] is not ActionKind.FORWARD:
            block = [_read_away(instruction, leaving) for instruction in block]
        of_groups = _by_group(value for value, last_key in leaving.items() if last_key == key)
        new_code[key] = [*block, *map(_store, of_groups.values())]
    return new_code


def _read_away(instruction: Instruction, away: Any) -> Instruction:
    reads = [value._replace(is_away=True) if value in away else value for value in instruction.reads]
    return instruction._replace(reads=tuple(reads))


def _by_group(values: Iterable[Value]) -> dict[DeviceGroup, list[Value]]:
    groups: dict[DeviceGroup, list[Value]] = {}
    for value in values:
        groups.setdefault(value.group, []).append(value)
    return groups


def _is_held(value: Value) -> bool:
    return isinstance(value.what, Binding) and value.what.is_of_micro_batch


def _store(values: Sequence[Value]) -> Instruction:
    targets = tuple(value._replace(is_away=True, copy=0) for value in values)
    first = values[0]
    place = first.group, None, first.replica, first.micro_batch
    return Instruction(Op.STORE, tuple(values), targets, *place)


def load_and_store(
    block: Sequence[Instruction],
    home: Callable[[Value], Value],
    copy: int,
    shared: tuple[dict[Value, None], int, Callable[[Value], bool]] | None = None,
) -> list[Instruction]:
    """Brings what programs read from host memory, and what they write there back."""
    new_code: list[Instruction] = []
    loaded, shared_copy, is_shared = shared or ({}, copy, lambda _value: False)
    for instruction in block:
        is_copy_of_update = instruction.op is Op.SAME and type(instruction.writes[0].what) is tuple
        if instruction.op not in (Op.RUN, Op.JOIN, Op.COLLECT) and not is_copy_of_update:
            new_code.append(instruction)
            continue
        away = {value: target for value in instruction.reads if (target := home(value)).is_away}
        changed = {
            value: value._replace(
                is_away=False,
                copy=shared_copy if is_shared(value) else copy,
                micro_batch=instruction.micro_batch,
            )
            for value in away
        }
        brought = [value for value in away if changed[value] not in loaded]
        loaded.update(dict.fromkeys(changed[value] for value in brought if is_shared(value)))
        move = functools.partial(instruction._replace, program=None)
        for group, values in _by_group(brought).items():
            reads, writes = tuple(away[v] for v in values), tuple(changed[v] for v in values)
            new_code.append(move(op=Op.LOAD, reads=reads, writes=writes, group=group))
        stored = [value for value in instruction.writes if home(value).is_away]
        changed |= {value: value._replace(copy=copy) for value in stored if value not in changed}
        reads, writes = (
            tuple([changed.get(v, v) for v in some]) for some in (instruction.reads, instruction.writes)
        )
        new_code.append(instruction._replace(reads=reads, writes=writes))
        if stored:
            reads, writes = tuple(changed[v] for v in stored), tuple(map(home, stored))
            new_code.append(move(op=Op.STORE, reads=reads, writes=writes, group=reads[0].group))
    return new_code


def at_home(layout: Layout) -> Callable[[Value], Value]:
    """A function that says where a value lies while no program uses it."""
    placement = layout.whole

    def home(value: Value) -> Value:
        kind, what = kind_of(value), value.what
        if value.copy:  # it was brought to the devices
            return value
        if type(what) is tuple:
            is_result = what[0] == "new" and placement.is_offloaded(what[1])
            is_zeros = what[0] in ("zeros", "joined zeros") and placement.offloads_accumulators
            return value._replace(is_away=True) if is_result or is_zeros else value
        if kind is BindingKind.VARIABLE and what.key in placement.offloaded:
            if value.replica != ALL and what.key in placement.sharded:
                return value  # it is gathered from host memory
            return value._replace(is_away=True, group=layout.home(what.key, value.replica))
        if kind is BindingKind.ACCUMULATOR and placement.offloads_accumulators:
            return value._replace(is_away=True)
        if isinstance(what, UpdateValue) and what.kind == UpdateKind.STATE and placement.offloads_state:
            return value._replace(is_away=True)
        return value

    return home


# Execution phases.


def in_phases(
    code: Code,
    phase_of: Callable[[Key], Any],
    empties: bool,
    offloads: bool,
    home: Callable[[Value], Value],
) -> Code:
    """Stores what a later phase reads in host memory, and brings weights once a phase."""
    phases = list(dict.fromkeys(map(phase_of, code)))
    numbers = {key: phases.index(phase_of(key)) for key in code}
    stores: dict[Value, Key] = {}  # -> the program behind which a value is stored; it stays for its phase
    for key, block in code.items() if empties or offloads else ():
        for value in filter(_is_held, values_in(block)):
            if empties:
                stores.setdefault(value, key)
            elif key[0] is ActionKind.FORWARD:
                stores[value] = key
    new_code: Code = {}
    late_reads: dict[Value, None] = {}
    loaded: dict[int, dict[Value, None]] = {number: {} for number in numbers.values()}
    for place, (key, block) in enumerate(code.items()):
        number, changed = numbers[key], []
        for instruction in block:
            is_reading = instruction.op is not Op.SEND and (empties or key[0] is not ActionKind.FORWARD)
            late = [v for v in instruction.reads if is_reading and number > numbers[stores.get(v, key)]]
            late_reads.update(dict.fromkeys(late))
            changed.append(_read_away(instruction, late))
        # Numbers of copies: each program's own from 1, those that a phase shares from 1,000.
        shared = loaded[number], 1000 + number, lambda value: kind_of(value) is BindingKind.VARIABLE
        new_code[key] = load_and_store(changed, home, place + 1, shared)
    of_programs: dict[tuple[Key, DeviceGroup], list[Value]] = {}
    for value in late_reads:
        of_programs.setdefault((stores[value], value.group), []).append(value)
    for (key, _group), values in of_programs.items():
        new_code[key].append(_store(values))
    return new_code


def end_phase(code: Iterable[Instruction]) -> list[Instruction]:
    """Notes what a phase has made, and waits until another one may begin."""
    wait = Instruction(Op.WAIT, (UNDERWAY,), (), None, micro_batch=0)
    return [_note(code, 0), wait]


def wait_for_updates(code: Sequence[Instruction]) -> list[Instruction]:
    """Waits behind each program of a weight update until few enough are on the devices."""
    new_code, piece = list[Instruction](), list[Instruction]()
    for instruction in code:
        if instruction.op is not Op.STORE and any(earlier.op is Op.RUN for earlier in piece):
            new_code += [_note(piece, ALL), Instruction(Op.WAIT, (UNDERWAY,), (), None)]
            piece = []
        new_code.append(instruction)
        piece.append(instruction)
    return [*new_code, _note(piece, ALL), Instruction(Op.WAIT, (UNDERWAY,), (), None)]


def _note(code: Iterable[Instruction], micro_batch: int) -> Instruction:
    """Notes the last program on each IPU, and what goes to host memory: devices work in order."""
    last_writes: dict[Any, tuple[Value, ...]] = {}
    stored: set[Value] = set()  # it is not held on the devices for that
    for instruction in code:
        if instruction.op in (Op.RUN, Op.STORE):
            key = instruction.group if instruction.op is Op.RUN else instruction.writes
            last_writes[key] = instruction.writes
            stored.update(instruction.reads if instruction.op is Op.STORE else ())
    values = dict.fromkeys(v for writes in last_writes.values() for v in writes if v not in stored)
    return Instruction(Op.COLLECT, (UNDERWAY, *values), (), None, micro_batch=micro_batch)


# Replicas.


def run_together(layout: Layout, codes: Sequence[Code], joint: Mapping[Key, Program]) -> Code:
    """The code of all replicas, whose instructions follow each other.

    `joint`: by kind and stage, programs that run on the devices of all replicas at once. Before a program,
    whole weights are gathered of which replicas have parts.
    """
    new_code: Code = {}
    for copy, key in enumerate(codes[0], 1):
        new_code[key] = []
        for runs in zip(*(code[key] for code in codes), strict=True):
            if runs[0].op is Op.RUN and layout.whole.sharded:
                gathered, runs = _gather_weights(layout, runs, copy)
                new_code[key] += gathered
            is_joint = runs[0].op is Op.RUN and runs[0].program.kind is not None and key in joint
            new_code[key] += _run_jointly(layout, runs, joint[key], copy) if is_joint else runs
    return new_code


def _gather_weights(
    layout: Layout, runs: Sequence[Instruction], copy: int
) -> tuple[list[Instruction], tuple[Instruction, ...]]:
    sharded, home = layout.whole.sharded, at_home(layout)
    places = [
        place
        for place, value in enumerate(runs[0].reads)
        if kind_of(value) is BindingKind.VARIABLE and value.what.key in sharded
    ]
    if not places:
        return [], tuple(runs)
    parts = [home(_whole_variable(layout, runs[0].reads[place].what.key)) for place in places]
    gathered = tuple(value._replace(is_away=False, micro_batch=0, copy=copy) for value in parts)
    replica_values = [[run.reads[p]._replace(micro_batch=0, copy=copy) for p in places] for run in runs]
    changed = []
    for run, values in zip(runs, replica_values, strict=True):
        reads = list(run.reads)
        for place, value in zip(places, values, strict=True):
            reads[place] = value
        changed.append(run._replace(reads=tuple(reads)))
    group, split = parts[0].group, tuple(v for some in zip(*replica_values, strict=True) for v in some)
    return [
        Instruction(Op.GATHER, tuple(parts), gathered, group, micro_batch=0),
        Instruction(Op.SPLIT, gathered, split, group, micro_batch=0),
    ], tuple(changed)


def _whole_variable(layout: Layout, name: str) -> Value:
    return Value(Binding(BindingKind.VARIABLE, name), layout.home(name))


def _run_jointly(
    layout: Layout, runs: Sequence[Instruction], program: Program, copy: int
) -> list[Instruction]:
    group = layout.whole.groups[program.stage]

    def joined(name: str, values: Sequence[Any]) -> tuple[Value, ...]:
        return tuple(Value((name, place), group, micro_batch=0, copy=copy) for place in range(len(values)))

    def parts(of: str) -> tuple[Value, ...]:
        return tuple(v for some in zip(*(getattr(run, of) for run in runs), strict=True) for v in some)

    reads, writes = joined("joint argument", runs[0].reads), joined("joint result", runs[0].writes)
    join = Instruction(Op.JOIN, parts("reads"), reads, group, micro_batch=0)
    return [
        *([join] if reads else []),  # it may only ask for the replica's number
        Instruction(Op.RUN, reads, writes, group, program, micro_batch=0),
        Instruction(Op.SPLIT, writes, parts("writes"), group, micro_batch=0),
    ]


def reduce(
    layout: Layout, programs: Programs, keys: Sequence[str], names: Sequence[str]
) -> tuple[dict[DeviceGroup, list[Instruction]], dict[str, Value], dict[str, Value]]:
    """Joins what replicas have accumulated and assigned, with one program per group.

    Returns:
      By group, the instructions; by key, the means; and by variable, what was assigned.
    """
    placement, replicas, home = layout.whole, range(layout.num_replicas), at_home(layout)
    code: dict[DeviceGroup, list[Instruction]] = {}
    means: dict[str, Value] = {}
    joined: dict[str, Value] = {}
    for group in dict.fromkeys(placement.groups):
        group_keys = [key for key in keys if placement.groups[layout.stage_of(key)] is group]
        group_names = [name for name in names if layout.home(name) is group]
        parts = [[accumulator(layout, key, replica) for replica in replicas] for key in group_keys]
        parts += [[assigned(layout, name, replica) for replica in replicas] for name in group_names]
        if not parts:
            continue
        labels = [*(("mean", key) for key in group_keys), *(("assigned", name) for name in group_names)]
        reads = tuple(Value(("joined", *label), group) for label in labels)
        code[group] = [Instruction(Op.JOIN, tuple(v for some in parts for v in some), reads, group)]
        if not layout.joins_assigned:
            joined.update(zip(group_names, reads[len(group_keys) :], strict=True))
            group_names, reads, labels = [], reads[: len(group_keys)], labels[: len(group_keys)]
        if not reads:
            continue
        writes = tuple(Value(label, group) for label in labels)
        zeros = tuple(Value(("joined zeros", key), group) for key in group_keys)
        means.update(zip(group_keys, writes, strict=False))
        joined.update(zip(group_names, writes[len(group_keys) :], strict=True))
        variables = [*map(layout.variable_of, group_keys), *group_names]
        lie = [placement.sharding_in_program(name, group) for name in variables]
        mesh, partitions = group.replicated.mesh, tuple(sharding.spec for sharding in lie)
        function = mean_over_replicas(mesh, partitions, len(group_keys))
        shardings = [*lie, *lie[: len(group_keys)]]
        program = programs.between(group, function, "join_parts", shardings, range(len(group_keys)))
        code[group].append(Instruction(Op.RUN, reads, (*writes, *zeros), group, program))
        if group_keys:
            back = tuple(home(value) for some in parts[: len(group_keys)] for value in some)
            split = Instruction(Op.SPLIT, tuple(map(home, zeros)), back, group)
            code[group].append(split)
    return code, means, joined


def replica_parts(layout: Layout, code: Iterable[Instruction]) -> list[Instruction]:
    """Makes what comes first: each replica's part of the variables, and copies of shared ones."""
    splits = list[Instruction]()
    replica_variables: dict[tuple[str, bool], None] = {}  # names, and whether in host memory
    sends, renames = list[Instruction](), list[Instruction]()
    for value in dict.fromkeys(value for instruction in code for value in instruction.reads):
        kind, what = kind_of(value), value.what
        if kind is BindingKind.ASSIGNED:
            variable = value._replace(what=Binding(BindingKind.VARIABLE, what.key))
            renames.append(Instruction(Op.SAME, (variable,), (value,), value.group, None, value.replica))
        elif kind is BindingKind.VARIABLE and value.replica != ALL and not value.copy:
            variable = value
        else:
            continue
        home = layout.home(what.key, value.replica)
        replica_variables[what.key, variable.is_away] = None
        if variable.group is not home:
            home_value = variable._replace(group=home)
            place = variable.group, None, variable.replica
            sends.append(Instruction(Op.SEND, (home_value,), (variable,), *place))
    op = Op.SPLIT if layout.num_replicas > 1 else Op.SAME
    sources = [
        _whole_variable(layout, name)._replace(is_away=is_away) for name, is_away in replica_variables
    ]
    for group, wholes in _by_group(sources).items():
        parts = tuple(
            whole._replace(group=layout.home(whole.what.key, replica), replica=replica)
            for whole in wholes
            for replica in range(layout.num_replicas)
        )
        splits.append(Instruction(op, tuple(wholes), parts, group))
    return [*splits, *sends, *renames]


# The weight update.


def place_update(layout: Layout, code: Sequence[Instruction]) -> list[Instruction]:
    """Brings what the programs of a weight update read to their groups, once for all programs there.

    Adam's count of steps and the like, which are there before the update, are sent before its first
    program: a device copies only once it has done what was started there.
    """
    placement, home, new_code = layout.whole, at_home(layout), list[Instruction]()
    ahead, arrived = list[Instruction](), set[Value]()

    def is_apart(value: Value) -> bool:
        of_state = isinstance(value.what, UpdateValue) and value.what.kind == UpdateKind.STATE
        of_variable = kind_of(value) is BindingKind.VARIABLE and value.what.key in placement.sharded
        return (of_state and placement.shards_state) or of_variable

    def is_count(value: Value) -> bool:
        of_state = isinstance(value.what, UpdateValue) and value.what.kind == UpdateKind.STATE
        assert placement.updates is not None
        return of_state and placement.updates.state_leaves[value.what.key].variable is None

    for instruction in code:
        if instruction.op is not Op.RUN:
            new_code.append(instruction)
            continue
        reads, sent = list(instruction.reads), list[int]()
        for place, value in enumerate(instruction.reads):
            if value.group is instruction.group:
                continue
            reads[place] = value._replace(group=instruction.group, is_away=False, copy=1)
            if reads[place] not in arrived:
                arrived.add(reads[place])
                sent.append(place)
        sources = [home(instruction.reads[place]) for place in sent]
        for number, value in enumerate(sources):
            if is_apart(value):
                sources[number] = value._replace(is_away=False, copy=2)
                new_code.append(Instruction(Op.GATHER, (value,), (sources[number],), value.group))
        if sent:
            copies = tuple(reads[place] for place in sent)
            send = Instruction(Op.SEND, tuple(sources), copies, instruction.group)
            are_there = not placement.shards_state and all(map(is_count, sources))
            (ahead if are_there else new_code).append(send)
        new_code.append(instruction._replace(reads=tuple(reads)))
    return [*ahead, *new_code]
