"""Traces an Optax transformation over all trained variables, as jaxprs whose inputs are labelled.

Traced values that the optimizer captured from around it, as `optax.sgd(learning_rate)` does, are found
among the jaxprs' constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.option_types import Reduction
from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.tracing import frames, hoisting
from ipu_pipeline.engine.tracing.side_outputs import enqueue_p
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_markers import count_aval, update_count_p
from ipu_pipeline.engine.tracing.stages import as_arguments
from ipu_pipeline.engine.updates.optimizer_wrappers import (
    LossScale,
    LossScaled,
    divide_by_weight,
    is_loss_weight,
    see_as_stacks,
    without_weights,
)
from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.errors import drop_traceback_note
from ipu_pipeline.ground.pytrees import describe_structures
from ipu_pipeline.ground.tables import shorten

OptimizerFunction: TypeAlias = "Callable[..., Any]"

_PLACE = "the weight update"  # what errors call it
_MAX_NAMES = 300  # characters, in an error


def describe_other_optimizer(value: object) -> str:
    """Names an object that is no `optax.GradientTransformation`, for errors, and how to get one."""
    name = type(value).__name__
    if not callable(getattr(value, "gradient_transformation", None)):
        return name
    return f"{name}, of which .gradient_transformation() gives one"


Optimizer: TypeAlias = "optax.GradientTransformation | OptimizerFunction"


class UpdateKind:
    """The kind of an argument or a result of an update program."""

    PARAMETER = "parameter"  # key: full name
    GRADIENT = "gradient"  # full name: the accumulator as an argument, zeros of its shape as a result
    STATE = "state"  # position among the leaves of the optimizer's state
    # position among the last stage's outputs: of the first micro-batch for `init`, of the last for `update`
    OUTPUT = "output"
    COUNT = "count"  # number of micro-batches, int32
    UPDATE_COUNT = "update_count"  # number of weight updates before, int32
    ENQUEUED = "enqueued"  # a leaf of what the update enqueues, counted
    SENT = "sent"  # a value that one update program makes for another, counted over all programs


class UpdateValue(NamedTuple):
    """An argument or a result of an update program."""

    kind: str
    key: Any = None


@dataclass(frozen=True, eq=False)
class TracedOptimizer:
    """An optimizer's `init` and `update` over all trained variables, as jaxprs."""

    init: jaxprs.FlatJaxpr  # makes the state; its outputs are the state's leaves
    update: jaxprs.FlatJaxpr  # its outputs are `results` and then the state's leaves
    labels: dict[Any, UpdateValue]  # what the inputs of `init` and `update` are
    results: tuple[UpdateValue, ...]  # the new parameters, zeroed accumulators, and what is enqueued
    trained: Mapping[str, VariableSpec]  # the variables, by full name
    state_tree: Any  # structure of the state
    state_paths: tuple[Any, ...]  # the path of each of its leaves
    state_avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes
    grows: tuple[bool, ...]  # whether their shapes depend on those of variables
    loss_scale: LossScale | None  # where the scale of the loss is; None without loss scaling
    enqueued: tuple[frames.Enqueued, ...]  # what the update enqueues


