"""Errors for what cannot be captured. Export's are unclear, or it captures wrongly.

Between the user's lines of a traceback, torch's export has some 80 of its own. They are removed, and a
note names the module of the model in which the error happened.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import types
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import _AttrProxy

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering.interpreter import describe_place, find_users_frames
from ipu_pipeline.poptorch.operations.custom_ops import find_custom_op
from ipu_pipeline.poptorch.operations.host_calls import find_host_function
from ipu_pipeline.poptorch.structures import Structure

# Tracebacks.

_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parent.parent
_LAYERS = f"{_TORCH / 'nn'}{os.sep}"
_CALLS = str(_TORCH / "nn" / "modules" / "module.py")  # each call of a module goes through this
_EXPORT = tuple(f"{folder}{os.sep}" for folder in (_TORCH, _OURS / "graphs", _OURS / "lowering"))
_MAX_REPR = 80  # characters of a module


def without_proxy(module: Any) -> torch.nn.Module:
    """Returns the original of a module that torch's tracing replaced, as it does if it has two names."""
    original: torch.nn.Module = getattr(module, "get_base")() if isinstance(module, _AttrProxy) else module  # noqa: B009
    return original


def innermost_user_line(error: BaseException) -> str:
    """Returns the last line of an error's traceback that is neither torch's nor ours."""
    place = "The model"
    for traceback in _each(error.__traceback__):
        code = traceback.tb_frame.f_code
        package = traceback.tb_frame.f_globals.get("__name__", "").split(".")[0]
        if package not in ("torch", "ipu_pipeline", "contextlib", "unittest"):
            place = f"{code.co_filename}:{traceback.tb_lineno} ({code.co_name})"
    return place


class Shortened:
    """Removes torch's export from the tracebacks of errors in the `with` block, and notes the module.

    With JAX's option `jax_traceback_filtering` set to "off", tracebacks stay whole. This is not a
    `contextmanager`, because that would restore an error's traceback.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the model whose forward is captured."""
        self._model = model

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Changes the error."""
        if not isinstance(error, Exception):
            return
        if not isinstance(error, Error):
            error.add_note(_describe(error, self._model))
        is_whole = getattr(jax.config, "jax_traceback_filtering") == "off"  # noqa: B009  # mypy does not know it
        linked: BaseException | None = error
        while linked is not None and not is_whole:
            linked.__traceback__ = _without_export(linked.__traceback__)
            linked = linked.__cause__ or linked.__context__


def _describe(error: BaseException, model: torch.nn.Module) -> str:
    names = {id(without_proxy(module)): name for name, module in model.named_modules()}
    place = ""
    for traceback in _each(error.__traceback__):
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (name := names.get(id(without_proxy(owner)))):
            text = repr(without_proxy(owner)).partition("\n")[0]
            place = f" in module {name}, {text if len(text) <= _MAX_REPR else type(owner).__name__},"
    return f"This happened{place} while the model's forward was captured, at {innermost_user_line(error)}."


def _without_export(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback with only the frames of the user, of layers and of other libraries."""
    shortened = None
    for entry in reversed(list(_each(traceback))):
        name = entry.tb_frame.f_code.co_filename
        is_export = name.startswith(_EXPORT) or name == "<string>"
        if not is_export or (name.startswith(_LAYERS) and name != _CALLS):
            shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _each(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


# Refusals.

_CONSTANT = re.compile(r"ConstantVariable\(\w+: (.+)\)")  # torch's form of an exception's arguments
_IPU = re.compile(r"for ipu devices|on device ipu")
_OBSERVED = re.compile(r"Observed(?P<name>\w*(?:Error|Exception|Iteration))(?:Error)?")
WITHOUT_VALUES = (
    "The model is compiled once for all values, so it cannot ask for one while it runs: no `if` or loop "
    "over a tensor's values, no .item(), no .numpy(), no boolean mask of inputs as an index. Use "
    "torch.where or torch.cond, or multiply by a mask. Or let Options.allowValueBranches(True) compile it "
    "for the values of the first micro-batch, with which all others are compared."
)


@dataclass(frozen=True, eq=False)
class Members:
    """The modules and tensors that a model holds, by name."""

    modules: Mapping[str, torch.nn.Module]  # in it
    parameters: Mapping[str, torch.Tensor]  # of all modules
    buffers: Mapping[str, torch.Tensor]  # of all modules

    @staticmethod
    def of(model: torch.nn.Module) -> Members:
        """Returns what a model holds now."""
        return Members(
            {n: without_proxy(m) for n, m in model.named_modules(remove_duplicate=False)},
            dict(model.named_parameters(remove_duplicate=False)),
            dict(model.named_buffers(remove_duplicate=False)),
        )


_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextlib.contextmanager
def explained(model: torch.nn.Module) -> Iterator[None]:
    """Turns errors of torch's export about a model's forward into ours. Other errors pass unchanged."""
    # These modules take seconds to load, but export needs them, too.
    from torch._dynamo.exc import TorchDynamoException
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )

    value_errors = (
        DataDependentOutputException,
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )
    try:
        yield
    except DynamicOutputShapeException as error:
        raise Error(
            f"{innermost_user_line(error)} asks for a value of a tensor: the size of what "
            f"{getattr(error.func, '__name__', error.func)} returns depends on values, and the model is "
            "compiled once. Let the model return what it computes before, such as all boxes of a detection "
            "model, and compute the rest on the host."
        ) from error
    except value_errors as error:
        place = innermost_user_line(error)
        raise Error(f"{place} asks for a value of a tensor. {WITHOUT_VALUES}") from error
    except TorchDynamoException as error:
        raise Error(
            f"{describe_control_flow_error(error)}\nTorch's control flow could not be captured: its "
            "branches and bodies may only compute, and no block begins in them. torch says: "
            f"{str(error).strip()}"
        ) from error
    except RuntimeError as error:
        if " is mutated in the forward method" in str(error):
            name = _without_prefix(str(error).split()[1])
            name = "a list or a closure" if name.startswith("lifted_tensor") else name
            raise Error(
                f"A tensor of {name}, neither a buffer nor an input, is changed by the model's forward. "
                "Register it as a buffer (register_buffer)."
            ) from error
        if "Attempting to use FunctionalTensor on its own" in str(error):
            raise Error(
                "A tensor is made of numbers within a branch or a body of a loop (torch.tensor), where "
                "torch cannot capture it. Make it before, outside of the branch or body; or use "
                "torch.full or torch.arange."
            ) from error
        if "a fake tensor in the exported program constant's list" in str(error):
            raise Error(
                "The model's forward takes a tensor out of torch's sight, as `requires_grad_()` does. "
                "torch.autograd.grad is captured where it differentiates with respect to parameters, and "
                "to what is computed from them."
            ) from error
        if ".numpy() is not supported" in str(error):
            raise Error(
                f"{innermost_user_line(error)} asks for a value of a tensor. {WITHOUT_VALUES}"
            ) from error
        raise
    except AssertionError as error:
        names = _sharing_memory(model)
        if "expected compiled_fn to be GraphModule" in str(error) and names:
            raise Error(
                f"{' and '.join(names)} share memory, as a tensor and a slice of it, or a module "
                "under two names, and the model's forward writes to one of them. Register a copy "
                "(clone()), or one of them alone."
            ) from error
        raise


