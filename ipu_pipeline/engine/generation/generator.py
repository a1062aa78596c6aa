"""The generator: stages that answer prompts, by a loop over requests."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.generation.bound_stages import (
    BoundStages,
    ProgramKey,
    SlotGroup,
    StageBuilder,
    make_element,
)
from ipu_pipeline.engine.generation.requests import Limits, Request, make_request
from ipu_pipeline.engine.generation.sampling import Sampling
from ipu_pipeline.engine.mesh_isolation import apart
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.resplitting import resplit
from ipu_pipeline.engine.state import PipelineState, check_not_traced, check_state
from ipu_pipeline.engine.tracing.frames import ProgramNames, Surroundings
from ipu_pipeline.engine.tracing.stage_lists import Mapping as DeviceMapping
from ipu_pipeline.engine.tracing.stage_lists import StageEntry
from ipu_pipeline.engine.tracing.stage_meshes import TensorParallel
from ipu_pipeline.ground.checks import check_positive, is_integer
from ipu_pipeline.ground.pytrees import describe


class RequestQueue:
    """Requests that wait for a slot, and those in flight; safe to use from several threads."""

    def __init__(self, requests: Iterable[Request] = (), *, is_open: bool = False) -> None:
        """Takes the first requests."""
        self._waiting = collections.deque(requests)
        self._all = list(self._waiting)
        self._changed = threading.Condition()
        self._is_open = is_open
        self.error: BaseException | None = None  # what ended all requests

    def submit(self, request: Request) -> bool:
        """Adds a request. Returns whether that was still possible."""
        with self._changed:
            if self._is_open:
                self._all = [member for member in self._all if not member.is_done]
                self._all.append(request)
                self._waiting.append(request)
                self._changed.notify_all()
            return self._is_open

    def close(self) -> None:
        """Says that no more requests will come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Closes, and ends all requests that are not done; see `Request.end`."""
        with self._changed:
            self._is_open, self.error = False, error
            self._waiting.clear()
            self._changed.notify_all()
        for request in self._all:
            request.end(error)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._waiting)

    def take(self) -> Request | None:
        """The next request that is not done; None if none waits."""
        with self._changed:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.is_done:
                    return request
            return None

    def wait(self) -> bool:
        """Waits until a request waits for a slot. Returns False if none will."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._is_open)
            return bool(self._waiting)


