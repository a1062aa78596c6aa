"""Stages bound to weights: their compiled programs, and the slots in which requests go through them."""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.device_groups import DeviceGroup, make_groups
from ipu_pipeline.engine.devices.placement import copy_to, put
from ipu_pipeline.engine.generation.programs import TOKENS, SlotNumbers, StagePrograms, StageRun, make_runs
from ipu_pipeline.engine.generation.requests import Request
from ipu_pipeline.engine.generation.sampling import Sampling, SamplingArrays
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.engine.state import PipelineState, check_exists, check_state
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.tracing.stage_markers import as_int32
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.ground.lazy_initialization import begin_first_run
from ipu_pipeline.ground.pytrees import as_shape, describe, is_readable

# Slots. A group's slots go through a stage in one program, so while one stage handles a group, the others
# handle other groups. All is started in order and not waited for; tokens are read later, in the same order.


@dataclass(frozen=True, eq=False)
class BoundStages:
    """The stages with the weights of a state.

    Attributes:
      programs: of each stage.
      devices: of each stage.
      caches: of each stage, the variables of which each request has its own.
      initial: of each stage, the values that these start from, on its devices.
      weights: of each stage, what it reads of the state, on its devices.
      update_count: of the state.
    """

    programs: Sequence[StagePrograms]
    devices: Sequence[DeviceGroup]
    caches: Sequence[Sequence[VariableSpec]]
    initial: Sequence[Sequence[Any]]
    weights: Sequence[Sequence[Any]]
    update_count: np.int32


class _Values:
    """Values between stages, and their copies on other devices."""

    def __init__(self, values: Mapping[Source, Any], devices: DeviceGroup | None) -> None:
        """Takes values that are on some devices; None: on the host."""
        self._homes = dict.fromkeys(values, devices)
        self._copies = {(source, devices): value for source, value in values.items()}

    def add(self, sources: Sequence[Source], values: Sequence[Any], devices: DeviceGroup) -> None:
        """Adds the results of a stage."""
        for source, value in zip(sources, values, strict=True):
            self._homes[source], self._copies[source, devices] = devices, value

    def on(self, sources: Sequence[Source], devices: DeviceGroup) -> list[Any]:
        """Values on a stage's devices; those that are elsewhere are sent there."""
        away: dict[DeviceGroup | None, list[Source]] = {}
        for source in sources:
            if (source, devices) not in self._copies:
                away.setdefault(self._homes[source], []).append(source)
        for home, missing in away.items():
            values = [self._copies[source, home] for source in missing]
            moved = put(values, devices) if home is None else copy_to(values, devices)
            self._copies.update(zip([(source, devices) for source in missing], moved, strict=True))
        return [self._copies[source, devices] for source in sources]


class SlotGroup:
    """Some slots that go through the stages together, each free or with a request."""

    def __init__(self, stages: BoundStages, num_slots: int) -> None:
        """Makes caches; what they hold is not defined before a request comes."""
        self._stages = stages
        self._requests: list[Request | None] = [None] * num_slots
        self._positions = np.zeros(num_slots, np.int32)  # of each slot's newest token
        self._last = stages.devices[-1]
        self._caches = [
            [jnp.zeros((num_slots, *spec.shape), spec.dtype, device=devices.replicated) for spec in specs]
            for specs, devices in zip(stages.caches, stages.devices, strict=True)
        ]
        (self._tokens,) = put([np.zeros(num_slots, np.int32)], self._last)
        # the newest tokens of all slots, and those that are some request's
        self._unread: collections.deque[tuple[Any, list[tuple[int, Request]]]] = collections.deque()

    @property
    def num_taken(self) -> int:
        """The number of slots with a request."""
        return sum(request is not None for request in self._requests)

    @property
    def num_unread(self) -> int:
        """The number of turns whose tokens are not read yet."""
        return len(self._unread)

    def join(self, request: Request, lengths: Sequence[int]) -> None:
        """Starts a request in a free slot: its prompt, chunk by chunk, and its first token."""
        slot, stages, position = self._requests.index(None), self._stages, 0
        is_sampled = request.sampling.temperature > 0
        for length in lengths:
            numbers = SlotNumbers(np.int32(position), np.uint32(request.seed), np.uint32(request.number))
            sampling = None
            if is_sampled and position + length == len(request.prompt):
                sampling = SamplingArrays(*(x[0] for x in SamplingArrays.of([request.sampling])))
            of_last = [*[(None, None)] * (len(stages.programs) - 1), (self._tokens, sampling)]
            more = [
                (np.int32(slot), first, *args) for first, args in zip(stages.initial, of_last, strict=True)
            ]
            values = _Values({TOKENS: request.prompt[position : position + length]}, None)
            self._start([program.chunk(length) for program in stages.programs], values, numbers, more)
            position += length
        self._requests[slot], self._positions[slot] = request, position
        self._note([slot])

    def decode(self) -> None:
        """Starts one more token of each request."""
        stages, slots = self._stages, [n for n, request in enumerate(self._requests) if request is not None]
        samplings = [None if request is None else request.sampling for request in self._requests]
        is_sampled = any(sampling is not None and sampling.temperature > 0 for sampling in samplings)
        numbers = SlotNumbers(  # copies, as devices may read them later
            self._positions.copy(),
            np.array([request.seed if request else 0 for request in self._requests], np.uint32),
            np.array([request.number if request else 0 for request in self._requests], np.uint32),
        )
        sampling = SamplingArrays.of(samplings) if is_sampled else None
        more = [*[(None,)] * (len(stages.programs) - 1), (sampling,)]
        values = _Values({TOKENS: self._tokens}, self._last)
        self._start([program.decode(is_sampled) for program in stages.programs], values, numbers, more)
        self._positions[slots] += 1
        self._note(slots)

    def _start(
        self,
        functions: Sequence[Callable[..., Any]],
        values: _Values,
        numbers: SlotNumbers,
        more: Sequence[tuple[Any, ...]],
    ) -> None:
        """Starts the stages' programs one after another, each with what earlier ones made."""
        stages = self._stages
        for index, (function, devices) in enumerate(zip(functions, stages.devices, strict=True)):
            run = stages.programs[index].run
            inputs = values.on(run.inputs, devices)
            results, self._caches[index] = function(
                self._caches[index],
                stages.weights[index],
                inputs,
                numbers,
                stages.update_count,
                *more[index],
            )
            if index == len(functions) - 1:
                self._tokens = results
            else:
                values.add(run.outputs, results, devices)

    def _note(self, slots: Sequence[int]) -> None:
        """Notes that tokens are on their way, and frees slots whose requests need no more."""
        entry = []
        for slot in slots:
            request = self._requests[slot]
            assert request is not None
            entry.append((slot, request))
            if self._positions[slot] + 1 == len(request.prompt) + request.max_new_tokens:
                self._requests[slot] = None
        self._unread.append((self._tokens, entry))

    def read(self, num_left: int = 0) -> None:
        """Waits for tokens, hands them to their requests, and frees slots whose requests are done."""
        while len(self._unread) > num_left:
            tokens, entry = self._unread[0]
            values = np.asarray(tokens)
            self._unread.popleft()
            for slot, request in entry:
                request.add(int(values[slot]))
        self._requests = [
            None if request is None or request.is_done else request for request in self._requests
        ]


