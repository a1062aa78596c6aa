"""Optimizers around optimizers: a scaled loss, a weighted loss, rows of stacked layers, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.tracing.scopes import Scope, opened
from ipu_pipeline.engine.tracing.side_outputs import metric
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_markers import update_count
from ipu_pipeline.engine.tracing.stages import check_signature
from ipu_pipeline.engine.tracing.variables import get_variable
from ipu_pipeline.ground.pytrees import as_loss

# Loss scaling: the backward starts from a scale in place of 1, so that small float16 gradients are kept.
# The update divides the gradients by it, and leaves everything as it was if one of them is not finite.
# Source: Micikevicius et al., Mixed Precision Training, section 3.2 (arXiv:1710.03740).


class LossScale(NamedTuple):
    """The position of the scale among the leaves of the optimizer's state, and the first scale."""

    leaf: int
    initial: float


class LossScaleState(NamedTuple):
    """The state of an optimizer with loss scaling.

    Attributes:
      scale: float32 scalar.
      num_good: int32 scalar, updates with finite gradients since the scale was last changed.
      inner: the state of the optimizer within.
    """

    scale: Any
    num_good: Any
    inner: Any


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # Optax has no annotations
    """An optimizer whose gradients are `LossScaleState.scale` times too large.

    Attributes:
      initial_scale: the first scale.
    """

    initial_scale: float


def scale_loss(
    transformation: optax.GradientTransformation,
    initial_scale: float,
    dynamic: bool,
    growth_interval: int,
    factor: float,
) -> LossScaled:
    """Makes a transformation for gradients of a scaled loss. It runs in at least 32 bits."""
    inner = optax.with_extra_args_support(transformation)

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(count_dtype(leaf.dtype)), tree)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(jnp.float32(initial_scale), jnp.int32(0), inner.init(widen(params)))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        scale, num_good, before = state
        gradients = jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), widen(gradients))
        finite = jnp.bool_(True)
        for leaf in jax.tree.leaves(gradients):
            finite &= jnp.all(jnp.isfinite(leaf))
        params = None if params is None else widen(params)
        changes, after = inner.update(gradients, before, params, **extra)
        changes = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.zeros_like(leaf)), changes)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        if dynamic:
            num_good = num_good + 1
            grown = scale * jnp.float32(factor)
            grows = (num_good >= growth_interval) & jnp.isfinite(grown)
            shrunk = jnp.maximum(scale / jnp.float32(factor), jnp.minimum(scale, jnp.float32(1)))
            scale = jnp.where(finite, jnp.where(grows, grown, scale), shrunk)
            num_good = jnp.where(finite & ~grows, num_good, 0)
        return changes, LossScaleState(scale, num_good, after)

    scaled = LossScaled(init, update)
    scaled.initial_scale = initial_scale
    return scaled


def wrap_optimizer(inner: optax.GradientTransformation, init: Any, update: Any) -> Any:
    """Makes a transformation of these functions; it is loss scaled if `inner` is."""
    if not isinstance(inner, LossScaled):
        return optax.GradientTransformationExtraArgs(init, update)
    transformation = LossScaled(init, update)
    transformation.initial_scale = inner.initial_scale
    return transformation


# Weighted losses: gradients are divided by the weights of all micro-batches. A variable that is always 0,
# times the weight, is added to the loss. So the variable's gradient is the weight, and it is accumulated
# wherever gradients are, under every schedule and reduction.

_SCOPE = "_loss_weight"  # of the variables whose gradients are the weights


def is_loss_weight(name: str) -> bool:
    """Whether a full name is that of a variable whose gradient is the weight of a loss."""
    return name.startswith(f"{_SCOPE}/")


def without_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by full name, without those of variables for loss weights."""
    return {name: value for name, value in values.items() if not is_loss_weight(name)}


def with_weight(loss: Callable[..., Any], loss_weight: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a loss whose weight another function of the same arguments returns."""

    def weighted(*args: Any, **kwargs: Any) -> Any:
        check_signature(loss_weight, (args, kwargs), "what the last stage returns", "loss_weight")
        return weigh(loss(*args, **kwargs), loss_weight(*args, **kwargs), "loss_weight")

    return weighted