def answer_requests(
    stages: BoundStages,
    queue: RequestQueue,
    num_groups: int,
    num_slots: int,
    prepare: Callable[[Request], Sequence[int]],
) -> None:
    """Answers the requests of a queue, until it is closed and empty."""
    # Each group starts a token of each slot, and then its tokens of the turn before are read. So the host
    # is at most a turn behind, and a stage never waits for it if there are as many groups as devices. A
    # request that ends by a stop token has one more token computed, which is dropped.
    groups: list[SlotGroup] = []
    while queue.wait():
        groups = groups or [SlotGroup(stages, num_slots) for _group in range(num_groups)]
        while queue.num_waiting or any(group.num_taken or group.num_unread for group in groups):
            for group in groups:  # before any token, so that no stage waits for a prompt that just came
                # As many requests in each group, so that all stages have work.
                num_all = queue.num_waiting + sum(slots.num_taken for slots in groups)
                room = min(num_slots, -(-num_all // num_groups)) - group.num_taken
                for _slot in range(room):
                    request = queue.take()
                    if request is not None:
                        group.join(request, prepare(request))
            for group in groups:
                is_started = group.num_taken > 0
                if is_started:
                    group.decode()
                group.read(1 if is_started else 0)


GREEDY = Sampling()
# Prompts are divided into these lengths, and not padded to them: padding would change what a stage keeps,
# unless it addresses all of it by position.
_CHUNK_LENGTHS = (1, 4, 16, 64, 256)
_logger = logging.getLogger("ipu_pipeline")


class Generator:
    """A language model in stages, each on its device, that answers several requests at a time.

    Stage functions are written for one request. The first stage takes `tokens`, int32 [length], and
    `position`, an int32 scalar, the position of the first of these tokens. The last stage returns logits,
    [length, words], or only the last token's logits, [words]. A prompt comes in chunks, without padding,
    and then one new token at a time. Values that a stage needs from earlier tokens (caches) are variables
    that it assigns (`get_variable` with trainable=False, `assign`): each request has its own copies, which
    start from their initial values.

    Metrics and enqueued values are dropped. Random keys (`next_rng_key`) depend on the request's seed and
    the position.

    Example:
      >>> def embed(w, tokens, position):
      ...     return w[tokens], position
      >>> def predict(w, x, position):  # a model that only looks at the last token
      ...     return x @ w
      >>> stages, parameters = [embed, predict], [np.eye(8), np.roll(np.eye(8), 1, axis=1)]
      >>> pipeline = engine.Pipeline(stages, parameters=parameters, num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), (np.zeros(4, np.int32), np.int32(0)))
      >>> generator = engine.Generator(stages, parameters=parameters, max_length=16)
      >>> generator.generate(state, [[3, 4], [6]], max_new_tokens=3)
      [array([5, 6, 7], dtype=int32), array([7, 0, 1], dtype=int32)]

    Attributes:
      pipeline: the stages as a traced pipeline for inference; its `variables` are the variables that a
        state must have, and the caches.
    """

    def __init__(
        self,
        stages: Sequence[StageEntry | Sequence[StageEntry]],
        *,
        max_length: int,
        parameters: Sequence[Any] | None = None,
        num_slots: int | None = None,
        num_groups: int | None = None,
        chunk_lengths: Sequence[int] | None = None,
        token_by_token: bool | None = None,
        device_mapping: DeviceMapping | None = None,
        devices: Sequence[Any] | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        """Traces the stages, for one token; nothing is compiled yet, and no device is used.

        Args:
          stages: as for `Pipeline`.
          max_length: the most tokens of a request, with its prompt; caches must have room for them.
          parameters: as for `Pipeline`; shapes are enough.
          num_slots: the most requests in flight, a multiple of `num_groups`; each has its own caches. None:
            4 for each group.
          num_groups: the number of groups of slots; a group's slots go through a stage together. Fewer
            groups than devices leave devices idle. None: as many as devices, or `num_slots` if that is
            less.
          chunk_lengths: the lengths of the chunks in which prompts are read, longest first, including 1;
            each stage has a program for each length used. None: 1, 4, 16, 64 and 256.
          token_by_token: whether stages take one token at a time, so that their programs read the tokens
            of a chunk in a loop. None: True if they cannot be traced for two tokens.
          device_mapping: as for `Pipeline`.
          devices: as for `Pipeline`.
          tensor_parallel: as for `Pipeline`.

        Raises:
          TypeError: an argument has another type.
          ValueError: an argument has a wrong value, or the last stage does not return logits.
          Others: errors of tracing, see `Pipeline.trace`.
        """
        check_positive("max_length", max_length)
        self._max_length = int(max_length)
        self._chunk_lengths = _check_chunk_lengths(chunk_lengths, self._max_length)
        # Only traced, never prepared: its micro-batch is a chunk and its position, its shapes are lengths.
        self.pipeline = Pipeline(
            stages,
            num_micro_batches=1,
            parameters=parameters,
            max_shapes=len(self._chunk_lengths) + 2,
            device_mapping=device_mapping,
            devices=devices,
            tensor_parallel=tensor_parallel,
        )
        self._num_slots, self._num_groups = _check_slots(
            num_slots, num_groups, len(set(self.pipeline.device_mapping))
        )
        self._devices = devices
        self._surroundings = Surroundings.now(ProgramNames())
        self.pipeline.trace(make_element(1))
        (logits,) = _check_logits(self.pipeline, 1)
        self._num_words = int(logits.shape[-1])
        self._limits = Limits(self._max_length, self._num_words)
        self._is_one_by_one = self._find_one_by_one(token_by_token)
        self._running = threading.Lock()  # held while requests are answered
        self._builder: StageBuilder | None = None  # made at the first call that needs devices
        self._queue: RequestQueue | None = None  # of `serving`

    def _find_one_by_one(self, choice: bool | None) -> bool:
        if choice is not None and not isinstance(choice, bool):
            raise TypeError(f"token_by_token must be True, False, or None to find out; got {choice!r}.")
        if choice or self._chunk_lengths == (1,):
            return bool(choice)
        try:
            self._for_length(min(length for length in self._chunk_lengths if length > 1))
        except Exception as error:
            if choice is False:
                raise
            _logger.info("Prompts are read token by token, as stages cannot be traced for more: %s", error)
            return True
        return False

    def _for_length(self, length: int) -> Pipeline:
        """The stages, traced for a chunk."""
        pipeline = self.pipeline.for_shapes(make_element(length))
        _check_logits(pipeline, length)
        return pipeline

    @property
    def max_length(self) -> int:
        """The most tokens of a request, with its prompt."""
        return self._max_length

    @property
    def num_slots(self) -> int:
        """The most requests in flight."""
        return self._num_slots

    @property
    def num_groups(self) -> int:
        """The number of groups of slots."""
        return self._num_groups

    @property
    def num_words(self) -> int:
        """The number of words, the last axis of the logits."""
        return self._num_words

    @property
    def token_by_token(self) -> bool:
        """Whether stages take one token at a time."""
        return self._is_one_by_one

    # Running.

    @apart
    def generate(
        self,
        state: PipelineState | Mapping[str, Any],
        prompts: Sequence[Any],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
    ) -> list[np.ndarray[Any, Any]]:
        """Answers prompts.

        Args:
          state: the state of a pipeline whose variables have the names of the stages' variables, or a dict
            of these variables. Arrays that are on their stage's device are used without a copy.
          prompts: sequences of integers from 0 to `num_words` - 1, none of them empty.
          max_new_tokens: the most tokens of an answer; or a list with one number for each prompt.
          sampling: the `Sampling` of all prompts; or a list with one for each prompt.
          stop_tokens: an answer ends with the first of these tokens.
          seed: the seed of the random keys, from 0 to 2**32 - 1. A prompt's keys depend on the seed, the
            prompt's number and the token's position, and not on other prompts.

        Returns:
          The new tokens of each prompt, int32 [number].

        Raises:
          RuntimeError: it is called within `serving`.
          TypeError: an argument has another type.
          ValueError: an argument is not usable, or the state lacks variables.
        """
        check_not_traced("Generator.generate", state)
        if not isinstance(prompts, (list, tuple, np.ndarray)):
            raise TypeError(
                f"prompts must be a list of sequences of integers; got {type(prompts).__name__}."
            )
        for place, prompt in enumerate(prompts):
            if np.ndim(prompt) == 0 and not isinstance(prompt, (str, bytes)):
                raise TypeError(
                    f"prompts must be a list of sequences of integers, and prompts[{place}] is {prompt!r}. "
                    "For one prompt, give a list of one."
                )
        number = len(prompts)
        requests = [
            make_request(prompt, f"prompts[{place}]", self._limits, most, how, stop_tokens, seed, place)
            for place, (prompt, most, how) in enumerate(
                zip(
                    prompts,
                    _for_each("max_new_tokens", max_new_tokens, number),
                    _for_each("sampling", sampling, number),
                    strict=True,
                )
            )
        ]
        if self._queue is not None:
            raise RuntimeError(
                "generate was called within `serving`: call submit, and result() of what it returns."
            )
        with self._running:
            stages = self._bind(state)
            keys = {key for request in requests for key in self._find_keys(request)}
            self._surroundings.run(self._prepare().compile, keys)
            self._answer(stages, RequestQueue(requests))
        return [request.result() for request in requests]

    @contextlib.contextmanager
    def serving(self, state: PipelineState | Mapping[str, Any]) -> Iterator[Generator]:
        """Answers requests within a `with` block, in a separate thread; see `submit`.

        The end of the block waits for all submitted requests. If the block ends with an error, they are
        cancelled.

        Args:
          state: as for `generate`.

        Raises:
          RuntimeError: it is already serving.
          TypeError, ValueError: as for `generate`.
          Others: errors of the stages while they ran.
        """
        check_not_traced("Generator.serving", state)
        if self._queue is not None:
            raise RuntimeError("serving was called within `serving`. Leave the first block before.")
        with self._running:
            stages, queue = self._bind(state), RequestQueue(is_open=True)
            errors: list[BaseException] = []

            def serve() -> None:
                try:
                    self._answer(stages, queue)
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=serve, name="engine.Generator", daemon=True)
            self._queue = queue
            try:
                thread.start()
                yield self
                queue.close()
                thread.join()
            except BaseException:
                queue.end(None)
                raise
            finally:
                self._queue = None
                if thread.ident is not None:
                    thread.join()
            if errors:
                raise errors[0]

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
    ) -> Request:
        """Submits a request, within `serving`, from any thread. It does not wait.

        Args:
          prompt: a sequence of integers from 0 to `num_words` - 1, not empty.
          max_new_tokens: the most tokens of the answer.
          sampling: the way in which tokens are chosen.
          stop_tokens: the answer ends with the first of these tokens.
          seed: the seed of the request's random keys, from 0 to 2**32 - 1. `generate` with this seed gives
            its first prompt the same keys.

        Returns:
          The request: iterate over it for its tokens as they come, or call `result`.

        Raises:
          RuntimeError: it is not serving, or serving has ended with an error.
          TypeError, ValueError: as for `generate`.
        """
        request = make_request(
            prompt, "prompt", self._limits, max_new_tokens, sampling, stop_tokens, seed, 0
        )
        queue = self._queue
        if queue is not None and queue.submit(request):
            return request
        if queue is not None and queue.error is not None:
            raise RuntimeError(
                "submit: the generator serves no more, since it met an error."
            ) from queue.error
        raise RuntimeError(
            "submit was called while the generator is not serving, so there would be no answer. Call it "
            "within `with generator.serving(state):`, or call generate(state, prompts, ...)."
        )

    def _answer(self, stages: BoundStages, queue: RequestQueue) -> None:
        """Answers what is in a queue. All its requests are done when this ends, in whichever way."""
        builder = self._prepare()

        def prepare(request: Request) -> list[int]:
            builder.compile(self._find_keys(request))
            return self._divide(len(request.prompt))

        try:
            per_group = self._num_slots // self._num_groups
            self._surroundings.run(answer_requests, stages, queue, self._num_groups, per_group, prepare)
        except BaseException as error:
            queue.end(error)
            raise

    @apart
    def compile(self, prompt_lengths: Iterable[int] | None = None, *, drawn: bool = False) -> None:
        """Compiles programs in advance; otherwise each is compiled for the first request that needs it.

        Args:
          prompt_lengths: the lengths of the prompts to come; None: any length.
          drawn: whether there will be requests whose tokens are drawn at random, besides greedy ones.

        Raises:
          ValueError: a length is wrong, or there are too few devices.
          Others: errors of tracing or XLA.
        """
        lengths = list(self._chunk_lengths)
        if prompt_lengths is not None:
            lengths = []
            for length in prompt_lengths:
                check_positive("prompt_lengths: each", length)
                lengths += self._divide(int(length))
        keys = [ProgramKey(length, is_sampled) for length in (0, *lengths) for is_sampled in {False, drawn}]
        with self._running:
            builder = self._prepare()
            self._surroundings.run(builder.compile, keys)

    def resplit(self, state: PipelineState) -> PipelineState:
        """Moves the variables of a state from another split of the same layers, as `engine.resplit` does.

        Args:
          state: of any pipeline, on any devices.

        Returns:
          A state that `generate` takes, without optimizer state.

        Raises:
          TypeError, ValueError: see `engine.resplit`.
        """
        check_state("Generator.resplit", state)
        caches = [spec for stage in self.pipeline.traced.stages for spec in stage.assigned]
        empty = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in caches}
        old_state = dataclasses.replace(state, variables={**state.variables, **empty}, optimizer_state=None)
        moved = resplit(old_state, self.pipeline)
        variables = {name: value for name, value in moved.variables.items() if name not in empty}
        return dataclasses.replace(moved, variables=variables)

    def _find_keys(self, request: Request) -> set[ProgramKey]:
        """The programs that a request needs."""
        is_sampled = request.sampling.temperature > 0
        *firsts, last = self._divide(len(request.prompt))
        keys = {ProgramKey(length, False) for length in firsts} | {ProgramKey(last, is_sampled)}
        return keys | {ProgramKey(0, is_sampled)} if request.max_new_tokens > 1 else keys

    def _prepare(self) -> StageBuilder:
        if self._builder is None:
            per_group = self._num_slots // self._num_groups
            self._builder = self._surroundings.run(
                StageBuilder, self.pipeline, self._devices, per_group, self._is_one_by_one
            )
        return self._builder

    def _bind(self, state: PipelineState | Mapping[str, Any]) -> BoundStages:
        """The stages with the weights of a state."""
        return self._surroundings.run(self._prepare().bind, state)

    def _divide(self, length: int) -> list[int]:
        """The lengths of the chunks of a prompt."""
        chunks: list[int] = []
        for chunk_length in self._chunk_lengths:
            number, length = divmod(length, chunk_length)
            chunks += [chunk_length] * number
        return chunks


