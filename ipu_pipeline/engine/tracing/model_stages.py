"""Stages of a model that is one function: parts of its graph, and stage functions made of these."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.costs import count_equations
from ipu_pipeline.engine.schedules.graph_splits import find_orders
from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.faults import find_function
from ipu_pipeline.engine.tracing.model_graphs import ModelGraph
from ipu_pipeline.engine.tracing.side_outputs import enqueue
from ipu_pipeline.engine.tracing.specs import VariableSpec, serial_numbers
from ipu_pipeline.engine.tracing.stage_markers import micro_batch_key_p, update_count_p
from ipu_pipeline.engine.tracing.variables import assign, get_variable
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.pytrees import as_shape, describe, num_bytes, trees_equal

# Parts of a model: runs of its nodes, in an order, cut where few values are live.
#
# Parts are measured, and stages are made of them. There are more parts than stages, so that stages can be
# equally long, and far fewer than nodes, so that the parts' times add up to the stages': within a part XLA
# fuses what it would within a stage.

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
        variables = graph.variables_of()
        costs = _weigh(graph, variables)
        result_bytes = [num_bytes([var.aval for var in equations[node].outvars]) for node in nodes]
        order, live = _choose_order(before, costs, result_bytes)
        ordered_costs, number = [costs[place] for place in order], most
        ends = _choose_cuts(ordered_costs, live, number)
        while len(ends) <= least and number < _FINEST:
            number *= 2
            ends = _choose_cuts(ordered_costs, live, number)
        runs = [[nodes[place] for place in order[first:end]] for first, end in itertools.pairwise(ends)]
        self.nodes = _join_assigned(graph, runs)
        part_of = {node: number for number, part in enumerate(self.nodes) for node in part}
        self.before = [
            {part_of[nodes[predecessor]] for node in part for predecessor in before[places[node]]}
            - {number}
            for number, part in enumerate(self.nodes)
        ]
        self._variables = dict(zip(nodes, variables, strict=True))
        self.names = number_names(self._name(part) for part in self.nodes)

    def of(self, graph: ModelGraph) -> ModelParts:
        """The same parts of the model as it was traced for other shapes."""
        old, new = self.graph.flat.equations, graph.flat.equations
        names = [[str(equation.primitive) for equation in side] for side in (old, new)]
        if names[0] != names[1] or graph.nodes != self.graph.nodes:
            raise ValueError(
                "The model computes something else for these shapes than for those that it was split for, "
                f"so the cuts have no meaning there ({len(new)} operations, in place of {len(old)}). "
                "Split it for these shapes, too, and make another pipeline, which has the same state."
            )
        new_parts = copy.copy(self)
        new_parts.graph = graph
        return new_parts

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
        if variables := self._variables[longest]:
            return self.graph.specs[max(variables, key=lambda var: num_bytes([var.aval]))].name
        return find_function(equations[longest]) or str(equations[longest].primitive.name)


def _find_scopes(equation: Any) -> list[str]:
    """The scopes around an equation, and around all that is in its body."""
    inside = [
        _find_scopes(inner) for body in jax_core.jaxprs_in_params(equation.params) for inner in body.eqns
    ]
    common = [names[0] for names in zip(*inside, strict=False) if len(set(names)) == 1] if inside else []
    return [*jax_compat.scope_names(equation), *common]


def number_names(names: Iterable[str]) -> list[str]:
    """Names that differ: those that occur several times are numbered."""
    all_names = list(names)
    return [
        f"{name}.{all_names[:number].count(name)}" if all_names.count(name) > 1 else name
        for number, name in enumerate(all_names)
    ]


def _weigh(graph: ModelGraph, variables: Sequence[frozenset[Any]]) -> list[float]:
    """The weight of each node: its part of the time, and of the memory of variables, once each."""
    equations = graph.flat.equations
    costs = [count_equations([equations[node]]) for node in graph.nodes]
    sizes, counted = [], frozenset[Any]()
    for node_variables in variables:
        sizes.append(num_bytes([var.aval for var in node_variables - counted]))
        counted |= node_variables
    total, total_size = max(sum(costs), 1e-30), max(sum(sizes), 1)
    return [cost / total + _OF_BYTES * size / total_size for cost, size in zip(costs, sizes, strict=True)]


def _choose_order(
    before: Sequence[set[int]], costs: Sequence[float], result_bytes: Sequence[int]
) -> tuple[Sequence[int], list[int]]:
    """Finds the order of nodes in which the fewest bytes are live, and the bytes live after each node."""
    if not before:
        return (), []
    candidates = []
    for order in find_orders(before, result_bytes.__getitem__, keeps_last=False):
        live = _find_live(order, before, result_bytes)
        while_running = sum(costs[node] * alive for node, alive in zip(order, live, strict=True))
        candidates.append((while_running, order, live))
    _least, order, live = min(candidates)
    return order, live


def _find_live(order: Sequence[int], before: Sequence[set[int]], result_bytes: Sequence[int]) -> list[int]:
    """The bytes of results that are still to be read, after each node of an order."""
    places = {node: place for place, node in enumerate(order)}
    last = dict(places)  # node -> the place of its last reader
    for node, predecessors in enumerate(before):
        for predecessor in predecessors:
            last[predecessor] = max(last[predecessor], places[node])
    changes = [0] * (len(order) + 1)
    for node, place in places.items():
        if last[node] > place:
            changes[place] += result_bytes[node]
            changes[last[node]] -= result_bytes[node]
    return list(itertools.accumulate(changes[:-1]))


def _choose_cuts(costs: Sequence[float], live: Sequence[int], most: int) -> list[int]:
    """The ends of the runs: places where few bytes are live, with enough to compute between them.

    Places are taken in ascending order of the bytes live there, if far enough from those already taken.
    """
    number = len(costs)
    reached = list(itertools.accumulate(costs))
    distance = reached[-1] / most if number else 0.0
    cuts: list[int] = []
    for place in sorted(range(number - 1), key=lambda place: (live[place], place)):
        if reached[-1] - reached[place] < distance / 4 or reached[place] < distance / 4:
            continue
        if all(abs(reached[place] - reached[cut]) >= distance for cut in cuts):
            cuts.append(place)
    return [0, *(place + 1 for place in sorted(cuts)), number]


def _join_assigned(graph: ModelGraph, runs: list[list[int]]) -> list[list[int]]:
    """Joins the runs from that which reads an assigned variable to where its new value is known."""
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    joined: set[int] = set()
    for spec, atom in graph.assigned:
        touched = [run_of[graph.maker[var]] for var in graph.bases_of([atom]) if var in graph.maker]
        touched += [run_of[graph.maker[graph.reads[spec]]]] if spec in graph.reads else []
        joined.update(range(min(touched, default=0), max(touched, default=0)))
    joined_runs: list[list[int]] = []
    for number, run in enumerate(runs):
        if number - 1 in joined:
            joined_runs[-1] = joined_runs[-1] + run
        else:
            joined_runs.append(run)
    return joined_runs


# Stage functions made of parts. Such a function is like a user's: while it is traced it asks for the
# variables that its parts read, by the names that the model gave them, and it takes and returns what is
# live where the model is cut.


@dataclass(frozen=True, eq=False)
class ModelStage:
    """A stage of a model, called while it is traced.

    Attributes:
      graph: the model.
      program: what it computes, in the order of `computed`.
      takes: what it is given; None for the arguments of the model.
      returns: what the next stage is given; None for what the model returns.
      computed: variables of the model's jaxpr, results of the program.
      asks: the variables that it has and does not read.
      reused: full names of the variables that exist already when it asks for them.
      assigned: the variables that it assigns, with the atoms of their new values.
      enqueued: what it enqueues, with the atoms of the leaves.
      __name__: what errors and tables call it.
      cut: the model that it is a stage of, with those for other shapes; None: there are none.
      number: its place among the stages.
    """

    graph: ModelGraph
    program: jaxprs.ExtractedJaxpr
    takes: tuple[Any, ...] | None
    returns: tuple[Any, ...] | None
    computed: tuple[Any, ...]
    asks: tuple[VariableSpec, ...]
    reused: frozenset[str]
    assigned: tuple[tuple[VariableSpec, Any], ...]
    enqueued: tuple[tuple[frames.Enqueued, Sequence[Any]], ...]
    __name__: str
    cut: ModelCut | None = None
    number: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the stage."""
        frame = frames.current_frame("a stage of a model")
        names = frame.names
        if self.cut is not None:
            if self.takes is None:
                names.model_stages[id(self.cut)] = self.cut.find(args, kwargs)
            stage = names.model_stages.get(id(self.cut), self.cut.stages)[self.number]
            if stage is not self:
                return stage(*args, **kwargs)
        reuses = scopes.is_reusing()
        if self.takes is None:
            names.opened_scopes |= self.graph.traced.opened_scopes
            for kind, count in self.graph.traced.layer_counts.items():
                names.layer_counts[kind] = max(count, names.layer_counts.get(kind, 0))
        env = self._read_arguments(args, kwargs)
        for var in self.program.inputs:
            if var not in env:
                env[var] = self._find(var, reuses)
        for spec in self.asks:
            self._ask(spec, reuses)
        results = self.program(*(env[var] for var in self.program.inputs))
        env.update(zip(self.computed, results, strict=True))

        def value(atom: Any) -> Any:
            result = env[atom] if jaxprs.is_var(atom) else np.asarray(atom.val, atom.aval.dtype)
            return jax_compat.as_weak(result) if atom.aval.weak_type else result

        for spec, atom in self.assigned:
            with scopes.opened(scopes.Scope()):
                assign(spec.name, value(atom))
        for entry, atoms in self.enqueued:
            enqueue(frame, entry.target, jax.tree.unflatten(entry.tree, list(map(value, atoms))))
        if self.returns is not None:
            return tuple(env[var] for var in self.returns)
        return jax.tree.unflatten(self.graph.tree, list(map(value, self.graph.returned)))

    def _read_arguments(self, args: Any, kwargs: Any) -> dict[Any, Any]:
        if self.takes is not None:
            return dict(zip(self.takes, args, strict=True))
        expected, shapes = self.graph.traced.arguments, jax.tree.map(as_shape, (args, kwargs))
        if shapes != expected:
            raise ValueError(
                f"The model was split for the inputs and the micro-batch {_describe_arguments(*expected)}, "
                f"and got {_describe_arguments(*shapes)}. Split it for these, too."
            )
        leaves = jax.tree.leaves((args, kwargs))
        firsts = {"input": 0, "element": self.graph.num_inputs}
        return {
            var: leaves[firsts[source.kind] + source.index]
            for var, source in self.graph.sources.items()
            if source.kind in firsts
        }

    def _find(self, var: Any, reuses: bool) -> Any:
        """Finds a value that the program reads beside its arguments."""
        graph = self.graph
        if var in graph.specs:
            return self._ask(graph.specs[var], reuses)
        if var is graph.key:
            return micro_batch_key_p.bind(serial=next(serial_numbers))
        if var in graph.captured:
            return graph.captured[var]
        assert graph.sources[var].kind == "update_count"
        return update_count_p.bind()

    def _ask(self, spec: VariableSpec, reuses: bool) -> Any:
        with scopes.opened(scopes.Scope(reuse=reuses or spec.name in self.reused)):
            return get_variable(spec.name, spec.shape, spec.dtype, spec.initializer, spec.trainable)

    def __deepcopy__(self, memo: object) -> ModelStage:
        """Returns the stage itself, which nothing changes."""
        return self


