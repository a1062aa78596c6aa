"""Structures of tensors: taken apart, put together, compared."""

import collections
import dataclasses

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.structures import compare, flatten, join

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    label: torch.Tensor
    name: str = "train"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor = dataclasses.field(init=False, repr=False)  # set when there are labels


class Boxes(tuple):
    """A tuple whose constructor takes its elements one by one."""

    __slots__ = ()

    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


class Rows(list):
    """A list with a name."""

    def __init__(self, values, name):
        super().__init__(values)
        self.name = name


class Result(collections.OrderedDict):
    """A dictionary whose entries are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def t(value):
    return torch.tensor(float(value))


def without_loss():
    output = Output(t(1))
    assert not hasattr(output, "loss")
    return output


STRUCTURES = {
    "tensor": lambda: t(1),
    "tuple": lambda: (t(1), t(2)),
    "empty": lambda: ((), [], {}),
    "list": lambda: [t(1), [t(2), (t(3),)]],
    "namedtuple": lambda: Pair(t(1), [t(2)]),
    "dict": lambda: {"b": t(1), "a": {"x": t(2), "n": 3}},
    "default": lambda: collections.defaultdict(list, {"a": t(1)}),
    "subclass": lambda: Result({"loss": t(1), "logits": t(2)}),
    "dataclass": lambda: Batch(t(1), t(2), "test"),
    "a field that is not set": lambda: without_loss(),
    "a tuple with a constructor": lambda: Boxes(t(1), t(2)),
    "a list with a constructor": lambda: Rows([t(1)], "name"),
    "torch's return types": lambda: torch.max(torch.tensor([1.0, 2.0]), 0),
    "size": lambda: torch.Size([2, 3]),
    "constants": lambda: (t(1), None, 5, "text", 2.5, True),
}


def test_a_structure_is_put_together_with_other_tensors():
    for name, make in STRUCTURES.items():
        value = make()
        tensors, structure = flatten(value)
        assert len(tensors) == structure.num_tensors == len(structure.name_tensors("x")), name
        again = structure.unflatten(tensors)
        assert type(again) is type(value), name
        other = structure.unflatten([tensor + 10 for tensor in tensors])
        assert [float(x) - 10 for x in flatten(other)[0]] == [float(x) for x in tensors]
        assert repr(structure.unflatten(tensors)) == repr(value)
        assert compare(structure, flatten(other)[1], "x") is None, name


def test_attributes_of_results_follow():
    result = flatten(Result({"loss": t(1)}))[1].unflatten([t(5)])
    assert float(result.loss) == float(result["loss"]) == 5
    made = flatten(collections.defaultdict(list, {"a": t(1)}))[1].unflatten([t(2)])
    assert made["new"] == []


def test_differences_are_named():
    for first, second, message in [
        ((t(1), 5), (t(1), 3), "Value mismatch for x[1]: expected 5 but got 3"),
        ((t(1),), [t(1)], "Type mismatch for x: expected <class 'tuple'> but got <class 'list'>"),
        ((t(1), t(1)), (t(1),), "Type mismatch for x: expected 2 elements but got 1"),
        ({"a": t(1)}, {"b": t(1)}, "Keys mismatch for x: expected [\"['a']\"] but got [\"['b']\"]"),
        (t(1), 5, "Type mismatch for x: expected <class 'torch.Tensor'> but got <class 'int'>"),
        (Batch(t(1), t(1)), Batch(t(1), t(1), "z"), "Value mismatch for x.name: expected 'train' but"),
        (1, True, "Type mismatch for x: expected <class 'int'> but got <class 'bool'>"),
    ]:
        found = compare(flatten(first)[1], flatten(second)[1], "x")
        assert found is not None, message
        assert found.startswith(message)


class Box:
    def __init__(self, tensor, name):
        self.tensor = tensor
        self.name = name


class BoxParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.tensor

    def reconstruct(self, original_structure, tensor_iterator):
        return Box(next(tensor_iterator), original_structure.name)


def test_classes_with_a_parser():
    assert flatten(Box(t(1), "a"))[0] == []
    poptorch.registerCustomArgParser(Box, BoxParser())
    try:
        tensors, structure = flatten({"box": Box(t(1), "a")})
        made = structure.unflatten([t(7)])["box"]
        assert (float(made.tensor), made.name, len(tensors)) == (7, "a", 1)
        assert compare(structure, flatten({"box": Box(t(3), "a")})[1], "x") is None
        difference = compare(structure, flatten({"box": Box(t(3), "b")})[1], "x")
        assert difference == "Value mismatch for x['box'].name: expected 'a' but got 'b'"
    finally:
        poptorch.registerCustomArgParser(Box, None)
    assert flatten(Box(t(1), "a"))[0] == []
    with pytest.raises(poptorch.Error, match="arg_parser must inherit from ICustomArgParser; got object"):
        poptorch.registerCustomArgParser(Box, object())


def test_values_are_joined():
    rows, others = torch.arange(2.0), torch.arange(3.0)
    first = {"rows": Pair(rows, [rows.bool(), ("a", "b")]), "size": 3}
    joined = join([first, {**first, "rows": Pair(others, [others.bool(), ("c",)])}], "x")
    assert joined["rows"].left.tolist() == [0, 1, 0, 1, 2]
    assert joined["rows"].right[1] == ("a", "b", "c")
    assert joined["size"] == 3
    poptorch.registerCustomArgParser(Box, BoxParser())
    try:
        box = join([Box(rows, "a"), Box(others, "b")], "x")
        assert (box.tensor.tolist(), box.name) == ([0, 1, 0, 1, 2], "a")
    finally:
        poptorch.registerCustomArgParser(Box, None)
    for values, message in [
        ([[rows], rows], r"Type mismatch for x: expected <class 'list'> but got <class 'torch.Tensor'>"),
        ([[rows], [rows, rows]], "Type mismatch for x: expected 1 elements but got 2"),
        ([[rows], [rows[:, None]]], r"x\[0\]: .* got shapes \(2,\), \(2, 1\). Pad them in collate_fn"),
        ([[t(1)], [t(1)]], r"got shapes \(\), \(\)"),
        ([[Box(rows, "a")], [Box(rows, "a")]], r"x\[0\] is of <class '.*Box'>, .*registerCustomArgParser"),
    ]:
        with pytest.raises(poptorch.Error, match=message):
            join(values, "x")


class Cache:
    """Tensors in a list of objects, as a cache of keys and values has them, and itself."""

    def __init__(self, value):
        self.layers = [{"keys": Pair(value, None)}, self]


def test_tensors_deep_in_an_object_are_found():
    """They came back without values."""
    for value, hidden in [(Cache(torch.ones(2)), ["it[0]"]), (Cache(3), [])]:
        assert flatten([value])[1].name_hidden("it") == hidden
    module = torch.nn.Linear(2, 2)  # what has a module takes no tensors of a call
    assert flatten([Cache(module)])[1].name_hidden("it") == []
