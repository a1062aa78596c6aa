"""Layers of stages: as a tree of scopes for people, and whole ones that another stage could have."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ipu_pipeline.engine.inspect.facts import Layer, LayerFacts
from ipu_pipeline.engine.jaxprs.costs import count_equations
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import TracedStage
from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.pytrees import num_bytes

# Variables by layer. The parts of a full name are divided by slashes, or by the dots of torch's names.
# Neighbours are equal if their names differ only in one number, which counts up, and their contents have
# the same names, shapes and dtypes: block_3, block_4 and block_5 are `block_{3..5}`.

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
        variable = None if self.spec is None else (self.spec.shape, self.spec.dtype)
        return variable, tuple((name, child.signature()) for name, child in self.children.items())

    def specs(self) -> list[VariableSpec]:
        variables = [] if self.spec is None else [self.spec]
        return [*variables, *(spec for child in self.children.values() for spec in child.specs())]


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
    layers: list[Layer] = []
    for name, number, child in _fold(node.children):
        total = count * number
        specs = child.specs()
        num_parameters = total * sum(math.prod(spec.shape) for spec in specs)
        parts: tuple[Layer, ...] = ()
        if child.children:
            parts = _make_parts(child, prefix + name, total)
        if child.spec is not None and child.children:  # a variable whose name is the beginning of another's
            variable = _describe(prefix + name, total, [child.spec])
            parts = (variable, *parts)
        full_name = (prefix + name).rstrip("/.") or prefix + name
        layers.append(Layer(full_name, num_parameters, total * num_bytes(specs), count=number, parts=parts))
    variables = [layer for layer in layers if not layer.parts]
    if len(variables) < 2 or (len(variables) == len(layers) and prefix):
        return tuple(layers)
    names = ", ".join(layer.name[len(prefix) :] for layer in variables)
    joined = Layer(
        f"{prefix}({names})" if prefix else names,
        sum(layer.num_parameters for layer in variables),
        sum(layer.num_bytes for layer in variables),
    )
    first = layers.index(variables[0])
    before = [layer for layer in layers[:first] if layer.parts]
    return (*before, joined, *(layer for layer in layers[first:] if layer.parts))


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
    groups: list[tuple[str, int, int]] = []
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
        groups.append((best_name, best - begin, begin))
        begin = best
    return groups


# Whole layers, in the order in which a stage runs them.
#
# A layer is an outermost scope of variables, such as a block of a transformer, however deep the tree
# within it is. Scopes that only hold layers, such as a list of blocks, are looked into. The order is that
# in which the stage's equations read the variables, because pytrees sort them by name. A scan over
# stacked layers is as many layers as it has iterations. What a layer takes of its stage is counted from
# the equations between its first one and the next layer's.

_NUMBERED = re.compile(r"(.*?)[0-9]+")
_MOST_ITERATIONS = 256  # of a scan that is taken apart
_MOST_NAMED = 3  # scopes in a layer's name

_Tree: TypeAlias = "dict[str, _Tree | None]"  # scopes; None for a variable


def name_whole_layers(names: Iterable[str], stage: int) -> dict[str, str]:
    """The layer of each variable, by their full names.

    Returns:
      Full name of a variable -> that of its layer: a scope, or the variable's own if it is in none.
    """
    names = list(names)
    root: _Tree = {}
    for name in names:
        node, parts = root, _PART.findall(name)[: _MAX_DEPTH + 1]
        for part in parts[:-1]:
            below = node.setdefault(part, {})
            if below is None:  # a variable whose name is the beginning of another's
                below = node[part] = {}
            node = below
        node.setdefault(parts[-1] if parts else "", None)
    scopes = sorted(_find_scopes(root, "", stage), key=len, reverse=True)
    return {name: next((scope for scope in scopes if _is_in(name, scope)), name) for name in names}


def _is_in(name: str, scope: str) -> bool:
    return name == scope or name.startswith((f"{scope}/", f"{scope}."))


def _find_scopes(node: _Tree, prefix: str, stage: int) -> Iterator[str]:
    """The full names of the layers in a scope."""
    scopes = {name: child for name, child in node.items() if child}
    for name, child in scopes.items():
        full_name = prefix + name
        is_own = not prefix and name.rstrip("/.") in (f"stage{stage}", f"stage_{stage}")
        has_siblings = len(_siblings(name, scopes)) > 1
        is_lone = len(node) == 1 and _number_prefix(name) is None
        if is_own or is_lone or (not has_siblings and _holds_layers(child)):
            inner = list(_find_scopes(child, full_name, stage))
            if inner or _has_numbered_variables(child) or (is_own and len(node) > 1):
                yield from inner
                continue
        yield full_name.rstrip("/.")


def _holds_layers(node: _Tree) -> bool:
    """Whether a scope is there to hold layers: it has nothing but numbered scopes, or several deep ones."""
    scopes = {name: child for name, child in node.items() if child}
    for name in scopes:
        alike = _siblings(name, scopes)
        if len(alike) == len(node) > 0:
            return True
        if len(alike) > 1 and all(any((scopes[sibling] or {}).values()) for sibling in alike):
            return True
    return len(node) == len(scopes) == 1 and any(_holds_layers(child) for child in scopes.values() if child)


def _has_numbered_variables(node: _Tree) -> bool:
    """Whether a scope has nothing but numbered variables, as a list of matrices does."""
    prefixes = {_number_prefix(name) for name in node}
    return len(node) > 1 and len(prefixes) == 1 and None not in prefixes and not any(node.values())


def _siblings(name: str, scopes: Mapping[str, Any]) -> list[str]:
    """The scopes whose names differ from this name in their number only, itself included."""
    prefix = _number_prefix(name)
    return [] if prefix is None else [sibling for sibling in scopes if _number_prefix(sibling) == prefix]


def _number_prefix(name: str) -> str | None:
    """The part of a name before the number at its end; None if there is none."""
    match = _NUMBERED.fullmatch(name.rstrip("/."))
    return None if match is None else match[1]


@dataclass(eq=False)
class _Run:
    """Equations that belong together: those from one place up to the next run's."""

    first: int  # the number of the first equation
    layers: dict[str, None]
    names: dict[str, None] = field(default_factory=dict)  # the variables that it is the first to read
    scan: tuple[float, int, dict[str, None]] | None = None  # its operations, length and stacked variables
    num_scans: int = 0

    def join(self, other: _Run) -> None:
        self.layers |= other.layers
        self.names |= other.names
        self.num_scans += other.num_scans
        self.scan = self.scan or other.scan


