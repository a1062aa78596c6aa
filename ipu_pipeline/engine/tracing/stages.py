"""Stages as jaxprs, the routes of the values between them, and how stage functions are traced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames, hoisting
from ipu_pipeline.engine.tracing.captures import Captures, check_modules
from ipu_pipeline.engine.tracing.faults import Faults, describe_arguments, find_signature_fault
from ipu_pipeline.engine.tracing.frames import Enqueued
from ipu_pipeline.engine.tracing.side_outputs import first_leaves, with_checks_handed_out
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_markers import check_marks, count_aval, has_marks
from ipu_pipeline.engine.tracing.stage_meshes import check_mesh, in_mesh, mesh_of_stages, uses_replicas
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import name_of
from ipu_pipeline.ground.pytrees import as_loss, describe

# Every value is identified by its `Source`, the place where it is made, and goes straight from there to
# where it is used: a stage that passes a value on is not on its way. A variable that several stages share
# belongs to the first of them, its owner. The others get copies of it once per update, and accumulate its
# gradient themselves: to send the value and its gradient with each micro-batch would often take more, as an
# embedding table is larger than the activations.


@dataclass(frozen=True)
class Source:
    """The origin of a value between stages.

    `kind` is "input" (an input that is constant during a step), "element" (a leaf of the micro-batch),
    "output" (of stage `stage`) or "update_count"; `index` is the position among the leaves there.
    """

    kind: str
    index: int
    stage: int = -1

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether each micro-batch has its own value."""
        return self.kind in ("element", "output")


@dataclass(frozen=True, eq=False)
class TracedStage:
    """One stage as a jaxpr."""

    place: str  # what errors call it, for example "stage 0 (encoder)"
    # takes `[*variables, key if uses_key, *inputs]`, returns `[*outputs, *assigned values, *enqueued]`
    flat: jaxprs.FlatJaxpr
    variables: tuple[VariableSpec, ...]  # the variables that it reads or assigns
    assigned: tuple[VariableSpec, ...]  # the variables that it assigns
    uses_key: bool  # whether it draws random keys
    inputs: tuple[Source, ...]  # where its inputs come from, each source once
    # where its outputs come from; it makes those of kind "output" with its own index itself
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes
    enqueued: tuple[int, ...] = ()  # what it enqueues, by the number of the leaf in the pipeline

    @property
    def input_vars(self) -> list[Any]:
        """The jaxpr's variables of the inputs."""
        return self.flat.inputs[len(self.variables) + self.uses_key :]


