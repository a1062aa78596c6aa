"""The public call: a generator made of a model's stages, which answers prompts with the weights of a state."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.apart import apart
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, make_groups
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.generation.loop import RequestQueue, run
from ipu_pipeline.engine.generation.programs import StagePrograms
from ipu_pipeline.engine.generation.requests import Limits, Request, make_request
from ipu_pipeline.engine.generation.sampling import Sampling
from ipu_pipeline.engine.generation.slots import BoundStages
from ipu_pipeline.engine.generation.stage_runs import StageRun, make_runs
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.state_checks import MOVES, check_exists, check_not_traced, check_state
from ipu_pipeline.engine.tracing.frames import ProgramNames
from ipu_pipeline.engine.tracing.keys import as_int32
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.tracing.stage_lists import Mapping as DeviceMapping
from ipu_pipeline.engine.tracing.stage_lists import StageEntry
from ipu_pipeline.engine.tracing.surroundings import Surroundings
from ipu_pipeline.engine.tracing.tensor_parallel import TensorParallel
from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.ground.first_run import begin_first_run
from ipu_pipeline.ground.shapes import as_shape, describe

__all__ = ["Generator"]

GREEDY = Sampling()
_CHUNK_LENGTHS = (1, 4, 16, 64, 256)
_logger = logging.getLogger("ipu_pipeline")


class Generator:
    """A language model in stages, each on its device, that answers several requests at a time.

    A stage handles one request: the first one takes `tokens`, int32 [length], and `position`, an int32 scalar
    that is the place of the first of them, and the last one returns logits, [length, words], or only those
    of the last token, [words]. A prompt comes in chunks, without padding, and then each new token. What a
    stage needs of earlier tokens is in variables that it assigns (`get_variable` with trainable=False,
    `assign`): each request has its own, which start from their initial values.

    Example:
      generator = Generator([embed, block, predict], parameters=shapes, max_length=256)
      answers = generator.generate(state, prompts, max_new_tokens=32)
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
          num_groups: groups of slots; a group's go through a stage together. Fewer groups than devices leave
            devices idle. None: as many as devices, or `num_slots` if that is less.
          chunk_lengths: in what lengths a prompt is read, longest first, with 1 among them; there is a
            program of each stage for each that occurs. None: 1, 4, 16, 64 and 256.
          token_by_token: whether stages take one token at a time, so that their programs read the tokens
            of a chunk in a loop. None: if they cannot be traced for two.
          device_mapping: as for `Pipeline`.
          devices: as for `Pipeline`.
          tensor_parallel: as for `Pipeline`.

        Raises:
          TypeError: an argument has another type.
          ValueError: an argument is not usable, or the last stage does not return logits.
          Others: what tracing raises, see `Pipeline.trace`.
        """
        _check_positive("max_length", max_length)
        self._max_length = int(max_length)
        self._chunk_lengths = _check_chunk_lengths(chunk_lengths, self._max_length)
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
        self.pipeline.trace(_make_element(1))
        (logits,) = _check_logits(self.pipeline, 1)
        self._num_words = int(logits.shape[-1])
        self._limits = Limits(self._max_length, self._num_words)
        self._is_one_by_one = self._find_one_by_one(token_by_token)
        self._building = threading.Lock()  # held while programs are made
        self._running = threading.Lock()  # held while requests are answered
        self._programs: tuple[tuple[StagePrograms, ...], tuple[DeviceGroup, ...]] | None = None
        self._initial: Sequence[Sequence[Any]] = ()
        self._queue: RequestQueue | None = None  # of `serving`

    def _find_one_by_one(self, wanted: bool | None) -> bool:
        if wanted is not None and not isinstance(wanted, bool):
            raise TypeError(f"token_by_token must be True, False, or None to find out; got {wanted!r}.")
        if wanted or self._chunk_lengths == (1,):
            return bool(wanted)
        try:
            self._for_length(min(length for length in self._chunk_lengths if length > 1))
        except Exception as error:
            if wanted is False:
                raise
            _logger.info("Prompts are read token by token, as stages cannot be traced for more: %s", error)
            return True
        return False

    def _for_length(self, length: int) -> Pipeline:
        """The stages, traced for a chunk."""
        pipeline = self.pipeline.for_shapes(_make_element(length))
        _check_logits(pipeline, length)
        return pipeline

    # What is known of it.

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
        """The number of words that a token may be."""
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
          state: of a pipeline whose variables have the names of the stages' variables, or these variables, by
            full name. What is on its stage's device is used as it is, without a copy.
          prompts: sequences of integers from 0 to `num_words` - 1, none of them empty.
          max_new_tokens: the most tokens of an answer; or a list with one number for each prompt.
          sampling: how tokens are chosen; or a list with one for each prompt.
          stop_tokens: the first of these in an answer is its last token.
          seed: of the random keys, from 0 to 2**32 - 1. Those of a prompt depend on it, on the prompt's
            number and on the token's place, and not on other prompts.

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
                    f"prompts must be a list of sequences of integers, and prompts[{place}] is {prompt!r}. For "
                    "one prompt, give a list of one."
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
            self._answer(self._bind(state), RequestQueue(requests))
        return [request.result() for request in requests]

    @contextlib.contextmanager
    def serving(self, state: PipelineState | Mapping[str, Any]) -> Iterator[Generator]:
        """Answers requests within a `with` block, in a thread of its own; see `submit`.

        The end of the block waits for those that have been submitted. If it ends by an error, they are
        cancelled.

        Args:
          state: as for `generate`.

        Raises:
          RuntimeError: it is serving already.
          TypeError, ValueError: as `generate`.
          Others: what the stages raised while they ran.
        """
        check_not_traced("Generator.serving", state)
        if self._queue is not None:
            raise RuntimeError("serving was called within `serving`. Leave the first block before.")
        with self._running:
            stages, queue, errors = self._bind(state), RequestQueue(is_open=True), list[BaseException]()

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
          max_new_tokens, sampling, stop_tokens, seed: as for `generate`, of a first prompt.

        Returns:
          The request: iterate over it for its tokens as they come, or call `result`.

        Raises:
          RuntimeError: it is not serving, or has ended by an error.
          TypeError, ValueError: as `generate`.
        """
        request = make_request(
            prompt, "prompt", self._limits, max_new_tokens, sampling, stop_tokens, seed, 0
        )
        queue = self._queue
        if queue is None or not queue.submit(request):
            raise RuntimeError(
                "submit was called while the generator is not serving, so there would be no answer. Call it within "
                "`with generator.serving(state):`, or call generate(state, prompts, ...)."
            )
        return request

    def _answer(self, stages: BoundStages, queue: RequestQueue) -> None:
        """Answers what is in a queue. All its requests are done when this ends, in whichever way."""
        each = self._num_slots // self._num_groups
        try:
            self._surroundings.run(run, stages, queue, self._num_groups, each, self._divide)
        except BaseException as error:
            queue.end(error)
            raise

    def _divide(self, length: int) -> list[int]:
        """The lengths of the chunks of a prompt."""
        chunks: list[int] = []
        for one in self._chunk_lengths:
            number, length = divmod(length, one)
            chunks += [one] * number
        return chunks

    # Preparing.

    def _prepare(self) -> tuple[tuple[StagePrograms, ...], tuple[DeviceGroup, ...]]:
        """The programs and devices of the stages, made at the first call, which starts JAX's backend."""
        with self._building:
            if self._programs is not None:
                return self._programs
            begin_first_run()
            known, each = self.pipeline, self.pipeline.options.num_devices_per_ipu
            devices = list(jax.devices() if self._devices is None else self._devices)
            if len(devices) < known.num_devices:
                raise ValueError(
                    f"The generator needs {known.num_devices} devices, {each if each > 1 else 'one'} per IPU of "
                    f"device_mapping, but there are {len(devices)}. On a CPU, before the first use of JAX, "
                    f"ipu_pipeline.set_num_devices({known.num_devices}) makes more."
                )
            groups = make_groups(devices, known.device_mapping, 1, each)
            elsewhere = [
                d for group in groups for d in group.devices if d.process_index != jax.process_index()
            ]
            if elsewhere:
                raise ValueError(
                    f"devices must be of this process, {jax.process_index()}; {elsewhere[0]} is of process "
                    f"{elsewhere[0].process_index}. Give the generator devices=jax.local_devices()."
                )
            platform = groups[0].devices[0].platform
            runs = make_runs(known, platform)
            runs_of = functools.cache(lambda length: make_runs(self._for_length(length), platform))
            programs = []
            for index, (run_one, group) in enumerate(zip(runs, groups, strict=True)):
                make = None if self._is_one_by_one else functools.partial(_pick, runs_of, index)
                logits = known.traced.outputs[0] if index == len(runs) - 1 else None
                results = group.replicated if group.is_divided else None
                programs.append(StagePrograms(index, run_one, make, logits, results))
            self._initial = [
                put([initial_value(spec, jax.random.key(0)) for spec in own], group)
                for own, group in zip(self._caches(), groups, strict=True)
            ]
            self._programs = tuple(programs), groups
            return self._programs

    def _caches(self) -> list[Sequence[VariableSpec]]:
        """The variables of each stage of which each request has its own."""
        return [stage.assigned for stage in self.pipeline.traced.stages]

    def _bind(self, state: PipelineState | Mapping[str, Any]) -> BoundStages:
        """The stages with the weights of a state."""
        count = 0
        if isinstance(state, Mapping):
            variables = state
            check_exists("Generator: the state's variables", dict(state))
        else:
            check_state("Generator", state)
            variables, count = state.variables, state.update_count
        programs, groups = self._prepare()
        specs, partitions = self.pipeline.variables, self.pipeline.built.partitions
        weights = []
        for program, group in zip(programs, groups, strict=True):
            found = [_find(variables, specs[name], program.run) for name in program.run.weights]
            wanted = [partitions.get(name, jax.sharding.PartitionSpec()) for name in program.run.weights]
            weights.append(put([_of_first_replica(x, group) for x in found], group, partitions=wanted))
        return BoundStages(programs, groups, self._caches(), self._initial, weights, as_int32(count))


