"""Moves a state between pipelines that cut the same layers differently, or have other replicas.

A variable of a stage's parameters has a name that begins with the stage, `stage1/0/w`. The layer that it
belongs to is found by the rest of the name, without numbers, and by the order: of the variables with the
same rest and shape, the first of one pipeline is the first of the other, in the order of stages and of the
numbers in names. Where layers are stacked on a first axis in one and not, or differently, in the other,
their rows are counted. Names that do not depend on stages stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.gathered import read_gathered
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.ground.tables import shorten

__all__ = ["move_state", "resplit"]

_PREFIX = re.compile(r"(stage|layer)(\d+)$|model$")
_MAX_NAMES = 300  # characters, in an error

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


@dataclass(frozen=True)
class _Origin:
    """What a variable is in another state.

    Attributes:
      parts: the names of variables, each with the row of its first axis; None: all of it.
      is_stacked: whether it is a stack of the parts, and not the only one of them.
    """

    parts: tuple[tuple[str, int | None], ...]
    is_stacked: bool = False

    @property
    def whole(self) -> str | None:
        """The name of the variable that it is; None if it is made of rows."""
        return self.parts[0][0] if not self.is_stacked and self.parts[0][1] is None else None


def resplit(state: PipelineState, pipeline: Pipeline) -> PipelineState:
    """Moves a state into a pipeline of another split: variables, optimizer state, counts and key.

    The other pipeline may have other stages of the same layers, another number of replicas, or other parts
    that replicas share out (`shard`). Layers are in the same order in both. Parameters are known by their
    names and shapes: `stage0/1/w` may become `stage1/0/w`, and rows of a stack of layers may become
    variables, or other stacks.

    Args:
      state: of any pipeline, on any devices.
      pipeline: traced, by `trace` or `init`, with the same optimizer, or without one.

    Returns:
      The state of the pipeline, on its devices. Without an optimizer it has no optimizer state.

    Raises:
      ValueError: the variables or the optimizer's state of one are not those of the other.
      RuntimeError: the pipeline has not been traced.
    """
    known = jax.tree_util.tree_flatten_with_path(state.optimizer_state)[0]
    leaves = None
    if state.optimizer_state is not None:
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in known}
    return move_state(state, leaves, pipeline)


def move_state(state: PipelineState, leaves: Mapping[str, Any] | None, pipeline: Pipeline) -> PipelineState:
    """The same as `resplit`, with the leaves of the optimizer's state by their paths.

    Args:
      state: its optimizer state is not read.
      leaves: by `jax.tree_util.keystr`; None without any.
      pipeline: as for `resplit`.
    """
    wanted = {name: spec.shape for name, spec in pipeline.variables.items()}
    shapes = {name: tuple(value.shape) for name, value in state.variables.items()}
    origins = _match(shapes, wanted)
    variables = {name: _read(state.variables, origin) for name, origin in origins.items()}
    updates, optimizer_state = pipeline.updates, None
    if updates is not None and leaves is not None:
        number = len(updates.state_leaves)
        template = updates.state_tree.unflatten(range(number))
        paths = [path for path, _number in jax.tree_util.tree_flatten_with_path(template)[0]]
        moved = [_move_leaf(path, leaves, origins, shapes) for path in paths]
        for path, leaf, known in zip(paths, moved, updates.state_leaves, strict=True):
            if leaf is None or tuple(leaf.shape) != known.aval.shape:
                raise ValueError(
                    "The state's optimizer state is of another optimizer than the pipeline's, or of layers "
                    f"stacked otherwise: {jax.tree_util.keystr(path)} "
                    + ("is missing in it." if leaf is None else f"has the shape {tuple(leaf.shape)} there.")
                )
        optimizer_state = updates.state_tree.unflatten(moved)
    return pipeline.place(
        PipelineState(variables, optimizer_state, state.update_count, state.execution_count, state.key)
    )


def _move_leaf(
    path: tuple[Any, ...], leaves: Mapping[str, Any], origins: Mapping[str, _Origin], shapes: Shapes
) -> Any:
    """A leaf of the optimizer's state, from those of another state; None if it is not among them."""
    names = [str(entry.key) if isinstance(entry, jax.tree_util.DictKey) else "" for entry in path]
    place = next((place for place, name in enumerate(names) if name in origins), None)
    if place is None:
        return leaves.get(jax.tree_util.keystr(path))
    origin = origins[names[place]]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _row in origin.parts):
        own = (*path[:place], jax.tree_util.DictKey(name), *path[place + 1 :])
        leaf = leaves.get(jax.tree_util.keystr(own))
        if leaf is None or (origin.whole is None and tuple(leaf.shape) != shapes[name]):
            return None
        found[name] = leaf
    return _read(found, origin)


