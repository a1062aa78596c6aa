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
from ipu_pipeline.engine.plan import lowering as functions
from ipu_pipeline.engine.plan.lowering import Code, Key, Layout, Programs, accumulator, assigned
from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Program, Value
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
    read = [value for block in code.values() for one in block for value in one.reads]
    for value in [*read, *collected]:
        readers.setdefault(value.what, {})[value.group] = None
    found: Code = {}
    for key, block in code.items():
        targets: dict[DeviceGroup, list[Value]] = {}
        for value in [value for one in block for value in one.writes if value.micro_batch != ALL]:
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
        found[key] = [*block, *sends]
    return found


# Collecting.


def collect(
    code: Code, wanted: Sequence[Value], is_summed: bool, size: int | None, programs: Programs, last: Key
) -> tuple[Code, tuple[Value, ...], dict[int, Value]]:
    """Collects values of each micro-batch, and what stages enqueue.

    Returns:
      The code; the registers of sums, or of one list; and by number of the leaf, the lists of what is
      enqueued.
    """
    found = {key: list(block) for key, block in code.items()}
    kept: tuple[Value, ...] = ()
    if wanted:
        (group, replica), made = (wanted[0].group, wanted[0].replica), list(wanted)
        run = functools.partial(Instruction, Op.RUN, group=group, replica=replica, micro_batch=0)
        alike = [] if size is None else [place for place, v in enumerate(made) if v.micro_batch == ALL]
        if alike:
            reads = tuple(made[place] for place in alike)
            for place in alike:
                made[place] = Value(("spread", place), group, replica, 0)
            assert size is not None
            spread = programs.between(group, functions.spread(size), "spread")
            found[last].append(run(reads, tuple(made[place] for place in alike), program=spread))
        if is_summed:
            kept = tuple(Value(("sum", place), group, replica) for place in range(len(made)))
            add = programs.between(group, functions.add_collected, "add", donated=range(len(kept)))
            found[last].append(run((*kept, *made), kept, program=add))
        else:
            kept = (Value(("collected",), group, replica),)
            found[last].append(
                Instruction(Op.COLLECT, (*kept, *made), (), group, None, replica, 0, size=size)
            )
    lists: dict[int, Value] = {}
    for block in found.values():
        for one in list(block):
            for value in one.writes if one.op in (Op.RUN, Op.SAME) else ():
                if kind_of(value) is BindingKind.ENQUEUED:
                    own = lists[value.what.key] = value._replace(micro_batch=ALL)
                    block.append(
                        Instruction(
                            Op.COLLECT, (own, value), (), value.group, None, value.replica, 0, size=size
                        )
                    )
    return found, kept, lists


# Offloading.


def leave_activations(code: Code) -> Code:
    """Moves what only backwards read from some forward on to host memory, and has them read it there."""
    last: dict[Value, Key] = {}  # -> the last forward that makes or reads it
    read_behind: dict[Value, None] = {}
    for key, block in code.items():
        for one in block:
            if key[0] is ActionKind.FORWARD:
                last.update(dict.fromkeys((*one.reads, *one.writes), key))
            else:
                read_behind.update(dict.fromkeys(one.reads))
    leaving = {value: last[value] for value in read_behind if value in last and _is_held(value)}
    found: Code = {}
    for key, block in code.items():
        if key[0] is not ActionKind.FORWARD:
            block = [one._replace(reads=_send_away(one.reads, leaving)) for one in block]
        of_groups = _by_group(value for value, own in leaving.items() if own == key)
        found[key] = [*block, *map(_store, of_groups.values())]
    return found


def _send_away(values: Iterable[Value], away: Any) -> tuple[Value, ...]:
    return tuple([value._replace(is_away=True) if value in away else value for value in values])


def _by_group(values: Iterable[Value]) -> dict[DeviceGroup, list[Value]]:
    found: dict[DeviceGroup, list[Value]] = {}
    for value in values:
        found.setdefault(value.group, []).append(value)
    return found


def _is_held(value: Value) -> bool:
    return isinstance(value.what, Binding) and value.what.is_of_micro_batch