def weigh(loss: Any, weight: Any, argument: str) -> jax.Array:
    """Adds to the loss a term whose gradient is the loss's weight."""
    loss, weight = as_loss(loss, "The loss"), jnp.asarray(weight)
    if weight.shape != () or not (
        jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer)
    ):
        raise ValueError(
            f"{argument} must be a scalar, an integer or floating-point number, for example the number of "
            f"tokens; it is {weight.dtype.name}{list(weight.shape)}."
        )
    dtype = np.dtype(np.float64 if loss.dtype == np.float64 else np.float32)
    with opened(Scope(reuse=True)):
        nothing = get_variable(f"{_SCOPE}/{dtype.name}", (), dtype, 0.0)
    counted = nothing * jax.lax.stop_gradient(weight.astype(dtype))
    weighed: jax.Array = loss + counted.astype(loss.dtype)
    return weighed


def divide_by_weight(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation divide accumulated gradients by the accumulated weight first."""
    wrapped = optax.with_extra_args_support(inner)
    is_scaled = isinstance(inner, LossScaled)  # then all gradients are scaled, the weight's too

    def init(parameters: Any) -> Any:
        return wrapped.init(without_weights(parameters))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        (counter,) = filter(is_loss_weight, gradients)
        total = gradients[counter] / state.scale if is_scaled else gradients[counter]
        factor = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        means = {
            name: (value * factor.astype(jnp.promote_types(value.dtype, factor.dtype))).astype(value.dtype)
            for name, value in without_weights(gradients).items()
        }
        params = None if params is None else without_weights(params)
        changes, state = wrapped.update(means, state, params, **extra)
        return {**changes, counter: jnp.zeros_like(total)}, state

    return wrap_optimizer(inner, init, update)


def check_not_mapped(trained: Collection[VariableSpec]) -> None:
    """Raises a ValueError if gradients that a function maps would be divided by weights."""
    if any(is_loss_weight(spec.name) for spec in trained):
        raise ValueError(
            "loss_weight and a gradient map cannot be combined: gradients are mapped before they are "
            "accumulated, and divided by the weights afterwards."
        )


# Rows of a model's stacked layers: an optimizer sees each as a stack of one, so that masks and labels by
# rank, as `ndim > 1` for weight decay, are those of the model. Variables and state lack that axis.


def see_as_stacks(
    inner: optax.GradientTransformation, rows: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation of all variables see some of them, by full name, with a first axis of 1."""
    wrapped = optax.with_extra_args_support(inner)

    def expand(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[None] if name in rows else value for name, value in values.items()}

    def squeeze(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[0] if name in rows else value for name, value in values.items()}

    def find_axes(variables: Mapping[str, Any]) -> list[int | None]:
        """The axis of each leaf of the state that is as long as the stacks."""

        def shapes(length: int) -> list[tuple[int, ...]]:
            avals = {
                name: jax.ShapeDtypeStruct((length, *v.shape) if name in rows else v.shape, v.dtype)
                for name, v in variables.items()
            }
            return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(wrapped.init, avals))]

        axes: list[int | None] = []
        for single, double in zip(shapes(1), shapes(2), strict=True):
            pairs = enumerate(zip(single, double, strict=True))
            axes.append(next((axis for axis, sizes in pairs if sizes == (1, 2)), None))
        return axes

    def along(move: Callable[[Any, int], Any], state: Any, axes: Sequence[int | None]) -> Any:
        leaves, tree = jax.tree.flatten(state)
        pairs = zip(leaves, axes, strict=True)
        return jax.tree.unflatten(
            tree, [leaf if axis is None else move(leaf, axis) for leaf, axis in pairs]
        )

    def init(parameters: Any) -> Any:
        return along(jnp.squeeze, wrapped.init(expand(parameters)), find_axes(parameters))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        axes = find_axes(params)
        state = along(jnp.expand_dims, state, axes)
        changes, state = wrapped.update(expand(gradients), state, expand(params), **extra)
        return squeeze(changes), along(jnp.squeeze, state, axes)

    return wrap_optimizer(inner, init, update)


