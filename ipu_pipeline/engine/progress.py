"""Shows progress on a terminal while stages are traced, initial values made and programs compiled.

On a terminal, one line on the standard error counts variables or programs, and seconds; it is cleared at
the end, so that later output takes its place. The logger "ipu_pipeline" gets one line for programs, of
level INFO. No line is shown if the standard error is not a terminal, or if the environment variable
TQDM_DISABLE is set to anything, as for all bars of tqdm.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ipu_pipeline.engine import peers, watching
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.ground.tables import between_bars, is_shown_on

_DELAY = 0.3  # seconds; what compiles in less shows nothing
_INTERVAL = 0.1  # seconds between changes of the line
_logger = logging.getLogger("ipu_pipeline")
_thread = threading.local()  # has the `compilation` that the thread compiles for
_current: contextvars.ContextVar[Compilation | None] = contextvars.ContextVar("compilation", default=None)
_observer: contextvars.ContextVar[Callable[[int, int], None] | None] = contextvars.ContextVar(
    "observer", default=None
)


class Compilation:
    """Counts programs that are being compiled, from any thread.

    Attributes:
      total: the number of programs to compile.
      num_done: the number of programs compiled so far.
    """

    def __init__(self, total: int, observer: Callable[[int, int], None] | None, note: str = "") -> None:
        """Begins to count."""
        self._note = f" {note}" if note else ""
        self.total = total
        self.num_done = 0
        self._num_cached = self._num_loaded = self._num_kept = 0
        self._observer = observer
        self._lock = threading.Lock()
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        """Surrounds the compilation of one program, in the thread that compiles it."""
        before, _thread.compilation = getattr(_thread, "compilation", None), self
        try:
            yield
        finally:
            _thread.compilation = before
        self._add(1)

    def note_loaded(self, number: int) -> None:
        """Notes programs that needed no compiling, as an equal one was compiled for another device."""
        self._num_loaded += number
        self._add(number)

    def note_kept(self) -> None:
        """Notes a program that needed no compiling, as an earlier pipeline had compiled it."""
        self._num_kept += 1
        self._add(1)

    def note_cached(self) -> None:
        """Notes that what is being compiled was in JAX's persistent cache."""
        with self._lock:
            self._num_cached += 1

    def _add(self, number: int) -> None:
        with self._lock:
            self.num_done += number
            if self._observer is not None:
                self._observer(self.num_done, self.total)

    def line(self) -> str:
        """The line that the terminal shows now."""
        seconds = time.perf_counter() - self._begin
        return f"Compiling: {self.num_done} of {_count(self.total)}{self._note}, {seconds:.1f} s"

    def log(self) -> None:
        """Logs what was compiled, if anything was, and if the logger is enabled."""
        if not self.num_done or not _logger.isEnabledFor(logging.INFO):
            return
        parts = []
        if self._num_cached:
            parts.append(f"{self._num_cached} from the cache")
        if self._num_loaded:
            parts.append(f"{self._num_loaded} like others, loaded for their devices")
        if self._num_kept:
            parts.append(f"{self._num_kept} kept from before")
        details = f" ({'; '.join(parts)})" if parts else ""
        seconds = time.perf_counter() - self._begin
        with between_bars():
            _logger.info("Compiled %s%s in %.1f s%s", _count(self.num_done), self._note, seconds, details)


class Initialization:
    """Counts variables whose initial values are made.

    Attributes:
      total: the number of variables.
      num_done: the number of those made so far.
    """

    def __init__(self, total: int) -> None:
        """Begins to count to `total`."""
        self.total, self.num_done = total, 0
        self._begin = time.perf_counter()

    def line(self) -> str:
        """The line that the terminal shows now."""
        seconds = time.perf_counter() - self._begin
        return f"Initial values: {self.num_done} of {_count(self.total, 'variable')}, {seconds:.1f} s"


def _count(number: int, noun: str = "program") -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_on_their_way: set[Compilation] = set()


def is_compiling() -> bool:
    """Whether programs are being compiled, in any thread."""
    return bool(_on_their_way)


@contextlib.contextmanager
def compiling(total: int, note: str = "") -> Iterator[Compilation]:
    """Surrounds the compilation of programs. Within another such block, it counts with that one.

    However the block ends, the terminal's line is gone afterwards. After an error nothing is logged.
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    _listen_to_jax()
    observer = _observer.get()
    compilation = Compilation(total, observer, note)
    token = _current.set(compilation)
    _on_their_way.add(compilation)
    try:
        with peers.occupied("compiling"), watching.spanning("compiling"):
            if observer is None and is_shown_on(sys.stderr):
                with _showing(compilation.line):
                    yield compilation
            else:
                yield compilation
    finally:
        _on_their_way.discard(compilation)
        _current.reset(token)
    compilation.log()


@contextlib.contextmanager
def initializing(total: int) -> Iterator[Initialization]:
    """Surrounds the making of initial values; the block counts in `num_done`.

    However the block ends, the terminal's line is gone afterwards.
    """
    initialization = Initialization(total)
    with _showing_alone(initialization.line):
        yield initialization


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Surrounds the tracing of stages. However the block ends, the terminal's line is gone afterwards."""
    begin = time.perf_counter()
    with _showing_alone(lambda: f"Tracing: {time.perf_counter() - begin:.1f} s"):
        yield


def watched_by(observer: Callable[[int, int], None]) -> contextlib.AbstractContextManager[None]:
    """Lets an observer show what is compiled inside the `with` block, in place of the line."""
    return bound(_observer, observer)


def _showing_alone(line: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Shows the line while a block lasts, unless an observer or a compilation around it shows another."""
    is_shown = _observer.get() is None and _current.get() is None and is_shown_on(sys.stderr)
    return _showing(line) if is_shown else contextlib.nullcontext()


@contextlib.contextmanager
def _showing(line: Callable[[], str]) -> Iterator[None]:
    """Shows the line while the block lasts, from a thread, as the block's own may be busy in XLA."""
    # No bar of tqdm: a process's first one makes a lock of multiprocessing, which fixes its start method.
    ended = threading.Event()
    thread = threading.Thread(
        target=_show, args=(line, sys.stderr, ended), name="ipu-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(line: Callable[[], str], stream: Any, ended: threading.Event) -> None:
    if ended.wait(_DELAY):
        return
    width = 0
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the stream is closed
        while stream.isatty():  # Jupyter clears no lines
            text = line()
            stream.write(f"\r{text:{width}}")
            stream.flush()
            width = len(text)
            if ended.wait(_INTERVAL):
                break
        stream.write(f"\r{'':{width}}\r")
        stream.flush()


@functools.cache
def _listen_to_jax() -> None:
    def note() -> None:
        compilation: Compilation | None = getattr(_thread, "compilation", None)
        if compilation is not None:
            compilation.note_cached()

    jax_compat.notify_of_cache_hits(note)
