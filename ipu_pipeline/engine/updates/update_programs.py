"""The weight update on each device: which accumulators lie there, and which programs run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs import partitioning
from ipu_pipeline.engine.jaxprs.costs import count_operations
from ipu_pipeline.engine.jaxprs.equal_parts import divide_equal_parts
from ipu_pipeline.engine.option_types import Reduction
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, ValueKind
from ipu_pipeline.engine.tracing.frames import Enqueued
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.optimizer_tracing import (
    TracedOptimizer,
    UpdateKind,
    UpdateValue,
    find_variable,
)
from ipu_pipeline.engine.updates.optimizer_wrappers import LossScale

# The owner of a variable accumulates its gradients under the variable's full name. Every other stage that
# shares the variable has an accumulator of its own on its group, which is added to the owner's once per
# weight update. On the same device both use one accumulator, except for a running mean, whose formula takes
# one gradient per micro-batch.

_OF_STAGE = " of stage "  # in the keys of accumulators that are not the owner's


class Accumulator(NamedTuple):
    """An accumulator: the full name of its variable, and the stage on whose group it lies."""

    variable: str
    stage: int


@dataclass(frozen=True, eq=False)
class AccumulatorPlan:
    """The accumulators of a pipeline, by their keys."""

    # (stage, full name of a variable) -> the key of what that stage's programs accumulate into
    keys: Mapping[tuple[int, str], str]
    extra: Mapping[str, Accumulator]  # the accumulators besides the owners', whose keys are the full names


def variable_of(key: str) -> str:
    """The variable that a key's accumulator belongs to, in any pipeline."""
    return key.rpartition(_OF_STAGE)[0] or key


def plan_accumulators(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    ipus: Sequence[int],
    reduction: Reduction,
) -> AccumulatorPlan:
    """Plans which accumulators there are, and which programs add to each."""
    keys: dict[tuple[int, str], str] = {}
    extra: dict[str, Accumulator] = {}
    holders: dict[tuple[str, int], str] = {}  # (variable, device) -> the key there
    for index, (stage, stage_programs) in enumerate(zip(traced.stages, programs, strict=True)):
        accumulated = {
            value.index
            for program in (stage_programs.forward, *stage_programs.backwards)
            for value in program.arguments
            if value.kind is ValueKind.ACCUMULATOR
        }
        for position in stage_programs.trained:
            name = stage.variables[position].name
            place = (name, ipus[index])
            if traced.owners[name] == index:
                keys[index, name] = holders[place] = name
            elif place in holders and reduction is not Reduction.RUNNING_MEAN:
                keys[index, name] = holders[place]
            elif position in accumulated:
                key = f"{name}{_OF_STAGE}{index}"
                keys[index, name] = holders[place] = key
                extra[key] = Accumulator(name, index)
    return AccumulatorPlan(keys, extra)


# Everything that one device updates is updated together, by the first of its stages, which is the home of
# its variables in the partition. `partitioning` says where values that join several homes are computed;
# those that join only scalars are computed on the device of the last stage.
#
# A leaf of the optimizer's state belongs to a variable if the variable's name is in the leaf's path. This
# is so for everything that Optax makes with `tree.map` over the parameters, which are one flat dict, full
# name -> array. Other leaves live where their new value is computed. Values that depend on no variable,
# such as a step counter, are computed by the first home, and the others get copies.

_COUNTS = (UpdateKind.COUNT, UpdateKind.UPDATE_COUNT)


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """A program that a stage's device runs per weight update, or once to make its part of the state."""

    name: str  # for profiles, for example "stage0_update"
    stage: int  # it runs where this stage lives
    function: Callable[..., list[Any]]  # takes `arguments`, returns `results`
    arguments: tuple[UpdateValue, ...]  # what they are
    results: tuple[UpdateValue, ...]  # what they are
    num_operations: float  # what it costs, see `costs.count_operations`
    loops_by_data: bool  # whether it has a loop that ends when its data says so


class StateLeaf(NamedTuple):
    """A leaf of the optimizer's state: its path, shape and dtype, and the stage where it lives.

    `variable` is the full name of the variable that it belongs to; None if there is none. `grows` tells
    whether its shape depends on those of variables.
    """

    path: str
    aval: jax.ShapeDtypeStruct
    stage: int
    variable: str | None
    grows: bool


