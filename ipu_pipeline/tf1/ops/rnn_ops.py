"""Recurrent layers, as Graphcore's `ipu.rnn_ops` has them: time-major LSTM, GRU and AUGRU.

`layers.recurrent` has the formulas and says which dtypes they are computed in. Names, shapes and
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

from dataclasses import KW_ONLY, InitVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import get_variable
from ipu_pipeline.engine.fronts import find_initializer
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.tf1.layers.base import (
    ActivationFunction,
    argument,
    check_flag,
    check_positive_integer,
    common,
    flag,
    function,
    with_arguments,
)
from ipu_pipeline.tf1.layers.recurrent import (
    LSTMStateTuple,
    Recurrent,
    run_gru,
    run_lstm,
    without_effect,
)

__all__ = [
    "LSTMStateTuple",
    "PopnnAUGRU",
    "PopnnDynamicGRU",
    "PopnnDynamicLSTM",
    "PopnnGRU",
    "PopnnLSTM",
]


@with_arguments
class _Arguments(Recurrent):
    """The arguments of all layers, up to `name`."""

    num_units: InitVar[int] = argument(
        "the size of the state, and of the last axis of the outputs.",
        check_positive_integer,
        attribute="_units",
    )
    dtype: InitVar[Any] = common(
        "the dtype of outputs and states, a floating-point one; None: see `mixed_precision`, by default "
        "float32."
    )
    partials_dtype: InitVar[Any] = without_effect(
        "has no effect: sums are computed in float32 or wider. Any other dtype warns."
    )
    seed: InitVar[int | None] = argument(
        "an integer that determines the initial `kernel`, whatever the session's seed, if there is no "
        "`weights_initializer`; None: the session's seed and the variable's name determine it.",
        default=None,
        attribute="",
    )
    weights_initializer: InitVar[Any] = argument(
        "the initializer of `kernel`: a name in Keras, or as for `get_variable`; None: Glorot uniform.",
        default=None,
        attribute="",
    )
    bias_initializer: InitVar[Any] = argument(
        "the initializer of `biases`; None: zeros.", default=None, attribute=""
    )
    activation: InitVar[ActivationFunction] = function(
        "the activation of the candidate, and of an LSTM's cell state: ", default="tanh"
    )
    recurrent_activation: InitVar[ActivationFunction] = function(
        "the activation of the gates: ", default="sigmoid"
    )
    return_state: InitVar[bool] = flag(
        "whether a call returns the state beside the outputs.", default=True, attribute="_return_state"
    )
    name: str | None = common("the scope of its variables.")


class Popnn(_Arguments):
    """A recurrent layer with the variables `kernel` and `biases`, as in Graphcore's TensorFlow 1."""

    num_gates: int
    takes_bias_initializer = True
    _input_size: int | None = None
    _return_state: bool
    _reset_after: bool  # of a GRU

    def _complete(self, values: dict[str, Any]) -> None:
        layer = type(self).__name__
        kernel, biases = values["weights_initializer"], values["bias_initializer"]
        if kernel is None and values["seed"] is not None:
            kernel = _seeded(layer, values["seed"])
        self._kernel_initializer = find_initializer("glorot_uniform" if kernel is None else kernel)
        self._biases_initializer = 0.0 if biases is None else find_initializer(biases)
        if biases is not None and not self.takes_bias_initializer:
            warn_once(
                f"{layer}.bias_initializer",
                f"{layer}: bias_initializer has no effect, as in Graphcore's: the biases of the gates "
                "start from 1, and those of the candidate from 0.",
            )

    @property
    def num_layers(self) -> int:
        """Always 1."""
        return 1

    @property
    def num_units(self) -> int:
        """The size of the state, and of the last axis of the outputs."""
        return self._units

    @property
    def input_size(self) -> int:
        """The number of input features.

        Raises:
          ValueError: it is not known before the first call or `build`.
        """
        if self._input_size is None:
            raise ValueError(
                f"{type(self).__name__}: input_size is not known yet. Call the layer, or "
                "build(input_shape), first."
            )
        return self._input_size

    @property
    def canonical_weight_shape(self) -> list[int]:
        """The shape of `kernel`; needs `input_size`."""
        return [self.input_size + self._units, self.num_gates * self._units]

    @property
    def canonical_bias_shapes(self) -> list[int]:
        """The shape of `biases`."""
        return [self.num_gates, self._units]

    @property
    def kernel(self) -> jax.Array:
        """The variable `kernel` in the function that is being traced, for example to penalize it."""
        with self._own_scope():
            return self._get_kernel()

    @property
    def biases(self) -> jax.Array:
        """The biases in the function that is being traced, in the shape `canonical_bias_shapes`."""
        with self._own_scope():
            return self._get_biases()

    def build(self, input_shape: Any) -> None:
        """Creates the variables before the layer is called, in a function that is being traced.

        Args:
          input_shape: [time, batch, features]; time and batch may be None.

        Raises:
          ValueError: the shape has another rank, `features` is not a positive integer, or the layer was
            built for another number of features.
          RuntimeError: nothing is being traced.
        """
        with self._own_scope():
            shape = tuple(input_shape) if isinstance(input_shape, (tuple, list)) else ()
            features = shape[-1] if len(shape) == 3 else None
            if not is_integer(features, 1):
                raise ValueError(
                    f"{self._full_name()}: input_shape must be [time, batch, features] with a positive "
                    f"integer for features; got {input_shape!r}."
                )
            self._set_input_size(int(features))
            self._get_kernel()
            self._get_biases()

    def _call(self, inputs: Any, **options: Any) -> Any:
        return super().__call__(inputs, **options)

    def _set_input_size(self, features: int) -> None:
        if self._input_size not in (None, features):
            raise ValueError(
                f"{self._full_name()}: inputs must have {self._input_size} features, for which the layer "
                f"was built; got {features}. Use another layer for them."
            )
        self._input_size = features

    def _get_kernel(self) -> jax.Array:
        return self._get_variable("kernel", tuple(self.canonical_weight_shape))

    def _get_biases(self) -> jax.Array:
        return self._get_variable("biases", tuple(self.canonical_bias_shapes))

    def _prepare(
        self, inputs: jax.Array, training: bool, time_major: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The inputs as [time, batch, features], and the rows of `kernel` for them and for the state."""
        check_flag(type(self).__name__, "training", training)
        check_flag(type(self).__name__, "time_major", time_major)
        inputs = self._as_sequence(inputs, "time, batch" if time_major else "batch, time")
        self._set_input_size(inputs.shape[-1])
        kernel = self._get_kernel()
        rows = kernel[: self.input_size], kernel[self.input_size :]
        return (inputs if time_major else jnp.swapaxes(inputs, 0, 1), *rows)

    def _as_lengths(self, seq_len: Any, inputs: jax.Array) -> jax.Array:
        """The number of steps of each example; inputs are [time, batch, features]."""
        time, batch, _features = inputs.shape
        if seq_len is None:
            raise TypeError(f"{self._full_name()}: seq_len must be integers of shape {(batch,)}; got None.")
        lengths = jnp.asarray(seq_len)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"{self._full_name()}: seq_len must be integers; got {lengths.dtype.name}.")
        if lengths.shape != (batch,):
            raise ValueError(
                f"{self._full_name()}: seq_len must have shape {(batch,)}, one length per example; got "
                f"{lengths.shape}."
            )
        if isinstance(seq_len, np.ndarray) and not ((seq_len >= 0) & (seq_len <= time)).all():
            raise ValueError(
                f"{self._full_name()}: seq_len must be from 0 to {time}, the number of steps; got "
                f"{seq_len.tolist()}."
            )
        return lengths

    def _as_attention(self, attention_score: Any, inputs: jax.Array, time_major: bool) -> jax.Array:
        """The scores as [time, batch]; inputs are [time, batch, features]."""
        time, batch, _features = inputs.shape
        shape, axes = ((time, batch), "[time, batch]") if time_major else ((batch, time), "[batch, time]")
        if attention_score is None:
            raise TypeError(
                f"{self._full_name()}: attention_score must be an array of shape {shape}; got None."
            )
        layout = f"{axes} since {time_major=}"
        attention = self._as_floating(attention_score, "attention_score", shape, layout)
        return attention if time_major else attention.T


def _seeded(layer: str, seed: Any) -> Any:
    """Makes Glorot's uniform initializer with a seed of its own."""
    if not is_integer(seed):
        raise TypeError(f"{layer}: seed must be an integer or None; got {seed!r}.")
    number = int(seed) % 2**32

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key  # it depends on the session's seed
        return find_initializer("glorot_uniform")(jax.random.key(number), shape, dtype)

    return initialize


@with_arguments
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

    options: InitVar[Any] = without_effect("has no effect, and warns: it was for Poplar's libraries.")
    options_bwd: InitVar[Any] = without_effect("same as `options`.")
    _: KW_ONLY
    available_memory_proportion_fwd: InitVar[float | None] = without_effect("same as `options`.")
    available_memory_proportion_bwd: InitVar[float | None] = without_effect("same as `options`.")
    param_dtype: InitVar[Any] = common(
        "the dtype of its variables; None: see `mixed_precision`, by default `dtype`."
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


@with_arguments
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

    reset_after: InitVar[bool] = flag(
        "whether the reset gate is applied after the product with the state's rows of `kernel`; False: to "
        "the state before it, as in TensorFlow 1's GRU.",
        attribute="_reset_after",
    )
    options: InitVar[Any] = without_effect("has no effect, and warns: it was for Poplar's libraries.")
    options_bwd: InitVar[Any] = without_effect("same as `options`.")
    _: KW_ONLY
    available_memory_proportion_fwd: InitVar[float | None] = without_effect("same as `options`.")
    available_memory_proportion_bwd: InitVar[float | None] = without_effect("same as `options`.")
    param_dtype: InitVar[Any] = common(
        "the dtype of its variables; None: see `mixed_precision`, by default `dtype`."
    )

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
          attention_score: the score of each step, [time, batch], or without `time_major` [batch, time];
            floating-point.

        The other arguments, the results and the errors are those of `PopnnDynamicGRU`.
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
