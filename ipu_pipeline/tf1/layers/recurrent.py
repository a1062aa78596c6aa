"""Recurrent layers, LSTM and GRU, as in Keras; `rnn_ops` uses their formulas, too."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.tf1.layers import base
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    Layer,
    VariableLayer,
    argument,
    at_least_float32,
    check_flag,
    check_positive_integer,
    common,
    flag,
    function,
    initializer,
    with_arguments,
)
from ipu_pipeline.tf1.layers.core import Dropout

# What the layers here and those of `rnn_ops` share.


def without_effect(meaning: str) -> Any:
    """Declares an argument that was for Poplar. Passing it warns, once, that it has no effect."""
    return argument(meaning, check_is_without_effect, default=None, attribute="")


def check_is_without_effect(layer: str, argument: str, value: Any) -> None:
    """Warns, once per argument, if it is passed."""
    reason = "it was for Poplar's libraries, and XLA compiles here"
    if argument == "partials_dtype":
        reason = "products of matrices are summed in float32, or in float64 if the layer computes in it"
        value = None if base.check_dtype(layer, argument, value) == np.float32 else value
    if value not in (None, {}):
        warn_once(f"{layer}.{argument}", f"{layer}: {argument} has no effect: {reason}.")


class Recurrent(Layer):
    """The base of recurrent layers: the number of units, activations, and checks of inputs and states."""

    _units: int
    _recurrent_activation: Callable[[Any], Any]

    def _as_sequence(self, inputs: jax.Array, layout: str) -> jax.Array:
        """The inputs in the layer's dtype, if they have three axes."""
        inputs = self._as_own_dtype(inputs)
        if inputs.ndim != 3:
            raise ValueError(
                f"{self._full_name()} needs inputs of rank 3, [{layout}, features]; got shape "
                f"{inputs.shape}."
            )
        return inputs

    def _as_state(self, value: Any, batch: int, name: str = "initial_state") -> jax.Array:
        """A state in the layer's dtype, [batch, units]; zeros for None."""
        shape = (batch, self._units)
        if value is None:
            return jnp.zeros(shape, self.dtype)
        if isinstance(value, (tuple, list, dict)):
            raise TypeError(
                f"{self._full_name()}: {name} must be an array of shape {shape}; got a "
                f"{type(value).__name__}."
            )
        return self._cast(self._as_floating(value, name, shape, "[batch, units]"))

    def _as_floating(self, value: Any, name: str, shape: tuple[int, ...], layout: str) -> jax.Array:
        """An argument that must be a floating-point array of a shape."""
        array = jnp.asarray(value)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{self._full_name()}: {name} must have floating-point numbers; got {array.dtype.name}."
            )
        if array.shape != shape:
            raise ValueError(
                f"{self._full_name()}: {name} must have shape {shape}, {layout}; got {array.shape}."
            )
        return array