def _pick(runs_of: Any, index: int, length: int) -> StageRun:
    run: StageRun = runs_of(length)[index]
    return run


def _make_element(length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of what the first stage takes for a chunk: tokens and their position."""
    return jax.ShapeDtypeStruct((length,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)


def _find(variables: Mapping[str, Any], spec: VariableSpec, run: StageRun) -> Any:
    """A variable of a state, for a stage."""
    if spec.name not in variables:
        raise ValueError(
            f"The state has no variable {spec.name}, which {run.place} reads and does not assign. {MOVES} Both "
            "take generator.pipeline as the pipeline."
        )
    value = variables[spec.name]
    shape = as_shape(value)
    if (shape.shape, shape.dtype) != (spec.shape, spec.dtype):
        raise ValueError(
            f"{run.place} reads variable {spec.name} as {describe(spec)}, but in the state it is "
            f"{describe(shape)}. Make the stages' parameters of the shapes that were trained."
        )
    return value


def _of_first_replica(array: Any, group: DeviceGroup) -> Any:
    """The copy on a stage's device of a variable that all replicas have whole; otherwise the array."""
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1 or group.is_divided:
        return array
    if not array.is_fully_replicated:
        return array
    own = [shard.data for shard in array.addressable_shards if shard.device in group.devices]
    return own[0] if own else array


def _check_positive(name: str, value: Any) -> None:
    if not is_integer(value, 1):
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}.")


