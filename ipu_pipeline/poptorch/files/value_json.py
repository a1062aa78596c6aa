"""Turns values, options and optimizers into JSON and tensors, and back.

Values are structures of tensors, numbers and text, and values of options. Decoding makes objects of
Python's and torch's plain types, and of ours. It also makes named tuples and data classes (including dicts
of their fields, such as the outputs of transformers' models) of other classes, if these have been imported
already. It calls none of their code, and a name in a file imports nothing.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn

import torch

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch import enums, optim
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.optim.device_state import SavedState
from ipu_pipeline.poptorch.optim.optimizers import VariableAttributes
from ipu_pipeline.poptorch.optim.specs import Kind
from ipu_pipeline.poptorch.options import Options, TensorLocationSettings
from ipu_pipeline.poptorch.options.base import UNSET, OptionGroup
from ipu_pipeline.poptorch.options.option_texts import find_class, find_value
from ipu_pipeline.poptorch.options.strategies import (
    Phase,
    PhasedExecution,
    PipelinedExecution,
    Stage,
    Strategy,
)

# Modules of classes in older files, and where the classes are now.
_MOVED = {"ipu_pipeline.poptorch.options.diagnostics": "ipu_pipeline.poptorch.options.options"}
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "torch.Size": torch.Size}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": collections.OrderedDict}


def encode(value: Any, name: str, keep: Callable[[torch.Tensor], Any]) -> Any:
    """Encodes a value as JSON."""

    def inner(part: Any, label: str) -> Any:
        return encode(part, f"{name}{label}", keep)

    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        return {"is": "tensor", "of": keep(value)}
    if kind in _PLAIN:
        return value
    if kind is torch.Size:
        return {"is": "torch.Size", "of": list(value)}
    if kind in (list, tuple):
        return {"is": kind.__name__, "of": [inner(part, f"[{n}]") for n, part in enumerate(value)]}
    if kind in _MAPPINGS.values():
        pairs = [[inner(key, ": a key"), inner(part, f"[{key!r}]")] for key, part in value.items()]
        return {"is": kind.__name__, "of": pairs}
    if kind is bytes:
        return {"is": "bytes", "of": base64.b64encode(value).decode()}
    if kind is complex:
        return {"is": "complex", "of": [value.real, value.imag]}
    if kind is slice:
        return {"is": "slice", "of": inner((value.start, value.stop, value.step), "")}
    if value is Ellipsis:
        return {"is": "...", "of": None}
    if kind is torch.dtype or (isinstance(value, enum.Enum) and kind.__module__ == enums.__name__):
        return {"is": "name", "of": str(value) if kind is torch.dtype else f"{kind.__name__}.{value.name}"}
    if (
        isinstance(value, (PipelinedExecution, PhasedExecution))
        and find_class(f"poptorch.{kind.__name__}") == kind
    ):
        return {"is": "strategy", "class": kind.__name__, "of": inner(_take_apart(value), "")}
    if _is_dict_of_fields(value) and _find_class(path := f"{kind.__module__}:{kind.__qualname__}") is kind:
        pairs = [[inner(key, ": a key"), inner(part, f"[{key!r}]")] for key, part in value.items()]
        return {"is": "dict of fields", "class": path, "of": pairs}
    if _is_named_tuple(kind) or _is_data_class(kind):
        fields = [f for f in _fields_of(kind) if hasattr(value, f)]
        if _find_class(path := f"{kind.__module__}:{kind.__qualname__}") is kind:
            parts = [[field, inner(getattr(value, field), f".{field}")] for field in fields]
            return {"is": "object", "class": path, "of": parts}
    raise Error(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a file of a model cannot hold. It can "
        "hold tensors, numbers and text, and tuples, lists, dicts, named tuples and data classes of them."
    )


def decode(data: Any, find: Callable[[Any], torch.Tensor]) -> Any:
    """Decodes the value that `encode` encoded."""

    def inner(part: Any) -> Any:
        return decode(part, find)

    if type(data) in _PLAIN:
        return data
    kind, of = data["is"], data["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([inner(part) for part in of])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((inner(key), inner(part)) for key, part in of)
    match kind:
        case "tensor":
            return find(of)
        case "bytes":
            return base64.b64decode(of, validate=True)
        case "complex":
            return complex(*of)
        case "slice":
            return slice(*inner(of))
        case "...":
            return Ellipsis
        case "strategy":
            return _make_strategy(data["class"], *inner(of))
        case "name":
            value = find_value(of)
            if value is not None:
                return value
        case "object":
            return _make_object(data["class"], {field: inner(part) for field, part in of})
        case "dict of fields":
            return _make_dict_of_fields(data["class"], {inner(key): inner(part) for key, part in of})
    raise ValueError(f"{kind!r} {of!r} stands for no value")


def _make_object(path: str, parts: dict[str, Any]) -> Any:
    kind = _imported_class(path)
    if _is_named_tuple(kind):
        return tuple.__new__(kind, [parts[field] for field in kind._fields])
    if not _is_data_class(kind) or not parts.keys() <= set(_fields_of(kind)):
        raise ValueError(f"{path} is neither a named tuple nor a data class with {', '.join(parts)}")
    value: Any = object.__new__(kind)
    for field, part in parts.items():
        object.__setattr__(value, field, part)
    return value


def _make_dict_of_fields(path: str, items: dict[Any, Any]) -> Any:
    kind: Any = _imported_class(path)
    base: Any = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    if not issubclass(kind, base) or not dataclasses.is_dataclass(kind):
        raise ValueError(f"{path} is no dict that is a data class")
    value = base.__new__(kind)
    for key, part in items.items():
        base.__setitem__(value, key, part)
    vars(value).update({field: items.get(field) for field in _fields_of(kind)})
    return value


def _imported_class(path: str) -> Any:
    kind: Any = _find_class(path)
    if kind is None:
        module, _colon, name = path.partition(":")
        raise Error(
            f"The file has objects of class {name}. Import it from {module} before loading the file."
        )
    return kind


def _find_class(path: str) -> Any:
    """Finds an imported class by "module:name"; None if it has not been imported."""
    module, _colon, name = path.partition(":")
    value: Any = sys.modules.get(_MOVED.get(module, module))
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value if isinstance(value, type) else None


def _fields_of(kind: Any) -> Sequence[str]:
    return kind._fields if _is_named_tuple(kind) else [field.name for field in dataclasses.fields(kind)]


def _is_data_class(kind: Any) -> bool:
    return not issubclass(kind, (tuple, list, dict)) and dataclasses.is_dataclass(kind)


def _is_dict_of_fields(value: Any) -> bool:
    """Whether a value is both a data class and a dict of its fields, where missing fields are None."""
    if not isinstance(value, dict) or not dataclasses.is_dataclass(type(value)):
        return False
    fields = _fields_of(type(value))
    return value.keys() <= set(fields) and all(getattr(value, f, None) is value.get(f) for f in fields)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _take_apart(strategy: PipelinedExecution | PhasedExecution) -> tuple[list[Any], dict[str, Any]]:
    """Returns a strategy's parts (an AutoStage, stages or phases) and what was set afterwards."""
    if isinstance(strategy, PhasedExecution):
        phases: list[Any] = [[_pack(stage) for stage in phase.stages] for phase in strategy.phases]
        return phases, {name: value for name, value in vars(strategy).items() if not name.startswith("_")}
    if strategy.auto_stage is not None:
        return [strategy.auto_stage], {}
    return [_pack(stage) for stage in strategy.stages], {}


