"""TensorFlow 1's optimizers and decays of learning rates, by their names, defaults and formulas.

They use Optax's transformations if these compute the same. Optax has other defaults, another epsilon in
Adam, another weight decay in AdamW, and a bias correction in LAMB. The formulas are from the documentation
of `tf.train` and `tf.contrib.opt` in TensorFlow 1.15. Two are from programs for BERT, without bias
correction: AdamWeightDecay (https://arxiv.org/abs/1810.04805) and LAMB (https://arxiv.org/abs/1904.00962).
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.tf1.graph import waits_for_step
from ipu_pipeline.tf1.optimizers.wrappers import Optimizer, OptimizerEffect

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "AdamWeightDecayOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "LAMBOptimizer",
    "MomentumOptimizer",
    "RMSPropOptimizer",
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "natural_exp_decay",
    "piecewise_constant",
    "polynomial_decay",
]


# Decays of learning rates. Each takes a step: a number, a traced scalar, or `get_global_step()`. If the
# global step has no value yet, as in a `model_fn`, the result is computed where it is used. As an Optax
# schedule, write `lambda step: exponential_decay(0.1, step, 1000, 0.96)`.


@waits_for_step
def exponential_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate * decay_rate**(global_step / decay_steps)`.

    Example:
      >>> ipu.optimizers.tf1.exponential_decay(0.1, 2000, decay_steps=1000, decay_rate=0.5)
      Array(0.025, dtype=float32)

    Args:
      learning_rate: the rate at the first step.
      global_step: the number of steps so far.
      decay_steps: the number of steps in which the rate is multiplied by `decay_rate` once.
      decay_rate: the factor.
      staircase: whether the quotient is rounded down.
      name: has no effect.

    Returns:
      A floating-point scalar.
    """
    del name
    return learning_rate * jnp.power(decay_rate, _quotient(global_step, decay_steps, staircase))


