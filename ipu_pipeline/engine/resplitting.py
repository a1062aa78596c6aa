"""Moves a state between pipelines that cut the same layers differently, or have other replicas.

A variable of a stage's parameters has a name that begins with the stage, `stage1/0/w`. The layer that it
belongs to is found by the rest of the name, without numbers, and by the order: of the variables with the
same rest, the first of one pipeline is the first of the other, in the order of stages and of the numbers in
names. A number that has the same values in every stage, as of `[w, b]` for each layer, tells no layer, and
is part of the rest. Where layers are stacked on a first axis in one and not, or differently, in the other,
their rows are counted. Names without a stage, which do not depend on it, are the same in both.

What could be meant in two ways is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.process_exchange import read_gathered
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.state import PipelineState, check_state, leaves_by_path
from ipu_pipeline.engine.updates.optimizer_wrappers import without_weights
from ipu_pipeline.engine.updates.update_programs import StateLeaf
from ipu_pipeline.ground.pytrees import describe
from ipu_pipeline.ground.tables import shorten

_PREFIX = re.compile(r"(stage|layer)(\d+)$|model$")
_ENDING = re.compile(r"_?(\d+)$")
_LEAST_RANK = 3  # of stacks: with less, rows may be those of a matrix
_MAX_NAMES = 300  # characters, in an error
_OTHER_OPTIMIZER = (
    "The state's optimizer state is of another optimizer than the pipeline's, or of layers stacked "
    "otherwise (masks and labels by names may differ, too)"
)

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


@dataclass(frozen=True)
class _Origin:
    """The origin of a variable in another state.

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

    The other pipeline may divide the same layers into other stages, and have another number of replicas or
    another `shard`. Layers are in the same order in both. Parameters are matched by names and shapes:
    `stage0/1/w` may become `stage1/0/w`, and rows of stacked layers may become variables, or other stacks.
    Arrays that are already in place are not copied: with `donate` a step destroys them in the old state,
    too.

    Example:
      >>> parts = [layers.Dense(4, name=name) for name in ("first", "second", "third")]
      >>> fine = engine.Pipeline(parts, num_micro_batches=1)
      >>> state = fine.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> coarse = engine.Pipeline([lambda x: parts[1](parts[0](x)), parts[2]], num_micro_batches=1)
      >>> coarse.trace(np.ones([2, 8], np.float32))
      >>> state = engine.resplit(state, coarse)
      >>> list(state.variables)
      ['first/kernel', 'first/bias', 'second/kernel', 'second/bias', 'third/kernel', 'third/bias']

    Args:
      state: the state of any pipeline, on any devices.
      pipeline: a pipeline traced by `trace` or `init`, with the same optimizer, or without one.

    Returns:
      The state for this pipeline, on its devices. Without an optimizer it has no optimizer state.

    Raises:
      TypeError: an argument has a wrong type, or it is called within a transformation such as `jax.jit`.
      ValueError: a step with `donate` has destroyed the state. Or the variables or the optimizer's state of
        the two do not match, or match in several ways.
      RuntimeError: the pipeline has not been traced.
    """
    check_state("engine.resplit", state)
    check_pipeline("engine.resplit", pipeline)
    return move_state(state, leaves_by_path(state.optimizer_state), pipeline)


def check_pipeline(caller: str, pipeline: Any) -> None:
    """Raises a TypeError if an argument is no pipeline."""
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"{caller}: pipeline must be an engine.Pipeline; got {type(pipeline).__name__}.")


def move_state(state: PipelineState, leaves: Mapping[str, Any] | None, pipeline: Pipeline) -> PipelineState:
    """The same as `resplit`, with the leaves of the optimizer's state by their paths."""
    new_shapes = {name: spec.shape for name, spec in pipeline.variables.items()}
    shapes = {name: tuple(value.shape) for name, value in without_weights(state.variables).items()}
    origins = _match(shapes, new_shapes)
    variables = {name: _read(state.variables, origin) for name, origin in origins.items()}
    updates, optimizer_state = pipeline.built.updates, None
    if updates is not None and leaves is not None:
        template = updates.state_tree.unflatten(range(len(updates.state_leaves)))
        paths = [path for path, _number in jax.tree_util.tree_flatten_with_path(template)[0]]
        optimizer = _Optimizer(leaves, origins, shapes)
        moved = [optimizer.move(path, leaf) for path, leaf in zip(paths, updates.state_leaves, strict=True)]
        optimizer.check_all_taken()
        optimizer_state = updates.state_tree.unflatten(moved)
    placed = pipeline.place(
        PipelineState(variables, optimizer_state, state.update_count, state.execution_count, state.key)
    )
    return dataclasses.replace(placed, variables=without_weights(placed.variables))


