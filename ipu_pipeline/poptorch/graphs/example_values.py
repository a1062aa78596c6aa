"""Values of tensors that a model's forward asks for while it is captured, taken from an example.

A graph has no values to branch on. If forward asks for one (`if mask.any()`, `int(length)`), it runs once
more, on the tensors of the first micro-batch, and the answers are recorded. The capture gets the same
answers, and puts an `expect` into the graph for each: when the model runs, the value must be the example's,
or the call ends with an error. A value that only buffers determine is taken for a constant.

Boolean masks as indices, and functions like `nonzero`, ask for the number of true elements (see `masks`).
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import unittest.mock
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs import masks
from ipu_pipeline.poptorch.graphs.refusals import WITHOUT_VALUES
from ipu_pipeline.poptorch.lowering.interpreter import describe_place

_CHECKED = getattr(torch.ops.aten, "_is_all_true").default  # noqa: B009  # of torch._check_tensor_all


class ValueAskedError(BaseException):
    """Forward asks for a value before an example has run. No `except Exception` of a model catches it."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The value of a tensor that forward asked for: a number, a boolean, or lists of these."""

    shape: torch.Size
    value: Any


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    return (one == other).all() if one.shape == other.shape else False


def _all_close(one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(one, other, *args, **kwargs).all()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Function of torch -> what its answer depends on, and Python's type of the answer.
_QUESTIONS: Mapping[Any, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    torch.Tensor.__bool__: (_itself, bool),
    torch.Tensor.__int__: (_itself, int),
    torch.Tensor.__index__: (_itself, int),
    torch.Tensor.__float__: (_itself, float),
    torch.Tensor.item: (_itself, _itself),
    torch.Tensor.tolist: (_itself, _itself),
    torch.is_nonzero: (_itself, bool),
    torch.Tensor.is_nonzero: (_itself, bool),
    torch.equal: (_equal, bool),
    torch.Tensor.equal: (_equal, bool),
    torch.allclose: (_all_close, bool),
    torch.Tensor.allclose: (_all_close, bool),
}

_SELECTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.nonzero: masks.find_nonzero,
    torch.Tensor.nonzero: masks.find_nonzero,
    torch.argwhere: masks.find_nonzero,
    torch.Tensor.argwhere: masks.find_nonzero,
    torch.where: masks.find_true,
    torch.masked_select: masks.select,
    torch.Tensor.masked_select: masks.select,
}


class _Asked(TorchFunctionMode, abc.ABC):
    """Answers questions for values in the `with` block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            depends_on, convert = _QUESTIONS[func]
            tensor = depends_on(*args, **kwargs)
            if isinstance(tensor, torch.Tensor):
                return convert(self.answer(tensor))
            return tensor
        if func in _SELECTIONS and (func is not torch.where or len(args) + len(kwargs) == 1):
            return _SELECTIONS[func](self.find_places, *args, **kwargs)
        # Sizes and slices, as in torch.nn.functional.pad(x, (0, length)), are read without a question.
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], self._with_plain_parts(*args), *args[2:])
        else:
            are_sizes = getattr(func, "__name__", "") == "pad"
            args = tuple(self._with_numbers(part, are_sizes) for part in args)
        return func(*args, **kwargs)

    def _with_plain_parts(self, x: torch.Tensor, index: Any, value: Any = None) -> Any:
        """Returns an index with numbers instead of tensors of one, and with places instead of masks.

        A mask stays where the same value is assigned to all of its elements.
        """
        if type(index) is not tuple and not isinstance(index, (slice, torch.Tensor)):
            return index
        items = index if type(index) is tuple else (index,)
        has_places = value is None or masks.takes_rows(x, items, value)
        parts: list[Any] = []
        for item in items:
            if isinstance(item, slice):
                parts.append(slice(*map(self._as_number, (item.start, item.stop, item.step))))
            elif not masks.is_mask(item):
                parts.append(self._as_number(item))
            elif not item.dim() and item.dtype is torch.uint8:  # export takes it for a number
                raise Error("A tensor of uint8 is an index as a mask. Use index.bool() or index.long().")
            elif not item.dim():
                parts.append(bool(self.answer(item)))
            elif has_places:
                parts.extend(self.find_places(item))
            else:
                parts.append(item)
        return tuple(parts)

    def find_places(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """The places of a mask's true elements, as `torch.where` returns them."""
        mask = mask if mask.dtype is torch.bool else mask != 0
        mask = mask if mask.dim() else mask.reshape(1)
        return list(torch.nonzero_static(mask, size=self.answer(mask.sum())).unbind(1))

    def _as_number(self, part: Any) -> Any:
        return int(self.answer(part)) if isinstance(part, torch.Tensor) and not part.dim() else part

    def _with_numbers(self, part: Any, are_sizes: bool) -> Any:
        if type(part) not in (list, tuple) or not (are_sizes or any(isinstance(n, int) for n in part)):
            return part
        return type(part)(map(self._as_number, part))

    @abc.abstractmethod
    def answer(self, tensor: torch.Tensor) -> Any:
        """The value of a tensor."""


