"""Recurrent layers: torch's packed sequences in a captured model, and LSTM, GRU and RNN by JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from torch.nn.utils import rnn

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.random_numbers import drop
from ipu_pipeline.poptorch.lowering.registry import lowers

# Packed sequences: torch packs the steps of sequences of different lengths into one tensor, whose shape
# depends on the lengths. A model is compiled once for all lengths. In it, a packed sequence holds the
# padded steps and the lengths, which `recurrent` reads: steps after the end of a sequence change nothing.


class _Opaque:
    """A part of a packed sequence that only recurrent layers and `pad_packed_sequence` look into."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_to_look()

    @classmethod
    def __torch_function__(cls, *call: Any) -> NoReturn:
        del call
        _refuse_to_look()


def _refuse_to_look() -> NoReturn:
    raise Error(
        "The model looks into a packed sequence, whose shape depends on the lengths, but the model is "
        "compiled once for all lengths. Give it to recurrent layers and to pad_packed_sequence only."
    )


class Steps(_Opaque):
    """The padded steps, in place of the packed ones.

    Attributes:
      tensor: the steps, of shape (time, batch, ...).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype


class Lengths(_Opaque):
    """The lengths, in place of the number of sequences that have each step.

    Attributes:
      tensor: the lengths: integers of shape (batch,).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, step: int) -> int:
        """Returns the number of sequences that have the first step: all of them."""
        return self.tensor.shape[0] if step == 0 else _refuse_to_look()

    def size(self, dim: int) -> int:
        """Returns 0: `pad_packed_sequence` asks for the longest length, which is not known."""
        del dim
        return 0


