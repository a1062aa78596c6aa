"""The convolution over height and width."""

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

__all__ = ["Conv2D"]


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
