"""Turns values into JSON and back: structures of tensors, numbers and text, and values of options.

Decoding makes objects of Python's and torch's plain types, and of ours. It also makes named tuples and data
classes (including dicts of their fields, such as the outputs of transformers' models) of other classes, if
these have been imported already. It calls none of their code, and a name in a file imports nothing.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ipu_pipeline.poptorch import enums
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.options.names import find_class, find_value
from ipu_pipeline.poptorch.options.phased import PhasedExecution
from ipu_pipeline.poptorch.options.stages import Phase, Stage
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, Strategy

__all__ = ["decode", "encode"]

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
    made: Any = object.__new__(kind)
    for field, part in parts.items():
        object.__setattr__(made, field, part)
    return made


def _make_dict_of_fields(path: str, items: dict[Any, Any]) -> Any:
    kind: Any = _imported_class(path)
    base: Any = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    if not issubclass(kind, base) or not dataclasses.is_dataclass(kind):
        raise ValueError(f"{path} is no dict that is a data class")
    made = base.__new__(kind)
    for key, part in items.items():
        base.__setitem__(made, key, part)
    vars(made).update({field: items.get(field) for field in _fields_of(kind)})
    return made


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
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


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
        made: list[Any] = [[_pack(stage) for stage in phase.stages] for phase in strategy.phases]
        return made, {name: value for name, value in vars(strategy).items() if not name.startswith("_")}
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
        made: Strategy = kind(*(Phase(*map(_unpack, stages)) for stages in parts))
    else:
        made = kind(*(part if isinstance(part, enums.AutoStage) else _unpack(part) for part in parts))
    for attribute, value in attributes.items():
        if attribute.startswith("_") or type(vars(made)[attribute]) is not type(value):
            raise ValueError(f"{name} has no {attribute} of {value!r}")
        setattr(made, attribute, value)
    return made
