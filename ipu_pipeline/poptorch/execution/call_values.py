"""Values of a call: arguments as tensors and a structure, and results from micro-batches' outputs.

Results are joined, summed, or only some of them; so are the values within a model that
`Options.anchorTensor` asks for.
"""

from __future__ import annotations

import collections
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy, to_torch
from ipu_pipeline.poptorch.enums import OutputMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs.stages import is_gradient
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.structures import Structure, compare, flatten, in_order_of

# Arguments: bound to forward's parameters, checked, and cut into micro-batches.

# Added where arguments differ from those that a file's model was captured for.
OF_FILE = " The file has a model that was captured for such inputs only: export the model again, for these."
_WRAP = "wrap it again in a new trainingModel or inferenceModel, or call destroy() on this one first."
_MEND = f" The model was compiled for other inputs: {_WRAP}"
OTHER_THAN_SHAPES = (
    f"{_MEND} Options.allowNewShapes(True) allows other shapes of tensors, but no other dtypes, structures "
    "or values that are not tensors."
)
_MEND_SHAPES = (
    " The model was compiled for other inputs: Options.allowNewShapes(True) compiles it for these, "
    f"too; or {_WRAP}"
)


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a call."""

    tensors: list[torch.Tensor]  # the tensors in them, of all micro-batches
    structure: Structure  # the structure of the pair of positional and keyword arguments
    names: list[str]  # the names of the tensors, by the parameters of forward


@dataclass(frozen=True)
class Batching:
    """How a call's tensors are cut along their first dimension."""

    device_iterations: int  # weight updates in a call, or micro-batches in inference
    gradient_accumulation: int  # micro-batches per weight update and replica
    input_groups: tuple[int, ...] = (0,)  # for each replica, the group whose inputs it gets

    @property
    def num_rounds(self) -> int:
        """The number of micro-batches of each replica in a call."""
        return self.device_iterations * self.gradient_accumulation

    @property
    def num_groups(self) -> int:
        """The number of groups of replicas with the same inputs."""
        return max(self.input_groups) + 1

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches that a call's tensors are cut into."""
        return self.num_rounds * self.num_groups


class Signature:
    """The parameters of a model's forward."""

    def __init__(self, signature: inspect.Signature) -> None:
        """Reads the parameters."""
        self._signature = signature
        kinds = inspect.Parameter
        parameters = self._signature.parameters.values()
        self._positional = [
            p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        self._takes_more = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        self._takes_any_name = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
        self._mandatory = [
            p.name
            for p in parameters
            if p.default is kinds.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        ]

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], first: Structure | None = None
    ) -> Arguments:
        """Takes a call's arguments apart."""
        parameters = self._signature.parameters
        assert self._takes_more or len(args) <= len(self._positional), (
            f"Too many arguments provided: expected {self._positional} but got {len(args)}."
        )
        names = [*self._positional[: len(args)], *kwargs]
        for name in kwargs:
            is_known = name in parameters or self._takes_any_name
            assert is_known, f"{name} is not a valid parameter. The model's forward takes {[*parameters]}."
            assert names.count(name) == 1, f"Parameter {name} was passed more than once."
        for name in self._mandatory:
            if name not in names:
                raise Error(
                    f"Mandatory parameter {name} missing. The model's forward takes {[*parameters]}."
                )
        order = {name: place for place, name in enumerate(parameters)}
        by_name = dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))
        tensors, structure = flatten((tuple(args), by_name))
        if first is not None:
            tensors, structure = in_order_of(first, structure, tensors)
        for hidden in structure.name_hidden("arguments"):
            raise Error(
                f"{hidden} is an object with tensors in it, which are not found there. Pass tuples, "
                "lists or dicts; or say by poptorch.registerCustomArgParser how it is taken apart."
            )
        return Arguments(tensors, structure, self.name_tensors(structure))

    def name_tensors(self, structure: Structure) -> list[str]:
        """Returns the names of a call's tensors in errors."""
        (_label, positional), (_label, named) = structure.children
        names = []
        for number, (_label, child) in enumerate(positional.children):
            is_known = number < len(self._positional)
            name = self._positional[number] if is_known else f"args[{number - len(self._positional)}]"
            names += child.name_tensors(name)
        for label, child in named.children:
            names += child.name_tensors(label[2:-2])  # the name in "['name']"
        return names

    def compare(self, expected: Structure, actual: Structure) -> str | None:
        """Describes the difference between two calls' arguments, besides tensors; None if there is none."""
        (_label, first), (_label, first_named) = expected.children
        (_label, second), (_label, second_named) = actual.children
        if len(first.children) != len(second.children):
            return (
                f"Number of positional arguments mismatch: expected {len(first.children)} but got "
                f"{len(second.children)}"
            )
        for number, ((_label, child), (_label, other)) in enumerate(
            zip(first.children, second.children, strict=True)
        ):
            is_known = number < len(self._positional)
            name = self._positional[number] if is_known else f"args[{number - len(self._positional)}]"
            if difference := compare(child, other, name):
                return difference
        keys, actual_keys = ([label[2:-2] for label, _c in s.children] for s in (first_named, second_named))
        if keys != actual_keys:
            return f"Keys mismatch: expected {keys} but got {actual_keys}"
        for key, (_label, child), (_label, other) in zip(
            keys, first_named.children, second_named.children, strict=True
        ):
            if difference := compare(child, other, key):
                return difference
        return None