def _sharing_memory(model: torch.nn.Module) -> list[str]:
    """Finds the names of different buffers and parameters that share memory."""
    by_memory: dict[int, list[str]] = {}
    for name, tensor in itertools.chain(
        model.named_parameters(), model.named_buffers(remove_duplicate=False)
    ):
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in by_memory.values() if len(names) > 1 for name in names]


def check_values(program: torch.export.ExportedProgram) -> None:
    """Checks that the model asks for no value of a tensor."""
    for module in program.graph_module.modules():
        assert isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes:
            if _is_symbolic(node.meta.get("val")):
                raise Error(f"{describe_place(node)} asks for a value of a tensor. {WITHOUT_VALUES}")


def warn_of_generators(program: torch.export.ExportedProgram) -> None:
    """Warns of random numbers from a generator of the user."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("generator") is not None:
            warn_once(
                f"{describe_place(node)} draws random numbers from a generator, which has no effect: they "
                "are drawn on the devices, from Options.randomSeed."
            )


def warn_of_unread_operations(program: torch.export.ExportedProgram) -> None:
    """Warns of custom operations and calls of the host on which nothing that is read depends."""
    operations = torch.ops.ipu_poptorch
    for module in program.graph_module.modules():
        assert isinstance(module, torch.fx.GraphModule)
        read_nodes = _find_read(module.graph)
        for node in module.graph.nodes:
            if node in read_nodes:
                continue
            if node.target is operations.custom_op.default:
                label = find_custom_op(*json.loads(node.args[1])).label
                warn_once(
                    f"{describe_place(node)}: nobody reads the results of custom operation {label}, so it "
                    "is left out. If it is to write to its inputs, as PopART's may, say to which: "
                    "register_custom_op(..., writes=[the number of the input])."
                )
            elif node.target is operations.host_call.default:
                warn_once(
                    f"{describe_place(node)}: nobody reads the results of poptorch.CPU "
                    f"{find_host_function(node.args[1]).name!r}, so it is not called when the model runs. "
                    "Let forward return one of them, or compute with it."
                )


def _find_read(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Finds the nodes that the results of a graph and what it writes to depend on."""
    nodes: set[torch.fx.Node] = set()
    stack = [node for node in graph.nodes if node.is_impure(impure_random=False)]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack += node.all_input_nodes
    return nodes


