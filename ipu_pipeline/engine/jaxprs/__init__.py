"""Jaxprs as data: flattened, sliced, counted, partitioned.

`flat` says which functions rewrite equations and which trace them again.
"""

from ipu_pipeline.engine.jaxprs.cpu_forms import turn_products
from ipu_pipeline.engine.jaxprs.flat import (
    CHECKPOINTS,
    Atom,
    EquationRule,
    ExtractedJaxpr,
    FlatJaxpr,
    InlineFunction,
    any_equation,
    aval_struct,
    calls_back,
    can_reduce,
    close,
    dependents,
    extract,
    find_uniform,
    flatten,
    has_callbacks,
    has_primitive,
    is_inlined,
    lift_captures,
    map_atoms,
    reduce,
    substitute,
    take_out_constants,
)
from ipu_pipeline.engine.jaxprs.halves import find_computed, find_kept, take_apart
from ipu_pipeline.engine.jaxprs.meshes import (
    find_collectives,
    find_other_devices,
    has_shard_map,
    uses_mesh,
    without_mesh,
)
from ipu_pipeline.engine.jaxprs.rewrites import Unrolled, join_losses, unroll_layers

__all__ = [
    "CHECKPOINTS",
    "Atom",
    "EquationRule",
    "ExtractedJaxpr",
    "FlatJaxpr",
    "InlineFunction",
    "Unrolled",
    "any_equation",
    "aval_struct",
    "calls_back",
    "can_reduce",
    "close",
    "dependents",
    "extract",
    "find_collectives",
    "find_computed",
    "find_kept",
    "find_other_devices",
    "find_uniform",
    "flatten",
    "has_callbacks",
    "has_primitive",
    "has_shard_map",
    "is_inlined",
    "join_losses",
    "lift_captures",
    "map_atoms",
    "reduce",
    "substitute",
    "take_apart",
    "take_out_constants",
    "turn_products",
    "unroll_layers",
    "uses_mesh",
    "without_mesh",
]
