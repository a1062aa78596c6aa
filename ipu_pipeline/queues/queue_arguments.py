"""The arguments of Graphcore's queues, in the positions that they have had, and what they mean here.

Until SDK 2.0 the first argument was a queue's name, and the others followed in another order. Source:
`ipu_infeed_queue` and `ipu_outfeed_queue` of Graphcore's TensorFlow 1, SDK 1.4 to 3.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ipu_pipeline.ground.checks import check_int

_POSITIONS = {  # by queue: the newer ones, and the older ones
    "IPUInfeedQueue": (
        ("device_ordinal", "prefetch_depth", "optimise_latency"),
        ("feed_name", "device_ordinal", "replication_factor", "data_to_prefetch", "prefetch_depth"),
    ),
    "IPUOutfeedQueue": (
        ("outfeed_mode", "device_ordinal", "buffer_depth", "optimise_latency"),
        (
            "feed_name",
            "outfeed_mode",
            "outfeed_all",
            "device_ordinal",
            "replication_factor",
            "io_batch_size",
        ),
    ),
}
_WITHOUT_EFFECT = {  # by argument: the default, and why another value has no effect
    "device_ordinal": (0, "the program that uses the queue says where it runs, by its ipu_scope"),
    "optimise_latency": (False, "elements go to the devices as soon as they can"),
    "io_batch_size": (1, "elements are copied to the host when buffer_depth says so"),
}


def take_arguments(queue: str, positions: Sequence[Any], **keywords: Any) -> dict[str, Any]:
    """The arguments of a queue by name, checked; warns of those that have no effect here."""
    newer, older = _POSITIONS[queue]
    names = older if positions and isinstance(positions[0], str) else newer
    if len(positions) > len(names):
        raise TypeError(
            f"{queue} takes at most {len(names)} of these arguments by position, {', '.join(names)}; got "
            f"{len(positions)}."
        )
    arguments = dict(keywords)
    for name, value in zip(names, positions, strict=False):
        if value is not None and keywords[name] is not None:
            raise TypeError(
                f"{queue} got {name} twice: {value!r} by its position, and {keywords[name]!r} by its name. "
                f"The positions are {', '.join(names)}."
            )
        if value is not None:
            arguments[name] = value
    for name, (default, reason) in _WITHOUT_EFFECT.items():
        value = arguments.get(name)
        if value not in (None, default):
            warnings.warn(f"{queue}({name}={value!r}) has no effect: {reason}.", stacklevel=3)
    if arguments["replication_factor"] is not None:
        check_int(f"{queue}: replication_factor", arguments["replication_factor"], 1)
    return arguments


def check_queue(argument: str, value: Any, kind: type, caller: str = "") -> None:
    """Raises a TypeError if a value is neither None nor a queue of this class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{caller}{argument} is not an instance of ipu_{argument}.{kind.__name__}; got "
            f"{type(value).__name__}."
        )
