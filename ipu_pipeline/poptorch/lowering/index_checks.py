"""Finds indices out of range while a model runs: `Options.checkIndices`.

A compiled program cannot raise. It passes the least and the greatest index of each operation to the host,
which keeps those out of range until `take` is called.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ipu_pipeline.poptorch.lowering.unsupported import describe_place

__all__ = ["IndexChecks", "check_node"]

# Operations that take (tensor, indices of rows), (tensor, dimension, indices), and (tensor, indices by
# dimension), where indices may count from the end.
_OF_ROWS = frozenset(("embedding", "_embedding_bag", "_embedding_bag_forward_only"))
_ALONG_DIMENSION = frozenset(
    (
        "gather",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    )
)
_BY_LIST = frozenset(("index", "index_put", "_unsafe_index", "_unsafe_index_put"))

_current: contextvars.ContextVar[IndexChecks | None] = contextvars.ContextVar("index_checks", default=None)


class IndexChecks:
    """The indices out of range of a model's runs."""

    def __init__(self) -> None:
        """Starts with none."""
        self._found: dict[str, None] = {}  # texts of errors, in the order in which they came

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Makes operations traced in the `with` block check their indices."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def take(self) -> str | None:
        """Waits for all checks. Returns an error's text for what was found since the last call, or None."""
        jax.effects_barrier()
        found, self._found = self._found, {}
        return next(iter(found), None)

    def note(self, what: str, size: int, lowest: int, least: Any, greatest: Any) -> None:
        """Notes an index if it is out of range."""
        has = f"indices from {lowest} to {size - 1}" if size else "no elements"
        for index in (int(least), int(greatest)):
            if not lowest <= index < size:
                text = f"An index is out of range in {what}: {index}, where the tensor has {has}."
                self._found[text] = None


def check_node(node: torch.fx.Node, args: Sequence[Any]) -> None:
    """Makes an operation's indices be checked when it runs, if checks are on."""
    checks = _current.get()
    if checks is None:
        return
    name = str(node.target._schema.name).split("::")[-1]  # type: ignore[union-attr]  # noqa: SLF001
    for size, lowest, index in _find_indices(name, args):
        if index.size and jnp.issubdtype(index.dtype, jnp.integer):
            note = functools.partial(checks.note, f"{name} in {describe_place(node)} ", size, lowest)
            jax.debug.callback(note, jnp.min(index), jnp.max(index))


def _find_indices(name: str, args: Sequence[Any]) -> Iterator[tuple[int, int, jax.Array]]:
    """Yields a dimension's size, its lowest valid index, and the indices into it."""
    if name == "_linear_cross_entropy_batch_chunked":
        _x, weight, target, _bias, _weight, _reduction, ignored = args[:7]
        yield weight.shape[0], 0, jnp.where(target == ignored, 0, target)
    elif name in _OF_ROWS:
        yield args[0].shape[0], 0, args[1]
    elif name in _ALONG_DIMENSION:
        yield (args[0].shape[args[1]] if args[0].ndim else 1), 0, args[2]
    elif name in _BY_LIST:
        axis = 0
        for index in args[1]:
            if index is not None and index.dtype != jnp.bool_:
                yield args[0].shape[axis], -args[0].shape[axis], index
            axis += index.ndim if index is not None and index.dtype == jnp.bool_ else 1