@dataclass(frozen=True, eq=False)
class TracedPipeline:
    """A pipeline as it was traced: all stages, and what surrounds them."""

    stages: tuple[TracedStage, ...]  # in order
    element: Any  # shapes and dtypes of a micro-batch, as it was given
    # shapes and dtypes of the inputs that are constant during a step; what was captured comes last
    inputs: tuple[Any, ...]
    output_tree: Any  # the structure of what the last stage returns
    # where the leaves of that come from, without the loss; then, what only the optimizer reads
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes
    loss: Source | None  # where the loss comes from; None without training
    loss_avals: tuple[jax.ShapeDtypeStruct, ...]  # its shape and dtype; empty without training
    # full name of every variable -> its owner, the first stage that has it. All stages that share it have
    # it; only its owner assigns it.
    owners: dict[str, int]
    # the level of each stage, ascending from 0. Stages of one level are parallel: they take the same
    # values, and what they return is concatenated.
    levels: tuple[int, ...]
    num_captured: int = 0  # the number of inputs that were captured, not given
    enqueued: tuple[Enqueued, ...] = ()  # what stages enqueue, whose leaves are numbered through

    def with_captured(
        self, captured: Sequence[jax.ShapeDtypeStruct], read_numbers: Sequence[int]
    ) -> TracedPipeline:
        """Adds inputs to the pipeline, some of which are outputs, too."""
        inputs = self.given
        first = len(jax.tree.leaves(inputs))
        return dataclasses.replace(
            self,
            inputs=(*inputs, *captured),
            num_captured=len(captured),
            outputs=(*self.outputs, *(Source("input", first + number) for number in read_numbers)),
            output_avals=(*self.output_avals, *(captured[number] for number in read_numbers)),
        )

    @property
    def uses_replicas(self) -> bool:
        """Whether a stage, without its derivative, computes with other replicas, or asks which it is."""
        return any(uses_replicas(stage.flat.equations) for stage in self.stages)

    @property
    def places_with_marks(self) -> list[str]:
        """The names, in errors, of the stages that mark values to keep in recomputation."""
        return [stage.place for stage in self.stages if has_marks(stage.flat)]

    @property
    def given(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the inputs without those that were captured."""
        return self.inputs[: len(self.inputs) - self.num_captured]

    @property
    def captured(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the inputs that were captured."""
        return self.inputs[len(self.inputs) - self.num_captured :]

    @property
    def returned_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that the last stage returns."""
        return self.output_avals[: self.output_tree.num_leaves]

    @property
    def enqueued_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the leaves that are enqueued."""
        return tuple(aval for entry in self.enqueued for aval in entry.avals)

    @functools.cached_property
    def variables(self) -> dict[str, VariableSpec]:
        """The variables of all stages, by full name."""
        return {spec.name: spec for stage in self.stages for spec in stage.variables}

    def aval(self, source: Source) -> Any:
        """Shape and dtype of a value between stages."""
        if source.kind == "output":
            return self.stages[source.stage].output_avals[source.index]
        if source.kind == "update_count":
            return jaxprs.aval_struct(count_aval())
        return jax.tree.leaves(self.inputs if source.kind == "input" else self.element)[source.index]

    def shared(self) -> set[str]:
        """Full names of the variables that several stages have."""
        return {
            spec.name
            for index, stage in enumerate(self.stages)
            for spec in stage.variables
            if self.owners[spec.name] != index
        }


def share_variables(
    stages: Sequence[TracedStage], levels: Sequence[int]
) -> tuple[list[TracedStage], dict[str, int]]:
    """Finds the owner of every variable.

    If the owner assigns a variable, later stages get it as a value between stages, because the owner may
    have gone on to other micro-batches by then. They no longer have that variable.
    """
    owners: dict[str, int] = {}
    sent: set[str] = set()
    for index, stage in enumerate(stages):
        for spec in stage.variables:
            home = owners.setdefault(spec.name, index)
            if home == index:
                continue
            assigning = [writer for writer in stages if spec in writer.assigned]
            if assigning and (assigning != [stages[home]] or levels[home] == levels[index]):
                raise ValueError(
                    f"Variable {spec.name} is used by {stages[home].place} and by {stage.place}, and "
                    f"assigned by {' and by '.join(writer.place for writer in assigning)}. Stages are at "
                    "different micro-batches at the same time, so only the first stage that uses a "
                    "variable may assign it, and only later stages may read it too. Give each stage a "
                    "variable of its own, or return the value from the stage and pass it on."
                )
            if assigning:
                sent.add(spec.name)
    return send_variables(stages, owners, sent), owners


def send_variables(
    stages: Sequence[TracedStage], owners: Mapping[str, int], sent: Collection[str]
) -> list[TracedStage]:
    """Makes shared variables values between stages, instead of a variable in each of them.

    Gradient maps need this: their owner then gets the whole gradient of each micro-batch.
    """
    changed = list(stages)
    for name in sorted(sent):
        home = owners[name]
        stage = changed[home]
        (position,) = (p for p, spec in enumerate(stage.variables) if spec.name == name)
        spec, number = stage.variables[position], len(stage.outputs)
        value = stage.flat.inputs[position]
        if spec in stage.assigned:
            value = stage.flat.outputs[number + stage.assigned.index(spec)]
        source = Source("output", number, home)
        aval = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        outputs = [*stage.flat.outputs[:number], value, *stage.flat.outputs[number:]]
        changed[home] = dataclasses.replace(
            stage,
            flat=dataclasses.replace(stage.flat, outputs=outputs),
            outputs=(*stage.outputs, source),
            output_avals=(*stage.output_avals, aval),
        )
        for index, stage in enumerate(changed):
            if index == home or spec not in stage.variables:
                continue
            position = stage.variables.index(spec)
            inputs = list(stage.flat.inputs)
            inputs.append(inputs.pop(position))
            changed[index] = dataclasses.replace(
                stage,
                flat=dataclasses.replace(stage.flat, inputs=inputs),
                variables=(*stage.variables[:position], *stage.variables[position + 1 :]),
                inputs=(*stage.inputs, source),
            )
    return changed


# Tracing: every function is traced once, to a jaxpr, on the shapes of what the previous one returns.

StageFunction: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(value: Any) -> Arguments:
    """Makes arguments for the next function from a stage's result or a micro-batch."""
    if value is None:
        return (), {}
    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}


