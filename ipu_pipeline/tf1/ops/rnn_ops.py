"""Recurrent layers, as Graphcore's `ipu.rnn_ops` has them: time-major LSTM, GRU and AUGRU.

`layers.recurrent_scans` has the formulas and says which dtypes they are computed in. Names, shapes and
layouts of the variables are Graphcore's. With `u` units and inputs of `f` features:

    kernel    [f + u, gates * u]: the rows for the inputs, then the rows for the state
    biases    [gates, u]; for a GRU with `reset_after` [gates, 2, u]: the inputs' row, then the state's

The gates of an LSTM are in the order input, forget, candidate, output, and the gates of a GRU in the order
update, reset, candidate, as in Keras and in newer Poplar SDKs. (Older SDKs had forget, input, candidate,
output, and reset, update, candidate: permute the blocks of their checkpoints.)

An AUGRU has `bias_r_u` [2, u], which starts from 1, and `bias_c` [1, u], which starts from 0. Despite its
name, `bias_r_u` has the update gate's row first. Graphcore's AUGRU also has a variable `biases`, which it
never reads.

A layer without a `name` is called after its class: `popnn_lstm`, then `popnn_lstm_1` in the same scope. A
layer that is called again uses its variables again. Layers can be called in stages, in loop bodies, and
within `jax.checkpoint`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import get_variable
from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.tf1.layers.base import ActivationFunction, check_flag
from ipu_pipeline.tf1.layers.popnn import Popnn
from ipu_pipeline.tf1.layers.recurrent_scans import LSTMStateTuple, run_gru, run_lstm

__all__ = ["LSTMStateTuple", "PopnnAUGRU", "PopnnDynamicGRU", "PopnnDynamicLSTM", "PopnnGRU", "PopnnLSTM"]


class PopnnLSTM(Popnn):
    """A time-major LSTM.

    Example:
      >>> def stage(inputs):  # [time, batch, features]
      ...     outputs, state = ipu.rnn_ops.PopnnLSTM(32)(inputs)
      ...     print(outputs.shape, state.c.shape, state.h.shape)
      ...     return outputs
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([50, 8, 16], np.float32))
      (50, 8, 32) (8, 32) (8, 32)
    """

    kind = "popnn_lstm"
    num_gates = 4

    def __init__(
        self,
        num_units: int,
        dtype: Any = None,
        partials_dtype: Any = None,
        seed: int | None = None,
        weights_initializer: Any = None,
        bias_initializer: Any = None,
        activation: ActivationFunction = "tanh",
        recurrent_activation: ActivationFunction = "sigmoid",
        return_state: bool = True,
        name: str | None = None,
        options: Any = None,
        options_bwd: Any = None,
        *,
        available_memory_proportion_fwd: float | None = None,
        available_memory_proportion_bwd: float | None = None,
        param_dtype: Any = None,
    ) -> None:
        """Describes the layer.

        Args:
          num_units: the size of the state, and of the last axis of the outputs.
          dtype: the dtype of outputs and states, a floating-point one; None: see `mixed_precision`, by
            default float32.
          partials_dtype: has no effect: sums are computed in float32 or wider. Any other dtype warns.
          seed: an integer that determines the initial `kernel`, whatever the session's seed, if there is no
            `weights_initializer`; None: the session's seed and the variable's name determine it.
          weights_initializer: the initializer of `kernel`: a name in Keras, or as for `get_variable`; None:
            Glorot uniform.
          bias_initializer: the initializer of `biases`; None: zeros.
          activation: the activation of the candidate and the cell state: a function, or its name in Keras.
          recurrent_activation: the activation of the gates, a function or name in the same way.
          return_state: whether a call returns the state beside the outputs.
          name: the scope of its variables.
          options: has no effect, and warns: it was for Poplar's libraries.
          options_bwd: same as `options`.
          available_memory_proportion_fwd: same as `options`.
          available_memory_proportion_bwd: same as `options`.
          param_dtype: the dtype of its variables; None: see `mixed_precision`, by default `dtype`.

        Raises:
          TypeError: `return_state` is neither True nor False, or `seed` is not an integer.
          ValueError: an argument is not usable.
        """
        super().__init__(
            num_units,
            dtype,
            partials_dtype,
            seed,
            weights_initializer,
            bias_initializer,
            activation,
            recurrent_activation,
            return_state,
            name,
            param_dtype,
            options=options,
            options_bwd=options_bwd,
            available_memory_proportion_fwd=available_memory_proportion_fwd,
            available_memory_proportion_bwd=available_memory_proportion_bwd,
        )

    def __call__(  # type: ignore[override]  # Graphcore's arguments
        self, inputs: Any, initial_state: LSTMStateTuple | None = None, training: bool = True
    ) -> Any:
        """Runs the LSTM over sequences, in a function that is being traced.

        Args:
          inputs: [time, batch, features], floating-point.
          initial_state: the state before the first step, two arrays [batch, num_units]; None: zeros.
          training: True or False; both compute the same, and have gradients.

        Returns:
          The outputs, [time, batch, num_units], and the `LSTMStateTuple` after the last step; without
          `return_state`, the outputs alone.

        Raises:
          TypeError: the inputs or a state are not floating-point arrays, or `initial_state` is not an
            `LSTMStateTuple`.
          ValueError: the inputs or a state have the wrong shape.
          RuntimeError: nothing is being traced.
        """
        return self._call(inputs, initial_state=initial_state, training=training)

    def state_shape(self, batch_size: int) -> tuple[list[int], list[int]]:
        """The shapes of `c` and `h`."""
        return [batch_size, self._units], [batch_size, self._units]

    def _apply(
        self,
        inputs: jax.Array,
        initial_state: LSTMStateTuple | None = None,
        training: bool = True,
        **lengths: Any,
    ) -> Any:
        inputs, kernel, recurrent_kernel = self._prepare(inputs, training)
        limits = self._as_lengths(lengths["seq_len"], inputs) if lengths else None
        if initial_state is not None and not isinstance(initial_state, LSTMStateTuple):
            raise TypeError(
                f"{self._full_name()}: initial_state must be an LSTMStateTuple; got a "
                f"{type(initial_state).__name__}. Give ipu.rnn_ops.LSTMStateTuple(c, h). (The plain tuples "
                "that older SDKs took were (h, c).)"
            )
        c, h = (None, None) if initial_state is None else initial_state
        batch = inputs.shape[1]
        state = LSTMStateTuple(
            self._as_state(c, batch, "initial_state.c"), self._as_state(h, batch, "initial_state.h")
        )
        outputs, state = run_lstm(
            inputs,
            state,
            kernel,
            recurrent_kernel,
            self._get_biases().reshape(-1),
            self._activation,
            self._recurrent_activation,
            lengths=limits,
        )
        return (outputs, state) if self._return_state else outputs


class PopnnDynamicLSTM(PopnnLSTM):
    """A time-major LSTM over sequences of different lengths. It has the same arguments as `PopnnLSTM`.

    Example:
      >>> def stage(inputs, lengths):
      ...     outputs, state = ipu.rnn_ops.PopnnDynamicLSTM(32)(inputs, lengths)
      ...     print(outputs.shape, state.h.shape)
      ...     return outputs
      >>> sequences, lengths = np.ones([50, 8, 16], np.float32), np.full(8, 20, np.int32)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace((sequences, lengths))
      (50, 8, 32) (8, 32)
    """

    kind = "popnn_dynamic_lstm"

    def __call__(  # type: ignore[override]  # Graphcore's arguments
        self,
        inputs: Any,
        seq_len: Any,
        initial_state: LSTMStateTuple | None = None,
        training: bool = True,
    ) -> Any:
        """Runs the LSTM over sequences, in a function that is being traced.

        Args:
          inputs: [time, batch, features], floating-point.
          seq_len: the number of steps of each example, integers [batch], from 0 to `time`.
          initial_state: the state before the first step, two arrays [batch, num_units]; None: zeros.
          training: True or False; both compute the same, and have gradients.

        Returns:
          The outputs, [time, batch, num_units], which are 0 after the last step of an example, and the
          `LSTMStateTuple` after each example's own last step, which for a length of 0 is its initial state;
          without `return_state`, the outputs alone.

        Raises:
          TypeError: an argument has the wrong kind of numbers, or `initial_state` is not an
            `LSTMStateTuple`.
          ValueError: an argument has the wrong shape, or a length that is known while tracing is out of
            range.
          RuntimeError: nothing is being traced.
        """
        return self._call(inputs, initial_state=initial_state, training=training, seq_len=seq_len)


class PopnnGRU(Popnn):
    """A time-major GRU.

    Example:
      >>> def stage(inputs):  # [time, batch, features]
      ...     outputs, state = ipu.rnn_ops.PopnnGRU(32)(inputs)
      ...     print(outputs.shape, state.shape)
      ...     return outputs
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones([50, 8, 16], np.float32))
      (50, 8, 32) (8, 32)
    """

    kind = "popnn_gru"
    num_gates = 3

    def __init__(
        self,
        num_units: int,
        dtype: Any = None,
        partials_dtype: Any = None,
        seed: int | None = None,
        weights_initializer: Any = None,
        bias_initializer: Any = None,
        activation: ActivationFunction = "tanh",
        recurrent_activation: ActivationFunction = "sigmoid",
        return_state: bool = True,
        name: str | None = None,
        reset_after: bool = False,
        options: Any = None,
        options_bwd: Any = None,
        *,
        available_memory_proportion_fwd: float | None = None,
        available_memory_proportion_bwd: float | None = None,
        param_dtype: Any = None,
    ) -> None:
        """Describes the layer.

        Args:
          num_units: the size of the state, and of the last axis of the outputs.
          dtype: same as for `PopnnLSTM`.
          partials_dtype: same as for `PopnnLSTM`.
          seed: same as for `PopnnLSTM`.
          weights_initializer: same as for `PopnnLSTM`.
          bias_initializer: same as for `PopnnLSTM`.
          activation: the activation of the candidate: a function, or its name in Keras.
          recurrent_activation: same as for `PopnnLSTM`.
          return_state: same as for `PopnnLSTM`.
          name: same as for `PopnnLSTM`.
          reset_after: whether the reset gate is applied after the product with the state's rows of
            `kernel`; False: to the state before it, as in TensorFlow 1's GRU.
          options: same as for `PopnnLSTM`.
          options_bwd: same as for `PopnnLSTM`.
          available_memory_proportion_fwd: same as for `PopnnLSTM`.
          available_memory_proportion_bwd: same as for `PopnnLSTM`.
          param_dtype: same as for `PopnnLSTM`.

        Raises:
          TypeError: a flag is neither True nor False, or `seed` is not an integer.
          ValueError: an argument is not usable.
        """
        super().__init__(
            num_units,
            dtype,
            partials_dtype,
            seed,
            weights_initializer,
            bias_initializer,
            activation,
            recurrent_activation,
            return_state,
            name,
            param_dtype,
            options=options,
            options_bwd=options_bwd,
            available_memory_proportion_fwd=available_memory_proportion_fwd,
            available_memory_proportion_bwd=available_memory_proportion_bwd,
        )
        self._reset_after = check_flag(type(self).__name__, "reset_after", reset_after)

    @property
    def canonical_bias_shapes(self) -> list[int]:
        """The shape of `biases`."""
        return [3, 2, self._units] if self._reset_after else [3, self._units]

    def __call__(  # type: ignore[override]  # Graphcore's arguments
        self, inputs: Any, initial_state: Any = None, training: bool = True
    ) -> Any:
        """Runs the GRU over sequences, in a function that is being traced.

        Args:
          inputs: [time, batch, features], floating-point.
          initial_state: the state before the first step, [batch, num_units]; None: zeros.
          training: True or False; both compute the same, and have gradients.

        Returns:
          The outputs, [time, batch, num_units], and the state after the last step, [batch, num_units];
          without `return_state`, the outputs alone.

        Raises:
          TypeError: the inputs or the state are not floating-point arrays.
          ValueError: the inputs or the state have the wrong shape.
          RuntimeError: nothing is being traced.
        """
        return self._call(inputs, initial_state=initial_state, training=training)

    def state_shape(self, batch_size: int) -> list[int]:
        """The shape of the state."""
        return [batch_size, self._units]

    def _apply(
        self,
        inputs: jax.Array,
        initial_state: Any = None,
        training: bool = True,
        time_major: bool = True,
        **dynamic: Any,
    ) -> Any:
        inputs, kernel, recurrent_kernel = self._prepare(inputs, training, time_major)
        lengths = attention = recurrent_bias = None
        if "seq_len" in dynamic:
            lengths = self._as_lengths(dynamic["seq_len"], inputs)
        if "attention_score" in dynamic:
            attention = self._as_attention(dynamic["attention_score"], inputs, time_major)
        state = self._as_state(initial_state, inputs.shape[1])
        biases = self._get_biases()
        if self._reset_after:
            biases, recurrent_bias = biases[:, 0], biases[:, 1].reshape(-1)
        outputs, state = run_gru(
            inputs,
            state,
            kernel,
            recurrent_kernel,
            biases.reshape(-1),
            recurrent_bias,
            self._activation,
            self._recurrent_activation,
            reset_after=self._reset_after,
            attention=attention,
            lengths=lengths,
        )
        return (outputs, state) if self._return_state else outputs


class PopnnDynamicGRU(PopnnGRU):
    """A GRU over sequences of different lengths. It has the same arguments as `PopnnGRU`.

    Example:
      >>> def stage(inputs, lengths):
      ...     outputs, state = ipu.rnn_ops.PopnnDynamicGRU(32)(inputs, lengths)
      ...     print(outputs.shape, state.shape)
      ...     return outputs
      >>> sequences, lengths = np.ones([50, 8, 16], np.float32), np.full(8, 20, np.int32)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace((sequences, lengths))
      (50, 8, 32) (8, 32)
    """

    kind = "popnn_dynamic_gru"

    def __call__(  # type: ignore[override]  # Graphcore's arguments
        self,
        inputs: Any,
        seq_len: Any,
        initial_state: Any = None,
        training: bool = True,
        time_major: bool = True,
    ) -> Any:
        """Runs the GRU over sequences, in a function that is being traced.

        Args:
          inputs: [time, batch, features], or without `time_major` [batch, time, features]; floating-point.
          seq_len: the number of steps of each example, integers [batch], from 0 to `time`.
          initial_state: the state before the first step, [batch, num_units]; None: zeros.
          training: True or False; both compute the same, and have gradients.
          time_major: whether the inputs have time as their first axis. The outputs always do, as in
            Graphcore's.

        Returns:
          The outputs, [time, batch, num_units], which are 0 after the last step of an example, and the
          state after each example's own last step, [batch, num_units], which for a length of 0 is its
          initial state; without `return_state`, the outputs alone.

        Raises:
          TypeError: an argument has the wrong kind of numbers.
          ValueError: an argument has the wrong shape, or a length that is known while tracing is out of
            range.
          RuntimeError: nothing is being traced.
        """
        return self._call(
            inputs,
            initial_state=initial_state,
            training=training,
            seq_len=seq_len,
            time_major=time_major,
        )


class PopnnAUGRU(PopnnGRU):
    """A GRU with attention scores, over sequences of different lengths.

    It has the same arguments as `PopnnGRU`; `bias_initializer` has no effect, as in Graphcore's, and warns.

    Example:
      >>> def stage(inputs, lengths, scores):
      ...     outputs, state = ipu.rnn_ops.PopnnAUGRU(32)(inputs, lengths, scores)
      ...     print(outputs.shape, state.shape)
      ...     return outputs
      >>> sequences, lengths = np.ones([50, 8, 16], np.float32), np.full(8, 20, np.int32)
      >>> scores = np.ones([50, 8], np.float32)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace((sequences, lengths, scores))
      (50, 8, 32) (8, 32)
    """

    kind = "popnn_augru"
    takes_bias_initializer = False

    def __call__(  # type: ignore[override]  # Graphcore's arguments
        self,
        inputs: Any,
        seq_len: Any,
        attention_score: Any,
        initial_state: Any = None,
        training: bool = True,
        time_major: bool = True,
    ) -> Any:
        """Runs the AUGRU over sequences, in a function that is being traced.

        Args:
          inputs: [time, batch, features], or without `time_major` [batch, time, features]; floating-point.
          seq_len: the number of steps of each example, integers [batch], from 0 to `time`.
          attention_score: the score of each step, [time, batch], or without `time_major` [batch, time];
            floating-point.
          initial_state: the state before the first step, [batch, num_units]; None: zeros.
          training: True or False; both compute the same, and have gradients.
          time_major: whether inputs and scores have time as their first axis. The outputs always do, as
            in Graphcore's.

        Returns:
          The outputs and the state, the same as for `PopnnDynamicGRU`.

        Raises:
          TypeError: an argument has the wrong kind of numbers.
          ValueError: an argument has the wrong shape, or a length that is known while tracing is out of
            range.
          RuntimeError: nothing is being traced.
        """
        return self._call(
            inputs,
            initial_state=initial_state,
            training=training,
            seq_len=seq_len,
            attention_score=attention_score,
            time_major=time_major,
        )

    def _get_biases(self) -> jax.Array:
        of_gates = get_variable("bias_r_u", (2, self._units), self.param_dtype, 1.0)
        of_candidate = get_variable("bias_c", (1, self._units), self.param_dtype, 0.0)
        biases = jnp.concatenate([of_gates, of_candidate])
        # With reset_after, inputs and state share the biases, as in Graphcore's.
        return jnp.stack([biases, biases], axis=1) if self._reset_after else biases


explain_missing(__name__)
