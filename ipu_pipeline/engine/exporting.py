"""Exports the forwards of stages as files of `jax.export`, and runs micro-batches through them.

What the arguments and results of each forward stand for is described in JSON, so that running them needs
none of the code that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import jax
import jax.export
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup, make_groups
from ipu_pipeline.engine.devices.placement import put
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind, Bindings, ValueKind
from ipu_pipeline.engine.tracing.stage_markers import as_int32
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline
from ipu_pipeline.ground.user_warnings import warn_of_untested


@dataclass(frozen=True, eq=False)
class ExportedStages:
    """An exported pipeline, in inference."""

    files: Mapping[str, bytes]  # the files' contents, by name
    stages: Sequence[Mapping[str, Any]]  # each with its file, place, device, arguments and results
    outputs: Sequence[Mapping[str, Any]]  # where each leaf of what is collected comes from


def export_stages(pipeline: Pipeline, inputs: Sequence[Any], key: Any, platform: str) -> ExportedStages:
    """Exports the forwards of a pipeline."""
    traced, data, implementation = pipeline.traced, jax.random.key_data(key), str(jax.random.key_impl(key))
    warn_of_untested("flatbuffers", flatbuffers.__version__)
    bindings = Bindings(traced, {})
    files: dict[str, bytes] = {}
    stages = []
    for number, (stage, stage_programs) in enumerate(zip(traced.stages, pipeline.programs, strict=True)):
        taken_bindings = bindings.arguments(number, stage_programs.forward)
        arguments = [binding for binding in taken_bindings if binding.kind is not BindingKind.KEY_NUMBER]
        takes_key = [binding.key is ValueKind.KEY for binding in arguments]
        name = f"stage{number}.jax_export"
        function = _with_key_numbers(stage_programs.forward.on(platform).function, taken_bindings)
        function = _with_key_data(function, takes_key, implementation)
        exported = jax.export.export(jax.jit(function), platforms=[platform])(
            *(_aval(binding, traced, inputs, data) for binding in arguments)
        )
        files[name] = bytes(exported.serialize())
        stages.append(
            {
                "file": name,
                "place": stage.place,
                "ipu": pipeline.device_mapping[number],
                "arguments": [_describe(binding) for binding in arguments],
                "results": [
                    # Values enqueued on the way to the outfeed are dropped.
                    [_describe(binding) for binding in bound if binding.kind is not BindingKind.ENQUEUED]
                    for bound in bindings.results(number, stage_programs.forward)
                ],
            }
        )
    return ExportedStages(
        files, stages, [_describe_source(source) for source in pipeline.built.collecting.sources]
    )


def _with_key_numbers(function: Callable[..., Any], bindings: Sequence[Binding]) -> Callable[..., Any]:
    """Makes the numbers that a function folds random keys with constants of it."""

    def wrapped(*arguments: Any) -> Any:
        values = iter(arguments)
        return function(
            *(
                np.uint32(binding.key) if binding.kind is BindingKind.KEY_NUMBER else next(values)
                for binding in bindings
            )
        )

    return wrapped


def _with_key_data(
    function: Callable[..., Any], takes_key: Sequence[bool], implementation: str
) -> Callable[..., Any]:
    """Makes a function take the data of random keys in place of the keys, which files cannot hold."""

    def wrapped(*arguments: Any) -> Any:
        return function(
            *(
                jax.random.wrap_key_data(argument, impl=implementation) if is_key else argument
                for argument, is_key in zip(arguments, takes_key, strict=True)
            )
        )

    return wrapped


def _aval(binding: Binding, traced: TracedPipeline, inputs: Sequence[Any], key: Any) -> Any:
    """Shape and dtype of an argument of a forward."""
    if binding.kind is BindingKind.VARIABLE:
        value: Any = traced.variables[binding.key]
    elif binding.kind is BindingKind.INPUT:
        value = inputs[binding.key]
    elif binding.kind is BindingKind.VALUE:
        value = traced.aval(binding.key)
    else:
        value = key if binding.key is ValueKind.KEY else np.int32(0)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _describe(binding: Binding) -> dict[str, Any]:
    """Describes what an argument or result of a forward stands for, as JSON."""
    if binding.kind in (BindingKind.VARIABLE, BindingKind.ASSIGNED):
        return {"kind": binding.kind.name.lower(), "name": binding.key}
    if binding.kind is BindingKind.INPUT:
        return _describe_source(Source("input", binding.key))
    if binding.kind is BindingKind.VALUE:
        return _describe_source(binding.key)
    return {"kind": binding.key.name.lower()}


def _describe_source(source: Source) -> dict[str, Any]:
    return {"kind": source.kind, "index": source.index, "stage": source.stage}


class StageRunner:
    """Runs micro-batches through exported stages.

    The variables lie on the devices of their stages, and change where stages assign them.
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, Any]],
        outputs: Sequence[Mapping[str, Any]],
        functions: Sequence[Callable[..., Any]],
        variables: Mapping[str, Any],
        key: Any,
        update_count: int,
    ) -> None:
        """Takes what `export_stages` described."""
        self._stages, self._outputs, self._functions = stages, outputs, functions
        self._variables = dict(variables)
        self._placed: dict[tuple[str, int], Any] = {}  # by full name and device
        self._devices: list[Any] = []
        self._groups: Sequence[DeviceGroup] = ()
        self._key, self._update_count = jax.random.key_data(key), update_count

    def run(
        self,
        leaves: Sequence[Any],
        inputs: Sequence[Any],
        devices: Sequence[Any],
        execution: int,
        micro_batch: int,
    ) -> list[Any]:
        """Starts all stages for a micro-batch.

        Returns:
          The leaves of what is collected, still being computed.
        """
        outputs: dict[tuple[int, int], Any] = {}

        def read(source: Mapping[str, Any]) -> Any:
            if source["kind"] == "element":
                return leaves[source["index"]]
            if source["kind"] == "input":
                return inputs[source["index"]]
            return outputs[source["stage"], source["index"]]

        def find(argument: Mapping[str, Any], group: DeviceGroup) -> Any:
            match argument["kind"]:
                case "variable":
                    return self._variable(argument["name"], group)
                case "key":
                    return self._key
                case "execution_count":
                    return as_int32(execution)
                case "update_count":
                    return as_int32(self._update_count)
                case "micro_batch":
                    return np.int32(micro_batch)
            return read(argument)

        if self._devices != devices:
            self._devices = list(devices)
            self._groups = make_groups(devices, [stage["ipu"] for stage in self._stages])
        for number, (stage, function) in enumerate(zip(self._stages, self._functions, strict=True)):
            group = self._groups[number]
            arguments = put([find(argument, group) for argument in stage["arguments"]], group)
            for places, result in zip(stage["results"], function(*arguments), strict=True):
                for place in places:
                    if place["kind"] == "output":
                        outputs[number, place["index"]] = result
                    else:
                        self._assign(place["name"], result)
        return [read(source) for source in self._outputs]

    def _variable(self, name: str, group: DeviceGroup) -> Any:
        place = name, group.ipu
        if place not in self._placed:
            (self._placed[place],) = put([self._variables[name]], group)
        return self._placed[place]

    def _assign(self, name: str, value: Any) -> None:
        for place in [place for place in self._placed if place[0] == name]:
            del self._placed[place]
        self._variables[name] = value