def trace(
    functions: Sequence[Sequence[StageFunction]],
    element: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any] | None,
    program_names: frames.ProgramNames,
    faults: Faults,
    captures: Captures,
) -> TracedPipeline:
    """Traces all stages of a pipeline. Does not start a JAX backend."""
    assert len(functions[-1]) == 1
    # The arguments of the first level, and the source of each leaf.
    element_args, element_kwargs = as_arguments(element)
    arguments: Arguments = ((*inputs, *element_args), element_kwargs)
    num_inputs = len(jax.tree.leaves(tuple(inputs)))
    avals: dict[Source, jax.ShapeDtypeStruct] = {}
    for number, aval in enumerate(jax.tree.leaves(arguments)):
        is_input = number < num_inputs
        source = Source("input", number) if is_input else Source("element", number - num_inputs)
        avals[source] = aval
    sources: Arguments = jax.tree.unflatten(jax.tree.structure(arguments), list(avals))
    giver = "the inputs and the micro-batch"
    stages: list[TracedStage] = []
    levels: list[int] = []
    results: list[Any] = []
    enqueued: list[frames.Enqueued] = []
    all_places = name_places(functions)
    # Level by level: each stage takes what the level before it returned.
    for level, (parallel, places) in enumerate(zip(functions, all_places, strict=True)):
        results = []  # per stage of the level, its results, with the sources as leaves
        arguments = jax.tree.map(avals.__getitem__, sources)
        is_last = level == len(functions) - 1
        for function, place in zip(parallel, places, strict=True):
            described = describe_arguments(function, *arguments)
            frame = frames.Frame(
                program_names,
                loss is not None,
                place,
                is_stage=True,
                given=described,
                faults=faults,
                enqueued=enqueued,
            )
            traced = _trace_stage(
                len(stages),
                function,
                arguments,
                giver,
                jax.tree.leaves(sources),
                loss if is_last else None,
                frame,
                faults,
                captures,
                num_inputs,
            )
            if traced is None:
                continue
            stage, tree = traced
            stages.append(stage)
            levels.append(level)
            avals.update(zip(stage.outputs, stage.output_avals, strict=True))
            results.append(jax.tree.unflatten(tree, stage.outputs[: tree.num_leaves]))
        # The inputs of later stages are not known: only signatures that nothing would fit are surely wrong.
        if len(results) < len(parallel):
            for later, other_places in zip(functions[level + 1 :], all_places[level + 1 :], strict=True):
                for function, place in zip(later, other_places, strict=True):
                    faults.add_known(place, find_signature_fault(function, place))
            raise faults.as_error()
        try:
            sources = concatenate([as_arguments(result) for result in results], places)
        except TypeError as error:
            faults.add(places[0], error)
            raise faults.as_error() from None
        giver = f"what {' and '.join(places)} return{'s' if len(places) == 1 else ''}"
    # What the last stage returns, and the owners of variables.
    output_leaves, output_tree = jax.tree.flatten(results[0])
    loss_source = None if loss is None else stages[-1].outputs[-1]
    owners: dict[str, int] = {}
    if not faults:
        stages, owners = share_variables(stages, levels)
    return TracedPipeline(
        stages=tuple(stages),
        element=element,
        inputs=(*inputs, *map(jaxprs.aval_struct, captures.values)),
        output_tree=output_tree,
        outputs=tuple(output_leaves),
        output_avals=tuple(avals[source] for source in output_leaves),
        loss=loss_source,
        loss_avals=() if loss_source is None else (avals[loss_source],),
        owners=owners,
        levels=tuple(levels),
        num_captured=len(captures.values),
        enqueued=tuple(enqueued),
    )


