"""Stage functions traced, one after another, and the routes of the values between them.

Every function is traced once, to a jaxpr, on the shapes of what the one before returns. Values that a
stage only passes on are not part of its program: each value is known by its `Source`, the place where
it is made, and goes from there straight to where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from ipu_pipeline.engine import hoisting, jaxprs, names
from ipu_pipeline.engine.variables import VariableSpec, fresh_trace

__all__ = [
    "Source",
    "StageFunction",
    "TracedPipeline",
    "TracedStage",
    "as_arguments",
    "check_captures",
    "check_signature",
    "trace",
]

StageFunction: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True)
class Source:
    """Where a value between stages comes from.

    `kind` is "input" (an input that is constant during a step), "element" (a leaf of the micro-batch) or
    "output" (of stage `stage`); `index` is the position among the leaves there.
    """

    kind: str
    index: int
    stage: int = -1


@dataclass(frozen=True, eq=False)
class TracedStage:
    """One stage as a jaxpr.

    Attributes:
      place: what errors call it, for example "stage 0 (encoder)".
      flat: takes `[*variables, key if uses_key, *inputs]`, returns `[*outputs, *assigned values]`.
      variables: the variables that it reads or assigns.
      assigned: those that it assigns.
      uses_key: whether it draws random keys.
      inputs: where its inputs come from, each source once.
      outputs: where its outputs come from; those of kind "output" with its own index are its own.
      output_avals: their shapes and dtypes.
    """

    place: str
    flat: jaxprs.FlatJaxpr
    variables: tuple[VariableSpec, ...]
    assigned: tuple[VariableSpec, ...]
    uses_key: bool
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def input_vars(self) -> list[Any]:
        """The jaxpr's variables of the inputs."""
        return self.flat.inputs[len(self.variables) + self.uses_key :]


