"""`import popart` under `ipu-pipeline run`: the enumerations that programs for PopTorch use in options.

Names and numbers are those of PopART 3.3's public headers, sessionoptions.hpp and tensorlocation.hpp.
"""

import enum
import sys

_MEMBERS = {
    "AccumulateOuterFragmentSchedule": "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized",
    "BatchSerializationBatchSchedule": "Scheduler Isomorphic OverlapOnIo OverlapOnCompute",
    "BatchSerializationMethod": "UnrollDynamic UnrollStatic Loop",
    "BatchSerializationTransformContext": "Fwd Bwd",
    "ExecutionPhaseIOSchedule": "Preload OnDemand",
    "ExecutionPhaseSchedule": "Interleaving Batch BatchClusteredIO",
    "Instrumentation": "Outer Inner",
    "MeanReductionStrategy": "Running Post",
    "MergeVarUpdateType": "Off All AutoLoose AutoTight",
    "PatternsLevel": "NoPatterns Minimal Default All",
    "RecomputationType": "NoRecompute Standard NormOnly Pipeline RecomputeAll",
    "ReductionType": "Sum Mean NoReduction",
    "ReplicatedTensorSharding": "Off On",
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    "SyncPattern": "Full SinglePipeline ReplicaAndLadder",
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    "TensorStorage": "OffChip OnChip",
    "TileSet": "Compute IO",
    "VirtualGraphMode": "Off Manual Auto ExecutionPhases",
}
__all__ = [*_MEMBERS]
globals().update({name: enum.IntEnum(name, text, start=0) for name, text in _MEMBERS.items()})


def __getattr__(name: str) -> object:
    raise AttributeError(f"popart.{name} is not here.", name=name, obj=sys.modules[__name__])
