"""A decoder of transformers as a module that takes a chunk of one request, with keys and values in buffers.

The buffers have a fixed length. transformers' `StaticCache` is made so, too; what is different here is that
the position of a chunk is an argument, so that nothing but keys and values is kept between chunks, and that
layers with a sliding window keep all positions, since their masks leave out those that are too old.

This module needs transformers, so it is imported for its models only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from ipu_pipeline.poptorch.errors import Error

__all__ = ["CachedDecoder"]

_NUM_TRIED = 3  # tokens of the trial
_KEYS, _VALUES = "cached_keys_{}", "cached_values_{}"  # names of buffers, by layer


class _SeenLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """Keeps the keys and values of a request's only call, for their shapes."""

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Needs nothing."""

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
        """No limit."""
        return -1


class _BufferLayer(cache_utils.StaticLayer):  # type: ignore[misc]
    """Keys and values of a layer in buffers, [1, heads, max_length, width], and the position of a chunk."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self.keys, self.values = keys, values
        self.max_cache_len = keys.shape[2]
        self.cumulative_length = position  # what `StaticLayer` calls it
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        """Writes those of the chunk, and returns those of all positions; masks leave out later ones."""
        positions = torch.arange(key_states.shape[2]) + self.cumulative_length
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values


class CachedDecoder(torch.nn.Module):
    """Computes the logits of a chunk of one request.

    Attributes:
      model: the user's model.
      max_length: the most tokens of a request.
    """

    def __init__(self, model: torch.nn.Module, max_length: int) -> None:
        """Makes the buffers, after a trial: the model is run on the host, for three tokens.

        Raises:
          Error: the model keeps something else than keys and values, or computes other logits when these
            have a fixed length.
          Others: errors that the model raises.
        """
        super().__init__()
        self.model = model
        self.max_length = max_length
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.num_layers = 0
        with torch.no_grad():
            self._add_buffers(*self._try())

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Reads a chunk.

        Args:
          tokens: int32 [length].
          position: the place of the first of them in the request, an int32 scalar.

        Returns:
          The logits of the last token, [1, words], or of all, [length, words], if the model has no choice.
        """
        buffers = [
            (self.get_buffer(_KEYS.format(number)), self.get_buffer(_VALUES.format(number)))
            for number in range(self.num_layers)
        ]
        return self._compute(tokens, position, buffers, self.max_length)

    def _compute(
        self, tokens: torch.Tensor, position: torch.Tensor, buffers: Sequence[Any], max_length: int
    ) -> torch.Tensor:
        layers = [_BufferLayer(keys, values, position) for keys, values in buffers]
        more: dict[str, Any] = {}
        if "position_ids" in self._takes:
            more["position_ids"] = (torch.arange(len(tokens)) + position)[None]
        if "attention_mask" in self._takes:  # some models find positions by it
            more["attention_mask"] = torch.ones(1, max_length, dtype=torch.long)
        if "logits_to_keep" in self._takes:
            more["logits_to_keep"] = 1
        cache = cache_utils.Cache(layers=layers)
        found = self.model(input_ids=tokens.long()[None], past_key_values=cache, use_cache=True, **more)
        logits: torch.Tensor = found.logits[0]
        return logits

    def _try(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compares chunks with one call. Returns keys and values of each layer, [1, heads, tokens, width]."""
        num_words = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator, union-attr]
        tokens = torch.arange(1, _NUM_TRIED + 1).clamp(max=num_words - 1)
        cache = cache_utils.Cache(layer_class_to_replicate=_SeenLayer)
        wanted = self.model(input_ids=tokens[None], past_key_values=cache, use_cache=True).logits[0, -1]
        seen = [(layer.keys, layer.values) for layer in cache.layers]
        name = type(self.model).__name__
        if not seen or any(part is None or part.dim() != 4 for pair in seen for part in pair):
            raise Error(
                f"generate: {name} keeps something else than the keys and values of attention between "
                f"tokens, or keeps these elsewhere than in transformers' Cache. {_OTHER_WAY}"
            )
        buffers = [tuple(map(torch.zeros_like, pair)) for pair in seen]
        for chunk in (slice(0, 2), slice(2, 3)):
            position = torch.tensor(chunk.start, dtype=torch.int32)
            given = self._compute(tokens[chunk].int(), position, buffers, _NUM_TRIED)
        difference = (given[-1].float() - wanted.float()).norm() / wanted.float().norm()
        if difference > torch.finfo(wanted.dtype).eps ** 0.5:
            raise Error(
                f"generate: {name} computes other logits when its cache of keys and values has a fixed "
                f"length: on the host they differ by {difference:.1e} of their norm. Its mask does not "
                f"depend on positions. {_OTHER_WAY}"
            )
        return seen

    def _add_buffers(self, *seen: tuple[torch.Tensor, torch.Tensor]) -> None:
        for number, pair in enumerate(seen):
            for name, part in zip((_KEYS, _VALUES), pair, strict=True):
                shape = (1, part.shape[1], self.max_length, part.shape[3])
                self.register_buffer(
                    name.format(number), torch.zeros(shape, dtype=part.dtype), persistent=False
                )
        self.num_layers = len(seen)


_OTHER_WAY = "Let the plain model generate, on the host: executor.model.generate(...)."
