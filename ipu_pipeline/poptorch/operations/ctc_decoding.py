"""Decodes the results of a network trained with the CTC loss by a prefix beam search."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_int, check_tensor

# The search: a scan over time that keeps the most probable label sequences.
#
# Source: Graves and Jaitly, Towards End-To-End Speech Recognition with Recurrent Neural Networks, 2014,
# algorithm 1, without a language model. A prefix has separate probabilities for all alignments that end in
# a blank and for those that do not. An extension that is already a prefix in the beam is added to it.

Array = Any


class _Beam(NamedTuple):
    """Prefixes, the most probable first. Prefixes that do not exist have the probability 0.

    Attributes:
      labels: the labels, of shape (width, time), blank behind the end.
      lengths: the numbers of labels, of shape (width,).
      blank: logarithms of the probability of all alignments that end in a blank, of shape (width,).
      label: the same for all alignments that end in the last label.
    """

    labels: Array
    lengths: Array
    blank: Array
    label: Array


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def beam_search(
    log_probs: Array, lengths: Array, blank: int, width: int, num_paths: int
) -> tuple[Array, Array, Array]:
    """Finds the most probable label sequences of several inputs.

    Returns:
      Logarithms of their probabilities, of shape (batch, num_paths), the most probable first, -inf where
      there are fewer; their lengths, of the same shape; their labels, of shape (batch, num_paths, time),
      blank behind the end. Integers are int32.
    """
    search = functools.partial(_search, blank=blank, width=width, num_paths=num_paths)
    paths: tuple[Array, Array, Array] = jax.vmap(search, in_axes=(1, 0))(log_probs, lengths)
    return paths


def _search(
    log_probs: Array, length: Array, blank: int, width: int, num_paths: int
) -> tuple[Array, Array, Array]:
    num_times = log_probs.shape[0]
    nothing = jnp.full(width, -jnp.inf, log_probs.dtype)
    start = _Beam(
        jnp.full((width, num_times), blank, jnp.int32),
        jnp.zeros(width, jnp.int32),
        nothing.at[0].set(0),
        nothing,
    )

    def step(beam: _Beam, at_time: tuple[Array, Array]) -> tuple[_Beam, None]:
        time, emitted = at_time
        new = _advance(beam, emitted, blank)
        return jax.tree.map(lambda a, b: jnp.where(time < length, a, b), new, beam), None

    beam = jax.lax.scan(step, start, (jnp.arange(num_times, dtype=jnp.int32), log_probs))[0]
    probabilities, order = jax.lax.top_k(jnp.logaddexp(beam.blank, beam.label), num_paths)
    exists = probabilities > -jnp.inf
    return (
        probabilities,
        jnp.where(exists, beam.lengths[order], 0),
        jnp.where(exists[:, None], beam.labels[order], blank),
    )


def _advance(beam: _Beam, emitted: Array, blank: int) -> _Beam:
    """Makes one time step."""
    width, num_times = beam.labels.shape
    num_classes = emitted.shape[0]
    rows = jnp.arange(width)
    total = jnp.logaddexp(beam.blank, beam.label)
    last = beam.labels[rows, jnp.maximum(beam.lengths - 1, 0)]
    # 1. Prefixes that stay the same: by a blank, or by their last label once more.
    stays_blank = total + emitted[blank]
    stays_label = jnp.where(beam.lengths > 0, beam.label + emitted[last], -jnp.inf)
    # 2. Longer prefixes: (width, classes). The last label counts as a new one only after a blank.
    is_repeated = (jnp.arange(num_classes) == last[:, None]) & (beam.lengths > 0)[:, None]
    longer = jnp.where(is_repeated, beam.blank[:, None], total[:, None]) + emitted
    longer = longer.at[:, blank].set(-jnp.inf)
    # 3. Prefix j may be prefix i and one more label: then that extension of i is j. All pairs are compared,
    # because a dropped prefix may come back: links from prefixes to what they extend would miss some.
    within = jnp.arange(num_times) < beam.lengths[:, None]
    begins = jnp.all(~within[:, None] | (beam.labels[:, None] == beam.labels[None]), -1)
    extends = begins & (beam.lengths[None] == beam.lengths[:, None] + 1) & (total > -jnp.inf)
    merged = jnp.where(extends, longer[:, last], -jnp.inf).max(0)
    stays_label = jnp.logaddexp(stays_label, merged)
    is_merged = jnp.zeros(longer.shape, bool).at[rows[:, None], last[None]].max(extends)
    longer = jnp.where(is_merged, -jnp.inf, longer)
    # 4. The best of all.
    scores = jnp.concatenate([jnp.logaddexp(stays_blank, stays_label), longer.ravel()])
    _best, chosen = jax.lax.top_k(scores, width)
    is_longer = chosen >= width
    parent = jnp.where(is_longer, (chosen - width) // num_classes, chosen)
    added = jnp.where(is_longer, (chosen - width) % num_classes, blank).astype(jnp.int32)
    labels, lengths = beam.labels[parent], beam.lengths[parent]
    at_end = (jnp.arange(num_times) == lengths[:, None]) & is_longer[:, None]
    none = jnp.full(width, -jnp.inf, emitted.dtype)
    return _Beam(
        jnp.where(at_end, added[:, None], labels),
        lengths + is_longer.astype(jnp.int32),
        jnp.where(is_longer, none, stays_blank[parent]),
        jnp.where(is_longer, scores[chosen], stays_label[parent]),
    )


# The operation.

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
        paths = beam_search(to_numpy(wide), to_numpy(lengths), blank, beam_width, top_paths)
        dtypes = (probs.dtype, torch.int32, torch.int32)
        return tuple(to_torch(array, dtype) for array, dtype in zip(paths, dtypes, strict=True))


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