@waits_for_step
def natural_exp_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate * exp(-decay_rate * global_step / decay_steps)`.

    The arguments are those of `exponential_decay`.

    Example:
      >>> ipu.optimizers.tf1.natural_exp_decay(0.1, 1000, decay_steps=1000, decay_rate=1.0)
      Array(0.03678795, dtype=float32)
    """
    del name
    return learning_rate * jnp.exp(-decay_rate * _quotient(global_step, decay_steps, staircase))


@waits_for_step
def inverse_time_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns `learning_rate / (1 + decay_rate * global_step / decay_steps)`.

    The arguments are those of `exponential_decay`.

    Example:
      >>> ipu.optimizers.tf1.inverse_time_decay(0.1, 1000, decay_steps=1000, decay_rate=1.0)
      Array(0.05, dtype=float32)
    """
    del name
    return learning_rate / (1 + decay_rate * _quotient(global_step, decay_steps, staircase))


@waits_for_step
def polynomial_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    end_learning_rate: Any = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Decays `learning_rate` to `end_learning_rate` in `decay_steps`, along `(1 - share)**power`.

    Example:
      >>> ipu.optimizers.tf1.polynomial_decay(0.1, 500, decay_steps=1000, end_learning_rate=0.0)
      Array(0.05, dtype=float32)

    Args:
      learning_rate: the rate at the first step.
      global_step: the number of steps so far.
      decay_steps: the number of steps of the decay.
      end_learning_rate: the rate after the decay.
      power: the exponent; 1 is a straight line.
      cycle: whether `decay_steps` is stretched to the next multiple instead of ending the decay.
      name: has no effect.

    Returns:
      A floating-point scalar.
    """
    del name
    step, steps = jnp.asarray(global_step, float), jnp.asarray(decay_steps, float)
    if cycle:
        steps = steps * jnp.maximum(1.0, jnp.ceil(step / steps))
    share = jnp.minimum(step, steps) / steps
    return (learning_rate - end_learning_rate) * (1 - share) ** power + end_learning_rate


@waits_for_step
def cosine_decay(
    learning_rate: Any, global_step: Any, decay_steps: Any, alpha: float = 0.0, name: str | None = None
) -> jax.Array:
    """Decays `learning_rate` to `alpha * learning_rate` in `decay_steps`, along half a cosine.

    Example:
      >>> ipu.optimizers.tf1.cosine_decay(0.1, 500, decay_steps=1000)
      Array(0.05, dtype=float32)
    """
    del name
    share = jnp.minimum(jnp.asarray(global_step, float), decay_steps) / decay_steps
    return learning_rate * ((1 - alpha) * 0.5 * (1 + jnp.cos(math.pi * share)) + alpha)


@waits_for_step
def piecewise_constant(
    x: Any, boundaries: Sequence[Any], values: Sequence[Any], name: str | None = None
) -> jax.Array:
    """Returns `values[0]` up to and including `boundaries[0]`, then `values[1]`, and so on.

    Example:
      >>> ipu.optimizers.tf1.piecewise_constant(150, boundaries=[100, 200], values=[0.1, 0.01, 0.001])
      Array(0.01, dtype=float32)

    Args:
      x: the number of steps so far.
      boundaries: steps in increasing order.
      values: the values, one more than boundaries.
      name: has no effect.

    Raises:
      ValueError: the number of values is wrong.
    """
    del name
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant: values must be one more than boundaries; got {len(values)} and "
            f"{len(boundaries)}."
        )
    number = sum((jnp.asarray(x > boundary, jnp.int32) for boundary in boundaries), jnp.int32(0))
    return jnp.asarray(values)[number]


def _quotient(step: Any, steps: Any, staircase: bool) -> jax.Array:
    quotient = jnp.asarray(step, float) / steps
    return jnp.floor(quotient) if staircase else quotient


# Optimizers.

Rate = Any  # a number, a value traced in the optimizer function, or a schedule of Optax
Tree = Any


class _Plain(Optimizer, optax.GradientTransformationExtraArgs):
    """An optimizer around a transformation that it does not change, so it is a transformation, too."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Makes the tuple of two functions that a transformation is; they use what `__init__` is given."""
        if any(isinstance(value, optax.GradientTransformation) for value in (*args, *options.values())):
            raise TypeError(
                f"{cls.__name__}: it does not wrap another optimizer. optax.chain(other, "
                f"{cls.__name__}(...)) applies one after the other."
            )

        def init(params: Tree) -> Any:
            return created.wrapped.init(params)

        def update(gradients: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
            transformation = optax.with_extra_args_support(created.wrapped)
            return transformation.update(gradients, state, params, **extra)

        created: Any = super().__new__(cls, init, update)
        return created

    def __init__(self, transformation: optax.GradientTransformation, use_locking: bool, name: str) -> None:
        if use_locking:
            warnings.warn(
                "use_locking has no effect: nothing else writes variables while they are updated.",
                stacklevel=3,
            )
        super().__init__(transformation, name)

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Returns the transformation as it is."""
        return inner


class GradientDescentOptimizer(_Plain):
    """`w -= rate * g`.

    Example:
      >>> def optimizer_function(loss):
      ...     optimizer = ipu.optimizers.tf1.GradientDescentOptimizer(learning_rate=0.01)
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)
    """

    def __init__(
        self, learning_rate: Rate, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        """Takes the formula's parameters.

        Args:
          learning_rate: a number, a traced scalar, or a function of the number of weight updates.
          use_locking: has no effect.
          name: the name of the optimizer's state.
        """
        super().__init__(optax.sgd(learning_rate), use_locking, name)


class MomentumOptimizer(_Plain):
    """`a = momentum * a + g; w -= rate * a`; with Nesterov `w -= rate * (g + momentum * a)`.

    Example:
      >>> optimizer = ipu.optimizers.tf1.MomentumOptimizer(0.01, momentum=0.9, use_nesterov=True)
    """

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`."""
        super().__init__(optax.sgd(learning_rate, momentum, use_nesterov), use_locking, name)


class AdamOptimizer(_Plain):
    """Adam, whose epsilon is added before the second moment's bias is corrected.

    `m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g**2;
    w -= rate * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)`

    Example:
      >>> optimizer = ipu.optimizers.tf1.AdamOptimizer(1e-3)
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`."""
        scaled = _scale_by_adam(beta1, beta2, epsilon, corrects_bias=True)
        super().__init__(
            optax.chain(scaled, optax.scale_by_learning_rate(learning_rate)), use_locking, name
        )


class AdamWOptimizer(_Plain):
    """`AdamOptimizer` with `w -= weight_decay * w`, whatever the learning rate, as in `tf.contrib.opt`.

    Example:
      >>> optimizer = ipu.optimizers.tf1.AdamWOptimizer(weight_decay=1e-4, learning_rate=1e-3)
    """

    def __init__(
        self,
        weight_decay: Any,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`."""
        scaled = _scale_by_adam(beta1, beta2, epsilon, corrects_bias=True)
        decay = optax.chain(optax.scale_by_learning_rate(learning_rate), _subtract_weights(weight_decay))
        super().__init__(optax.chain(scaled, decay), use_locking, name)


class AdamWeightDecayOptimizer(_Plain):
    """`w -= rate * (m / (sqrt(v) + epsilon) + weight_decay_rate * w)`, as in programs for BERT.

    m and v are Adam's moments, without bias correction.

    Example:
      >>> optimizer = ipu.optimizers.tf1.AdamWeightDecayOptimizer(
      ...     1e-4, weight_decay_rate=0.01, exclude_from_weight_decay=["gamma", "beta", "bias"]
      ... )
    """

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        name: str = "AdamWeightDecayOptimizer",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`.

        Args:
          exclude_from_weight_decay: regular expressions; variables whose full names contain a match have no
            weight decay. None: all variables have it.
        """
        transformation = optax.chain(
            _scale_by_adam(beta_1, beta_2, epsilon, corrects_bias=False),
            _excluding(exclude_from_weight_decay, optax.add_decayed_weights(weight_decay_rate)),
            optax.scale_by_learning_rate(learning_rate),
        )
        super().__init__(transformation, False, name)