def find_whole_layers(stage: TracedStage, index: int, owned: Collection[str]) -> tuple[LayerFacts, ...]:
    """The layers of a stage in the order in which it runs them; together they have its owned variables."""
    layer_of = name_whole_layers((spec.name for spec in stage.variables), index)
    specs = {spec.name: spec for spec in stage.variables}
    runs, apart = _find_runs(stage, layer_of)
    read_names = {name for run in runs for name in run.names}
    unread = [name for name in layer_of if name not in read_names and name in owned]
    for name in unread:  # what no equation reads together with the micro-batch
        home = next((run for run in runs if layer_of[name] in run.layers), None)
        if home is None:
            home = _Run(len(stage.flat.equations), {layer_of[name]: None})
            runs.append(home)
        home.names[name] = None
    equations = stage.flat.equations
    home_of: dict[str | None, int] = {}
    for number, run in enumerate(runs):
        for layer in run.layers:
            home_of.setdefault(layer, number)
    alone = [0.0] * len(runs)  # by run: operations that only convert its variables
    for place, of_layer in apart.items():
        if of_layer in home_of:
            alone[home_of[of_layer]] += count_equations([equations[place]])
    whole_layers: list[LayerFacts] = []
    for number, run in enumerate(runs):
        begin = run.first if number else 0
        end = runs[number + 1].first if number + 1 < len(runs) else len(equations)
        fed = (equations[place] for place in range(begin, end) if place not in apart)
        owned_specs = [specs[name] for name in run.names if name in owned]
        name = _name_run(run, layer_of)
        whole_layers += _as_layers(run, name, owned_specs, count_equations(fed) + alone[number])
    return tuple(whole_layers)


def _name_run(run: _Run, layer_of: Mapping[str, str]) -> str:
    """The name of a run: its layer's, the scope that has all of its layers, or their names in a row."""
    names = [*run.layers]
    if len(names) == 1:
        return names[0]
    ends = [place for place, character in enumerate(names[0]) if character in "/."]
    for end in reversed(ends):
        inside = {layer for layer in layer_of.values() if _is_in(layer, names[0][:end])}
        if inside == set(names):
            return names[0][:end]
    return ", ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} to {names[-1]}"