def _check_chunk_lengths(given: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    lengths = list(_CHUNK_LENGTHS if given is None else given)
    if not all(is_integer(length, 1) for length in lengths) or 1 not in lengths:
        raise ValueError(
            "chunk_lengths must be integers of at least 1, and 1 must be among them, so that every prompt can "
            f"be divided into such lengths; got {given!r}."
        )
    return tuple(sorted({int(length) for length in lengths if length <= max_length}, reverse=True))


def _check_slots(num_slots: Any, num_groups: Any, num_devices: int) -> tuple[int, int]:
    if num_slots is not None:
        _check_positive("num_slots", num_slots)
    if num_groups is None:
        num_groups = num_devices if num_slots is None else min(num_devices, num_slots)
    _check_positive("num_groups", num_groups)
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
        given = ", ".join(map(describe, avals)) or "nothing"
        raise ValueError(
            f"The last stage must return logits, floating-point numbers [{length}, words] for {length} tokens of "
            f"one request, or [words] for the last of them; it returns {given}. Stages of a generator have no "
            "axis for a batch, and no loss."
        )
    return avals


def _for_each(name: str, value: Any, number: int) -> Sequence[Any]:
    """A list with the value of each prompt."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} must have one entry for each of the {number} prompts; got {len(value)}.")
    return list(value)
