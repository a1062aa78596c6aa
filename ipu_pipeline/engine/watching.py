"""What runs tell whoever watches them: the programs that they start, what they move, what they wait for.

Nobody watches unless somebody asks for a trace; then there is one watcher in the process. A runner asks
for it once a step, so that steps which nobody watches take no longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

__all__ = ["Launch", "LaunchKind", "Watcher", "current", "read_outfeed", "spanning", "watching"]


class LaunchKind:
    """What a program does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    BLOCK = "block"  # whole micro-batches, and weight updates among them


@dataclass(frozen=True, eq=False)
class Launch:
    """A program that the host starts.

    Attributes:
      runner: the runner whose it is.
      kind: one of `LaunchKind`.
      stage: whose; of an update the first stage of its IPU; 0 of a block.
      step: the number of the weight update, or execution in inference, that it belongs to; of a block, the
        first one.
      first: the number of its first micro-batch within the step; of a loop, the iteration;
        0 of updates.
      count: how many micro-batches it handles.
      accumulated: of a block, how many micro-batches its first weight update has before it.
      every: of a block, micro-batches per weight update.
      updates: of a block, whether it does weight updates.
      devices: where it runs.
      name: of the program, as it was jitted.
      is_moved: whether it was loaded for its device in place of being compiled for it; then XLA knows it
        by the name that it had where it was compiled.
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
    """Whoever watches."""

    def introduce(self, runner: Any, owner: Any, name: str | None = None) -> None:
        """Says what a runner is, before it runs.

        Args:
          runner: the runner.
          owner: the `Pipeline` or `Loop` that it runs.
          name: what people call that; None: what it was called before.
        """

    def rehearsing(self, runner: Any) -> contextlib.AbstractContextManager[bool]:
        """For before a runner's first step that is watched.

        The first time that a program runs on a device it takes longer, often by far. Within the context the
        runner may run what counts for nothing. It gives whether this is the first step.
        """

    def run(self, launch: Launch, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls the function, which starts the program, and returns what it returns."""

    def moved(self, launch: Launch, target: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Results of a program were sent to other devices.

        Args:
          launch: the program.
          target: the devices.
          arrays: what arrives there.
        """

    def waiting(self, step: int, first: int, count: int) -> contextlib.AbstractContextManager[None]:
        """For while the host waits for micro-batches of a feed; arguments as in `Launch`."""

    def outfed(self, begin: int, end: int, num_bytes: int) -> None:
        """The host has taken what was enqueued.

        Args:
          begin: when it began, in nanoseconds since the epoch.
          end: when it had it.
          num_bytes: how much it was.
        """

    def spanned(self, name: str, begin: int, end: int) -> None:
        """The program has done something that its author named; or has been "compiling".

        Args:
          name: what people call it.
          begin: when it began, in nanoseconds since the epoch.
          end: when it ended.
        """


_watcher: Watcher | None = None


def current() -> Watcher | None:
    """Who watches; None if nobody does."""
    return _watcher


def read_outfeed(read: Callable[[], Any]) -> Any:
    """What `read` takes from an outfeed, with the watcher told."""
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
    """For while something named is done; see `Watcher.spanned`."""
    begin = time.time_ns()
    try:
        yield
    finally:
        if (watcher := current()) is not None:
            watcher.spanned(name, begin, time.time_ns())


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Has somebody watch the runs in the block, those of other threads too.

    Raises:
      RuntimeError: somebody watches already.
    """
    global _watcher
    if _watcher is not None:
        raise RuntimeError("Runs are watched already.")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
