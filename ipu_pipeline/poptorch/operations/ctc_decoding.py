"""Decodes the results of a network trained with the CTC loss into label sequences."""

from __future__ import annotations

import jax
import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.beam_search import beam_search
from ipu_pipeline.poptorch.operations.checks import check_int, check_tensor

__all__ = ["DECODE", "ctc_beam_search_decoder"]

DECODE = f"{markers.NAMESPACE}::ctc_beam_search_decoder"


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[torch.Tensor]:
    """Finds the most probable label sequences by a prefix beam search. It has no gradient.

    Args:
      probs: logarithms of probabilities, of shape (time, batch, classes).
      lengths: the numbers of time steps that count: integers of shape (batch,), from 0 to time.
      blank: the class that stands for no label.
      beam_width: the number of prefixes that the search keeps.
      top_paths: the number of sequences that are returned, at most `beam_width`.

    Returns:
      A list: logarithms of the sequences' probabilities, of shape (batch, top_paths), the most probable
      first, -inf where there are fewer; their lengths, int32 of that shape; their labels, int32 of shape
      (batch, top_paths, time), `blank` behind the end.

    Raises:
      Error: an argument is not as described.
    """
    check_tensor(probs, "ctc_beam_search_decoder: probs must be a torch.tensor argument.")
    check_tensor(lengths, "ctc_beam_search_decoder: lengths must be a torch.tensor argument.")
    if probs.dim() != 3 or not probs.is_floating_point() or 0 in probs.shape:
        raise Error(
            "ctc_beam_search_decoder: probs must be floating-point numbers of shape (time, batch, classes)"
            f"; got {probs.dtype} of shape {tuple(probs.shape)}."
        )
    if tuple(lengths.shape) != (probs.shape[1],) or lengths.is_floating_point():
        raise Error(
            f"ctc_beam_search_decoder: lengths must be integers of shape ({probs.shape[1]},), one for each "
            f"element of the batch; got {lengths.dtype} of shape {tuple(lengths.shape)}."
        )
    check_int(blank, "ctc_beam_search_decoder: blank is a class.", 0)
    check_int(beam_width, "ctc_beam_search_decoder: beam_width is a number of prefixes.")
    check_int(top_paths, "ctc_beam_search_decoder: top_paths is a number of sequences.")
    if blank >= probs.shape[2]:
        raise Error(
            f"ctc_beam_search_decoder: blank must be less than the number of classes, {probs.shape[2]}; "
            f"got {blank}."
        )
    if top_paths > beam_width:
        raise Error(
            f"ctc_beam_search_decoder: top_paths must be at most beam_width, {beam_width}; got {top_paths}."
        )
    return list(_OPERATIONS.ctc_beam_search_decoder(probs.detach(), lengths, blank, beam_width, top_paths))


def _decode(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, ...]:
    on_cpu = jax.default_device(jax.local_devices(backend="cpu")[0])
    with on_cpu, jax.numpy_dtype_promotion("standard"):
        wide = probs if probs.dtype is torch.float64 else probs.float()
        found = beam_search(to_numpy(wide), to_numpy(lengths), blank, beam_width, top_paths)
        dtypes = (probs.dtype, torch.int32, torch.int32)
        return tuple(to_torch(array, dtype) for array, dtype in zip(found, dtypes, strict=True))


def _shapes(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, ...]:
    del lengths, blank, beam_width
    num_times, batch, _classes = probs.shape
    return (
        probs.new_empty(batch, top_paths),
        probs.new_empty(batch, top_paths, dtype=torch.int32),
        probs.new_empty(batch, top_paths, num_times, dtype=torch.int32),
    )


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define(
    "ctc_beam_search_decoder(Tensor probs, Tensor lengths, int blank, int beam_width, int top_paths) -> "
    "(Tensor, Tensor, Tensor)"
)
_library.impl("ctc_beam_search_decoder", _decode, "CPU")
_library.impl("ctc_beam_search_decoder", _shapes, "Meta")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)
