"""Arguments that Graphcore's queues have and that mean nothing here."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["warn_of_queue_arguments"]

_REASONS = {
    "feed_name": "queues are told apart by what they are",
    "device_ordinal": "the program that uses the queue says where it runs, by its ipu_scope",
    "optimise_latency": "elements go to the devices as soon as they can",
}


def warn_of_queue_arguments(
    queue: str, feed_name: Any, device_ordinal: Any, optimise_latency: Any, stacklevel: int = 3
) -> None:
    """Warns of each argument that was given.

    Args:
      queue: the class that got them.
      feed_name: as given; None if it was not.
      device_ordinal: likewise.
      optimise_latency: likewise, False.
      stacklevel: of the warnings.
    """
    given = {"feed_name": feed_name, "device_ordinal": device_ordinal, "optimise_latency": optimise_latency}
    for name, value in given.items():
        if value is not None and value is not False:
            warnings.warn(
                f"{queue}({name}={value!r}) has no effect: {_REASONS[name]}.", stacklevel=stacklevel
            )
