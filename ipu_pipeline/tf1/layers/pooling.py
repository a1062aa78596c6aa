"""The largest value, or the mean, in windows over height and width."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.tf1.layers import spatial
from ipu_pipeline.tf1.layers.base import Layer, at_least_float32, check_flag

__all__ = ["AveragePooling2D", "GlobalAveragePooling2D", "MaxPooling2D"]


class _Pooling2D(Layer):
    """What the two share: a window, how far it moves, and padding."""

    def __init__(
        self,
        pool_size: spatial.Pair = (2, 2),
        strides: spatial.Pair | None = None,
        padding: str = "valid",
        data_format: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Describes the layer; it has no variables and keeps the dtype, a floating-point one.

        Args:
          pool_size: the height and width of the window, or one integer for both.
          strides: how far the window moves along height and width; None: `pool_size`.
          padding: "valid" (windows that do not fit are left out), or "same": windows may reach over the
            edges, so that the outputs have the size of the inputs divided by the strides and rounded up.
            What lies outside of the inputs does not count.
          data_format: only "channels_last", which None stands for.
          name: the layer's scope.

        Raises:
          ValueError: an argument is not usable.
        """
        super().__init__(name)
        layer = type(self).__name__
        self.pool_size = spatial.find_pair(layer, "pool_size", pool_size)
        self.strides = self.pool_size if strides is None else spatial.find_pair(layer, "strides", strides)
        self.padding = spatial.find_padding(layer, padding)
        spatial.check_data_format(layer, data_format)

    def _check(self, inputs: jax.Array) -> None:
        self._check_floating(inputs)
        spatial.check_images(self._full_name(), inputs, self.pool_size, self.padding)

    def _reduce(self, inputs: jax.Array, start: float, operation: Any) -> jax.Array:
        """Reduces the windows of [batch, height, width, channels].

        Args:
          inputs: the inputs.
          start: the value that changes no result of the operation; JAX differentiates the reduction if
            this is a constant.
          operation: `jax.lax.max` or `jax.lax.add`.

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

    The gradient goes to the largest value, among equal ones to the first.
    """

    kind = "max_pooling2d"

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check(inputs)
        return self._reduce(inputs, -np.inf, jax.lax.max)


class AveragePooling2D(_Pooling2D):
    """The mean of each window of [batch, height, width, channels].

    With padding "same" it is the mean of those of the window's values that lie within the inputs. Sums
    are at least in float32.
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


class GlobalAveragePooling2D(Layer):
    """The mean over height and width of [batch, height, width, channels]. Sums are at least in float32."""

    kind = "global_average_pooling2d"

    def __init__(
        self, data_format: str | None = None, keepdims: bool = False, *, name: str | None = None
    ) -> None:
        """Describes the layer; it has no variables and keeps the dtype, a floating-point one.

        Args:
          data_format: only "channels_last", which None stands for.
          keepdims: whether outputs are [batch, 1, 1, channels], and not [batch, channels].
          name: the layer's scope.

        Raises:
          ValueError: the data_format is another one.
        """
        super().__init__(name)
        spatial.check_data_format("GlobalAveragePooling2D", data_format)
        self.keepdims = check_flag("GlobalAveragePooling2D", "keepdims", keepdims)

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check_floating(inputs)
        spatial.check_images(self._full_name(), inputs, (1, 1), "valid")
        wide = inputs.astype(at_least_float32(inputs.dtype))
        return jnp.mean(wide, (1, 2), keepdims=self.keepdims).astype(inputs.dtype)
