"""PopTorch on JAX devices: `import ipu_pipeline.poptorch as poptorch`.

`trainingModel` and `inferenceModel` wrap a torch module, whose forward assigns its parts to IPUs by blocks,
and run it as a pipeline. The package needs torch.

Names are imported when they are first used, because processes that load data import the package and need
little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ipu_pipeline.ground.lazy_initialization import import_later
from ipu_pipeline.ground.user_warnings import warn_of_untested

try:
    import safetensors  # noqa: F401  # checked to name what is missing
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ipu_pipeline.poptorch needs {error.name}, which is not installed. Install the extra: "
        "pip install 'ipu_pipeline[torch]'."
    ) from error

warn_of_untested("torch", torch.__version__)

if TYPE_CHECKING:
    from ipu_pipeline.poptorch import autocasting, enums, ops, optim, options, profiling
    from ipu_pipeline.poptorch.annotations import (
        BeginBlock,
        Block,
        BlockFunction,
        module_repr,
        removeBlocks,
    )
    from ipu_pipeline.poptorch.data import AsynchronousDataAccessor, DataLoader
    from ipu_pipeline.poptorch.enums import (
        AnchorMode,
        AutoStage,
        CommGroupType,
        ConnectionType,
        DataLoaderMode,
        HalfFloatCastingBehavior,
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
    from ipu_pipeline.poptorch.execution.instrumentation import (
        registerPostCompileHook,
        registerPreCompileHook,
    )
    from ipu_pipeline.poptorch.execution.wrappers import inferenceModel, load, trainingModel
    from ipu_pipeline.poptorch.logs import setLogLevel
    from ipu_pipeline.poptorch.lowering.registry import register_lowering
    from ipu_pipeline.poptorch.operations.control_flow import cond, dynamic_slice, dynamic_update, for_loop
    from ipu_pipeline.poptorch.operations.ctc_decoding import ctc_beam_search_decoder
    from ipu_pipeline.poptorch.operations.custom_ops import custom_op, register_custom_op
    from ipu_pipeline.poptorch.operations.hints import (
        Attribute,
        NameScope,
        identity_loss,
        ipuHardwareIsAvailable,
        ipuHardwareVersion,
        isRunningOnIpu,
        nop,
        recomputationCheckpoint,
        set_available_memory,
        set_overlap_for_input,
        set_overlap_for_output,
    )
    from ipu_pipeline.poptorch.operations.host_calls import CPU
    from ipu_pipeline.poptorch.operations.printing import ipu_print_tensor
    from ipu_pipeline.poptorch.operations.products import MultiConv, SerializedLinear, serializedMatMul
    from ipu_pipeline.poptorch.options import ConfigFileError, Options, TensorLocationSettings
    from ipu_pipeline.poptorch.options.strategies import (
        ParallelPhasedExecution,
        Phase,
        PipelinedExecution,
        SerialPhasedExecution,
        ShardedExecution,
        Stage,
    )
    from ipu_pipeline.poptorch.structures import ICustomArgParser, registerCustomArgParser

__all__ = [
    "CPU",
    "AnchorMode",
    "AsynchronousDataAccessor",
    "Attribute",
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
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
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
    "SerializedLinear",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "autocasting",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "module_repr",
    "nop",
    "ops",
    "optim",
    "options",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_custom_op",
    "register_lowering",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]

_find, _names = import_later(
    __name__,
    {
        "poptorch.annotations": "BeginBlock Block BlockFunction module_repr removeBlocks",
        "poptorch.data": "AsynchronousDataAccessor DataLoader",
        "poptorch.enums": (
            "AnchorMode AutoStage CommGroupType ConnectionType DataLoaderMode HalfFloatCastingBehavior "
            "Liveness MatMulSerializationMode MeanReductionStrategy MultiConvPlanType OutputMode "
            "OverlapMode ReductionType SharingStrategy SyncPattern VariableRetrievalMode"
        ),
        "poptorch.errors": "Error RecoverableError UnrecoverableError",
        "poptorch.execution.executor": "PoplarExecutor",
        "poptorch.execution.instrumentation": "registerPostCompileHook registerPreCompileHook",
        "poptorch.execution.wrappers": "inferenceModel load trainingModel",
        "poptorch.logs": "setLogLevel",
        "poptorch.lowering.registry": "register_lowering",
        "poptorch.operations.control_flow": "cond dynamic_slice dynamic_update for_loop",
        "poptorch.operations.ctc_decoding": "ctc_beam_search_decoder",
        "poptorch.operations.custom_ops": "custom_op register_custom_op",
        "poptorch.operations.hints": (
            "Attribute NameScope identity_loss ipuHardwareIsAvailable ipuHardwareVersion isRunningOnIpu "
            "nop recomputationCheckpoint set_available_memory set_overlap_for_input "
            "set_overlap_for_output"
        ),
        "poptorch.operations.host_calls": "CPU",
        "poptorch.operations.products": "MultiConv SerializedLinear serializedMatMul",
        "poptorch.operations.printing": "ipu_print_tensor",
        "poptorch.options": "ConfigFileError Options TensorLocationSettings",
        "poptorch.options.strategies": (
            "ParallelPhasedExecution Phase PipelinedExecution SerialPhasedExecution ShardedExecution Stage"
        ),
        "poptorch.structures": "ICustomArgParser registerCustomArgParser",
    },
)


_ABSENT = {
    "ReplicaGrouping": "parameters of a wrapped model have a method replicaGrouping",
    "fps": "torch_cluster has it; its operation needs poptorch.register_lowering",
}


_PRIVATE = ("_args_parser", "_impl", "_poplar_executor", "_utils")  # modules that programs take names from


def __getattr__(name: str) -> Any:
    if name in _PRIVATE:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")
    if name == "__version__":
        return importlib.import_module("ipu_pipeline").__version__
    return _find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