def check_functional(program: torch.export.ExportedProgram) -> None:
    """Checks what a model writes to, and where its blocks begin."""
    for output in program.graph_signature.output_specs:
        is_parameter = output.kind is OutputKind.PARAMETER_MUTATION
        if is_parameter and program.state_dict[str(output.target)].requires_grad:
            raise Error(
                f"Parameter {_without_prefix(output.target)} is changed by the model's forward. Only the "
                "optimizer changes what is trained; what forward changes must be a buffer "
                "(register_buffer), or need no gradient (requires_grad_(False))."
            )
    for module in program.graph_module.modules():
        assert isinstance(module, torch.fx.GraphModule)
        if module is program.graph_module:
            continue
        for node in module.graph.nodes:
            if markers.is_block(node):
                raise Error(
                    f"A block begins in {describe_place(node)}, within a branch or a loop of torch's "
                    "control flow, which runs on one IPU as a whole. Begin it before."
                )


def check_hooks(model: torch.nn.Module) -> None:
    """Checks that there are no hooks on gradients. JAX computes gradients, and calls no hooks."""
    modules = [
        f"module {name!r}" for name, module in model.named_modules() if _has_hooks(module, _MODULE_HOOKS)
    ]
    parameters = [
        f"parameter {name!r}"
        for name, tensor in model.named_parameters()
        if _has_hooks(tensor, _TENSOR_HOOKS)
    ]
    if hooked := [*modules, *parameters]:
        raise Error(
            f"{', '.join(hooked)} has a hook on gradients, which would never be called: gradients are "
            "computed on the devices, by JAX. Remove it before the model is compiled."
        )


def _has_hooks(value: Any, names: tuple[str, ...]) -> bool:
    return any(getattr(value, name, None) for name in names)


@contextlib.contextmanager
def refusing_gradient_hooks() -> Iterator[None]:
    """Refuses `register_hook` of tensors within a model's forward."""
    register = torch.Tensor.register_hook

    def refuse(tensor: torch.Tensor, hook: Any) -> Any:
        if markers.current_capture() is None:
            return register(tensor, hook)
        raise Error(
            "The model's forward calls register_hook of a tensor. The hook would never be called: "
            "gradients are computed on the devices, by JAX."
        )

    with unittest.mock.patch.object(torch.Tensor, "register_hook", refuse):
        yield


