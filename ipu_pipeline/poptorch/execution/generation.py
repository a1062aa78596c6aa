"""Generation by models of transformers through their stages, with keys and values on the devices.

A request is what `generate` was asked for. The model is captured once for each length of a chunk, by
`CachedDecoder`, and cut into the stages that its blocks say. `engine.Generator` runs these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ipu_pipeline import engine
from ipu_pipeline.engine import processes
from ipu_pipeline.poptorch.dtypes import to_numpy
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.call_values import Arguments
from ipu_pipeline.poptorch.execution.compilation import (
    Wrapped,
    cut_into_levels,
    find_schedule,
    find_seed,
    make_key,
)
from ipu_pipeline.poptorch.execution.compiled_model import CompiledModel, Program
from ipu_pipeline.poptorch.execution.host_weights import HostWeights
from ipu_pipeline.poptorch.execution.instrumentation import CompileProgress
from ipu_pipeline.poptorch.execution.process_groups import select_devices
from ipu_pipeline.poptorch.graphs.capture import Captured, capture, in_modes
from ipu_pipeline.poptorch.graphs.stages import ModelStages, make_stages
from ipu_pipeline.poptorch.options.strategies import PhasedExecution
from ipu_pipeline.poptorch.structures import flatten

# Requests.
#
# Defaults and precedence are transformers': arguments, `generation_config`, the model's own
# `generation_config`. What would change the result and is not supported raises an error that names it.

# Fields of transformers' GenerationConfig that are read here.
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "num_return_sequences")
_READ = (
    *_LENGTHS,
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "temperature",
    "top_k",
    "top_p",
    "use_cache",
)
# Fields that have no effect on a decoder that is given its prompts.
_WITHOUT_EFFECT = ("bos_token_id", "decoder_start_token_id", "transformers_version")
_DYNAMIC = (None, "dynamic", "static")  # caches of the same values


@dataclass(frozen=True, eq=False)
class Request:
    """A call of `generate`.

    Attributes:
      input_ids: the prompts as they were given, int64 [rows, length].
      prompts: their tokens without padding, one list for each row.
      max_new_tokens: the most new tokens of each.
      sampling: how tokens are chosen.
      stop_tokens: any of these is the last one of its row.
      pad_token: what fills a row after its last token.
    """

    input_ids: torch.Tensor
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: engine.Sampling
    stop_tokens: Sequence[int]
    pad_token: int

    @property
    def max_length(self) -> int:
        """The most tokens of a row, with its prompt."""
        return max(map(len, self.prompts)) + self.max_new_tokens

    def join(self, answers: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
        """Returns prompts and answers, int64 [rows, length + that of the longest answer]."""
        rows = torch.full((len(answers), max(map(len, answers))), self.pad_token)
        for row, answer in zip(rows, answers, strict=True):
            row[: len(answer)] = torch.from_numpy(answer)
        return torch.cat([self.input_ids, rows], dim=1)


def read_request(model: Any, inputs: Any, generation_config: Any, arguments: Mapping[str, Any]) -> Request:
    """Reads the arguments of `generate`."""
    settings = dict(arguments)
    tensors = {name: settings.pop(name) for name in ("input_ids", "attention_mask") if name in settings}
    config, model_kwargs = model._prepare_generation_config(generation_config, **settings)  # noqa: SLF001
    for name, value in model_kwargs.items():
        if value is not None and value is not False:
            raise _refusal(name, value, "Leave it out")
    _check_config(config)
    stop_tokens = _to_list("eos_token_id", config.eos_token_id)
    (pad_token,) = _to_list("pad_token_id", config.pad_token_id)[:1] or stop_tokens[:1] or (None,)
    input_ids = _check_ids(tensors.get("input_ids"), inputs)
    mask = tensors.get("attention_mask")
    if mask is None:  # as transformers finds it
        has_pads = pad_token is not None and pad_token not in stop_tokens
        mask = input_ids != pad_token if has_pads else torch.ones_like(input_ids)
    prompts = _find_prompts(model, input_ids, mask, tensors.get("attention_mask") is None)
    copies = config.num_return_sequences
    return Request(
        input_ids=input_ids.repeat_interleave(copies, dim=0),
        prompts=[prompt for prompt in prompts for _copy in range(copies)],
        max_new_tokens=_find_number(model, config, generation_config, arguments, input_ids.shape[1]),
        sampling=_find_sampling(config),
        stop_tokens=[token for token in stop_tokens if 0 <= token < _num_words(model)],
        pad_token=0 if pad_token is None else pad_token,
    )


def _refusal(name: str, value: Any, mend: str) -> Error:
    return Error(
        f"generate: {name} is not supported on the devices; got {value!r}. {mend}, or let the plain model "
        "generate, on the host: executor.model.generate(...)."
    )


def _check_config(config: Any) -> None:
    """Raises an `Error` if a field of a GenerationConfig asks for something else than is done."""
    plain = type(config)()
    plain.update(**plain._get_default_generation_params(), defaults_only=True)  # noqa: SLF001
    for name, value in vars(config).items():
        if name.startswith("_") or name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name == "cache_implementation" and value in _DYNAMIC:
            continue
        neutral = getattr(plain, name, None)
        if value is not None and value is not False and value != neutral:
            raise _refusal(name, value, f"Leave it at {neutral!r}")
    if config.min_length:
        raise _refusal("min_length", config.min_length, "Leave it at 0")
    if config.use_cache is not True:
        raise _refusal("use_cache", config.use_cache, "Keys and values are always kept: leave it at True")


def _check_ids(input_ids: Any, inputs: Any) -> torch.Tensor:
    if (input_ids is None) == (inputs is None):
        raise Error(
            "generate: give the prompts once, as input_ids (or as the first argument): an integer tensor "
            "[rows, length]."
        )
    tensor = inputs if input_ids is None else input_ids
    is_usable = (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == 2
        and tensor.numel()
        and tensor.dtype in (torch.int32, torch.int64)
    )
    if not is_usable:
        description = (
            f"{tensor.dtype} {list(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise Error(
            "generate: input_ids must be a tensor of int64 or int32 [rows, length], with at least one "
            f"token in each row; got {description}. Of one prompt make a row: input_ids[None]."
        )
    return tensor.detach().cpu().long()


def _find_prompts(model: Any, input_ids: torch.Tensor, mask: Any, is_inferred: bool) -> list[list[int]]:
    """Returns the tokens of each row without the padding to their left, where the mask is 0.

    An inferred mask was not given: it is 0 where the token of padding is.
    """
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise Error(
            f"generate: attention_mask must have the shape of input_ids, {list(input_ids.shape)}; got "
            f"{shape}."
        )
    is_token = mask.detach().cpu() != 0
    for row, row_mask in enumerate(is_token):
        number = int(row_mask.sum())
        if not number or not row_mask[-number:].all():
            origin = " (found by pad_token_id, as none was given)" if is_inferred else ""
            raise Error(
                f"generate: attention_mask{origin} must be 0 for padding on the left, and 1 for the tokens "
                f"after it, of which each row has at least one; row {row} is {row_mask.int().tolist()}. "
                "Pad on the left, as tokenizers do with padding_side='left'"
                f"{', or give attention_mask' if is_inferred else ''}."
            )
    prompts = [ids[row_mask].tolist() for ids, row_mask in zip(input_ids, is_token, strict=True)]
    number = _num_words(model)
    for row, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < number:
                raise Error(
                    f"generate: input_ids must be from 0 to {number - 1}, the last word of the model; row "
                    f"{row} has {token}."
                )
    return prompts


def _num_words(model: Any) -> int:
    number: int = model.get_input_embeddings().num_embeddings
    return number


def _find_number(
    model: Any, config: Any, generation_config: Any, arguments: Mapping[str, Any], length: int
) -> int:
    """Returns the most new tokens: those asked for, up to `max_length` of a row, or else 20."""
    configs = (generation_config, model.generation_config)
    is_default = arguments.get("max_length") is None and all(
        getattr(candidate, "max_length", None) is None for candidate in configs
    )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.max_new_tokens is not None:
        name, number = "max_new_tokens", config.max_new_tokens
    elif is_default:
        name, number = "max_length", config.max_length
        if most is not None:
            number = min(number, most - length)
    else:
        name, number = "max_length", config.max_length - length
    if not isinstance(number, int) or number < 1:
        raise Error(
            f"generate: {name} must leave room for at least one new token after prompts of {length}; got "
            f"{getattr(config, name)!r}. Give max_new_tokens, or prompts that are shorter."
        )
    if most is not None and length + number > most:
        raise Error(
            f"generate: prompts of {length} tokens and {number} new ones are more than the {most} "
            "positions of the model (max_position_embeddings of its config). Lower max_new_tokens, or "
            "shorten the prompts."
        )
    return number


def _find_sampling(config: Any) -> engine.Sampling:
    """Raises a ValueError if `temperature` or `top_p` is not usable."""
    if not config.do_sample:
        return engine.Sampling()
    if not config.temperature or config.temperature <= 0:
        raise Error(
            f"generate: temperature must be above 0 with do_sample=True; got {config.temperature!r}. For "
            "the likeliest token leave do_sample out."
        )
    return engine.Sampling(
        temperature=float(config.temperature), top_k=config.top_k or None, top_p=config.top_p
    )


def _to_list(name: str, tokens: Any) -> list[int]:
    if tokens is None:
        return []
    values = torch.as_tensor(tokens).reshape(-1)
    if values.is_floating_point() or values.is_complex():
        raise Error(f"generate: {name} must be an integer or a list of integers; got {tokens!r}.")
    listed: list[int] = values.tolist()
    return listed


# Generation.

# Lengths in which prompts are read: each is captured and compiled. Padding would write to the caches.
_CHUNKS = (1, 8, 64)
_SHORTEST = 32  # tokens that caches have room for


def generates_on_devices(wrapped: Wrapped) -> bool:
    """Whether `generate` runs on the devices, as for decoders of transformers wrapped for inference.

    Other models have a `generate` of their own, which runs on the host.
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
            outputs = function(*values)
            if number + 1 < len(self._lengths):
                self._lengths[number + 1][_shapes(outputs)] = length
            return outputs

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
    """Generates with a wrapped model: its stages, caches, and weights on their devices.

    The caller holds the lock of the host's weights.
    """

    def __init__(self, wrapped: Wrapped, host: HostWeights) -> None:
        """Compiles nothing."""
        self._wrapped, self._host = wrapped, host
        self._ready: _Ready | None = None
        self._generator: engine.Generator | None = None
        self._seen_version = -1
        self._num_drawn = 0  # calls that have drawn tokens

    def generate(self, request: Request) -> torch.Tensor:
        """Returns prompts and new tokens; see `Request.join`."""
        self._host.refresh()
        ready, num_rows = self._ready, len(request.prompts)
        if ready is None or request.max_length > ready.max_length:
            ready = self._prepare(1 << (max(request.max_length, _SHORTEST) - 1).bit_length(), num_rows)
        elif self._seen_version != self._host.version:
            self.read_from_host()
        else:
            ready.compiled.check_same_tensors()
        ready.compiled.warn_of_changes()
        if self._generator is None or self._generator.num_slots < num_rows:
            self._generator = _make_generator(ready.stages, ready.devices, ready.max_length, num_rows)
        assert ready.compiled.state is not None
        answers = self._generator.generate(
            ready.compiled.state,
            list(request.prompts),
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            stop_tokens=request.stop_tokens,
            seed=self._find_seed(request.sampling),
        )
        return request.join(answers)

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
        from ipu_pipeline.poptorch.execution.decoders import CachedDecoder

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
    rows_per_group = -(-num_rows // num_groups)
    return engine.Generator(
        stages.functions,
        max_length=max_length,
        num_slots=num_groups * (1 << (rows_per_group - 1).bit_length()),
        num_groups=num_groups,
        chunk_lengths=_CHUNKS,
        token_by_token=False,
        device_mapping=ipus,
        devices=devices,
    )


def _make_arguments(length: int) -> Arguments:
    """Makes arguments of a `CachedDecoder` for a chunk."""
    with torch.inference_mode(False):
        tokens, position = torch.zeros(length, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    tensors, structure = flatten(((tokens, position), {}))
    return Arguments(tensors, structure, ["tokens", "position"])