def check_like_first(
    signature: Signature, first: Arguments, arguments: Arguments, mend: str = _MEND
) -> None:
    """Checks the arguments of a call, besides shapes, against those that the model was compiled for."""
    difference = signature.compare(first.structure, arguments.structure)
    if difference is not None:
        raise Error(f"{difference}.{mend}")
    for name, old, new in zip(arguments.names, first.tensors, arguments.tensors, strict=True):
        if new.dtype != old.dtype:
            raise Error(f"Data type mismatch for {name}: expected {old.dtype} but got {new.dtype}.{mend}")


def shapes_of(arguments: Arguments) -> tuple[torch.Size, ...]:
    """Returns the shapes of a call's tensors, all micro-batches together."""
    return tuple(tensor.shape for tensor in arguments.tensors)


def describe_shapes(names: Sequence[str], shapes: Sequence[torch.Size]) -> str:
    """Describes shapes by the names of their arguments, for people to read."""
    named = zip(names, shapes, strict=True)
    return ", ".join(f"{name} {list(shape)}" for name, shape in named) or "no tensors"


def check_shapes(arguments: Arguments, expected: Sequence[torch.Size], mend: str = _MEND_SHAPES) -> None:
    """Checks the shapes of a call's tensors against those that the model was compiled for."""
    for name, shape, tensor in zip(arguments.names, expected, arguments.tensors, strict=True):
        if tensor.shape != shape:
            raise Error(f"Shape mismatch for {name}: expected {shape} but got {tensor.shape}.{mend}")


def check_batches(arguments: Arguments, batching: Batching) -> None:
    """Checks that the tensors can be cut."""
    number = batching.num_micro_batches
    if number == 1:
        return
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        size = tensor.shape[0] if tensor.dim() else 0
        is_usable = size > 0 and size % number == 0
        assert is_usable, (
            f"Invalid batch dimension: In the input {name} of shape {tuple(tensor.shape)}, the batch "
            f"dimension ({size}) must be a multiple of "
            f"Options.deviceIterations({batching.device_iterations}) * "
            f"(Options.replicationFactor({len(batching.input_groups)}) / "
            f"Options.inputReplicaGrouping({len(batching.input_groups) // batching.num_groups})) * "
            f"Options.Training.gradientAccumulation({batching.gradient_accumulation}) = {number} because "
            "it is used to calculate the batch size which will be executed on the device in any given "
            f"iteration. {_describe_fitting(size, number)}"
        )


def _describe_fitting(size: int, number: int) -> str:
    """Names the nearest numbers of rows that could be cut, for one that cannot."""
    below, above = size // number * number, (size // number + 1) * number
    fitting = f"{below} rows would fit, or {above}" if below else f"{above} rows would fit"
    return f"{fitting}: all micro-batches of a call have the same number."


