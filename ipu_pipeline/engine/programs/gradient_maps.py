"""User functions that are applied to each micro-batch's gradients, before accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec

__all__ = ["GradientMap", "GradientTarget", "check_gradient_map", "join_gradient_maps"]

GradientMap: TypeAlias = "Callable[[jax.Array, jax.Array], jax.Array]"


@dataclass(frozen=True, eq=False)
class GradientTarget:
    """A target that gets each micro-batch's gradients, as they are accumulated.

    Attributes:
      target: the target that they are enqueued for, as a dict by full name.
      choose: takes the full names of all trained variables, returns those whose gradients are wanted.
    """

    target: Any
    choose: Callable[[Iterable[str]], Iterable[str]]


def join_gradient_maps(gradient_maps: Sequence[GradientMap]) -> GradientMap | None:
    """Joins several maps into one, which applies them in their order; None if there are none."""
    if not gradient_maps:
        return None

    def mapped(gradient: jax.Array, variable: jax.Array) -> jax.Array:
        for gradient_map in gradient_maps:
            gradient = gradient_map(gradient, variable)
        return gradient

    return mapped


def check_gradient_map(gradient_map: GradientMap, trained: Iterable[VariableSpec], called: str) -> None:
    """Raises if a gradient map does not keep shapes and dtypes."""
    what = f"the {called}"
    for spec in trained:
        aval = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        try:
            closed_jaxpr = jax.make_jaxpr(gradient_map)(aval, aval)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(
                f"Trying to capture the tensor of a stage in {what}, which may only use its arguments, a "
                "gradient and its variable."
            ) from error
        except AttributeError as error:
            if error.name == "name":
                error.add_note(
                    f"The second argument of {what} is the variable's value, an array without a name. "
                    "Choose variables by their names in the loss, as ipu.trainable_variables() has them, "
                    "or by optax.masked."
                )
            raise
        Captures().check(closed_jaxpr.consts, what)
        results = closed_jaxpr.out_avals
        if len(results) != 1 or results[0].shape != spec.shape or results[0].dtype != spec.dtype:
            described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in results)
            raise ValueError(
                f"{called} must return the gradient's shape and dtype, for {spec}; it returned "
                f"{described or 'nothing'}."
            )
