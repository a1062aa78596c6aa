"""Decoders of transformers as modules that take a chunk of one request, with keys and values in buffers.

The buffers have a fixed length. transformers' `StaticCache` is made so, too; what is different here is
that the position of a chunk is an argument, so that nothing but keys and values is kept between chunks,
and that layers with a sliding window keep all positions, since their masks leave out those that are too
old.

This module needs transformers, so it is imported for its models only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils

from ipu_pipeline.poptorch.errors import Error

_NUM_TRIED = 3  # tokens of the trial
_KEYS, _VALUES = "cached_keys_{}", "cached_values_{}"  # names of buffers, by layer


class _RecordingLayer(cache_utils.CacheLayerMixin):
    """Keeps the keys and values of a request's only call, for their shapes."""

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Does nothing."""

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        """Returns what the layer computes."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the position of the first one."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """The number of tokens before the call."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1: there is no limit."""
        return -1


class _BufferLayer(cache_utils.StaticLayer):
    """Keys and values of a layer in buffers, [1, heads, max_length, width], and the position of a chunk."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self.keys, self.values = keys, values
        self.max_cache_len = keys.shape[2]
        self.cumulative_length = position  # what `StaticLayer` calls it
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        """Writes the chunk's keys and values. Returns all positions': masks leave out later ones."""
        positions = torch.arange(key_states.shape[2]) + self.cumulative_length
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            buffer.index_copy_(2, positions, new)
        return self.keys, self.values


class CachedDecoder(torch.nn.Module):
    """Computes the logits of a chunk of one request.

    Attributes:
      model: the user's model.
      max_length: the most tokens of a request.
    """

    def __init__(self, model: torch.nn.Module, max_length: int) -> None:
        """Makes the buffers, after a trial: the model is run on the host, for three tokens."""
        super().__init__()
        self.model = model
        self.max_length = max_length
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        number: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        tokens = torch.arange(1, min(_NUM_TRIED, max_length) + 1).clamp(max=number - 1)
        with torch.no_grad():
            pairs, logits = self._call_once(tokens)
            self._num_layers = len(pairs)
            for layer, pair in enumerate(pairs):
                for name, part in zip((_KEYS, _VALUES), pair, strict=True):
                    shape = (1, part.shape[1], max_length, part.shape[3])
                    empty = torch.zeros(shape, dtype=part.dtype)
                    self.register_buffer(name.format(layer), empty, persistent=False)
            self._check(tokens, logits)
            for buffer in self.buffers(recurse=False):
                buffer.zero_()

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Reads a chunk.

        Returns:
          The logits of the last token, [1, words], or of all, [length, words], if the model has no choice.
        """
        layers = [
            _BufferLayer(
                self.get_buffer(_KEYS.format(layer)), self.get_buffer(_VALUES.format(layer)), position
            )
            for layer in range(self._num_layers)
        ]
        more: dict[str, Any] = {}
        if "position_ids" in self._takes:
            more["position_ids"] = (torch.arange(len(tokens)) + position)[None]
        if "attention_mask" in self._takes:  # some models find positions by it
            more["attention_mask"] = torch.ones(1, self.max_length, dtype=torch.long)
        if "logits_to_keep" in self._takes:
            more["logits_to_keep"] = 1
        cache = cache_utils.Cache(layers=[*layers])
        with _experts_of_one_token(self.model) if len(tokens) == 1 else contextlib.nullcontext():
            outputs = self.model(
                input_ids=tokens.long()[None], past_key_values=cache, use_cache=True, **more
            )
        logits: torch.Tensor = outputs.logits[0]
        return logits

    def _call_once(self, tokens: torch.Tensor) -> tuple[list[tuple[Any, Any]], torch.Tensor]:
        """Calls the model. Returns keys and values of each layer, [1, heads, tokens, width], and logits."""
        cache = cache_utils.Cache(layer_class_to_replicate=_RecordingLayer)
        try:
            logits = self.model(input_ids=tokens[None], past_key_values=cache, use_cache=True).logits[0]
        except Exception as error:
            raise Error(
                f"generate: {type(self.model).__name__} cannot be called with a cache of keys and values "
                f"alone, on the host: {type(error).__name__}: {error}. {_OTHER_WAY}"
            ) from error
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
        if not pairs or any(part is None or part.dim() != 4 for pair in pairs for part in pair):
            raise Error(
                f"generate: {type(self.model).__name__} keeps something else between tokens than the "
                "keys and values of attention, or keeps these elsewhere than in transformers' Cache. "
                f"{_OTHER_WAY}"
            )
        return pairs, logits

    def _check(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Compares the logits of two chunks with those of one call.

        No model is known by name: one whose masks depend on lengths would be wrong in silence.
        """
        for chunk in (slice(0, 2), slice(2, None)):
            position = torch.tensor(chunk.start, dtype=torch.int32)
            chunk_logits = self(tokens[chunk].int(), position)
        expected = logits[-1].float()
        difference = (chunk_logits[-1].float() - expected).norm() / expected.norm()
        if difference > torch.finfo(logits.dtype).eps ** 0.5:
            raise Error(
                f"generate: {type(self.model).__name__} computes other logits when its cache of keys and "
                f"values has a fixed length, here {self.max_length}: on the host they differ by "
                f"{difference:.1e} of their norm. Its masks do not depend on positions alone. {_OTHER_WAY}"
            )


@contextlib.contextmanager
def _experts_of_one_token(model: Any) -> Iterator[None]:
    """Makes experts take the matrices of one token's experts, as transformers does on a GPU.

    Products by groups of rows are for many rows, and JAX cannot batch them over requests.
    """
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation(
        {
            name: "batched_mm" if implementation == "grouped_mm" else implementation
            for name, implementation in before.items()
        }
    )
    try:
        yield
    finally:
        model.set_experts_implementation(before)


_OTHER_WAY = "Let the plain model generate, on the host: executor.model.generate(...)."