def pack(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[Steps, Lengths]:
    """Replaces torch's function `_pack_padded_sequence`."""
    return Steps(input.transpose(0, 1) if batch_first else input), Lengths(lengths)


def padder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that replaces torch's original `_pad_packed_sequence`."""

    def pad(data: Any, sizes: Any, batch_first: bool, value: float, length: int) -> Any:
        if not isinstance(data, Steps):
            return original(data, sizes, batch_first, value, length)
        steps, lengths = data.tensor, sizes.tensor
        if not length:
            warn_once(
                f"pad_packed_sequence returns all {len(steps)} steps that were packed, whatever the "
                "lengths are. In plain torch it returns the steps of the longest sequence. Set their "
                "number by its argument total_length."
            )
        is_over = torch.arange(len(steps))[:, None] >= lengths
        steps = steps.masked_fill(is_over.reshape(*is_over.shape, *[1] * (steps.dim() - 2)), value)
        if length > len(steps):
            more = steps.new_full((length - len(steps), *steps.shape[1:]), value)
            steps = torch.cat([steps, more])
        steps = steps[: length or len(steps)]
        return (steps.transpose(0, 1) if batch_first else steps), lengths

    return pad


def call_recurrent(
    name: str, steps: torch.Tensor, lengths: torch.Tensor, hx: Any, params: Sequence[Any], *settings: Any
) -> tuple[Any, ...]:
    """Computes torch's `lstm`, `gru`, `rnn_tanh` or `rnn_relu` of packed sequences."""
    initial = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    results = torch.ops.ipu_poptorch.recurrent(steps, lengths, initial, list(params), name, *settings)
    return Steps(results[0]), *results[1:]


def _compute_on_host(
    x: torch.Tensor,
    lengths: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    name: str,
    *settings: Any,
) -> list[torch.Tensor]:
    """Computes a recurrent layer by torch, for captured models that are called on the host."""
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    data, sizes, order, back = packed
    assert order is not None
    assert back is not None
    initial = [part.index_select(1, order) for part in hx]
    function = getattr(getattr(torch, "_VF"), name)  # noqa: B009
    outputs, *last = function(data, sizes, initial if len(initial) > 1 else initial[0], params, *settings)
    padded, _lengths = rnn.pad_packed_sequence(
        rnn.PackedSequence(outputs, sizes, order, back), total_length=len(x)
    )
    return [padded, *(part.index_select(1, back) for part in last)]


def _shapes_of_recurrent(
    x: torch.Tensor,
    lengths: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    name: str,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:
    del lengths, params, name, has_biases, num_layers, dropout, train
    outputs = x.new_empty((*x.shape[:2], hx[0].shape[-1] * (2 if bidirectional else 1)))
    return [outputs, *(torch.empty_like(part) for part in hx)]


_library = torch.library.Library("ipu_poptorch", "FRAGMENT")
_library.define(
    "recurrent(Tensor x, Tensor lengths, Tensor[] hx, Tensor[] params, str name, bool has_biases, "
    "int num_layers, float dropout, bool train, bool bidirectional) -> Tensor[]"
)
_library.impl("recurrent", _compute_on_host, "CPU")
_library.impl("recurrent", _shapes_of_recurrent, "Meta")


# LSTM, GRU and RNN: each layer and direction a scan over time, which compiles one step.
#
# Weights come as torch lists them, for each layer and direction: input-hidden, hidden-hidden, both biases
# if there are biases, and the projection if there is one. Inside, sequences are (time, batch, features).

Carry = tuple[Array, ...]
# Computes the new carry from the inputs' part of the gates, the carry, and the weights from `_prepare`.
Cell = Callable[[Array, Carry, dict[str, Array]], Carry]


def _lstm_cell(gates: Array, carry: Carry, weights: dict[str, Array]) -> Carry:
    hidden, memory = carry
    i, f, g, o = jnp.split(gates + hidden @ weights["hidden"].T, 4, -1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
    return (hidden @ weights["projection"].T if "projection" in weights else hidden), memory


def _gru_cell(gates: Array, carry: Carry, weights: dict[str, Array]) -> Carry:
    (hidden,) = carry
    of_hidden = hidden @ weights["hidden"].T
    if "hidden_bias" in weights:
        of_hidden = of_hidden + weights["hidden_bias"]
    (r, z, n), (hidden_r, hidden_z, hidden_n) = jnp.split(gates, 3, -1), jnp.split(of_hidden, 3, -1)
    update = jax.nn.sigmoid(z + hidden_z)
    new = jnp.tanh(n + jax.nn.sigmoid(r + hidden_r) * hidden_n)
    return (new + update * (hidden - new),)


def _rnn_cell(function: Callable[[Array], Array]) -> Cell:
    return lambda gates, carry, weights: (function(gates + carry[0] @ weights["hidden"].T),)


def _prepare(
    params: Sequence[Array], has_biases: bool, is_gru: bool
) -> tuple[dict[str, Array], Array, Array | None]:
    """Returns the weights that a cell needs at each step, the weights of the inputs, and their bias."""
    input_weights, hidden_weights, *params_left = params
    weights = {"hidden": hidden_weights}
    bias = None
    if has_biases:
        bias, hidden_bias, *params_left = params_left
        if is_gru:  # its bias is multiplied by the reset gate
            weights["hidden_bias"] = hidden_bias
        else:
            bias = bias + hidden_bias
    if params_left:
        (weights["projection"],) = params_left
    return weights, input_weights, bias


def _run_direction(
    cell: Cell,
    x: Array,
    carry: Carry,
    params: Sequence[Array],
    has_biases: bool,
    reverse: bool,
    is_there: Array | None,
) -> tuple[Array, Carry]:
    """Returns the hidden states of all times, and the last carry.

    `is_there` (time, batch, 1) marks the steps that the sequences have. Others keep the carry, and give 0.
    """
    weights, input_weights, bias = _prepare(params, has_biases, cell is _gru_cell)
    gates = x @ input_weights.T
    gates = gates if bias is None else gates + bias

    def step(carry: Carry, at_time: tuple[Array, Array | None]) -> tuple[Carry, Array]:
        gates, is_there = at_time
        new = cell(gates, carry, weights)
        if is_there is None:
            return new, new[0]
        new = tuple(jnp.where(is_there, *parts) for parts in zip(new, carry, strict=True))
        return new, jnp.where(is_there, new[0], 0)

    last, hidden = jax.lax.scan(step, carry, (gates, is_there), reverse=reverse)
    return hidden, last


def _run_layers(
    cell: Cell,
    x: Array,
    initial: Carry,
    params: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    is_there: Array | None = None,
) -> tuple[Array, Carry]:
    """Runs all layers. `initial` and the last carry have one row for each layer and direction."""
    num_directions = 2 if bidirectional else 1
    per_run = len(params) // (num_layers * num_directions)
    lasts = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            number = layer * num_directions + direction
            hidden, last = _run_direction(
                cell,
                x,
                tuple(part[number] for part in initial),
                params[number * per_run : (number + 1) * per_run],
                has_biases,
                direction == 1,
                is_there,
            )
            outputs.append(hidden)
            lasts.append(last)
        x = jnp.concatenate(outputs, -1)
        if train and dropout and layer < num_layers - 1:
            x = drop(x, dropout)[0]
    return x, tuple(jnp.stack(part) for part in zip(*lasts, strict=True))


def _lower_cell(name: str, cell: Cell) -> None:
    @lowers(name, keep=True)
    def run(
        x: Array,
        hx: Any,
        params: Sequence[Array],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        x = x.swapaxes(0, 1) if batch_first else x
        initial = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
        outputs, last = _run_layers(
            cell, x, initial, params, has_biases, num_layers, dropout, train, bidirectional
        )
        return (outputs.swapaxes(0, 1) if batch_first else outputs), *last


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _rnn_cell(jnp.tanh),
    "rnn_relu": _rnn_cell(jax.nn.relu),
}
for _name, _cell in _CELLS.items():
    _lower_cell(f"{_name}.input", _cell)


@lowers("ipu_poptorch::recurrent")
def _recurrent(
    x: Array,
    lengths: Array,
    hx: Sequence[Array],
    params: Sequence[Array],
    name: str,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Array, ...]:
    is_there = (jnp.arange(len(x))[:, None] < lengths)[..., None]
    x = jnp.where(is_there, x, 0)  # the padding may be anything, even NaN
    cell = _CELLS[name]
    outputs, last = _run_layers(
        cell, x, tuple(hx), params, has_biases, num_layers, dropout, train, bidirectional, is_there
    )
    return outputs, *last