def _as_layers(
    run: _Run, name: str, specs: Sequence[VariableSpec], operations: float
) -> Iterator[LayerFacts]:
    """A run as a layer, or as many as a scan in it has iterations."""
    is_one = len(run.layers) == 1 or (run.scan is not None and run.names.keys() <= run.scan[2].keys())
    if run.scan is None or run.num_scans > 1 or not is_one:
        yield _as_layer(name, specs, operations)
        return
    of_scan, length, stacked = run.scan
    slices = [spec for spec in specs if spec.name in stacked]
    unstacked = [spec for spec in specs if spec.name not in stacked]
    num_parameters = sum(math.prod(spec.shape) for spec in slices) // length
    for place in range(length):
        facts = _as_layer(f"{name}/{place}", unstacked if place == 0 else (), of_scan / length)
        yield LayerFacts(
            facts.name,
            facts.num_parameters + num_parameters,
            facts.num_bytes + num_bytes(slices) // length,
            of_scan / length + (operations - of_scan if place == length - 1 else 0.0),
        )


def _as_layer(name: str, specs: Sequence[VariableSpec], operations: float) -> LayerFacts:
    return LayerFacts(name, sum(math.prod(spec.shape) for spec in specs), num_bytes(specs), operations)


def _find_runs(stage: TracedStage, layer_of: Mapping[str, str]) -> tuple[list[_Run], dict[int, str | None]]:
    """Divides a stage's equations into runs, by the variables that they read.

    Returns:
      The runs, and the numbers of the equations that read nothing of the micro-batch, each with the layer
      whose variables it converts; None if with several's, or none.
    """
    number = len(stage.variables)
    # By a value that depends on variables only: their names.
    alone = {
        var: frozenset({spec.name})
        for var, spec in zip(stage.flat.inputs[:number], stage.variables, strict=True)
    }
    fed = set(stage.flat.inputs[number:])
    runs: list[_Run] = []
    apart: dict[int, str | None] = {}
    read_names: set[str] = set()
    for place, equation in enumerate(stage.flat.equations):
        operands = [var for var in equation.invars if not isinstance(var, jax_core.Literal)]
        is_fed = any(var in fed for var in operands)
        operand_names = [alone[var] for var in operands if var in alone]
        if not is_fed:
            names = frozenset().union(*operand_names)
            layers = {layer_of[name] for name in names}
            apart[place] = layers.pop() if len(layers) == 1 else None
            if names:
                alone |= dict.fromkeys(equation.outvars, names)
            continue
        fed.update(equation.outvars)
        # A sum over many layers, as for weight decay, says nothing about where these are.
        variables = [n for names in operand_names if len({layer_of[n] for n in names}) == 1 for n in names]
        if variables:
            _note(runs, place, {name: name not in read_names for name in variables}, layer_of)
            read_names.update(variables)
            if equation.primitive.name == "scan":
                _note_scan(runs[-1], equation, alone)
    return _join_variables(runs, layer_of), apart


def _note(runs: list[_Run], place: int, variables: Mapping[str, bool], layer_of: Mapping[str, str]) -> None:
    """Notes that an equation reads variables; `used` says which of them no equation before has read."""
    layers = dict.fromkeys(layer_of[name] for name in variables)
    new = {name: None for name, is_new in variables.items() if is_new}
    homes = [at for at, run in enumerate(runs) if run.layers.keys() & layers.keys()]
    last = len(runs) - 1
    if homes and (homes[-1] == last or new):
        # It goes on with a layer that is not finished, so nothing between can be apart from it.
        first = homes[-1] if len(layers) == 1 else homes[0]
        for later in runs[first + 1 :]:
            runs[first].join(later)
        del runs[first + 1 :]
        runs[first].layers |= layers
        runs[first].names |= new
    else:
        runs.append(_Run(place, layers, new))


def _note_scan(run: _Run, equation: Any, alone: Mapping[Any, frozenset[str]]) -> None:
    """Notes a scan over variables that have an axis for the layers."""
    params = equation.params
    stacked = equation.invars[sum(jax_core.scan_counts(params)) :]
    names = {
        name: None
        for var in stacked
        if not isinstance(var, jax_core.Literal)
        for name in alone.get(var, ())
    }
    if names:
        run.num_scans += 1
        if 1 < params["length"] <= _MOST_ITERATIONS:
            run.scan = (count_equations([equation]), params["length"], names)


def _join_variables(runs: list[_Run], layer_of: Mapping[str, str]) -> list[_Run]:
    """Joins neighbours that are variables in no layer's scope, such as a weight and a bias.

    Those of a list, whose names differ in their number only, are layers of their own.
    """
    joined: list[_Run] = []
    for run in runs:
        layers = [*joined[-1].layers, *run.layers] if joined else []
        prefixes = {_number_prefix(layer) for layer in layers}
        is_list = len(prefixes) == 1 and None not in prefixes
        if layers and not is_list and all(layer_of.get(layer) == layer for layer in layers):
            joined[-1].join(run)
        else:
            joined.append(run)
    return joined
