"""A step as a list of actions, which each of its readings follows one after another.

The schedule says when each stage handles each micro-batch. Here that becomes a list of all actions: a
micro-batch comes from the feed (`feed`), parts of variables are gathered (`Gather`), a program is started
(`Compute`), its results go to other devices (`SendOn`) or to host memory (`Store`), an execution phase ends
(`end_phase`), and what the replicas accumulated is joined (`Reduce`). A feature that a pipeline does not
use has no action and no part of one, so no code asks whether it is used.

An action is the same for all micro-batches and all columns. It works on a `ColumnRun`: a column's
micro-batches on their way. The run's `Reading` says what is done with values, whether these are arrays or
only shapes or sizes: `Devices` runs a step, `compiling.Shapes` compiles it, and `phase_memory.Ghosts` finds
what it takes of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.action_log import ActionLog, Started
from ipu_pipeline.engine.devices.constants import Constants
from ipu_pipeline.engine.devices.device_groups import WHOLE, DeviceGroup
from ipu_pipeline.engine.devices.feeds import OtherShapes
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placing import copy_to, put
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.devices.underway import Underway
from ipu_pipeline.engine.execution.outputs import Accumulated, Outputs
from ipu_pipeline.engine.execution.plans import Plan
from ipu_pipeline.engine.execution.starting import Starting
from ipu_pipeline.engine.execution.templates import Send, Template
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases
from ipu_pipeline.engine.state import Handed

__all__ = [
    "ALL",
    "Call",
    "ColumnRun",
    "Compute",
    "ComputeTogether",
    "Devices",
    "Dispatch",
    "Gather",
    "Observe",
    "Observer",
    "Order",
    "PhaseRun",
    "Reading",
    "Reduce",
    "SendOn",
    "StepAction",
    "StepRun",
    "Store",
    "Together",
    "end_phase",
    "feed",
    "follow",
    "make_dispatch",
    "wait",
]


class Reading(Protocol):
    """The contract of readings: what the actions of a step do with the values of a column."""

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts a program for a micro-batch or chunk. Returns its results."""

    def scalar(self, number: int, group: DeviceGroup) -> Any:
        """Returns an int32 scalar on a group."""

    def copy_to(self, values: Sequence[Any], group: DeviceGroup, tag: Tag | None = None) -> list[Any]:
        """Copies values that lie on one group to another; see `placing.copy_to`."""

    def put(
        self, values: Sequence[Any], group: DeviceGroup, partitions: Sequence[PartitionSpec] | None = None
    ) -> list[Any]:
        """Puts values on a group, divided over its devices as `partitions` say; see `placing.put`."""

    def store(
        self, values: Sequence[Any], group: DeviceGroup, leavers: Sequence[Template | None] | None = None
    ) -> list[Any]:
        """Puts values into host memory for a group.

        `leavers` are the programs that leave them; None stands for the last program started.
        """

    def underway(self, limit: int | None) -> Underway:
        """Returns a counter of pieces of work, of which at most `limit` may be unfinished."""


