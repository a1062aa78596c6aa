"""Files of models: their contents as objects, and their form in safetensors' format.

A file is written whole or not at all, and read without trust. The JSON is in the metadata, and the tensors
are named by their numbers. A checksum finds damage. It does not protect against files that are forged.
There is no machine code in them: XLA would run what it reads back, whatever that is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.files.graph_json import decode_program, encode_program
from ipu_pipeline.poptorch.files.value_json import (
    decode,
    decode_optimizer,
    decode_options,
    encode,
    encode_optimizer,
    encode_options,
)
from ipu_pipeline.poptorch.graphs.capture import FunctionalProgram
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.structures import Structure, compare, flatten

PathLike: TypeAlias = "str | os.PathLike[str]"

_MANIFEST = "ipu_pipeline.poptorch"
_CHECK_SUM = "crc32"
_HEADER_BEGIN = 8  # behind the header's length


class TensorList:
    """The tensors of a file, each of them once."""

    def __init__(self) -> None:
        """Starts empty."""
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Adds a tensor to the list if it is not there yet. Returns its number."""
        if tensor.dtype is torch.complex128:
            raise Error("A file of a model cannot hold tensors of complex128. Make them complex64.")
        number = self._numbers.setdefault(id(tensor), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
        return number

    def by_name(self) -> dict[str, torch.Tensor]:
        """Returns the tensors as a file has them: contiguous, and without shared memory."""
        tensors, storages = {}, set()
        for number, tensor in enumerate(self._tensors):
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            tensors[str(number)] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        return tensors


def find_target(filename: PathLike) -> str:
    """Finds the path to write a file to. Makes its directory if there is none.

    A link is followed.
    """
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(os.fspath(filename), str):
        raise TypeError(f"filename must be a path; got {filename!r}.")
    if not os.fspath(filename):
        raise Error("filename must be the path of a file; it is empty.")
    target = os.path.realpath(filename)
    if os.path.lexists(target) and not stat.S_ISREG(os.lstat(target).st_mode):
        kind = "a directory" if os.path.isdir(target) else "no regular file"
        raise Error(f"filename must be the path of a file; {os.fspath(filename)} is {kind}.")
    directory = os.path.dirname(target)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise Error(
            f"{os.fspath(filename)} cannot be written: the directory {directory} cannot be made ({error}). "
            "Give another path."
        ) from error
    return target


def write_file(filename: PathLike, manifest: Any, tensors: TensorList) -> None:
    """Writes a file.

    It gets its name when it is complete, so an earlier failure leaves the old file. It has the permissions
    of the file that it replaces, or of any new file.
    """
    target = find_target(filename)
    directory, name = os.path.split(target)
    text, named = json.dumps(manifest), tensors.by_name()
    try:
        with tempfile.TemporaryDirectory(".part", f"{name}.", directory) as beside:
            path = os.path.join(beside, name)
            with open(path, "xb"):  # with the permissions of any new file
                mode = os.stat(target if os.path.exists(target) else path).st_mode
            save_file(named, path, {_MANIFEST: text, _CHECK_SUM: _check_sum(text, named)})
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(path, stat.S_IMODE(mode))
            os.replace(path, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Error(f"{os.fspath(filename)} cannot be written: {reason}. Give another path.") from error


def _check_sum(manifest: str, tensors: Mapping[str, torch.Tensor]) -> str:
    checksum = zlib.crc32(manifest.encode())
    for name, tensor in tensors.items():
        checksum = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), checksum)
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"


@contextlib.contextmanager
def read_file(filename: PathLike) -> Iterator[tuple[Any, Mapping[int, torch.Tensor]]]:
    """Reads a file: the manifest, and the tensors by number.

    Any error in the `with` block counts as an error of the file.
    """
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(path := os.fspath(filename), str):
        raise TypeError(f"filename must be a path; got {filename!r}.")
    _check_begin(path)
    try:
        # The tensors get memory of their own, so that later changes to the file cannot reach them.
        with safe_open(path, "pt", backend="pread") as file:
            metadata = file.metadata() or {}
            if _MANIFEST not in metadata:
                raise ValueError(f"its metadata has no {_MANIFEST}, but {sorted(metadata)[:3]}")
            named = {name: file.get_tensor(name) for name in map(str, range(len(file.keys())))}
        text = metadata[_MANIFEST]
        if metadata.get(_CHECK_SUM) != _check_sum(text, named):
            raise ValueError("its check sum does not match its contents")
        yield json.loads(text), {int(name): tensor for name, tensor in named.items()}
    except (Error, MemoryError):
        raise
    except Exception as error:  # bytes that were damaged can be anything
        raise Error(
            f"{path} cannot be read as a file of compileAndExport or save: it was damaged or cut off, "
            f"or something else wrote it ({type(error).__name__}: {error}). Export the model again."
        ) from error


