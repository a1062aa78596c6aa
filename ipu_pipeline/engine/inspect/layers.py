"""Variables by layer: a tree of their scopes, in which equal neighbours are listed once.

The parts of a full name are divided by slashes, or by the dots of torch's names. Neighbours are equal if
their names differ only in one number, which counts up, and their contents have the same names, shapes and
dtypes: block_3, block_4 and block_5 are `block_{3..5}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ipu_pipeline.engine.inspect.facts import Layer
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["find_layers", "fold_names", "select_layers"]

_NUMBER = re.compile(r"[0-9]+")
_PART = re.compile(r"[^/.]+[/.]?|[/.]")
_MAX_DEPTH = 50  # scopes below are not told apart; Python's recursion is limited


class _Node:
    """A scope while the tree is made; one with a `spec` is a variable."""

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.spec: VariableSpec | None = None

    def signature(self) -> Any:
        """A value that is equal for nodes that look the same inside."""
        own = None if self.spec is None else (self.spec.shape, self.spec.dtype)
        return own, tuple((name, child.signature()) for name, child in self.children.items())

    def specs(self) -> list[VariableSpec]:
        own = [] if self.spec is None else [self.spec]
        return [*own, *(spec for child in self.children.values() for spec in child.specs())]


def find_layers(specs: Iterable[VariableSpec]) -> tuple[Layer, ...]:
    """The outermost scopes, below any single scope around all, in the order of their first variables."""
    root = _Node()
    for spec in specs:
        node = root
        parts = _PART.findall(spec.name)
        for part in (*parts[:_MAX_DEPTH], *filter(None, ["".join(parts[_MAX_DEPTH:])])):
            node = node.children.setdefault(part, _Node())
        node.spec = spec
    prefix = ""
    while len(root.children) == 1 and root.spec is None:
        ((name, child),) = root.children.items()
        if not any(grandchild.children for grandchild in child.children.values()):
            break
        prefix, root = prefix + name, child
    return _make_parts(root, prefix, 1)


def select_layers(layers: Sequence[Layer], limit: int) -> list[Layer]:
    """Selects layers that together have all variables, at most `limit` where that is possible.

    The largest ones are replaced by their parts as long as there is room.
    """
    selected = list(layers)
    while True:
        room = limit - len(selected) + 1
        wide = [layer for layer in selected if layer.has_scopes and len(layer.parts) <= room]
        if not wide:
            return selected
        largest = max(wide, key=lambda layer: layer.num_parameters)
        place = selected.index(largest)
        selected[place : place + 1] = largest.parts


def _make_parts(node: _Node, prefix: str, count: int) -> tuple[Layer, ...]:
    """The children of a scope, with equal neighbours as one, and variables beside scopes as one, too."""
    made: list[Layer] = []
    for name, number, child in _fold(node.children):
        total = count * number
        specs = child.specs()
        num_parameters = total * sum(math.prod(spec.shape) for spec in specs)
        parts: tuple[Layer, ...] = ()
        if child.children:
            parts = _make_parts(child, prefix + name, total)
        if child.spec is not None and child.children:  # a variable whose name is the beginning of another's
            own = _describe(prefix + name, total, [child.spec])
            parts = (own, *parts)
        full_name = (prefix + name).rstrip("/.") or prefix + name
        made.append(Layer(full_name, num_parameters, total * num_bytes(specs), count=number, parts=parts))
    variables = [layer for layer in made if not layer.parts]
    if len(variables) < 2 or (len(variables) == len(made) and prefix):
        return tuple(made)
    names = ", ".join(layer.name[len(prefix) :] for layer in variables)
    joined = Layer(
        f"{prefix}({names})" if prefix else names,
        sum(layer.num_parameters for layer in variables),
        sum(layer.num_bytes for layer in variables),
    )
    first = made.index(variables[0])
    before = [layer for layer in made[:first] if layer.parts]
    return (*before, joined, *(layer for layer in made[first:] if layer.parts))


def _describe(name: str, count: int, specs: Sequence[VariableSpec]) -> Layer:
    num_parameters = count * sum(math.prod(spec.shape) for spec in specs)
    return Layer(name, num_parameters, count * num_bytes(specs))


def _fold(children: dict[str, _Node]) -> list[tuple[str, int, _Node]]:
    """The children in order, equal neighbours as one: the name, the count, and the first child."""
    nodes = list(children.values())
    folded = fold_names(list(children), [child.signature() for child in nodes])
    return [(name, count, nodes[first]) for name, count, first in folded]


def fold_names(names: Sequence[str], signatures: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Joins equal neighbours in a list of names.

    Example:
      >>> engine.inspect.fold_names(["block0", "block1", "head"], ["a", "a", "b"])
      [('block{0..1}', 2, 0), ('head', 1, 2)]

    Args:
      names: the names of some things.
      signatures: a value for each, equal for things with the same contents.

    Returns:
      For each group: a name, with `{3..5}` in place of the number in which equal things differ, their
      count, and the index of the first.
    """
    found: list[tuple[str, int, int]] = []
    begin = 0
    while begin < len(names):
        name = names[begin]
        best, best_name = begin + 1, name
        for match in _NUMBER.finditer(name):
            before, after, width = name[: match.start()], name[match.end() :], len(match[0])
            end = begin + 1
            while end < len(names) and signatures[end] == signatures[begin]:
                last = f"{int(match[0]) + end - begin:0{width}}"
                if names[end] != f"{before}{last}{after}":
                    break
                end += 1
            if end > best:
                last = f"{int(match[0]) + end - begin - 1:0{width}}"
                best, best_name = end, f"{before}{{{match[0]}..{last}}}{after}"
        found.append((best_name, best - begin, begin))
        begin = best
    return found
