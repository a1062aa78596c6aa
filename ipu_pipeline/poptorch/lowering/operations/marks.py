"""Values that XLA may not see through, that are kept or printed, and places in bodies of loops."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ipu_pipeline import engine
from ipu_pipeline.poptorch.lowering.arrays import Array, is_float
from ipu_pipeline.poptorch.lowering.registry import lowers
from ipu_pipeline.poptorch.operations.printing import PRINT, Layout, print_array

__all__: list[str] = []


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