# Programs and weights.

_SAMPLED = Sampling(temperature=1.0)


class ProgramKey(NamedTuple):
    """A program that all stages have: for a chunk of so many tokens, or (0) for one token of each slot."""

    length: int
    is_sampled: bool  # whether tokens are drawn


def make_element(length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of what the first stage takes for a chunk: tokens and their position."""
    return jax.ShapeDtypeStruct((length,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)


class StageBuilder:
    """The stages of a generator on their devices. Making it starts JAX's backend."""

    def __init__(
        self, pipeline: Pipeline, devices: Sequence[Any] | None, num_slots: int, is_one_by_one: bool
    ) -> None:
        """Makes programs, which are not compiled yet, and the values that caches start from."""
        begin_first_run()
        self._pipeline, self._num_slots = pipeline, num_slots
        self._groups = _find_groups(pipeline, devices)
        platform = self._groups[0].devices[0].platform
        runs = make_runs(pipeline, platform)
        runs_of = functools.cache(
            lambda length: make_runs(pipeline.for_shapes(make_element(length)), platform)
        )
        self._programs = [
            StagePrograms(
                index,
                run,
                None if is_one_by_one else functools.partial(_pick, runs_of, index),
                pipeline.traced.outputs[0] if index == len(runs) - 1 else None,
                group.replicated if group.is_divided else None,
            )
            for index, (run, group) in enumerate(zip(runs, self._groups, strict=True))
        ]
        self._caches = [stage.assigned for stage in pipeline.traced.stages]
        key = jax.random.key(0)
        self._initial = [
            put([initial_value(spec, key) for spec in specs], group)
            for specs, group in zip(self._caches, self._groups, strict=True)
        ]
        self._compiled: set[tuple[int, ProgramKey]] = set()  # with the number of the stage
        self._building = threading.Lock()

    def bind(self, state: PipelineState | Mapping[str, Any]) -> BoundStages:
        """The stages with the weights of a state, or of a dict of its variables."""
        count = 0
        if isinstance(state, Mapping):
            variables = state
            check_exists("Generator: the state's variables", dict(state))
        else:
            check_state("Generator", state)
            variables, count = state.variables, state.update_count
        runs = [program.run for program in self._programs]
        specs, partitions = self._pipeline.variables, self._pipeline.built.partitions
        _check_weights(variables, specs, runs)
        weights = [
            put(
                [_of_first_replica(variables[name], group) for name in run.weights],
                group,
                partitions=[partitions.get(name, PartitionSpec()) for name in run.weights],
            )
            for run, group in zip(runs, self._groups, strict=True)
        ]
        return BoundStages(
            self._programs, self._groups, self._caches, self._initial, weights, as_int32(count)
        )

    def compile(self, keys: Collection[ProgramKey]) -> None:
        """Compiles programs that have not been compiled, those of several stages at a time."""
        with self._building:
            last = len(self._programs) - 1  # where tokens are drawn
            stages = {
                (index, key if index == last else key._replace(is_sampled=False))
                for key in keys
                for index in range(last + 1)
            }
            missing = sorted(stages - self._compiled)
            if not missing:
                return
            threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
            try:
                with compiling(len(missing), "for a generator") as compilation:
                    started = [threads.submit(_compile, self._lower(*key), compilation) for key in missing]
                    for future in started:
                        future.result()
            finally:  # after an error or an interrupt, compilations that have not begun are not waited for
                threads.shutdown(wait=False, cancel_futures=True)
            self._compiled.update(missing)

    def _lower(self, index: int, key: ProgramKey) -> Any:
        """A stage's program, before XLA, for the shapes that it is called with."""
        program, group = self._programs[index], self._groups[index]
        is_last = index == len(self._programs) - 1
        is_chunk, slots = key.length > 0, self._num_slots
        specs, partitions = self._pipeline.variables, self._pipeline.built.partitions

        def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=group.replicated)

        function: Any = program.chunk(key.length) if is_chunk else program.decode(key.is_sampled)
        caches = [struct((slots, *spec.shape), spec.dtype) for spec in self._caches[index]]
        weights = [
            jax.ShapeDtypeStruct(
                specs[name].shape,
                specs[name].dtype,
                sharding=group.divided(partitions.get(name, PartitionSpec())),
            )
            for name in program.run.weights
        ]
        inputs = [struct(aval.shape, aval.dtype) for aval in program.input_avals(key.length, slots)]
        samplings = SamplingArrays.of([_SAMPLED] * slots)
        numbers = SlotNumbers(np.zeros(slots, np.int32), *[np.zeros(slots, np.uint32)] * 2)
        sampling = samplings if is_last and key.is_sampled else None
        count = np.int32(0)
        if not is_chunk:
            return function.lower(caches, weights, inputs, numbers, count, sampling)
        request_numbers = SlotNumbers(*(x[0] for x in numbers))
        return function.lower(
            caches,
            weights,
            inputs,
            request_numbers,
            count,
            np.int32(0),
            self._initial[index],
            struct((slots,), jnp.int32) if is_last else None,
            None if sampling is None else SamplingArrays(*(x[0] for x in sampling)),
        )


