"""Into which blocks micro-batches are cut."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlockSizes", "block_sizes"]

_MAX_MICRO_BATCHES = 1024  # in a block, so that Ctrl-C does not wait long
_MAX_FIXED = 64  # in a block that is to have one size whatever the count, since it is allocated whole


class BlockSizes(NamedTuple):
    """Into which blocks micro-batches are cut.

    Attributes:
      unit: micro-batches that stay together.
      capacity: micro-batches in a block at most, a multiple of `unit`.
      room: the size of a block's stack, at least the capacity. A compilation serves one.
    """

    unit: int
    capacity: int
    room: int


def block_sizes(
    num_micro_batches: int,
    unit: int,
    bytes_each: int,
    block_bytes: int,
    group: int = 1,
    is_fixed: bool = False,
) -> BlockSizes:
    """Cuts micro-batches into blocks of about equal size.

    Args:
      num_micro_batches: in all, a multiple of `unit`.
      unit: micro-batches that should stay together: those of a weight update; 1 for a loop.
      bytes_each: what a micro-batch takes on the device, feed and collected outputs.
      block_bytes: how much a block may take.
      group: micro-batches that must stay together; `unit` is a multiple of it.
      is_fixed: whether the room must not depend on the first two.

    Returns:
      The sizes. The unit is `group` if not even one of the units asked for fits.
    """
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
