"""Cuts micro-batches into blocks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlockSizes", "block_sizes"]

_MAX_MICRO_BATCHES = 1024  # in a block, so that Ctrl-C does not wait long
_MAX_FIXED = 64  # in a block of one size whatever the count, since it is allocated whole


class BlockSizes(NamedTuple):
    """The sizes of the blocks into which micro-batches are cut."""

    unit: int  # micro-batches that stay together
    capacity: int  # the most micro-batches in a block, a multiple of `unit`
    room: int  # the size of a block's stack, at least the capacity; compiled once per size


def block_sizes(
    num_micro_batches: int,
    unit: int,
    bytes_each: int,
    block_bytes: int,
    group: int = 1,
    is_fixed: bool = False,
) -> BlockSizes:
    """Cuts micro-batches into blocks of about equal size."""
    limit = min(_MAX_FIXED if is_fixed else _MAX_MICRO_BATCHES, block_bytes // max(1, bytes_each))
    limit = max(1, limit // group) * group
    if unit > limit:
        num_blocks = -(-unit // limit)
        capacity, unit = -(-unit // group // num_blocks) * group, group
    else:
        num_units = max(1, -(-num_micro_batches // unit))
        num_blocks = -(-num_units // (limit // unit))
        capacity = -(-num_units // num_blocks) * unit
    return BlockSizes(unit, capacity, limit if is_fixed else capacity)