def _check_begin(path: str) -> None:
    try:
        # Opening a pipe would wait for its writer.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise Error(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}.")
        with open(path, "rb") as file:
            begin = file.read(_HEADER_BEGIN + 1)
    except FileNotFoundError:
        raise Error(f"There is no file {path}. compileAndExport and save write such files.") from None
    except (OSError, ValueError) as error:  # a path may have an invalid character
        raise Error(f"{path!r} cannot be read: {error}.") from error
    if not begin:
        raise Error(f"{path} is empty. compileAndExport writes it anew.")
    if begin.startswith(b"PK"):
        raise Error(
            f"{path} is a ZIP archive. If compileAndExport or save wrote it, that was ipu_pipeline 0.1.0 "
            "before its release, in version 1 of the format, which is not read any more: export the model "
            "again."
        )
    if begin[_HEADER_BEGIN:] != b"{":
        raise Error(
            f"{path} is no file of compileAndExport or save: it is not in the format of safetensors."
        )


# The contents of a model's file, as objects.

_VERSION = 2  # 1 was an archive of torch.export
_P = inspect.Parameter
_KINDS = (
    _P.POSITIONAL_ONLY,
    _P.POSITIONAL_OR_KEYWORD,
    _P.VAR_POSITIONAL,
    _P.KEYWORD_ONLY,
    _P.VAR_KEYWORD,
)


@dataclass(frozen=True, eq=False)
class SavedGraph:
    """A captured model: what `Captured` has, without weights.

    Attributes:
      trains: whether it was captured for training, and has a loss.
      program: the graph.
      constants: tensors that are neither parameters nor buffers, by the targets of the program.
      arguments: the structure of the arguments that it was compiled for: positional, keyword.
      outputs: the structure of its results.
      signature: the signature of the model's forward. Defaults are not kept: `...` stands for each.
    """

    trains: bool
    program: FunctionalProgram
    constants: Mapping[str, torch.Tensor]
    arguments: Structure
    outputs: Structure
    signature: inspect.Signature

    def __deepcopy__(self, memo: Any) -> SavedGraph:
        return self  # copies of a model share it, and have their own tensors


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A parameter or a buffer of a model; one tensor may have several names.

    Attributes:
      name: its name in the model.
      tensor: the model's tensor; a `torch.nn.Parameter` if it is one.
      value: its value, on the devices or here.
      is_persistent: whether the model's state dict has it.
    """

    name: str
    tensor: torch.Tensor
    value: torch.Tensor
    is_persistent: bool


@dataclass(frozen=True, eq=False)
class SavedModel:
    """The state of a wrapper: what it was given, and the result of training.

    Attributes:
      class_name: the name of the model's class.
      is_training: the model's train flag.
      tensors: its parameters and buffers.
      options: the wrapper's options.
      optimizer: the optimizer with its state; None without training.
    """

    class_name: str
    is_training: bool
    tensors: Sequence[SavedTensor]
    options: Options
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a file.

    Attributes:
      graph: the captured model.
      model: the wrapper's state; None with `export_model=False`.
      rng_state: `PoplarExecutor.rng_state`; None if it was not saved.
    """

    graph: SavedGraph
    model: SavedModel | None
    rng_state: list[int] | None


def write(filename: PathLike, contents: Contents) -> None:
    """Writes a file."""
    tensors = TensorList()
    graph, model = contents.graph, contents.model
    manifest = {
        "version": _VERSION,
        "made by": _find_versions(),
        "trains": graph.trains,
        "program": encode_program(graph.program),
        "arguments": _encode_structure(graph.arguments, "What the model was compiled for"),
        "outputs": _encode_structure(graph.outputs, "What the model returns"),
        "signature": [
            {"name": p.name, "kind": p.kind.name, "is optional": p.default is not p.empty}
            for p in graph.signature.parameters.values()
        ],
        "constants": {name: tensors.add(tensor) for name, tensor in graph.constants.items()},
        "rng state": contents.rng_state,
        "model": None if model is None else _encode_model(model, tensors),
    }
    write_file(filename, manifest, tensors)


def read(filename: PathLike) -> Contents:
    """Reads a file without running or unpickling anything in it."""
    with read_file(filename) as (manifest, tensors):
        _check_version(manifest)
        graph = SavedGraph(
            trains=_typed(manifest["trains"], bool),
            program=_decode_program(manifest["program"], manifest["made by"]),
            constants={name: tensors[number] for name, number in manifest["constants"].items()},
            arguments=_decode_structure(manifest["arguments"]),
            outputs=_decode_structure(manifest["outputs"]),
            signature=_decode_signature(manifest["signature"]),
        )
        _check_graph(graph)
        saved = manifest["model"]
        model = None if saved is None else _decode_model(saved, tensors, graph.trains)
        state = manifest["rng state"]
        return Contents(graph, model, None if state is None else _check_rng_state(state))


