"""Operations of torch that mark places in a graph. On the CPU they do nothing, or what they stand for.

They survive `torch.export` and its decompositions: those without a result are registered as having a side
effect, and those with one have no decomposition.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = [
    "NAMESPACE",
    "Capturing",
    "begin_block",
    "capturing",
    "current_capture",
    "is_block",
    "is_marker",
    "mark_final_loss",
    "reduce_loss",
]

NAMESPACE = "ipu_poptorch"


@dataclass(eq=False)
class Capturing:
    """A model is being captured: its forward runs for the graph.

    Attributes:
      open_blocks: name and IPU of the blocks that are open as context managers, the innermost last.
      next_auto_id: of `Block.useAutoId`; None if that was not called.
    """

    open_blocks: list[tuple[str | None, int | None]] = field(default_factory=list)
    next_auto_id: int | None = None


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


def begin_block(name: str | None, ipu: int | None) -> None:
    """What follows belongs to this block."""
    _OPERATIONS.begin_block(name, ipu)


def is_block(node: torch.fx.Node) -> bool:
    """Whether a node of a graph begins a block; its arguments are the name and the IPU."""
    return node.target is _OPERATIONS.begin_block.default


def is_marker(node: torch.fx.Node) -> bool:
    """Whether a node of a graph computes nothing: it begins a block, or marks the final loss."""
    return is_block(node) or node.target is mark_final_loss()


def reduce_loss(value: torch.Tensor, reduction: str) -> torch.Tensor:
    """A value as a loss: its "sum" or "mean", or with "none" itself."""
    loss: torch.Tensor = _OPERATIONS.identity_loss(value, reduction)
    return loss


def copy_opaquely(value: torch.Tensor) -> torch.Tensor:
    """A value that compiled programs know nothing of."""
    copied: torch.Tensor = _OPERATIONS.nop(value)
    return copied


def mark_final_loss() -> torch._ops.OpOverload:
    """The operation that marks the value to be minimized, and returns it."""
    operation: torch._ops.OpOverload = _OPERATIONS.final_loss.default
    return operation


def _begin_nothing(name: str | None, ipu: int | None) -> None:
    del name, ipu


def _reduce(value: torch.Tensor, reduction: str) -> torch.Tensor:
    return value.clone() if reduction == "none" else value.sum() if reduction == "sum" else value.mean()


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("begin_block(str? name, int? ipu) -> ()")
_library.impl("begin_block", _begin_nothing, "CompositeExplicitAutograd")
# Decomposed by autograd's key as what it stands for, so that it has a gradient on the CPU.
_library.define("identity_loss(Tensor value, str reduction) -> Tensor")
_library.impl("identity_loss", _reduce, "CompositeImplicitAutograd")
_library.define("final_loss(Tensor value) -> Tensor")
_library.impl("final_loss", torch.clone, "CompositeExplicitAutograd")
_library.define("nop(Tensor value) -> Tensor")
_library.impl("nop", torch.clone, "CompositeExplicitAutograd")
_OPERATIONS = getattr(torch.ops, NAMESPACE)
torch.fx.node.has_side_effect(_OPERATIONS.begin_block.default)
torch.fx.node.has_side_effect(_OPERATIONS.final_loss.default)