def trace_optimizer(
    optimizer: Optimizer,
    trained: Mapping[str, VariableSpec],
    output_tree: Any,
    output_avals: Sequence[jax.ShapeDtypeStruct],
    reduction: Reduction,
    accumulator_dtypes: Mapping[str, Any],
    may_enqueue: bool = False,
) -> TracedOptimizer:
    """Traces an optimizer. Does not start a JAX backend."""
    # Surroundings and arguments.
    current = frames.find_frame()
    program_names = frames.ProgramNames() if current is None else current.names
    enqueued: list[frames.Enqueued] = []

    def in_frame(enqueued: list[frames.Enqueued] | None) -> AbstractContextManager[frames.Frame]:
        place = _PLACE if may_enqueue else "the weight update of a loop"
        update_frame = frames.Frame(program_names, True, place, is_stage=False, enqueued=enqueued)
        return frames.frame(update_frame)

    parameter_avals = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in trained.items()}
    accumulator_avals = {
        name: jax.ShapeDtypeStruct(spec.shape, accumulator_dtypes[name]) for name, spec in trained.items()
    }
    output_avals = list(output_avals)

    def widen(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value.astype(jnp.promote_types(trained[name].dtype, accumulator_dtypes[name]))
            for name, value in values.items()
        }

    def transformation(outputs: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        transform: Any = optimizer
        extra: dict[str, Any] = {}
        if not isinstance(transform, optax.GradientTransformation) and callable(transform):
            args, kwargs = as_arguments(jax.tree.unflatten(output_tree, outputs))
            transform = transform(*args, **kwargs)
        if isinstance(transform, tuple) and len(transform) == 2 and not hasattr(transform, "update"):
            transform, extra = transform
        if not isinstance(transform, optax.GradientTransformation):
            raise TypeError(
                "The optimizer must be an optax.GradientTransformation; got "
                f"{describe_other_optimizer(transform)}."
            )
        rows = {name for name, spec in trained.items() if spec.is_row}
        if rows:
            transform = see_as_stacks(transform, rows)
        if any(map(is_loss_weight, trained)):
            transform = divide_by_weight(transform)
        return optax.with_extra_args_support(transform), extra

    # The first state.
    state_trees: list[Any] = []

    def init(parameters: dict[str, Any], outputs: list[Any]) -> list[Any]:
        transform = transformation(outputs)[0]
        with _noting(trained):
            state = transform.init(widen(parameters))
        paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        # The scale is the first field of `LossScaleState`.
        loss_scale = LossScale(0, transform.initial_scale) if isinstance(transform, LossScaled) else None
        state_trees[:] = [tree, [path for path, _leaf in paths_and_leaves], loss_scale]
        return [leaf for _path, leaf in paths_and_leaves]

    # Optax mixes dtypes freely (adam does), so its code is traced under JAX's own promotion.
    with jax.numpy_dtype_promotion("standard"):
        init_jaxpr = jax.make_jaxpr(init)(parameter_avals, output_avals)
    state_tree, paths, loss_scale = state_trees
    state_avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in init_jaxpr.out_avals]
    grows = [bool(aval.shape) for aval in state_avals]
    shaped_paths = itertools.compress(paths, grows)
    if any(find_variable(path, trained) is None for path in shaped_paths):
        longer = {
            name: jax.ShapeDtypeStruct(tuple(size + 1 for size in spec.shape) or (2,), spec.dtype)
            for name, spec in trained.items()
        }
        # An optimizer may refuse these shapes.
        with contextlib.suppress(Exception), jax.numpy_dtype_promotion("standard"):
            longer_avals = jax.eval_shape(init, longer, output_avals)
            shapes = dict(zip(state_trees[1], (aval.shape for aval in longer_avals), strict=True))
            grows = [shapes.get(path) != aval.shape for path, aval in zip(paths, state_avals, strict=True)]

    # The update.
    def update(
        parameters: dict[str, Any],
        accumulators: dict[str, Any],
        state_leaves: list[Any],
        outputs: list[Any],
        count: Any,
    ) -> list[Any]:
        transform, extra = transformation(outputs)
        gradients = dict(accumulators)
        if reduction is Reduction.MEAN:
            gradients = {name: _divide(acc, count) for name, acc in gradients.items()}
        parameters, gradients = widen(parameters), widen(gradients)
        state = jax.tree.unflatten(state_tree, state_leaves)
        with in_frame(enqueued if may_enqueue else None), _noting(trained):
            changes, new_state = transform.update(gradients, state, parameters, **extra)
        new_leaves, new_tree = jax.tree.flatten(new_state)
        if new_tree != state_tree:
            raise TypeError(
                "The optimizer's update returned a state of another structure than its init: "
                f"{' instead of '.join(describe_structures(new_tree, state_tree))}."
            )
        new_parameters = optax.apply_updates(parameters, changes)
        ordered = [new_parameters[name].astype(spec.dtype) for name, spec in trained.items()]
        return [*ordered, *(jnp.zeros_like(accumulators[name]) for name in trained), *new_leaves]

    count_aval = jax.ShapeDtypeStruct((), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        update_jaxpr = jax.make_jaxpr(update)(
            parameter_avals, accumulator_avals, state_avals, output_avals, count_aval
        )

    # Labels.
    sorted_names = sorted(trained)  # the order in which JAX flattens a dict
    parameters = [UpdateValue(UpdateKind.PARAMETER, name) for name in sorted_names]
    accumulators = [UpdateValue(UpdateKind.GRADIENT, name) for name in sorted_names]
    states = [UpdateValue(UpdateKind.STATE, index) for index in range(len(paths))]
    outputs = [UpdateValue(UpdateKind.OUTPUT, index) for index in range(len(output_avals))]
    results = [UpdateValue(UpdateKind.PARAMETER, name) for name in trained]
    results += [UpdateValue(UpdateKind.GRADIENT, name) for name in trained]
    flat_init, init_counts = _flatten(init_jaxpr)
    flat_update, update_counts = _flatten(update_jaxpr, len(results))
    num_leaves = sum(len(entry.avals) for entry in enqueued)
    results += [UpdateValue(UpdateKind.ENQUEUED, number) for number in range(num_leaves)]
    count_value = UpdateValue(UpdateKind.COUNT)
    update_values = [*parameters, *accumulators, *states, *outputs, count_value]
    labels = dict(zip(flat_init.inputs, [*parameters, *outputs], strict=True))
    labels.update(zip(flat_update.inputs, update_values, strict=True))
    for flat, counts in ((flat_init, init_counts), (flat_update, update_counts)):
        flat.inputs.extend(counts)
        labels.update((var, UpdateValue(UpdateKind.UPDATE_COUNT)) for var in counts)
    return TracedOptimizer(
        flat_init,
        flat_update,
        labels,
        tuple(results),
        trained,
        state_tree,
        tuple(paths),
        tuple(state_avals),
        tuple(grows),
        loss_scale,
        tuple(enqueued),
    )


@contextlib.contextmanager
def _noting(trained: Mapping[str, VariableSpec]) -> Iterator[None]:
    """Notes in an error of JAX or Optax what an optimizer gets, which masks and labels have to fit."""
    try:
        yield
    except Exception as error:
        *_outer, (frame, _line) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("jax", "optax"):
            raise
        drop_traceback_note(error)
        names = shorten(", ".join(map(repr, without_weights(trained))), _MAX_NAMES)
        error.add_note(
            "This happened in the optimizer, which gets variables and gradients as a dict from full name "
            f"to array (masks and labels of Optax have to fit it): {names}"
        )
        raise


def find_variable(path: Sequence[Any], trained: Mapping[str, VariableSpec]) -> str | None:
    """The full name of the variable that a leaf of the state belongs to; None if there is none."""
    for entry in reversed(path):
        if isinstance(entry, jax.tree_util.DictKey) and entry.key in trained:
            return str(entry.key)
    return None


def _flatten(closed_jaxpr: Any, num_results: int = 0) -> tuple[jaxprs.FlatJaxpr, list[Any]]:
    """Flattens an `init` or `update`, without markers."""
    enqueued: dict[int, list[Any]] = {}
    counts: list[Any] = []

    def rule(equation: Any, atoms: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        del inline
        if equation.primitive is enqueue_p:
            if equation.params["index"] in enqueued:
                raise ValueError(
                    f"{_PLACE}: metric or enqueue is called in a function that JAX has traced once and "
                    "used twice, as it does with jax.jit. Call it outside of that function."
                )
            enqueued[equation.params["index"]] = atoms
            return list(equation.outvars)
        if equation.primitive is update_count_p:
            counts[:] = counts or [jax_core.Var(count_aval())]
            return counts
        if hoisting.contains(equation, (enqueue_p, update_count_p)):
            raise ValueError(
                f"{_PLACE}: metric, enqueue or update_count is called inside the body of "
                f"{equation.primitive.name}, where it cannot be reached. Call it outside: with_metrics "
                "goes around transformations that update now and then."
            )
        return None

    flat = jaxprs.flatten(closed_jaxpr, rule)
    leaves = [atom for _number, atoms in sorted(enqueued.items()) for atom in atoms]
    outputs = [*flat.outputs[:num_results], *leaves, *flat.outputs[num_results:]]
    equations, inputs = _drop_repeated(flat.equations, outputs), list(flat.inputs)
    return dataclasses.replace(flat, inputs=inputs, equations=equations, outputs=outputs), counts


def _drop_repeated(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Drops equations that no output needs; of those with effects, only the ones traced again."""

    def variables(atoms: Sequence[Any]) -> list[Any]:
        return [atom for atom in atoms if not isinstance(atom, jax_core.Literal)]

    live, kept_equations = {*variables(outputs)}, []
    for equation in reversed(equations):
        has_effects = equation.effects and not frames.is_repeated(equation)
        if has_effects or any(var in live for var in equation.outvars):
            kept_equations.append(equation)
            live.update(variables(equation.invars))
    return kept_equations[::-1]


def _divide(accumulator: jax.Array, count: jax.Array) -> jax.Array:
    wide = count_dtype(accumulator.dtype)
    return accumulator.astype(wide) / count.astype(wide)


def lift_captures(traced: TracedOptimizer, find_number: Callable[[Any], int | None]) -> TracedOptimizer:
    """Makes the traced values that an optimizer captured outputs of the last stage."""
    labels = dict(traced.labels)

    def lift(flat: jaxprs.FlatJaxpr) -> jaxprs.FlatJaxpr:
        lifted, numbers = jaxprs.take_out_constants(flat, find_number)
        labels.update((var, UpdateValue(UpdateKind.OUTPUT, number)) for var, number in numbers.items())
        return lifted

    return dataclasses.replace(traced, init=lift(traced.init), update=lift(traced.update), labels=labels)