# The formulas: LSTM, GRU and AUGRU over whole sequences, as functions of their weights.
#
# Sources: S. Hochreiter and J. Schmidhuber, Long Short-Term Memory (1997), with the forget gate of F. A.
# Gers et al. (2000); K. Cho et al., arXiv:1406.1078, version 3, and version 1 for `reset_after`; G. Zhou et
# al., Deep Interest Evolution Network, arXiv:1809.03672, for AUGRU.
#
# In the formulas x is the input of a step, h the output of the step before, c the cell state, W the kernel,
# U the recurrent kernel, b the bias, d the recurrent bias, s the recurrent activation (sigmoid), and g the
# activation (tanh). W, U, b and d have one block of columns for each gate; * multiplies element by element.
#
# LSTM, with the gates in the order i (input), f (forget), candidate, o (output):
#
#     i, f, o = s(x W + h U + b)
#     c' = f * c + i * g(x W + h U + b)
#     h' = o * g(c')
#
# GRU, with the gates in the order z (update), r (reset), candidate:
#
#     z, r = s(x W + h U + b)
#     candidate = g(x W + (r * h) U + b)
#     h' = z * h + (1 - z) * candidate
#
# With `reset_after`, the reset gate is applied after the product with U:
#
#     z, r = s(x W + h U + b + d)
#     candidate = g(x W + b + r * (h U + d))
#
# AUGRU is a GRU that uses (1 - a) * z in place of z, where a is the attention score of the step. (The paper
# writes 1 - z for our z, and multiplies it by a.)
#
# Outputs and states have the dtype of the inputs. Matrix products have factors of that dtype and are summed
# in float32 or wider. Gates are computed in float32 or wider too, and the gradient of a weight is summed
# over the steps in it: so a weight goes into the scan in float32 and is cast within it. That cast does not
# depend on the step, so JAX keeps no copy of it for each. The inputs of all steps are multiplied with
# their weights before the scan, in one product.

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

    def step(state: _State, step_inputs: tuple[jax.Array, ...]) -> _State:
        c, h = state
        gates = step_inputs[0] + _product(h, recurrent_kernel)
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

    def step(state: _State, step_inputs: tuple[jax.Array, ...]) -> _State:
        (h,) = state
        of_inputs, of_candidate = jnp.split(step_inputs[0], [2 * units], axis=-1)
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
            z = z * (1 - step_inputs[1][:, jnp.newaxis])
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

        def unmasked(state: _State, step_inputs: tuple[jax.Array, ...]) -> tuple[_State, jax.Array]:
            new_state = step(state, step_inputs)
            return new_state, new_state[-1]

        final, outputs = jax.lax.scan(unmasked, state, per_step, unroll=unroll)
        return outputs, final

    limits = lengths.astype(jnp.int32)

    def masked(state: _State, numbered: tuple[jax.Array, Any]) -> tuple[_State, jax.Array]:
        number, step_inputs = numbered
        is_within = (number < limits)[:, jnp.newaxis]
        new_state = step(state, step_inputs)
        state_after = tuple(
            jnp.where(is_within, after, before) for after, before in zip(new_state, state, strict=True)
        )
        return state_after, jnp.where(is_within, new_state[-1], jnp.zeros_like(new_state[-1]))

    numbers = jnp.arange(per_step[0].shape[0], dtype=jnp.int32)
    final, outputs = jax.lax.scan(masked, state, (numbers, per_step), unroll=unroll)
    return outputs, final


