"""Keras-like layers: objects that are called on activations within a stage.

Arguments, defaults and variable names are those of Keras, with channels last. The numerics are those of
`jax.nn` and `jax.lax`.
"""

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.tf1.layers.base import Layer
from ipu_pipeline.tf1.layers.core import (
    Activation,
    BatchNormalization,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    GroupNormalization,
    LayerNormalization,
)
from ipu_pipeline.tf1.layers.flax_adapter import Flax
from ipu_pipeline.tf1.layers.recurrent import GRU, LSTM
from ipu_pipeline.tf1.layers.windows import (
    AveragePooling2D,
    Conv1D,
    Conv2D,
    Conv2DTranspose,
    DepthwiseConv2D,
    GlobalAveragePooling2D,
    MaxPooling2D,
)

__all__ = [
    "GRU",
    "LSTM",
    "Activation",
    "AveragePooling2D",
    "BatchNormalization",
    "Conv1D",
    "Conv2D",
    "Conv2DTranspose",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "Flatten",
    "Flax",
    "GlobalAveragePooling2D",
    "GroupNormalization",
    "Layer",
    "LayerNormalization",
    "MaxPooling2D",
]

explain_missing(__name__)
