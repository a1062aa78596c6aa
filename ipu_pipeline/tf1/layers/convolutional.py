"""Convolutions over height and width, and over one axis."""

from __future__ import annotations

from typing import Any

import jax

from ipu_pipeline.tf1.layers import spatial
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    Layer,
    check_flag,
    check_positive_integer,
    find_activation,
    find_initializer,
)

__all__ = ["Conv1D", "Conv2D", "Conv2DTranspose", "DepthwiseConv2D"]


class _Convolution(Layer):
    """What convolutions share: a kernel that moves over some axes, a bias, and an activation."""

    axes = "HW"  # that the kernel moves over

    def _find_window(
        self, kernel_size: Any, strides: Any, padding: Any, data_format: Any, dilation_rate: Any
    ) -> None:
        """Checks and keeps what says where the kernel goes."""
        layer = type(self).__name__
        find_sizes = spatial.find_one if len(self.axes) == 1 else spatial.find_pair
        self.kernel_size = find_sizes(layer, "kernel_size", kernel_size)
        self.strides = find_sizes(layer, "strides", strides)
        self.dilation_rate = find_sizes(layer, "dilation_rate", dilation_rate)
        self.padding = spatial.find_padding(layer, padding)
        spatial.check_data_format(layer, data_format)

    def _find_rest(
        self, activation: ActivationFunction, use_bias: Any, kernel_initializer: Any, bias_initializer: Any
    ) -> None:
        """Checks and keeps what says what is done with it."""
        self.use_bias = check_flag(type(self).__name__, "use_bias", use_bias)
        self._activation = find_activation(activation)
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._bias_initializer = find_initializer(bias_initializer)

    @property
    def _reach(self) -> tuple[int, ...]:
        """How far the kernel reaches along each axis."""
        sizes = zip(self.kernel_size, self.dilation_rate, strict=True)
        return tuple((size - 1) * rate + 1 for size, rate in sizes)

    @property
    def _dimensions(self) -> tuple[str, str, str]:
        """What the axes of inputs, kernel and outputs are, as JAX calls them."""
        return f"N{self.axes}C", f"{self.axes}IO", f"N{self.axes}C"

    def _find_filters(self, filters: Any, groups: Any) -> None:
        """Checks and keeps two arguments."""
        layer = type(self).__name__
        self.filters = check_positive_integer(layer, "filters", filters)
        self.groups = check_positive_integer(layer, "groups", groups)
        if self.filters % self.groups:
            raise ValueError(f"{layer}: groups must divide filters; got {groups=} and {filters=}.")

    def _grouped_kernel(self, inputs: jax.Array) -> jax.Array:
        """The variable `kernel` of a convolution of `groups` groups of channels."""
        channels = inputs.shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self._full_name()}: groups must divide the channels of the inputs; got "
                f"groups={self.groups} and inputs of shape {inputs.shape}."
            )
        shape = (*self.kernel_size, channels // self.groups, self.filters)
        return self._own_variable("kernel", shape, self._kernel_initializer)

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
            outputs = self._add_bias(outputs, self._bias_initializer)
        return self._activation(outputs)


class Conv2D(_Convolution):
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
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
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
          dtype: of the computation and the outputs; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype, param_dtype, trainable)
        self._find_window(kernel_size, strides, padding, data_format, dilation_rate)
        self._find_rest(activation, use_bias, kernel_initializer, bias_initializer)
        self._find_filters(filters, groups)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        spatial.check_images(self._full_name(), inputs, self._reach, self.padding)
        kernel = self._grouped_kernel(inputs)
        return self._finish(self._convolve(inputs, kernel, self.padding.upper(), self.groups))


class Conv1D(_Convolution):
    """`activation(convolution of inputs with kernel + bias)`, over one axis.

    Inputs are [batch, length, channels].
    """

    kind = "conv1d"
    axes = "W"

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
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
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
          dtype: of the computation and the outputs; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          ValueError: an argument is not usable.
        """
        is_causal = isinstance(padding, str) and padding.lower() == "causal"
        super().__init__(name, dtype, param_dtype, trainable)
        padding = "valid" if is_causal else padding
        self._find_window(kernel_size, strides, padding, data_format, dilation_rate)
        self._find_rest(activation, use_bias, kernel_initializer, bias_initializer)
        self._find_filters(filters, groups)
        if is_causal:
            self.padding = "causal"

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


class DepthwiseConv2D(_Convolution):
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
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
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
          dtype: of the computation and the outputs; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name, dtype, param_dtype, trainable)
        self._find_window(kernel_size, strides, padding, data_format, dilation_rate)
        self._find_rest(activation, use_bias, depthwise_initializer, bias_initializer)
        self.depth_multiplier = check_positive_integer(
            "DepthwiseConv2D", "depth_multiplier", depth_multiplier
        )

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        spatial.check_images(self._full_name(), inputs, self._reach, self.padding)
        channels = inputs.shape[-1]
        shape = (*self.kernel_size, channels, self.depth_multiplier)
        kernel = self._own_variable("depthwise_kernel", shape, self._kernel_initializer)
        kernel = kernel.reshape(*self.kernel_size, 1, channels * self.depth_multiplier)
        return self._finish(self._convolve(inputs, kernel, self.padding.upper(), channels))


class Conv2DTranspose(_Convolution):
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
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
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
          dtype: of the computation and the outputs; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          NotImplementedError: `output_padding` is given.
          ValueError: an argument is not usable.
        """
        layer = "Conv2DTranspose"
        if output_padding is not None:
            raise NotImplementedError(
                f"{layer}: output_padding must be None, for the usual sizes; got {output_padding!r}. "
                "jnp.pad makes images larger."
            )
        super().__init__(name, dtype, param_dtype, trainable)
        self._find_window(kernel_size, strides, padding, data_format, 1)
        self._find_rest(activation, use_bias, kernel_initializer, bias_initializer)
        self.filters = check_positive_integer(layer, "filters", filters)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        inputs = self._as_own_dtype(inputs)
        spatial.check_images(self._full_name(), inputs, (1, 1), "same")
        shape = (*self.kernel_size, self.filters, inputs.shape[-1])
        outputs: jax.Array = jax.lax.conv_transpose(
            inputs,
            self._own_variable("kernel", shape, self._kernel_initializer),
            self.strides,
            self.padding.upper(),
            dimension_numbers=self._dimensions,
            transpose_kernel=True,
        )
        return self._finish(outputs)
