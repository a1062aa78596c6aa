"""Makes the programs of all stages, compiles them, and gives them the weights of a state."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_pipeline.engine.devices.device_groups import DeviceGroup, make_groups
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.generation.programs import SlotNumbers, StagePrograms
from ipu_pipeline.engine.generation.sampling import Sampling, SamplingArrays
from ipu_pipeline.engine.generation.slots import BoundStages
from ipu_pipeline.engine.generation.stage_runs import StageRun, make_runs
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.progress import Compilation, compiling
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.state_checks import check_exists, check_state
from ipu_pipeline.engine.tracing.keys import as_int32
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.ground.first_run import begin_first_run
from ipu_pipeline.ground.shapes import as_shape, describe
from ipu_pipeline.ground.values import is_readable

__all__ = ["Needed", "StageBuilder", "make_element"]

_SAMPLED = Sampling(temperature=1.0)


class Needed(NamedTuple):
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
            put([initial_value(spec, key) for spec in own], group)
            for own, group in zip(self._caches, self._groups, strict=True)
        ]
        self._compiled: set[tuple[int, Needed]] = set()  # with the number of the stage
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

    def compile(self, wanted: Collection[Needed]) -> None:
        """Compiles programs that have not been compiled, those of several stages at a time."""
        with self._building:
            last = len(self._programs) - 1  # where tokens are drawn
            stages = {
                (index, needed if index == last else needed._replace(is_sampled=False))
                for needed in wanted
                for index in range(last + 1)
            }
            missing = sorted(stages - self._compiled)
            if not missing:
                return
            threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ipu-compile")
            try:
                with compiling(len(missing), "for a generator") as told:
                    started = [threads.submit(_compile, self._lower(*one), told) for one in missing]
                    for future in started:
                        future.result()
            finally:  # after an error or an interrupt, compilations that have not begun are not waited for
                threads.shutdown(wait=False, cancel_futures=True)
            self._compiled.update(missing)

    def _lower(self, index: int, needed: Needed) -> Any:
        """A stage's program, before XLA, for the shapes that it is called with."""
        program, group = self._programs[index], self._groups[index]
        is_last = index == len(self._programs) - 1
        is_chunk, slots = needed.length > 0, self._num_slots
        specs, partitions = self._pipeline.variables, self._pipeline.built.partitions

        def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=group.replicated)

        function: Any = program.chunk(needed.length) if is_chunk else program.decode(needed.is_sampled)
        caches = [struct((slots, *spec.shape), spec.dtype) for spec in self._caches[index]]
        weights = [
            jax.ShapeDtypeStruct(
                specs[name].shape,
                specs[name].dtype,
                sharding=group.divided(partitions.get(name, PartitionSpec())),
            )
            for name in program.run.weights
        ]
        inputs = [struct(aval.shape, aval.dtype) for aval in program.input_avals(needed.length, slots)]
        samplings = SamplingArrays.of([_SAMPLED] * slots)
        numbers = SlotNumbers(np.zeros(slots, np.int32), *[np.zeros(slots, np.uint32)] * 2)
        sampling = samplings if is_last and needed.is_sampled else None
        count = np.int32(0)
        if not is_chunk:
            return function.lower(caches, weights, inputs, numbers, count, sampling)
        one = SlotNumbers(*(x[0] for x in numbers))
        return function.lower(
            caches,
            weights,
            inputs,
            one,
            count,
            np.int32(0),
            self._initial[index],
            struct((slots,), jnp.int32) if is_last else None,
            None if sampling is None else SamplingArrays(*(x[0] for x in sampling)),
        )


def _compile(lowered: Any, told: Compilation) -> None:
    with told.program():
        lowered.compile()


def _pick(runs_of: Any, index: int, length: int) -> StageRun:
    run: StageRun = runs_of(length)[index]
    return run


def _find_groups(pipeline: Pipeline, devices: Sequence[Any] | None) -> tuple[DeviceGroup, ...]:
    """The devices of each stage."""
    each, needed = pipeline.options.num_devices_per_ipu, pipeline.num_devices
    found = list(jax.devices() if devices is None else devices)
    if len(found) < needed:
        raise ValueError(
            f"The generator needs {needed} devices, {each if each > 1 else 'one'} per number in "
            f"device_mapping, but there are {len(found)}. On a CPU, before the first use of JAX, "
            f"ipu_pipeline.set_num_devices({needed}) makes more."
        )
    groups = make_groups(found, pipeline.device_mapping, 1, each)
    here = jax.process_index()
    elsewhere = [one for group in groups for one in group.devices if one.process_index != here]
    if elsewhere:
        raise ValueError(
            f"devices must be of this process, {here}; {elsewhere[0]} is of process "
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
