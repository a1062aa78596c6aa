"""Finds the modules that operations and variables belong to, and the user's lines that they come from.

Modules are a tree. The modules that are shown cover everything together: if a model is spread over stages,
they are the modules that lie within one stage.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ipu_pipeline.engine.inspect import fold_names
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.lowering.interpreter import count_lowered, find_users_frames

Stack = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ModuleUse:
    """A module, or several equal ones that follow each other, in a stage."""

    # its full name, with `{3..5}` in place of the number in which equal modules differ; empty for the
    # whole model
    name: str
    class_name: str  # the name of its class
    count: int  # how many equal ones there are
    num_operations: int  # core operations of torch that all of them together have in the stage
    num_parameters: int  # elements of the variables that belong to them; shared ones count where they live
    num_bytes: int  # how much these take
    is_rest: bool = False  # whether it stands for what the module does outside of its inner modules

    def __str__(self) -> str:
        """Returns the name and the class."""
        if self.is_rest:
            return f"{self.name or self.class_name} itself"
        return f"{self.name} ({self.class_name})" if self.name else self.class_name


@dataclass(frozen=True)
class LineUse:
    """A line of the user's code, and the operations that it became."""

    file: str  # its file; empty if the line is not known
    line: int  # its number there
    text: str  # its text
    stages: tuple[int, ...]  # the numbers of the stages that it is in
    operations: Mapping[str, int]  # the number of core operations of torch, by name
    num_primitives: int  # how many of JAX's primitives these become
    num_flop: float  # estimated floating-point operations of the forward, per micro-batch


@dataclass(eq=False)
class _Module:
    """A module of the tree, or (without children) the part that a module does itself."""

    path: str
    class_name: str
    children: dict[str, _Module] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    # for each of its own variables: name within the module, elements and bytes
    sizes: list[tuple[str, int, int]] = field(default_factory=list)
    is_rest: bool = False

    @property
    def all(self) -> list[_Module]:
        return [self, *(inner for child in self.children.values() for inner in child.all)]

    @property
    def num_operations(self) -> int:
        return sum(len(module.operations) for module in self.all)

    @property
    def num_parameters(self) -> int:
        return sum(elements for module in self.all for _name, elements, _size in module.sizes)

    @property
    def num_bytes(self) -> int:
        return sum(size for module in self.all for _name, _elements, size in module.sizes)

    def signature(self) -> Any:
        """Returns a value that is equal for modules that are the same inside."""
        inner = tuple((path[len(self.path) :], c.signature()) for path, c in self.children.items())
        return self.class_name, self.is_rest, tuple(self.operations), tuple(self.sizes), inner

    def parts(self) -> list[_Module]:
        """Returns its parts: what it does itself, if anything, and its inner modules."""
        remainder = _Module(self.path, self.class_name, {}, self.operations, self.sizes, is_rest=True)
        firsts: dict[str, int] = {}  # modules of a list stay together, even if others are called in between
        for path in self.children:
            firsts.setdefault(self._list_of(path), len(firsts))
        ordered = sorted(self.children, key=lambda path: firsts[self._list_of(path)])
        return [
            *[remainder] * bool(self.operations or self.sizes),
            *map(self.children.__getitem__, ordered),
        ]

    def _list_of(self, path: str) -> str:
        before = path.rpartition(".")[0]
        return path if before == self.path else before


def modules_of_nodes(nodes: Iterable[torch.fx.Node]) -> list[tuple[Stack, str]]:
    """Returns each operation's modules, from the outermost, and its name. Markers are left out."""
    return [(_read_stack(node), _name(node)) for node in nodes if _computes(node)]


def _computes(node: torch.fx.Node) -> bool:
    return (
        node.op == "call_function" and node.target is not operator.getitem and not markers.is_marker(node)
    )


