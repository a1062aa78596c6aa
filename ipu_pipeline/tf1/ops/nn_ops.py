"""Activations as functions, as Graphcore's `ipu.nn_ops` has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.graphcore.importing import explain_missing

__all__ = ["gelu", "hard_sigmoid"]


def gelu(x: Any, approximate: bool = True, name: str | None = None) -> jax.Array:
    """GELU: x times the normal distribution's probability of less than x (arXiv:1606.08415).

    Example:
      >>> ipu.nn_ops.gelu(np.array([-1, 0, 1], np.float32))
      Array([-0.1588..., 0. , 0.8411...], dtype=float32)

    Args:
      x: floating-point numbers, of any shape.
      approximate: True, as on IPUs: by tanh; False: by erf, as in `layers.Activation("gelu")`.
      name: the name of an operation in TensorFlow; not used here.

    Raises:
      TypeError: `approximate` is neither True nor False.
    """
    del name
    if not isinstance(approximate, bool):
        raise TypeError(
            f"gelu: approximate must be True or False; got {approximate!r}. The first SDKs had name "
            "second: pass it as name=."
        )
    return jax.nn.gelu(jnp.asarray(x), approximate=approximate)


def hard_sigmoid(x: Any, name: str | None = None) -> jax.Array:
    """Returns 0.2 x + 0.5, clipped to 0 and 1, as in Keras.

    Example:
      >>> ipu.nn_ops.hard_sigmoid(np.array([-5, 0, 1], np.float32))
      Array([0. , 0.5, 0.7], dtype=float32)

    Args:
      x: floating-point numbers, of any shape.
      name: the name of an operation in TensorFlow; not used here.
    """
    del name
    x = jnp.asarray(x)
    return jnp.clip(x * jnp.asarray(0.2, x.dtype) + jnp.asarray(0.5, x.dtype), 0, 1)


explain_missing(__name__)
