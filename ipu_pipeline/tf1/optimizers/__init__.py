"""Optimizers around Optax transformations, and TensorFlow 1's."""

from ipu_pipeline.engine import with_metrics
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.optimizers import tf1
from ipu_pipeline.tf1.optimizers.wrappers import (
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    LossScalingOptimizer,
    MapGradientOptimizer,
    OutfeedOptimizer,
    OutfeedOptimizerMode,
    with_averaged_weights,
)

__all__ = [
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
    "LossScalingOptimizer",
    "MapGradientOptimizer",
    "OutfeedOptimizer",
    "OutfeedOptimizerMode",
    "tf1",
    "with_averaged_weights",
    "with_metrics",
]

explain_missing(__name__)