class LAMBOptimizer(_Plain):
    """`u = m / (sqrt(v) + epsilon) + weight_decay_rate * w; w -= rate * |w| / |u| * u`.

    m and v are Adam's moments, without bias correction. The ratio of norms is 1 if a norm is 0.

    Example:
      >>> optimizer = ipu.optimizers.tf1.LAMBOptimizer(1e-3)
    """

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        name: str = "LAMBOptimizer",
        *,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `AdamWeightDecayOptimizer`.

        Args:
          exclude_from_layer_adaptation: regular expressions for variables without the ratio of norms; None:
            the same as `exclude_from_weight_decay`.
        """
        if exclude_from_layer_adaptation is None:
            exclude_from_layer_adaptation = exclude_from_weight_decay
        transformation = optax.chain(
            _scale_by_adam(beta_1, beta_2, epsilon, corrects_bias=False),
            _excluding(exclude_from_weight_decay, optax.add_decayed_weights(weight_decay_rate)),
            _excluding(exclude_from_layer_adaptation, optax.scale_by_trust_ratio()),
            optax.scale_by_learning_rate(learning_rate),
        )
        super().__init__(transformation, False, name)


class RMSPropOptimizer(_Plain):
    """`s = decay * s + (1 - decay) * g**2; a = momentum * a + rate * g / sqrt(s + epsilon); w -= a`.

    `s` starts at 1. Centered, the square of a mean of gradients like `s` is subtracted within the root.

    Example:
      >>> optimizer = ipu.optimizers.tf1.RMSPropOptimizer(0.01, decay=0.9, momentum=0.9)
    """

    def __init__(
        self,
        learning_rate: Rate,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`."""
        transformation = optax.rmsprop(
            learning_rate,
            decay,
            epsilon,
            initial_scale=1.0,
            eps_in_sqrt=True,
            centered=centered,
            momentum=momentum or None,
        )
        super().__init__(transformation, use_locking, name)