def _compile(lowered: Any, compilation: Compilation) -> None:
    with compilation.program():
        lowered.compile()


def _pick(runs_of: Any, index: int, length: int) -> StageRun:
    run: StageRun = runs_of(length)[index]
    return run


def _find_groups(pipeline: Pipeline, devices: Sequence[Any] | None) -> tuple[DeviceGroup, ...]:
    """The devices of each stage."""
    per_ipu, num_needed = pipeline.options.num_devices_per_ipu, pipeline.num_devices
    all_devices = list(jax.devices() if devices is None else devices)
    if len(all_devices) < num_needed:
        raise ValueError(
            f"The generator needs {num_needed} devices, {per_ipu if per_ipu > 1 else 'one'} per number in "
            f"device_mapping, but there are {len(all_devices)}. On a CPU, before the first use of JAX, "
            f"ipu_pipeline.set_num_devices({num_needed}) makes more."
        )
    groups = make_groups(all_devices, pipeline.device_mapping, 1, per_ipu)
    process = jax.process_index()
    elsewhere = [device for group in groups for device in group.devices if device.process_index != process]
    if elsewhere:
        raise ValueError(
            f"devices must be of this process, {process}; {elsewhere[0]} is of process "
            f"{elsewhere[0].process_index}. Give the generator devices=jax.local_devices()."
        )
    return groups


def _check_weights(
    variables: Mapping[str, Any], specs: Mapping[str, VariableSpec], runs: Sequence[StageRun]
) -> None:
    """Raises a ValueError if a state does not have what the stages read."""
    readers = {name: run.place for run in reversed(runs) for name in run.weights}
    missing = [f"{name} ({place})" for name, place in sorted(readers.items()) if name not in variables]
    if missing:
        raise ValueError(
            f"The state lacks variables that the stages read and do not assign: {', '.join(missing)}. "
            "A state of another split of the same layers is moved by generator.resplit(state)."
        )
    for name, place in readers.items():
        spec, value = specs[name], variables[name]
        shape = as_shape(value)
        if (shape.shape, shape.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"{place} reads variable {name} as {describe(spec)}, but in the state it is "
                f"{describe(shape)}. Make the stages' parameters of the shapes that were trained."
            )
        if not is_readable(value):
            raise ValueError(
                f"variable {name} of the state is on devices of other processes, and a generator runs in "
                "one. Bring the state there, with engine.gathered(state.variables)."
            )


def _of_first_replica(array: Any, group: DeviceGroup) -> Any:
    """The copy on a stage's device of a variable that all replicas have whole; otherwise the array."""
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1 or group.is_divided:
        return array
    if not array.is_fully_replicated:
        return array
    shards = array.addressable_shards
    return next((shard.data for shard in shards if shard.device in group.devices), shards[0].data)
