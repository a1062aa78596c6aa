"""The messages between the process that loads data and the one that uses them.

Slots are pieces of shared memory, numbered from 0. The iterations over the data are counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ipu_pipeline.poptorch.data.randomness import Randomness

__all__ = ["Ended", "Failed", "Free", "Loaded", "Loading", "Ready", "Renewed", "Stop", "Want"]


@dataclass(frozen=True)
class Loading:
    """The settings of loading."""

    num_slots: int  # the number of batches in shared memory
    load_indefinitely: bool  # whether the next iteration's batches are loaded before they are asked for
    rebatched_size: int | None  # the number of rows that batches are joined to; None to leave them
    drop_last: bool  # whether rows left over at the end are dropped


class Want(NamedTuple):
    """To the loader: an iteration is wanted, and earlier ones no longer."""

    iteration: int
    randomness: Randomness | None


class Free(NamedTuple):
    """To the loader: a slot may have another batch."""

    slot: int
    is_kept: bool  # whether somebody keeps the batch that is in it: then the next one needs other memory


class Stop(NamedTuple):
    """To the loader: end."""


class Ready(NamedTuple):
    """From the loader: it has the data set."""


class Renewed(NamedTuple):
    """From the loader: a slot has new memory. The file descriptor follows."""

    slot: int
    num_bytes: int


class Loaded(NamedTuple):
    """From the loader: a batch is in a slot; see `parcels` for the rest."""

    iteration: int
    slot: int
    pickled: bytes
    buffers: list[tuple[int, int]]


class Ended(NamedTuple):
    """From the loader: an iteration has no more batches."""

    iteration: int


class Failed(NamedTuple):
    """From the loader: an iteration ended with an error."""

    iteration: int  # its number
    error: bytes  # pickled; empty if it cannot be
    name: str  # the name of its class
    text: str  # its traceback
