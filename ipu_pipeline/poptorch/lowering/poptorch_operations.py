"""Computes PopTorch's operations by JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from torch.export.graph_signature import InputKind

from ipu_pipeline import engine
from ipu_pipeline.poptorch.dtypes import to_numpy
from ipu_pipeline.poptorch.enums import MatMulSerializationMode
from ipu_pipeline.poptorch.lowering.arrays import Array, is_float, widen
from ipu_pipeline.poptorch.lowering.interpreter import run_graph
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations import host_calls, own_backwards
from ipu_pipeline.poptorch.operations.control_flow import SLICE, UPDATE
from ipu_pipeline.poptorch.operations.ctc_decoding import DECODE, beam_search
from ipu_pipeline.poptorch.operations.custom_ops import CUSTOM, CustomCall
from ipu_pipeline.poptorch.operations.host_calls import HOST_CALL
from ipu_pipeline.poptorch.operations.printing import PRINT, Layout, print_array
from ipu_pipeline.poptorch.operations.products import SERIALIZED

# Slices. One that does not fit begins earlier.


@lowers(SLICE, keep=True)
def _dynamic_slice(tensor: Array, dim: int, start: Array, size: int, step: int) -> Array:
    part = jax.lax.dynamic_slice_in_dim(tensor, start.reshape(()), size, dim)
    return jax.lax.slice_in_dim(part, 0, size, step, dim)


@lowers(UPDATE, keep=True)
def _dynamic_update(input: Array, src: Array, dim: int, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(input, src, start.reshape(()), dim)


# Scopes, and values that XLA may not see through, that the backward keeps, or that are printed.


@lowers("ipu_poptorch::begin_scope", "ipu_poptorch::end_scope")
@lowers("ipu_poptorch::begin_multi_conv", "ipu_poptorch::end_multi_conv")
def _do_nothing(*values: Any) -> None:
    del values


@lowers("ipu_poptorch::nop", keep=True)
def _nop(x: Array) -> Array:
    return jax.lax.optimization_barrier(x)


@lowers("ipu_poptorch::recomputation_checkpoint", keep=True)
def _keep(x: Array) -> Array:
    return engine.recomputation_checkpoint(x)


@lowers(PRINT)
def _print(x: Array, title: str, print_gradient: bool, *arguments: Any) -> Array:
    # A debugging print of JAX is enough: the engine prints once per micro-batch, whatever it recomputes.
    layout = Layout(*arguments)
    show = functools.partial(print_array, title, layout)
    if not print_gradient or not is_float(x):
        jax.debug.callback(show, x)
        return x
    show_gradient = functools.partial(print_array, f"{title}_gradient", layout)

    @jax.custom_vjp
    def printed(x: Array) -> Array:
        jax.debug.callback(show, x)
        return x

    def forward(x: Array) -> tuple[Array, None]:
        return printed(x), None

    def backward(saved: None, gradient: Array) -> tuple[Array]:
        del saved
        jax.debug.callback(show_gradient, gradient)
        return (gradient,)

    printed.defvjp(forward, backward)
    return printed(x)


# Matrix products in a loop that makes one part at a time, forward and backward.


@dataclass(frozen=True)
class _Cut:
    """The axes that operands and result are cut along. None: each part has all, and results are added."""

    lhs: int | None  # an axis of (..., m, n)
    rhs: int | None  # an axis of (..., n, p)
    result: int | None  # an axis of (..., m, p)


def _cut_of(mode: str, rhs: Array) -> _Cut:
    match MatMulSerializationMode(mode):
        case MatMulSerializationMode.InputChannels:
            return _Cut(-2, None, -1 if rhs.ndim == 1 else -2)
        case MatMulSerializationMode.OutputChannels:
            return _Cut(None, -1, -1)
        case _:
            return _Cut(-1, -1 if rhs.ndim == 1 else -2, None)


@lowers(SERIALIZED, keep=True)
def _serialized_matmul(lhs: Array, rhs: Array, mode: str, factor: int, keep_precision: bool) -> Array:
    cut = _cut_of(mode, rhs)
    widened = widen if keep_precision else _unchanged

    def in_parts(lhs: Array, rhs: Array) -> Array:
        shape = jax.eval_shape(jnp.matmul, lhs, rhs)

        def add_part(number: Array, total: Array) -> Array:
            product = jnp.matmul(_part(lhs, cut.lhs, number, factor), _part(rhs, cut.rhs, number, factor))
            return _with_part(total, product, cut.result, number, factor)

        zeros = _zeros_for_parts(shape, cut.result, widened)
        return jax.lax.fori_loop(0, factor, add_part, zeros).astype(shape.dtype)

    # JAX's derivative of the loop would keep every part's operands.
    @jax.custom_vjp
    def product(lhs: Array, rhs: Array) -> Array:
        return in_parts(lhs, rhs)

    def forward(lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
        return in_parts(lhs, rhs), (lhs, rhs)

    def backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        def add_part(number: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
            parts = [
                _part(array, axis, number, factor)
                for array, axis in zip(saved, (cut.lhs, cut.rhs), strict=True)
            ]
            _product, transpose = jax.vjp(jnp.matmul, *parts)
            of_parts = transpose(_part(gradient, cut.result, number, factor))
            of_lhs, of_rhs = (
                _with_part(array, part, axis, number, factor)
                for array, part, axis in zip(gradients, of_parts, (cut.lhs, cut.rhs), strict=True)
            )
            return of_lhs, of_rhs

        starts = tuple(
            _zeros_for_parts(array, axis, widened)
            for array, axis in zip(saved, (cut.lhs, cut.rhs), strict=True)
        )
        gradients = jax.lax.fori_loop(0, factor, add_part, starts)
        return gradients[0].astype(saved[0].dtype), gradients[1].astype(saved[1].dtype)

    product.defvjp(forward, backward)
    return product(lhs, rhs)


def _unchanged(x: Array) -> Array:
    return x


def _zeros_for_parts(like: Array, axis: int | None, widened: Callable[[Array], Array]) -> Array:
    """Makes the zeros that parts are put into, or added to, which may need a wider dtype."""
    zeros = jnp.zeros(like.shape, like.dtype)
    return widened(zeros) if axis is None else zeros


def _part(array: Array, axis: int | None, number: Array, factor: int) -> Array:
    if axis is None:
        return array
    axis %= array.ndim
    size = array.shape[axis] // factor
    return jax.lax.dynamic_slice_in_dim(array, number * size, size, axis)


def _with_part(total: Array, part: Array, axis: int | None, number: Array, factor: int) -> Array:
    if axis is None:
        return total + part.astype(total.dtype)
    axis %= total.ndim
    return jax.lax.dynamic_update_slice_in_dim(total, part, number * (total.shape[axis] // factor), axis)


# Operations that are computed elsewhere: searches, functions of the host, operations of the user.


@lowers(DECODE)
def _decode_ctc(probs: Array, lengths: Array, blank: int, beam_width: int, top_paths: int) -> Any:
    probs = widen(jax.lax.stop_gradient(probs))
    return beam_search(probs, lengths, blank, beam_width, top_paths)


@lowers(HOST_CALL)
def _call_host(inputs: list[Array], key: str) -> list[Array]:
    return host_calls.call_from_device(key, inputs)


@lowers(CUSTOM)
def _call_custom(inputs: list[Array], key: str, results: str, attributes: str) -> list[Array]:
    return CustomCall.read(key, results, attributes).compute(inputs)


@lowers(own_backwards.WITH_BACKWARD)
def _with_backward(results: list[Array], inputs: list[Array], saved: list[Array], key: str) -> list[Array]:
    call = own_backwards.find(key)
    if call.program is None:  # for inference
        return list(results)

    @jax.custom_vjp
    def results_with_backward(results: list[Array], inputs: list[Array], saved: list[Array]) -> list[Array]:
        del inputs, saved
        return results

    def forward(results: list[Array], inputs: list[Array], saved: list[Array]) -> tuple[list[Array], Any]:
        return results_with_backward(results, inputs, saved), saved

    def backward(saved: list[Array], gradients: list[Array]) -> tuple[Any, Any, Any]:
        all_gradients = [
            gradient if has_gradient else jnp.zeros(result.shape, result.dtype)
            for gradient, result, has_gradient in zip(gradients, results, call.differentiable, strict=True)
        ]
        return None, list(_run_program(call.program, [*saved, *all_gradients])), None

    results_with_backward.defvjp(forward, backward)
    return results_with_backward(list(results), list(inputs), list(saved))


def _run_program(program: Any, tensors: list[Array]) -> Any:
    inputs = iter(tensors)
    return run_graph(
        program.graph_module,
        *(
            next(inputs)
            if spec.kind is InputKind.USER_INPUT
            else jnp.asarray(to_numpy(program.constants[spec.target]))
            for spec in program.graph_signature.input_specs
        ),
    )
