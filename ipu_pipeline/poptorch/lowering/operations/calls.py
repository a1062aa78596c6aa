"""What is computed elsewhere: searches, functions of the host, operations of the user's."""

from __future__ import annotations

from typing import Any

import jax

from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations import host_functions
from ipu_pipeline.poptorch.operations.beam_search import beam_search
from ipu_pipeline.poptorch.operations.ctc_decoding import DECODE
from ipu_pipeline.poptorch.operations.custom_ops import CUSTOM, CustomCall
from ipu_pipeline.poptorch.operations.host_calls import HOST_CALL

__all__: list[str] = []


@lowers(DECODE)
def _decode(probs: Array, lengths: Array, blank: int, beam_width: int, top_paths: int) -> Any:
    probs = widen(jax.lax.stop_gradient(probs))
    return beam_search(probs, lengths, blank, beam_width, top_paths)


@lowers(HOST_CALL)
def _call_host(inputs: list[Array], key: str) -> list[Array]:
    return host_functions.call_from_device(key, inputs)


@lowers(CUSTOM)
def _call_custom(inputs: list[Array], key: str, results: str, attributes: str) -> list[Array]:
    return CustomCall.read(key, results, attributes).compute(inputs)
