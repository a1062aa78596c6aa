"""Layers without a window or a state: Dense, Embedding, normalizations, layers without variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline import engine
from ipu_pipeline.engine import assign
from ipu_pipeline.engine.fronts import draw_key
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.processes import device_selection
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    PlainLayer,
    VariableLayer,
    argument,
    at_least_float32,
    check_flag,
    check_number,
    check_positive_integer,
    common,
    flag,
    function,
    initializer,
    optional,
    with_arguments,
)


@with_arguments
class Dense(VariableLayer):
    """`activation(inputs @ kernel + bias)`, over the last axis.

    Example:
      >>> def stage(images, labels):
      ...     hidden = layers.Dense(64, activation="relu")(images)
      ...     return layers.Dense(10, name="head")(hidden), labels
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace((np.ones([8, 784], np.float32), np.ones(8, np.int32)))
      >>> list(pipeline.variables.values())
      [dense/kernel: float32[784, 64], dense/bias: float32[64],
       head/kernel: float32[64, 10], head/bias: float32[10]]
    """

    kind = "dense"

    units: int = argument("the size of the last axis of the outputs.", check_positive_integer)
    activation: InitVar[ActivationFunction] = function(default=None)
    use_bias: bool = flag("whether there is a `bias`.", default=True)
    kernel_initializer: InitVar[Any] = initializer("kernel", "[inputs, units]", default="glorot_uniform")
    bias_initializer: InitVar[Any] = initializer("bias", "[units]", default="zeros")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim < 2:
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 2 or more, [batch, ..., features]; "
                f"got shape {inputs.shape}."
            )
        shape = (inputs.shape[-1], self.units)
        outputs = inputs @ self._own_variable("kernel", shape)
        if self.use_bias:
            outputs = self._add_bias(outputs)
        return self._activation(outputs)


@with_arguments
class Embedding(VariableLayer):
    """Looks up a row of `embeddings` for each integer.

    For integers below 0 or of at least `input_dim`, the row is NaN, so that the loss shows the fault, and
    `embeddings` gets no gradient from it. TensorFlow raises an error on a CPU; a compiled program cannot,
    as values are not known when it is compiled.

    Example:
      >>> def stage(tokens):
      ...     vectors = layers.Embedding(input_dim=1000, output_dim=64)(tokens)
      ...     print(vectors.shape)
      ...     return vectors
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.zeros([8, 128], np.int32))
      (8, 128, 64)
      >>> list(pipeline.variables.values())
      [embedding/embeddings: float32[1000, 64]]
    """

    kind = "embedding"

    input_dim: int = argument("how many rows there are; inputs are below it.", check_positive_integer)
    output_dim: int = argument(
        "the size of a row, and of the last axis of the outputs.", check_positive_integer
    )
    embeddings_initializer: InitVar[Any] = initializer(
        "embeddings", '[input_dim, output_dim] ("uniform" is from -0.05 to 0.05)', default="uniform"
    )
    _: KW_ONLY
    dtype: InitVar[Any] = common(
        "of the outputs; None: see `mixed_precision`, by default float32. Rows are looked up, then cast."
    )

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise TypeError(
                f"{self._full_name()} needs integer inputs; got {inputs.dtype.name}{list(inputs.shape)}."
            )
        if inputs.dtype.itemsize < 4:  # input_dim need not fit into a narrow dtype
            inputs = inputs.astype(jnp.int32)
        embeddings = self._get_variable("embeddings", (self.input_dim, self.output_dim))
        rows = jnp.where(inputs < 0, self.input_dim, inputs)  # a negative one would count from the end
        return self._cast(jnp.take(embeddings, rows, axis=0))


@with_arguments
class Flatten(PlainLayer):
    """Reshapes [batch, ...] to [batch, features]. It keeps the dtype.

    Example:
      >>> def stage(images):
      ...     flat = layers.Flatten()(images)
      ...     print(flat.shape)
      ...     return flat
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 28, 28, 1], np.float32))
      (8, 784)
    """

    kind = "flatten"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        if inputs.ndim == 0:
            raise ValueError("Flatten needs inputs with a batch axis; got a scalar.")
        return inputs.reshape((inputs.shape[0], math.prod(inputs.shape[1:])))


@with_arguments
class Activation(PlainLayer):
    """Applies a function, given itself or by its name in Keras. It has no variables.

    Example:
      >>> def stage(x):
      ...     return layers.Activation("relu")(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> x = np.array([-1, 2], np.float32)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> outputs.outputs[0]
      Array([0., 2.], dtype=float32)
    """

    kind = "activation"

    activation: InitVar[ActivationFunction] = function()

    def _apply(self, inputs: jax.Array) -> jax.Array:
        return self._activation(inputs)


def _check_seed(layer: str, argument: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"{layer}: {argument} must be an integer or None; got {value!r}.")
    if not -(2**31) <= value < 2**32:
        raise ValueError(f"{layer}: {argument} must have 32 bits; got {value}.")
    return int(value) % 2**32


@with_arguments
class Dropout(PlainLayer):
    """Sets a random part of the activations to 0, and scales the others by 1/(1-rate).

    The mask depends on the session's seed, the execution, the micro-batch and the layer's scope, and not on
    the split into stages. It keeps the dtype.

    Example:
      >>> def stage(x):
      ...     return layers.Dropout(0.5)(x)
      >>> x = np.ones(1000, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
      >>> bool((outputs.outputs[0] == x).all())  # without an optimizer nothing is dropped
      True
    """

    kind = "dropout"

    rate: float = argument(
        "the part that is set to 0, at least 0 and below 1.",
        check_number("at least 0 and below 1", lambda value: 0 <= value < 1),
    )
    noise_shape: InitVar[Sequence[int | None] | None] = argument(
        "the mask's shape, which is broadcast; None for an axis's own size.", default=None, attribute=""
    )
    seed: InitVar[int | None] = argument(
        "an integer, folded into the layer's random key.", _check_seed, default=None, attribute=""
    )

    def _complete(self, values: dict[str, Any]) -> None:
        self._noise_shape, self._seed = values["noise_shape"], values["seed"]

    def _apply(self, inputs: jax.Array, training: bool | None = None) -> jax.Array:
        """`training` None: True in a program that trains, False in others."""
        if not self._is_training(training) or self.rate == 0:
            return inputs
        shape = inputs.shape
        if self._noise_shape is not None:
            if len(self._noise_shape) != len(shape):
                raise ValueError(
                    f"Dropout: noise_shape {tuple(self._noise_shape)} must have one entry for each axis "
                    f"of the inputs, {shape}."
                )
            sizes = zip(self._noise_shape, shape, strict=True)
            shape = tuple(size if noise is None else noise for noise, size in sizes)
        key = draw_key("ipu.layers.Dropout", " With training=False it needs none.")
        if self._seed is not None:
            key = jax.random.fold_in(key, self._seed)
        is_kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(is_kept, inputs / (1 - self.rate), jnp.zeros((), inputs.dtype))


# Normalizations. Sources: S. Ioffe and C. Szegedy, Batch Normalization, arXiv:1502.03167; J. L. Ba et al.,
# Layer Normalization, arXiv:1607.06450; Y. Wu and K. He, Group Normalization, arXiv:1803.08494.
#
#     outputs = (inputs - mean) / sqrt(variance + epsilon) * gamma + beta
#
# The variance is the biased one, the mean of the squared distances from the mean; `BatchNormalization` says
# which one its moving average takes. All of this is computed in float32 at least, with the inputs as they
# are in the layer's dtype, and `gamma` and `beta` as they are in its `param_dtype`; the outputs have the
# layer's dtype.

_LEAST_FUSED_EPSILON = 1.001e-5  # of `tf.nn.fused_batch_norm`

_check_epsilon = check_number("at least 0", lambda value: value >= 0)


def _check_axis(layer: str, argument: str, value: Any) -> int:
    if not is_integer(value):
        raise ValueError(f"{layer}: {argument} must be an integer; got {value!r}.")
    return int(value)


def _find_axes(layer: str, argument: str, value: Any) -> tuple[int, ...]:
    axes = tuple(value) if isinstance(value, Sequence) else (value,)
    if not axes:
        raise ValueError(f"{layer}: {argument} must name at least one axis; got none.")
    return tuple(_check_axis(layer, argument, axis) for axis in axes)


def _check_groups(layer: str, argument: str, value: Any) -> int:
    is_each = not isinstance(value, bool) and value == -1
    return -1 if is_each else check_positive_integer(layer, argument, value)


class _Normalization(VariableLayer):
    """The base of normalizations: epsilon, `gamma` and `beta`, and the dtype of the statistics."""

    axis: Any  # an index, or in LayerNormalization a tuple of them
    epsilon: float
    center: bool
    scale: bool

    @property
    def _statistics_dtype(self) -> np.dtype[Any]:
        return at_least_float32(self.dtype)

    def _as_statistics_dtype(self, inputs: jax.Array) -> jax.Array:
        return self._as_own_dtype(inputs).astype(self._statistics_dtype)

    def _find_axes(self, inputs: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
        """The axes counted from 0, in ascending order."""
        rank = inputs.ndim
        indices = {axis % rank for axis in axes if -rank <= axis < rank}
        if len(indices) < len(axes):
            raise ValueError(
                f"{self._full_name()}: axis must name different axes of the inputs; got {list(axes)} for "
                f"inputs of shape {inputs.shape}."
            )
        return tuple(sorted(indices))

    def _scale_and_center(self, normalized: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """Applies `gamma` and `beta`, which have the given axes; the result has the outputs' dtype."""
        size = tuple(normalized.shape[axis] for axis in axes)
        if self.scale:
            gamma = self._get_variable("gamma", size)
            normalized *= _along(axes, normalized, gamma.astype(self._statistics_dtype))
        if self.center:
            beta = self._get_variable("beta", size)
            normalized += _along(axes, normalized, beta.astype(self._statistics_dtype))
        return self._cast(normalized)


@with_arguments
class BatchNormalization(_Normalization):
    """Normalizes each index of an axis over all other axes.

    In training it uses the mean and variance of the micro-batch, which also update `moving_mean` and
    `moving_variance`, once per micro-batch and in order:

        moving = moving * momentum + micro-batch's value * (1 - momentum)

    Otherwise it uses the moving statistics. As in TensorFlow 1, inputs of rank 4 with `axis` 1 or 3 and a
    dtype of at most 32 bits are treated like in its fused kernel: `moving_variance` gets the variance with
    Bessel's correction, n / (n - 1) times the biased variance of the n numbers, and `epsilon` is at least
    1.001e-5. For other inputs it gets the biased variance.

    Each replica has the statistics of its own micro-batches. If statistics are synchronized, they are taken
    over micro-batch k of all replicas together. In both cases the moving statistics are averaged over the
    replicas at each weight update.

    The moving statistics are at least float32, whatever the layer's dtypes: in bfloat16 a step of a
    hundredth would mostly be rounded away.

    Example:
      >>> def stage(x):
      ...     return layers.BatchNormalization(momentum=0.9)(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 28, 28, 16], np.float32))
      >>> [(name, spec.trainable) for name, spec in pipeline.variables.items()]
      [('batch_normalization/moving_mean', False), ('batch_normalization/moving_variance', False),
       ('batch_normalization/gamma', True), ('batch_normalization/beta', True)]
    """

    kind = "batch_normalization"

    axis: int = argument(
        "the axis that the statistics and the variables have, of the size `features`.",
        _check_axis,
        default=-1,
    )
    momentum: float = argument(
        "how much of the moving statistics stays at each micro-batch, from 0 to 1.",
        check_number("from 0 to 1", lambda value: 0 <= value <= 1),
        default=0.99,
    )
    epsilon: float = argument("added to the variance.", _check_epsilon, default=1e-3)
    center: bool = flag("whether there is a `beta`.", default=True)
    scale: bool = flag("whether there is a `gamma`.", default=True)
    beta_initializer: InitVar[Any] = initializer("beta", "[features]", default="zeros")
    gamma_initializer: InitVar[Any] = initializer("gamma", "[features]", default="ones")
    moving_mean_initializer: InitVar[Any] = initializer(
        "moving_mean", "[features], which is not trained", default="zeros"
    )
    moving_variance_initializer: InitVar[Any] = initializer(
        "moving_variance", "[features], which is not trained", default="ones"
    )
    _: KW_ONLY
    synchronized: bool | None = argument(
        "whether replicas share the statistics by which they normalize in training. None: as "
        "`IPUConfig.norms.experimental.distributed_batch_norm_replica_group_size` says when the program is "
        "compiled, by default not.",
        optional(check_flag),
        default=None,
    )
    dtype: InitVar[Any] = common("of the outputs; None: see `mixed_precision`, by default float32.")
    param_dtype: InitVar[Any] = common(
        "of `beta` and `gamma`, and if it is at least float32, of the moving statistics; None: likewise, "
        "by default `dtype`."
    )
    trainable: bool = common(
        "whether an optimizer trains `beta` and `gamma`. The moving statistics move either way.",
        default=True,
    )

    def _apply(self, inputs: jax.Array, training: bool | None = None) -> jax.Array:
        """`training` None: True in a program that trains, False in others."""
        inputs = self._as_statistics_dtype(inputs)
        axes = self._find_axes(inputs, [self.axis])
        is_fused = inputs.ndim == 4 and axes[0] in (1, 3) and inputs.dtype.itemsize <= 4
        mean = self._moving("moving_mean", inputs.shape[axes[0]])
        variance = self._moving("moving_variance", inputs.shape[axes[0]])
        if self._is_training(training):
            moving_mean, moving_variance = mean, variance
            is_shared = (
                device_selection.norm_group_size() > 1 if self.synchronized is None else self.synchronized
            )
            mean, variance = _moments(inputs, axes[0], is_shared)
            self._move("moving_mean", moving_mean, mean)
            unbiased = variance * _bessel(inputs, axes[0], is_shared) if is_fused else variance
            self._move("moving_variance", moving_variance, unbiased)
        mean, variance = mean.astype(inputs.dtype), variance.astype(inputs.dtype)
        epsilon = max(self.epsilon, _LEAST_FUSED_EPSILON) if is_fused else self.epsilon
        mean, variance = _along(axes, inputs, mean), _along(axes, inputs, variance)
        return self._scale_and_center(_normalize(inputs, mean, variance, epsilon), axes)

    def _moving(self, name: str, features: int) -> jax.Array:
        return self._get_variable(name, (features,), at_least_float32(self.param_dtype), trainable=False)

    def _move(self, name: str, moving: jax.Array, new: jax.Array) -> None:
        assign(name, moving * self.momentum + new.astype(moving.dtype) * (1 - self.momentum))


@with_arguments
class LayerNormalization(_Normalization):
    """Normalizes over the given axes, for each index of the others.

    Example:
      >>> def stage(x):
      ...     return layers.LayerNormalization(epsilon=1e-5)(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 128, 64], np.float32))
      >>> list(pipeline.variables.values())
      [layer_normalization/gamma: float32[64], layer_normalization/beta: float32[64]]
    """

    kind = "layer_normalization"

    axis: InitVar[int | Sequence[int]] = argument(
        "the axis or axes to normalize over; in any order.", _find_axes, default=-1
    )
    epsilon: float = argument("added to the variance.", _check_epsilon, default=1e-3)
    center: bool = flag("whether there is a `beta`.", default=True)
    scale: bool = flag("whether there is a `gamma`.", default=True)
    beta_initializer: InitVar[Any] = initializer(
        "beta", "which has the sizes of those axes, in the order of the inputs", default="zeros"
    )
    gamma_initializer: InitVar[Any] = initializer("gamma", "likewise", default="ones")
    _: KW_ONLY
    dtype: InitVar[Any] = common("of the outputs; None: see `mixed_precision`, by default float32.")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_statistics_dtype(inputs)
        axes = self._find_axes(inputs, self.axis)
        mean = jnp.mean(inputs, axes, keepdims=True)
        variance = jnp.var(inputs, axes, keepdims=True)
        return self._scale_and_center(_normalize(inputs, mean, variance, self.epsilon), axes)


@with_arguments
class GroupNormalization(_Normalization):
    """Normalizes each example over groups of channels and all axes other than batch and channels.

    Example:
      >>> def stage(x):
      ...     return layers.GroupNormalization(groups=4)(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 28, 28, 16], np.float32))
      >>> list(pipeline.variables.values())
      [group_normalization/gamma: float32[16], group_normalization/beta: float32[16]]
    """

    kind = "group_normalization"

    groups: int = argument(
        "how many groups there are; divides the channels. -1: each channel is a group (instance "
        "normalization).",
        _check_groups,
        default=32,
    )
    axis: int = argument(
        "the axis of the channels; not the first one, which is the batch.", _check_axis, default=-1
    )
    epsilon: float = argument("added to the variance.", _check_epsilon, default=1e-3)
    center: bool = flag("whether there is a `beta`.", default=True)
    scale: bool = flag("whether there is a `gamma`.", default=True)
    beta_initializer: InitVar[Any] = initializer("beta", "[channels]", default="zeros")
    gamma_initializer: InitVar[Any] = initializer("gamma", "[channels]", default="ones")
    _: KW_ONLY
    strided_channel_grouping: bool = flag(
        "True: channel c is in group c modulo `groups`, as on IPUs by default; False: groups consist of "
        "neighbouring channels, as in Keras.",
        default=True,
    )
    dtype: InitVar[Any] = common("of the outputs; None: see `mixed_precision`, by default float32.")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_statistics_dtype(inputs)
        axes = self._find_axes(inputs, [self.axis])
        (axis,) = axes
        if axis == 0:
            raise ValueError(
                f"{self._full_name()}: axis must be that of the channels, not the first one, the batch; "
                f"got {self.axis} for inputs of shape {inputs.shape}."
            )
        channels = inputs.shape[axis]
        groups = channels if self.groups == -1 else self.groups
        if channels % groups or not channels:
            raise ValueError(
                f"{self._full_name()}: groups must divide the channels of the inputs; got groups={groups} "
                f"and {channels} channels, in inputs of shape {inputs.shape}. -1 makes each a group."
            )
        is_strided = self.strided_channel_grouping
        normalized = normalize_groups(inputs, axis, groups, is_strided, self.epsilon)
        return self._scale_and_center(normalized, axes)


def _normalize(inputs: jax.Array, mean: jax.Array, variance: jax.Array, epsilon: float) -> jax.Array:
    """Normalizes; mean and variance have 1 for the axes that they do not depend on."""
    return (inputs - mean) * jax.lax.rsqrt(variance + epsilon)


def normalize_groups(
    inputs: jax.Array, axis: int, groups: int, is_strided: bool, epsilon: float
) -> jax.Array:
    """Normalizes each example over groups of the channels, which are at the axis."""
    channels = inputs.shape[axis]
    sizes, group_axis = (groups, channels // groups), axis  # the axis of the groups
    if is_strided:
        sizes, group_axis = (channels // groups, groups), axis + 1
    grouped = inputs.reshape(*inputs.shape[:axis], *sizes, *inputs.shape[axis + 1 :])
    reduced_axes = tuple(index for index in range(1, grouped.ndim) if index != group_axis)
    mean = jnp.mean(grouped, reduced_axes, keepdims=True)
    variance = jnp.var(grouped, reduced_axes, keepdims=True)
    return _normalize(grouped, mean, variance, epsilon).reshape(inputs.shape)


def _moments(inputs: jax.Array, axis: int, is_shared: bool) -> tuple[jax.Array, jax.Array]:
    """Mean and variance for each index of an axis, of this replica's inputs or of those of all replicas."""
    reduced_axes = tuple(index for index in range(inputs.ndim) if index != axis)
    mean = jnp.mean(inputs, reduced_axes)
    if not is_shared:
        return mean, jnp.var(inputs, reduced_axes)
    number = engine.replica_count().astype(inputs.dtype)  # all have inputs of the same size
    mean = engine.cross_replica_sum(mean) / number
    squares = jnp.square(inputs - _along((axis,), inputs, mean))
    return mean, engine.cross_replica_sum(jnp.mean(squares, reduced_axes)) / number


def _bessel(inputs: jax.Array, axis: int, is_shared: bool) -> jax.Array:
    """Bessel's correction of `_moments`: n / (n - 1), of n numbers for each index of the axis."""
    number: Any = float(inputs.size // max(inputs.shape[axis], 1))
    if is_shared:
        number *= engine.replica_count().astype(inputs.dtype)
    return number / jnp.maximum(number - 1, 1)


def _along(axes: tuple[int, ...], inputs: jax.Array, values: jax.Array) -> jax.Array:
    """Values that have the given axes of the inputs, with 1 for every other axis."""
    return values.reshape([size if axis in axes else 1 for axis, size in enumerate(inputs.shape)])