class ModelCut:
    """A model cut into stages, in the same places whatever shapes its micro-batches have.

    Attributes:
      stages: the stages for the shapes that it was split for; they ask here for the stages of others.
    """

    def __init__(
        self,
        parts: ModelParts,
        groups: Sequence[Sequence[int]],
        reused: Collection[str],
        trace: Callable[[Any, Any], ModelGraph],
    ) -> None:
        """Makes the stages."""
        self._parts, self._groups, self._reused, self._trace = parts, groups, reused, trace
        self.stages = [
            dataclasses.replace(stage, cut=self, number=number)
            for number, stage in enumerate(make_model_stages(parts, groups, reused))
        ]
        self._other_stages: list[tuple[Any, list[ModelStage]]] = []

    def find(self, args: Any, kwargs: Any) -> list[ModelStage]:
        """The stages for a model's arguments; for other shapes than the first it is traced again."""
        expected, shapes = self._parts.graph.traced.arguments, jax.tree.map(as_shape, (args, kwargs))
        if shapes == expected or not _differ_in_shapes(shapes, expected):
            return self.stages
        for arguments, stages in self._other_stages:
            if arguments == shapes:
                return stages
        parts = self._parts.of(self._trace(*shapes))
        stages = make_model_stages(parts, self._groups, self._reused)
        self._other_stages.append((shapes, stages))
        return stages


