"""A model, one function, as a graph of equations that can be in different stages.

The model is traced as the only stage of a pipeline, and scans over its layers are written out. A node is an
equation that depends on the micro-batch. Anything else, such as masks, random keys and variables in another
dtype, is computed in each stage that reads it. So nothing of a variable is sent, and random numbers are
those of the model, wherever it is cut. A variable that the model assigns is read by a node, since only the
stage that assigns it has its value of before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames, stages
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.faults import Faults
from ipu_pipeline.engine.tracing.side_outputs import first_leaves
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.tracing.stage_parameters import Layout, ModelParameters
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline
from ipu_pipeline.ground.pytrees import num_bytes

_CHEAP = ("broadcast_in_dim",)  # computed where it is read, if its result is larger than its operand


@dataclass(frozen=True)
class Slice:
    """A variable of a model's stages: a variable of the model, or one layer's part of a stacked one.

    Attributes:
      origin: the full name of the model's variable.
      number: which slice of its first axis it is; None: all of it.
    """

    origin: str
    number: int | None = None

    @property
    def name(self) -> str:
        """Its own full name."""
        return self.origin if self.number is None else f"{self.origin}/{self.number}"


def trace_model(
    model: stages.StageFunction,
    element: Any,
    inputs: Sequence[Any],
    is_training: bool,
    program_names: frames.ProgramNames,
    captures: Captures,
) -> TracedModel:
    """Traces a model as the only stage of a pipeline."""
    faults = Faults()

    def no_loss(*_args: Any, **_kwargs: Any) -> Any:
        return jnp.zeros(())  # the pipeline's own is traced with the last stage

    with frames.unchanged(program_names):
        loss = no_loss if is_training else None
        traced = stages.trace([[model]], element, inputs, loss, program_names, faults, captures)
        counts, opened = dict(program_names.layer_counts), frozenset(program_names.opened_scopes)
    if faults:
        raise faults.as_error()
    positional, named = stages.as_arguments(element)
    return TracedModel(traced, ((*inputs, *positional), named), counts, opened)


@dataclass(frozen=True)
class TracedModel:
    """A model as it was traced.

    Attributes:
      pipeline: the model as the only stage of a pipeline.
      arguments: shapes and dtypes of its arguments, positional ones and those by name.
      layer_counts: the number of layers of each kind, by scope, in which later ones are numbered on.
      opened_scopes: the variable scopes that it opens.
    """

    pipeline: TracedPipeline
    arguments: Any
    layer_counts: Mapping[tuple[str, str], int]
    opened_scopes: frozenset[str]


class ModelGraph:
    """A traced model as a graph.

    Attributes:
      flat: the model without scans over layers.
      specs: inputs of `flat` that are variables -> their specifications.
      slices: the part of a model's variable that each of these is, by full name.
      sources: inputs of `flat` that are the model's own, or the number of updates -> where they come from.
      key: the input of `flat` that is the random key of the micro-batch; None if there is none.
      captured: inputs of `flat` that the model captured -> these traced values.
      tree: the structure of what the model returns.
      returned: the atoms that it returns.
      assigned: the variables that it assigns, with the atoms of their new values.
      enqueued: what it enqueues, with the atoms of the leaves.
      reads: the variables that it assigns and reads -> the variables of `flat` that have what they were.
      nodes: the numbers of the equations that are nodes.
      maker: variables of `flat` -> the node that makes them.
      traced: the model as it was traced.
    """

    def __init__(
        self,
        traced: TracedModel,
        captured: Sequence[Any],
        layout: Layout | None = None,
        model: object = None,
        *,
        cut_scans: bool = True,
    ) -> None:
        """Makes the graph."""
        self._layout, self._model = layout, model
        self.traced = traced
        (stage,) = traced.pipeline.stages
        specs = stage.variables
        variables = dict(zip(stage.flat.inputs, specs, strict=False))
        scan_candidates = [var for var, spec in variables.items() if spec not in stage.assigned]
        unrolled = jaxprs.unroll_layers(stage.flat, scan_candidates if cut_scans else [])
        self.flat = unrolled.flat
        self.specs: dict[Any, VariableSpec] = {}
        self.slices: dict[str, Slice] = {}
        self.sources: dict[Any, Source] = {}
        self.captured: dict[Any, Any] = {}
        self.key: Any = None
        num_given = len(jax.tree.leaves(traced.pipeline.inputs)) - len(captured)
        sizes = [number for number, place in unrolled.origins if place is not None]
        stacked = {number: _Stacked(specs[number], sizes.count(number)) for number in set(sizes)}
        sources: list[Source | None] = [*([None] * stage.uses_key), *stage.inputs]
        for var, (number, place) in zip(self.flat.inputs, unrolled.origins, strict=True):
            if number < len(specs):
                part = Slice(specs[number].name, place)
                self.slices[part.name] = part
                self.specs[var] = specs[number] if place is None else stacked[number].spec(part.name, place)
                continue
            source = sources[number - len(specs)]
            if source is None:
                self.key = var
            elif source.kind == "input" and source.index >= num_given:
                self.captured[var] = captured[source.index - num_given]
            else:
                self.sources[var] = source
        self.num_inputs = num_given  # leaves
        self.tree = traced.pipeline.output_tree
        self._check_names()
        self._read_outputs(traced.pipeline)
        self.reads = self._read_assigned()
        self.nodes: list[int] = []
        self._bases: dict[Any, frozenset[Any]] = {}
        self._find_nodes()
        self.maker = {var: node for node in self.nodes for var in self.flat.equations[node].outvars}

    def __deepcopy__(self, memo: object) -> ModelGraph:
        """Returns the graph itself, which nothing changes."""
        return self

    def _check_names(self) -> None:
        """Raises if a layer's part of a stacked variable has the name of another variable."""
        names = [spec.name for spec in self.specs.values()]
        for name, part in self.slices.items():
            if part.number is not None and names.count(name) > 1:
                raise ValueError(
                    f"split: variable {name} has the name of a layer's part of {part.origin}, which a scan "
                    "takes apart. Rename one, or give cut_scans=False."
                )

    def _read_outputs(self, traced: TracedPipeline) -> None:
        (stage,) = traced.stages
        outputs = iter(self.flat.outputs)
        values = list(itertools.islice(outputs, len(stage.output_avals)))
        self.returned = values[: self.tree.num_leaves]
        of_name = {spec.name: spec for spec in self.specs.values()}
        self.assigned = [(of_name[spec.name], next(outputs)) for spec in stage.assigned]
        leaves = dict(zip(stage.enqueued, outputs, strict=True))
        firsts = itertools.pairwise(first_leaves(traced.enqueued))
        self.enqueued = [
            (entry, [leaves[leaf] for leaf in range(*ends)])
            for entry, ends in zip(traced.enqueued, firsts, strict=True)
        ]

    def _read_assigned(self) -> dict[VariableSpec, Any]:
        """Puts a copy in the place of each variable that is assigned, made just before it is read."""
        assigned = [spec for spec, _atom in self.assigned]
        copies: dict[Any, Any] = {}
        copy_equations: dict[Any, Any] = {}  # the copy -> its equation
        for var in [var for var, spec in self.specs.items() if spec in assigned]:
            flat = jaxprs.flatten(jax.make_jaxpr(jnp.copy)(jaxprs.aval_struct(var.aval)))
            (equation,) = flat.equations
            copies[var] = flat.outputs[0]
            copy_equations[copies[var]] = equation.replace(invars=[var])
        flat = jaxprs.substitute(self.flat, copies)
        equations: list[Any] = []
        used_copies = []
        for atoms, reader in [*((e.invars, e) for e in flat.equations), (flat.outputs, None)]:
            first = [copy_equations.pop(var) for var in jaxprs.variables_in(atoms) if var in copy_equations]
            used_copies += [equation.outvars[0] for equation in first]
            equations += [*first, *([] if reader is None else [reader])]
        self.flat = jaxprs.FlatJaxpr(self.flat.inputs, equations, flat.outputs, self.flat.constants)

        replace = functools.partial(jaxprs.replace_atoms, copies)
        self.returned = replace(self.returned)
        self.assigned = [(spec, replace([atom])[0]) for spec, atom in self.assigned]
        self.enqueued = [(entry, replace(atoms)) for entry, atoms in self.enqueued]
        return {self.specs[var]: copy for var, copy in copies.items() if copy in used_copies}

    def _find_nodes(self) -> None:
        roots = [var for var, source in self.sources.items() if source.kind != "update_count"]
        self._bases = {var: frozenset([var]) for var in roots}
        depending = jaxprs.dependents(self.flat, [*(roots or [self.key]), *self.reads.values()])
        for number, equation in enumerate(self.flat.equations):
            is_node = any(var in depending for var in equation.outvars) and not _is_cheap(equation)
            if is_node or equation.effects:
                self.nodes.append(number)
                self._bases.update((var, frozenset([var])) for var in equation.outvars)
            else:
                bases = self.bases_of(equation.invars)
                self._bases.update((var, bases) for var in equation.outvars)

    def bases_of(self, atoms: Iterable[Any]) -> frozenset[Any]:
        """The model's own inputs and results of nodes that a stage needs to compute atoms."""
        bases = (self._bases.get(var, frozenset()) for var in jaxprs.variables_in(atoms))
        return frozenset().union(*bases)

    def needs_of(self, node: int) -> frozenset[Any]:
        """The model's own inputs and results of nodes that a stage needs to compute a node."""
        return self.bases_of(self.flat.equations[node].invars)

    @property
    def parameters(self) -> ModelParameters | None:
        """Converts variables to the model's pytree of parameters and back; None if it has none."""
        parts: dict[str, list[str]] = {}
        for part in self.slices.values():
            parts.setdefault(part.origin, []).append(part.name)
        return None if self._layout is None else ModelParameters(self._layout, parts)

    def variables_of(self) -> list[frozenset[Any]]:
        """The inputs of `flat` that are variables and that each node reads."""
        reading: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in self.specs}
        node_variables = []
        nodes = set(self.nodes)
        for number, equation in enumerate(self.flat.equations):
            atoms = jaxprs.variables_in(equation.invars)
            inputs: frozenset[Any] = frozenset().union(*(reading.get(atom, frozenset()) for atom in atoms))
            if number in nodes:
                node_variables.append(inputs)
            else:
                reading.update((var, inputs) for var in equation.outvars)
        return node_variables


