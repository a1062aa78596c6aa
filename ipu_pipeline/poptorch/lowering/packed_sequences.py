"""torch's packed sequences, the inputs of recurrent layers, in a captured model.

torch packs the steps of sequences of different lengths into one tensor, whose shape depends on the lengths.
A model is compiled once for all lengths. In it, a packed sequence holds the padded steps and the lengths,
which `recurrent` reads: steps after the end of a sequence change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.utils import rnn

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["Lengths", "Steps", "call_recurrent", "pack", "padder"]


class _Opaque:
    """A part of a packed sequence that only recurrent layers and `pad_packed_sequence` look into."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    @classmethod
    def __torch_function__(cls, *call: Any) -> NoReturn:
        del call
        _refuse()


def _refuse() -> NoReturn:
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
        return self.tensor.shape[0] if step == 0 else _refuse()

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
    made = torch.ops.ipu_poptorch.recurrent(steps, lengths, initial, list(params), name, *settings)
    return Steps(made[0]), *made[1:]


def _compute(
    x: torch.Tensor,
    lengths: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    name: str,
    *settings: Any,
) -> list[torch.Tensor]:
    """Computes it by torch, for captured models that are called on the host."""
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    data, sizes, order, back = packed
    assert order is not None
    assert back is not None
    initial = [part.index_select(1, order) for part in hx]
    function = getattr(getattr(torch, "_VF"), name)  # noqa: B009
    made, *last = function(data, sizes, initial if len(initial) > 1 else initial[0], params, *settings)
    padded, _lengths = rnn.pad_packed_sequence(
        rnn.PackedSequence(made, sizes, order, back), total_length=len(x)
    )
    return [padded, *(part.index_select(1, back) for part in last)]


def _shapes(
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
    made = x.new_empty((*x.shape[:2], hx[0].shape[-1] * (2 if bidirectional else 1)))
    return [made, *(torch.empty_like(part) for part in hx)]


_library = torch.library.Library("ipu_poptorch", "FRAGMENT")
_library.define(
    "recurrent(Tensor x, Tensor lengths, Tensor[] hx, Tensor[] params, str name, bool has_biases, "
    "int num_layers, float dropout, bool train, bool bidirectional) -> Tensor[]"
)
_library.impl("recurrent", _compute, "CPU")
_library.impl("recurrent", _shapes, "Meta")
