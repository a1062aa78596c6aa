"""`outlined_function`: XLA and JAX do by themselves what it did on IPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from ipu_pipeline.graphcore.sdk_names import explain_missing

__all__ = ["outlined_function"]

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def outlined_function(
    func: Function,
    unique_sharding: bool = ...,
    keep_input_layouts: bool | None = ...,
    name: str | None = ...,
) -> Function: ...


@overload
def outlined_function(
    func: None = ...,
    unique_sharding: bool = ...,
    keep_input_layouts: bool | None = ...,
    name: str | None = ...,
) -> Callable[[Function], Function]: ...


def outlined_function(
    func: Any = None,
    unique_sharding: bool = False,
    keep_input_layouts: bool | None = None,
    name: str | None = None,
) -> Any:
    """Returns the function as it is. On IPUs its code existed once, for all the places that call it.

    Its results are the same without that. `jax.jit` around a function makes JAX trace it once.

    Example:
      >>> @ipu.functional_ops.outlined_function
      ... def block(x):
      ...     return jnp.tanh(x)
      >>> block(np.float32(0))
      Array(0., dtype=float32)

    Args:
      func: a function; None: the result is a decorator.
      unique_sharding: for IPUs; not used here.
      keep_input_layouts: for IPUs; not used here.
      name: for IPUs; not used here.

    Raises:
      TypeError: it cannot be called.
    """
    if func is None:
        return outlined_function
    if not callable(func):
        raise TypeError(f"outlined_function: func must be a function; got {func!r}.")
    del unique_sharding, keep_input_layouts, name
    return func


explain_missing(__name__)