class Devices:
    """The reading that runs a step: values are arrays."""

    copy_to = staticmethod(copy_to)

    def __init__(self, constants: Constants) -> None:
        """Takes the scalars from `constants`."""
        self.scalar: Callable[[int, DeviceGroup], Any] = constants.scalar

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts a program."""
        del chunk
        return template.function(*arguments)

    def launch_jointly(
        self, template: Template, group: DeviceGroup, program: Any, arguments: Any, chunk: int
    ) -> Any:
        """Starts `program`, which is a template jitted for the devices of all replicas, on their group."""
        del template, group, chunk
        return program(*arguments)

    def forget(self) -> None:
        """Does nothing; see `watched.WatchedDevices`."""

    def put(
        self, values: Sequence[Any], group: DeviceGroup, partitions: Sequence[PartitionSpec] | None = None
    ) -> list[Any]:
        """Puts arrays on a group."""
        return put(values, group, partitions=partitions)

    def store(
        self, values: Sequence[Any], group: DeviceGroup, leavers: Sequence[Template | None] | None = None
    ) -> list[Any]:
        """Puts arrays into host memory for a group."""
        del leavers
        return put(values, group, offloaded=True)

    def underway(self, limit: int | None) -> Underway:
        """Returns a counter of pieces of work, which waits for the devices."""
        return Underway(limit)


class PhaseRun:
    """The phase that a column runs now.

    Attributes:
      weights: (device, full name) -> what was brought from host memory for it.
    """

    def __init__(
        self, phases: ExecutionPhases, plan: Plan, offloads_activations: bool, reading: Reading
    ) -> None:
        """Begins the first phase."""
        self.weights: dict[tuple[int, str], Any] = {}
        self._keeps_values, self._plan = phases.keeps_values, plan
        self._offloads_activations = offloads_activations
        self._underway, self._reading = reading.underway(phases.num_ahead), reading
        self._kept: dict[int, Template] = {}  # slots that only backwards read -> since which program
        self._made: list[Any] = []

    def note(self, made: Sequence[Any], template: Template | None = None) -> None:
        """Notes what is made in the phase, and, after a program, what only backwards read from then on."""
        self._made += made
        if template is not None:
            self._kept.update(dict.fromkeys(template.kept, template))

    def end(self, slots: list[Any]) -> None:
        """Ends the phase, sends off what leaves the devices, and waits until another phase may begin."""
        leaving: Iterable[int] = ()
        if not self._keeps_values:
            leaving = range(len(slots))
        elif self._offloads_activations:
            leaving = self._kept
        of_groups: dict[DeviceGroup, list[int]] = {}
        for slot in leaving:
            if slots[slot] is not None:
                of_groups.setdefault(self._plan.slot_groups[slot], []).append(slot)
        self._made += store_slots(self._reading, slots, of_groups, self._kept)
        self.weights.clear()
        self._underway.add(self._made)
        self._made, self._kept = [], {}
        self._underway.wait()


def store_slots(
    reading: Reading,
    slots: list[Any],
    of_groups: Mapping[DeviceGroup, Sequence[int]],
    kept: Mapping[int, Template] = MappingProxyType({}),
) -> list[Any]:
    """Moves values to host memory and returns them. `kept` says which programs leave them."""
    made = []
    for group, own in of_groups.items():
        stored = reading.store([slots[slot] for slot in own], group, [kept.get(slot) for slot in own])
        made += stored
        for slot, value in zip(own, stored, strict=True):
            slots[slot] = value
    return made


@dataclass(eq=False)
class ColumnRun:
    """The micro-batches of a replica, on their way."""

    reading: Reading  # what is done with values
    # the arguments of each program that stay the same, by its index; None for the others
    prepared: list[list[Any]]
    accumulators: dict[str, Any]  # by key; each program leaves new ones
    # returns what the feed brings next, in the order of `feed_slots`
    next_chunk: Callable[[], Sequence[Any]]
    outputs: Outputs | None  # takes the last stage's outputs, if they are wanted
    feed_slots: Sequence[int]  # the slots that `next_chunk` fills
    num_slots: int  # the slots of a micro-batch or chunk
    size: int  # micro-batches of a chunk
    step: int  # the number of the step, or of the run of a loop
    first: int  # the number of the first micro-batch, or of the iteration
    num_accumulated: int  # micro-batches in the accumulators before the step
    phase: PhaseRun | None  # the execution phase that runs now; None without phases
    enqueued: list[list[Any]]  # by the number of the leaf, for each micro-batch or chunk
    stored: Mapping[str, Any]  # variables in host memory, by full name
    starting: Starting = field(default_factory=Starting)  # notes the program that is being started
    # the log of what this process starts, if there is one
    log: ActionLog | None = None
    slots: dict[int, list[Any]] = field(default_factory=dict)  # by number of the micro-batch or chunk
    # variables that stages have assigned, by full name
    assigned: dict[str, Any] = field(default_factory=dict)
    # gathered variables for the next program, by full name
    gathered: dict[str, Any] = field(default_factory=dict)
    # by number of the micro-batch or chunk, slot -> the number of programs that have yet to read it, where
    # the schedule says which is the last
    unread: dict[int, dict[int, int]] = field(default_factory=dict)

    def finish(self, num_stacked: int | None) -> Accumulated:
        """Returns the micro-batches' results. `num_stacked` says how many of a chunk are stacked."""
        assert self.outputs is not None
        outputs = self.outputs.taken
        handed = [Handed(list(leaves), num_stacked) for leaves in zip(*self.enqueued, strict=True)]
        return Accumulated(
            outputs.first,
            outputs.last,
            outputs.carried,
            self.outputs.collected,
            handed,
            self.assigned,
            self.accumulators,
        )


class Call(NamedTuple):
    """A program that is about to be started in a column."""

    column: ColumnRun
    template: Template
    arguments: list[Any]


