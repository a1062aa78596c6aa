"""Layers with a window that moves over height and width: convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    Layer,
    PlainLayer,
    VariableLayer,
    argument,
    at_least_float32,
    check_positive_integer,
    flag,
    function,
    initializer,
    optional,
    with_arguments,
)

Padding: TypeAlias = Literal["valid", "same", "VALID", "SAME"]
Pair: TypeAlias = int | Sequence[int]


class Windowed(Layer):
    """A layer with a window, whose sizes are kept as tuples, whatever they were given as."""

    kernel_size: tuple[int, ...]
    pool_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation_rate: tuple[int, ...]


def find_pair(layer: str, argument: str, value: Any) -> tuple[int, int]:
    """Returns the sizes along height and width."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_usable = len(sizes) == 2 and all(is_integer(size, 1) for size in sizes)
    if not is_usable:
        raise ValueError(
            f"{layer}: {argument} must be a positive integer or two of them, (height, width); got "
            f"{value!r}."
        )
    return int(sizes[0]), int(sizes[1])


def find_size(layer: str, argument: str, value: Any) -> tuple[int]:
    """Returns the size along one axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sizes) != 1 or not is_integer(sizes[0], 1):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return (int(sizes[0]),)


def find_padding(layer: str, argument: str, value: Any) -> str:
    """Returns the padding in lower case."""
    if not isinstance(value, str) or value.lower() not in ("valid", "same"):
        raise ValueError(f"{layer}: {argument} must be 'valid' or 'same'; got {value!r}.")
    return value.lower()


def data_format_argument() -> Any:
    """Declares the argument `data_format`: None or "channels_last", in any case."""
    return argument(
        'only "channels_last", which None stands for.', _check_data_format, default=None, attribute=""
    )


def _check_data_format(layer: str, argument: str, value: Any) -> None:
    is_known = value is None or str(value).lower() == "channels_last"
    if not is_known:
        raise ValueError(
            f"{layer}: {argument} must be 'channels_last' (or None, which is the same); got "
            f"{value!r}. jnp.moveaxis(x, 1, -1) puts the channels last."
        )


def check_images(full_name: str, inputs: jax.Array, window: Sequence[int], padding: str) -> None:
    """Checks that inputs are [batch, height, width, channels], and large enough for one window."""
    if inputs.ndim != 4:
        raise ValueError(
            f"{full_name} needs inputs of rank 4, [batch, height, width, channels]; got shape "
            f"{inputs.shape}."
        )
    sizes = window if padding == "valid" else (1, 1)
    if any(size < least for size, least in zip(inputs.shape[1:3], sizes, strict=True)):
        raise ValueError(
            f"{full_name} with padding {padding!r} needs inputs of at least {sizes[0]} by {sizes[1]}, "
            f"[batch, height, width, channels]; got shape {inputs.shape}. Give larger inputs, a smaller "
            "window, or padding='same'."
        )


# Convolutions.


class _Convolution(Windowed, VariableLayer):
    """The base of convolutions: a kernel that moves over some axes, a bias, and an activation."""

    axes = "HW"  # that the kernel moves over
    padding: Any
    use_bias: bool

    @property
    def _reach(self) -> tuple[int, ...]:
        """The extent of the kernel along each axis."""
        sizes = zip(self.kernel_size, self.dilation_rate, strict=True)
        return tuple((size - 1) * rate + 1 for size, rate in sizes)

    @property
    def _dimensions(self) -> tuple[str, str, str]:
        """The axes of inputs, kernel and outputs, as JAX calls them."""
        return f"N{self.axes}C", f"{self.axes}IO", f"N{self.axes}C"

    def _convolve(self, inputs: jax.Array, kernel: jax.Array, padding: Any, groups: int) -> jax.Array:
        outputs: jax.Array = jax.lax.conv_general_dilated(
            inputs,
            kernel,
            self.strides,
            padding,
            rhs_dilation=self.dilation_rate,
            dimension_numbers=self._dimensions,
            feature_group_count=groups,
        )
        return outputs

    def _finish(self, outputs: jax.Array) -> jax.Array:
        """Adds the bias, and applies the activation."""
        if self.use_bias:
            outputs = self._add_bias(outputs)
        return self._activation(outputs)


@with_arguments
class _GroupedConvolution(_Convolution):
    """The base of convolutions of groups of channels."""

    filters: int = argument("the channels of the outputs.", check_positive_integer)
    kernel_size: InitVar[Pair] = argument(
        "the height and width of the kernel, or one integer for both.", find_pair
    )
    strides: InitVar[Pair] = argument(
        "how far the kernel moves along height and width.", find_pair, default=(1, 1)
    )
    padding: Padding = argument(
        '"valid" (none), or "same": zeros around the inputs, so that the outputs have the size of the '
        "inputs divided by the strides and rounded up. An odd zero stands below and on the right.",
        find_padding,
        default="valid",
    )
    data_format: InitVar[str | None] = data_format_argument()
    dilation_rate: InitVar[Pair] = argument(
        "the distance of the kernel's points along height and width.", find_pair, default=(1, 1)
    )
    groups: int = argument(
        "the channels of inputs and outputs are split into so many groups, each convolved by itself. "
        "Divides `filters` and the channels of the inputs.",
        check_positive_integer,
        default=1,
    )
    activation: InitVar[ActivationFunction] = function(default=None)
    use_bias: bool = flag("whether there is a `bias`.", default=True)
    kernel_initializer: InitVar[Any] = initializer(
        "kernel", "[*kernel_size, channels / groups, filters]", default="glorot_uniform"
    )
    bias_initializer: InitVar[Any] = initializer("bias", "[filters]", default="zeros")

    def _complete(self, values: dict[str, Any]) -> None:
        filters, groups = values["filters"], values["groups"]
        if filters % groups:
            raise ValueError(
                f"{type(self).__name__}: groups must divide filters; got {groups=} and {filters=}."
            )

    def _grouped_kernel(self, inputs: jax.Array) -> jax.Array:
        """The variable `kernel` of a convolution of `groups` groups of channels."""
        channels = inputs.shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self._full_name()}: groups must divide the channels of the inputs; got "
                f"groups={self.groups} and inputs of shape {inputs.shape}."
            )
        shape = (*self.kernel_size, channels // self.groups, self.filters)
        return self._own_variable("kernel", shape)


@with_arguments
class Conv2D(_GroupedConvolution):
    """`activation(convolution of inputs with kernel + bias)`, over height and width.

    Inputs are [batch, height, width, channels]. Strides and dilation may be combined, unlike in Keras.

    Example:
      >>> def stage(images):
      ...     features = layers.Conv2D(16, kernel_size=3, strides=2, padding="same")(images)
      ...     print(features.shape)
      ...     return features
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 28, 28, 1], np.float32))
      (8, 14, 14, 16)
      >>> list(pipeline.variables.values())
      [conv2d/kernel: float32[3, 3, 1, 16], conv2d/bias: float32[16]]
    """

    kind = "conv2d"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        check_images(self._full_name(), inputs, self._reach, self.padding)
        kernel = self._grouped_kernel(inputs)
        return self._finish(self._convolve(inputs, kernel, self.padding.upper(), self.groups))


def _find_causal_padding(layer: str, argument: str, value: Any) -> str:
    """The padding along one axis, in lower case."""
    is_causal = isinstance(value, str) and value.lower() == "causal"
    return "causal" if is_causal else find_padding(layer, argument, value)


@with_arguments
class Conv1D(_GroupedConvolution):
    """`activation(convolution of inputs with kernel + bias)`, over one axis.

    Inputs are [batch, length, channels].

    Example:
      >>> def stage(signals):
      ...     features = layers.Conv1D(16, kernel_size=5, padding="causal", activation="relu")(signals)
      ...     print(features.shape)
      ...     return features
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 100, 3], np.float32))
      (8, 100, 16)
      >>> list(pipeline.variables.values())
      [conv1d/kernel: float32[5, 3, 16], conv1d/bias: float32[16]]
    """

    kind = "conv1d"
    axes = "W"

    kernel_size: InitVar[int] = argument("the length of the kernel.", find_size)
    strides: InitVar[int] = argument("how far the kernel moves.", find_size, default=1)
    padding: Padding | Literal["causal", "CAUSAL"] = argument(  # type: ignore[assignment]  # more
        '"valid" (none), "same" (zeros around the inputs, as in `Conv2D`), or "causal": all zeros before '
        "the inputs, so that no output depends on later inputs.",
        _find_causal_padding,
        default="valid",
    )
    dilation_rate: InitVar[int] = argument("the distance of the kernel's points.", find_size, default=1)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        (reach,) = self._reach
        if inputs.ndim != 3 or (self.padding == "valid" and inputs.shape[1] < reach):
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 3, [batch, length, channels], and with padding "
                f"'valid' at least {reach} long; got shape {inputs.shape}."
            )
        padding = [(reach - 1, 0)] if self.padding == "causal" else self.padding.upper()
        return self._finish(self._convolve(inputs, self._grouped_kernel(inputs), padding, self.groups))


@with_arguments
class DepthwiseConv2D(_Convolution):
    """Convolves each channel with its own kernels: `activation(convolution + bias)`.

    Inputs are [batch, height, width, channels], outputs [batch, rows, columns, channels x multiplier].

    Example:
      >>> def stage(features):
      ...     features = layers.DepthwiseConv2D(kernel_size=3, padding="same", depth_multiplier=2)(features)
      ...     print(features.shape)
      ...     return features
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 14, 14, 16], np.float32))
      (8, 14, 14, 32)
    """

    kind = "depthwise_conv2d"

    kernel_size: InitVar[Pair] = argument(
        "the height and width of the kernels, or one integer for both.", find_pair
    )
    strides: InitVar[Pair] = argument(
        "how far they move along height and width.", find_pair, default=(1, 1)
    )
    padding: Padding = argument('"valid" or "same", as in `Conv2D`.', find_padding, default="valid")
    depth_multiplier: int = argument("how many kernels a channel has.", check_positive_integer, default=1)
    data_format: InitVar[str | None] = data_format_argument()
    dilation_rate: InitVar[Pair] = argument(
        "the distance of the kernels' points along height and width.", find_pair, default=(1, 1)
    )
    activation: InitVar[ActivationFunction] = function(default=None)
    use_bias: bool = flag("whether there is a `bias`.", default=True)
    depthwise_initializer: InitVar[Any] = initializer(
        "depthwise_kernel", "[height, width, channels, multiplier]", default="glorot_uniform"
    )
    bias_initializer: InitVar[Any] = initializer("bias", "[channels x multiplier]", default="zeros")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        check_images(self._full_name(), inputs, self._reach, self.padding)
        channels = inputs.shape[-1]
        shape = (*self.kernel_size, channels, self.depth_multiplier)
        kernel = self._own_variable("depthwise_kernel", shape)
        kernel = kernel.reshape(*self.kernel_size, 1, channels * self.depth_multiplier)
        return self._finish(self._convolve(inputs, kernel, self.padding.upper(), channels))


def _check_output_padding(layer: str, argument: str, value: Any) -> None:
    if value is not None:
        raise NotImplementedError(
            f"{layer}: {argument} must be None, for the usual sizes; got {value!r}. "
            "jnp.pad makes images larger."
        )


@with_arguments
class Conv2DTranspose(_Convolution):
    """A transposed convolution, which enlarges images: `activation(transposed convolution + bias)`.

    Inputs are [batch, height, width, channels]. The transposed convolution is the gradient of `Conv2D` with
    the same arguments with respect to its inputs.

    Example:
      >>> def stage(features):
      ...     images = layers.Conv2DTranspose(1, kernel_size=2, strides=2)(features)
      ...     print(images.shape)
      ...     return images
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 14, 14, 16], np.float32))
      (8, 28, 28, 1)
    """

    kind = "conv2d_transpose"
    dilation_rate = (1, 1)

    filters: int = argument("the channels of the outputs.", check_positive_integer)
    kernel_size: InitVar[Pair] = argument(
        "the height and width of the kernel, or one integer for both.", find_pair
    )
    strides: InitVar[Pair] = argument(
        "how many times larger the outputs are along height and width.", find_pair, default=(1, 1)
    )
    padding: Padding = argument(
        '"same": the outputs are of the inputs\' size times the strides; "valid": of '
        "`(size - 1) * strides + kernel_size`, or `size * strides` if that is more.",
        find_padding,
        default="valid",
    )
    output_padding: InitVar[Pair | None] = argument(
        "only None, which stands for these sizes; another one raises NotImplementedError.",
        _check_output_padding,
        default=None,
        attribute="",
    )
    data_format: InitVar[str | None] = data_format_argument()
    activation: InitVar[ActivationFunction] = function(default=None)
    use_bias: bool = flag("whether there is a `bias`.", default=True)
    kernel_initializer: InitVar[Any] = initializer(
        "kernel", "[height, width, filters, channels]", default="glorot_uniform"
    )
    bias_initializer: InitVar[Any] = initializer("bias", "[filters]", default="zeros")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        check_images(self._full_name(), inputs, (1, 1), "same")
        shape = (*self.kernel_size, self.filters, inputs.shape[-1])
        outputs: jax.Array = jax.lax.conv_transpose(
            inputs,
            self._own_variable("kernel", shape),
            self.strides,
            self.padding.upper(),
            dimension_numbers=self._dimensions,
            transpose_kernel=True,
        )
        return self._finish(outputs)


# Pooling.


@with_arguments
class _Pooling2D(Windowed, PlainLayer):
    """The base of pooling: a window, how far it moves, and padding."""

    pool_size: InitVar[Pair] = argument(
        "the height and width of the window, or one integer for both.", find_pair, default=(2, 2)
    )
    strides: InitVar[Pair | None] = argument(
        "how far the window moves along height and width; None: `pool_size`.",
        optional(find_pair),
        default=None,
    )
    padding: Padding = argument(
        '"valid" (windows that do not fit are left out), or "same": windows may reach over the edges, so '
        "that the outputs have the size of the inputs divided by the strides and rounded up. What lies "
        "outside of the inputs does not count.",
        find_padding,
        default="valid",
    )
    data_format: InitVar[str | None] = data_format_argument()

    def _complete(self, values: dict[str, Any]) -> None:
        self.strides = values["strides"] or self.pool_size

    def _check(self, inputs: jax.Array) -> None:
        self._check_floating(inputs)
        check_images(self._full_name(), inputs, self.pool_size, self.padding)

    def _reduce(self, inputs: jax.Array, start: float, operation: Any) -> jax.Array:
        """Reduces the windows of [batch, height, width, channels].

        Returns:
          The reduced windows, [batch, rows of windows, columns of windows, channels].
        """
        outputs: jax.Array = jax.lax.reduce_window(
            inputs,
            np.array(start, inputs.dtype),
            operation,
            (1, *self.pool_size, 1),
            (1, *self.strides, 1),
            self.padding.upper(),
        )
        return outputs


class MaxPooling2D(_Pooling2D):
    """The largest value in each window of [batch, height, width, channels].

    The gradient goes to the largest value, or to the first of equal ones. It keeps the floating-point
    dtype.

    Example:
      >>> def stage(images):
      ...     largest = layers.MaxPooling2D(pool_size=3, strides=2, padding="same")(images)
      ...     print(largest.shape)
      ...     return largest
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 28, 28, 16], np.float32))
      (8, 14, 14, 16)
    """

    kind = "max_pooling2d"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check(inputs)
        return self._reduce(inputs, -np.inf, jax.lax.max)


class AveragePooling2D(_Pooling2D):
    """The mean of each window of [batch, height, width, channels].

    With padding "same", only the window's values inside the inputs count. Sums are computed in at least
    float32. It keeps the floating-point dtype.

    Example:
      >>> def stage(images):
      ...     means = layers.AveragePooling2D(pool_size=2)(images)
      ...     print(means.shape)
      ...     return means
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 28, 28, 16], np.float32))
      (8, 14, 14, 16)
    """

    kind = "average_pooling2d"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check(inputs)
        wide = inputs.astype(at_least_float32(inputs.dtype))
        sums = self._reduce(wide, 0, jax.lax.add)
        if self.padding == "valid":
            means = sums / math.prod(self.pool_size)
        else:
            ones = jnp.ones((1, *inputs.shape[1:3], 1), wide.dtype)
            means = sums / self._reduce(ones, 0, jax.lax.add)
        return means.astype(inputs.dtype)


@with_arguments
class GlobalAveragePooling2D(PlainLayer):
    """The mean over height and width of [batch, height, width, channels].

    Sums are computed in at least float32. It keeps the floating-point dtype.

    Example:
      >>> def stage(images):
      ...     means = layers.GlobalAveragePooling2D()(images)
      ...     print(means.shape)
      ...     return means
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 7, 7, 64], np.float32))
      (8, 64)
    """

    kind = "global_average_pooling2d"

    data_format: InitVar[str | None] = data_format_argument()
    keepdims: bool = flag("whether outputs are [batch, 1, 1, channels], and not [batch, channels].")

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check_floating(inputs)
        check_images(self._full_name(), inputs, (1, 1), "valid")
        wide = inputs.astype(at_least_float32(inputs.dtype))
        return jnp.mean(wide, (1, 2), keepdims=self.keepdims).astype(inputs.dtype)
