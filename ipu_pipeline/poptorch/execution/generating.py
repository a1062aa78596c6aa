"""Models of transformers generate through their stages, with keys and values on the stages' devices.

The model is captured once for each length of a chunk, by `CachedDecoder`, and cut into the stages that its
blocks say. `engine.Generator` runs these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ipu_pipeline import engine
from ipu_pipeline.engine import processes
from ipu_pipeline.poptorch.dtypes import to_numpy
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import Arguments
from ipu_pipeline.poptorch.execution.building import (
    Wrapped,
    cut_into_levels,
    find_schedule,
    find_seed,
    make_key,
)
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.devices import select_devices
from ipu_pipeline.poptorch.execution.programs import Program
from ipu_pipeline.poptorch.execution.progress import CompileProgress
from ipu_pipeline.poptorch.execution.weights import HostWeights
from ipu_pipeline.poptorch.generation.requests import Wanted
from ipu_pipeline.poptorch.graphs.capture import Captured, capture, in_modes
from ipu_pipeline.poptorch.graphs.stages import ModelStages, make_stages
from ipu_pipeline.poptorch.options.phased import PhasedExecution
from ipu_pipeline.poptorch.structures import flatten

__all__ = ["Generation", "check_generates", "generates_on_devices"]

_CHUNKS = (1, 8, 64)  # lengths in which prompts are read: each is captured and compiled
_SHORTEST = 32  # tokens that caches have room for


def generates_on_devices(wrapped: Wrapped) -> bool:
    """Whether `generate` runs on the devices: that of a decoder of transformers, wrapped for inference.

    That of others is their own, and runs on the host.
    """
    library = sys.modules.get("transformers.generation.utils")
    model: Any = wrapped.model
    return (
        library is not None
        and isinstance(model, library.GenerationMixin)
        and type(model).generate is library.GenerationMixin.generate
        and not model.config.is_encoder_decoder
        and not wrapped.trains
    )


def check_generates(wrapped: Wrapped) -> None:
    """Checks that a decoder can generate as it is wrapped."""
    model, options, name = wrapped.model, wrapped.options, type(wrapped.model).__name__
    if wrapped.modes[model]:
        raise Error(
            f"generate: {name} was in training mode when it was wrapped, in which layers may drop values. "
            "Call model.eval() before poptorch.inferenceModel(model)."
        )
    unsupported = {
        "replicationFactor": options.replication_factor != 1,
        "Distributed (several processes)": options.Distributed.numProcesses != 1,
        "setExecutionStrategy with phases": isinstance(options.execution_strategy, PhasedExecution),
        "splitAutomatically": options.num_split_ipus is not None,
        "checkIndices": options.index_checks,
        "Precision.enableFloatingPointExceptions": options.Precision.floating_point_exceptions,
        "anchorTensor": bool(options.anchored_tensors),
        "enableSyntheticData": options.synthetic_data,
        "TensorLocations with weights off the devices": "weights"
        in options.TensorLocations.find_offloaded(True),
        "connectionType(Never)": options.connection_type is ConnectionType.Never,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise Error(
                f"generate does not go with poptorch.Options().{option}. Wrap the model once more, by "
                "poptorch.inferenceModel with options without it."
            )


class _ChunkStages:
    """A decoder's stages for chunks of any length. One is captured when its first stage is first traced."""

    def __init__(self, make: Callable[[int], tuple[Captured, ModelStages]]) -> None:
        """Captures the decoder for one token."""
        self._make = make
        self.captured, self.of_one = make(1)
        self._stages = {1: self.of_one}
        # For each stage, the lengths by the shapes of what it takes.
        self._lengths: list[dict[Any, int]] = [{} for _level in self.of_one.levels]
        self.functions = [self._make_function(number) for number in range(len(self._lengths))]

    def _make_function(self, number: int) -> Callable[..., Any]:
        def stage(*values: Any) -> Any:
            length = self._lengths[number][_shapes(values)] if number else self._find(values[0].shape[0])
            (function,) = self._stages[length].functions[number]
            given = function(*values)
            if number + 1 < len(self._lengths):
                self._lengths[number + 1][_shapes(given)] = length
            return given

        ((named,),) = (self.of_one.functions[number],)
        stage.__name__ = stage.__qualname__ = named.__name__
        return stage

    def _find(self, length: int) -> int:
        if length not in self._stages:
            _captured, stages = self._make(length)
            if stages.ipus != self.of_one.ipus:
                raise Error(
                    f"generate: for {length} tokens the model has stages on IPUs {stages.ipus}, and for "
                    f"one on {self.of_one.ipus}. Open the same blocks for any number of tokens."
                )
            self._stages[length] = stages
        return length


def _shapes(values: Sequence[Any]) -> Any:
    return tuple((value.shape, value.dtype) for value in values)


@dataclass(frozen=True, eq=False)
class _Ready:
    """A decoder that is captured, for requests up to a length, and its weights on the devices."""

    max_length: int  # of a request, with its prompt
    stages: _ChunkStages
    devices: Sequence[Any]
    compiled: CompiledModel


