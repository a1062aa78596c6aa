"""Normalizations as functions, as Graphcore's `ipu.normalization_ops` has them.

    outputs = (inputs - mean) / sqrt(variance + epsilon) * gamma + beta

Means and (biased) variances are per example, over groups of channels and all other axes; they are computed
in float32 at least. `gamma` and `beta` have one number for each channel. Source: Y. Wu and K. He,
Group Normalization, arXiv:1803.08494.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import get_variable, variable_scope
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.tf1.layers import base
from ipu_pipeline.tf1.layers.base import at_least_float32
from ipu_pipeline.tf1.layers.core import normalize_groups

__all__ = ["group_norm", "instance_norm", "layer_norm"]


def group_norm(
    inputs: Any,
    groups: int = 2,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = 1e-6,
    param_initializers: Mapping[str, Any] | None = None,
    reuse: Any = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
    strided_channel_grouping: bool = True,
) -> jax.Array:
    """Normalizes each example over groups of channels.

    Example:
      >>> def stage(x):
      ...     return ipu.normalization_ops.group_norm(x, groups=4)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 28, 28, 16], np.float32))
      >>> list(pipeline.variables.values())
      [GroupNorm/gamma: float32[16], GroupNorm/beta: float32[16]]

    Args:
      inputs: [batch, ...], floating-point, of rank 2 or more.
      groups: the number of groups; divides the number of channels.
      channels_axis: the axis of the channels, not the first one.
      center: whether there is a `beta`.
      scale: whether there is a `gamma`.
      epsilon: added to the variance. The default is from older SDKs; newer ones have 1.53e-5: pass that to
        go on with a model that was trained with them.
      param_initializers: the initializers of "beta" and "gamma", as for `get_variable`; by default zeros
        and ones.
      reuse: same as for `variable_scope`.
      variables_collections: only None: there are no collections.
      training: True or False: the statistics are computed from the inputs in inference, too.
      trainable: whether `beta` and `gamma` are trained.
      scope: the scope of the variables; None: "GroupNorm", the next one "GroupNorm_1".
      strided_channel_grouping: True: channel c is in group c modulo `groups`, as on IPUs by default; False:
        groups consist of neighbouring channels.

    Returns:
      The shape and dtype of the inputs; within `mixed_precision`, its dtype. `beta` and `gamma` have the
      dtype of the outputs, or the `param_dtype` of `mixed_precision`.

    Raises:
      TypeError: the inputs are not floating-point numbers; or `center` or `scale` is neither True nor
        False, for example if a program passes `reduction_axes`, which SDKs before 2.0 had before `center`.
      ValueError: an argument does not fit the inputs.
    """
    del training
    affine = _Affine(center, scale, param_initializers, reuse, variables_collections, trainable, scope)
    return _normalize("GroupNorm", inputs, groups, channels_axis, epsilon, strided_channel_grouping, affine)


def layer_norm(
    inputs: Any,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = 1e-6,
    param_initializers: Mapping[str, Any] | None = None,
    reuse: Any = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
) -> jax.Array:
    """Normalizes each example over all of its axes: `group_norm` with one group, in scope "LayerNorm".

    For the arguments, see `group_norm`.

    Example:
      >>> def stage(x):
      ...     return ipu.normalization_ops.layer_norm(x, epsilon=1e-5)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 64], np.float32))
      >>> list(pipeline.variables)
      ['LayerNorm/gamma', 'LayerNorm/beta']
    """
    del training
    affine = _Affine(center, scale, param_initializers, reuse, variables_collections, trainable, scope)
    return _normalize("LayerNorm", inputs, 1, channels_axis, epsilon, False, affine)


def instance_norm(
    inputs: Any,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = 1e-6,
    param_initializers: Mapping[str, Any] | None = None,
    reuse: Any = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
) -> jax.Array:
    """Normalizes each channel of each example: `group_norm` with a group for each, in scope "InstanceNorm".

    For the arguments, see `group_norm`.

    Example:
      >>> def stage(x):
      ...     return ipu.normalization_ops.instance_norm(x, epsilon=1e-5)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 28, 28, 16], np.float32))
      >>> list(pipeline.variables)
      ['InstanceNorm/gamma', 'InstanceNorm/beta']
    """
    del training
    affine = _Affine(center, scale, param_initializers, reuse, variables_collections, trainable, scope)
    return _normalize("InstanceNorm", inputs, None, channels_axis, epsilon, False, affine)


class _Affine(NamedTuple):
    """The arguments about `gamma` and `beta`."""

    center: bool
    scale: bool
    param_initializers: Mapping[str, Any] | None
    reuse: Any
    collections: None
    trainable: bool
    scope: str | None


def _normalize(
    kind: str,
    inputs: Any,
    groups: int | None,
    channels_axis: int,
    epsilon: float,
    is_strided: bool,
    affine: _Affine,
) -> jax.Array:
    inputs = jnp.asarray(inputs)
    for flag, is_on in (("center", affine.center), ("scale", affine.scale)):
        if not isinstance(is_on, bool):
            raise TypeError(
                f"{kind}: {flag} must be True or False; got {is_on!r}. SDKs before 2.0 had reduction_axes "
                "before center: leave it out, since statistics are over all axes but the first."
            )
    axis = channels_axis % inputs.ndim if -inputs.ndim <= channels_axis < inputs.ndim else 0
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(f"{kind}: inputs must be floating-point numbers; got {inputs.dtype.name}.")
    if inputs.ndim < 2 or axis == 0:
        raise ValueError(
            f"{kind}: inputs must be [batch, ...], and channels_axis one of their axes but the first; got "
            f"{channels_axis} for shape {inputs.shape}."
        )
    channels = inputs.shape[axis]
    number = channels if groups is None else groups
    if not is_int(number, 1) or channels % number:
        raise ValueError(
            f"{kind}: groups must divide the {channels} channels of the inputs; got {groups!r}."
        )
    if affine.collections is not None:
        raise ValueError(f"{kind}: variables_collections must be None: there are no collections here.")
    initializers = {"beta": 0.0, "gamma": 1.0, **(affine.param_initializers or {})}
    if unknown := initializers.keys() - {"beta", "gamma"}:
        raise ValueError(f"{kind}: param_initializers are for beta and gamma; got {sorted(unknown)}.")
    policy = base.current_policy()
    dtype = inputs.dtype if policy.dtype is None else policy.dtype
    param_dtype = dtype if policy.param_dtype is None else policy.param_dtype
    base.check_dtype_is_there(kind, dtype)
    inputs = inputs.astype(dtype)
    wide = jnp.moveaxis(inputs, axis, -1).astype(at_least_float32(inputs.dtype))
    outputs = normalize_groups(wide, wide.ndim - 1, number, is_strided, epsilon)
    with variable_scope(affine.scope, default_name=kind, reuse=affine.reuse):
        for name, is_wanted in (("gamma", affine.scale), ("beta", affine.center)):
            if is_wanted:
                value = get_variable(name, (channels,), param_dtype, initializers[name], affine.trainable)
                value = value.astype(outputs.dtype)
                outputs = outputs * value if name == "gamma" else outputs + value
    return jnp.moveaxis(outputs.astype(inputs.dtype), -1, axis)


explain_missing(__name__)
