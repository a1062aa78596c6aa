"""PopTorch on JAX devices: `import ipu_pipeline.poptorch as poptorch`.

A torch module whose forward says by blocks which IPU computes what is wrapped by `trainingModel` or
`inferenceModel`, and runs as a pipeline. It needs torch.
"""

try:
    import torch  # noqa: F401  # to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ipu_pipeline.poptorch needs torch, which is not installed. Install the extra: "
        "pip install 'ipu_pipeline[torch]', which takes torch 2.13."
    ) from error

from ipu_pipeline.poptorch import enums, optim, options, profiling
from ipu_pipeline.poptorch.annotations import BeginBlock, Block, BlockFunction, module_repr, removeBlocks
from ipu_pipeline.poptorch.data import AsynchronousDataAccessor, DataLoader
from ipu_pipeline.poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from ipu_pipeline.poptorch.errors import Error, RecoverableError, UnrecoverableError
from ipu_pipeline.poptorch.execution.executor import PoplarExecutor
from ipu_pipeline.poptorch.execution.hooks import registerPostCompileHook, registerPreCompileHook
from ipu_pipeline.poptorch.execution.wrapping import inferenceModel, trainingModel
from ipu_pipeline.poptorch.logs import setLogLevel
from ipu_pipeline.poptorch.lowering.registry import register_lowering
from ipu_pipeline.poptorch.operations import (
    identity_loss,
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
    nop,
)
from ipu_pipeline.poptorch.options import ConfigFileError, Options, TensorLocationSettings
from ipu_pipeline.poptorch.options.phased import ParallelPhasedExecution, SerialPhasedExecution
from ipu_pipeline.poptorch.options.stages import Phase, Stage
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, ShardedExecution
from ipu_pipeline.poptorch.structures import ICustomArgParser, registerCustomArgParser

__all__ = [
    "AsynchronousDataAccessor",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "enums",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "module_repr",
    "nop",
    "optim",
    "options",
    "profiling",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_lowering",
    "removeBlocks",
    "setLogLevel",
    "trainingModel",
]
