"""Makes stage functions of the parts of a model.

Such a function is like a user's: while it is traced it asks for the variables that its parts read, by the
names that the model gave them, and it takes and returns what is alive where the model is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.counting import update_count_p
from ipu_pipeline.engine.tracing.enqueuing import enqueue
from ipu_pipeline.engine.tracing.keys import micro_batch_key_p
from ipu_pipeline.engine.tracing.model_graphs import ModelGraph, is_var
from ipu_pipeline.engine.tracing.model_parts import ModelParts
from ipu_pipeline.engine.tracing.specs import VariableSpec, serial_numbers
from ipu_pipeline.engine.tracing.variables import assign, get_variable
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.shapes import as_shape, describe, trees_equal

__all__ = ["ModelCut", "ModelStage", "make_model_stages"]


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
            own = names.model_stages.get(id(self.cut), self.cut.stages)[self.number]
            if own is not self:
                return own(*args, **kwargs)
        reuses = scopes.is_reusing()
        if self.takes is None:
            names.opened_scopes |= self.graph.traced.opened_scopes
            for kind, count in self.graph.traced.layer_counts.items():
                names.layer_counts[kind] = max(count, names.layer_counts.get(kind, 0))
        known = self._read_arguments(args, kwargs)
        for var in self.program.inputs:
            if var not in known:
                known[var] = self._find(var, reuses)
        for spec in self.asks:
            self._ask(spec, reuses)
        results = self.program(*(known[var] for var in self.program.inputs))
        known.update(zip(self.computed, results, strict=True))

        def value(atom: Any) -> Any:
            found = known[atom] if is_var(atom) else np.asarray(atom.val, atom.aval.dtype)
            return jax_compat.as_weak(found) if atom.aval.weak_type else found

        for spec, atom in self.assigned:
            with scopes.opened(scopes.Scope()):
                assign(spec.name, value(atom))
        for entry, atoms in self.enqueued:
            enqueue(frame, entry.target, jax.tree.unflatten(entry.tree, list(map(value, atoms))))
        if self.returns is not None:
            return tuple(known[var] for var in self.returns)
        return jax.tree.unflatten(self.graph.tree, list(map(value, self.graph.returned)))

    def _read_arguments(self, args: Any, kwargs: Any) -> dict[Any, Any]:
        if self.takes is not None:
            return dict(zip(self.takes, args, strict=True))
        expected, given = self.graph.traced.arguments, jax.tree.map(as_shape, (args, kwargs))
        if given != expected:
            raise ValueError(
                f"The model was split for the inputs and the micro-batch {_describe_arguments(*expected)}, "
                f"and got {_describe_arguments(*given)}. Split it for these, too."
            )
        leaves = jax.tree.leaves((args, kwargs))
        firsts = {"input": 0, "element": self.graph.num_inputs}
        return {
            var: leaves[firsts[source.kind] + source.index]
            for var, source in self.graph.sources.items()
            if source.kind in firsts
        }

    def _find(self, var: Any, reuses: bool) -> Any:
        """What the program reads beside its arguments."""
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
      stages: for the shapes that it was split for; they ask here for those of others.
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
        self._others: list[tuple[Any, list[ModelStage]]] = []

    def find(self, args: Any, kwargs: Any) -> list[ModelStage]:
        """The stages for a model's arguments; for other shapes than the first it is traced again."""
        known, given = self._parts.graph.traced.arguments, jax.tree.map(as_shape, (args, kwargs))
        if given == known or not _differ_in_shapes(given, known):
            return self.stages
        for arguments, stages in self._others:
            if arguments == given:
                return stages
        parts = self._parts.of(self._trace(*given))
        stages = make_model_stages(parts, self._groups, self._reused)
        self._others.append((given, stages))
        return stages


def _differ_in_shapes(given: Any, known: Any) -> bool:
    """Whether arguments differ in shapes only. What else differs is an error of the first stage."""
    if not trees_equal(jax.tree.structure(given), jax.tree.structure(known)):
        return False
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(known), strict=True)
    return all(one.dtype == other.dtype for one, other in pairs)


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

    def made_in(var: Any) -> int:
        return stage_of[graph.maker[var]] if var in graph.maker else -1

    def known_in(atoms: Iterable[Any]) -> int:
        return max((made_in(var) for var in graph.bases_of(atoms)), default=0)

    needed: list[set[Any]] = [set() for _stage in groups]  # by each stage
    for node, stage in stage_of.items():
        needed[stage] |= graph.needs_of(node)
    assigned = []
    for spec, atom in graph.assigned:
        known = [atom, graph.reads[spec]] if spec in graph.reads else [atom]
        assigned.append((max(known_in(known), 0), spec, atom))
    enqueued = [(max(known_in(atoms), 0), entry, atoms) for entry, atoms in graph.enqueued]
    for stage, _spec, atom in assigned:
        needed[stage] |= graph.bases_of([atom])
    for stage, _entry, atoms in enqueued:
        needed[stage] |= graph.bases_of(atoms)
    needed[last] |= graph.bases_of(graph.returned)
    order = {var: number for number, var in enumerate([*graph.sources, *graph.maker])}
    takes = [
        sorted(
            {var for later in needed[stage:] for var in later if made_in(var) < stage},
            key=order.__getitem__,
        )
        for stage in range(len(groups))
    ]
    programs, computed = [], []
    for stage, group in enumerate(groups):
        atoms = [atom for place, _spec, atom in assigned if place == stage]
        atoms += [atom for place, _entry, leaves in enqueued if place == stage for atom in leaves]
        atoms += graph.returned if stage == last else [v for v in takes[stage + 1] if made_in(v) == stage]
        computed.append(list(dict.fromkeys(filter(is_var, atoms))))
        own = frozenset(id(equations[node]) for part in group for node in parts.nodes[part])

        def is_own(equation: Any, own: frozenset[int] = own) -> bool:
            return id(equation) in own

        given = [var for var in takes[stage] if var in graph.maker]
        programs.append(jaxprs.extract(graph.flat, computed[-1], given, is_own))
    read = [[graph.specs[var] for var in program.inputs if var in graph.specs] for program in programs]
    asks = [[spec for place, spec, _atom in assigned if place == stage] for stage in range(len(groups))]
    everywhere = [spec for own in (*read, *asks) for spec in own]
    asks[0] += [spec for spec in graph.specs.values() if spec not in everywhere]  # read by none
    exist = set(reused)
    found = []
    for stage, group in enumerate(groups):
        found.append(
            ModelStage(
                graph,
                programs[stage],
                tuple(takes[stage]) if stage else None,
                None if stage == last else tuple(takes[stage + 1]),
                tuple(computed[stage]),
                tuple(spec for spec in asks[stage] if spec not in read[stage]),
                frozenset(exist),
                tuple((spec, atom) for place, spec, atom in assigned if place == stage),
                tuple((entry, atoms) for place, entry, atoms in enqueued if place == stage),
                _name([parts.names[part] for part in group]),
            )
        )
        exist |= {spec.name for spec in (*read[stage], *asks[stage])}
    return found


def _describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describes arguments that no function has names for: `(float32[4, 8], labels=int32[4])`."""
    parts = [describe(value) for value in args]
    parts += [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _name(names: Sequence[str]) -> str:
    """Names a stage by its first and last part."""
    return names[0] if names[0] == names[-1] else f"{names[0]}-{names[-1]}"