class _Optimizer:
    """The optimizer's state of another pipeline."""

    def __init__(
        self, leaves: Mapping[str, Any], origins: Mapping[str, _Origin], shapes: Mapping[str, Any]
    ) -> None:
        self._leaves, self._origins, self._shapes = leaves, origins, shapes
        self._are_others = any(origin.whole != name for name, origin in origins.items())
        self._remaining = set(leaves)

    def move(self, path: tuple[Any, ...], state_leaf: StateLeaf) -> Any:
        """The value of a leaf of the pipeline's optimizer state."""
        text = jax.tree_util.keystr(path)
        names = [str(entry.key) if isinstance(entry, jax.tree_util.DictKey) else "" for entry in path]
        place = next((place for place, name in enumerate(names) if name in self._origins), None)
        if place is None:
            leaf = self._take(text)
            if self._are_others and leaf is not None and state_leaf.grows:
                raise ValueError(
                    f"The optimizer's state at {text} has the shape {tuple(leaf.shape)} and belongs to no "
                    "single variable, as that of optax.flatten. It cannot be moved between splits."
                )
        else:
            leaf = self._of_variable(path, place, self._origins[names[place]])
        aval = state_leaf.aval
        if leaf is None or tuple(leaf.shape) != aval.shape or leaf.dtype != aval.dtype:
            fault = "missing there" if leaf is None else f"{describe(leaf)} there, not {describe(aval)}"
            raise ValueError(f"{_OTHER_OPTIMIZER}: {text} is {fault}.")
        return leaf

    def _of_variable(self, path: tuple[Any, ...], place: int, origin: _Origin) -> Any:
        leaves: dict[str, Any] = {}
        for name in dict.fromkeys(name for name, _row in origin.parts):
            leaf_path = (*path[:place], jax.tree_util.DictKey(name), *path[place + 1 :])
            leaf = self._take(jax.tree_util.keystr(leaf_path))
            if leaf is None or (origin.whole is None and tuple(leaf.shape) != self._shapes[name]):
                return None
            leaves[name] = leaf
        return _read(leaves, origin)

    def _take(self, text: str) -> Any:
        self._remaining.discard(text)
        return self._leaves.get(text)

    def check_all_taken(self) -> None:
        """Raises a ValueError if leaves of the state remain."""
        if self._remaining:
            names = shorten(", ".join(sorted(self._remaining)), _MAX_NAMES)
            raise ValueError(f"{_OTHER_OPTIMIZER}: it has no {names}.")


def _read(values: Mapping[str, Any], origin: _Origin) -> Any:
    """The value of a variable; the same array if its origin is a single variable."""
    if origin.whole is not None:
        return values[origin.whole]
    peers.check_joined("Moving stacked layers")
    names = list(dict.fromkeys(name for name, _row in origin.parts))
    arrays = dict(zip(names, map(np.asarray, read_gathered([values[name] for name in names])), strict=True))
    rows = [arrays[name] if row is None else arrays[name][row] for name, row in origin.parts]
    return np.stack(rows) if origin.is_stacked else rows[0]


