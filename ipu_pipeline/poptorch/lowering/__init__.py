"""Core ATen operations of torch as jax.numpy.

One module for each family of operations; importing them fills the registry.
"""

from ipu_pipeline.poptorch.lowering import (
    activations,
    attention,
    average_pooling,
    convolutions,
    creation,
    ctc,
    distances,
    embeddings,
    grids,
    indexing,
    linear_algebra,
    losses,
    max_pooling,
    normalizations,
    padding,
    pointwise,
    random_numbers,
    recurrent,
    reductions,
    resampling,
    shapes,
    sorting,
)
from ipu_pipeline.poptorch.lowering.interpreter import describe_unsupported, find_unsupported, run_node
from ipu_pipeline.poptorch.lowering.registry import (
    find_lowering,
    kept_operations,
    lowers,
    register_lowering,
)

__all__ = [
    "activations",
    "attention",
    "average_pooling",
    "convolutions",
    "creation",
    "ctc",
    "describe_unsupported",
    "distances",
    "embeddings",
    "find_lowering",
    "find_unsupported",
    "grids",
    "indexing",
    "kept_operations",
    "linear_algebra",
    "losses",
    "lowers",
    "max_pooling",
    "normalizations",
    "padding",
    "pointwise",
    "random_numbers",
    "recurrent",
    "reductions",
    "register_lowering",
    "resampling",
    "run_node",
    "shapes",
    "sorting",
]