def check_written(arguments: Arguments, written: Sequence[int]) -> None:
    """Checks that no tensor that forward writes to shares memory with another one."""
    if not written:
        return
    arrays = [
        (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
        for tensor in arguments.tensors
    ]
    for number, other in itertools.product(written, range(len(arrays))):
        if number != other and np.shares_memory(arrays[number], arrays[other]):
            raise Error(
                f"Inputs {arguments.names[number]} and {arguments.names[other]} share memory, and the "
                f"model's forward writes to {arguments.names[number]}. On the devices each input is by "
                "itself, so the other one would not change. Pass a copy (clone()) as one of them."
            )


def split(arguments: Arguments, batching: Batching) -> tuple[list[Any], int]:
    """Cuts a call's arguments into micro-batches, in the order in which they run.

    The order is device iterations outermost, then accumulation steps, then replicas.
    """
    check_batches(arguments, batching)
    number = batching.num_micro_batches
    arrays = []
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if tensor.requires_grad:
            warn_once(
                f"Input {name} requires a gradient. Gradients do not leave the model: it is detached, as "
                "`tensor.detach()` does."
            )
        array = to_numpy(tensor, f"Input {name}")
        arrays.append(
            array[None] if number == 1 else array.reshape(number, len(array) // number, *array.shape[1:])
        )
    micro_batches = [
        tuple(array[index * batching.num_groups + group] for array in arrays)
        for index in range(batching.num_rounds)
        for group in batching.input_groups
    ]
    return micro_batches, len(micro_batches)


def first_micro_batch(arguments: Arguments, batching: Batching) -> list[torch.Tensor]:
    """Returns the tensors of the first micro-batch, for which a model is compiled."""
    check_batches(arguments, batching)
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if tensor.dtype is torch.int64:
            to_numpy(tensor, f"Input {name}")
    number = batching.num_micro_batches
    storages: set[int] = set()
    with torch.inference_mode(False):
        tensors = []
        for tensor in arguments.tensors:
            # Tensors that were made in inference mode cannot be captured, nor can writes to one of several
            # that share memory, but copies can.
            address = tensor.untyped_storage().data_ptr()
            is_copied = tensor.is_inference() or address in storages
            storages.add(address)
            tensors.append(tensor.detach().clone() if is_copied else tensor.detach())
        if number == 1:
            return tensors
        return [tensor[: len(tensor) // number].contiguous() for tensor in tensors]


# Results.


def join_outputs(
    collected: Sequence[Collected],
    dtypes: Sequence[torch.dtype],
    mode: OutputMode,
    period: int,
    first: int = 0,
    has_replicas: bool = False,
) -> list[torch.Tensor]:
    """Makes the tensors that a call returns."""
    joined = []
    for place, dtype in enumerate(dtypes, first):
        if mode is OutputMode.Final:
            last = collected[-1]
            leaf = last.outputs[place]
            value = np.asarray(leaf if last.size is None else leaf[last.size - 1])
        elif mode is OutputMode.Sum:
            dtype = torch.int32 if dtype is torch.bool else dtype
            value = stack_outputs(collected, place).sum(0, dtype=jax_dtype(dtype))
        else:
            value = stack_outputs(collected, place)
            if mode is OutputMode.EveryN:
                value = value[period - 1 :: period]
            value = value.reshape(()) if value.shape == (1,) else _join_first_axes(value)
        if has_replicas:
            value = _join_first_axes(value)
        tensor = to_torch(value, dtype)
        vars(tensor)["backward"] = _NO_BACKWARD
        joined.append(tensor)
    return joined


def write_inputs(
    arguments: Arguments,
    numbers: Sequence[int],
    collected: Sequence[Collected],
    first: int,
    batching: Batching,
) -> None:
    """Gives a call's tensors the values that forward has written to them, as in torch."""
    has_replicas = len(batching.input_groups) > 1
    replicas = [batching.input_groups.index(group) for group in range(batching.num_groups)]
    for place, number in enumerate(numbers, first):
        tensor = arguments.tensors[number]
        (value,) = join_outputs(collected, [tensor.dtype], OutputMode.All, 1, place, has_replicas)
        shape = [len(tensor) // batching.num_micro_batches, *tensor.shape[1:]] if tensor.dim() else []
        rows = value.reshape(batching.num_rounds, len(batching.input_groups), *shape)
        written = rows[:, replicas].reshape(tensor.shape)
        if jax_dtype(tensor.dtype).itemsize < tensor.dtype.itemsize:
            # What forward does not change is not rounded.
            written = torch.where(written == to_torch(to_numpy(tensor), tensor.dtype), tensor, written)
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(written)


def stack_outputs(collected: Sequence[Collected], place: int) -> np.ndarray[Any, Any]:
    """Stacks an output of all micro-batches along a new first axis."""
    parts = []
    for part in collected:
        leaf = np.asarray(part.outputs[place])
        parts.append(leaf[None] if part.size is None else leaf[: part.size])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_first_axes(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Joins the first two axes. Scalars have only the first one."""
    if value.ndim < 2:
        return value
    first, second, *inner = value.shape
    return value.reshape(first * second, *inner)  # not -1, which fails without elements


class _NoBackward:
    """Replaces `backward` of a returned tensor, which has no graph of torch."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  # torch's arguments
        raise Error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
            "trainingModel, the backwards pass is performed automatically when invoking the model. If "
            "you're using an inferenceModel, you should use a trainingModel instead."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, ()  # torch.load must know the classes that are saved with a tensor

    def __deepcopy__(self, memo: Any) -> _NoBackward:
        return self


_NO_BACKWARD = _NoBackward()


class AnchoredValues:
    """The anchored values of the last call, by the short names of the options."""

    def __init__(self, options: Options) -> None:
        """Starts without values."""
        self._options = options
        self._values: dict[str, torch.Tensor] = {}

    def keep(
        self, collected: list[Collected], dtypes: Sequence[torch.dtype], first: int, mode: OutputMode
    ) -> None:
        """Keeps the values of a call."""
        anchored = self._options.anchored_tensors
        shorts = sorted(anchored, key=lambda short: is_gradient(anchored[short].long_name))
        for place, short in enumerate(shorts, first):
            anchor = anchored[short]
            anchor_mode = mode if anchor.output_mode in (None, OutputMode.Default) else anchor.output_mode
            has_own_mode = anchor_mode is anchor.output_mode
            period = anchor.output_return_period if has_own_mode else self._options.output_return_period
            has_replicas = self._options.replication_factor > 1
            (value,) = join_outputs(
                collected, dtypes[place : place + 1], anchor_mode, period, place, has_replicas
            )
            self._values[short] = value

    def find(self, short_name: str) -> torch.Tensor:
        """Returns a value of the last call; see `PoplarExecutor.getAnchoredTensor`."""
        names = list(self._options.anchored_tensors)
        assert short_name in names, f"No tensor is anchored as {short_name!r}. There are: {names}."
        assert short_name in self._values, "Run the model before asking for an anchored tensor."
        return self._values[short_name]
