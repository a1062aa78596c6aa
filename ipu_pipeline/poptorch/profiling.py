"""Named spans in the programs of users: `poptorch.profiling.Channel`.

They are logged at level INFO, and are in the execution report (docs/profiling.md) if one is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Iterator
from typing import Any, TypeVar

from ipu_pipeline.engine.inspect import watching
from ipu_pipeline.poptorch.logs import logger

__all__ = ["Channel"]

ObjectT = TypeVar("ObjectT")


class Channel:
    """Spans of one part of a program.

    Example:
      channel = poptorch.profiling.Channel("Training")
      with channel.tracepoint("epoch"):
          train()
    """

    def __init__(self, name: str) -> None:
        """Takes the name that comes before the names of its spans."""
        self._name = name

    @contextlib.contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Records the `with` block as a span.

        Args:
          name: the span's name.
        """
        begin, begin_ns = time.perf_counter(), time.time_ns()
        try:
            yield
        finally:
            milliseconds = 1e3 * (time.perf_counter() - begin)
            logger.info("[%s] %s: %.3f ms", self._name, name, milliseconds)
            watcher = watching.current()
            if watcher is not None:
                watcher.spanned(f"{self._name}: {name}", begin_ns, begin_ns + round(1e6 * milliseconds))

    def instrument(self, obj: ObjectT, *methods: str) -> ObjectT:
        """Records each call of some methods of an object as a span.

        Args:
          obj: the object, which is changed; it may be a class.
          *methods: their names.

        Returns:
          The object.

        Raises:
          AttributeError: it has no such method.
        """
        for name in methods:
            raw = inspect.getattr_static(obj, name)
            if isinstance(obj, type) and isinstance(raw, (staticmethod, classmethod)):
                setattr(obj, name, type(raw)(self._wrap(name, raw.__func__)))
            else:
                setattr(obj, name, self._wrap(name, getattr(obj, name)))
        return obj

    def _wrap(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return wrapped
