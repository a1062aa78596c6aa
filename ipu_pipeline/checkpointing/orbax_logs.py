"""What Orbax logs while it writes and reads checkpoints for the package: warnings and errors that are news.

Orbax logs with absl, whose logger others use too: also users who call Orbax themselves. No level is
changed, and what is dropped is only what Orbax's own modules log while the package has called them.
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
    """For a call of Orbax: drops what it tells below warnings, about thirty lines for a checkpoint."""
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
    """Keeps Orbax's threads and coroutines from logging the errors that it raises as well.

    They may do so after the call, so this stays.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_thread = "_SignalingThread" in text
        is_coroutine = "was never retrieved" in text and ("OCDBT" in text or "orbax" in text)
        return not is_thread and not is_coroutine

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_kept)
