"""Divides programs of several homes so that what is equal in them is a program of its own.

A home's program computes results of arrays that have nothing to do with each other, such as the new values
of its variables. What comes from the same arrays is a component. Homes whose programs differ may have many
equal components: the blocks of a transformer, beside which the first home has a table and the last one a
norm. XLA compiles each program as a whole, but equal components of one program only once. So a home gets a
program of the components that it has in common with others, in the same order everywhere, and one of the
rest. Where all components are equal, nothing is divided, and only their order becomes the same.

Scalars that depend on several components, such as a part of a global norm, are computed with the rest, from
the scalars that each component gives for them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.jaxprs.equality import identify_atom, identify_equation
from ipu_pipeline.engine.jaxprs.flat import is_var, make_extracted, variables_in
from ipu_pipeline.engine.jaxprs.partitioning import JOINT, Home, Piece
from ipu_pipeline.ground.pytrees import num_bytes

_LEAST_BYTES = 2**20  # of a program's arguments; where it reads less, starting a second one would be felt
_LEAST_SAVED = 20  # equations of arrays that need not be compiled again; 20 take about 0.1 s


def divide_equal_parts(pieces: Sequence[Piece], replaced: Sequence[Any | None]) -> list[Piece]:
    """Divides pieces so that equal parts of several homes are pieces of their own.

    Returns:
      The pieces, in an order in which they can run.
    """
    scalars: dict[Any, int] = {}
    rounds: dict[int, list[_Division]] = {}
    for piece in pieces:
        rounds.setdefault(piece.round, []).append(_Division(piece, replaced, scalars))
    divided: list[Piece] = []
    for divisions in rounds.values():
        shared = _find_shared(
            {division.piece.home: division.counts for division in divisions},
            {part.key: part.weight for division in divisions for part in division.components},
        )
        for division in divisions:
            divided += division.divide(shared[division.piece.home])
    return divided


def _find_shared(
    counts: Mapping[Home, Counter[Hashable]], weights: Mapping[Hashable, int]
) -> dict[Home, list[Counter[Hashable]]]:
    """Finds the parts that each home has in common with others: the number of components of each key."""
    groups: dict[frozenset[Home], dict[Hashable, None]] = {}
    for home_counts in counts.values():
        for key in home_counts:
            homes = frozenset(home for home, other_counts in counts.items() if key in other_counts)
            groups.setdefault(homes, {})[key] = None
    shared: dict[Home, list[Counter[Hashable]]] = {home: [] for home in counts}
    for homes, keys in groups.items():
        num_different = len({frozenset(counts[home].items()) for home in homes})
        num_saved = (num_different - 1) * sum(weights[key] for key in keys)
        if len(homes) > 1 and (num_different == 1 or num_saved >= _LEAST_SAVED):
            part = Counter({key: min(counts[home][key] for home in homes) for key in keys})
            for home in homes:
                shared[home].append(part)
    return shared


@dataclass(eq=False)
class _Component:
    """The results of a piece that are made of the same arrays.

    Attributes:
      places: the places of its results among those of the piece's jaxpr.
      equations: the places of its equations.
      partials: the scalars that are read where components are joined.
      key: equal for components that compute the same, of other variables.
      weight: the number of equations that make arrays.
    """

    places: list[int] = field(default_factory=list)
    equations: list[int] = field(default_factory=list)
    partials: list[Any] = field(default_factory=list)
    key: Hashable = None
    weight: int = 0


class _Division:
    """The components of a piece.

    Attributes:
      piece: the piece.
      components: its components; none if it is not to be divided.
    """

    def __init__(self, piece: Piece, replaced: Sequence[Any | None], scalars: dict[Any, int]) -> None:
        """Finds the components of a piece."""
        self.piece, self.components = piece, list[_Component]()
        self._jaxpr = piece.program.closed_jaxpr.jaxpr
        self._parents: dict[Any, Any] = {}  # of arrays, up to the one that stands for their component
        self._roots: dict[Any, frozenset[Any]] = {}  # arrays of the components that a scalar depends on
        self._makers = {var: place for place, maker in enumerate(self._jaxpr.eqns) for var in maker.outvars}
        self._joined: list[int] = []  # places of results that are of no component
        self._owned = set[int]()  # places of equations that are of one
        is_pure = not self._jaxpr.effects and not self._jaxpr.constvars
        size = num_bytes([var.aval for var in piece.program.inputs])
        if piece.home != JOINT and is_pure and size >= _LEAST_BYTES:
            before = [replaced[place] for place in piece.results] + [None] * len(piece.sent)
            self._find_components(before, scalars)

    @property
    def counts(self) -> Counter[Hashable]:
        """The number of components of each key."""
        return Counter(component.key for component in self.components)

    def divide(self, shared: Sequence[Mapping[Hashable, int]]) -> list[Piece]:
        """Divides the piece into parts that it shares with others, and the rest."""
        if not shared:
            return [self.piece]
        parts: list[Piece] = []
        remaining = list(self.components)
        for part_counts in shared:
            part: list[_Component] = []
            for key, number in part_counts.items():
                part += [component for component in remaining if component.key == key][:number]
            remaining = [component for component in remaining if component not in part]
            sent = [var for component in part for var in component.partials]
            parts.append(self._make_part(part, [], sent))
        if remaining or self._joined:
            parts.append(self._make_part(remaining, self._joined, []))
        return parts

    def _find_components(self, replaced: Sequence[Any | None], scalars: dict[Any, int]) -> None:
        jaxpr, inputs = self._jaxpr, set(self.piece.program.inputs)
        for equation in jaxpr.eqns:
            operands = variables_in(equation.invars)
            arrays = [var for var in (*operands, *equation.outvars) if var.aval.size > 1]
            roots = frozenset[Any]().union(*(self._roots.get(var, ()) for var in operands))
            if arrays:
                self._join([*arrays, *roots])
                roots = frozenset([self._find(arrays[0])])
            self._roots.update((var, roots) for var in equation.outvars if var.aval.size <= 1)
        for atom, before in zip(jaxpr.outvars, replaced, strict=True):
            is_array = is_var(atom) and atom.aval.size > 1
            if is_array and before in inputs:
                self._join([atom, before])
        components: dict[Any, _Component] = {}
        for place, atom in enumerate(jaxpr.outvars):
            result_roots = self._roots_of(atom)
            if len(result_roots) == 1:
                components.setdefault(next(iter(result_roots)), _Component()).places.append(place)
            else:
                self._joined.append(place)
        partials, passed = self._find_partials(
            [place for component in components.values() for place in component.places]
        )
        for place, equation in enumerate(jaxpr.eqns):
            result_roots = self._roots_of(equation.outvars[0])
            if len(result_roots) == 1 and place not in passed:
                component = components.setdefault(next(iter(result_roots)), _Component())
                component.equations.append(place)
                component.weight += any(var.aval.size > 1 for var in equation.outvars)
                self._owned.add(place)
        for var in partials:
            if var not in self.piece.sent:
                components[next(iter(self._roots_of(var)))].partials.append(var)
        numbers = self._number_scalars(scalars)
        for component in components.values():
            component.key = self._identify(component, numbers, scalars)
        self.components = list(components.values())

    def _find(self, var: Any) -> Any:
        """The array that stands for the component of an array."""
        root = var
        while (parent := self._parents.setdefault(root, root)) is not root:
            root = parent
        while var is not root:
            self._parents[var], var = root, self._parents[var]
        return root

    def _join(self, arrays: Sequence[Any]) -> None:
        for var in arrays:
            self._parents[self._find(var)] = self._find(arrays[0])

    def _roots_of(self, atom: Any) -> set[Any]:
        """The components that a value depends on, by the arrays that stand for them."""
        if not is_var(atom):
            return set()
        return {self._find(var) for var in ([atom] if atom.aval.size > 1 else self._roots.get(atom, ()))}

    def _find_partials(self, places: Iterable[int]) -> tuple[list[Any], set[int]]:
        """Finds what is read of single components for results of several.

        Returns:
          The scalars that components give, and the places of equations behind these, which read nothing but
          them and are not needed in the component.
        """
        jaxpr = self._jaxpr
        required = {jaxpr.outvars[place] for place in places}  # in components
        of_arrays: set[Any] = set()
        for equation in reversed(jaxpr.eqns):
            operands = variables_in(equation.invars)
            has_arrays = any(var.aval.size > 1 for var in (*operands, *equation.outvars))
            if has_arrays:
                of_arrays.update(equation.outvars)
            if has_arrays or not required.isdisjoint(equation.outvars):
                required.update(operands)
        partials: dict[Any, None] = {}
        passed: set[int] = set()
        pending = [jaxpr.outvars[place] for place in reversed(self._joined)]
        while pending:
            atom = pending.pop()
            place = self._makers.get(atom) if is_var(atom) else None
            if place is None or place in passed:
                continue
            if len(self._roots_of(atom)) == 1 and (atom in required or atom in of_arrays):
                partials[atom] = None
            else:
                passed.add(place)
                pending += reversed(jaxpr.eqns[place].invars)
        return list(partials), passed

    def _number_scalars(self, scalars: dict[Any, int]) -> dict[Any, int]:
        """Numbers the scalars that depend on no array; scalars of the same number are equal."""
        numbers: dict[Any, int] = {}
        for equation in self._jaxpr.eqns:
            if any(map(self._roots_of, (*equation.invars, *equation.outvars))):
                continue
            operands = variables_in(equation.invars)
            new = [var for var in operands if var not in numbers]
            numbers.update((var, scalars.setdefault(var, len(scalars))) for var in new)
            key = identify_equation(equation, numbers.__getitem__)
            for place, var in enumerate(equation.outvars):
                numbers[var] = scalars.setdefault((key, place), len(scalars))
        return numbers

    def _identify(
        self, component: _Component, fixed: Mapping[Any, int], scalars: dict[Any, int]
    ) -> Hashable:
        """The key of a component: its equations, with its variables numbered in their order."""
        numbers: dict[Any, int] = {}

        def name(var: Any) -> Hashable:
            if var in numbers or self._roots_of(var):
                return numbers.setdefault(var, len(numbers)), var.aval
            return fixed[var] if var in fixed else scalars.setdefault(var, len(scalars))

        code = []
        for place in component.equations:
            equation = self._jaxpr.eqns[place]
            code.append((identify_equation(equation, name), tuple(map(name, equation.outvars))))
        results = [*(self._jaxpr.outvars[place] for place in component.places), *component.partials]
        return tuple(code), tuple(identify_atom(atom, name) for atom in results)

    def _make_part(
        self, components: Sequence[_Component], joined: Sequence[int], partials: Sequence[Any]
    ) -> Piece:
        """Makes a piece of components and results that join some.

        Equations come component by component, those of scalars before their first reader; inputs in the
        order in which they are read. So equal parts of different homes are equal programs.
        """
        jaxpr, piece = self._jaxpr, self.piece
        places = [*(place for component in components for place in component.places), *joined]
        num_results = len(piece.results)
        results = [place for place in places if place < num_results]
        sent = [place for place in places if place >= num_results]
        outputs = [*(jaxpr.outvars[place] for place in (*results, *sent)), *partials]
        order: dict[int, None] = {}

        def make_scalars(atoms: Iterable[Any]) -> None:
            """Adds the equations that some atoms need, but for those of components."""
            new_places: set[int] = set()
            pending = list(atoms)
            while pending:
                atom = pending.pop()
                place = self._makers.get(atom) if is_var(atom) else None
                if place is None or place in new_places or place in order or place in self._owned:
                    continue
                new_places.add(place)
                pending += jaxpr.eqns[place].invars
            order.update(dict.fromkeys(sorted(new_places)))

        for component in components:
            for place in component.equations:
                make_scalars(jaxpr.eqns[place].invars)
                order[place] = None
        make_scalars(outputs)
        equations = [jaxpr.eqns[place] for place in order]
        defined = {var for equation in equations for var in equation.outvars}
        atoms = [*(atom for equation in equations for atom in equation.invars), *outputs]
        inputs = dict.fromkeys(a for a in atoms if is_var(a) and a not in defined)
        return dataclasses.replace(
            piece,
            program=make_extracted({}, list(inputs), equations, outputs),
            results=tuple(piece.results[place] for place in results),
            sent=(*(piece.sent[place - num_results] for place in sent), *partials),
            readers={var: reader for var, reader in piece.readers.items() if var in inputs},
        )