class Together(Protocol):
    """The contract of what is done for all columns at once."""

    def gather(self, stage: int, names: Sequence[str]) -> list[list[Any]]:
        """Returns for each column whole variables of a stage; each replica has a part of these."""

    def launch(self, calls: Sequence[Call], chunk: int) -> Sequence[Sequence[Any]]:
        """Starts one program for all replicas. Returns the results of each column."""

    def reduce(self, group: DeviceGroup, columns: Sequence[ColumnRun]) -> None:
        """Joins what the columns have accumulated and assigned on a group."""


@dataclass(eq=False)
class StepRun:
    """A step on its way."""

    columns: Sequence[ColumnRun]  # each replica's part of it
    together: Together  # what the columns do at the same time


ALL = -1  # stands for all micro-batches of a step
StepAction: TypeAlias = "Callable[[StepRun, int], None]"  # takes the number of the micro-batch or chunk
# a program's actions and that number, or actions for all micro-batches and `ALL`
Order: TypeAlias = "Sequence[tuple[tuple[StepAction, ...], int]]"
Before: TypeAlias = "Callable[[ColumnRun, list[Any]], None]"  # changes a program's arguments
After: TypeAlias = "Callable[[ColumnRun, int, Sequence[Any]], None]"  # takes its results
Observer: TypeAlias = "Callable[[int, Template, int, Mapping[int, Sequence[Any]]], None]"  # see `Observe`


def follow(order: Order, run: StepRun) -> int | None:
    """Follows the actions of a step.

    Returns:
      The number of the first micro-batch or chunk that was not run, as it has other shapes; None if all
      were. Those before it are then complete.
    """
    entries, chunk = iter(order), 0
    try:
        for actions, chunk in entries:
            for action in actions:
                action(run, chunk)
    except OtherShapes:
        end = chunk
    else:
        return None
    for column in run.columns:
        column.slots.pop(end, None)
    for actions, chunk in entries:
        if 0 <= chunk < end:
            for action in actions:
                action(run, chunk)
    return end


def feed(run: StepRun, chunk: int) -> None:
    """Takes a micro-batch or chunk from the feed."""
    for column in run.columns:
        slots = column.slots[chunk] = [None] * column.num_slots
        for slot, value in zip(column.feed_slots, column.next_chunk(), strict=True):
            slots[slot] = value


@dataclass(frozen=True, eq=False)
class Gather:
    """Gathers variables of which replicas have parts in all of them, for the next program."""

    stage: int
    names: tuple[str, ...]

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Gathers them for all columns."""
        del chunk
        found = run.together.gather(self.stage, self.names)
        for column, values in zip(run.columns, found, strict=True):
            column.gathered.update(zip(self.names, values, strict=True))


class Dispatch:
    """Starts a program of a column, and does what belongs before and after it."""

    def __init__(self, template: Template, before: Sequence[Before], after: Sequence[After]) -> None:
        """Looks up beforehand what each micro-batch needs."""
        scalars = template.taken(BindingKind.SCALAR)
        self.template = template
        self._index, self._group, self._keys = template.index, template.group, template.accumulators
        self._loads, self._stores, self._releases = template.loads, template.stores, template.releases
        self._micro_batches = [place for place, kind in scalars if kind is ValueKind.MICRO_BATCH]
        self._accumulated = [place for place, kind in scalars if kind is ValueKind.ACCUMULATED]
        self._before, self._after = before, after

    def bind(self, run: ColumnRun, chunk: int) -> list[Any]:
        """Returns the arguments of the program."""
        slots, accumulators = run.slots[chunk], run.accumulators
        arguments = run.prepared[self._index].copy()
        for place, key in enumerate(self._keys):
            arguments[place] = accumulators[key]
        for place, slot in self._loads:
            arguments[place] = slots[slot]
        for place in self._micro_batches:
            arguments[place] = run.reading.scalar(run.first + chunk * run.size, self._group)
        for place in self._accumulated:
            arguments[place] = run.reading.scalar(run.num_accumulated + chunk * run.size, self._group)
        for prepare in self._before:
            prepare(run, arguments)
        return arguments

    def take(self, run: ColumnRun, chunk: int, results: Sequence[Any]) -> None:
        """Takes the results of the program."""
        slots, accumulators = run.slots[chunk], run.accumulators
        for place, key in enumerate(self._keys):
            accumulators[key] = results[place]
        for place, slot in self._stores:
            slots[slot] = results[place]
        for take in self._after:
            take(run, chunk, results)
        for slot in self._releases:
            slots[slot] = None


@dataclass(frozen=True, eq=False)
class Compute:
    """Starts a program in each column."""

    dispatches: tuple[Dispatch, ...]

    @property
    def template(self) -> Template:
        """The program, as the first column has it."""
        return self.dispatches[0].template

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Starts the programs one after another."""
        # Each keyword of a call takes a fiftieth of the library's time for a program.
        for column, own in zip(run.columns, self.dispatches):  # noqa: B905
            starting = column.starting
            starting.template, starting.chunk = own.template, chunk
            own.take(column, chunk, column.reading.launch(own.template, own.bind(column, chunk), chunk))