def _read_stack(node: torch.fx.Node) -> Stack:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    # A module that is called again is "fc@1".
    return [
        (path.partition("@")[0], (getattr(kind, "__name__", None) or str(kind)).rpartition(".")[2])
        for path, kind in stack
    ]


def _name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return node.name if schema is None else str(schema.name).split("::")[-1]


def find_modules(
    operations: Sequence[tuple[Stack, str]],
    variables: Iterable[tuple[str, Sequence[int], int]],
    class_name: str,
    spread: Collection[str] = (),
    limit: int = 6,
) -> tuple[ModuleUse, ...]:
    """Finds the modules of a stage, in the order of their first use. Equal neighbours count as one."""
    root = _Module("", class_name)
    for stack, operation in operations:
        module = root
        for path, kind in stack:
            if path:
                module = module.children.setdefault(path, _Module(path, kind))
        module.operations.append(operation)
    for name, shape, size in variables:
        module = root
        while inner := [child for path, child in module.children.items() if name.startswith(f"{path}.")]:
            module = inner[0]
        module.sizes.append((name[len(module.path) :], math.prod(shape), size))
    modules, split_paths = [root], {"", *spread}
    while True:
        must = [m for m in modules if m.children and m.path in split_paths]
        folded = {id(modules[first]): count for _name, count, first in _fold(modules)}
        room = limit - len(folded)
        may = [
            m
            for m in modules
            if m.children and folded.get(id(m)) == 1 and len(_fold(m.parts())) - 1 <= room
        ]
        if not (must or may):
            break
        chosen = must[0] if must else max(may, key=lambda module: module.num_parameters)
        place = modules.index(chosen)
        modules[place : place + 1] = chosen.parts()
    return tuple(
        ModuleUse(
            name,
            modules[first].class_name,
            count,
            count * modules[first].num_operations,
            count * modules[first].num_parameters,
            count * modules[first].num_bytes,
            modules[first].is_rest,
        )
        for name, count, first in _fold(modules)
    )


def _fold(modules: Sequence[_Module]) -> list[tuple[str, int, int]]:
    return fold_names([module.path for module in modules], [module.signature() for module in modules])


def find_spread(stages: Sequence[Sequence[tuple[Stack, str]]]) -> set[str]:
    """Finds the names of modules that are used in several stages. Takes `find_modules`' nodes of each."""
    where: dict[str, set[int]] = collections.defaultdict(set)
    for number, operations in enumerate(stages):
        for stack, _operation in operations:
            for path, _kind in stack:
                where[path].add(number)
    return {path for path, numbers in where.items() if len(numbers) > 1}


def name_parts(modules: Sequence[ModuleUse]) -> str:
    """Lists modules by name in a line."""
    named = [m.name for m in modules if m.name and not m.is_rest]
    return ", ".join(named or dict.fromkeys(map(str, modules)))


def find_lines(stages: Sequence[Sequence[torch.fx.Node]]) -> tuple[LineUse, ...]:
    """Finds the user's lines, in the order of their first run."""
    nodes = [(number, node) for number, stage in enumerate(stages) for node in stage if _computes(node)]
    lowered = count_lowered(node for _number, node in nodes)
    lines: dict[tuple[str, int, str], list[tuple[int, torch.fx.Node]]] = {}
    for number, node in nodes:
        frames = find_users_frames(node.meta.get("stack_trace") or "")
        place = ("", 0, "")
        if frames:
            place = (frames[-1]["file"], int(frames[-1]["line"]), (frames[-1]["text"] or "").strip())
        lines.setdefault(place, []).append((number, node))
    return tuple(
        LineUse(
            file,
            line,
            text,
            tuple(sorted({number for number, _node in uses})),
            dict(collections.Counter(_name(node) for _n, node in uses if lowered[node].num_primitives)),
            sum(lowered[node].num_primitives for _number, node in uses),
            sum(lowered[node].num_flop for _number, node in uses),
        )
        for (file, line, text), uses in lines.items()
    )
