"""Cuts a model's graph into parts: runs of its nodes, in an order, between places where little is alive.

A part is what is measured, and what a stage has some of. There are more of them than stages, so that these
can be equally long, and far fewer than nodes, so that their times add up to those of stages: within a part
XLA fuses what it would within a stage.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ipu_pipeline.engine.jaxprs.costs import count_equations
from ipu_pipeline.engine.schedules.graph_splits import find_orders
from ipu_pipeline.engine.tracing.faults import find_function
from ipu_pipeline.engine.tracing.model_graphs import ModelGraph
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["ModelParts", "number_names"]

_FINEST = 2**40  # parts, if all were equally long: then every node is one
_OF_BYTES = 0.25  # how much a variable's part of the memory counts as a part of the time


class ModelParts:
    """The parts of a model.

    Attributes:
      graph: the model.
      nodes: the nodes of each part. The parts are in a topological order.
      before: for each part, those whose results it needs.
      names: what tables call them.
    """

    def __init__(self, graph: ModelGraph, least: int, most: int) -> None:
        """Cuts a graph into parts."""
        self.graph = graph
        nodes, equations = graph.nodes, graph.flat.equations
        places = {node: place for place, node in enumerate(nodes)}
        before = [
            {places[graph.maker[var]] for var in graph.needs_of(node) if var in graph.maker}
            for node in nodes
        ]
        read = graph.variables_of()
        costs = _weigh(graph, read)
        made = [num_bytes([var.aval for var in equations[node].outvars]) for node in nodes]
        order, live = _choose_order(before, costs, made)
        own, number = [costs[place] for place in order], most
        ends = _choose_cuts(own, live, number)
        while len(ends) <= least and number < _FINEST:
            number *= 2
            ends = _choose_cuts(own, live, number)
        runs = [[nodes[place] for place in order[first:end]] for first, end in itertools.pairwise(ends)]
        self.nodes = _join_assigned(graph, runs)
        part_of = {node: number for number, part in enumerate(self.nodes) for node in part}
        self.before = [
            {part_of[nodes[other]] for node in part for other in before[places[node]]} - {number}
            for number, part in enumerate(self.nodes)
        ]
        self._read = dict(zip(nodes, read, strict=True))
        self.names = number_names(self._name(part) for part in self.nodes)

    def of(self, graph: ModelGraph) -> ModelParts:
        """The same parts of the model as it was traced for other shapes."""
        known, made = self.graph.flat.equations, graph.flat.equations
        names = [[str(equation.primitive) for equation in own] for own in (known, made)]
        if names[0] != names[1] or graph.nodes != self.graph.nodes:
            raise ValueError(
                "The model computes something else for these shapes than for those that it was split for, "
                f"so the cuts have no meaning there ({len(made)} operations, in place of {len(known)}). "
                "Split it for these shapes, too, and make another pipeline, which has the same state."
            )
        other = copy.copy(self)
        other.graph = graph
        return other

    def find_scopes(self, parts: Iterable[int]) -> frozenset[str]:
        """The names of the scopes around the nodes of some parts."""
        equations = (self.graph.flat.equations[node] for part in parts for node in self.nodes[part])
        return frozenset(name for equation in equations for name in jax_compat.scope_names(equation))

    def _name(self, part: Sequence[int]) -> str:
        """Names a part by its most expensive node: its scopes, else its variable, else its line of code."""
        equations = self.graph.flat.equations
        if not part:
            return "nothing"
        longest = max(part, key=lambda node: count_equations([equations[node]]))
        if scopes := _find_scopes(equations[longest]):
            return "/".join(scopes)
        if variables := self._read[longest]:
            return self.graph.specs[max(variables, key=lambda var: num_bytes([var.aval]))].name
        return find_function(equations[longest]) or str(equations[longest].primitive.name)


def _find_scopes(equation: Any) -> list[str]:
    """The scopes around an equation, and around all that is in its body."""
    inner = [_find_scopes(own) for body in jax_core.jaxprs_in_params(equation.params) for own in body.eqns]
    common = [names[0] for names in zip(*inner, strict=False) if len(set(names)) == 1] if inner else []
    return [*jax_compat.scope_names(equation), *common]


def number_names(names: Iterable[str]) -> list[str]:
    """Names that differ: those that occur several times are numbered."""
    given = list(names)
    return [
        f"{name}.{given[:number].count(name)}" if given.count(name) > 1 else name
        for number, name in enumerate(given)
    ]


def _weigh(graph: ModelGraph, read: Sequence[frozenset[Any]]) -> list[float]:
    """How much each node counts: its part of the time, and of the memory of variables, once each."""
    equations = graph.flat.equations
    costs = [count_equations([equations[node]]) for node in graph.nodes]
    sizes, known = [], frozenset[Any]()
    for own in read:
        sizes.append(num_bytes([var.aval for var in own - known]))
        known |= own
    total, total_size = max(sum(costs), 1e-30), max(sum(sizes), 1)
    return [cost / total + _OF_BYTES * size / total_size for cost, size in zip(costs, sizes, strict=True)]


def _choose_order(
    before: Sequence[set[int]], costs: Sequence[float], made: Sequence[int]
) -> tuple[Sequence[int], list[int]]:
    """The order of nodes while which least is alive, and what is alive after each."""
    if not before:
        return (), []
    found = []
    for order in find_orders(before, made.__getitem__, keeps_last=False):
        live = _find_live(order, before, made)
        while_running = sum(costs[node] * alive for node, alive in zip(order, live, strict=True))
        found.append((while_running, order, live))
    _least, order, live = min(found)
    return order, live


def _find_live(order: Sequence[int], before: Sequence[set[int]], made: Sequence[int]) -> list[int]:
    """The bytes of results that are still to be read, after each node of an order."""
    places = {node: place for place, node in enumerate(order)}
    last = dict(places)  # node -> the place of its last reader
    for node, needed in enumerate(before):
        for other in needed:
            last[other] = max(last[other], places[node])
    changes = [0] * (len(order) + 1)
    for node, place in places.items():
        if last[node] > place:
            changes[place] += made[node]
            changes[last[node]] -= made[node]
    return list(itertools.accumulate(changes[:-1]))


def _choose_cuts(costs: Sequence[float], live: Sequence[int], most: int) -> list[int]:
    """The ends of the runs: places where little is alive, and between which there is enough to compute.

    Places are taken in the order of what is alive there, if they are far enough from those taken before.
    """
    number = len(costs)
    reached = list(itertools.accumulate(costs))
    distance = reached[-1] / most if number else 0.0
    taken: list[int] = []
    for place in sorted(range(number - 1), key=lambda place: (live[place], place)):
        if reached[-1] - reached[place] < distance / 4 or reached[place] < distance / 4:
            continue
        if all(abs(reached[place] - reached[other]) >= distance for other in taken):
            taken.append(place)
    return [0, *(place + 1 for place in sorted(taken)), number]


def _join_assigned(graph: ModelGraph, runs: list[list[int]]) -> list[list[int]]:
    """Joins the runs from that which reads an assigned variable to where its new value is known."""
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    joined: set[int] = set()
    for spec, atom in graph.assigned:
        touched = [run_of[graph.maker[var]] for var in graph.bases_of([atom]) if var in graph.maker]
        touched += [run_of[graph.maker[graph.reads[spec]]]] if spec in graph.reads else []
        joined.update(range(min(touched, default=0), max(touched, default=0)))
    found: list[list[int]] = []
    for number, run in enumerate(runs):
        if number - 1 in joined:
            found[-1] = found[-1] + run
        else:
            found.append(run)
    return found