def _store(values: Sequence[Value]) -> Instruction:
    there = tuple(value._replace(is_away=True, copy=0) for value in values)
    (first, *_rest) = values
    return Instruction(Op.STORE, tuple(values), there, first.group, None, first.replica, first.micro_batch)


def load_and_store(
    block: Sequence[Instruction],
    home: Callable[[Value], Value],
    copy: int,
    shared: tuple[dict[Value, None], int, Callable[[Value], bool]] | None = None,
) -> list[Instruction]:
    """Brings what programs read from host memory, and what they write there back."""
    found: list[Instruction] = []
    known, shared_copy, is_shared = shared or ({}, copy, lambda _value: False)
    for one in block:
        is_copy_of_update = one.op is Op.SAME and type(one.writes[0].what) is tuple
        if one.op not in (Op.RUN, Op.JOIN, Op.COLLECT) and not is_copy_of_update:
            found.append(one)
            continue
        away = {value: there for value in one.reads if (there := home(value)).is_away}
        changed = {
            value: value._replace(
                is_away=False, copy=shared_copy if is_shared(value) else copy, micro_batch=one.micro_batch
            )
            for value in away
        }
        brought = [value for value in away if changed[value] not in known]
        known.update(dict.fromkeys(changed[value] for value in brought if is_shared(value)))
        move = functools.partial(one._replace, program=None)
        for group, values in _by_group(brought).items():
            reads, writes = tuple(away[v] for v in values), tuple(changed[v] for v in values)
            found.append(move(op=Op.LOAD, reads=reads, writes=writes, group=group))
        stored = [value for value in one.writes if home(value).is_away]
        changed |= {value: value._replace(copy=copy) for value in stored if value not in changed}
        reads, writes = (tuple([changed.get(v, v) for v in some]) for some in (one.reads, one.writes))
        found.append(one._replace(reads=reads, writes=writes))
        if stored:
            reads, writes = tuple(changed[v] for v in stored), tuple(map(home, stored))
            found.append(move(op=Op.STORE, reads=reads, writes=writes, group=reads[0].group))
    return found


def at_home(layout: Layout) -> Callable[[Value], Value]:
    """A function that says where a value lies while no program uses it."""
    whole = layout.whole

    def home(value: Value) -> Value:
        kind, what = kind_of(value), value.what
        if value.copy:  # it was brought to the devices
            return value
        if type(what) is tuple:
            is_result = what[0] == "new" and whole.is_offloaded(what[1])
            is_zeros = what[0] in ("zeros", "joined zeros") and whole.offloads_accumulators
            return value._replace(is_away=True) if is_result or is_zeros else value
        if kind is BindingKind.VARIABLE and what.key in whole.offloaded:
            if value.replica != ALL and what.key in whole.sharded:
                return value  # it is gathered from host memory
            return value._replace(is_away=True, group=layout.home(what.key, value.replica))
        if kind is BindingKind.ACCUMULATOR and whole.offloads_accumulators:
            return value._replace(is_away=True)
        if isinstance(what, UpdateValue) and what.kind == UpdateKind.STATE and whole.offloads_state:
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
    """What a later phase reads waits in host memory, and weights are brought once a phase."""
    phases = list(dict.fromkeys(map(phase_of, code)))
    numbers = {key: phases.index(phase_of(key)) for key in code}
    left: dict[Value, Key] = {}  # -> the program behind which a value is stored; it stays for its phase
    for key, block in code.items() if empties or offloads else ():
        for value in [value for one in block for value in (*one.reads, *one.writes) if _is_held(value)]:
            if empties:
                left.setdefault(value, key)
            elif key[0] is ActionKind.FORWARD:
                left[value] = key
    found: Code = {}
    read: dict[Value, None] = {}
    known: dict[int, dict[Value, None]] = {number: {} for number in numbers.values()}
    for place, (key, block) in enumerate(code.items()):
        number, changed = numbers[key], []
        for one in block:
            is_reading = one.op is not Op.SEND and (empties or key[0] is not ActionKind.FORWARD)
            late = [v for v in one.reads if is_reading and number > numbers[left.get(v, key)]]
            read.update(dict.fromkeys(late))
            changed.append(one._replace(reads=_send_away(one.reads, late)))
        shared = known[number], 1000 + number, lambda value: kind_of(value) is BindingKind.VARIABLE
        found[key] = load_and_store(changed, home, place + 1, shared)
    of_programs: dict[tuple[Key, DeviceGroup], list[Value]] = {}
    for value in read:
        of_programs.setdefault((left[value], value.group), []).append(value)
    for (key, _group), values in of_programs.items():
        found[key].append(_store(values))
    return found


