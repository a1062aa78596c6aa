"""Operations that are computed elsewhere: searches, functions of the host, operations of the user."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch.export.graph_signature import InputKind

from ipu_pipeline.poptorch.dtypes import to_numpy
from ipu_pipeline.poptorch.lowering.arrays import Array, widen
from ipu_pipeline.poptorch.lowering.interpreter import run_graph
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations import host_functions, own_backwards
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


@lowers(own_backwards.WITH_BACKWARD)
def _with_backward(results: list[Array], inputs: list[Array], kept: list[Array], key: str) -> list[Array]:
    own = own_backwards.find(key)
    if own.program is None:  # for inference
        return list(results)

    @jax.custom_vjp
    def give(results: list[Array], inputs: list[Array], kept: list[Array]) -> list[Array]:
        del inputs, kept
        return results

    def forward(results: list[Array], inputs: list[Array], kept: list[Array]) -> tuple[list[Array], Any]:
        return give(results, inputs, kept), kept

    def backward(kept: list[Array], gradients: list[Array]) -> tuple[Any, Any, Any]:
        given = [
            gradient if has_gradient else jnp.zeros(result.shape, result.dtype)
            for gradient, result, has_gradient in zip(gradients, results, own.differentiable, strict=True)
        ]
        return None, list(_run_program(own.program, [*kept, *given])), None

    give.defvjp(forward, backward)
    return give(list(results), list(inputs), list(kept))


def _run_program(program: Any, tensors: list[Array]) -> Any:
    left = iter(tensors)
    return run_graph(
        program.graph_module,
        *(
            next(left)
            if spec.kind is InputKind.USER_INPUT
            else jnp.asarray(to_numpy(program.constants[spec.target]))
            for spec in program.graph_signature.input_specs
        ),
    )