class Move(NamedTuple):
    """A value that an update sends from one stage's place to another's."""

    source: int  # the stage that has or makes it
    target: int  # the stage whose program reads it
    what: str  # in words; empty for a value that is neither a variable nor a gradient nor state
    aval: Any  # its shape and dtype
    primitive: str  # the primitive that reads it there


@dataclass(frozen=True, eq=False)
class Updates:
    """The optimizer of a pipeline."""

    state_tree: Any  # structure of the optimizer's state
    state_leaves: tuple[StateLeaf, ...]  # its leaves
    initial: Mapping[int, Any]  # the numbers that fill leaves at the start, by the leaves' places
    inits: tuple[UpdateProgram, ...]  # the programs that make the others, in the order in which they run
    # the programs of a weight update, in that order, too; one, if one device has all trained variables
    updates: tuple[UpdateProgram, ...]
    moves: tuple[Move, ...]  # the values that these send
    init_needs_outputs: bool  # whether the state at the start depends on the last stage's outputs
    loss_scale: LossScale | None  # where the scale of the loss is; None without loss scaling
    has_callbacks: bool  # whether a weight update calls back into Python, which may raise
    enqueued: tuple[Enqueued, ...]  # what a weight update enqueues

    @property
    def enqueued_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that a weight update enqueues."""
        return tuple(aval for entry in self.enqueued for aval in entry.avals)


def find_read(programs: Sequence[UpdateProgram]) -> set[Any]:
    """Places of the last stage's outputs that some programs read."""
    return {v.key for program in programs for v in program.arguments if v.kind == UpdateKind.OUTPUT}


def cut_updates(traced: TracedOptimizer, variable_homes: Mapping[str, int], last_stage: int) -> Updates:
    """Partitions an optimizer by home."""
    # Where state lives.
    stages = sorted({variable_homes[name] for name in traced.trained})
    variables = [find_variable(path, traced.trained) for path in traced.state_paths]
    owners: list[partitioning.Home | None] = [
        None if name is None else variable_homes[name] for name in variables
    ]

    def home_of(value: UpdateValue) -> partitioning.Home | None:
        if value.kind in (UpdateKind.PARAMETER, UpdateKind.GRADIENT):
            return variable_homes[value.key]
        return owners[value.key] if value.kind == UpdateKind.STATE else None

    def place(flat: jaxprs.FlatJaxpr) -> partitioning.Places:
        return partitioning.place(flat, {var: home_of(traced.labels[var]) for var in flat.inputs})

    states = [UpdateValue(UpdateKind.STATE, index) for index in range(len(owners))]
    placed = place(traced.update)
    while len(stages) > 1:  # a leaf without an owner yet lives where its new value is made
        homes = [placed.home_of(atom) for atom in placed.flat.outputs[len(traced.results) :]]
        new_owners = [home if owner is None else owner for owner, home in zip(owners, homes, strict=True)]
        if new_owners == owners:
            break
        owners = new_owners
        placed = place(traced.update)

    def with_homes(
        values: Sequence[UpdateValue], places: partitioning.Places
    ) -> list[tuple[Any, partitioning.Home]]:
        owned = [
            # Enqueued values stay where they are made.
            places.home_of(atom) if value.kind == UpdateKind.ENQUEUED else home_of(value)
            for value, atom in zip(values, places.flat.outputs, strict=True)
        ]
        made_at = [stages[0] if home is None else home for home in owned]
        return list(zip(places.flat.outputs, made_at, strict=True))

    def stage_of(home: partitioning.Home | None) -> int:
        if home is None:
            return stages[0]
        return last_stage if home == partitioning.JOINT else home

    # Programs.
    results = [*traced.results, *states]
    inputs = {traced.labels[var]: var for var in traced.update.inputs}
    pieces = partitioning.cut(placed, with_homes(results, placed))
    pieces = divide_equal_parts(pieces, [inputs.get(value) for value in results])
    init_places = place(traced.init)
    has_effects = any(equation.effects for equation in init_places.flat.equations)
    initial = {} if has_effects else jaxprs.find_uniform(init_places.flat)
    computed = [value for value in states if value.key not in initial]
    init_homes = with_homes(states, init_places)
    init_pieces = partitioning.cut(init_places, [init_homes[value.key] for value in computed])
    inits = _make_programs("init", init_pieces, computed, traced.labels, stage_of)
    updates = _make_programs("update", pieces, results, traced.labels, stage_of)
    state_leaves = tuple(
        StateLeaf(jax.tree_util.keystr(path), aval, stage_of(owner), name, grows)
        for path, aval, owner, name, grows in zip(
            traced.state_paths, traced.state_avals, owners, variables, traced.grows, strict=True
        )
    )

    # Values that go from program to program.
    def source_of(var: Any) -> int:
        label = traced.labels.get(var)
        if label is not None and label.kind == UpdateKind.OUTPUT:
            return last_stage
        return stage_of(placed.homes[var])

    moves: dict[tuple[Any, int], Move] = {}
    for piece in pieces:
        target = stage_of(piece.home)
        for var in piece.program.inputs:
            label = traced.labels.get(var)
            if source_of(var) != target and (label is None or label.kind not in _COUNTS):
                text = "" if label is None else _describe(label, state_leaves)
                primitive = piece.readers.get(var, "")
                moves.setdefault((var, target), Move(source_of(var), target, text, var.aval, primitive))
    needs_outputs = any(v.kind == UpdateKind.OUTPUT for program in inits for v in program.arguments)
    return Updates(
        traced.state_tree,
        state_leaves,
        initial,
        inits,
        updates,
        tuple(moves.values()),
        needs_outputs,
        traced.loss_scale,
        jaxprs.has_callbacks(traced.update),
        traced.enqueued,
    )


