"""Jaxprs as data: flattened, sliced, counted, partitioned.

`flat` says which functions rewrite equations and which trace them again.
"""

from ipu_pipeline.engine.jaxprs.flat import (
    CHECKPOINTS,
    Atom,
    EquationRule,
    ExtractedJaxpr,
    FlatJaxpr,
    InlineFunction,
    aval_struct,
    calls_back,
    close,
    flatten,
    has_callbacks,
    has_primitive,
    is_inlined,
    lift_captures,
    map_atoms,
    substitute,
    take_out_constants,
)
from ipu_pipeline.engine.jaxprs.halving import find_computed, find_kept, take_apart
from ipu_pipeline.engine.jaxprs.meshes import (
    find_collectives,
    find_other_devices,
    has_shard_map,
    uses_mesh,
    without_mesh,
)
from ipu_pipeline.engine.jaxprs.several_losses import join_losses
from ipu_pipeline.engine.jaxprs.slicing import (
    any_equation,
    can_reduce,
    dependents,
    extract,
    find_uniform,
    reduce,
)
from ipu_pipeline.engine.jaxprs.turning import turn_products
from ipu_pipeline.engine.jaxprs.unrolling import Unrolled, unroll_layers

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
