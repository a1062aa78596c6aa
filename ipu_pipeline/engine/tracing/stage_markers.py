"""Markers in a stage's jaxpr: of random keys, the number of weight updates, and checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.checks import hash_name

update_count_p = jax_core.Primitive("update_count")


@update_count_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _update_count_abstract() -> Any:
    return count_aval()


@update_count_p.def_impl  # type: ignore[untyped-decorator]
def _update_count_value() -> Any:
    return frames.current_values("update_count").update_count


def count_aval() -> Any:
    """Shape and dtype of a count."""
    return jax_compat.shaped_array((), np.dtype(np.int32))


def update_count() -> jax.Array:
    """Returns the number of weight updates before the current one, in a stage or an optimizer.

    Each pipeline name has its own count. It continues when a checkpoint is restored.

    Example:
      >>> def optimizer_of(loss):
      ...     return optax.sgd(0.1 / (1 + engine.update_count()))
      >>> def stage(x):
      ...     return x * (engine.update_count() < 100)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(4, np.float32))

    Returns:
      An int32 scalar, modulo 2**32.

    Raises:
      RuntimeError: not called in a stage of a pipeline, in its optimizer_function, or in the update of its
        optimizer.
    """
    frame = frames.current_frame("update_count")
    if not (frame.has_metrics or frame.is_traced_again):
        raise RuntimeError(
            f"update_count (get_global_step) is used in {frame.place}, which has no such number. Compute "
            "with it in a stage of a pipeline, in its optimizer_function, or in the update of its "
            "optimizer. Optax's schedules count by themselves."
        )
    value: jax.Array = update_count_p.bind()
    return value


# Random keys do not depend on how layers are split into stages.
#
# The key of a call is folded from, in this order: the session's seed key, the pipeline's execution count,
# the micro-batch's index, the first 32 bits of the SHA-256 of the current scope, and the number of the
# call in that scope over all stages of the program.

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


def draw_key(caller: str, mend: str = "") -> jax.Array:
    """The key that `next_rng_key` returns, for a function that a user called."""
    current = frames.current_frame(caller)
    if not current.is_stage:
        raise frames.OutsideOfBodyError(
            f"{caller} was called outside of a computational stage, in {current.place}. It needs a "
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


_MARK = "ipu_pipeline.recomputation_checkpoint."


def recomputation_checkpoint(tree: Any, name: str | None = None) -> Any:
    """Marks values that a stage keeps for its backward instead of computing them again.

    It does nothing without recomputation, and in the mode RecomputeThenBackpropagate. An unmarked value
    that is used before and after a checkpoint is computed again on both sides.

    Example:
      >>> def stage(x):
      ...     x = layers.Dense(64, activation="relu")(x)
      ...     x = ipu.pipelining_ops.recomputation_checkpoint(x)  # the backward begins here
      ...     return jnp.mean(layers.Dense(10)(x))
      >>> pipeline = engine.Pipeline(
      ...     [stage],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ...     recompute="recompute_and_backpropagate_interleaved",
      ... )
      >>> pipeline.trace(np.ones([8, 16], np.float32))

    Args:
      tree: a pytree of arrays in the stage being traced.
      name: an operation's name in TensorFlow; not used here.

    Returns:
      The same values. Use these from here on.

    Raises:
      RuntimeError: not called within a computational stage.
    """
    del name
    current = frames.current_frame("recomputation_checkpoint")
    if not current.may_recompute:
        raise RuntimeError(
            "recomputation_checkpoint was called outside of a computational stage; only pipelines "
            "recompute. jax.checkpoint works everywhere."
        )
    mark = f"{_MARK}{next(serial_numbers)}"
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, mark), tree)


def mark_of(equation: Any) -> str | None:
    """The mark that an equation leaves; None if it leaves none."""
    name = equation.params.get("name")
    return name if isinstance(name, str) and name.startswith(_MARK) else None


def has_marks(flat: jaxprs.FlatJaxpr) -> bool:
    """Whether a stage has checkpoints."""
    return any(mark_of(equation) is not None for equation in flat.equations)


def check_marks(flat: jaxprs.FlatJaxpr, place: str) -> None:
    """Raises if a checkpoint stands where it cannot be reached."""
    for equation in flat.equations:
        if _has_inner_mark(equation):
            raise ValueError(
                f"{place}: recomputation_checkpoint is called inside the body of "
                f"{equation.primitive.name}, where the stage cannot be cut. Call it on what the body takes "
                "or returns; within the body jax.checkpoint says what is kept."
            )


def _has_inner_mark(equation: Any) -> bool:
    return any(
        mark_of(inner) is not None or _has_inner_mark(inner)
        for jaxpr in jax_core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )
