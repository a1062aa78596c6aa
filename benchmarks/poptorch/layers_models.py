"""The same models by `ipu.layers`, as stages for `pipelining_ops.pipeline`, with torch's weights.

Activations have channels last. Kernels of dense layers are torch's, transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from benchmarks.poptorch.models import NUM_HEADS

__all__ = ["STAGES", "Weights", "as_array"]

Weights = Mapping[str, np.ndarray[Any, Any]]
Stage = Callable[..., Any]


def as_array(tensor: Any) -> np.ndarray[Any, Any]:
    """What these models take for a tensor: images with channels last, integers of 32 bits."""
    array: np.ndarray[Any, Any] = tensor.numpy()
    if array.ndim == 4:
        array = np.ascontiguousarray(np.moveaxis(array, 1, -1))
    return array.astype(np.int32) if array.dtype.kind == "i" else array


def _constant(value: Any) -> Callable[..., Any]:
    """An initializer."""

    def initial(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        del key
        assert value.shape == shape, (value.shape, shape)
        return jnp.asarray(value, dtype)

    return initial


def _dense(weights: Weights, name: str, activation: Any = None, kernel: Any = None) -> ipu.layers.Dense:
    kernel = weights[f"{name}.weight"].T if kernel is None else kernel
    return ipu.layers.Dense(
        kernel.shape[1],
        activation,
        kernel_initializer=_constant(kernel),
        bias_initializer=_constant(weights[f"{name}.bias"]),
    )


def _convolution(weights: Weights, name: str) -> ipu.layers.Conv2D:
    kernel = weights[f"{name}.weight"].transpose(2, 3, 1, 0)
    return ipu.layers.Conv2D(
        kernel.shape[-1],
        kernel.shape[:2],
        kernel_initializer=_constant(kernel),
        bias_initializer=_constant(weights[f"{name}.bias"]),
    )


def _loss(logits: Any, labels: Any) -> tuple[Any, Any]:
    """What the last stage returns: all that torch's model does."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), logits


def make_mnist_stages(weights: Weights) -> list[Stage]:
    """As `models.make_mnist_stages`."""

    def convolve(stage: int) -> Stage:
        def stage_function(images: Any, labels: Any) -> Any:
            images = _convolution(weights, f"stages.{stage}.0")(images)
            return jax.nn.relu(ipu.layers.MaxPooling2D(2)(images)), labels

        return stage_function

    def hidden(images: Any, labels: Any) -> Any:
        kernel = weights["stages.2.1.weight"].reshape(-1, 20, 4, 4)  # torch flattens with channels first
        kernel = kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))
        flat = ipu.layers.Flatten()(images)
        return _dense(weights, "stages.2.1", "relu", kernel)(flat), labels

    def last(x: Any, labels: Any) -> Any:
        return _loss(_dense(weights, "stages.3.0")(x), labels)

    return [convolve(0), convolve(1), hidden, last]


def make_mlp_stages(weights: Weights) -> list[Stage]:
    """As `models.make_mlp_stages`."""

    def dense(stage: int) -> Stage:
        def stage_function(x: Any, labels: Any) -> Any:
            for layer in (0, 2):
                x = _dense(weights, f"stages.{stage}.{layer}", "relu")(x)
            return x, labels

        return stage_function

    def last(x: Any, labels: Any) -> Any:
        return _loss(*dense(3)(x, labels))

    return [dense(0), dense(1), dense(2), last]


def make_transformer_stages(weights: Weights) -> list[Stage]:
    """As `models.make_transformer_stages`."""

    def normalize(name: str, x: Any) -> Any:
        return ipu.layers.LayerNormalization(
            epsilon=1e-5,
            gamma_initializer=_constant(weights[f"{name}.weight"]),
            beta_initializer=_constant(weights[f"{name}.bias"]),
        )(x)

    def attend(name: str, x: Any) -> Any:
        own = {
            f"{name}.in.{kind}": weights[f"{name}.self_attn.in_proj_{kind}"] for kind in ("weight", "bias")
        }
        batch, length, width = x.shape
        joined = _dense(own, f"{name}.in")(x).reshape(batch, length, 3, NUM_HEADS, width // NUM_HEADS)
        query, key, value = (joined[:, :, place].transpose(0, 2, 1, 3) for place in range(3))
        scores = query @ key.transpose(0, 1, 3, 2) * (width // NUM_HEADS) ** -0.5
        attended = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        return _dense(weights, f"{name}.self_attn.out_proj")(attended)

    def encode(name: str, x: Any) -> Any:
        x = x + attend(name, normalize(f"{name}.norm1", x))
        wide = _dense(weights, f"{name}.linear1", "gelu")(normalize(f"{name}.norm2", x))
        return x + _dense(weights, f"{name}.linear2")(wide)

    def first(tokens: Any, labels: Any) -> Any:
        rows, places = weights["stages.0.0.tokens.weight"], weights["stages.0.0.places"]
        x = ipu.layers.Embedding(*rows.shape, embeddings_initializer=_constant(rows))(tokens)
        x = x + ipu.get_variable("places", places.shape, places.dtype, _constant(places))
        return encode("stages.0.1", x), labels

    def middle(stage: int) -> Stage:
        return lambda x, labels: (encode(f"stages.{stage}.0", x), labels)

    def last(x: Any, labels: Any) -> Any:
        x = normalize("stages.3.1", encode("stages.3.0", x))
        return _loss(_dense(weights, "stages.3.2")(x), labels)

    return [first, middle(1), middle(2), last]


STAGES: Mapping[str, Callable[[Weights], list[Stage]]] = {
    "mnist_cnn": make_mnist_stages,
    "mlp": make_mlp_stages,
    "transformer": make_transformer_stages,
}