def end_phase(code: Iterable[Instruction]) -> list[Instruction]:
    """Notes what a phase has made, and waits until another one may begin."""
    wait = Instruction(Op.WAIT, (UNDERWAY,), (), None, micro_batch=0)
    return [_note(code, 0), wait]


def wait_for_updates(code: Sequence[Instruction]) -> list[Instruction]:
    """Waits behind each program of a weight update until few enough are on the devices."""
    found, made = list[Instruction](), list[Instruction]()
    for one in code:
        if one.op is not Op.STORE and any(own.op is Op.RUN for own in made):
            found += [_note(made, ALL), Instruction(Op.WAIT, (UNDERWAY,), (), None)]
            made = []
        found.append(one)
        made.append(one)
    return [*found, _note(made, ALL), Instruction(Op.WAIT, (UNDERWAY,), (), None)]


def _note(code: Iterable[Instruction], micro_batch: int) -> Instruction:
    """Notes the last program on each IPU, and what goes to host memory: devices work in order."""
    made: dict[Any, tuple[Value, ...]] = {}
    stored: set[Value] = set()  # it is not held on the devices for that
    for one in code:
        if one.op in (Op.RUN, Op.STORE):
            made[one.group if one.op is Op.RUN else one.writes] = one.writes
            stored.update(one.reads if one.op is Op.STORE else ())
    values = dict.fromkeys(value for values in made.values() for value in values if value not in stored)
    return Instruction(Op.COLLECT, (UNDERWAY, *values), (), None, micro_batch=micro_batch)


# Replicas.


