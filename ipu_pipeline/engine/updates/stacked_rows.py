"""Rows of a model's stacked layers: an optimizer sees each as a stack of one, with the rank it has there.

So masks and labels by rank, as `ndim > 1` for weight decay, are those of the model. Variables
and the optimizer's state are without that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine.updates.loss_scaling import wrap

__all__ = ["see_as_stacks"]


def see_as_stacks(
    inner: optax.GradientTransformation, rows: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation of all variables see some of them, by full name, with a first axis of 1."""
    wrapped = optax.with_extra_args_support(inner)

    def expand(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[None] if name in rows else value for name, value in values.items()}

    def squeeze(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[0] if name in rows else value for name, value in values.items()}

    def find_axes(variables: Mapping[str, Any]) -> list[int | None]:
        """The axis of each leaf of the state that is as long as the stacks."""

        def shapes(length: int) -> list[tuple[int, ...]]:
            avals = {
                name: jax.ShapeDtypeStruct((length, *v.shape) if name in rows else v.shape, v.dtype)
                for name, v in variables.items()
            }
            return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(wrapped.init, avals))]

        axes: list[int | None] = []
        for one, two in zip(shapes(1), shapes(2), strict=True):
            differing = [axis for axis, sizes in enumerate(zip(one, two, strict=True)) if sizes == (1, 2)]
            axes.append(differing[0] if differing else None)
        return axes

    def along(move: Callable[[Any, int], Any], state: Any, axes: Sequence[int | None]) -> Any:
        leaves, tree = jax.tree.flatten(state)
        pairs = zip(leaves, axes, strict=True)
        return jax.tree.unflatten(
            tree, [leaf if axis is None else move(leaf, axis) for leaf, axis in pairs]
        )

    def init(parameters: Any) -> Any:
        return along(jnp.squeeze, wrapped.init(expand(parameters)), find_axes(parameters))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        axes = find_axes(params)
        state = along(jnp.expand_dims, state, axes)
        changes, state = wrapped.update(expand(gradients), state, expand(params), **extra)
        return squeeze(changes), along(jnp.squeeze, state, axes)

    return wrap(inner, init, update)
