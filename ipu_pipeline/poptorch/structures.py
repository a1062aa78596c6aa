"""Flattens and rebuilds arguments and results of models: nested structures of tensors."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ipu_pipeline.poptorch.errors import Error


class ICustomArgParser:
    """Finds tensors in objects of a user's class, and puts them back."""

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yields the tensors of an object, always in the same order."""
        raise NotImplementedError(f"{type(self).__name__} must define yieldTensors(struct).")

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Returns an object like the original, with the tensors that the iterator yields."""
        raise NotImplementedError(
            f"{type(self).__name__} must define reconstruct(original_structure, tensor_iterator)."
        )


_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(class_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Sets how objects of a class, and of classes derived from it, are taken apart.

    Args:
      class_type: the class.
      arg_parser: the parser; None removes it.

    Raises:
      Error: it is not an `ICustomArgParser`.
    """
    if arg_parser is None:
        _parsers.pop(class_type, None)
    elif not isinstance(arg_parser, ICustomArgParser):
        raise Error(f"arg_parser must inherit from ICustomArgParser; got {type(arg_parser).__name__}.")
    else:
        _parsers[class_type] = arg_parser


@dataclass(frozen=True, eq=False)
class Structure:
    """A value without its tensors."""

    type: type  # its type
    # the parts, by the paths to them: "[0]", ".name"; empty for a tensor and a constant
    children: tuple[tuple[str, Structure], ...]
    # makes the value from its rebuilt parts; None for a tensor, which is the part itself
    rebuild: Callable[[list[Any]], Any] | None
    num_tensors: int  # how many tensors are in it
    # the value, if it is not a tensor and has none; the attributes that are numbers and text, if it has
    # a parser of `registerCustomArgParser`
    constant: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor itself."""
        return self.rebuild is None

    def name_hidden(self, name: str) -> list[str]:
        """Returns the paths of constants that have tensors in them, in a value called `name`."""
        if self.is_tensor:
            return []
        if not self.children and _has_tensors(self.constant):
            return [name]
        return [path for part, child in self.children for path in child.name_hidden(name + part)]

    def name_constants(self, name: str) -> list[tuple[str, Any]]:
        """Returns the paths and values of everything that is not a tensor, in a value called `name`."""
        if self.is_tensor:
            return []
        if not self.children:
            return [(name, self.constant)]
        return [constant for part, child in self.children for constant in child.name_constants(name + part)]

    def unflatten(self, tensors: Iterable[Any]) -> Any:
        """Rebuilds the value with other tensors, or with what stands for them."""
        iterator = iter(tensors)
        if self.rebuild is None:
            return next(iterator)
        return self.rebuild([child.unflatten(iterator) for _name, child in self.children])

    def name_tensors(self, name: str) -> list[str]:
        """Returns the paths of the tensors, in their order, in a value called `name`."""
        if self.is_tensor:
            return [name]
        return [path for part, child in self.children for path in child.name_tensors(name + part)]


_TENSOR = Structure(torch.Tensor, (), None, 1)


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """Returns the tensors of a value, and the rest as a structure.

    Tuples, named tuples, lists, dicts and their subclasses are taken apart, and so are data classes and
    classes with a parser of `registerCustomArgParser`. Everything else is a constant.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _flatten(value, tensors)


def in_order_of(
    expected: Structure, actual: Structure, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Structure]:
    """Reorders the dicts of a flattened value like those of `expected` that have the same keys."""
    if actual.is_tensor or not actual.children:
        return tensors, actual
    iterator = iter(tensors)
    parts = {
        name: (child, list(itertools.islice(iterator, child.num_tensors)))
        for name, child in actual.children
    }
    expected_children = dict(expected.children)
    is_dict = (
        issubclass(actual.type, dict)
        and actual.type is expected.type
        and expected_children.keys() == parts.keys()
    )
    ordered, children = [], []
    for label in expected_children if is_dict else parts:
        child, part_tensors = parts[label]
        ordered_part, structure = in_order_of(expected_children.get(label, child), child, part_tensors)
        ordered += ordered_part
        children.append((label, structure))
    rebuild = expected.rebuild if is_dict else actual.rebuild
    return ordered, dataclasses.replace(actual, children=tuple(children), rebuild=rebuild)


def join(values: Sequence[Any], name: str) -> Any:
    """Joins values of one structure, each called `name`, along the first dimension of their tensors.

    Sequences of text and the like, one for each row, are joined too. Other constants are the first value's.

    Raises:
      Error: the values differ in structure, or in other dimensions.
    """
    first = values[0]
    if other := next((type(value) for value in values if type(value) is not type(first)), None):
        raise Error(f"Type mismatch for {name}: expected {type(first)} but got {other}")
    is_dict, is_sequence = isinstance(first, dict), isinstance(first, (list, tuple))
    if not (is_dict or is_sequence) or _find_parser(type(first)) is not None:
        structure = flatten(first)[1]
        if structure.name_hidden(name):
            raise Error(
                f"{name} is of {type(first)}, whose tensors cannot be found and joined. Give the class a "
                "parser: poptorch.registerCustomArgParser(class_type, arg_parser)."
            )
        columns = zip(*(flatten(value)[0] for value in values), strict=True)
        return structure.unflatten([_concatenate(column, name) for column in columns])
    if is_sequence and all(isinstance(part, _PLAIN) for part in first):
        return type(first)(itertools.chain.from_iterable(values))
    keys = list(first) if is_dict else range(len(first))
    if other := next((value for value in values if len(value) != len(keys)), None):
        raise Error(f"Type mismatch for {name}: expected {len(keys)} elements but got {len(other)}")
    parts = [join([value[key] for value in values], f"{name}[{key!r}]") for key in keys]
    rebuild = flatten(first)[1].rebuild
    assert rebuild is not None
    return rebuild(parts)


def _concatenate(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if () in shapes or len({shape[1:] for shape in shapes}) > 1:
        raise Error(
            f"{name}: the tensors of a call's micro-batches are joined along the first dimension, and must "
            f"be alike in the others; got shapes {', '.join(map(str, shapes))}. Pad them in collate_fn."
        )
    return torch.cat(list(tensors))


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    kind = type(value)
    parser = _find_parser(kind)
    if parser is not None:
        parser_tensors = list(parser.yieldTensors(value))
        tensors += parser_tensors
        names = tuple((f"<{number}>", _TENSOR) for number in range(len(parser_tensors)))
        chosen_parser = parser

        def reconstruct(parts: list[Any]) -> Any:
            return chosen_parser.reconstruct(value, iter(parts))

        return Structure(kind, names, reconstruct, len(parser_tensors), _plain_attributes(value))
    if isinstance(value, (tuple, list)):
        make = _list_maker(value) if isinstance(value, list) else _tuple_maker(value)
        names_of = getattr(kind, "_fields", None)
        labels = [f".{n}" for n in names_of] if names_of else [f"[{n}]" for n in range(len(value))]
        return _with_parts(kind, labels, list(value), tensors, make)
    if isinstance(value, dict):
        keys = list(value)
        return _with_parts(
            kind, [f"[{key!r}]" for key in keys], list(value.values()), tensors, _dict_maker(value, keys)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = [getattr(value, name) for name in fields]
        return _with_parts(kind, [f".{n}" for n in fields], parts, tensors, _field_setter(value, fields))

    def same(parts: list[Any]) -> Any:
        del parts
        return value

    # Later values are compared with it, and the user may change it until then.
    constant = copy.copy(value) if isinstance(value, (set, bytearray, np.ndarray)) else value
    return Structure(kind, (), same, 0, constant)


def _find_parser(kind: type) -> ICustomArgParser | None:
    return next((_parsers[base] for base in kind.__mro__ if base in _parsers), None)


def _plain_attributes(value: Any) -> dict[str, Any]:
    return {name: part for name, part in getattr(value, "__dict__", {}).items() if isinstance(part, _PLAIN)}


def _with_parts(
    kind: type,
    labels: Sequence[str],
    parts: Sequence[Any],
    tensors: list[torch.Tensor],
    rebuild: Callable[[list[Any]], Any],
) -> Structure:
    children = tuple((label, _flatten(part, tensors)) for label, part in zip(labels, parts, strict=True))
    return Structure(kind, children, rebuild, sum(child.num_tensors for _label, child in children))


def _list_maker(value: list[Any]) -> Callable[[list[Any]], Any]:
    if type(value) is list:
        return list

    def make(parts: list[Any]) -> Any:
        result = copy.copy(value)
        result[:] = parts
        return result

    return make


def _tuple_maker(value: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    kind = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        make: Callable[[list[Any]], Any] = kind._make
        return make
    if not isinstance(kind.__new__, types.FunctionType):  # a tuple, torch.Size, torch.return_types.max
        return kind

    def make_without_its_constructor(parts: list[Any]) -> Any:
        result = tuple.__new__(kind, parts)
        if attributes := getattr(value, "__dict__", None):
            vars(result).update(attributes)
        return result

    return make_without_its_constructor


def _dict_maker(value: dict[Any, Any], keys: Sequence[Any]) -> Callable[[list[Any]], Any]:
    kind = type(value)
    if kind is dict:
        return lambda parts: dict(zip(keys, parts, strict=True))
    empty = copy.copy(value)  # keeps what a subclass adds, such as the default of a defaultdict
    attributes = {
        name: part
        for name, part in getattr(empty, "__dict__", {}).items()
        if not isinstance(part, torch.Tensor)
    }

    def make(parts: list[Any]) -> Any:
        result = copy.copy(empty)
        if attributes:
            vars(result).update(attributes)
        for key, part in zip(keys, parts, strict=True):
            result[key] = part
        return result

    return make


def _field_setter(value: Any, fields: Sequence[str]) -> Callable[[list[Any]], Any]:
    def make(parts: list[Any]) -> Any:
        result = copy.copy(value)
        for name, part in zip(fields, parts, strict=True):
            object.__setattr__(result, name, part)  # data classes may be frozen
        return result

    return make


def compare(expected: Structure, actual: Structure, name: str) -> str | None:
    """Describes the difference between two structures; None if there is none."""
    if expected.is_tensor and actual.is_tensor:
        return None
    if expected.type is not actual.type:
        return f"Type mismatch for {name}: expected {expected.type} but got {actual.type}"
    if not expected.children and not actual.children:
        if _are_equal(expected.constant, actual.constant):
            return None
        return f"Value mismatch for {name}: expected {expected.constant!r} but got {actual.constant!r}"
    if isinstance(expected.constant, dict):
        for attribute, value in expected.constant.items():
            other_value = actual.constant.get(attribute)
            if not _are_equal(value, other_value):
                return f"Value mismatch for {name}.{attribute}: expected {value!r} but got {other_value!r}"
    labels, actual_labels = (
        [label for label, _child in structure.children] for structure in (expected, actual)
    )
    if issubclass(expected.type, dict) and labels != actual_labels:
        return f"Keys mismatch for {name}: expected {labels} but got {actual_labels}"
    if len(labels) != len(actual_labels):
        return f"Type mismatch for {name}: expected {len(labels)} elements but got {len(actual_labels)}"
    for (label, child), (_label, other) in zip(expected.children, actual.children, strict=True):
        if difference := compare(child, other, name + label):
            return difference
    return None


def _has_tensors(value: Any) -> bool:
    """Whether an object that is not taken apart has tensors, in its attributes or inside these."""
    visited_ids: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, torch.Tensor):
            return True
        if id(part) in visited_ids or isinstance(part, (type, types.ModuleType, torch.nn.Module)):
            continue
        visited_ids.add(id(part))
        if isinstance(part, (list, tuple, set, frozenset)):
            stack += part
        elif isinstance(part, dict):
            stack += part.values()
        stack += getattr(part, "__dict__", {}).values()
    return False


def _are_equal(first: Any, second: Any) -> bool:
    try:
        is_nan = bool(first != first) and bool(second != second)  # float("nan")
        return first is second or bool(first == second) or is_nan
    except Exception:  # such as arrays, which compare by element
        is_array = isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
        if not is_array or first.dtype != second.dtype:
            return False
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))