def with_metrics(
    inner: optax.GradientTransformation, learning_rate: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer report `gradient_norm`, `update_norm` and `learning_rate`, see `metric`.

    The norms are 2-norms over all trained variables together, in at least float32: of the gradients as the
    optimizer gets them, after accumulation, and of the change that it makes. (Where loss scaling skips an
    update, they are not finite.) Computing them reads both once more; the update itself and the optimizer's
    state do not change.

    Example:
      >>> optimizer = ipu.optimizers.with_metrics(optax.sgd(0.5), learning_rate=0.5)
      >>> pipeline = engine.Pipeline(
      ...     [lambda x: jnp.sum(ipu.get_variable("w", [2]) * x)],
      ...     num_micro_batches=1,
      ...     optimizer=optimizer,
      ... )
      >>> x = np.float32([3, 4])
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> {name: float(value) for name, value in outputs.metrics.items()}
      {'gradient_norm': 5.0, 'update_norm': 2.5, 'learning_rate': 0.5}

    Args:
      inner: the optimizer.
      learning_rate: the optimizer's learning rate: a number, a placeholder, or a schedule of Optax, which
        is called with the optimizer's own count of updates (or, if it has none or several, with the number
        of all weight updates before). None: the rate of `optax.inject_hyperparams`, where the state has
        it; otherwise no learning rate is reported.

    Returns:
      The optimizer. Outside of a pipeline its update raises RuntimeError.

    Raises:
      TypeError: `inner` is not an `optax.GradientTransformation`.
    """
    if not isinstance(inner, optax.GradientTransformation) or isinstance(inner, LossScaled):
        raise TypeError(
            "with_metrics: the optimizer must be an optax.GradientTransformation, for example "
            f"optax.sgd(0.01); got {type(inner).__name__}. It goes inside of ipu.optimizers."
        )
    wrapped = optax.with_extra_args_support(inner)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        metric("gradient_norm", _global_norm(gradients))
        changes, after = wrapped.update(gradients, state, params, **extra)
        metric("update_norm", _global_norm(changes))
        rate = _find_learning_rate(after) if learning_rate is None else learning_rate
        if callable(rate):
            counts = [part.count for part in _find_in_state(state, optax.ScaleByScheduleState)]
            rate = rate(counts[0] if len(counts) == 1 else update_count())
        if rate is not None:
            metric("learning_rate", rate)
        return changes, after

    return optax.GradientTransformationExtraArgs(wrapped.init, update)


def _global_norm(tree: Any) -> jax.Array:
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
    # XLA's CPU code adds the terms of a dot product side by side, and those of a sum one after another.
    squares = [jnp.real(jnp.vdot(leaf, leaf, precision="highest")) for leaf in wide]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _find_learning_rate(state: Any) -> Any:
    """The learning rate in the state of `optax.inject_hyperparams`; None if there is none, or several."""
    injected = [part.hyperparams for part in _find_in_state(state, optax.InjectHyperparamsState)]
    injected += [part.hyperparams for part in _find_in_state(state, optax.InjectStatefulHyperparamsState)]
    rates = [parameters["learning_rate"] for parameters in injected if "learning_rate" in parameters]
    return rates[0] if len(rates) == 1 else None


def _find_in_state(state: Any, kind: Any) -> list[Any]:
    """The parts of a state that are of a class, without parts inside of these."""

    def is_wanted(part: Any) -> bool:
        return isinstance(part, kind)

    return [part for part in jax.tree.leaves(state, is_leaf=is_wanted) if is_wanted(part)]
