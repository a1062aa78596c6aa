"""PopTorch's enumerations, with its names and values."""

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
    """The micro-batches whose outputs a call returns.

    Attributes:
      Final: the outputs of the last micro-batch.
      EveryN: the outputs of every N-th micro-batch.
      All: the outputs of all micro-batches.
      Sum: the sums of the outputs over the micro-batches.
      Default: `Final` in training, `All` in inference.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode  # PopTorch's first name for it


class HalfFloatCastingBehavior(enum.IntEnum):
    """The dtype of operations on float16 with float32. Here it is float32, as in torch.

    Attributes:
      FloatDowncastToHalf: float16.
      HalfUpcastToFloat: float32.
      Default: PopTorch's default.
    """

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """The reduction of gradients over micro-batches and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.IntEnum):
    """The time of division in a mean of gradients: during accumulation, or at the end."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """The process in which a `DataLoader` makes batches: this one, or another one."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """The way in which batches come from another process."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.IntEnum):
    """The time at which a model takes its devices."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(enum.IntEnum):
    """The synchronization of IPUs. It has no effect here."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AutoStage(enum.IntEnum):
    """The way in which blocks become stages: one stage per IPU, or one per block."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(enum.IntEnum):
    """The time at which tensors of a phase are off the device."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class CommGroupType(enum.IntEnum):
    """The grouping of replicas."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """The replicas of a group that a variable is read from."""

    OnePerGroup = 0
    AllReplicas = 2


class MultiConvPlanType(enum.IntEnum):
    """The way in which the convolutions of a `MultiConv` run."""

    Parallel = 0
    Serial = 1


class MatMulSerializationMode(enum.Enum):
    """The dimension along which a matrix product is computed in parts."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(enum.Enum):
    """The computation that the transfer of an input or output overlaps with."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"
