"""Operations of torch that mark places in a graph. On the CPU they do nothing, or what they stand for.

They survive `torch.export` and its decompositions: those without a result are registered as having a side
effect, and those with one have no decomposition.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "NAMESPACE",
    "Capturing",
    "MultiConvPart",
    "begin_block",
    "begin_multi_conv",
    "begin_scope",
    "capturing",
    "copy_opaquely",
    "current_capture",
    "end_multi_conv",
    "end_scope",
    "is_block",
    "is_checkpoint",
    "is_keep_inputs",
    "is_marker",
    "is_traced",
    "keep_for_backward",
    "keep_inputs",
    "keep_operation",
    "mark_final_loss",
    "mark_found_loss",
    "read_multi_conv",
    "read_scope",
    "reduce_loss",
]

NAMESPACE = "ipu_poptorch"


@dataclass(eq=False)
class Capturing:
    """A model is being captured: its forward runs for the graph."""

    # name and IPU of the blocks that are open as context managers, the innermost last
    open_blocks: list[tuple[str | None, int | None]] = field(default_factory=list)
    next_auto_id: int | None = None  # of `Block.useAutoId`; None if that was not called.
    # what the graph names, and must be there for as long as the graph is
    held: list[Any] = field(default_factory=list)


_capturing: contextvars.ContextVar[Capturing | None] = contextvars.ContextVar("capturing", default=None)


@contextlib.contextmanager
def capturing() -> Iterator[Capturing]:
    """In the `with` block a model's forward runs as on IPUs, in this thread."""
    token = _capturing.set(Capturing())
    try:
        made = _capturing.get()
        assert made is not None
        yield made
    finally:
        _capturing.reset(token)


def current_capture() -> Capturing | None:
    """The capture that runs in this thread; None outside of one."""
    return _capturing.get()


def is_traced() -> bool:
    """Whether what runs makes a graph: a model is being captured, or a branch or body of control flow."""
    return torch.compiler.is_dynamo_compiling() or current_capture() is not None


def begin_block(name: str | None, ipu: int | None) -> None:
    """What follows belongs to this block."""
    _OPERATIONS.begin_block(name, ipu)


def is_block(node: torch.fx.Node) -> bool:
    """Whether a node of a graph begins a block; its arguments are the name and the IPU."""
    return node.target is _OPERATIONS.begin_block.default


def is_marker(node: torch.fx.Node) -> bool:
    """Whether a node of a graph computes nothing: it says where something begins, ends, or is."""
    return node.target in _PLACES or node.target is mark_final_loss()


def begin_scope(name: str) -> None:
    """What follows has a name before its own."""
    _OPERATIONS.begin_scope(name)


def end_scope() -> None:
    """The scope that began last ends."""
    _OPERATIONS.end_scope()


def read_scope(node: torch.fx.Node) -> tuple[str | None] | None:
    """Of a node that begins a scope, its name; of one that ends it, None; both in a tuple.

    None for every other node.
    """
    if node.target is _OPERATIONS.end_scope.default:
        return (None,)
    return (str(node.args[0]),) if node.target is _OPERATIONS.begin_scope.default else None


def begin_multi_conv() -> None:
    """What follows is within a `MultiConv`."""
    _OPERATIONS.begin_multi_conv()


def end_multi_conv(counts: Mapping[str, int]) -> None:
    """The `MultiConv` ends."""
    _OPERATIONS.end_multi_conv(list(counts), list(counts.values()))


@dataclass(frozen=True)
class MultiConvPart:
    """A node of a graph that begins or ends a `MultiConv`."""

    counts: Mapping[str, int] | None  # as for `end_multi_conv`; None where one begins


def read_multi_conv(node: torch.fx.Node) -> MultiConvPart | None:
    """What a node says of a `MultiConv`; None if nothing."""
    if node.target is _OPERATIONS.begin_multi_conv.default:
        return MultiConvPart(None)
    if node.target is not _OPERATIONS.end_multi_conv.default:
        return None
    names: Any = node.args[0]
    numbers: Any = node.args[1]
    return MultiConvPart(dict(zip(names, numbers, strict=True)))


