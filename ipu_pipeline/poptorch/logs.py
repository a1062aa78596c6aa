"""The logger of PopTorch's front, and its level."""

from __future__ import annotations

import logging
import os
from typing import Literal, TypeAlias, cast

LEVEL_VARIABLE = "POPTORCH_LOG_LEVEL"
LogLevel: TypeAlias = Literal["TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF"]
_LEVELS: dict[LogLevel, int] = {
    "TRACE": logging.DEBUG - 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 10,
}
logging.addLevelName(_LEVELS["TRACE"], "TRACE")

logger = logging.getLogger("poptorch::python")
_said: set[str] = set()


def setLogLevel(level: LogLevel | int) -> None:
    """Sets how much is logged.

    Args:
      level: TRACE, DEBUG, INFO, WARN, ERR or OFF, or 0 to 4 for the first five.

    Raises:
      ValueError: it is none of these.
    """
    if isinstance(level, int) and not isinstance(level, bool):
        if not 0 <= level < len(_LEVELS) - 1:
            raise ValueError(f"Invalid log level integer: {level}. It must be from 0 (TRACE) to 4 (ERR).")
        level = list(_LEVELS)[level]
    if level not in _LEVELS:
        *names, last = sorted(_LEVELS)
        raise ValueError(f"Unknown log level: {level}. Valid values are {', '.join(names)} and {last}.")
    logger.setLevel(_LEVELS[level])


def warn_once(message: str, kind: str | None = None) -> None:
    """Logs a warning, unless the same one, or one of its kind, was logged before in this process."""
    if (kind or message) not in _said:
        _said.add(kind or message)
        logger.warning(message)


def _is_unseen(record: logging.LogRecord) -> bool:
    """Whether no handler of the program shows a record, as one does after `logging.basicConfig`."""
    handlers = logging.getLogger().handlers if logger.propagate else []
    silent = logging.FileHandler, logging.NullHandler
    return all(handler.level > record.levelno or isinstance(handler, silent) for handler in handlers)


def _set_up() -> None:
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(_is_unseen)
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [poptorch::python] [%(levelname)s] %(message)s")
        )
        logger.addHandler(handler)
    setLogLevel(cast("LogLevel", os.environ.get(LEVEL_VARIABLE, "WARN")))


_set_up()
