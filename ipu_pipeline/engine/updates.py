"""Weight updates: an optimizer that was traced over all variables, cut into one program per stage.

An equation belongs to the stage whose leaves it touches; what depends on no leaf (a step counter) is
replicated. Stages on the same IPU count as one here. An equation that joins leaves of several IPUs, as a
global norm does, has no place yet: NotImplementedError names it.

A leaf of the optimizer's state belongs to a variable if the variable's name stands in the leaf's path,
which it does for all that Optax makes with `tree.map` over the parameters: they are one flat dict, full
name -> array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.optimizer_tracing import TracedOptimizer, UpdateKind, UpdateValue
from ipu_pipeline.engine.variables import VariableSpec

__all__ = [
    "StateLeaf",
    "UpdateProgram",
    "Updates",
    "cut_updates",
]


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """What one stage runs per weight update, or once to make its part of the optimizer's state.

    Attributes:
      name: for profiles, for example "stage0_update".
      function: takes `arguments`, returns `results`.
      arguments: what they are.
      results: what they are.
    """

    name: str
    function: Callable[..., list[Any]]
    arguments: tuple[UpdateValue, ...]
    results: tuple[UpdateValue, ...]


class StateLeaf(NamedTuple):
    """A leaf of the optimizer's state: its path, shape and dtype, and stage (None: replicated)."""

    path: str
    aval: jax.ShapeDtypeStruct
    stage: int | None


@dataclass(frozen=True, eq=False)
class Updates:
    """The optimizer of a pipeline.

    Attributes:
      stages: the stages that have trained variables; the first one makes the replicated leaves.
      state_tree: structure of the optimizer's state.
      state_leaves: its leaves.
      inits: one program per entry of `stages`, which makes the state.
      updates: one program per entry of `stages`.
      init_needs_outputs: whether the state at the start depends on the last stage's outputs.
    """

    stages: tuple[int, ...]
    state_tree: Any
    state_leaves: tuple[StateLeaf, ...]
    inits: tuple[UpdateProgram, ...]
    updates: tuple[UpdateProgram, ...]
    init_needs_outputs: bool


def cut_updates(traced: TracedOptimizer, homes: Mapping[str, int]) -> Updates:
    """Cuts an optimizer by stage.

    Args:
      traced: the optimizer.
      homes: full name of each trained variable -> the stage that updates it. What one stage updates may
        be joined.

    Returns:
      The programs.

    Raises:
      NotImplementedError: the update of one stage's variables depends on another stage's.
    """
    stages = tuple(sorted({homes[name] for name in traced.trained}))
    state_leaves = tuple(
        StateLeaf(jax.tree_util.keystr(path), aval, _leaf_owner(path, traced.trained, homes))
        for path, aval in zip(traced.state_paths, traced.state_avals, strict=True)
    )

    def stage_of(value: UpdateValue) -> int | None:
        if value.kind in (UpdateKind.PARAMETER, UpdateKind.GRADIENT):
            return homes[value.key]
        return state_leaves[value.key].stage if value.kind == UpdateKind.STATE else None

    states = [UpdateValue(UpdateKind.STATE, index) for index in range(len(state_leaves))]
    inits = _cut_by_stage("init", traced.init, traced.labels, states, stages, stage_of)
    updates = _cut_by_stage(
        "update", traced.update, traced.labels, [*traced.results, *states], stages, stage_of
    )
    needs_outputs = any(v.kind == UpdateKind.OUTPUT for program in inits for v in program.arguments)
    return Updates(stages, traced.state_tree, state_leaves, inits, updates, needs_outputs)


def _leaf_owner(
    path: Sequence[Any], trained: Mapping[str, VariableSpec], homes: Mapping[str, int]
) -> int | None:
    for entry in reversed(path):
        if isinstance(entry, jax.tree_util.DictKey) and entry.key in trained:
            return homes[entry.key]
    return None


def _cut_by_stage(
    name: str,
    flat: jaxprs.FlatJaxpr,
    labels: Mapping[Any, UpdateValue],
    results: Sequence[UpdateValue],
    stages: Sequence[int],
    stage_of: Callable[[UpdateValue], int | None],
) -> tuple[UpdateProgram, ...]:
    if len(stages) > 1:
        _check_separable(flat, labels, results, stage_of)
    cut = []
    for stage in stages:
        own = [
            (value, atom)
            for value, atom in zip(results, flat.outputs, strict=True)
            if stage_of(value) == stage or (stage_of(value) is None and stage == stages[0])
        ]
        program = jaxprs.extract(flat, [atom for _value, atom in own])
        cut.append(
            UpdateProgram(
                f"stage{stage}_{name}",
                program,
                tuple(labels[var] for var in program.inputs),
                tuple(value for value, _atom in own),
            )
        )
    return tuple(cut)


def _check_separable(
    flat: jaxprs.FlatJaxpr,
    labels: Mapping[Any, UpdateValue],
    results: Sequence[UpdateValue],
    stage_of: Callable[[UpdateValue], int | None],
) -> None:
    """Raises if a result depends on leaves of another stage than its own."""
    touched: dict[Any, frozenset[int]] = {}
    joined_by: dict[Any, str] = {}  # variable -> the primitive that first joined several stages
    for var in flat.inputs:
        stage = stage_of(labels[var])
        touched[var] = frozenset() if stage is None else frozenset((stage,))
    for equation in flat.equations:
        atoms = [
            atom for atom in equation.invars if not isinstance(atom, jex_core.Literal) and atom in touched
        ]
        union = frozenset().union(*(touched[atom] for atom in atoms))
        joins = [joined_by[atom] for atom in atoms if atom in joined_by]
        for var in equation.outvars:
            touched[var] = union
            if len(union) > 1:
                joined_by[var] = joins[0] if joins else equation.primitive.name
    for value, atom in zip(results, flat.outputs, strict=True):
        stages = frozenset() if isinstance(atom, jex_core.Literal) else touched.get(atom, frozenset())
        own = stage_of(value)
        if stages - {own}:
            what = (
                f"the new value of {value.key}"
                if value.kind == UpdateKind.PARAMETER
                else f"a leaf of the optimizer's state ({value.key})"
            )
            others = ", ".join(str(stage) for stage in sorted(stages - {own}))
            where = "a leaf that no stage owns" if own is None else f"on stage {own}"
            raise NotImplementedError(
                f"Updates that join stages on several IPUs are not supported yet: {what}, {where}, depends "
                f"on the variables of stage {others} (first joined by `{joined_by.get(atom, 'a copy')}`). "
                "Global norms and other whole-tree transformations do this."
            )