class AdagradOptimizer(_Plain):
    """`s += g**2; w -= rate * g / sqrt(s)`.

    Example:
      >>> optimizer = ipu.optimizers.tf1.AdagradOptimizer(0.01)
    """

    def __init__(
        self,
        learning_rate: Rate,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`.

        Raises:
          ValueError: `initial_accumulator_value` is not positive.
        """
        if initial_accumulator_value <= 0:
            raise ValueError(
                "AdagradOptimizer: initial_accumulator_value must be positive; got "
                f"{initial_accumulator_value}."
            )
        transformation = optax.adagrad(learning_rate, initial_accumulator_value, eps=0.0)
        super().__init__(transformation, use_locking, name)


class AdadeltaOptimizer(_Plain):
    """`s = rho * s + (1 - rho) * g**2; d = sqrt(u + epsilon) / sqrt(s + epsilon) * g; w -= rate * d`.

    Then `u = rho * u + (1 - rho) * d**2`.

    Example:
      >>> optimizer = ipu.optimizers.tf1.AdadeltaOptimizer(1.0, rho=0.95)
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`."""
        super().__init__(optax.adadelta(learning_rate, rho, epsilon), use_locking, name)


class FtrlOptimizer(_Plain):
    """FTRL-Proximal, whose weights are 0 where `l1_regularization_strength` outweighs the gradients.

    With `p = -learning_rate_power`: `n' = n + g**2; h = g + 2 * shrinkage * w;
    z += h - (n'**p - n**p) / rate * w; w = (clip(z, -l1, l1) - z) / (n'**p / rate + 2 * l2)`

    Example:
      >>> optimizer = ipu.optimizers.tf1.FtrlOptimizer(0.01, l1_regularization_strength=1e-3)
    """

    def __init__(
        self,
        learning_rate: Rate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: None = None,
        linear_name: None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
    ) -> None:
        """Takes the formula's parameters. Other arguments are those of `GradientDescentOptimizer`.

        Raises:
          ValueError: a strength is negative, the power positive, `initial_accumulator_value` negative; or
            `accum_name` or `linear_name` is given: the state is kept under `name`.
        """
        if accum_name is not None or linear_name is not None:
            raise ValueError("FtrlOptimizer: accum_name and linear_name must be None. Give name instead.")
        if learning_rate_power > 0:
            raise ValueError(
                f"FtrlOptimizer: learning_rate_power must be at most 0; got {learning_rate_power}."
            )
        for strength in (
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
        ):
            if strength < 0:
                raise ValueError(
                    f"FtrlOptimizer: strengths and the initial value must be from 0; got {strength}."
                )
        transformation = _ftrl(
            learning_rate,
            -learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
        )
        super().__init__(transformation, use_locking, name)


def _excluding(
    patterns: Sequence[str] | None, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Restricts a transformation to the variables whose names match none of some regular expressions."""
    if not patterns:
        return transformation
    if isinstance(patterns, str):
        raise TypeError(f"Names to exclude must be a list of regular expressions; got {patterns!r}.")
    expressions = [re.compile(pattern) for pattern in patterns]

    def is_included(path: Any, _value: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return not any(expression.search(name) for expression in expressions)

    return optax.masked(transformation, functools.partial(jax.tree_util.tree_map_with_path, is_included))


class _Moments(NamedTuple):
    count: Any
    first: Tree
    second: Tree


def _scale_by_adam(
    beta1: float, beta2: float, epsilon: float, corrects_bias: bool
) -> optax.GradientTransformation:
    def init(params: Tree) -> _Moments:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _Moments(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(gradients: Tree, state: _Moments, params: Tree = None) -> tuple[Tree, _Moments]:
        del params
        count = optax.safe_increment(state.count)
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, gradients)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * jnp.square(g), state.second, gradients)
        factor = jnp.sqrt(1 - beta2**count) / (1 - beta1**count) if corrects_bias else 1.0
        updates = jax.tree.map(
            lambda m, v: (factor * m / (jnp.sqrt(v) + epsilon)).astype(m.dtype), first, second
        )
        return updates, _Moments(count, first, second)

    return optax.GradientTransformation(init, update)


def _subtract_weights(decay: Any) -> optax.GradientTransformation:
    def update(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return jax.tree.map(lambda u, w: (u - decay * w).astype(u.dtype), updates, params), state

    return optax.GradientTransformation(lambda _params: optax.EmptyState(), update)


class _FtrlState(NamedTuple):
    count: Any
    squares: Tree
    linear: Tree


def _ftrl(
    rate: Rate, power: float, initial: float, l1: float, l2: float, shrinkage: float
) -> optax.GradientTransformation:
    def init(params: Tree) -> _FtrlState:
        squares = jax.tree.map(lambda w: jnp.full_like(w, initial), params)
        return _FtrlState(jnp.zeros([], jnp.int32), squares, jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Tree, state: _FtrlState, params: Tree) -> tuple[Tree, _FtrlState]:
        now = rate(state.count) if callable(rate) else rate

        def step(g: Any, n: Any, z: Any, w: Any) -> tuple[Any, Any, Any]:
            grown = n + jnp.square(g)
            z = z + g + 2 * shrinkage * w - (grown**power - n**power) / now * w
            new = (jnp.clip(z, -l1, l1) - z) / (grown**power / now + 2 * l2)
            return (new - w).astype(w.dtype), grown.astype(n.dtype), z.astype(w.dtype)

        results = jax.tree.map(step, gradients, state.squares, state.linear, params)
        outer = jax.tree.structure(gradients)
        updates, squares, linear = jax.tree.transpose(outer, jax.tree.structure((0, 0, 0)), results)
        return updates, _FtrlState(optax.safe_increment(state.count), squares, linear)

    return optax.GradientTransformation(init, update)


explain_missing(__name__)