def _differ_in_shapes(shapes: Any, expected: Any) -> bool:
    """Whether arguments differ in shapes only. What else differs is an error of the first stage."""
    if not trees_equal(jax.tree.structure(shapes), jax.tree.structure(expected)):
        return False
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(expected), strict=True)
    return all(leaf.dtype == expected_leaf.dtype for leaf, expected_leaf in pairs)


def make_model_stages(
    parts: ModelParts, groups: Sequence[Sequence[int]], reused: Collection[str] = ()
) -> list[ModelStage]:
    """Makes the stages of a model."""
    graph = parts.graph
    equations = graph.flat.equations
    stage_of = {
        node: stage for stage, group in enumerate(groups) for part in group for node in parts.nodes[part]
    }
    last = len(groups) - 1

    def maker_stage(var: Any) -> int:
        return stage_of[graph.maker[var]] if var in graph.maker else -1

    def first_stage_with(atoms: Iterable[Any]) -> int:
        return max([0, *(maker_stage(var) for var in graph.bases_of(atoms))])

    # What each stage needs: for its nodes, and for what is assigned, enqueued and returned there.
    needs: list[set[Any]] = [set() for _stage in groups]  # by each stage
    for node, stage in stage_of.items():
        needs[stage] |= graph.needs_of(node)
    assigned = []
    for spec, atom in graph.assigned:
        atoms = [atom, graph.reads[spec]] if spec in graph.reads else [atom]
        assigned.append((first_stage_with(atoms), spec, atom))
    enqueued = [(first_stage_with(atoms), entry, atoms) for entry, atoms in graph.enqueued]
    for stage, _spec, atom in assigned:
        needs[stage] |= graph.bases_of([atom])
    for stage, _entry, atoms in enqueued:
        needs[stage] |= graph.bases_of(atoms)
    needs[last] |= graph.bases_of(graph.returned)
    # What each stage takes: what is live at the cut before it, in the order of the model.
    order = {var: number for number, var in enumerate([*graph.sources, *graph.maker])}
    takes = [
        sorted(
            {var for later in needs[stage:] for var in later if maker_stage(var) < stage},
            key=order.__getitem__,
        )
        for stage in range(len(groups))
    ]
    # The program of each stage.
    programs, computed = [], []
    for stage, group in enumerate(groups):
        atoms = [atom for place, _spec, atom in assigned if place == stage]
        atoms += [atom for place, _entry, leaves in enqueued if place == stage for atom in leaves]
        atoms += (
            graph.returned if stage == last else [v for v in takes[stage + 1] if maker_stage(v) == stage]
        )
        computed.append(list(dict.fromkeys(jaxprs.variables_in(atoms))))
        equation_ids = frozenset(id(equations[node]) for part in group for node in parts.nodes[part])

        def is_in_stage(equation: Any, ids: frozenset[int] = equation_ids) -> bool:
            return id(equation) in ids

        arguments = [var for var in takes[stage] if var in graph.maker]
        programs.append(jaxprs.extract(graph.flat, computed[-1], arguments, is_in_stage))
    # Which variables each stage reads, and which it has without reading them.
    reads = [[graph.specs[var] for var in program.inputs if var in graph.specs] for program in programs]
    asks = [[spec for place, spec, _atom in assigned if place == stage] for stage in range(len(groups))]
    of_stages = [spec for specs in (*reads, *asks) for spec in specs]
    asks[0] += [spec for spec in graph.specs.values() if spec not in of_stages]  # read by none
    existing = set(reused)
    stages = []
    for stage, group in enumerate(groups):
        stages.append(
            ModelStage(
                graph,
                programs[stage],
                tuple(takes[stage]) if stage else None,
                None if stage == last else tuple(takes[stage + 1]),
                tuple(computed[stage]),
                tuple(spec for spec in asks[stage] if spec not in reads[stage]),
                frozenset(existing),
                tuple((spec, atom) for place, spec, atom in assigned if place == stage),
                tuple((entry, atoms) for place, entry, atoms in enqueued if place == stage),
                _name([parts.names[part] for part in group]),
            )
        )
        existing |= {spec.name for spec in (*reads[stage], *asks[stage])}
    return stages


def _describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describes arguments that no function has names for: `(float32[4, 8], labels=int32[4])`."""
    parts = [describe(value) for value in args]
    parts += [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _name(names: Sequence[str]) -> str:
    """Names a stage by its first and last part."""
    return names[0] if names[0] == names[-1] else f"{names[0]}-{names[-1]}"