def _product(factor: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `factor @ weights`, with both in the dtype of `factor`, summed in the dtype of `weights`."""
    return jnp.matmul(factor, weights.astype(factor.dtype), preferred_element_type=weights.dtype)


def _add(values: jax.Array, bias: jax.Array | None) -> jax.Array:
    return values if bias is None else values + bias.astype(values.dtype)


# LSTM and GRU with Keras's arguments and variables.

_States: TypeAlias = "tuple[jax.Array, ...]"  # the output of the step before comes first


def _check_stateful(layer: str, argument: str, value: Any) -> None:
    if check_flag(layer, argument, value):
        raise ValueError(
            f"{layer}: stateful=True is not possible, since a pipeline's micro-batches are independent "
            "of each other. Use return_state=True, and pass the state on as initial_state: to the next "
            "call, or as a value that ipu.loops.repeat carries."
        )


@with_arguments
class _KerasRecurrent(Recurrent, VariableLayer):
    """The base of LSTM and GRU: variables as Keras has them, dropout, and what is returned."""

    num_gates: ClassVar[int]

    units: int = argument(
        "the size of the state, and of the last axis of the outputs.", check_positive_integer
    )
    activation: InitVar[ActivationFunction] = function(
        "of the candidate, and of an LSTM's cell state: ", default="tanh"
    )
    recurrent_activation: InitVar[ActivationFunction] = function("of the gates: ", default="sigmoid")
    use_bias: bool = flag("whether there is a `bias`.", default=True)
    kernel_initializer: InitVar[Any] = initializer(
        "kernel", "[features, gates * units]", default="glorot_uniform"
    )
    recurrent_initializer: InitVar[Any] = initializer(
        "recurrent_kernel", "[units, gates * units]", default="orthogonal"
    )
    bias_initializer: InitVar[Any] = initializer("bias", "[gates * units]", default="zeros")
    _: KW_ONLY
    dropout: InitVar[float] = argument(
        "the fraction of the inputs' features that is set to 0 in training, the same ones in all steps of "
        "an example.",
        default=0.0,
        attribute="",
    )
    dropout_seed: InitVar[int | None] = argument(
        "an integer, folded into the random key of the dropout.", default=None, attribute=""
    )
    return_sequences: bool = flag("whether the outputs of all steps are returned rather than the last one.")
    return_state: bool = flag("whether the state after the last step is returned too.")
    go_backwards: bool = flag("whether the sequence is processed from its end; outputs come in that order.")
    stateful: InitVar[bool] = argument(
        "only False is possible.", _check_stateful, default=False, attribute=""
    )
    unroll: bool = flag("whether the program contains every step in turn, rather than a loop.")
    time_major: bool = flag("whether inputs and outputs have time as their first axis, and not the batch.")
    partials_dtype: InitVar[Any] = without_effect(
        "has no effect: sums are computed in float32 or wider. Any other dtype warns."
    )
    options: InitVar[Any] = without_effect("has no effect, and warns: it was for Poplar's libraries.")
    options_bwd: InitVar[Any] = without_effect("likewise.")
    dtype: InitVar[Any] = common(
        "of the outputs and the state; None: see `mixed_precision`, by default float32."
    )

    def _complete(self, values: dict[str, Any]) -> None:
        self._units = self.units
        # One mask for all steps of an example.
        noise_shape = (1, None, None) if self.time_major else (None, 1, None)
        self._dropout = Dropout(values["dropout"], noise_shape, values["dropout_seed"], name="dropout")

    def __call__(  # type: ignore[override]  # no other options
        self, inputs: Any, *, initial_state: Any = None, training: bool | None = None
    ) -> Any:
        """Applies the layer to a traced array, in a stage.

        Args:
          inputs: [batch, time, features], with `time_major` [time, batch, features].
          initial_state: the state before the first step. For a GRU, [batch, units]; for an LSTM, two such
            arrays, in Keras's order [h, c] or as an `LSTMStateTuple`. None: zeros.
          training: whether dropout is applied; None: True in a program that trains, False in others.

        Returns:
          The output of the last step, [batch, units], or with `return_sequences` the outputs of all steps,
          in the layout of the inputs. With `return_state`, a tuple of this output and the state after the
          last step: h, and for an LSTM also c.

        Raises:
          TypeError: the inputs or a state are not floating-point arrays.
          ValueError: the inputs or a state have the wrong shape.
        """
        return super().__call__(inputs, initial_state=initial_state, training=training)

    def _apply(self, inputs: jax.Array, initial_state: Any = None, training: bool | None = None) -> Any:
        inputs = self._as_sequence(inputs, "time, batch" if self.time_major else "batch, time")
        batch = inputs.shape[1 if self.time_major else 0]
        states = self._as_states(initial_state, batch)
        inputs = self._dropout(inputs, training=training)
        if not self.time_major:
            inputs = jnp.swapaxes(inputs, 0, 1)
        if self.go_backwards:
            inputs = jnp.flip(inputs, 0)
        columns = self.num_gates * self.units
        kernel = self._get_variable("kernel", (inputs.shape[-1], columns))
        recurrent_kernel = self._get_variable("recurrent_kernel", (self.units, columns))
        outputs, states = self._run(inputs, states, kernel, recurrent_kernel)
        result = states[0]  # the output of the last step; with no step at all, the initial state
        if self.return_sequences:
            result = outputs if self.time_major else jnp.swapaxes(outputs, 0, 1)
        return (result, *states) if self.return_state else result

    @abc.abstractmethod
    def _as_states(self, initial_state: Any, batch: int) -> _States:
        """The states before the first step, h first."""

    @abc.abstractmethod
    def _run(
        self, inputs: jax.Array, states: _States, kernel: jax.Array, recurrent_kernel: jax.Array
    ) -> tuple[jax.Array, _States]:
        """The outputs, and the final states, of which h comes first."""


@with_arguments
class LSTM(_KerasRecurrent):
    """A long short-term memory. Its gates have the order input, forget, candidate, output.

    Its variables are `kernel` [features, 4 * units], `recurrent_kernel` [units, 4 * units] and `bias`
    [4 * units].

    Example:
      >>> def stage(sequences):
      ...     all_steps = layers.LSTM(32, return_sequences=True)(sequences)
      ...     print(all_steps.shape)
      ...     return all_steps
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 50, 16], np.float32))
      (8, 50, 32)
    """

    kind = "lstm"
    num_gates = 4

    unit_forget_bias: InitVar[bool] = flag(
        "whether the forget gate's part of `bias` starts from 1, whatever `bias_initializer` says.",
        default=True,
        attribute="",
    )

    def _complete(self, values: dict[str, Any]) -> None:
        super()._complete(values)
        if values["unit_forget_bias"]:
            start = _with_ones(values["bias_initializer"], slice(self.units, 2 * self.units))
            self._bias_initializer = start

    def _as_states(self, initial_state: Any, batch: int) -> _States:
        if isinstance(initial_state, LSTMStateTuple):
            initial_state = (initial_state.h, initial_state.c)
        if initial_state is None:
            initial_state = (None, None)
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
            raise TypeError(
                f"{self._full_name()}: initial_state must be two arrays, [h, c], or an LSTMStateTuple; got "
                f"{type(initial_state).__name__}."
            )
        h, c = initial_state
        return self._as_state(h, batch, "initial_state's h"), self._as_state(c, batch, "initial_state's c")

    def _run(
        self, inputs: jax.Array, states: _States, kernel: jax.Array, recurrent_kernel: jax.Array
    ) -> tuple[jax.Array, _States]:
        h, c = states
        bias = self._get_variable("bias", (4 * self.units,)) if self.use_bias else None
        outputs, state = run_lstm(
            inputs,
            LSTMStateTuple(c, h),
            kernel,
            recurrent_kernel,
            bias,
            self._activation,
            self._recurrent_activation,
            unroll=self.unroll,
        )
        return outputs, (state.h, state.c)


@with_arguments
class GRU(_KerasRecurrent):
    """A gated recurrent unit. Its gates have the order update, reset, candidate.

    Its variables are `kernel` [features, 3 * units], `recurrent_kernel` [units, 3 * units] and `bias`
    [3 * units]. With `reset_after`, `bias` is [2, 3 * units]: the inputs' bias, then the state's.

    Example:
      >>> def stage(sequences):
      ...     last = layers.GRU(32)(sequences)
      ...     print(last.shape)
      ...     return last
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([8, 50, 16], np.float32))
      (8, 32)
    """

    kind = "gru"
    num_gates = 3

    _: KW_ONLY
    reset_after: bool = flag(
        "whether the reset gate is applied after the product with `recurrent_kernel`, as in Keras, or to "
        "the state before it.",
        default=True,
    )

    def _as_states(self, initial_state: Any, batch: int) -> _States:
        if isinstance(initial_state, (tuple, list)) and len(initial_state) == 1:  # as Keras takes it, too
            (initial_state,) = initial_state
        return (self._as_state(initial_state, batch),)

    def _run(
        self, inputs: jax.Array, states: _States, kernel: jax.Array, recurrent_kernel: jax.Array
    ) -> tuple[jax.Array, _States]:
        bias = recurrent_bias = None
        if self.use_bias:
            shape = (2, 3 * self.units) if self.reset_after else (3 * self.units,)
            bias = self._get_variable("bias", shape)
            if self.reset_after:
                bias, recurrent_bias = bias[0], bias[1]
        outputs, state = run_gru(
            inputs,
            states[0],
            kernel,
            recurrent_kernel,
            bias,
            recurrent_bias,
            self._activation,
            self._recurrent_activation,
            reset_after=self.reset_after,
            unroll=self.unroll,
        )
        return outputs, (state,)


def _with_ones(initializer: Any, where: slice) -> Callable[..., jax.Array]:
    """An initializer that takes its values from another one, except for ones in a slice."""

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if callable(initializer):
            values = initializer(key, shape, dtype)
        else:
            values = jnp.broadcast_to(jnp.asarray(initializer, dtype), shape)
        return values.at[where].set(1)

    return initialize
