"""Cuts a jaxpr whose inputs live in several places into programs per place and round.

Every place that has inputs is a home. Values that depend on the inputs of one home are computed there.
Values that depend only on inputs that every home can have (a step counter) are computed wherever they are
needed. An equation that joins several homes runs where most of the bytes that it reads are. If it joins
only scalars, it runs in a home of its own, the joint home. A global norm therefore sends a scalar from each
home to the joint home, and one back.

When another home needs a value, either the value or its ingredients are sent, whichever is smaller: not a
broadcast scalar, but the scalar. The number of hops on a value's way is its round. A home has one program
per round for what others need of it, and computes all its results in the last one. It computes again, from
its own inputs, what an earlier round computed, so that nothing large is kept between rounds.

An equation with effects (a debugging print) whose results nothing needs runs with the last program of its
home, which is that of the values that it reads.

A conditional or scan that joins homes is first cut by outputs. If an output of a conditional still joins
arrays of several homes, the conditional is replaced by both branches and a selection between their results.
An optimizer that steps only every few updates, around one that clips by the global norm, is then
partitioned like the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.jaxprs.flat import (
    ExtractedJaxpr,
    FlatJaxpr,
    aval_struct,
    calls_back,
    can_reduce,
    extract,
    flatten,
    has_primitive,
    is_var,
    reduce,
    substitute,
)
from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.pytrees import num_bytes

Home: TypeAlias = int
JOINT: Home = -1

_SAME_ELEMENTS = ("reshape", "squeeze", "expand_dims", "transpose", "copy")
_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr"}


@dataclass(frozen=True, eq=False)
class Places:
    """A jaxpr with the home of each of its values."""

    flat: FlatJaxpr  # the jaxpr; its inputs are those of the original jaxpr
    # by variable; None: every home has it or computes it
    homes: dict[Any, Home | None] = field(default_factory=dict)
    # the bytes that it takes to send a variable; none for scalars
    costs: dict[Any, int] = field(default_factory=dict)
    makers: dict[Any, Any] = field(default_factory=dict)  # the equation of each variable that is no input

    def home_of(self, atom: Any) -> Home | None:
        """The home of a variable; None for a literal or constant."""
        return self.homes.get(atom) if is_var(atom) else None

    def home_of_equation(self, equation: Any) -> Home | None:
        """The home in which an equation runs."""
        weights: dict[Home, int] = {}
        for var in self.placed_inputs(equation):
            home = self.homes[var]
            assert home is not None
            weights[home] = weights.get(home, 0) + self.costs[var]
        if len(weights) < 2:
            return next(iter(weights), None)
        heaviest = max(weights.values())
        if heaviest == 0:
            return JOINT
        return next(home for home, weight in sorted(weights.items()) if weight == heaviest)

    def joins_arrays(self, equation: Any) -> bool:
        """Whether an equation reads values larger than scalars from more than one home."""
        return len({self.homes[v] for v in self.placed_inputs(equation) if self.costs[v]}) > 1

    def placed_inputs(self, equation: Any) -> list[Any]:
        """The variables that an equation reads and that have a home, each once."""
        return [
            atom
            for atom in dict.fromkeys(filter(is_var, equation.invars))
            if self.homes.get(atom) is not None
        ]

    def _is_made_again(self, var: Any) -> bool:
        """Whether a home that needs a variable of another home recomputes it from what is sent."""
        maker, full_cost = self.makers[var], _cost_of_array(var)
        return self.costs[var] < full_cost or (full_cost > 0 and maker.primitive.name in _SAME_ELEMENTS)

    def sent_for(self, var: Any) -> dict[Any, None]:
        """The variables sent to a home that needs a variable of another home, as the keys of a dict."""
        sent: dict[Any, None] = {}
        visited = {var}
        pending = [var]
        while pending:
            var = pending.pop()
            if var not in self.makers or not self._is_made_again(var):
                sent[var] = None
                continue
            operands = [v for v in self.placed_inputs(self.makers[var]) if v not in visited]
            visited.update(operands)
            pending += reversed(operands)
        return sent


def _cost_of_array(var: Any) -> int:
    return num_bytes([var.aval]) if var.aval.size > 1 else 0


def place(flat: FlatJaxpr, input_homes: Mapping[Any, Home | None]) -> Places:
    """Finds a home for every value."""
    equations: list[Any] = []
    constants = dict(flat.constants)
    places = Places(flat, dict(input_homes), {var: _cost_of_array(var) for var in flat.inputs})
    replaced: dict[Any, Any] = {}
    is_cut = len(set(input_homes.values()) - {None}) > 1

    def read(atoms: Iterable[Any]) -> list[Any]:
        new_atoms = []
        for atom in atoms:
            while is_var(atom) and atom in replaced:
                atom = replaced[atom]
            new_atoms.append(atom)
        return new_atoms

    pending = list(reversed(flat.equations))
    while pending:
        equation = pending.pop()
        equation = equation.replace(invars=read(equation.invars))
        home = places.home_of_equation(equation)
        parts = None
        if is_cut and places.placed_inputs(equation) and not equation.effects:
            parts = _split(places, equation) or _inline(places, equation)
        if parts is not None:
            pending += reversed(parts.equations)
            constants.update(parts.constants)
            if parts.outputs:
                replaced.update(zip(equation.outvars, parts.outputs, strict=True))
            continue
        equations.append(equation)
        inputs_cost = sum(places.costs[var] for var in places.placed_inputs(equation))
        is_sent_whole = equation.effects or calls_back(equation)
        for var in equation.outvars:
            places.homes[var] = home
            places.makers[var] = equation
            cost = _cost_of_array(var)
            places.costs[var] = cost if is_sent_whole else min(cost, inputs_cost)
    placed = FlatJaxpr(flat.inputs, equations, read(flat.outputs), constants)
    return Places(placed, places.homes, places.costs, places.makers)


def _split(places: Places, equation: Any) -> FlatJaxpr | None:
    """Repeats an equation for each set of homes that it joins, with the outputs that join these."""
    if len(equation.outvars) < 2 or not can_reduce(equation):
        return None
    groups: dict[Any, list[int]] = {}
    for number in range(len(equation.outvars)):
        reduced = reduce(equation, {number})
        if reduced is not None:
            homes = frozenset(places.homes[var] for var in places.placed_inputs(reduced))
            key = (homes, places.home_of_equation(reduced), places.joins_arrays(reduced))
            groups.setdefault(key, []).append(number)
    if len(groups) < 2:
        return None
    parts = []
    for numbers in groups.values():
        part_vars = {equation.outvars[number] for number in numbers}
        reduced = reduce(equation, numbers)
        assert reduced is not None
        # A scan keeps carried values that others need; here they get names that nothing reads.
        outputs = [v if v in part_vars else jax_core.Var(v.aval) for v in reduced.outvars]
        parts.append(reduced.replace(outvars=outputs))
    return FlatJaxpr([], parts, [], {})


def _inline(places: Places, equation: Any) -> FlatJaxpr | None:
    """Replaces an equation that joins arrays by its contents."""
    if not places.joins_arrays(equation):
        return None
    name = equation.primitive.name
    if name in _CALLS:
        body = equation.params[_CALLS[name]]
        body = jax_core.close(body)
        return _instantiate(body, equation.invars)
    if name != "cond" or has_primitive(equation, "while"):  # a branch that is not taken may not end
        return None
    index, *operands = equation.invars
    bodies = [_instantiate(branch, operands) for branch in equation.params["branches"]]
    equations = [inner for body in bodies for inner in body.equations]
    constants = {var: value for body in bodies for var, value in body.constants.items()}
    outputs = []
    for cases in zip(*(body.outputs for body in bodies), strict=True):
        atoms = [index, *cases]
        select = jax.make_jaxpr(jax.lax.select_n)(*(aval_struct(atom.aval) for atom in atoms))
        selection = _instantiate(select, atoms)
        equations += selection.equations
        outputs += selection.outputs
    return FlatJaxpr([], equations, outputs, constants)


def _instantiate(closed_jaxpr: Any, arguments: Sequence[Any]) -> FlatJaxpr:
    flat = flatten(closed_jaxpr)
    return substitute(flat, dict(zip(flat.inputs, arguments, strict=True)))


@dataclass(frozen=True, eq=False)
class Piece:
    """A program of a home."""

    home: Home  # where it runs
    round: int  # the number of hops that its arguments have behind them
    # the program. Its inputs are inputs of the jaxpr, or variables that earlier pieces return.
    program: ExtractedJaxpr
    results: tuple[int, ...]  # which of the results asked for it returns, first, by position
    sent: tuple[Any, ...]  # the variables that it returns next, for other pieces
    readers: dict[Any, str]  # input that another home has or made -> the primitive that first reads it


def cut(places: Places, results: Sequence[tuple[Any, Home]]) -> list[Piece]:
    """Cuts the programs that compute some results."""
    return _Cutter(places, results).cut()


class _Cutter:
    def __init__(self, places: Places, results: Sequence[tuple[Any, Home]]) -> None:
        self._places = places
        self._results = results
        self._effects: dict[int, Home] = {}  # identity of an equation with effects -> its home
        self._rounds: dict[Any, int] = {}
        self._receivers: dict[Any, dict[Home, str]] = {}  # variable sent -> receiver -> its reader
        for equation in places.flat.equations:
            home = places.home_of_equation(equation)
            inputs = places.placed_inputs(equation)
            arrival = max((self._arrival(var, home) for var in inputs), default=0)
            self._rounds.update(dict.fromkeys(equation.outvars, arrival))
            if equation.effects and results:
                self._effects[id(equation)] = results[0][1] if home is None else home

    def _arrival(self, atom: Any, home: Home | None) -> int:
        """The round in which a home can have a value."""
        places = self._places
        if places.home_of(atom) is None:
            return 0
        if places.homes[atom] == home:
            return self._rounds.get(atom, 0)
        # No program is needed to send inputs.
        return max(
            self._rounds[var] + (places.homes[var] != home) if var in places.makers else 0
            for var in places.sent_for(atom)
        )

    def cut(self) -> list[Piece]:
        self._find_receivers()
        places, results = self._places, self._results
        computed = [var for var in self._receivers if var in places.makers]
        order = {var: number for number, var in enumerate(places.makers)}
        computed.sort(key=order.__getitem__)
        last: dict[Home, int] = {}
        targets = [*results, *((var, home) for var, home, _reader in self._read_by_effects())]
        for atom, home in targets:
            last[home] = max(last.get(home, 0), self._arrival(atom, home))
        for var in computed:
            sender = places.homes[var]
            assert sender is not None
            last[sender] = max(last.get(sender, 0), self._rounds[var])
        pieces = []
        for home, last_round in last.items():
            for number in range(last_round + 1):
                sent = [v for v in computed if places.homes[v] == home and self._rounds[v] == number]
                result_places = [
                    place
                    for place, (_atom, owner) in enumerate(results)
                    if owner == home and number == last_round
                ]
                is_last = number == last_round
                if sent or result_places or (is_last and home in self._effects.values()):
                    pieces.append(self._make_piece(home, number, result_places, sent, computed, is_last))
        return sorted(pieces, key=lambda piece: piece.round)

    def _read_by_effects(self) -> list[tuple[Any, Home, str]]:
        """The values that equations with effects read, the equations' homes, and their primitives."""
        return [
            (var, self._effects[id(equation)], equation.primitive.name)
            for equation in self._places.flat.equations
            if id(equation) in self._effects
            for var in self._places.placed_inputs(equation)
        ]

    def _make_piece(
        self,
        home: Home,
        number: int,
        result_places: Sequence[int],
        sent: Sequence[Any],
        computed: Sequence[Any],
        is_last: bool,
    ) -> Piece:
        places = self._places
        atoms = [*(self._results[place][0] for place in result_places), *sent]
        available = [
            var
            for var in computed
            if self._rounds[var] < number
            and (home in self._receivers[var] or (places.homes[var] == home and not places.costs[var]))
        ]

        def is_here(equation: Any) -> bool:
            return is_last and self._effects.get(id(equation)) == home

        program = extract(places.flat, atoms, available, is_here)
        readers = {
            var: self._receivers[var][home]
            for var in program.inputs
            if home in self._receivers.get(var, ())
        }
        for var in program.inputs:
            assert var in readers or var in available or places.homes[var] in (None, home)
        return Piece(home, number, program, tuple(result_places), tuple(sent), readers)

    def _find_receivers(self) -> None:
        places = self._places
        visited: set[tuple[Any, Home]] = set()
        pending = [*self._read_by_effects(), *((atom, home, "a copy") for atom, home in self._results)]
        pending.reverse()
        while pending:
            atom, home, reader = pending.pop()
            maker_home = places.home_of(atom)
            if maker_home is None or (atom, home) in visited:
                continue
            visited.add((atom, home))
            if maker_home != home:
                for var in places.sent_for(atom):
                    sender = places.homes[var]
                    assert sender is not None
                    if sender != home:
                        self._receivers.setdefault(var, {}).setdefault(home, reader)
                    pending.append((var, sender, reader))
            elif atom in places.makers:
                maker = places.makers[atom]
                pending += [(v, home, maker.primitive.name) for v in places.placed_inputs(maker)]
