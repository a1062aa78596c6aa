"""Random keys of a stage, which do not depend on how layers are split into stages.

The key of a call is folded from, in this order: the session's seed key, the pipeline's execution count,
the micro-batch's index, the first 32 bits of the SHA-256 of the current scope, and the number of the
call in that scope over all stages of the program.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.names import hash_name

__all__ = [
    "as_int32",
    "draw_key",
    "key_aval",
    "micro_batch_key",
    "micro_batch_key_p",
    "micro_batch_tag",
    "next_rng_key",
]

micro_batch_key_p = jax_core.Primitive("micro_batch_key")


@micro_batch_key_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _key_abstract(*, serial: int) -> Any:
    del serial
    return key_aval()


@micro_batch_key_p.def_impl  # type: ignore[untyped-decorator]
def _key_value(*, serial: int) -> Any:
    del serial
    return frames.current_values("next_rng_key").key


def next_rng_key() -> jax.Array:
    """Returns a new random key for the stage being traced, different for every call and micro-batch.

    It depends on the key given to `Pipeline.init`, the step, the micro-batch, the replica and the call, and
    not on the schedule or the devices.

    Example:
      >>> def stage(x):
      ...     return x + jax.random.normal(ipu.next_rng_key(), x.shape)
      >>> x = np.zeros(4, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=2)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x, x])
      >>> first, second = outputs.outputs
      >>> bool((first == second).any())
      False

    Returns:
      A scalar key, like those of `jax.random.key`.

    Raises:
      RuntimeError: not called within a stage.
    """
    return draw_key("next_rng_key")


def draw_key(wanted_by: str, mend: str = "") -> jax.Array:
    """The key that `next_rng_key` returns, for a function that a user called."""
    current = frames.current_frame(wanted_by)
    if not current.is_stage:
        raise frames.OutsideOfBodyError(
            f"{wanted_by} was called outside of a computational stage, in {current.place}. It needs a "
            f"random key, and only a stage has one for each micro-batch: call it in a stage.{mend}"
        )
    scope = scopes.current_scope()
    number = current.names.key_counts.get(scope, 0)
    current.names.key_counts[scope] = number + 1
    marker = micro_batch_key_p.bind(serial=next(serial_numbers))
    key = jax.random.fold_in(marker, np.uint32(hash_name(scope)))
    return jax.random.fold_in(key, np.uint32(number))


def micro_batch_tag() -> jax.Array:
    """Returns a tag of the current micro-batch, unique and the same in all stages and replicas.

    Example:
      >>> def stage(x):
      ...     jax.debug.callback(lambda tag, mean: None, engine.micro_batch_tag(), jnp.mean(x))
      ...     return x
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(4, np.float32))

    Returns:
      uint32 numbers, the data of a random key.

    Raises:
      RuntimeError: not called within a stage.
    """
    if not frames.current_frame("micro_batch_tag").is_stage:
        raise RuntimeError("micro_batch_tag() was called outside of a computational stage.")
    return jax.random.key_data(micro_batch_key_p.bind(serial=next(serial_numbers)))


def key_aval() -> Any:
    """Shape and dtype of a random key."""
    return jax_compat.shaped_array((), jax.eval_shape(jax.random.key, 0).dtype)


def as_int32(count: Any) -> np.int32:
    """A count on the host as programs take it: modulo 2**32, whose bits keys are folded with."""
    return np.uint32(int(count) % 2**32).astype(np.int32)


def micro_batch_key(key: jax.Array, execution_count: jax.Array, micro_batch: jax.Array) -> jax.Array:
    """The key that all calls of one micro-batch are folded from."""
    return jax.random.fold_in(jax.random.fold_in(key, execution_count), micro_batch)
