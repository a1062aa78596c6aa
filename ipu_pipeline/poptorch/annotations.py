"""Blocks, which assign a model's operations to IPUs.

In a forward on the CPU, all of this does nothing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error

CallableT = TypeVar("CallableT", bound="Callable[..., Any]")

_HOOK = "_ipu_pipeline_block"


class Block:
    """A context manager whose operations form a block.

    Later operations, up to the next block, belong to it, too.

    Example:
      with poptorch.Block("encoder", ipu_id=0):
          x = self.encoder(x)
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Names the block.

        Args:
          user_id: its name in strategies. The same name again continues the block.
          ipu_id: its IPU, from 0, for strategies that do not set one.

        Raises:
          TypeError: the name is not a string, or the IPU not an integer.
          ValueError: the IPU is negative.
        """
        self._user_id, self._ipu_id = _check_ids("Block", user_id, ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Names the following unnamed blocks "0", "1", ... Called at the start of `forward`."""
        capture = markers.current_capture()
        if capture is not None:
            capture.next_auto_id = 0

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Starts a block that lasts until the next block starts.

        Args:
          user_id: as for `Block`.
          ipu_id: as for `Block`.
        """
        name, ipu = _check_ids("Block.start", user_id, ipu_id)
        if markers.current_capture() is not None:
            markers.begin_block(_auto_name(name), ipu)

    def __enter__(self) -> Block:
        """Begins the block."""
        capture = markers.current_capture()
        if capture is not None:
            name = _auto_name(self._user_id)
            capture.open_blocks.append((name, self._ipu_id))
            markers.begin_block(name, self._ipu_id)
        return self

    def __exit__(self, *exception: object) -> None:
        """Returns to the block around this one, if there is one."""
        capture = markers.current_capture()
        if capture is not None and capture.open_blocks:
            capture.open_blocks.pop()
            if capture.open_blocks:
                markers.begin_block(*capture.open_blocks[-1])


class _BeginBlockHook:
    """The pre-hook of a module that begins a block."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self.user_id = user_id
        self.ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        del module, inputs
        Block.start(self.user_id, self.ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self.user_id}, ipu_id={self.ipu_id})"


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """Starts a block at each call of a module or a function.

    Args:
      layer_to_call: a module, which gets a hook, or a function.
      user_id: as for `Block`.
      ipu_id: as for `Block`.

    Returns:
      The same module, or a function that calls the given one.

    Raises:
      Error: the module already starts a block, or the argument is neither a module nor a function.
    """
    name, ipu = _check_ids("BeginBlock", user_id, ipu_id)
    if isinstance(layer_to_call, torch.nn.Module):
        if hasattr(layer_to_call, _HOOK):
            raise Error(
                "module has already been assigned to a block. poptorch.removeBlocks(module) undoes that."
            )
        hook = _BeginBlockHook(name, ipu)
        handle = layer_to_call.register_forward_pre_hook(hook)
        vars(layer_to_call)[_HOOK] = (hook, handle)
        return layer_to_call
    if not isinstance(
        layer_to_call,
        (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial),
    ):
        raise Error(
            "module is not an instance of torch.nn.Module or function. It is a "
            f"{type(layer_to_call).__name__}."
        )
    return BlockFunction(name, ipu)(layer_to_call)


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[CallableT], CallableT]:
    """Makes a decorator that puts the operations of a function or method into a block.

    Args:
      user_id: as for `Block`.
      ipu_id: as for `Block`.
    """
    name, ipu = _check_ids("BlockFunction", user_id, ipu_id)

    def decorate(function: CallableT) -> CallableT:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with Block(name, ipu):
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]  # it takes and returns what the function does

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Removes the blocks of `BeginBlock` from a module and all modules in it.

    Raises:
      Error: it is not a module.
    """
    if not isinstance(module, torch.nn.Module):
        raise Error(f"module is not an instance of torch.nn.Module. It is a {type(module).__name__}.")
    for inner in module.modules():
        _hook, handle = vars(inner).pop(_HOOK, (None, None))
        if handle is not None:
            handle.remove()


def module_repr(module: torch.nn.Module) -> str:
    """Returns a module's `repr` with the blocks of `BeginBlock` before the modules' names."""
    lines = [(f"({name}): " if name else "", inner) for name, inner in module.named_children()]
    text = _own_repr(module)
    hook, _handle = vars(module).get(_HOOK, (None, None))
    begin = "" if hook is None else f"{hook!r} "
    if not lines:
        return f"{begin}{type(module).__name__}({text})"
    children = [f"{start}{module_repr(inner)}" for start, inner in lines]
    body = "\n".join([*([text] if text else []), *children])
    indented = "\n".join(f"  {line}" for line in body.splitlines())
    return f"{begin}{type(module).__name__}(\n{indented}\n)"


def _own_repr(module: torch.nn.Module) -> str:
    return str(module.extra_repr())


def _auto_name(name: str | None) -> str | None:
    capture = markers.current_capture()
    if name is not None or capture is None or capture.next_auto_id is None:
        return name
    name = str(capture.next_auto_id)
    capture.next_auto_id += 1
    return name


def _check_ids(caller: str, user_id: Any, ipu_id: Any) -> tuple[str | None, int | None]:
    if is_int(user_id):
        user_id = str(user_id)
    if user_id is not None and not isinstance(user_id, str):
        raise TypeError(f"{caller}: user_id must be a string, an integer or None; got {user_id!r}.")
    if ipu_id is not None and not is_int(ipu_id):
        raise TypeError(f"{caller}: ipu_id must be an integer or None; got {ipu_id!r}.")
    if ipu_id is not None and ipu_id < 0:
        raise ValueError(f"{caller}: ipu_id must be at least 0; got {ipu_id}.")
    return user_id, ipu_id