def _read(values: Mapping[str, Any], origin: _Origin) -> Any:
    """The value of what is made of others; the very array if it is one of them."""
    if origin.whole is not None:
        return values[origin.whole]
    peers.check_joined("Moving stacked layers")
    names = list(dict.fromkeys(name for name, _row in origin.parts))
    known = dict(zip(names, map(np.asarray, read_gathered([values[name] for name in names])), strict=True))
    rows = [known[name] if row is None else known[name][row] for name, row in origin.parts]
    return np.stack(rows) if origin.is_stacked else rows[0]


def _match(known: Shapes, wanted: Shapes) -> dict[str, _Origin]:
    """For each variable that is wanted, what it is of those that are known.

    Raises:
      ValueError: they do not belong together.
    """
    if dict(known) == dict(wanted):
        return {name: _Origin(((name, None),)) for name in wanted}
    fixed = {name for name in wanted if known.get(name) == wanted[name] and not _order(name)}
    found = {name: _Origin(((name, None),)) for name in fixed}
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for number, names in enumerate((known, wanted)):
        for name in names:
            if name not in fixed:
                groups.setdefault(_tail(name), ([], []))[number].append(name)
    wrong: tuple[list[str], list[str]] = ([], [])
    restacked: dict[str, set[tuple[int, ...]]] = {}  # kind without its last part -> numbers of rows
    for tail, (ours, theirs) in groups.items():
        own = _match_group({n: known[n] for n in ours}, {n: wanted[n] for n in theirs})
        rows = () if own is None else tuple(len(origin.parts) for origin in own.values())
        is_restacked = own is not None and any(origin.whole is None for origin in own.values())
        restacked.setdefault(tail.rpartition("/")[0], set()).add(rows if is_restacked else ())
        if own is None:
            wrong[0].extend(ours)
            wrong[1].extend(theirs)
        else:
            found |= own
    # Matrices whose rows only happen to add up are no stacks: then those beside them are none either.
    for tail, (ours, theirs) in groups.items():
        if len(restacked[tail.rpartition("/")[0]]) > 1:
            wrong[0].extend(ours)
            wrong[1].extend(theirs)
    if wrong[0] or wrong[1]:
        listed = [shorten(", ".join(names), _MAX_NAMES) or "none" for names in wrong]
        raise ValueError(
            "The state's variables are not those of the pipeline's layers. Left over in the state: "
            f"{listed[0]}. Missing for the pipeline: {listed[1]}. Their names, without stages and numbers, "
            "must be the same, and as many of each, in the same order."
        )
    return {name: found[name] for name in wanted}


def _match_group(known: Shapes, wanted: Shapes) -> dict[str, _Origin] | None:
    """Matches variables of one kind in their order; None if they do not belong together."""
    ours, theirs = (sorted(names, key=lambda name: (_order(name), name)) for names in (known, wanted))
    by_path = [{_path(name): name for name in names} for names in (ours, theirs)]
    are_named = len(by_path[0]) == len(ours) and len(by_path[1]) == len(theirs)
    if are_named and by_path[0].keys() == by_path[1].keys():
        theirs = [by_path[1][_path(name)] for name in ours]
    if [known[name] for name in ours] == [wanted[name] for name in theirs]:
        return {name: _Origin(((own, None),)) for own, name in zip(ours, theirs, strict=True)}
    shapes = [*known.values(), *wanted.values()]
    ranks = {len(shape) for shape in shapes}
    if not shapes or max(ranks) == 0 or max(ranks) - min(ranks) > 1:
        return None
    stacked = max(ranks)
    if len({shape[1:] if len(shape) == stacked else shape for shape in shapes}) > 1:
        return None

    def rows(name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        return [(name, row) for row in range(shape[0])] if len(shape) == stacked else [(name, None)]

    left = [part for name in ours for part in rows(name, known[name])]
    found = {}
    for name in theirs:
        number = len(rows(name, wanted[name]))
        found[name] = _Origin(tuple(left[:number]), len(wanted[name]) == stacked)
        left = left[number:]
        if len(found[name].parts) < number:
            return None
    return None if left else found


def _without_prefix(name: str) -> tuple[list[str], list[int]]:
    """The parts of a name without its stage, and the stage's number."""
    parts = name.split("/")
    prefix = _PREFIX.fullmatch(parts[0]) if len(parts) > 1 else None
    if prefix is None:
        return parts, []
    return parts[1:], [int(prefix[2])] if prefix[2] else []


def _path(name: str) -> str:
    """A name without its stage."""
    return "/".join(_without_prefix(name)[0])


def _tail(name: str) -> str:
    """A name without its stage and numbers."""
    return "/".join(part for part in _without_prefix(name)[0] if not part.isdecimal())


def _order(name: str) -> list[int]:
    """The numbers in a name: that of its stage, and then those of layers."""
    parts, numbers = _without_prefix(name)
    return numbers + [int(part) for part in parts if part.isdecimal()]