def _is_cheap(equation: Any) -> bool:
    """Whether a value is better computed where it is read than sent there."""
    if equation.primitive.name not in _CHEAP:
        return False
    operands = [var.aval for var in jaxprs.variables_in(equation.invars)]
    return num_bytes([var.aval for var in equation.outvars]) > num_bytes(operands)


class _Stacked:
    """Makes the initial values of the slices of a stacked variable, which it makes once for all of them."""

    def __init__(self, stacked: VariableSpec, number: int) -> None:
        self._stacked, self._number = stacked, number
        self._cached: tuple[bytes, Any] | None = None  # the key it was made from, and its value
        self._num_taken = 0

    def spec(self, name: str, place: int) -> VariableSpec:
        """The specification of a slice."""
        stacked = self._stacked

        def initialize(key: jax.Array, _shape: Any, _dtype: Any) -> Any:
            return self._make(key)[place]

        initialize.needs_key = False  # type: ignore[attr-defined]  # it is that of the whole variable
        initialize.is_of_row = True  # type: ignore[attr-defined]
        return dataclasses.replace(stacked, name=name, shape=stacked.shape[1:], initializer=initialize)

    def _make(self, key: jax.Array) -> Any:
        key_bytes = np.asarray(jax.random.key_data(key)).tobytes()
        cached = self._cached
        if cached is None or cached[0] != key_bytes:
            cached = key_bytes, initial_value(self._stacked, key)
            self._cached, self._num_taken = cached, 0
        self._num_taken += 1
        if self._num_taken == self._number:
            self._cached = None
        return cached[1]