class Generation:
    """What a wrapped model generates with: stages, caches, and weights on their devices.

    The caller holds the lock of the host's weights.
    """

    def __init__(self, wrapped: Wrapped, host: HostWeights) -> None:
        """Compiles nothing."""
        self._wrapped, self._host = wrapped, host
        self._ready: _Ready | None = None
        self._generator: engine.Generator | None = None
        self._seen_version = -1
        self._num_drawn = 0  # calls that have drawn tokens

    def generate(self, wanted: Wanted) -> torch.Tensor:
        """Returns prompts and new tokens; see `Wanted.join`."""
        self._host.refresh()
        ready, num_rows = self._ready, len(wanted.prompts)
        if ready is None or wanted.max_length > ready.max_length:
            ready = self._prepare(1 << (max(wanted.max_length, _SHORTEST) - 1).bit_length(), num_rows)
        elif self._seen_version != self._host.version:
            self.read_from_host()
        else:
            ready.compiled.check_same_tensors()
        ready.compiled.tell_of_changes()
        if self._generator is None or self._generator.num_slots < num_rows:
            self._generator = _make_generator(ready.stages, ready.devices, ready.max_length, num_rows)
        assert ready.compiled.state is not None
        answers = self._generator.generate(
            ready.compiled.state,
            list(wanted.prompts),
            max_new_tokens=wanted.max_new_tokens,
            sampling=wanted.sampling,
            stop_tokens=wanted.stop_tokens,
            seed=self._find_seed(wanted.sampling),
        )
        return wanted.join(answers)

    def read_from_host(self) -> None:
        """Copies the host's weights to the devices, if the model has generated."""
        if self._ready is not None:
            self._ready.compiled.read_from_host()
            self._seen_version = self._host.version

    def share_weights(self, host: HostWeights) -> None:
        """Keeps weights in step with other models' from now on."""
        self._host, self._seen_version = host, -1

    def _find_seed(self, sampling: engine.Sampling) -> int:
        """Returns the seed of a call: by `Options.randomSeed`, or from torch's random numbers."""
        if not sampling.temperature:
            return 0
        options = self._wrapped.options
        if not options.is_set("random_seed"):
            return int(torch.randint(2**32, ()))
        self._num_drawn += 1
        return (find_seed(options) + self._num_drawn - 1) % 2**32

    def _prepare(self, max_length: int, num_rows: int) -> _Ready:
        """Captures and traces the model, and puts its weights on the devices."""
        # It needs transformers, which has the classes of caches.
        from ipu_pipeline.poptorch.generation.decoders import CachedDecoder

        wrapped, options = self._wrapped, self._wrapped.options
        schedule = find_schedule(options)

        def make(length: int) -> tuple[Captured, ModelStages]:
            arguments = _make_arguments(length)
            with processes.occupied("capturing a model"), self._host.unwatched():
                captured = capture(
                    decoder,
                    arguments.tensors,
                    arguments.structure,
                    wrapped.modes,
                    excluded_files=options.source_location_excludes,
                )
            stages = make_stages(
                captured,
                wrapped.model,
                lambda graph: cut_into_levels(graph, options, False, schedule),
                False,
            )
            return captured, stages

        with CompileProgress(options.show_compilation_progress_bar, " for generate") as progress:
            with torch.inference_mode(False), self._host.unwatched(), in_modes(wrapped.modes):
                decoder = CachedDecoder(wrapped.model, max_length)
            stages = _ChunkStages(make)
            progress.done("capture")
            devices = select_devices(1 + max(stages.of_one.ipus), options)
            generator = _make_generator(stages, devices, max_length, num_rows)
            arguments = _make_arguments(1)
            micro_batch = tuple(map(to_numpy, arguments.tensors))
            program = Program(arguments, stages.captured, stages.of_one, generator.pipeline, micro_batch)
            compiled = CompiledModel(decoder, program, devices, make_key(find_seed(options)))
            progress.end()
        self._ready, self._generator = _Ready(max_length, stages, devices, compiled), generator
        self._seen_version = self._host.version
        return self._ready


def _make_generator(
    stages: _ChunkStages, devices: Sequence[Any], max_length: int, num_rows: int
) -> engine.Generator:
    """Makes a generator with room for so many requests at a time."""
    ipus = stages.of_one.ipus
    num_groups = min(len(set(ipus)), num_rows)
    each = -(-num_rows // num_groups)
    return engine.Generator(
        stages.functions,
        max_length=max_length,
        num_slots=num_groups * (1 << (each - 1).bit_length()),
        num_groups=num_groups,
        chunk_lengths=_CHUNKS,
        token_by_token=False,
        device_mapping=ipus,
        devices=devices,
    )


def _make_arguments(length: int) -> Arguments:
    """The arguments of a `CachedDecoder`, for a chunk."""
    with torch.inference_mode(False):
        tokens, position = torch.zeros(length, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    tensors, structure = flatten(((tokens, position), {}))
    return Arguments(tensors, structure, ["tokens", "position"])