def name_places(functions: Sequence[Sequence[StageFunction]]) -> list[list[str]]:
    """The names of the stages in errors, level by level."""
    numbers = itertools.count()
    return [[f"stage {next(numbers)} ({name_of(f)})" for f in parallel] for parallel in functions]


def concatenate(results: Sequence[Arguments], places: Sequence[str]) -> Arguments:
    """Makes the arguments of the next level from what parallel stages return."""
    if len(results) == 1:
        return results[0]
    args = tuple(value for positional, _keywords in results for value in positional)
    kwargs: dict[str, Any] = {}
    for (_positional, keywords), place in zip(results, places, strict=True):
        for name, value in keywords.items():
            if name in kwargs:
                raise TypeError(
                    f"{place}: what parallel stages return is concatenated, and two of them return a value "
                    f"named {name!r}. Give one of them another name."
                )
            kwargs[name] = value
    if args and kwargs:
        raise TypeError(
            f"{' and '.join(places)} are parallel: what they return is concatenated, and some return a "
            "dict and others do not. Return dicts from all of them, or from none."
        )
    return args, kwargs


def _trace_stage(
    index: int,
    function: StageFunction,
    arguments: Arguments,
    giver: str,
    sources: Sequence[Source],
    loss: Callable[..., Any] | None,
    frame: frames.Frame,
    faults: Faults,
    captures: Captures,
    num_inputs: int,
) -> tuple[TracedStage, Any] | None:
    """Traces a stage. Returns it and the structure of its results; None if a fault leaves that unknown."""
    try:
        check_signature(function, arguments, giver, frame.place)
    except TypeError as error:
        faults.add(frame.place, error)
        return None
    num_variables_before = len(frame.names.variables)
    leaves, tree = jax.tree.flatten(arguments)
    result_trees: list[Any] = []

    def call(*values: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, values)
        with frames.frame(frame):
            result = function(*args, **kwargs)
            result_leaves, result_tree = jax.tree.flatten(result)
            result_trees.append(result_tree)
            if loss is not None:
                args, kwargs = as_arguments(result)
                check_signature(loss, (args, kwargs), "what the last stage returns", "loss")
                value = as_loss(loss(*args, **kwargs), "The loss")
                with faults.collecting(frame.place):
                    _check_loss(value)
                result_leaves.append(value)
            return list(result_leaves)

    # The stage as a jaxpr, whose types have no mesh, and whose checks are outputs.
    try:
        with jax_compat.fresh_trace():
            mesh = mesh_of_stages()
            with in_mesh(mesh):
                closed_jaxpr = jax.make_jaxpr(call)(*_on_mesh(leaves, mesh))
            check_mesh(closed_jaxpr, frame.place)
            closed_jaxpr = jaxprs.without_mesh(closed_jaxpr, is_differentiated=False)
            if jax_compat.has_checks(closed_jaxpr) and frame.enqueued is not None:
                closed_jaxpr = with_checks_handed_out(closed_jaxpr, frame)
    except Exception as error:
        faults.add(frame.place, error, frame.given)
        return None
    with faults.collecting(frame.place):
        captures.check(closed_jaxpr.consts, frame.place, frame.names.reads)
    output_avals = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed_jaxpr.out_avals)
    # Markers become inputs and outputs. If one cannot be reached, a stage without equations stands in.
    try:
        hoisted = hoisting.hoist(closed_jaxpr, frame.place, frame.names)
        check_marks(hoisted.flat, frame.place)
    except ValueError as error:
        faults.add(frame.place, error)
        variables = tuple(frame.names.variables.values())[num_variables_before:]
        stage_outputs = tuple(Source("output", position, index) for position in range(len(output_avals)))
        nothing = jaxprs.FlatJaxpr([], [], [], {})
        return TracedStage(
            frame.place, nothing, variables, (), False, (), stage_outputs, output_avals
        ), result_trees[0]
    if frame.training:
        try:
            check_modules(function, hoisted.flat.constants.values(), frame.place)
        except ValueError as error:
            faults.add(frame.place, error)
            faults.has_constant_modules = True
    # The source of each input; captured values become inputs, too.
    num_first = len(hoisted.variables) + hoisted.uses_key
    count = [Source("update_count", 0)] * hoisted.uses_count
    source_of = dict(zip(hoisted.flat.inputs[num_first:], [*sources, *count], strict=True))
    flat, numbers = jaxprs.take_out_constants(hoisted.flat, captures.find_number)
    source_of |= {var: Source("input", num_inputs + number) for var, number in numbers.items()}
    # A value that is passed twice is one input.
    first_with: dict[Source, Any] = {}
    for var, source in source_of.items():
        first_with.setdefault(source, var)
    flat = jaxprs.substitute(flat, {var: first_with[source] for var, source in source_of.items()})
    # The source of each output: that of an input if the stage only passes it on.
    num_outputs = len(closed_jaxpr.jaxpr.outvars)
    passed_on = {var: source for var, source in source_of.items() if source.kind != "update_count"}
    outputs = tuple(
        passed_on.get(atom, Source("output", position, index))
        if jaxprs.is_var(atom)
        else Source("output", position, index)
        for position, atom in enumerate(flat.outputs[:num_outputs])
    )
    stage = TracedStage(
        place=frame.place,
        flat=flat,
        variables=hoisted.variables,
        assigned=hoisted.assigned,
        uses_key=hoisted.uses_key,
        inputs=tuple(first_with),
        outputs=outputs,
        output_avals=output_avals,
        enqueued=tuple(
            first + leaf
            for number, size in hoisted.enqueued.items()
            for first in [first_leaves(frame.enqueued or [])[number]]
            for leaf in range(size)
        ),
    )
    return stage, result_trees[0]


def _on_mesh(avals: Sequence[jax.ShapeDtypeStruct], mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """Gives shapes and dtypes the type of values that are made in a mesh."""
    # Otherwise JAX would trace functions that it caches for both types.
    replicated = NamedSharding(mesh, PartitionSpec())
    return [aval.update(sharding=replicated) for aval in avals]


def check_signature(
    function: StageFunction,
    arguments: Arguments,
    giver: str,
    place: str,
) -> None:
    """Raises if a function does not take what it is given."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function without a Python signature: calling it will show
        return
    args, kwargs = arguments
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        described = [describe(arg) for arg in args]
        described += [f"{name}={describe(arg)}" for name, arg in kwargs.items()]
        after = " after its parameters" if getattr(function, "takes_parameters", False) else ""
        raise TypeError(
            f"{place} takes {signature}{after}, but {giver} gives it ({', '.join(described)}): {error}."
        ) from None


def _check_loss(value: Any) -> None:
    if value.shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {tuple(value.shape)}; reduce it, for example "
            "with jnp.mean."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"The loss must be a floating-point number, but it is {value.dtype.name}.")