@dataclass(frozen=True, eq=False)
class ComputeTogether(Compute):
    """Starts a program in all columns together, which computes with the other columns' values."""

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Starts the programs at once."""
        pairs = list(zip(self.dispatches, run.columns, strict=False))
        calls = [Call(column, own.template, own.bind(column, chunk)) for own, column in pairs]
        for (own, column), results in zip(pairs, run.together.launch(calls, chunk), strict=True):
            own.take(column, chunk, results)


@dataclass(frozen=True, eq=False)
class SendOn:
    """Sends results of a program to another group, in each column."""

    sends: tuple[Send, ...]  # the transfer, by column
    # by column, makes the tag of a transfer between processes; None within one process
    tags: tuple[Callable[[int], Tag | None] | None, ...]

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Starts the transfers."""
        for (target, sources, targets, releases), column, find_tag in zip(  # noqa: B905  # see `Compute`
            self.sends, run.columns, self.tags
        ):
            slots, tag = column.slots[chunk], None if find_tag is None else find_tag(chunk)
            copies = column.reading.copy_to([slots[slot] for slot in sources], target, tag)
            for slot, copy in zip(targets, copies):  # noqa: B905
                slots[slot] = copy
            for slot in releases:
                slots[slot] = None


@dataclass(frozen=True, eq=False)
class Store:
    """Moves what only backwards read from now on to host memory."""

    kept: tuple[Mapping[DeviceGroup, Sequence[int]], ...]  # by column, the slots of each group

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Moves the values to the host memory of their groups."""
        for kept, column in zip(self.kept, run.columns, strict=False):
            store_slots(column.reading, column.slots[chunk], kept)


@dataclass(frozen=True, eq=False)
class Reduce:
    """Joins what the columns have accumulated and assigned on a group."""

    group: DeviceGroup

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Joins the values of all columns."""
        del chunk
        run.together.reduce(self.group, run.columns)


def end_phase(run: StepRun, chunk: int) -> None:
    """Ends an execution phase: its values leave the devices, and the host waits until another may begin."""
    for column in run.columns:
        assert column.phase is not None
        column.phase.end(column.slots[chunk])


def wait(run: StepRun, chunk: int) -> None:
    """Waits for the programs' results, because Python that they call may raise."""
    del chunk
    for column in run.columns:
        outputs = column.outputs
        assert outputs is not None
        made = [(part.outputs, part.loss) for part in outputs.collected]
        made_last = (outputs.taken.last, column.enqueued, column.assigned, column.accumulators)
        jax.block_until_ready((made, made_last))


@dataclass(frozen=True, eq=False)
class Observe:
    """Tells the observer what is held after a program and its transfers."""

    observer: Observer  # takes the replica, the program, the chunk and the slots
    templates: tuple[Template, ...]  # the program, by column

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Tells the observer about each column."""
        for number, (template, column) in enumerate(zip(self.templates, run.columns, strict=False)):
            self.observer(number, template, chunk, column.slots)


# The parts of `Dispatch`, one for each feature of a pipeline that concerns a program.


def take_gathered(places: Sequence[tuple[int, str]]) -> Before:
    """Takes variables from the gathered ones, which are then released; `places` has (argument, name)."""

    def prepare(run: ColumnRun, arguments: list[Any]) -> None:
        for place, name in places:
            arguments[place] = run.gathered[name]
        run.gathered.clear()

    return prepare


def load(template: Template, away: Collection[str], divided: Mapping[str, Any]) -> Before:
    """Brings a program's arguments from host memory to its group, including the variables `away`.

    A phase keeps these for its other programs. `divided` says how variables lie on the group.
    """
    variables = [one for one in template.taken(BindingKind.VARIABLE) if one[1] in away]
    names, group = dict(template.taken(BindingKind.VARIABLE)), template.group
    partitions = [divided.get(names.get(place, ""), WHOLE) for place in range(len(template.arguments))]

    def prepare(run: ColumnRun, arguments: list[Any]) -> None:
        known = {} if run.phase is None else run.phase.weights
        for place, name in variables:
            arguments[place] = known.get((group.ipu, name), run.stored[name])
        arguments[:] = run.reading.put(arguments, group, partitions)
        for place, name in variables:
            known[group.ipu, name] = arguments[place]

    return prepare


def store_accumulators(template: Template) -> After:
    """Moves accumulators back to host memory, which the end of a phase waits for."""
    keys, group = template.accumulators, template.group

    def take(run: ColumnRun, _chunk: int, results: Sequence[Any]) -> None:
        stored = run.reading.store(results[: len(keys)], group)
        run.accumulators.update(zip(keys, stored, strict=True))
        if run.phase is not None:
            run.phase.note(stored)

    return take


def note_in_phase(template: Template) -> After:
    """Notes in the execution phase what a program makes, and what it leaves for backwards."""

    def take(run: ColumnRun, _chunk: int, results: Sequence[Any]) -> None:
        assert run.phase is not None
        run.phase.note(results, template)

    return take


def take_assigned(places: Sequence[tuple[int, str]]) -> Before:
    """Takes variables that the stage assigns as they are now; `places` has (argument, name)."""

    def prepare(run: ColumnRun, arguments: list[Any]) -> None:
        for place, name in places:
            arguments[place] = run.assigned.get(name, arguments[place])

    return prepare


def assign(template: Template) -> After:
    """Gives variables their new values, for the step's later programs of the stage."""
    assigned = template.given(BindingKind.ASSIGNED)

    def take(run: ColumnRun, _chunk: int, results: Sequence[Any]) -> None:
        for place, name in assigned:
            run.assigned[name] = results[place]

    return take


