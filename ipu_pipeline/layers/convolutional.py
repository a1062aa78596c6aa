"""Convolutions over height and width, and over one axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.tracing.variables import get_variable
from ipu_pipeline.layers import spatial
from ipu_pipeline.layers.base import (
    ActivationFunction,
    Layer,
    check_flag,
    check_positive_integer,
    find_activation,
    find_initializer,
)

__all__ = ["Conv1D", "Conv2D", "Conv2DTranspose", "DepthwiseConv2D"]


class Conv2D(Layer):
    """`activation(convolution of inputs with kernel + bias)`, over height and width.

    Inputs are [batch, height, width, channels]. Strides and dilation may go together, which Keras does not
    allow.
    """

    kind = "conv2d"

    def __init__(
        self,
        filters: int,
        kernel_size: spatial.Pair,
        strides: spatial.Pair = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: spatial.Pair = (1, 1),
        groups: int = 1,
        activation: ActivationFunction = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        name: str | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """Describes the layer.

        Args:
          filters: the channels of the outputs.
          kernel_size: the height and width of the kernel, or one integer for both.
          strides: how far the kernel moves along height and width.
          padding: "valid" (none), or "same": zeros around the inputs, so that the outputs have the size
            of the inputs divided by the strides and rounded up. An odd zero stands below and on the right.
          data_format: only "channels_last", which None stands for.
          dilation_rate: the distance of the kernel's points along height and width.
          groups: the channels of inputs and outputs are split into so many groups, each convolved by
            itself. Divides `filters` and the channels of the inputs.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`, [height, width, channels / groups, filters]: a name in Keras, or
            as for `get_variable`.
          bias_initializer: of `bias`, [filters].
          name: the scope of its variables.
          dtype: of its variables and of the computation.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype)
        self.filters = check_positive_integer("Conv2D", "filters", filters)
        self.groups = check_positive_integer("Conv2D", "groups", groups)
        if self.filters % self.groups:
            raise ValueError(f"Conv2D: groups must divide filters; got {groups=} and {filters=}.")
        self.kernel_size = spatial.find_pair("Conv2D", "kernel_size", kernel_size)
        self.strides = spatial.find_pair("Conv2D", "strides", strides)
        self.dilation_rate = spatial.find_pair("Conv2D", "dilation_rate", dilation_rate)
        self.padding = spatial.find_padding("Conv2D", padding)
        spatial.check_data_format("Conv2D", data_format)
        self.use_bias = check_flag("Conv2D", "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        height, width = (
            (size - 1) * rate + 1 for size, rate in zip(self.kernel_size, self.dilation_rate, strict=True)
        )
        spatial.check_images(self._full_name(), inputs, (height, width), self.padding)
        channels = inputs.shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self._full_name()}: groups must divide the channels of the inputs; got "
                f"groups={self.groups} and inputs of shape {inputs.shape}."
            )
        shape = (*self.kernel_size, channels // self.groups, self.filters)
        outputs = jax.lax.conv_general_dilated(
            inputs,
            get_variable("kernel", shape, self.dtype, self._kernel_initializer),
            self.strides,
            self.padding.upper(),
            rhs_dilation=self.dilation_rate,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )
        if self.use_bias:
            outputs += get_variable("bias", (self.filters,), self.dtype, self._bias_initializer)
        return self._activation(outputs)


class Conv1D(Layer):
    """`activation(convolution of inputs with kernel + bias)`, over one axis.

    Inputs are [batch, length, channels].
    """

    kind = "conv1d"

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        strides: int = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int = 1,
        groups: int = 1,
        activation: ActivationFunction = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        name: str | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """Describes the layer.

        Args:
          filters: the channels of the outputs.
          kernel_size: the length of the kernel.
          strides: how far the kernel moves.
          padding: "valid" (none), "same" (zeros around the inputs, as in `Conv2D`), or "causal": all zeros
            before the inputs, so that no output depends on later inputs.
          data_format: only "channels_last", which None stands for.
          dilation_rate: the distance of the kernel's points.
          groups: the channels of inputs and outputs are split into so many groups, each convolved by
            itself. Divides `filters` and the channels of the inputs.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`, [length, channels / groups, filters]: a name in Keras, or as for
            `get_variable`.
          bias_initializer: of `bias`, [filters].
          name: the scope of its variables.
          dtype: of its variables and of the computation.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype)
        self.filters = check_positive_integer("Conv1D", "filters", filters)
        self.groups = check_positive_integer("Conv1D", "groups", groups)
        if self.filters % self.groups:
            raise ValueError(f"Conv1D: groups must divide filters; got {groups=} and {filters=}.")
        self.kernel_size = spatial.find_one("Conv1D", "kernel_size", kernel_size)
        self.strides = spatial.find_one("Conv1D", "strides", strides)
        self.dilation_rate = spatial.find_one("Conv1D", "dilation_rate", dilation_rate)
        self.is_causal = isinstance(padding, str) and padding.lower() == "causal"
        self.padding = "causal" if self.is_causal else spatial.find_padding("Conv1D", padding)
        spatial.check_data_format("Conv1D", data_format)
        self.use_bias = check_flag("Conv1D", "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        reach = (self.kernel_size - 1) * self.dilation_rate + 1
        if inputs.ndim != 3 or (self.padding == "valid" and inputs.shape[1] < reach):
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 3, [batch, length, channels], and with padding "
                f"'valid' at least {reach} long; got shape {inputs.shape}."
            )
        channels = inputs.shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self._full_name()}: groups must divide the channels of the inputs; got "
                f"groups={self.groups} and inputs of shape {inputs.shape}."
            )
        shape = (self.kernel_size, channels // self.groups, self.filters)
        outputs = jax.lax.conv_general_dilated(
            inputs,
            get_variable("kernel", shape, self.dtype, self._kernel_initializer),
            (self.strides,),
            [(reach - 1, 0)] if self.is_causal else self.padding.upper(),
            rhs_dilation=(self.dilation_rate,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=self.groups,
        )
        if self.use_bias:
            outputs += get_variable("bias", (self.filters,), self.dtype, self._bias_initializer)
        return self._activation(outputs)


class DepthwiseConv2D(Layer):
    """Each channel convolved with kernels of its own: `activation(convolution + bias)`.

    Inputs are [batch, height, width, channels], outputs [batch, rows, columns, channels x multiplier].
    """

    kind = "depthwise_conv2d"

    def __init__(
        self,
        kernel_size: spatial.Pair,
        strides: spatial.Pair = (1, 1),
        padding: str = "valid",
        depth_multiplier: int = 1,
        data_format: str | None = None,
        dilation_rate: spatial.Pair = (1, 1),
        activation: ActivationFunction = None,
        use_bias: bool = True,
        depthwise_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        name: str | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """Describes the layer.

        Args:
          kernel_size: the height and width of the kernels, or one integer for both.
          strides: how far they move along height and width.
          padding: "valid" or "same", as in `Conv2D`.
          depth_multiplier: how many kernels each channel has.
          data_format: only "channels_last", which None stands for.
          dilation_rate: the distance of the kernels' points along height and width.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          depthwise_initializer: of `depthwise_kernel`, [height, width, channels, multiplier]: a name in
            Keras, or as for `get_variable`.
          bias_initializer: of `bias`, [channels x multiplier].
          name: the scope of its variables.
          dtype: of its variables and of the computation.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype)
        layer = "DepthwiseConv2D"
        self.depth_multiplier = check_positive_integer(layer, "depth_multiplier", depth_multiplier)
        self.kernel_size = spatial.find_pair(layer, "kernel_size", kernel_size)
        self.strides = spatial.find_pair(layer, "strides", strides)
        self.dilation_rate = spatial.find_pair(layer, "dilation_rate", dilation_rate)
        self.padding = spatial.find_padding(layer, padding)
        spatial.check_data_format(layer, data_format)
        self.use_bias = check_flag(layer, "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(depthwise_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        height, width = (
            (size - 1) * rate + 1 for size, rate in zip(self.kernel_size, self.dilation_rate, strict=True)
        )
        spatial.check_images(self._full_name(), inputs, (height, width), self.padding)
        channels = inputs.shape[-1]
        number = channels * self.depth_multiplier
        shape = (*self.kernel_size, channels, self.depth_multiplier)
        kernel = get_variable("depthwise_kernel", shape, self.dtype, self._kernel_initializer)
        outputs = jax.lax.conv_general_dilated(
            inputs,
            kernel.reshape(*self.kernel_size, 1, number),
            self.strides,
            self.padding.upper(),
            rhs_dilation=self.dilation_rate,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=channels,
        )
        if self.use_bias:
            outputs += get_variable("bias", (number,), self.dtype, self._bias_initializer)
        return self._activation(outputs)


class Conv2DTranspose(Layer):
    """The transpose of a convolution, which makes images larger: `activation(it + bias)`.

    Inputs are [batch, height, width, channels]. It is the gradient of `Conv2D` with the same arguments with
    respect to its inputs.
    """

    kind = "conv2d_transpose"

    def __init__(
        self,
        filters: int,
        kernel_size: spatial.Pair,
        strides: spatial.Pair = (1, 1),
        padding: str = "valid",
        output_padding: spatial.Pair | None = None,
        data_format: str | None = None,
        activation: ActivationFunction = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        name: str | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """Describes the layer.

        Args:
          filters: the channels of the outputs.
          kernel_size: the height and width of the kernel, or one integer for both.
          strides: how many times larger the outputs are along height and width.
          padding: "same": the outputs are of the inputs' size times the strides; "valid": of
            `(size - 1) * strides + kernel_size`, or `size * strides` if that is more.
          output_padding: only None, which stands for these sizes.
          data_format: only "channels_last", which None stands for.
          activation: a function, or its name in Keras.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`, [height, width, filters, channels]: a name in Keras, or as for
            `get_variable`.
          bias_initializer: of `bias`, [filters].
          name: the scope of its variables.
          dtype: of its variables and of the computation.

        Raises:
          NotImplementedError: `output_padding` is given.
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype)
        layer = "Conv2DTranspose"
        if output_padding is not None:
            raise NotImplementedError(
                f"{layer}: output_padding must be None, for the usual sizes; got {output_padding!r}. "
                "jnp.pad makes images larger."
            )
        self.filters = check_positive_integer(layer, "filters", filters)
        self.kernel_size = spatial.find_pair(layer, "kernel_size", kernel_size)
        self.strides = spatial.find_pair(layer, "strides", strides)
        self.padding = spatial.find_padding(layer, padding)
        spatial.check_data_format(layer, data_format)
        self.use_bias = check_flag(layer, "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        spatial.check_images(self._full_name(), inputs, (1, 1), "same")
        shape = (*self.kernel_size, self.filters, inputs.shape[-1])
        outputs = jax.lax.conv_transpose(
            inputs,
            get_variable("kernel", shape, self.dtype, self._kernel_initializer),
            self.strides,
            self.padding.upper(),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            transpose_kernel=True,
        )
        if self.use_bias:
            outputs += get_variable("bias", (self.filters,), self.dtype, self._bias_initializer)
        return self._activation(outputs)
