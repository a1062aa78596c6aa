"""Optimizers around Optax transformations, and TensorFlow 1's."""

from ipu_pipeline.engine import with_metrics
from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.optimizers import tf1
from ipu_pipeline.tf1.optimizers.averaging import with_averaged_weights
from ipu_pipeline.tf1.optimizers.cross_replica_optimizer import CrossReplicaOptimizer
from ipu_pipeline.tf1.optimizers.gradient_accumulation_optimizer import (
    CrossReplicaGradientAccumulationOptimizerV2,
    GradientAccumulationOptimizerV2,
)
from ipu_pipeline.tf1.optimizers.map_gradient_optimizer import (
    MapGradientOptimizer,
    OutfeedOptimizer,
    OutfeedOptimizerMode,
)
from ipu_pipeline.tf1.optimizers.scaling import LossScalingOptimizer

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