def _pack(stage: Stage) -> tuple[list[str], int | None]:
    return stage.blocks, stage.ipu_id


def _unpack(packed: tuple[list[str], int | None]) -> Stage:
    blocks, ipu = packed
    stage = Stage(*blocks)
    return stage if ipu is None else stage.ipu(ipu)


def _make_strategy(name: str, parts: list[Any], attributes: dict[str, Any]) -> Strategy:
    kind: Any = find_class(f"poptorch.{name}")
    if kind is None or not issubclass(kind, Strategy):
        raise ValueError(f"{name} is no strategy")
    if issubclass(kind, PhasedExecution):
        strategy: Strategy = kind(*(Phase(*map(_unpack, stages)) for stages in parts))
    else:
        strategy = kind(*(part if isinstance(part, enums.AutoStage) else _unpack(part) for part in parts))
    for attribute, value in attributes.items():
        if attribute.startswith("_") or type(vars(strategy)[attribute]) is not type(value):
            raise ValueError(f"{name} has no {attribute} of {value!r}")
        setattr(strategy, attribute, value)
    return strategy


# Options.

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


# Optimizers, with their states.

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{
        f"poptorch.optim.{name}": getattr(optim, name)
        for name in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
    },
    **{
        f"torch.optim.{name}": getattr(torch.optim, name)
        for name in ("AdamW", *(kind.value for kind in Kind if kind is not Kind.LAMB))
    },
}