def _find_versions() -> dict[str, str]:
    """Returns the versions of the packages that make and read files."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("ipu_pipeline", "torch")}


def _check_version(manifest: Any) -> None:
    if manifest["version"] != _VERSION:
        versions = ", ".join(f"{name} {version}" for name, version in manifest["made by"].items())
        raise Error(
            f"The file is of version {manifest['version']!r} of its format, made by {versions}. "
            f"ipu_pipeline {_find_versions()['ipu_pipeline']} reads version {_VERSION}: export the model "
            "again with it."
        )


def _decode_program(data: Any, made_by: Mapping[str, str]) -> FunctionalProgram:
    try:
        return decode_program(data)
    except Error:
        raise
    except Exception as error:
        torch_version = _find_versions()["torch"]
        if made_by["torch"] == torch_version:
            raise
        raise Error(
            f"The file was made with torch {made_by['torch']}, and torch {torch_version} has other "
            f"operations ({type(error).__name__}: {error}). Export the model again."
        ) from error


def _check_graph(graph: SavedGraph) -> None:
    """Checks that a graph has the constants, arguments and results that the manifest lists."""
    signature = graph.program.graph_signature
    num_tensors = (len(signature.user_inputs), len(signature.user_outputs))
    if num_tensors != (graph.arguments.num_tensors, graph.outputs.num_tensors):
        raise ValueError("its graph has another number of inputs or outputs than its structures")
    values = {node.name: node.meta["val"] for node in graph.program.graph.nodes}
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        constant, value = graph.constants[target], values[name]
        if (constant.dtype, constant.shape) != (value.dtype, value.shape):
            raise ValueError(f"its constant {target} is {constant.dtype} of shape {tuple(constant.shape)}")


def _check_rng_state(state: Sequence[Any]) -> list[int]:
    *words, count = (_typed(word, int) for word in state)
    if count < 0 or not all(0 <= word < 2**32 for word in words):
        raise ValueError(f"{state} is no state of random numbers")
    return [*words, count]


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _encode_structure(structure: Structure, name: str) -> Any:
    value = structure.unflatten([torch.empty(0)] * structure.num_tensors)
    data = encode(value, name, lambda _tensor: None)
    difference = compare(structure, _decode_structure(data), name)
    if difference is not None:  # as with classes that registerCustomArgParser knows
        raise Error(f"{name} would come back from a file as something else: {difference}.")
    return data


def _decode_structure(data: Any) -> Structure:
    return flatten(decode(data, lambda _of: torch.empty(0)))[1]


def _decode_signature(data: Any) -> inspect.Signature:
    kinds = {kind.name: kind for kind in _KINDS}
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter["name"],
                kinds[parameter["kind"]],
                default=... if parameter["is optional"] else inspect.Parameter.empty,
            )
            for parameter in data
        ]
    )


def _encode_model(model: SavedModel, tensors: TensorList) -> Any:
    names = {id(saved.tensor): saved.name for saved in reversed(model.tensors)}
    optimizer = model.optimizer
    return {
        "class": model.class_name,
        "is training": model.is_training,
        "tensors": [
            {
                "name": saved.name,
                "number": tensors.add(saved.value),
                "is parameter": isinstance(saved.tensor, torch.nn.Parameter),
                "requires grad": saved.tensor.requires_grad,
                "is persistent": saved.is_persistent,
            }
            for saved in model.tensors
        ],
        "options": encode_options(model.options),
        "optimizer": None if optimizer is None else encode_optimizer(optimizer, names, tensors.add),
    }


def _decode_model(data: Any, tensors: Mapping[int, torch.Tensor], trains: bool) -> SavedModel:
    tensor_of: dict[int, torch.Tensor] = {}
    saved_tensors = []
    for entry in data["tensors"]:
        number = _typed(entry["number"], int)
        if number not in tensor_of:
            value, grad = tensors[number], _typed(entry["requires grad"], bool)
            is_parameter = entry["is parameter"] is True
            tensor_of[number] = (
                torch.nn.Parameter(value, grad) if is_parameter else value.requires_grad_(grad)
            )
        tensor, name = tensor_of[number], _typed(entry["name"], str)
        saved_tensors.append(SavedTensor(name, tensor, tensor, entry["is persistent"] is True))
    parameters = {
        entry.name: entry.tensor for entry in saved_tensors if isinstance(entry.tensor, torch.nn.Parameter)
    }
    optimizer = decode_optimizer(data["optimizer"], parameters, tensors.__getitem__) if trains else None
    return SavedModel(
        class_name=_typed(data["class"], str),
        is_training=data["is training"] is True,
        tensors=saved_tensors,
        options=decode_options(data["options"]),
        optimizer=optimizer,
    )
