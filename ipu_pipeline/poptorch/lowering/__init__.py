"""Computes core ATen operations of torch by jax.numpy.

There is one module for each family of operations. Importing them fills the registry.
"""

from ipu_pipeline.poptorch.lowering import (
    activations,
    creation,
    indexing,
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
from ipu_pipeline.poptorch.lowering.mathematics import (
    bessel_functions,
    complex_numbers,
    factorizations,
    fourier,
    linear_algebra,
    special_functions,
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
    "bessel_functions",
    "calls",
    "complex_numbers",
    "convolutions",
    "creation",
    "ctc",
    "describe_unsupported",
    "distances",
    "embeddings",
    "factorizations",
    "find_lowering",
    "find_unsupported",
    "fourier",
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
    "special_functions",
]
