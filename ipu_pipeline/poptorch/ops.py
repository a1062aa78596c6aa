"""`poptorch.ops`: PopTorch's operations, which are also in `poptorch` itself."""

from __future__ import annotations

from ipu_pipeline.poptorch.annotations import BeginBlock, Block, BlockFunction, removeBlocks
from ipu_pipeline.poptorch.operations.control_flow import cond, dynamic_slice, dynamic_update, for_loop
from ipu_pipeline.poptorch.operations.ctc_decoding import ctc_beam_search_decoder
from ipu_pipeline.poptorch.operations.custom_ops import custom_op
from ipu_pipeline.poptorch.operations.hints import (
    Attribute,
    NameScope,
    identity_loss,
    nop,
    recomputationCheckpoint,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipu_pipeline.poptorch.operations.host_calls import CPU
from ipu_pipeline.poptorch.operations.printing import ipu_print_tensor
from ipu_pipeline.poptorch.operations.products import MultiConv, SerializedLinear, serializedMatMul

__all__ = [
    "CPU",
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "MultiConv",
    "NameScope",
    "SerializedLinear",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "identity_loss",
    "ipu_print_tensor",
    "nop",
    "recomputationCheckpoint",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
