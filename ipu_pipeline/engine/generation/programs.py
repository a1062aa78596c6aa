"""The programs of a stage: one token of each slot of a group, and a chunk of the prompt of one slot.

Both take the caches of a group, whose first axis is the slots, and give their memory to the new ones. The
last stage's programs also choose tokens: they return the newest token of each slot, [slots].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.generation.sampling import choose
from ipu_pipeline.engine.generation.stage_runs import TOKENS, Given, StageRun, scanned
from ipu_pipeline.engine.tracing.traced import Source

__all__ = ["SlotNumbers", "StagePrograms"]


class SlotNumbers(NamedTuple):
    """Numbers of a request, scalars, or of the requests of all slots, stacked."""

    positions: Any  # the place of the token, or of the first one of a chunk, int32
    seeds: Any  # uint32
    numbers: Any  # of the request among those with its seed, uint32


class StagePrograms:
    """The programs of a stage; each is compiled when it is first called."""

    def __init__(
        self,
        index: int,
        run: StageRun,
        make_run: Callable[[int], StageRun] | None,
        logits: Source | None,
        results: Any,
    ) -> None:
        """Compiles nothing."""
        self.run, self._make_run, self._logits = run, make_run, logits
        self._index, self._results = index, results
        self._decodes: dict[bool, Callable[..., Any]] = {}
        self._chunks: dict[int, Callable[..., Any]] = {}

    def decode(self, is_sampled: bool) -> Callable[..., Any]:
        """The program for one token of each slot.

        It takes caches, weights, inputs (each with a first axis for the slots; `TOKENS` is int32 [slots]),
        `SlotNumbers`, the state's update count, and if tokens are drawn, `SamplingArrays`; it returns the
        outputs and caches. In place of outputs, the last stage returns the tokens that are chosen.
        """
        is_sampled = is_sampled and self._logits is not None
        if is_sampled not in self._decodes:
            self._decodes[is_sampled] = self._make_decode(is_sampled)
        return self._decodes[is_sampled]

    def _make_decode(self, is_sampled: bool) -> Callable[..., Any]:
        run = self.run

        def decode(caches: Any, weights: Any, inputs: Any, numbers: Any, count: Any, sampling: Any) -> Any:
            def one(caches: Any, inputs: Any, numbers: Any, sampling: Any) -> Any:
                key = _request_key(numbers)
                given = Given(numbers.positions, jax.random.fold_in(key, 0), count)
                own = [x.reshape(1) if s == TOKENS else x for s, x in zip(run.inputs, inputs, strict=True)]
                outputs, caches = run(caches, weights, own, given)
                if self._logits is None:
                    return outputs, caches
                logits = self._find_logits(run, own, outputs)
                return _choose(logits, sampling, key, numbers.positions + 1), caches

            return jax.vmap(one, in_axes=(0, 0, 0, 0 if is_sampled else None))(
                caches, inputs, numbers, sampling
            )

        return self._jit(decode, f"stage{self._index}_decode")

    def chunk(self, length: int) -> Callable[..., Any]:
        """The program for a chunk of a slot's prompt.

        It takes caches, weights, inputs (of the one request), `SlotNumbers` and the update count like
        `decode`, the slot's number, and the initial values of the caches, from which a request starts. The
        last stage also takes the newest tokens of the slots, int32 [slots], and if tokens are drawn
        `SamplingArrays`; it returns the tokens, with that of this slot chosen anew, in place of outputs.
        """
        if length not in self._chunks:
            self._chunks[length] = self._make_chunk(length)
        return self._chunks[length]

    def input_avals(self, length: int, num_slots: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the inputs of a program: of a chunk, or for length 0 of `decode`."""
        is_whole = self._make_run is not None and length > 1
        run = self._make_run(length) if self._make_run is not None and is_whole else self.run
        axes = [num_slots] if length == 0 else [length] if length > 1 and not is_whole else []
        return [
            jax.ShapeDtypeStruct((length or num_slots,) if s == TOKENS else (*axes, *x.shape), x.dtype)
            for s, x in zip(run.inputs, run.input_avals, strict=True)
        ]

    def _make_chunk(self, length: int) -> Callable[..., Any]:
        run = self.run
        call: Callable[..., Any] = functools.partial(scanned, run, length)
        if self._make_run is not None and length > 1:
            run = call = self._make_run(length)
        elif length == 1:
            call = run
        is_stacked = call is not run

        def chunk(
            caches: Any,
            weights: Any,
            inputs: Any,
            numbers: Any,
            count: Any,
            slot: Any,
            initial: Any,
            tokens: Any,
            sampling: Any,
        ) -> Any:
            key = _request_key(numbers)
            given = Given(numbers.positions, jax.random.fold_in(key, 0), count)
            rows = [
                jnp.where(
                    numbers.positions == 0, first, jax.lax.dynamic_index_in_dim(cache, slot, 0, False)
                )
                for cache, first in zip(caches, initial, strict=True)
            ]
            own = [
                x.reshape(length, 1) if is_stacked and s == TOKENS else x
                for s, x in zip(run.inputs, inputs, strict=True)
            ]
            outputs, rows = call(rows, weights, own, given)
            caches = [
                jax.lax.dynamic_update_index_in_dim(cache, row, slot, 0)
                for cache, row in zip(caches, rows, strict=True)
            ]
            if self._logits is None:
                return outputs, caches
            logits = self._find_logits(run, own, outputs)
            token = _choose(logits, sampling, key, numbers.positions + length)
            return tokens.at[slot].set(token), caches

        return self._jit(chunk, f"stage{self._index}_prompt{length}")

    def _find_logits(self, run: StageRun, inputs: Any, outputs: Any) -> Any:
        """The logits of the last token that a run has read, [words]."""
        known = zip((*run.inputs, *run.outputs), (*inputs, *outputs), strict=True)
        found = next(value for source, value in known if source == self._logits)
        return found.reshape(-1, found.shape[-1])[-1]

    def _jit(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        function.__name__ = function.__qualname__ = name
        placed = {} if self._results is None else {"out_shardings": self._results}
        return jax.jit(function, donate_argnums=0, **placed)


def _request_key(numbers: Any) -> jax.Array:
    return jax.random.fold_in(jax.random.key(numbers.seeds), numbers.numbers)


def _choose(logits: Any, sampling: Any, key: Any, position: Any) -> jax.Array:
    """Chooses the token for a place of a request, by a key that depends on the two alone."""
    return choose(logits, sampling, jax.random.fold_in(jax.random.fold_in(key, 1), position))