@dataclass(frozen=True, eq=False)
class TracedPipeline:
    """All stages, and what surrounds them.

    Attributes:
      stages: in order.
      element: shapes and dtypes of a micro-batch, as it was given.
      inputs: shapes and dtypes of the inputs that are constant during a step.
      output_tree: the structure of what the last stage returns.
      outputs: where the leaves of that come from, the loss not among them.
      output_avals: their shapes and dtypes.
      loss: where the loss comes from; None without training.
      loss_avals: its shape and dtype; empty without training.
      owners: full name of every variable -> the stage that has it.
    """

    stages: tuple[TracedStage, ...]
    element: Any
    inputs: tuple[Any, ...]
    output_tree: Any
    outputs: tuple[Source, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]
    loss: Source | None
    loss_avals: tuple[jax.ShapeDtypeStruct, ...]
    owners: dict[str, int]

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return {spec.name: spec for stage in self.stages for spec in stage.variables}


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a stage's result, or a micro-batch, is passed to the next function.

    Args:
      value: a tuple or list becomes positional arguments, a dict keyword arguments, None no argument,
        and anything else one positional argument.

    Returns:
      The positional and the keyword arguments.
    """
    if value is None:
        return (), {}
    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}


def trace(
    functions: Sequence[StageFunction],
    element: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any] | None,
    program_names: names.ProgramNames,
    describe_capture: Callable[[Any], str | None] | None = None,
) -> TracedPipeline:
    """Traces all stages of a pipeline. It does not start a JAX backend.

    Args:
      functions: the stage functions, in order.
      element: a pytree of `ShapeDtypeStruct`s, one micro-batch; None if there is no feed.
      inputs: pytrees of `ShapeDtypeStruct`s, the first stage's first arguments.
      loss: takes what the last stage returns, returns a scalar. None: no training.
      program_names: the names of the program that the pipeline is part of.
      describe_capture: the name of a value from outside the stages, for the error about capturing it.

    Returns:
      The traced pipeline.

    Raises:
      TypeError: a stage does not take what the one before returns.
      ValueError: a stage captures a traced value, or the loss is not a floating-point scalar.
      NotImplementedError: two stages use the same variable.
    """
    element_args, element_kwargs = as_arguments(element)
    input_leaves = jax.tree.leaves(tuple(inputs))
    element_leaves = jax.tree.leaves((element_args, element_kwargs))
    avals = [*input_leaves, *element_leaves]
    sources = [Source("input", index) for index in range(len(input_leaves))]
    sources += [Source("element", index) for index in range(len(element_leaves))]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = (
        (*inputs, *element_args),
        element_kwargs,
    )
    given = "the inputs and the micro-batch"
    stages: list[TracedStage] = []
    result_tree = None
    for index, function in enumerate(functions):
        place = f"stage {index} ({getattr(function, '__name__', type(function).__name__)})"
        frame = names.Frame(program_names, loss is not None, place, is_stage=True)
        is_last = index == len(functions) - 1
        stage, result_tree = _trace_stage(
            index,
            function,
            arguments,
            given,
            sources,
            loss if is_last else None,
            frame,
            describe_capture,
        )
        stages.append(stage)
        sources, avals = list(stage.outputs), list(stage.output_avals)
        if not is_last:
            arguments = as_arguments(jax.tree.unflatten(result_tree, avals))
            given = f"what {place} returns"
    loss_source = sources.pop() if loss is not None else None
    return TracedPipeline(
        stages=tuple(stages),
        element=element,
        inputs=tuple(inputs),
        output_tree=result_tree,
        outputs=tuple(sources),
        output_avals=tuple(avals[: len(sources)]),
        loss=loss_source,
        loss_avals=tuple(avals[len(sources) :]),
        owners=_find_owners(stages),
    )


def _trace_stage(
    index: int,
    function: StageFunction,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    given: str,
    sources: Sequence[Source],
    loss: Callable[..., Any] | None,
    frame: names.Frame,
    describe_capture: Callable[[Any], str | None] | None,
) -> tuple[TracedStage, Any]:
    check_signature(function, arguments, given, frame.place)
    leaves, tree = jax.tree.flatten(arguments)
    result_trees: list[Any] = []

    def call(*values: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, values)
        with names.frame(frame):
            result = function(*args, **kwargs)
            result_leaves, result_tree = jax.tree.flatten(result)
            result_trees.append(result_tree)
            if loss is not None:
                args, kwargs = as_arguments(result)
                value = jnp.asarray(loss(*args, **kwargs))
                _check_loss(value)
                result_leaves.append(value)
            return list(result_leaves)

    try:
        with fresh_trace():
            closed_jaxpr = jax.make_jaxpr(call)(*leaves)
    except Exception as error:
        shapes = ", ".join(_describe(aval) for aval in leaves) or "no arguments"
        error.add_note(f"This happened while tracing {frame.place} on {shapes}.")
        raise
    check_captures(closed_jaxpr.consts, frame.place, describe_capture)
    hoisted = hoisting.hoist(closed_jaxpr, frame.place, frame.names)
    flat = hoisted.flat
    num_first = len(hoisted.variables) + hoisted.uses_key
    source_of = dict(zip(flat.inputs[num_first:], sources, strict=True))
    # A value that is passed twice is one input.
    first_with: dict[Source, Any] = {}
    for var, source in source_of.items():
        first_with.setdefault(source, var)
    flat = jaxprs.substitute(flat, {var: first_with[source] for var, source in source_of.items()})
    num_outputs = len(closed_jaxpr.jaxpr.outvars)
    outputs = tuple(
        Source("output", position, index)
        if isinstance(atom, jex_core.Literal)
        else source_of.get(atom, Source("output", position, index))
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
        output_avals=tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed_jaxpr.out_avals),
    )
    return stage, result_trees[0]


def check_signature(
    function: StageFunction,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    given: str,
    place: str,
) -> None:
    """Raises if a function does not take what it is given.

    Args:
      function: the function.
      arguments: positional and keyword arguments, pytrees of shapes and dtypes.
      given: what errors call where they come from.
      place: what errors call the function.

    Raises:
      TypeError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function without a Python signature: calling it will tell
        return
    args, kwargs = arguments
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        described = [_describe(arg) for arg in args]
        described += [f"{name}={_describe(arg)}" for name, arg in kwargs.items()]
        raise TypeError(
            f"{place} takes {signature}, but {given} gives it ({', '.join(described)}): {error}."
        ) from None


def _describe(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{value.dtype.name}{list(value.shape)}"
    return str(jax.tree.map(_describe, value))


def _check_loss(value: Any) -> None:
    if value.shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {tuple(value.shape)}; reduce it, for example "
            "with jnp.mean."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"The loss must be a floating-point number, but it is {value.dtype.name}.")


def check_captures(
    constants: Iterable[Any], place: str, describe_capture: Callable[[Any], str | None] | None
) -> None:
    """Raises if a traced function uses a traced value from outside.

    Args:
      constants: the constants of the function's jaxpr.
      place: what errors call it.
      describe_capture: the name of a value, or None.

    Raises:
      ValueError: it does.
    """
    captured = [value for value in constants if isinstance(value, jax.core.Tracer)]
    if captured:
        known = [describe_capture(value) if describe_capture else None for value in captured]
        described = ", ".join(
            f"{name or 'a computed value'} ({_describe(value)})"
            for name, value in zip(known, captured, strict=True)
        )
        raise ValueError(
            f"Trying to capture the tensor {described} in {place}, which may only use its arguments: "
            "pass the value through `inputs` or the infeed, and on through the stages in between."
        )


def _find_owners(stages: Sequence[TracedStage]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for spec in stage.variables:
            if spec.name in owners:
                raise NotImplementedError(
                    f"Variable {spec.name} is used by stage {owners[spec.name]} and by stage {index}. "
                    "Variables shared by stages are not supported yet."
                )
            owners[spec.name] = index
    return owners
