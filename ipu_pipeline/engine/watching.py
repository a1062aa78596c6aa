"""Events of runs for a watcher: started programs, transfers and waits.

A watcher exists only while a trace is recorded, one per process. A runner looks for it once per step, so
that unwatched steps take no longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax


class LaunchKind:
    """The kinds of programs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENTS = "input gradients"
    WEIGHT_GRADIENTS = "weight gradients"
    UPDATE = "update"
    BLOCK = "block"  # whole micro-batches, and weight updates among them


@dataclass(frozen=True, eq=False)
class Launch:
    """A program that the host starts.

    Attributes:
      runner: the runner that it belongs to.
      kind: one of `LaunchKind`.
      stage: its stage; for an update, the first stage of its device; 0 for a block.
      step: the number of the weight update, or execution in inference, that it belongs to; for a block, the
        first one.
      first: the number of its first micro-batch within the step; in a loop, the iteration; 0 for updates.
      count: the number of micro-batches that it handles.
      accumulated: for a block, how many micro-batches of its first weight update come before it.
      every: for a block, the number of micro-batches per weight update.
      updates: for a block, whether it does weight updates.
      devices: the devices on which it runs.
      name: the name of the program, as jitted.
      is_moved: whether it was compiled for another device and loaded for this one; XLA then uses its name
        from there.
    """

    runner: Any
    kind: str
    stage: int
    step: int
    first: int
    count: int
    devices: tuple[Any, ...]
    name: str
    is_moved: bool = False
    accumulated: int = 0
    every: int = 0
    updates: bool = False


class Watcher(Protocol):
    """The contract of watchers."""

    def introduce(self, runner: Any, owner: Any, name: str | None = None) -> None:
        """Introduces a runner before it runs.

        Args:
          runner: the runner.
          owner: the `Pipeline` or `Loop` that it runs.
          name: the name that people know it by; None: the name that it had before.
        """

    def rehearsing(self, runner: Any) -> contextlib.AbstractContextManager[bool]:
        """Returns a context for the time before a runner's first watched step.

        The first run of a program on a device takes longer, often by far. Within the context the runner may
        run programs that do not count. The context yields whether this is the first step.
        """

    def run(self, launch: Launch, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls the function, which starts the program, and returns what it returns."""

    def moved(self, launch: Launch, target: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Notes that results of a program were sent to other devices.

        Args:
          launch: the program.
          target: the devices.
          arrays: what arrives there.
        """

    def waiting(self, step: int, first: int, count: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context for the host's wait for micro-batches of a feed; arguments as in `Launch`."""

    def outfed(self, begin: int, end: int, num_bytes: int) -> None:
        """Notes that the host has taken what was enqueued.

        Args:
          begin: when it began to take it, in nanoseconds since the epoch.
          end: when it had taken it.
          num_bytes: its size.
        """

    def spanned(self, name: str, begin: int, end: int) -> None:
        """Notes that the program did something that its author named, or was "compiling".

        Args:
          name: the name that people know it by.
          begin: when it began, in nanoseconds since the epoch.
          end: when it ended.
        """


_watcher: Watcher | None = None


def current() -> Watcher | None:
    """The watcher; None if there is none."""
    return _watcher


def read_outfeed(read: Callable[[], Any]) -> Any:
    """Reads an outfeed by `read`, and tells the watcher."""
    watcher = current()
    if watcher is None:
        return read()
    begin = time.time_ns()
    value = read()
    num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(value))
    watcher.outfed(begin, time.time_ns(), num_bytes)
    return value


@contextlib.contextmanager
def spanning(name: str) -> Iterator[None]:
    """Notes the time of a block that has a name; see `Watcher.spanned`."""
    begin = time.time_ns()
    try:
        yield
    finally:
        if (watcher := current()) is not None:
            watcher.spanned(name, begin, time.time_ns())


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Makes a watcher watch the runs inside the `with` block, also in other threads.

    Raises:
      RuntimeError: there is a watcher already.
    """
    global _watcher
    if _watcher is not None:
        raise RuntimeError("Runs are watched already.")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