@contextlib.contextmanager
def refusing_backward(name: str) -> Iterator[None]:
    """Refuses `.backward()` in the own backward of a function, which would end in a crash of torch's."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise Error(
            f"The backward of {name} calls .backward() of a tensor, as reversible layers do. "
            "What it adds to gradients of parameters would be lost. Let the model compute the same without "
            "torch.autograd.Function; poptorch.recomputationCheckpoint saves memory."
        )

    with unittest.mock.patch.object(torch.autograd, "backward", refuse):
        yield


@contextlib.contextmanager
def with_detached_data() -> Iterator[None]:
    """Makes `.data` in forward a `.detach()`, which export can follow, and refuses to assign it."""
    original: Any = torch._C.TensorBase.data  # noqa: SLF001  # torch.Tensor inherits it from here

    def is_users() -> bool:
        caller = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001  # torch uses it itself
        return markers.current_capture() is not None and caller.split(".")[0] != "torch"

    def read(tensor: torch.Tensor) -> Any:
        return tensor.detach() if is_users() else original.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if is_users():
            raise Error(
                "The model's forward assigns the `.data` of a tensor, which would be lost. Change a buffer "
                "in place: tensor.copy_(value)."
            )
        original.__set__(tensor, value)

    with unittest.mock.patch.object(torch.Tensor, "data", property(read, write)):
        yield


def _count(depth: threading.local) -> int:
    return int(getattr(depth, "value", 0))


@contextlib.contextmanager
def refusing_no_grad_in_autocast() -> Iterator[None]:
    """Refuses regions without gradients within regions of `torch.autocast`, which export would lose."""
    depth = threading.local()
    enter, leave, switch = (
        torch.autocast.__enter__,
        torch.autocast.__exit__,
        torch.set_grad_enabled.__init__,
    )

    def begin(self: Any) -> Any:
        depth.value = _count(depth) + 1
        return enter(self)

    def end(self: Any, *exception: Any) -> Any:
        depth.value -= 1
        return leave(self, *exception)

    def set_grad(self: Any, mode: bool) -> None:
        if markers.current_capture() is not None and not mode and _count(depth):
            raise Error(
                "The model's forward switches gradients off within a region of torch.autocast, as with "
                "torch.no_grad in it. That would be lost when it is captured. Put the autocast into the "
                "region without gradients, or use tensor.detach()."
            )
        switch(self, mode)

    with (
        unittest.mock.patch.object(torch.autocast, "__enter__", begin),
        unittest.mock.patch.object(torch.autocast, "__exit__", end),
        unittest.mock.patch.object(torch.set_grad_enabled, "__init__", set_grad),
    ):
        yield


def check_results(structure: Structure) -> None:
    """Checks that results hide no tensors in objects that are not taken apart."""
    for name in structure.name_hidden("the result"):
        raise Error(
            f"{name} of the model's forward is an object with tensors in it, which are not found "
            "there. Return tuples, lists or dicts; or say by poptorch.registerCustomArgParser how it is "
            "taken apart."
        )
    for name, constant in structure.name_constants("the result"):
        if isinstance(constant, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Error(f"{name} of the model's forward asks for a value of a tensor. {WITHOUT_VALUES}")
    structure.unflatten([torch.empty(0)] * structure.num_tensors)


def check_tensors(before: Members, after: Members) -> None:
    """Compares what a model holds before and after its forward."""
    for kind, values_before, values_after in (
        ("Parameter", before.parameters, after.parameters),
        ("Module", before.modules, after.modules),
    ):
        for name, value in values_before.items():
            if values_after.get(name) is not value:
                raise Error(
                    f"{kind} {name} is removed or replaced when calling the forward method. What forward "
                    "makes is computed anew in every call; what changes is a buffer, or the optimizer's."
                )
    for kind, values_before, values_after in (
        ("Module", before.modules, after.modules),
        ("Parameter", before.parameters, after.parameters),
        ("Buffer", before.buffers, after.buffers),
    ):
        if new := [name for name in values_after if name not in values_before]:
            raise Error(
                f"{kind} {new[0]} is made by the model's forward. Make it in __init__, or call the model "
                "once on the CPU before it is wrapped."
            )
    _check_buffers(before.buffers, after.buffers)


def check_shapes(
    arguments: Structure,
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Checks that forward has not changed the shape of an input in place, which its caller would see."""
    names = arguments.name_tensors("")
    for name, (shape, stride), tensor in zip(names, layouts, tensors, strict=True):
        if (tensor.shape, tensor.stride()) != (shape, stride):
            kind, _, path = name.partition("]")
            raise Error(
                f"Input {'args' if kind == '[0' else 'kwargs'}{path} of shape {tuple(shape)} has another "
                f"shape after the model's forward, {tuple(tensor.shape)}, as by t_() or unsqueeze_(). Only "
                "its values may change in place: use t(), unsqueeze() and the like."
            )


def _check_buffers(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in before.items():
        if name not in after:
            raise Error(f"Buffer {name} is removed from the model when calling the forward method.")
        if after[name] is not buffer:
            raise Error(
                f"Buffer {name} is reassigned within the model when calling the forward method. This is "
                f"not supported. Consider using self.{name}.copy_(src) to copy data from a source tensor, "
                "where src is the name of the source tensor."
            )


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    if isinstance(value, torch.Tensor):
        return any(map(_is_symbolic, value.shape))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _without_prefix(target: str | None) -> str:
    return str(target).removeprefix("model.")


def describe_control_flow_error(error: BaseException) -> str:
    """Describes the error of the user's branch or body, and its line, in one line."""
    return f"{_find_place(str(error))}: {_find_reason(error)}"


def _find_place(text: str) -> str:
    """Finds the innermost line that is neither torch's nor ours in a text with frames."""
    users = find_users_frames(text)
    if not users:
        return "A branch or a body"
    return f"{users[-1]['file']}:{users[-1]['line']} ({(users[-1]['text'] or '').strip()})"


def _find_reason(error: BaseException) -> str:
    """Returns the message of the first error in the chain that led to one."""
    from torch._dynamo.exc import TorchDynamoException

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    first = causes[-1]
    if _IPU.search(str(first)):
        return (
            'The device "ipu" cannot be named within a branch or a body, where torch would look for it. '
            "Leave `device=` and `.to(device)` out there, or use the device of an operand (device=x.device)"
        )
    if not isinstance(first, TorchDynamoException):
        return f"{type(first).__name__}: {_first_line(str(first))}"
    text = _first_line(str(first).rpartition("Got graph break/error:")[2])
    if text.startswith("raised exception "):
        return text.removeprefix("raised exception ")
    explanation = re.search(r"^\s*Explanation: (.+)$", str(first), re.MULTILINE)
    if explanation is not None:
        return f"{text}. {explanation[1]}"
    text = _CONSTANT.sub(r"\1", text)
    observed = _OBSERVED.fullmatch(type(first).__name__)
    return text if observed is None else f"{observed['name']}: {text}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no text"
