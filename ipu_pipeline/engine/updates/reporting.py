"""An optimizer that reports metrics of its weight updates: norms, and the learning rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine.tracing.counting import update_count
from ipu_pipeline.engine.tracing.metrics import metric
from ipu_pipeline.engine.updates.loss_scaling import LossScaled

__all__ = ["with_metrics"]


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
        metric("gradient_norm", _norm(gradients))
        changes, after = wrapped.update(gradients, state, params, **extra)
        metric("update_norm", _norm(changes))
        rate = _find_learning_rate(after) if learning_rate is None else learning_rate
        if callable(rate):
            counts = [part.count for part in _find(state, optax.ScaleByScheduleState)]
            rate = rate(counts[0] if len(counts) == 1 else update_count())
        if rate is not None:
            metric("learning_rate", rate)
        return changes, after

    return optax.GradientTransformationExtraArgs(wrapped.init, update)


def _norm(tree: Any) -> jax.Array:
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
    # XLA's CPU code adds the terms of a dot product side by side, and those of a sum one after another.
    squares = [jnp.real(jnp.vdot(leaf, leaf, precision="highest")) for leaf in wide]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _find_learning_rate(state: Any) -> Any:
    """The learning rate in the state of `optax.inject_hyperparams`; None if there is none, or several."""
    injected = [part.hyperparams for part in _find(state, optax.InjectHyperparamsState)]
    injected += [part.hyperparams for part in _find(state, optax.InjectStatefulHyperparamsState)]
    found = [known["learning_rate"] for known in injected if "learning_rate" in known]
    return found[0] if len(found) == 1 else None


def _find(state: Any, kind: Any) -> list[Any]:
    """The parts of a state that are of a class, without parts inside of these."""

    def is_wanted(part: Any) -> bool:
        return isinstance(part, kind)

    return [part for part in jax.tree.leaves(state, is_leaf=is_wanted) if is_wanted(part)]