def is_checkpoint(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is a value that is kept where others are computed again."""
    return node.target is keep_operation()


def reduce_loss(value: torch.Tensor, reduction: str) -> torch.Tensor:
    """A value as a loss: its "sum" or "mean", or with "none" itself."""
    loss: torch.Tensor = _OPERATIONS.identity_loss(value, reduction)
    return loss


def copy_opaquely(value: torch.Tensor) -> torch.Tensor:
    """A value that compiled programs know nothing of."""
    copied: torch.Tensor = _OPERATIONS.nop(value)
    return copied


def keep_for_backward(value: torch.Tensor) -> torch.Tensor:
    """A value that is kept where others are computed again."""
    kept: torch.Tensor = _OPERATIONS.recomputation_checkpoint(value)
    return kept


def keep_operation() -> torch._ops.OpOverload:
    """The operation of `keep_for_backward`."""
    operation: torch._ops.OpOverload = _OPERATIONS.recomputation_checkpoint.default
    return operation


def keep_inputs(values: Sequence[torch.Tensor]) -> None:
    """What follows is given these values, which are to be kept where others are computed again."""
    _OPERATIONS.keep_inputs(list(values))


def is_keep_inputs(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is of `keep_inputs`."""
    return node.target is _OPERATIONS.keep_inputs.default


def mark_final_loss() -> torch._ops.OpOverload:
    """The operation that marks the value to be minimized, and returns it."""
    operation: torch._ops.OpOverload = _OPERATIONS.final_loss.default
    return operation


def mark_found_loss() -> torch._ops.OpOverload:
    """The operation that marks a loss, by the name of its operation, and returns it."""
    operation: torch._ops.OpOverload = _OPERATIONS.found_loss.default
    return operation


def _do_nothing(*values: Any) -> None:
    del values


def _reduce(value: torch.Tensor, reduction: str) -> torch.Tensor:
    return value.clone() if reduction == "none" else value.sum() if reduction == "sum" else value.mean()


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("begin_block(str? name, int? ipu) -> ()")
_library.define("begin_scope(str name) -> ()")
_library.define("end_scope() -> ()")
_library.define("begin_multi_conv() -> ()")
_library.define("end_multi_conv(str[] names, int[] counts) -> ()")
_library.define("keep_inputs(Tensor[] values) -> ()")
# Decomposed by autograd's key as what it stands for, so that it has a gradient on the CPU.
_library.define("identity_loss(Tensor value, str reduction) -> Tensor")
_library.impl("identity_loss", _reduce, "CompositeImplicitAutograd")
_library.define("final_loss(Tensor value) -> Tensor")
_library.impl("final_loss", torch.clone, "CompositeExplicitAutograd")
_library.define("found_loss(Tensor value, str operation) -> Tensor")
_library.impl("found_loss", lambda value, _operation: value.clone(), "CompositeExplicitAutograd")
# These are copies, with the gradient of one.
_library.define("nop(Tensor value) -> Tensor")
_library.impl("nop", torch.clone, "CompositeImplicitAutograd")
_library.define("recomputation_checkpoint(Tensor value) -> Tensor")
_library.impl("recomputation_checkpoint", torch.clone, "CompositeImplicitAutograd")
_OPERATIONS = getattr(torch.ops, NAMESPACE)
_PLACE_NAMES = (
    "begin_block",
    "begin_scope",
    "end_scope",
    "begin_multi_conv",
    "end_multi_conv",
    "keep_inputs",
)
for _name in _PLACE_NAMES:
    _library.impl(_name, _do_nothing, "CompositeExplicitAutograd")
_PLACES = frozenset(getattr(_OPERATIONS, name).default for name in _PLACE_NAMES)
for _place in (*_PLACES, mark_final_loss(), mark_found_loss()):
    torch.fx.node.has_side_effect(_place)
