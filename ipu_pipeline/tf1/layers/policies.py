"""`mixed_precision`: the dtypes in which layers compute, and the dtypes of their variables.

Sources of the method and of the policies' names: P. Micikevicius et al., Mixed Precision Training,
arXiv:1710.03740, and Keras's `mixed_precision`. Weights are kept in 32 bits, so that small updates are not
rounded away, and are cast to 16 bits where they are used.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import find_frame
from ipu_pipeline.ground import jax_compat

__all__ = ["Policy", "cast_floating", "check_dtype", "check_is_there", "current", "mixed_precision"]

_Dtype = np.dtype[Any]


@dataclass(frozen=True)
class Policy:
    """Two dtypes; None: not said here.

    Attributes:
      dtype: of the computation.
      param_dtype: of variables.
    """

    dtype: _Dtype | None = None
    param_dtype: _Dtype | None = None

    def within(self, around: Policy) -> Policy:
        """What this policy says, and where it says nothing, what the one around it says."""
        return Policy(
            around.dtype if self.dtype is None else self.dtype,
            around.param_dtype if self.param_dtype is None else self.param_dtype,
        )


_policy: contextvars.ContextVar[Policy] = contextvars.ContextVar("policy", default=Policy())  # noqa: B039  # frozen


def current() -> Policy:
    """That of the innermost `mixed_precision`, and of those around it."""
    return _policy.get()


@contextlib.contextmanager
def mixed_precision(
    policy: str | Policy | None = None, *, dtype: Any = None, param_dtype: Any = None
) -> Iterator[Policy]:
    """Sets the dtypes of layers that are made or applied in a `with` block and have no dtypes of their own.

    Layers cast inputs and variables to `dtype`, which their outputs have, too, and create variables in
    `param_dtype`. So do the functions of `normalization_ops`. Layers without variables (Dropout,
    Activation, pooling) keep the dtype of their inputs, and `get_variable` is not affected.

    Some operations use float32 or wider for any dtype: all of a normalization, with `gamma` and `beta` not
    cast; moving statistics; sums and gates of LSTM and GRU. Values that their backward needs are held in
    this dtype. Gradients of biases, embeddings and recurrent weights are added in at least `param_dtype`.

    Blocks nest: an inner block overrides the dtypes that it sets. For each dtype, a layer's argument has
    priority, then the block in which the layer is made, then the block in which it is applied. Without any,
    layers compute in float32, and a layer's variables have the dtype of its computation. (`layers.Flax`
    then leaves the dtypes to the module.)

    A block affects what is traced inside it: use it in a stage, or around `ipu_compiler.compile`, in the
    calling thread.

    Example:
      >>> def stage(x):
      ...     with ipu.mixed_precision(dtype=jnp.bfloat16, param_dtype=jnp.float32):
      ...         x = layers.Dense(64, activation="relu")(x)
      ...         print(x.dtype)
      ...         logits = layers.Dense(10, dtype=jnp.float32)(x)
      ...     print(logits.dtype)
      ...     return logits
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 16], np.float32))
      bfloat16
      float32

    Args:
      policy: "mixed_bfloat16" or "mixed_float16", as in Keras: computation in this dtype, variables in
        float32; or the name of a floating-point dtype for both; or the value that another block yielded.
      dtype: in place of `policy`, the floating-point dtype of the computation. It may be wider than
        `param_dtype`, which saves memory for weights that are not trained.
      param_dtype: in place of `policy`, the floating-point dtype of variables.

    Yields:
      The policy in the block: `dtype` and `param_dtype`, each None if not set.

    Raises:
      ValueError: there is no such policy, a dtype is not a floating-point dtype, or both a policy and a
        dtype are given.
    """
    given = Policy(
        check_dtype("mixed_precision", "dtype", dtype),
        check_dtype("mixed_precision", "param_dtype", param_dtype),
    )
    if policy is not None and given != Policy():
        raise ValueError(
            f"mixed_precision: a policy must stand alone, since it says both dtypes; got {policy!r} with "
            f"dtype={dtype!r} and param_dtype={param_dtype!r}. Leave out one or the other."
        )
    if policy is not None:
        given = _find_policy(policy)
    # JAX keeps traces of inner functions (jax.jit), which say nothing of the block that they were made in.
    token = _policy.set(given.within(current()))
    try:
        with jax_compat.fresh_trace() if find_frame() is not None else contextlib.nullcontext():
            yield current()
    finally:
        _policy.reset(token)


def _find_policy(policy: Any) -> Policy:
    if isinstance(policy, Policy):
        return policy
    name = policy if isinstance(policy, str) else ""
    if name in ("mixed_bfloat16", "mixed_float16"):
        return Policy(np.dtype(name.removeprefix("mixed_")), np.dtype(np.float32))
    found = _as_dtype(name) if name else None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            "mixed_precision: policy must be 'mixed_bfloat16', 'mixed_float16', the name of a "
            f"floating-point dtype or what another block gave; got {policy!r}. Say others by dtype= and "
            "param_dtype=."
        )
    return Policy(found, found)


def check_dtype(owner: str, argument: str, value: Any) -> _Dtype | None:
    """The dtype that an argument says; None for None."""
    if value is None:
        return None
    dtype = _as_dtype(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = repr(value) if dtype is None else dtype.name
        raise ValueError(
            f"{owner}: {argument} must be a floating-point one; got {got}. Give a dtype like jnp.float32; "
            "for computation in 16 bits and weights in 32, dtype=jnp.bfloat16 and param_dtype=jnp.float32."
        )
    return dtype


def check_is_there(owner: str, dtype: _Dtype | None) -> None:
    """Checks that what is said is a dtype that JAX has, as it is configured."""
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{owner}: dtype {dtype.name} needs 64-bit mode; call "
            'jax.config.update("jax_enable_x64", True) first, or give another dtype.'
        )


def _as_dtype(value: Any) -> _Dtype | None:
    try:
        return np.dtype(value)
    except TypeError:
        return None


def cast_floating(tree: Any, dtype: _Dtype | None) -> Any:
    """A pytree with its floating-point arrays in a dtype; None: as they are."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        return jnp.asarray(leaf, dtype) if is_array and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
