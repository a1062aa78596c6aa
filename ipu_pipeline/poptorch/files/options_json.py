"""Turns options into JSON and back."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, NoReturn

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.files.values import decode, encode
from ipu_pipeline.poptorch.options import Options, TensorLocationSettings
from ipu_pipeline.poptorch.options.base import UNSET, OptionGroup

__all__ = ["decode_options", "encode_options"]

# Options of the machine and the run, not of the model: a loaded model has its own process's.
_OF_THE_MACHINE = {"executable_cache_path", "log_dir", "profiling", "profile_dir", "ipu_version"}
_OF_THE_RUN = "Distributed"


def encode_options(options: Options) -> Any:
    """Encodes options as JSON."""
    return {path: _encode_group(path, group) for path, group in _groups(options).items()}


def _encode_group(path: str, group: OptionGroup) -> Any:
    values = {name: value for name, value in group.values_by_name().items() if name not in _OF_THE_MACHINE}
    if callable(schedule := values.get("pipeline_schedule")) or schedules.is_path(schedule):
        raise Error(
            f"Options.setPipelineSchedule({schedule!r}): a file of a model cannot hold a function or a "
            "path. Name a schedule; or export the model with one, and set yours by edit_opts_fn of load."
        )
    return {
        "values": encode(values, f"Options.{path}".rstrip("."), _refuse),
        "set": [name for name in values if group.is_set(name)],
    }


def decode_options(data: Any) -> Options:
    """Decodes the options that `encode_options` encoded, not frozen.

    Options of the machine and of processes are as in new options, and so is a `modelName` that is a path.
    `ConnectionType.Never`, from a model that was compiled for another machine, becomes `Always`.
    """
    options = Options()
    for path, group in _groups(options).items():
        values = decode(data[path]["values"], _refuse)
        for name, setting in group.settings.items():
            if name in _OF_THE_MACHINE:
                continue
            leads_elsewhere = name == "model_name" and not _is_plain(values.get(name))
            if (name not in values and setting.default is UNSET) or leads_elsewhere:
                group.unset(name)
                continue
            value = values[name]
            if name == "connection_type" and value is ConnectionType.Never:
                value = ConnectionType.Always
            group.restore(name, _as_given(name, value), name in data[path]["set"])
    return options


def _is_plain(name: Any) -> bool:
    """Whether a model's name, which names a directory, leads to no other directory."""
    return isinstance(name, str) and name == PurePath(name).name


def _groups(options: Options) -> dict[str, OptionGroup]:
    return {"": options, **{name: getattr(options, name) for name in options.groups if name != _OF_THE_RUN}}


def _as_given(name: str, value: Any) -> Any:
    """Returns what to pass to an option's setter for a value, where it is not the value itself."""
    if name == "available_memory_proportion":
        return {f"IPU{number}": proportion for number, proportion in value.items()}
    if name.startswith("location_"):
        settings = TensorLocationSettings()
        for key, number in value.items():
            settings.set(**{key: bool(number) if type(number) is int and key in _FLAGS else number})
        return settings
    return value


_FLAGS = {"onChip", "useReplicatedTensorSharding", "useIOTilesToLoad", "useIOTilesToStore"}


def _refuse(_of: Any) -> NoReturn:
    raise ValueError("options hold no tensors")