def run_together(layout: Layout, codes: Sequence[Code], joint: Mapping[Key, Program]) -> Code:
    """The code of all replicas, whose instructions follow each other.

    `joint`: by kind and stage, programs that run on the devices of all replicas at once. Before a program,
    whole weights are gathered of which replicas have parts.
    """
    found: Code = {}
    for copy, key in enumerate(codes[0], 1):
        found[key] = []
        for own in zip(*(code[key] for code in codes), strict=True):
            if own[0].op is Op.RUN and layout.whole.sharded:
                gathered, own = _gather_weights(layout, own, copy)
                found[key] += gathered
            is_joint = own[0].op is Op.RUN and own[0].program.kind is not None and key in joint
            found[key] += _run_jointly(layout, own, joint[key], copy) if is_joint else own
    return found


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
    whole = tuple(value._replace(is_away=False, micro_batch=0, copy=copy) for value in parts)
    own = [[one.reads[p]._replace(micro_batch=0, copy=copy) for p in places] for one in runs]
    changed = []
    for one, values in zip(runs, own, strict=True):
        reads = list(one.reads)
        for place, value in zip(places, values, strict=True):
            reads[place] = value
        changed.append(one._replace(reads=tuple(reads)))
    group, split = parts[0].group, tuple(v for some in zip(*own, strict=True) for v in some)
    return [
        Instruction(Op.GATHER, tuple(parts), whole, group, micro_batch=0),
        Instruction(Op.SPLIT, whole, split, group, micro_batch=0),
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
        return tuple(v for some in zip(*(getattr(one, of) for one in runs), strict=True) for v in some)

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
    whole, replicas, home = layout.whole, range(layout.num_replicas), at_home(layout)
    code: dict[DeviceGroup, list[Instruction]] = {}
    means: dict[str, Value] = {}
    joined: dict[str, Value] = {}
    for group in dict.fromkeys(whole.groups):
        own = [key for key in keys if whole.groups[layout.stage_of(key)] is group]
        given = [name for name in names if layout.home(name) is group]
        parts = [[accumulator(layout, key, replica) for replica in replicas] for key in own]
        parts += [[assigned(layout, name, replica) for replica in replicas] for name in given]
        if not parts:
            continue
        whats = [*(("mean", key) for key in own), *(("assigned", name) for name in given)]
        reads = tuple(Value(("joined", *what), group) for what in whats)
        code[group] = [Instruction(Op.JOIN, tuple(v for some in parts for v in some), reads, group)]
        if not layout.joins_assigned:
            joined.update(zip(given, reads[len(own) :], strict=True))
            given, reads, whats = [], reads[: len(own)], whats[: len(own)]
        if not reads:
            continue
        writes = tuple(Value(what, group) for what in whats)
        zeros = tuple(Value(("joined zeros", key), group) for key in own)
        means.update(zip(own, writes, strict=False))
        joined.update(zip(given, writes[len(own) :], strict=True))
        variables = [*map(layout.variable_of, own), *given]
        lie = [whole.sharding_in_program(name, group) for name in variables]
        mesh, partitions = group.replicated.mesh, tuple(one.spec for one in lie)
        function = functions.mean_over_replicas(mesh, partitions, len(own))
        shardings = [*lie, *lie[: len(own)]]
        program = programs.between(group, function, "join_parts", shardings, range(len(own)))
        code[group].append(Instruction(Op.RUN, reads, (*writes, *zeros), group, program))
        if own:
            back = tuple(home(value) for some in parts[: len(own)] for value in some)
            split = Instruction(Op.SPLIT, tuple(map(home, zeros)), back, group)
            code[group].append(split)
    return code, means, joined


def replica_parts(layout: Layout, code: Iterable[Instruction]) -> list[Instruction]:
    """What comes first: each replica's part of the variables, and copies of those that stages share."""
    found: list[Instruction] = []
    needed: dict[tuple[str, bool], None] = {}  # variables of replicas, and whether in host memory
    sends, same = list[Instruction](), list[Instruction]()
    for value in dict.fromkeys(value for one in code for value in one.reads):
        kind, what = kind_of(value), value.what
        if kind is BindingKind.ASSIGNED:
            own = value._replace(what=Binding(BindingKind.VARIABLE, what.key))
            same.append(Instruction(Op.SAME, (own,), (value,), value.group, None, value.replica))
        elif kind is BindingKind.VARIABLE and value.replica != ALL and not value.copy:
            own = value
        else:
            continue
        home = layout.home(what.key, value.replica)
        needed[what.key, own.is_away] = None
        if own.group is not home:
            here = own._replace(group=home)
            sends.append(Instruction(Op.SEND, (here,), (own,), own.group, None, own.replica))
    for name, is_away in needed:
        source = _whole_variable(layout, name)._replace(is_away=is_away)
        parts = tuple(
            Value(source.what, layout.home(name, replica), replica, is_away=is_away)
            for replica in range(layout.num_replicas)
        )
        found.append(Instruction(Op.SPLIT if len(parts) > 1 else Op.SAME, (source,), parts, source.group))
    return [*found, *sends, *same]


# The weight update.


def place_update(layout: Layout, code: Sequence[Instruction]) -> list[Instruction]:
    """Brings what the programs of a weight update read to their groups, once for all programs there."""
    whole, home, found = layout.whole, at_home(layout), list[Instruction]()
    there: set[Value] = set()

    def is_apart(value: Value) -> bool:
        of_state = isinstance(value.what, UpdateValue) and value.what.kind == UpdateKind.STATE
        of_variable = kind_of(value) is BindingKind.VARIABLE and value.what.key in whole.sharded
        return (of_state and whole.shards_state) or of_variable

    for one in code:
        if one.op is not Op.RUN:
            found.append(one)
            continue
        reads, sent = list(one.reads), list[int]()
        for place, value in enumerate(one.reads):
            if value.group is one.group:
                continue
            reads[place] = value._replace(group=one.group, is_away=False, copy=1)
            if reads[place] not in there:
                there.add(reads[place])
                sent.append(place)
        sources = [home(one.reads[place]) for place in sent]
        for number, value in enumerate(sources):
            if is_apart(value):
                sources[number] = value._replace(is_away=False, copy=2)
                found.append(Instruction(Op.GATHER, (value,), (sources[number],), value.group))
        if sent:
            copies = tuple(reads[place] for place in sent)
            found.append(Instruction(Op.SEND, tuple(sources), copies, one.group))
        found.append(one._replace(reads=tuple(reads)))
    return found
