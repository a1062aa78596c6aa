"""Lets threads use a session one after another, and rejects a call that would have to wait for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ipu_pipeline.engine import processes
from ipu_pipeline.queues.feeder import is_feeding
from ipu_pipeline.tf1.session.fetches import find_infeeds

__all__ = ["Turns"]

_CALLED_BACK = (
    "The session was called within one of its runs, by a function that JAX calls back (jax.debug.callback, "
    "jax.pure_callback) or by a signal's handler. The run would have to wait for itself. Call the session "
    "after the run; `Session.variables` can be read."
)
_FEEDING = (
    "A data set has called the session in the infeed's thread, while a run of the session may be waiting "
    "for its data. Compute what it needs before the run, or with JAX itself; `Session.variables` can be "
    "read."
)


def _in_order(together: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if together is None else processes.one_thread(together)


class _Stopping:
    """A `with` block. After Ctrl-C in it no thread reads data ahead, even if the block had hardly begun."""

    def __init__(self, lock: threading.RLock, fetch: Any) -> None:
        self._lock = lock
        self._fetch = fetch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        # If it is another thread's turn, its data go on.
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._lock.acquire(blocking=False):
            try:
                for infeed in find_infeeds(self._fetch):
                    infeed.stop()
            finally:
                self._lock.release()


class Turns:
    """A lock for running something, or reading or replacing the whole state; other threads wait."""

    def __init__(self) -> None:
        """Starts without a holder."""
        self._lock = threading.RLock()
        self._running_in: int | None = None  # the thread of a run; Ctrl-C may leave it behind

    def stopping(self, fetch: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a block for a run: if Ctrl-C ends it, the infeeds of `fetch` are stopped."""
        return _Stopping(self._lock, fetch)

    @contextlib.contextmanager
    def alone(self, changes: bool = True, together: str | None = None) -> Iterator[None]:
        """Waits until other threads are done with the session, and makes them wait."""
        # threading.Condition asks in the same way; a note of our own would be wrong after Ctrl-C.
        is_within = self._lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001
        if changes and is_within and self._running_in == threading.get_ident():
            raise RuntimeError(_CALLED_BACK)
        # JAX's threads were not started by Python, which calls them "Dummy-1" and so on.
        is_called_back = threading.current_thread().name.startswith("Dummy-")
        may_wait = not (is_feeding() or is_called_back)
        with _in_order(together if may_wait else None):
            if not self._lock.acquire(blocking=may_wait):
                raise RuntimeError(_CALLED_BACK if is_called_back else _FEEDING)
            try:
                if not is_within:
                    self._running_in = None
                with _in_order(together):  # also of threads that did not wait
                    yield
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Notes that the thread runs something, during its turn."""
        try:
            self._running_in = threading.get_ident()
            yield
        finally:
            self._running_in = None
