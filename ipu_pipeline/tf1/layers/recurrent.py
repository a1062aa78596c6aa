"""Recurrent layers: LSTM and GRU, with Keras's arguments and variables.

`recurrent_scans` has the formulas and says which dtypes they are computed in.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import get_variable
from ipu_pipeline.tf1.layers.base import ActivationFunction, check_flag, find_initializer
from ipu_pipeline.tf1.layers.core import Dropout
from ipu_pipeline.tf1.layers.recurrent_base import Recurrent
from ipu_pipeline.tf1.layers.recurrent_scans import LSTMStateTuple, run_gru, run_lstm

__all__ = ["GRU", "LSTM"]


class _KerasRecurrent(Recurrent):
    """What LSTM and GRU share: variables as Keras has them, dropout, and what is returned."""

    num_gates: int

    def __init__(
        self,
        units: int,
        activation: ActivationFunction,
        recurrent_activation: ActivationFunction,
        use_bias: bool,
        kernel_initializer: Any,
        recurrent_initializer: Any,
        bias_initializer: Any,
        dropout: float,
        dropout_seed: int | None,
        return_sequences: bool,
        return_state: bool,
        go_backwards: bool,
        stateful: bool,
        unroll: bool,
        time_major: bool,
        name: str | None,
        dtype: Any,
        param_dtype: Any,
        trainable: bool,
    ) -> None:
        super().__init__(
            "units", units, activation, recurrent_activation, name, dtype, param_dtype, trainable
        )
        self.units = self._units
        layer = type(self).__name__
        self.use_bias = check_flag(layer, "use_bias", use_bias)
        self.return_sequences = check_flag(layer, "return_sequences", return_sequences)
        self.return_state = check_flag(layer, "return_state", return_state)
        self.go_backwards = check_flag(layer, "go_backwards", go_backwards)
        self.unroll = check_flag(layer, "unroll", unroll)
        self.time_major = check_flag(layer, "time_major", time_major)
        if check_flag(layer, "stateful", stateful):
            raise ValueError(
                f"{layer}: stateful=True is not possible, since a pipeline's micro-batches are independent "
                "of each other. Use return_state=True, and pass the state on as initial_state: to the next "
                "call, or as a value that ipu.loops.repeat carries."
            )
        self._kernel_initializer = find_initializer(kernel_initializer)
        self._recurrent_initializer = find_initializer(recurrent_initializer)
        self._bias_initializer = find_initializer(bias_initializer)
        # One mask for all steps of an example.
        noise_shape = (1, None, None) if time_major else (None, 1, None)
        self._dropout = Dropout(dropout, noise_shape, dropout_seed, name="dropout")

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
          in the layout of the inputs. With `return_state`, a tuple of that and the state after the last
          step: h, and for an LSTM also c.

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
        kernel = get_variable(
            "kernel", (inputs.shape[-1], columns), self.param_dtype, self._kernel_initializer
        )
        recurrent_kernel = get_variable(
            "recurrent_kernel", (self.units, columns), self.param_dtype, self._recurrent_initializer
        )
        outputs, states = self._run(inputs, states, kernel, recurrent_kernel)
        result = states[0]  # the output of the last step; with no step at all, the initial state
        if self.return_sequences:
            result = outputs if self.time_major else jnp.swapaxes(outputs, 0, 1)
        return (result, *states) if self.return_state else result

    @abc.abstractmethod
    def _as_states(self, given: Any, batch: int) -> tuple[jax.Array, ...]:
        """The states before the first step, h first."""

    @abc.abstractmethod
    def _run(
        self,
        inputs: jax.Array,
        states: tuple[jax.Array, ...],
        kernel: jax.Array,
        recurrent_kernel: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The outputs, and the final states, of which h comes first."""


