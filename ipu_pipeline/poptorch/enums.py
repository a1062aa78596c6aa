"""PopTorch's enumerations, by its names and values."""

from __future__ import annotations

import enum

__all__ = [
    "AnchorMode",
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class OutputMode(enum.IntEnum):
    """Which of a call's outputs are returned.

    Attributes:
      Final: those of the last micro-batch.
      EveryN: those of every N-th micro-batch.
      All: those of all micro-batches.
      Sum: their sums over the micro-batches.
      Default: `Final` in training, `All` in inference.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode  # as PopTorch called it at first


class HalfFloatCastingBehavior(enum.IntEnum):
    """In which type float16 and float32 meet. Here they meet as torch has them, in float32.

    Attributes:
      FloatDowncastToHalf: in float16.
      HalfUpcastToFloat: in float32.
      Default: as PopTorch does by itself.
    """

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How gradients of several micro-batches, and of several replicas, become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.IntEnum):
    """When the sum of gradients is divided: as it grows, or at the end."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """Where a `DataLoader` makes batches: in this process, or in another one."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How batches come from another process."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.IntEnum):
    """When a model takes its devices."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(enum.IntEnum):
    """How IPUs wait for each other; without a meaning here."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AutoStage(enum.IntEnum):
    """How blocks without a stage become stages: one for each IPU, or each the next."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(enum.IntEnum):
    """When tensors of a phase are off the device."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class CommGroupType(enum.IntEnum):
    """Which replicas make a group."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """From which replicas of a group a variable is read."""

    OnePerGroup = 0
    AllReplicas = 2


class MultiConvPlanType(enum.IntEnum):
    """How the convolutions of a `MultiConv` run."""

    Parallel = 0
    Serial = 1


class MatMulSerializationMode(enum.Enum):
    """Along which dimension a matrix product is done in parts."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(enum.Enum):
    """With what the transfer of an input or output overlaps."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"