class Recording(_Asked):
    """Writes down the answers that real tensors give."""

    def __init__(self) -> None:
        """Starts without answers."""
        super().__init__()
        self.answers: list[Answer] = []

    def answer(self, tensor: torch.Tensor) -> Any:
        """The value itself."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001  # torch gives it no other name
            value = tensor.tolist()
        self.answers.append(Answer(tensor.shape, value))
        return value

    def _with_plain_parts(self, x: torch.Tensor, index: Any, value: Any = None) -> Any:
        super()._with_plain_parts(x, index, value)
        return index  # as it is, torch checks the shapes of masks


class Replaying(_Asked):
    """Gives the answers of an example, in their order, and expects them of all others."""

    def __init__(self, answers: Sequence[Answer] | None) -> None:
        """Takes the answers; None raises a `ValueAskedError` at the first question."""
        super().__init__()
        self._all = answers
        self._left: Iterator[Answer] = iter(())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        is_control_flow = isinstance(func, torch._ops.HigherOrderOperator)  # noqa: SLF001
        if is_control_flow or torch.compiler.is_dynamo_compiling():  # or within it
            return result
        # It takes seconds to load, but export needs it, too.
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        parts = result if isinstance(result, (list, tuple)) else (result,)
        if free_unbacked_symbols([part for part in parts if isinstance(part, torch.Tensor)]):
            raise DynamicOutputShapeException(func)
        return result

    def begin(self) -> None:
        """Begins with the first answer: forward runs from its start."""
        self._left = iter(self._all or ())

    def answer(self, tensor: torch.Tensor) -> Any:
        """The next answer."""
        if self._all is None:
            raise ValueAskedError
        answer = next(self._left, None)
        if answer is None or answer.shape != tensor.shape:
            raise Error(
                "The model's forward asks for other values of tensors while it is captured than when it "
                f"ran on the first micro-batch. {WITHOUT_VALUES}"
            )
        markers.expect(tensor, json.dumps(answer.value))
        return answer.value


def record(model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> list[Answer]:
    """Runs a model on copies of tensors, and returns the answers. Nothing of the model changes."""
    recording = Recording()
    copies = [tensor.detach().clone() for tensor in tensors]
    own = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    own_copies = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in own.items()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _as_in_export(), recording:
        torch.func.functional_call(model, own_copies, tuple(copies))
    return recording.answers


@contextlib.contextmanager
def _as_in_export() -> Iterator[None]:
    """Makes libraries that ask whether they are compiled or exported do what they do in the capture."""
    # Export's max and min of tensors ask for no value. It takes seconds to load, but export needs it, too.
    from torch._export import non_strict_utils

    patch = unittest.mock.patch.object
    with (
        getattr(non_strict_utils, "_override_builtin_ops", contextlib.nullcontext)(),
        patch(torch.compiler, "_is_compiling_flag", True),
        patch(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


@dataclass(frozen=True, eq=False)
class Expected:
    """What a value must be when a model runs.

    Attributes:
      node: the value.
      value: the number, or lists of numbers.
      place: the line that asked for it.
    """

    node: torch.fx.Node
    value: Any
    place: str

    def check(self, outputs: Any) -> None:
        """Raises an error if an output of micro-batches, on a first axis, is another value."""
        for number, output in enumerate(outputs):
            if not np.allclose(output, self.value, 1e-5, 0):  # numbers of another processor may be rounded
                raise Error(
                    f"{self.place} asks for a value of a tensor. The model was compiled for {self.value}, "
                    f"that of the first micro-batch; in micro-batch {number} of this update it is "
                    f"{output.tolist()}. The weights and buffers are as before this update."
                )


@dataclass(frozen=True, eq=False)
class Assumptions:
    """What a graph takes for granted.

    Attributes:
      expected: the values that a run must have: those of inputs, or of what changes on devices.
      fixed: the buffers and parameters that determine other values, as they were, by name.
    """

    expected: tuple[Expected, ...] = ()
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def check_fixed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises an error if a tensor of a model, by name, is not as it was."""
        for name, value in self.fixed.items():
            if name not in tensors or not torch.equal(tensors[name], value):
                raise Error(
                    f"{name} is not as it was when the model was compiled, whose forward asked for a value "
                    "that it determines. Call destroy() on the model and wrap it again."
                )


def take_assumptions(
    program: torch.export.ExportedProgram,
    tensors: Mapping[str, torch.Tensor],
    trainable: Collection[torch.fx.Node],
    allows_inputs: bool,
) -> Assumptions:
    """Takes the expected values out of a graph.

    Args:
      program: the graph.
      tensors: its parameters, buffers and constants, by target.
      trainable: the placeholders of parameters that may be trained.
      allows_inputs: whether a run may be expected to have values of its inputs.
    """
    signature, graph = program.graph_signature, program.graph
    written = {spec.target for spec in signature.output_specs}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sources: dict[torch.fx.Node, set[str]] = {}  # node -> the targets of the tensors that determine it
    varying, drawn = set[torch.fx.Node](), set[torch.fx.Node]()
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        target = str(spec.target)
        if target not in tensors or node in trainable or spec.target in written:
            varying.add(node)
        sources[node] = {target} if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else set()
    expected, fixed = [], dict[str, torch.Tensor]()
    for node in list(graph.nodes):
        operands = node.all_input_nodes
        if any(operand in varying for operand in operands):
            varying.add(node)
        is_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_draw or any(operand in drawn for operand in operands):
            drawn.add(node)
        sources.setdefault(node, set().union(*(sources[operand] for operand in operands)))
        if (arguments := markers.read_expected(node)) is None:
            continue
        value, text = arguments
        place = describe_place(node)
        if value in drawn:
            raise Error(
                f"{place} asks for a random number, but the model is compiled once. Use torch.where, or "
                "switch it off, as layerdrop=0 does in models of transformers."
            )
        if value not in varying:
            names = {target: target.removeprefix("model.") for target in sources[value]}
            fixed |= {name: tensors[target].detach().clone() for target, name in names.items()}
        elif allows_inputs or value.target is _CHECKED:
            expected.append(Expected(value, json.loads(text), place))
        else:
            raise Error(f"{place} asks for a value of a tensor. {WITHOUT_VALUES}")
        graph.erase_node(node)
    kept = {each.node for each in expected}
    graph.eliminate_dead_code(lambda node: node.is_impure() or node in kept)
    return Assumptions(tuple(expected), fixed)
