"""Computes core ATen operations of torch by jax.numpy.

There is one module for each family of operations. Importing them fills the registry.
"""

from ipu_pipeline.poptorch.lowering import (
    indexing,
    layers,
    linear_algebra,
    losses,
    pointwise,
    pooling,
    poptorch_operations,
    random_numbers,
    recurrent_layers,
    reductions,
    resampling,
    shapes,
    sorting,
    special_functions,
)
from ipu_pipeline.poptorch.lowering.interpreter import describe_unsupported, find_unsupported, run_node
from ipu_pipeline.poptorch.lowering.registry import (
    find_lowering,
    kept_operations,
    lowers,
    register_lowering,
)

__all__ = [
    "describe_unsupported",
    "find_lowering",
    "find_unsupported",
    "indexing",
    "kept_operations",
    "layers",
    "linear_algebra",
    "losses",
    "lowers",
    "pointwise",
    "pooling",
    "poptorch_operations",
    "random_numbers",
    "recurrent_layers",
    "reductions",
    "register_lowering",
    "resampling",
    "run_node",
    "shapes",
    "sorting",
    "special_functions",
]
