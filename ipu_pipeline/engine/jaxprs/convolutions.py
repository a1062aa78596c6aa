"""Convolutions as products of matrices, for a CPU.

XLA's CPU compiler has fast kernels for convolutions of one layout only. It converts others to it in the
entry computation of a program, but not in the bodies of loops (JAX issue 12868), where a gradient of a
kernel, and everything that has channels before lengths, takes 10 to 80 times as long. Groups are slow
everywhere. Products of matrices are fast in any layout and place, so each convolution becomes one: of its
windows as columns (Chellapilla et al. 2006, "High performance convolutional neural networks for document
processing"), made block by block, so that they stay in the processor's cache.
benchmarks/against_torch_models shows the gain.

This comes after differentiation, so that each of a layer's three convolutions gets the form that suits it:

* Few taps (`gathered`; forwards, and gradients of inputs without strides): columns are windows of images.
* A dilated image (`scattered`; gradients of inputs with strides, and transposed convolutions): each
  element is multiplied by all taps, and the products are added where they belong. No product has a zero.
* Few results (`correlated`; gradients of kernels): columns are windows, and the sum goes over places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.jaxprs.convolution_forms import canonical, correlated, dilate, gathered, scattered
from ipu_pipeline.engine.jaxprs.convolution_layouts import Convolution
from ipu_pipeline.engine.jaxprs.flat import has_primitive, map_atoms
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["has_convolutions", "with_fast_convolutions"]

_NAME = "conv_general_dilated"


def has_convolutions(jaxpr: Any) -> bool:
    """Whether there is a convolution in a `Jaxpr`, or in a jaxpr within it."""
    return any(has_primitive(equation, _NAME) for equation in jaxpr.eqns)


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Makes a function compute its convolutions as products of matrices, also in loops and branches."""

    def called(*arguments: Any) -> list[Any]:
        closed_jaxpr = jax.make_jaxpr(function)(*arguments)
        results: list[Any] = jax_core.jaxpr_as_fun(jax_core.map_jaxprs(_rewrite, closed_jaxpr))(*arguments)
        return results

    return called


def _rewrite(jaxpr: Any) -> Any:
    """Rewrites the convolutions of a `Jaxpr` as products."""
    if not has_convolutions(jaxpr):
        return jaxpr
    equations: list[Any] = []
    reversals: dict[Any, Any] = {}  # result of a reversal -> its equation
    for equation in jaxpr.eqns:
        if equation.primitive.name == "rev":
            reversals[equation.outvars[0]] = equation
        convolution = _read(equation)
        if convolution is None:
            params = {name: jax_core.map_jaxprs(_rewrite, value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=params))
        else:
            image, kernel = equation.invars
            reversal = None if isinstance(kernel, jax_core.Literal) else reversals.get(kernel)
            if reversal is not None and convolution.can_reverse(reversal.params["dimensions"]):
                convolution = dataclasses.replace(convolution, is_reversed=True)
                kernel = reversal.invars[0]
            equations += _inline(convolution, equation, (image, kernel))
    return jaxpr.replace(eqns=equations)


def _inline(convolution: Convolution, equation: Any, inputs: tuple[Any, Any]) -> list[Any]:
    """The equations that replace the equation of a convolution of an image and a kernel."""
    structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in inputs]
    # No part of it is a call: a computation of its own would be one in the compiled program, too.
    traced = jax.make_jaxpr(functools.partial(_compute, convolution))(*structs)
    known = dict(zip(traced.jaxpr.invars, inputs, strict=True))
    (result,) = traced.jaxpr.outvars
    known[result] = equation.outvars[0]
    assert not traced.consts
    made = []
    for inner in traced.jaxpr.eqns:
        atoms = map_atoms(known, inner.invars)
        for var in inner.outvars:
            known.setdefault(var, var if isinstance(var, jax_core.DropVar) else jax_core.Var(var.aval))
        made.append(
            jax_compat.in_place_of(
                equation, inner.replace(invars=atoms, outvars=[known[var] for var in inner.outvars])
            )
        )
    return made


def _compute(own: Convolution, image: Any, kernel: Any) -> Any:
    """Computes a convolution in the form that suits it."""
    if own.has_many_windows:
        return canonical(own, image, kernel)
    # Sums of narrow floats are wide, and are rounded once: here, where XLA sees the result's cast.
    return _product(own, image, kernel).astype(image.dtype)


def _product(own: Convolution, image: Any, kernel: Any) -> Any:
    if own.is_correlation:
        if max(own.holes) > 1 and max(own.dilation) > 1:
            return correlated(own.without_holes(), dilate(own, image), kernel)
        return correlated(own, image, kernel)
    if max(own.stride) == 1 and (max(own.holes) > 1 or own.is_better_scattered(image, kernel)):
        return scattered(own, image, kernel)
    if max(own.holes) > 1:
        return gathered(own.without_holes(), dilate(own, image), kernel)
    return gathered(own, image, kernel)


def _read(equation: Any) -> Convolution | None:
    """The convolution of an equation; None if there is none, or if it had better stay as it is."""
    if equation.primitive.name != _NAME:
        return None
    image, kernel, result = (var.aval for var in (*equation.invars, *equation.outvars))
    if not 1 <= image.ndim - 2 <= 3 or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    if 0 in (*image.shape, *kernel.shape, *result.shape) or not image.dtype == kernel.dtype == result.dtype:
        return None
    params = equation.params
    numbers = params["dimension_numbers"]
    return Convolution(
        numbers=numbers,
        stride=tuple(params["window_strides"]),
        padding=tuple(map(tuple, params["padding"])),
        holes=tuple(params["lhs_dilation"]),
        dilation=tuple(params["rhs_dilation"]),
        lengths=tuple(image.shape[axis] for axis in numbers.lhs_spec[2:]),
        taps=tuple(kernel.shape[axis] for axis in numbers.rhs_spec[2:]),
        places=tuple(result.shape[axis] for axis in numbers.out_spec[2:]),
        num_channels=image.shape[numbers.lhs_spec[1]],
        num_outputs=result.shape[numbers.out_spec[1]],
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        precision=params["precision"],
    )
