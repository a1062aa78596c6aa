"""The largest value, or the mean, in windows over height and width."""

from __future__ import annotations

import math
from dataclasses import InitVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.tf1.layers import spatial
from ipu_pipeline.tf1.layers.arguments import argument, check_flag, optional, with_arguments
from ipu_pipeline.tf1.layers.base import PlainLayer, at_least_float32

__all__ = ["AveragePooling2D", "GlobalAveragePooling2D", "MaxPooling2D"]


@with_arguments
class _Pooling2D(spatial.Windowed, PlainLayer):
    """What the two share: a window, how far it moves, and padding."""

    pool_size: InitVar[spatial.Pair] = argument(
        "the height and width of the window, or one integer for both.", spatial.find_pair, default=(2, 2)
    )
    strides: InitVar[spatial.Pair | None] = argument(
        "how far the window moves along height and width; None: `pool_size`.",
        optional(spatial.find_pair),
        default=None,
    )
    padding: spatial.Padding = argument(
        '"valid" (windows that do not fit are left out), or "same": windows may reach over the edges, so '
        "that the outputs have the size of the inputs divided by the strides and rounded up. What lies "
        "outside of the inputs does not count.",
        spatial.find_padding,
        default="valid",
    )
    data_format: InitVar[str | None] = spatial.data_format()

    def _complete(self, given: dict[str, Any]) -> None:
        self.strides = given["strides"] or self.pool_size

    def _check(self, inputs: jax.Array) -> None:
        self._check_floating(inputs)
        spatial.check_images(self._full_name(), inputs, self.pool_size, self.padding)

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

    data_format: InitVar[str | None] = spatial.data_format()
    keepdims: bool = argument(
        "whether outputs are [batch, 1, 1, channels], and not [batch, channels].", check_flag, default=False
    )

    def _apply(self, inputs: jax.Array) -> jax.Array:
        self._check_floating(inputs)
        spatial.check_images(self._full_name(), inputs, (1, 1), "valid")
        wide = inputs.astype(at_least_float32(inputs.dtype))
        return jnp.mean(wide, (1, 2), keepdims=self.keepdims).astype(inputs.dtype)
