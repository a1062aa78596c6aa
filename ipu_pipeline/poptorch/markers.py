"""Operations of torch that mark places in a graph. On the CPU they do nothing, or what they stand for.

They survive `torch.export` and its decompositions: markers without a result are registered as having a side
effect, and markers with a result have no decomposition.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NAMESPACE = "ipu_poptorch"


@dataclass(eq=False)
class Capturing:
    """A model is being captured: its forward runs for the graph."""

    # the name and IPU of each block that is open as a context manager, the innermost last
    open_blocks: list[tuple[str | None, int | None]] = field(default_factory=list)
    next_auto_id: int | None = None  # for `Block.useAutoId`; None if it was not called
    # objects that the graph refers to, which must live as long as the graph
    held: list[Any] = field(default_factory=list)


_capturing: contextvars.ContextVar[Capturing | None] = contextvars.ContextVar("capturing", default=None)


@contextlib.contextmanager
def capturing() -> Iterator[Capturing]:
    """Makes a model's forward run as on IPUs in the `with` block, in this thread."""
    torch.compiler.assume_constant_result(is_captured)
    token = _capturing.set(Capturing())
    try:
        capture = _capturing.get()
        assert capture is not None
        yield capture
    finally:
        _capturing.reset(token)


def current_capture() -> Capturing | None:
    """Returns the capture that runs in this thread; None if there is none."""
    return _capturing.get()


def is_captured() -> bool:
    """Whether a model is being captured in this thread.

    Code traced by torch.cond may call it: its result is declared constant.
    """
    return _capturing.get() is not None


def is_traced() -> bool:
    """Whether a graph is being made: of a model, or of a branch or body of control flow."""
    return torch.compiler.is_dynamo_compiling() or current_capture() is not None


def begin_block(name: str | None, ipu: int | None) -> None:
    """Begins a block, which everything that follows belongs to."""
    _OPERATIONS.begin_block(name, ipu)


def is_block(node: torch.fx.Node) -> bool:
    """Whether a node of a graph begins a block. Its arguments are the name and the IPU."""
    return node.target is _OPERATIONS.begin_block.default


def is_marker(node: torch.fx.Node) -> bool:
    """Whether a node of a graph computes nothing, but marks where something begins, ends, or is."""
    return node.target in _PLACES or node.target is mark_final_loss()


def begin_scope(name: str) -> None:
    """Begins a scope: what follows has this name before its own."""
    _OPERATIONS.begin_scope(name)


def end_scope() -> None:
    """Ends the scope that began last."""
    _OPERATIONS.end_scope()


def read_scope(node: torch.fx.Node) -> tuple[str | None] | None:
    """Returns a scope's name for a node that begins it, None for one that ends it, both in a tuple.

    Returns None for every other node.
    """
    if node.target is _OPERATIONS.end_scope.default:
        return (None,)
    return (str(node.args[0]),) if node.target is _OPERATIONS.begin_scope.default else None


def begin_multi_conv() -> None:
    """Begins a `MultiConv`."""
    _OPERATIONS.begin_multi_conv()


def end_multi_conv(counts: Mapping[str, int]) -> None:
    """Ends the `MultiConv`."""
    _OPERATIONS.end_multi_conv(list(counts), list(counts.values()))


@dataclass(frozen=True)
class MultiConvPart:
    """A node of a graph that begins or ends a `MultiConv`."""

    counts: Mapping[str, int] | None  # as for `end_multi_conv`; None where a `MultiConv` begins


def read_multi_conv(node: torch.fx.Node) -> MultiConvPart | None:
    """Returns the part of a `MultiConv` that a node marks; None if it marks none."""
    if node.target is _OPERATIONS.begin_multi_conv.default:
        return MultiConvPart(None)
    if node.target is not _OPERATIONS.end_multi_conv.default:
        return None
    names: Any = node.args[0]
    numbers: Any = node.args[1]
    return MultiConvPart(dict(zip(names, numbers, strict=True)))


def is_checkpoint(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is a value that is kept where others are recomputed."""
    return node.target is keep_operation()


def reduce_loss(value: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduces a value to a loss: its "sum" or "mean", or with "none" itself."""
    loss: torch.Tensor = _OPERATIONS.identity_loss(value, reduction)
    return loss


def copy_opaquely(value: torch.Tensor) -> torch.Tensor:
    """Copies a value in a way that compiled programs cannot see through."""
    copied: torch.Tensor = _OPERATIONS.nop(value)
    return copied


def keep_for_backward(value: torch.Tensor) -> torch.Tensor:
    """Marks a value that is kept where others are recomputed."""
    marked: torch.Tensor = _OPERATIONS.recomputation_checkpoint(value)
    return marked


def keep_operation() -> torch._ops.OpOverload:
    """Returns the operation of `keep_for_backward`."""
    operation: torch._ops.OpOverload = _OPERATIONS.recomputation_checkpoint.default
    return operation


def keep_inputs(values: Sequence[torch.Tensor]) -> None:
    """Marks these inputs of what follows, which are kept where others are recomputed."""
    _OPERATIONS.keep_inputs(list(values))


def expect(value: torch.Tensor, expected: str) -> None:
    """Notes that a value must be the expected one, as JSON, when the model runs."""
    _OPERATIONS.expect(value, expected)


def read_expected(node: torch.fx.Node) -> tuple[torch.fx.Node, str] | None:
    """Returns the arguments of `expect` for a node that it made; None for every other node."""
    if node.target is not _OPERATIONS.expect.default:
        return None
    (value,) = node.all_input_nodes
    return value, str(node.args[1])


def is_keep_inputs(node: torch.fx.Node) -> bool:
    """Whether a node of a graph was made by `keep_inputs`."""
    return node.target is _OPERATIONS.keep_inputs.default


def mark_final_loss() -> torch._ops.OpOverload:
    """Returns the operation that marks the value to be minimized, and returns it."""
    operation: torch._ops.OpOverload = _OPERATIONS.final_loss.default
    return operation


def mark_found_loss() -> torch._ops.OpOverload:
    """Returns the operation that marks a loss, with the name of its operation, and returns it."""
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
_library.define("expect(Tensor value, str expected) -> ()")
# Autograd's key decomposes it into what it stands for, so that it has a gradient on the CPU.
_library.define("identity_loss(Tensor value, str reduction) -> Tensor")
_library.impl("identity_loss", _reduce, "CompositeImplicitAutograd")
_library.define("final_loss(Tensor value) -> Tensor")
_library.impl("final_loss", torch.clone, "CompositeExplicitAutograd")
_library.define("found_loss(Tensor value, str operation) -> Tensor")
_library.impl("found_loss", lambda value, _operation: value.clone(), "CompositeExplicitAutograd")
# These are copies, with the gradient of a copy.
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
    "expect",
)
for _name in _PLACE_NAMES:
    _library.impl(_name, _do_nothing, "CompositeExplicitAutograd")
_PLACES = frozenset(getattr(_OPERATIONS, name).default for name in _PLACE_NAMES)
for _place in (*_PLACES, mark_final_loss(), mark_found_loss()):
    torch.fx.node.has_side_effect(_place)


# Operations that programs call as PopTorch's, which has no function for the last one.


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype not in _CAST_DTYPES:
        raise ValueError(f"internal_cast: dtype must be one of {', '.join(_CAST_DTYPES)}; got {dtype!r}.")
    return tensor.to(_CAST_DTYPES[dtype])


_CAST_DTYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16}
for _name, _function in {
    "push_name_scope": begin_scope,
    "pop_name_scope": end_scope,
    "internal_cast": _cast,
}.items():
    setattr(torch.ops.poptorch, _name, _function)