def _check_chunk_lengths(chunk_lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The lengths of a prompt's chunks, the longest first; raises a ValueError if they are not usable."""
    lengths = list(_CHUNK_LENGTHS if chunk_lengths is None else chunk_lengths)
    if not all(is_integer(length, 1) for length in lengths) or 1 not in lengths:
        raise ValueError(
            "chunk_lengths must be integers of at least 1, and 1 must be among them, so that every prompt "
            f"can be divided into such lengths; got {chunk_lengths!r}."
        )
    return tuple(sorted({int(length) for length in lengths if length <= max_length}, reverse=True))


def _check_slots(num_slots: Any, num_groups: Any, num_devices: int) -> tuple[int, int]:
    """The numbers of slots and groups; raises a ValueError if they are not usable."""
    if num_slots is not None:
        check_positive("num_slots", num_slots)
    if num_groups is None:
        num_groups = num_devices if num_slots is None else min(num_devices, num_slots)
    check_positive("num_groups", num_groups)
    if num_slots is None:
        num_slots = 4 * num_groups
    if num_slots % num_groups:
        raise ValueError(
            f"num_slots must be a multiple of num_groups, {num_groups}, which have as many slots each; got "
            f"{num_slots}. Take {-(-num_slots // num_groups) * num_groups}, or give num_groups, too."
        )
    return int(num_slots), int(num_groups)


def _check_logits(pipeline: Pipeline, length: int) -> Sequence[jax.ShapeDtypeStruct]:
    """Raises if the last stage does not return logits for a chunk. Returns their shape, in a list."""
    avals = pipeline.traced.returned_avals
    is_logits = len(avals) == 1 and (
        avals[0].ndim == 1 or (avals[0].ndim == 2 and avals[0].shape[0] in (1, length))
    )
    if not is_logits or not jnp.issubdtype(avals[0].dtype, jnp.floating) or 0 in avals[0].shape:
        results = ", ".join(map(describe, avals)) or "nothing"
        raise ValueError(
            f"The last stage must return logits, floating-point numbers [{length}, words] for {length} "
            f"tokens of one request, or [words] for the last of them; it returns {results}. Stages of a "
            "generator have no axis for a batch, and no loss."
        )
    return avals


def _for_each(name: str, value: Any, number: int) -> Sequence[Any]:
    """A list with the value of each prompt."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} must have one entry for each of the {number} prompts; got {len(value)}.")
    return list(value)
