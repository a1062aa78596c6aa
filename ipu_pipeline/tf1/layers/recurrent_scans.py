"""LSTM, GRU and AUGRU over whole sequences, as functions of their weights.

Sources: S. Hochreiter and J. Schmidhuber, Long Short-Term Memory (1997), with the forget gate of F. A. Gers
et al. (2000); K. Cho et al., arXiv:1406.1078, version 3, and version 1 for `reset_after`; G. Zhou et al.,
Deep Interest Evolution Network, arXiv:1809.03672, for AUGRU.

In the formulas x is the input of a step, h the output of the step before, c the cell state, W the kernel, U
the recurrent kernel, b the bias, d the recurrent bias, s the recurrent activation (sigmoid), and g the
activation (tanh). W, U, b and d have one block of columns for each gate; * multiplies element by element.

LSTM, with the gates in the order i (input), f (forget), candidate, o (output):

    i, f, o = s(x W + h U + b)
    c' = f * c + i * g(x W + h U + b)
    h' = o * g(c')

GRU, with the gates in the order z (update), r (reset), candidate:

    z, r = s(x W + h U + b)
    candidate = g(x W + (r * h) U + b)
    h' = z * h + (1 - z) * candidate

With `reset_after`, the reset gate is applied after the product with U:

    z, r = s(x W + h U + b + d)
    candidate = g(x W + b + r * (h U + d))

AUGRU is a GRU that uses (1 - a) * z in place of z, where a is the attention score of the step. (The paper
writes 1 - z for our z, and multiplies it by a.)

Outputs and states have the dtype of the inputs. Matrix products have factors of that dtype and are summed
in float32 or wider. Gates are computed in float32 or wider too, and the gradient of a weight is summed over
the steps in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.tf1.layers.base import at_least_float32

__all__ = ["Activation", "LSTMStateTuple", "run_gru", "run_lstm"]

Activation: TypeAlias = "Callable[[Any], Any]"
_State: TypeAlias = "tuple[jax.Array, ...]"  # the output of the step before comes last


class LSTMStateTuple(NamedTuple):
    """The state of an LSTM, as TensorFlow 1's `tf.nn.rnn_cell.LSTMStateTuple`.

    Example:
      >>> zeros = np.zeros([8, 32], np.float32)
      >>> def stage(inputs):
      ...     start = ipu.rnn_ops.LSTMStateTuple(c=zeros, h=zeros)
      ...     outputs, _ = ipu.rnn_ops.PopnnLSTM(32)(inputs, initial_state=start)
      ...     return outputs
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([50, 8, 16], np.float32))

    Attributes:
      c: the cell state, [batch, units].
      h: the output of the last step, [batch, units].
    """

    c: jax.Array
    h: jax.Array


def run_lstm(
    inputs: jax.Array,
    state: LSTMStateTuple,
    kernel: jax.Array,
    recurrent_kernel: jax.Array,
    bias: jax.Array | None,
    activation: Activation,
    recurrent_activation: Activation,
    *,
    lengths: jax.Array | None = None,
    unroll: bool = False,
) -> tuple[jax.Array, LSTMStateTuple]:
    """Runs an LSTM.

    Returns:
      The outputs, [time, batch, units], and the state after the last step.
    """
    wide = at_least_float32(inputs.dtype)
    kernel, recurrent_kernel = kernel.astype(wide), recurrent_kernel.astype(wide)
    projected = _add(_product(inputs, kernel), bias)

    def step(state: _State, own: tuple[jax.Array, ...]) -> _State:
        c, h = state
        gates = own[0] + _product(h, recurrent_kernel)
        i, f, candidate, o = jnp.split(gates, 4, axis=-1)
        i, f, o = (recurrent_activation(gate) for gate in (i, f, o))
        new_c = f * c.astype(gates.dtype) + i * activation(candidate)
        # h comes from the rounded cell state, so that a sequence may be cut between any two steps.
        c = new_c.astype(c.dtype)
        return c, (o * activation(c.astype(gates.dtype))).astype(h.dtype)

    outputs, (c, h) = _scan(step, tuple(state), (projected,), lengths, unroll)
    return outputs, LSTMStateTuple(c, h)


def run_gru(
    inputs: jax.Array,
    state: jax.Array,
    kernel: jax.Array,
    recurrent_kernel: jax.Array,
    bias: jax.Array | None,
    recurrent_bias: jax.Array | None,
    activation: Activation,
    recurrent_activation: Activation,
    *,
    reset_after: bool,
    attention: jax.Array | None = None,
    lengths: jax.Array | None = None,
    unroll: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs a GRU, or with `attention` an AUGRU.

    Returns:
      The outputs, [time, batch, units], and the state after the last step.
    """
    units = state.shape[-1]
    wide = at_least_float32(inputs.dtype)
    kernel, recurrent_kernel = kernel.astype(wide), recurrent_kernel.astype(wide)
    projected = _add(_product(inputs, kernel), bias)
    per_step = (projected,) if attention is None else (projected, attention.astype(projected.dtype))

    def step(state: _State, own: tuple[jax.Array, ...]) -> _State:
        (h,) = state
        of_inputs, of_candidate = jnp.split(own[0], [2 * units], axis=-1)
        if reset_after:
            of_state, reset = jnp.split(
                _add(_product(h, recurrent_kernel), recurrent_bias), [2 * units], axis=-1
            )
        else:
            of_state = _product(h, recurrent_kernel[:, : 2 * units])
        z, r = (recurrent_activation(gate) for gate in jnp.split(of_inputs + of_state, 2, axis=-1))
        if not reset_after:
            before = (r * h.astype(r.dtype)).astype(h.dtype)
            candidate = activation(of_candidate + _product(before, recurrent_kernel[:, 2 * units :]))
        else:
            candidate = activation(of_candidate + r * reset)
        if attention is not None:
            z = z * (1 - own[1][:, jnp.newaxis])
        return ((z * h.astype(z.dtype) + (1 - z) * candidate).astype(h.dtype),)

    outputs, (h,) = _scan(step, (state,), per_step, lengths, unroll)
    return outputs, h


def _scan(
    step: Callable[[_State, tuple[jax.Array, ...]], _State],
    state: _State,
    per_step: tuple[jax.Array, ...],
    lengths: jax.Array | None,
    unroll: bool,
) -> tuple[jax.Array, _State]:
    """The outputs of all steps, and the last state."""
    if lengths is None:

        def whole(state: _State, own: tuple[jax.Array, ...]) -> tuple[_State, jax.Array]:
            new = step(state, own)
            return new, new[-1]

        final, outputs = jax.lax.scan(whole, state, per_step, unroll=unroll)
        return outputs, final

    limits = lengths.astype(jnp.int32)

    def masked(state: _State, numbered: tuple[jax.Array, Any]) -> tuple[_State, jax.Array]:
        number, own = numbered
        is_within = (number < limits)[:, jnp.newaxis]
        new = step(state, own)
        kept = tuple(jnp.where(is_within, after, before) for after, before in zip(new, state, strict=True))
        return kept, jnp.where(is_within, new[-1], jnp.zeros_like(new[-1]))

    numbers = jnp.arange(per_step[0].shape[0], dtype=jnp.int32)
    final, outputs = jax.lax.scan(masked, state, (numbers, per_step), unroll=unroll)
    return outputs, final


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right` with factors in the dtype of `left`, summed in that of `right`."""
    return jnp.matmul(left, right.astype(left.dtype), preferred_element_type=right.dtype)


def _add(values: jax.Array, bias: jax.Array | None) -> jax.Array:
    return values if bias is None else values + bias.astype(values.dtype)
