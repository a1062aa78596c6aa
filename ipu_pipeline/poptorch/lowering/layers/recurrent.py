"""LSTM, GRU and RNN: each layer and direction a scan over time, which compiles one step.

Weights come as torch lists them, for each layer and direction: input-hidden, hidden-hidden, both biases if
there are biases, and the projection if there is one. Inside, sequences are (time, batch, features).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import Array
from ipu_pipeline.poptorch.lowering.random_numbers import drop
from ipu_pipeline.poptorch.lowering.registry import lowers

__all__: list[str] = []

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
    input_weights, hidden_weights, *rest = params
    weights = {"hidden": hidden_weights}
    bias = None
    if has_biases:
        bias, hidden_bias, *rest = rest
        if is_gru:  # its bias is multiplied by the reset gate
            weights["hidden_bias"] = hidden_bias
        else:
            bias = bias + hidden_bias
    if rest:
        (weights["projection"],) = rest
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


def _run(
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


def _lower(name: str, cell: Cell) -> None:
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
        made, last = _run(cell, x, initial, params, has_biases, num_layers, dropout, train, bidirectional)
        return (made.swapaxes(0, 1) if batch_first else made), *last


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _rnn_cell(jnp.tanh),
    "rnn_relu": _rnn_cell(jax.nn.relu),
}
for _name, _cell in _CELLS.items():
    _lower(f"{_name}.input", _cell)


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
    made, last = _run(
        cell, x, tuple(hx), params, has_biases, num_layers, dropout, train, bidirectional, is_there
    )
    return made, *last