def _make_programs(
    name: str,
    pieces: Sequence[partitioning.Piece],
    results: Sequence[UpdateValue],
    labels: Mapping[Any, UpdateValue],
    stage_of: Callable[[partitioning.Home | None], int],
) -> tuple[UpdateProgram, ...]:
    sent: dict[Any, UpdateValue] = {}  # what they make for each other
    final_rounds = {piece.home: piece.round for piece in pieces}
    last = {(piece.home, piece.round): piece for piece in pieces}
    numbers: Counter[tuple[partitioning.Home, int]] = Counter()
    programs = []
    for piece in pieces:
        for var in piece.sent:
            sent[var] = UpdateValue(UpdateKind.SENT, len(sent))
        owner = "joint" if piece.home == partitioning.JOINT else f"stage{piece.home}"
        place = piece.home, piece.round
        ending = "" if piece.round == final_rounds[piece.home] else f"_round{piece.round}"
        if piece is not last[place]:  # it has what is equal in other homes
            ending += f"_part{numbers[place]}"
            numbers[place] += 1
        function: Callable[..., list[Any]] = piece.program
        equations = piece.program.closed_jaxpr.jaxpr.eqns
        program_results = [*(results[place] for place in piece.results), *(sent[var] for var in piece.sent)]
        if not program_results:  # it only prints or calls back into Python
            function = _with_result(piece.program)
            program_results.append(sent.setdefault(piece.program, UpdateValue(UpdateKind.SENT, len(sent))))
        programs.append(
            UpdateProgram(
                f"{owner}_{name}{ending}",
                stage_of(piece.home),
                function,
                tuple(labels[var] if var in labels else sent[var] for var in piece.program.inputs),
                tuple(program_results),
                count_operations(piece.program.closed_jaxpr.jaxpr),
                any(jaxprs.has_primitive(equation, "while") for equation in equations),
            )
        )
    return tuple(programs)


def _with_result(program: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Gives a program without results one to wait for: what Python raises within it is raised there."""

    def function(*arguments: Any) -> list[Any]:
        return [*program(*arguments), jnp.zeros((), bool)]

    return function


def _describe(value: UpdateValue, state_leaves: Sequence[StateLeaf]) -> str:
    if value.kind == UpdateKind.STATE:
        return f"optimizer state {state_leaves[value.key].path}"
    if value.kind == UpdateKind.OUTPUT:
        return f"output {value.key} of the last stage"
    return f"{'variable' if value.kind == UpdateKind.PARAMETER else 'gradient of'} {value.key}"