def _match(old: Shapes, new: Shapes) -> dict[str, _Origin]:
    """The origin of each new variable among the old ones."""
    if dict(old) == dict(new):
        return {name: _Origin(((name, None),)) for name in new}
    origins = {
        name: _Origin(((name, None),))
        for name in new
        if old.get(name) == new[name] and _stage(name) is None
    }
    old_unmatched = {name: shape for name, shape in old.items() if name not in origins}
    new_unmatched = {name: shape for name, shape in new.items() if name not in origins}
    tails = _find_tails([old_unmatched, new_unmatched])
    groups: dict[str, dict[str, _Origin] | None] = {}
    for tail in sorted({*tails[0].values(), *tails[1].values()}):
        before = {name: shape for name, shape in old_unmatched.items() if tails[0][name] == tail}
        after = {name: shape for name, shape in new_unmatched.items() if tails[1][name] == tail}
        groups[tail] = _match_group(before, after)
    certain = {
        _rows(group) for group in groups.values() if group is not None and _is_certain(group, old, new)
    }
    siblings: dict[str, set[tuple[int, ...]]] = {}  # kind without its last word -> numbers of rows
    for tail, group in groups.items():
        if group is not None and (len(group) > 1 or _rows(group)):
            siblings.setdefault(_parent(tail), set()).add(_rows(group))
    wrong: tuple[list[str], list[str]] = ([], [])
    for tail, group in groups.items():
        # Rows of matrices that only happen to add up are no layers; what is beside them tells.
        is_known = group is not None and len(siblings.get(_parent(tail), ())) <= 1
        if group is None or not is_known or (_rows(group) and _rows(group) not in certain):
            wrong[0].extend(name for name in old_unmatched if tails[0][name] == tail)
            wrong[1].extend(name for name in new_unmatched if tails[1][name] == tail)
        else:
            origins |= group
    if wrong[0] or wrong[1]:
        listed = [shorten(", ".join(names), _MAX_NAMES) or "none" for names in wrong]
        raise ValueError(
            "The state's variables are not those of the pipeline's layers, or it is not certain which are "
            f"which. Left over in the state: {listed[0]}. Missing for the pipeline: {listed[1]}. Names "
            "without stages and numbers must be the same, and as many of each, in the same order; other "
            "names must be equal. Pipeline.adopt(state) takes the variables of the same names only, and "
            "begins others anew."
        )
    return {name: origins[name] for name in new}