class LSTM(_KerasRecurrent):
    """A long short-term memory, with its gates in the order input, forget, candidate, output.

    Its variables are `kernel` [features, 4 * units], `recurrent_kernel` [units, 4 * units] and `bias`
    [4 * units].
    """

    kind = "lstm"
    num_gates = 4

    def __init__(
        self,
        units: int,
        activation: ActivationFunction = "tanh",
        recurrent_activation: ActivationFunction = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        unit_forget_bias: bool = True,
        *,
        dropout: float = 0.0,
        dropout_seed: int | None = None,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        time_major: bool = False,
        partials_dtype: Any = None,
        options: Any = None,
        options_bwd: Any = None,
        name: str | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        """Describes the layer.

        Args:
          units: the size of the state, and of the last axis of the outputs.
          activation: of the candidate and the cell state: a function, or its name in Keras.
          recurrent_activation: of the gates; likewise.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`: a name in Keras, or as for `get_variable`.
          recurrent_initializer: of `recurrent_kernel`.
          bias_initializer: of `bias`.
          unit_forget_bias: whether the forget gate's part of `bias` starts from 1, whatever
            `bias_initializer` says.
          dropout: the fraction of the inputs' features that is set to 0 in training, the same ones in all
            steps of an example.
          dropout_seed: an integer, folded into the random key of the dropout.
          return_sequences: whether the outputs of all steps are returned rather than the last one.
          return_state: whether the state after the last step is returned too.
          go_backwards: whether the sequence is processed from its end; outputs come in that order.
          stateful: only False is possible.
          unroll: whether the program contains every step in turn, rather than a loop.
          time_major: whether inputs and outputs have time as their first axis, and not the batch.
          partials_dtype: has no effect: sums are computed in float32 or wider. Any other dtype warns.
          options: has no effect, and warns: it was for Poplar's libraries.
          options_bwd: likewise.
          name: the scope of its variables.
          dtype: of the outputs and the state; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          TypeError: a flag is neither True nor False.
          ValueError: an argument is not usable.
        """
        super().__init__(
            units,
            activation,
            recurrent_activation,
            use_bias,
            kernel_initializer,
            recurrent_initializer,
            bias_initializer,
            dropout,
            dropout_seed,
            return_sequences,
            return_state,
            go_backwards,
            stateful,
            unroll,
            time_major,
            name,
            dtype,
            param_dtype,
            trainable,
        )
        if check_flag("LSTM", "unit_forget_bias", unit_forget_bias):
            self._bias_initializer = _with_ones(self._bias_initializer, slice(self.units, 2 * self.units))
        self._warn_of_poplar(partials_dtype, options=options, options_bwd=options_bwd)

    def _as_states(self, given: Any, batch: int) -> tuple[jax.Array, ...]:
        if isinstance(given, LSTMStateTuple):
            given = (given.h, given.c)
        if given is None:
            given = (None, None)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(
                f"{self._full_name()}: initial_state must be two arrays, [h, c], or an LSTMStateTuple; got "
                f"{type(given).__name__}."
            )
        h, c = given
        return self._as_state(h, batch, "initial_state's h"), self._as_state(c, batch, "initial_state's c")

    def _run(
        self,
        inputs: jax.Array,
        states: tuple[jax.Array, ...],
        kernel: jax.Array,
        recurrent_kernel: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        h, c = states
        bias = None
        if self.use_bias:
            bias = get_variable("bias", (4 * self.units,), self.param_dtype, self._bias_initializer)
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


class GRU(_KerasRecurrent):
    """A gated recurrent unit, with its gates in the order update, reset, candidate.

    Its variables are `kernel` [features, 3 * units], `recurrent_kernel` [units, 3 * units] and `bias`
    [3 * units]. With `reset_after`, `bias` is [2, 3 * units]: the bias of the inputs, then that of the
    state.
    """

    kind = "gru"
    num_gates = 3

    def __init__(
        self,
        units: int,
        activation: ActivationFunction = "tanh",
        recurrent_activation: ActivationFunction = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        *,
        dropout: float = 0.0,
        dropout_seed: int | None = None,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        reset_after: bool = True,
        time_major: bool = False,
        partials_dtype: Any = None,
        options: Any = None,
        options_bwd: Any = None,
        name: str | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        """Describes the layer.

        Args:
          units: the size of the state, and of the last axis of the outputs.
          activation: of the candidate: a function, or its name in Keras.
          recurrent_activation: of the gates; likewise.
          use_bias: whether there is a `bias`.
          kernel_initializer: of `kernel`: a name in Keras, or as for `get_variable`.
          recurrent_initializer: of `recurrent_kernel`.
          bias_initializer: of `bias`.
          dropout: the fraction of the inputs' features that is set to 0 in training, the same ones in all
            steps of an example.
          dropout_seed: an integer, folded into the random key of the dropout.
          return_sequences: whether the outputs of all steps are returned rather than the last one.
          return_state: whether the state after the last step is returned too.
          go_backwards: whether the sequence is processed from its end; outputs come in that order.
          stateful: only False is possible.
          unroll: whether the program contains every step in turn, rather than a loop.
          reset_after: whether the reset gate is applied after the product with `recurrent_kernel`, as in
            Keras, or to the state before it.
          time_major: whether inputs and outputs have time as their first axis, and not the batch.
          partials_dtype: has no effect: sums are computed in float32 or wider. Any other dtype warns.
          options: has no effect, and warns: it was for Poplar's libraries.
          options_bwd: likewise.
          name: the scope of its variables.
          dtype: of the outputs and the state; None: see `mixed_precision`, by default float32.
          param_dtype: of its variables; None: likewise, by default `dtype`.
          trainable: whether an optimizer trains its variables.

        Raises:
          TypeError: a flag is neither True nor False.
          ValueError: an argument is not usable.
        """
        super().__init__(
            units,
            activation,
            recurrent_activation,
            use_bias,
            kernel_initializer,
            recurrent_initializer,
            bias_initializer,
            dropout,
            dropout_seed,
            return_sequences,
            return_state,
            go_backwards,
            stateful,
            unroll,
            time_major,
            name,
            dtype,
            param_dtype,
            trainable,
        )
        self.reset_after = check_flag("GRU", "reset_after", reset_after)
        self._warn_of_poplar(partials_dtype, options=options, options_bwd=options_bwd)

    def _as_states(self, given: Any, batch: int) -> tuple[jax.Array, ...]:
        if isinstance(given, (tuple, list)) and len(given) == 1:  # as Keras takes it, too
            (given,) = given
        return (self._as_state(given, batch),)

    def _run(
        self,
        inputs: jax.Array,
        states: tuple[jax.Array, ...],
        kernel: jax.Array,
        recurrent_kernel: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        bias = recurrent_bias = None
        if self.use_bias:
            shape = (2, 3 * self.units) if self.reset_after else (3 * self.units,)
            bias = get_variable("bias", shape, self.param_dtype, self._bias_initializer)
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