def enqueue(template: Template) -> After:
    """Keeps what a stage enqueues, in the order of the micro-batches."""
    enqueued = template.given(BindingKind.ENQUEUED)

    def take(run: ColumnRun, _chunk: int, results: Sequence[Any]) -> None:
        for place, leaf in enqueued:
            run.enqueued[leaf].append(results[place])

    return take


def collect(run: ColumnRun, chunk: int, _results: Sequence[Any]) -> None:
    """Keeps what the last stage returns."""
    if run.outputs is not None:
        run.outputs.take(run.reading.put, run.slots[chunk], chunk)


def log(template: Template, plan: Plan) -> After:
    """Logs what this process has started, for processes that wait for it."""
    kind, stage = template.kind.words, template.stage
    sends = [send for other in plan.templates.values() if not other.group.is_here for send in other.sends]
    received = {slot for send in sends for slot in send.targets}  # slots filled by other processes
    awaited = [slot for _place, slot in template.loads if slot in received]

    def take(run: ColumnRun, chunk: int, results: Sequence[Any]) -> None:
        if run.log is not None:
            action = Started(kind, stage, run.step, run.first + chunk * run.size, run.size)
            run.log.note(action, results, [run.slots[chunk][slot] for slot in awaited])

    return take


def release_shared(template: Template, plan: Plan) -> After:
    """Releases slots once the last of their readers has been started."""

    def take(run: ColumnRun, chunk: int, _results: Sequence[Any]) -> None:
        unread = run.unread.setdefault(chunk, dict(plan.num_readers))
        for slot in template.shared:
            unread[slot] -= 1
            if not unread[slot]:
                run.slots[chunk][slot] = None

    return take


def make_dispatch(
    template: Template,
    plan: Plan,
    placement: StatePlacement,
    gathered: frozenset[str],
    phases: ExecutionPhases | None,
) -> Dispatch:
    """Makes the dispatch of a column's program, with the parts that the pipeline uses."""
    before: list[Before] = []
    after: list[After] = []
    asked = [one for one in template.taken(BindingKind.VARIABLE) if one[1] in gathered]
    if asked:
        before.append(take_gathered(asked))
    assigned = {spec.name for spec in placement.traced.stages[template.stage].assigned}
    changing = [one for one in template.taken(BindingKind.VARIABLE) if one[1] in assigned]
    if changing:
        before.append(take_assigned(changing))
    empties_devices = phases is not None and not phases.keeps_values
    if (placement.offloads_in_micro_batches or empties_devices) and template.group.is_here:
        before.append(load(template, placement.offloaded - gathered, placement.partitions))
    if placement.has_peers and template.group.is_here:
        after.append(log(template, plan))
    if placement.offloads_accumulators and template.accumulators:
        after.append(store_accumulators(template))
    if template.given(BindingKind.ASSIGNED):
        after.append(assign(template))
    if template.given(BindingKind.ENQUEUED):
        after.append(enqueue(template))
    if template is plan.last_forward:
        after.append(collect)
    if phases is not None:
        after.append(note_in_phase(template))
    if template.shared:
        after.append(release_shared(template, plan))
    return Dispatch(template, before, after)