def _match_group(old: Shapes, new: Shapes) -> dict[str, _Origin] | None:
    """Matches variables of one kind in their order; None if they do not belong together."""
    old_names, new_names = (sorted(names, key=lambda name: (_order(name), name)) for names in (old, new))
    if [old[name] for name in old_names] == [new[name] for name in new_names]:
        pairs = list(zip(old_names, new_names, strict=True))
        of_stages = any(_stage(name) is not None for name in (*old_names, *new_names))
        if not of_stages and any(before != after for before, after in pairs):
            return None
        if not _agree_with_names(pairs):
            return None
        return {name: _Origin(((before, None),)) for before, name in pairs}
    shapes = [*old.values(), *new.values()]
    ranks = {len(shape) for shape in shapes}
    if not old_names or not new_names or max(ranks) == 0 or max(ranks) - min(ranks) > 1:
        return None
    stacked = max(ranks)
    if len({shape[1:] if len(shape) == stacked else shape for shape in shapes}) > 1:
        return None

    def rows(name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        return [(name, row) for row in range(shape[0])] if len(shape) == stacked else [(name, None)]

    remaining = [part for name in old_names for part in rows(name, old[name])]
    origins = {}
    for name in new_names:
        number = len(rows(name, new[name]))
        origins[name] = _Origin(tuple(remaining[:number]), len(new[name]) == stacked)
        remaining = remaining[number:]
        if len(origins[name].parts) < number:
            return None
    return None if remaining else origins


def _rows(origins: Mapping[str, _Origin]) -> tuple[int, ...]:
    """The number of rows of each variable if layers are stacked differently; otherwise ()."""
    if all(origin.whole is not None for origin in origins.values()):
        return ()
    return tuple(len(origin.parts) for origin in origins.values())


def _is_certain(origins: Mapping[str, _Origin], old: Shapes, new: Shapes) -> bool:
    """Whether rows are layers: single ones are variables on one side, or they are matrices and more."""
    parts = [part for origin in origins.values() for part in origin.parts]
    ranks = {len(old[name]) for name, _row in parts} | {len(new[name]) for name in origins}
    return len(ranks) > 1 or min(ranks) >= _LEAST_RANK


def _agree_with_names(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether variables with numbers in their words, `block3/w`, keep these if all of them differ."""
    words = [tuple("/".join(_parts(name)) for name in pair) for pair in pairs]
    if any(part.isdecimal() for pair in pairs for name in pair for part in _parts(name)):
        return True  # numbers of places in a list, which are others in other stages
    old_words, new_words = ([pair[side] for pair in words] for side in (0, 1))
    are_names = len(set(old_words)) == len(old_words) and set(old_words) == set(new_words)
    return not are_names or old_words == new_words


def _find_tails(sides: Sequence[Shapes]) -> list[dict[str, str]]:
    """The kind of each variable: its name without the stage and without numbers that tell its layer."""
    # Of each kind of name and each of its numbers, the values in each stage of each pipeline.
    values: dict[tuple[str, int], dict[tuple[int, int | None], set[int]]] = {}
    for side, names in enumerate(sides):
        for name in names:
            for place, number in enumerate(_numbers(name)):
                by_stage = values.setdefault((_plain(name), place), {})
                by_stage.setdefault((side, _stage(name)), set()).add(number)
    stages = [{_stage(name) for name in names} for names in sides]
    tells = {
        key: len({frozenset(number_set) for number_set in by_stage.values()}) > 1
        or len(next(iter(by_stage.values()))) == 1
        for key, by_stage in values.items()
    }
    # With one stage on both sides nothing is known of numbers; then all tell a layer.
    has_several = any(len(side_stages) > 1 for side_stages in stages)

    def tail(name: str) -> str:
        plain, numbers = _plain(name), _numbers(name)
        if len(numbers) < 2 or not has_several:
            return plain
        kinds = [str(n) for place, n in enumerate(numbers) if not tells[plain, place]]
        return "/".join([plain, *(f"#{kind}" for kind in kinds)])

    return [{name: tail(name) for name in names} for names in sides]


def _parts(name: str) -> list[str]:
    """The parts of a name without its stage."""
    parts = name.split("/")
    return parts[1:] if len(parts) > 1 and _PREFIX.fullmatch(parts[0]) else parts


def _stage(name: str) -> int | None:
    """The stage in a name; None if there is none."""
    match = re.fullmatch(r"stage(\d+)", name.split("/")[0])
    return None if match is None or "/" not in name else int(match[1])


def _plain(name: str) -> str:
    """A name without its stage and numbers."""
    parts = [_ENDING.sub("", part) for part in _parts(name)]
    return "/".join(part for part in parts if part)


def _parent(tail: str) -> str:
    """A kind without its last word."""
    words = [word for word in tail.split("/") if not word.startswith("#")]
    return "/".join(words[:-1])


def _numbers(name: str) -> list[int]:
    """The numbers in a name after that of its stage; a word beside numbered ones counts as -1."""
    endings = (_ENDING.search(part) for part in _parts(name))
    return [int(match[1]) for match in endings if match is not None]


def _order(name: str) -> list[int]:
    """The sort key of variables of one kind: the stage, then the numbers."""
    prefix = _PREFIX.fullmatch(name.split("/")[0]) if "/" in name else None
    first = [int(prefix[2])] if prefix is not None and prefix[2] else []
    return first + _numbers(name)