def encode_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    keep: Callable[[torch.Tensor], int],
) -> Any:
    """Encodes an optimizer as JSON."""
    kind = next(
        name
        for base in type(optimizer).__mro__
        for name, optimizer_class in _CLASSES.items()
        if optimizer_class is base
    )
    groups = [
        {
            "params": [names[id(p)] for p in group["params"] if id(p) in names],
            "values": encode(
                {key: _as_number(value) for key, value in group.items() if key != "params"},
                f"Group {number} of the optimizer",
                keep,
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    attributes: dict[str, Any] = {}
    if isinstance(optimizer, optim.Optimizer):
        values = {name: getattr(optimizer, name) for name in optimizer.own_defaults}
        attributes = {
            "values": encode(values, "An attribute of the optimizer", keep),
            "variable": optimizer.variable_attrs.variable,
        }
        state = optimizer.device_state.read([p for p in optimizer.all_parameters if id(p) in names])
        saved = {
            "ipu_state": None if state is None else dict(state.ipu_state),
            "ipu_param": None if state is None else dict(state.ipu_param),
        }
    else:
        optimizer.state_dict()  # brings the state from the devices
        saved = {names[id(p)]: dict(slots) for p, slots in optimizer.state.items() if id(p) in names}
    return {
        "class": kind,
        "groups": groups,
        "defaults": encode(
            {key: _as_number(value) for key, value in optimizer.defaults.items()},
            "A default of the optimizer",
            keep,
        ),
        "own": attributes,
        "state": encode(saved, "The state of the optimizer", keep),
    }


def decode_optimizer(
    data: Any, parameters: Mapping[str, torch.nn.Parameter], find: Callable[[Any], torch.Tensor]
) -> torch.optim.Optimizer:
    """Decodes the optimizer that `encode_optimizer` encoded."""
    kind: Any = _CLASSES[data["class"]]
    optimizer: torch.optim.Optimizer = kind(
        [{"params": [parameters[name] for name in group["params"]]} for group in data["groups"]]
    )
    for group, saved in zip(optimizer.param_groups, data["groups"], strict=True):
        values = decode(saved["values"], find)
        if "params" in values or group.keys() - {"params"} - values.keys():
            raise ValueError(f"a group of the optimizer has the values {sorted(values)}")
        group.update(values)
    optimizer.defaults = decode(data["defaults"], find)
    state = decode(data["state"], find)
    if isinstance(optimizer, optim.Optimizer):
        attributes = decode(data["own"]["values"], find)
        for name in optimizer.own_defaults:
            setattr(optimizer, name, attributes[name])
        attribute_names = (*optimizer.defaults, "loss_scaling")
        optimizer.variable_attrs = VariableAttributes(map(str, data["own"]["variable"]), attribute_names)
        if state["ipu_state"] is not None:
            optimizer.device_state.load(SavedState(state["ipu_state"], state["ipu_param"]))
    else:
        for name, slots in state.items():
            optimizer.state[parameters[name]] = slots
    return optimizer


def _as_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value
