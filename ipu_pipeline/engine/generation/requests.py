"""Requests: a prompt, and its new tokens, which any thread may wait for."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_pipeline.engine.generation.sampling import Sampling
from ipu_pipeline.ground.checks import check_positive, is_integer, require


@dataclass(frozen=True)
class Limits:
    """The most tokens of a request with its prompt, and the number of words of the model."""

    max_length: int
    num_words: int


class Request:
    """A submitted prompt, and its answer.

    Iterate over it for the new tokens, ints, as they come; `result` returns all of them. Both block the
    calling thread, and raise the error that ended the request early, if any.

    Example:
      >>> def embed(w, tokens, position):
      ...     return w[tokens], position
      >>> def predict(w, x, position):
      ...     return x @ w
      >>> stages, parameters = [embed, predict], [np.eye(8), np.roll(np.eye(8), 1, axis=1)]
      >>> pipeline = engine.Pipeline(stages, parameters=parameters, num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), (np.zeros(4, np.int32), np.int32(0)))
      >>> generator = engine.Generator(stages, parameters=parameters, max_length=16)
      >>> with generator.serving(state):
      ...     request = generator.submit([3], max_new_tokens=3)
      ...     request.result(timeout=60)
      array([4, 5, 6], dtype=int32)

    Attributes:
      prompt: int32 [length].
      max_new_tokens: the most tokens of the answer.
      sampling: the way in which tokens are chosen.
      stop_tokens: the answer ends with the first of these tokens.
      seed: the seed of its random keys, with `number`.
      number: its number among the requests with this seed.
    """

    def __init__(
        self,
        prompt: np.ndarray[Any, Any],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: frozenset[int],
        seed: int,
        number: int,
    ) -> None:
        """Takes values that `make_request` has checked."""
        self.prompt, self.max_new_tokens, self.sampling = prompt, max_new_tokens, sampling
        self.stop_tokens, self.seed, self.number = stop_tokens, seed, number
        self._tokens: list[int] = []
        self._changed = threading.Condition()
        self._is_done = False
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether no more tokens will come."""
        return self._is_done

    def add(self, token: int) -> None:
        """Adds the next token, unless the request is done; ends it if that was the last one."""
        with self._changed:
            if self._is_done:
                return
            self._tokens.append(token)
            self._is_done = len(self._tokens) == self.max_new_tokens or token in self.stop_tokens
            self._changed.notify_all()

    def cancel(self) -> None:
        """Ends the request with the tokens that have come; its slot is free from the next token on."""
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Ends the request, unless it is done; those who wait for it raise the error, if there is one."""
        with self._changed:
            if not self._is_done:
                self._is_done, self._error = True, error
                self._changed.notify_all()

    def __iter__(self) -> Iterator[int]:
        """Yields the new tokens as they come."""
        place = 0
        while True:
            with self._changed:
                while not self._is_done and place == len(self._tokens):
                    self._changed.wait()
                if place == len(self._tokens):
                    self._raise()
                    return
                token = self._tokens[place]
            yield token
            place += 1

    def result(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Waits until the request is done.

        Args:
          timeout: the most seconds to wait; None: no limit.

        Returns:
          The new tokens, int32 [number], with the stop token if there was one.

        Raises:
          TimeoutError: the request was not done in time; it continues.
          Others: the error that ended it early.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(
                    f"The request has {len(self._tokens)} of at most {self.max_new_tokens} tokens after "
                    f"{timeout} seconds. It goes on: wait longer, or call cancel()."
                )
            self._raise()
            return np.array(self._tokens, np.int32)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def make_request(
    prompt: Any,
    name: str,
    limits: Limits,
    max_new_tokens: Any,
    sampling: Any,
    stop_tokens: Any,
    seed: Any,
    number: int,
) -> Request:
    """Checks what a user asks for."""
    require(isinstance(sampling, Sampling), "sampling must be an engine.Sampling", sampling, TypeError)
    check_positive("max_new_tokens", max_new_tokens)
    require(is_integer(seed, 0) and seed < 2**32, "seed must be an integer from 0 to 2**32 - 1", seed)
    if isinstance(stop_tokens, (str, bytes)) or not isinstance(stop_tokens, (Collection, np.ndarray)):
        raise TypeError(f"stop_tokens must be a list of tokens, such as [0]; got {stop_tokens!r}.")
    tokens = _check_tokens(prompt, name, limits.num_words)
    if not len(tokens):
        raise ValueError(
            f"{name} is empty, but each token is computed from those before it. Begin with a token that "
            "stands for the beginning."
        )
    stops = _check_tokens(list(stop_tokens), "stop_tokens", limits.num_words)
    if len(tokens) + max_new_tokens > limits.max_length:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and with max_new_tokens={max_new_tokens} that is more than "
            f"the generator's max_length, {limits.max_length}. Shorten one of them, or make the generator, "
            "and the caches of its stages, for longer ones."
        )
    return Request(tokens, int(max_new_tokens), sampling, frozenset(stops.tolist()), int(seed), number)


def _check_tokens(tokens: Sequence[int], name: str, num_words: int) -> np.ndarray[Any, Any]:
    """Tokens as an array of int32."""
    if isinstance(tokens, (str, bytes)):
        raise TypeError(
            f"{name} must be a sequence of integers; got {tokens!r}. Encode it with a tokenizer."
        )
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        array = np.zeros((1, 1))
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be a sequence of integers, one request's tokens; got "
            f"{array.dtype.name}{list(array.shape)}."
        )
    if array.min() < 0 or array.max() >= num_words:
        wrong = next(int(token) for token in array if not 0 <= token < num_words)
        raise ValueError(
            f"{name} has the token {wrong}, but tokens are from 0 to {num_words - 1}, as the last stage "
            f"returns logits of {num_words} words."
        )
    return array.astype(np.int32)
