"""Instruments of a wrapped model: hooks and progress of compiling, times of calls, and JAX's profile."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import jax
from tqdm.auto import tqdm

from ipu_pipeline.engine.fronts import Collected, watched_by
from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.poptorch.options import Options

Hook: TypeAlias = "Callable[[], Any]"


class RemovableHandle:
    """Removes a hook."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        """Removes the hook; a second call does nothing."""
        self._hooks.pop(self._number, None)


class Hooks:
    """Functions of a wrapped model, called in the order in which they were registered."""

    def __init__(self, name: str) -> None:
        """Starts without hooks."""
        self._name = name
        self._hooks: dict[int, Hook] = {}
        self._numbers = itertools.count()

    def register(self, hook: Hook) -> RemovableHandle:
        """Adds a hook."""
        if not callable(hook):
            raise RuntimeError(f"{self._name} hook must be callable; got {hook!r}.")
        number = next(self._numbers)
        self._hooks[number] = hook
        return RemovableHandle(self._hooks, number)

    def call(self) -> None:
        """Calls the hooks."""
        for hook in list(self._hooks.values()):
            hook()


before_compiling = Hooks("Pre-compile")
after_compiling = Hooks("Post-compile")


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Registers a function to call before each model is compiled.

    Args:
      hook: the function, called without arguments; its result is not used.

    Returns:
      A handle, whose `remove()` removes the hook.

    Raises:
      RuntimeError: the hook cannot be called.
    """
    return before_compiling.register(hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Registers a function to call after each model is compiled; see `registerPreCompileHook`."""
    return after_compiling.register(hook)


_ENDS = {"capture": 30, "trace": 60, "compile": 100}  # of 100, roughly in proportion to their times
_NEXT = {"capture": "tracing", "trace": "compiling"}


class CompileProgress:
    """Counts the parts of compiling.

    Attributes:
      time: how long compiling took; None before its end.
    """

    def __init__(self, shows_bar: bool, suffix: str = "") -> None:
        """Starts the clock and the bar."""
        self.time: timedelta | None = None
        self._start = time.perf_counter()
        is_disabled = not shows_bar or bool(os.environ.get("TQDM_DISABLE"))
        self._bar = tqdm(
            total=_ENDS["compile"],
            desc=f"Graph compilation{suffix}",
            disable=is_disabled,
            postfix="capturing the model",
        )
        self._watched = watched_by(self._show)

    def done(self, part: str) -> None:
        """Notes that "capture" or "trace" is done."""
        self._bar.set_postfix_str(_NEXT[part], refresh=False)
        self._move_to(_ENDS[part])

    def _show(self, num_done: int, total: int) -> None:
        """Counts the programs that the engine compiles, instead of the engine's own line."""
        begin, end = _ENDS["trace"], _ENDS["compile"]
        self._bar.set_postfix_str(f"{num_done} of {total} programs", refresh=False)
        self._move_to(begin + (end - begin) * num_done // total)

    def _move_to(self, place: int) -> None:
        self._bar.update(max(0, place - self._bar.n))

    def end(self) -> None:
        """Notes that all is done, and the time."""
        self._move_to(_ENDS["compile"])
        self.time = timedelta(seconds=time.perf_counter() - self._start)

    def __enter__(self) -> CompileProgress:
        """Shows the bar for a block."""
        self._watched.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the bar, even after an error."""
        self._watched.__exit__(None, None, None)
        self._bar.close()


Latency = tuple[float, float, float]


@dataclass(eq=False)
class CallTimes:
    """Times of the last call, in seconds of `time.perf_counter`, one per micro-batch.

    The micro-batches of all replicas count, in the order in which they run.

    Attributes:
      input: when the call with the micro-batch began.
      input_complete: when the micro-batch was on its way to the devices.
      output: when its outputs were asked for.
      output_complete: when they were on the host. The micro-batches of one program arrive together.
    """

    input: list[float] = field(default_factory=list)
    input_complete: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    output_complete: list[float] = field(default_factory=list)

    def begin(self, moment: float, number: int) -> None:
        """Notes that a call of `number` micro-batches began at `moment`."""
        self.input = [moment] * number

    def note_placed(self) -> None:
        """Notes that the next micro-batch is on its way."""
        self.input_complete.append(time.perf_counter())

    def wait_for(self, collected: Sequence[Collected]) -> None:
        """Waits for the outputs of the call, and notes when they come; a sum counts for all it adds up."""
        number = len(self.input)
        # Synthetic data are not placed one by one.
        self.input_complete += [time.perf_counter()] * (number - len(self.input_complete))
        share = number // max(1, sum(part.size or 1 for part in collected))
        for part in collected:
            count = share * (part.size or 1)
            self.output += [time.perf_counter()] * count
            jax.block_until_ready(part.outputs)
            self.output_complete += [time.perf_counter()] * count
        # Without outputs there is nothing to wait for.
        self.output += [time.perf_counter()] * (number - len(self.output))
        self.output_complete += [time.perf_counter()] * (number - len(self.output_complete))

    def latency(self, start: str, end: str) -> Latency:
        """The least, greatest and mean time, in s, between two points, given by the names of attributes."""
        spans = [last - first for first, last in zip(getattr(self, start), getattr(self, end), strict=True)]
        if not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))


class Profile:
    """Writes a profile of a model's first call, if its options ask for one."""

    def __init__(self, options: Options, trains: bool) -> None:
        """Takes the model's options. `trains` is for the name of the directory."""
        self._options = options
        self._name = (
            options.model_name if options.is_set("model_name") else "training" if trains else "inference"
        )
        self._is_wanted = options.profiling

    @contextlib.contextmanager
    def of_first_call(self) -> Iterator[None]:
        """Records the first call that runs inside; later ones are not recorded."""
        if not self._is_wanted:
            yield
            return
        self._is_wanted = False
        directory = Path(self._options.profile_dir or ".") / self._name
        distributed = self._options.Distributed
        if distributed.numProcesses > 1:
            directory /= f"process_{distributed.processId}"
        with jax.profiler.trace(str(directory)):
            yield
        logger.info("The profile of a call is in %s", directory)
