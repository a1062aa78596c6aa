"""Keeps only new warnings and errors of what Orbax logs while it works for the package.

Orbax logs with absl, whose logger other code uses too, for example users who call Orbax themselves. So no
level is changed; only messages of Orbax's own modules are dropped, while the package calls them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

__all__ = ["quiet_orbax"]

_ORBAX = os.path.join("", "orbax", "checkpoint", "")  # in the paths of its modules


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drops what Orbax logs below warnings during a call, about thirty lines for a checkpoint."""
    _drop_repeated_errors()
    absl = logging.getLogger("absl")

    def is_kept(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or _ORBAX not in record.pathname

    absl.addFilter(is_kept)
    try:
        yield
    finally:
        absl.removeFilter(is_kept)


@functools.cache
def _drop_repeated_errors() -> None:
    """Keeps Orbax's threads and coroutines from logging errors that it also raises.

    They may do so after the call, so the filter stays.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_thread = "_SignalingThread" in text
        is_coroutine = "was never retrieved" in text and ("OCDBT" in text or "orbax" in text)
        return not is_thread and not is_coroutine

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_kept)
