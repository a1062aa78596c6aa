"""Core ATen operations of torch as jax.numpy.

One module for each family of operations; importing them fills the registry.
"""

from ipu_pipeline.poptorch.lowering import (
    activations,
    creation,
    indexing,
    linear_algebra,
    pointwise,
    random_numbers,
    reductions,
    shapes,
    sorting,
)
from ipu_pipeline.poptorch.lowering.interpreter import describe_unsupported, find_unsupported, run_node
from ipu_pipeline.poptorch.lowering.layers import (
    attention,
    average_pooling,
    convolutions,
    ctc,
    distances,
    embeddings,
    grids,
    linear_cross_entropy,
    losses,
    max_pooling,
    normalizations,
    padding,
    recurrent,
    resampling,
)
from ipu_pipeline.poptorch.lowering.operations import calls, marks, products, slicing
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
    "calls",
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
    "linear_cross_entropy",
    "losses",
    "lowers",
    "marks",
    "max_pooling",
    "normalizations",
    "padding",
    "pointwise",
    "products",
    "random_numbers",
    "recurrent",
    "reductions",
    "register_lowering",
    "resampling",
    "run_node",
    "shapes",
    "slicing",
    "sorting",
]
