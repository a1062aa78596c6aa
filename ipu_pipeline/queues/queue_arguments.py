"""The arguments of Graphcore's queues, in the positions that they have had, and what they mean here.

Until SDK 2.0 the first argument was a queue's name, and the others followed in another order. Source:
`ipu_infeed_queue` and `ipu_outfeed_queue` of Graphcore's TensorFlow 1, SDK 1.4 to 3.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ipu_pipeline.ground.checks import is_int

_REASONS = {
    "device_ordinal": "the program that uses the queue says where it runs, by its ipu_scope",
    "optimise_latency": "elements go to the devices as soon as they can",
    "io_batch_size": "elements are copied to the host when buffer_depth says so",
}
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "device_ordinal": (None, 0),
    "optimise_latency": (None, False),
    "io_batch_size": (None, 1),
}


def join_arguments(
    queue: str,
    positions: Sequence[Any],
    newer: Sequence[str],
    older: Sequence[str],
    keywords: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments by name."""
    names = older if positions and isinstance(positions[0], str) else newer
    if len(positions) > len(names):
        raise TypeError(
            f"{queue} takes at most {len(names)} of these arguments by position, {', '.join(names)}; got "
            f"{len(positions)}."
        )
    positional = dict(zip(names, positions, strict=False))
    for name, value in positional.items():
        if value is not None and keywords[name] is not None:
            raise TypeError(
                f"{queue} got {name} twice: {value!r} by its position, and {keywords[name]!r} by its name. "
                f"The positions are {', '.join(names)}."
            )
    return {**keywords, **{name: value for name, value in positional.items() if value is not None}}


def warn_of_arguments(queue: str, arguments: Mapping[str, Any], stacklevel: int = 3) -> None:
    """Warns of each argument that has no effect here and differs from its default."""
    for name, reason in _REASONS.items():
        value = arguments.get(name)
        if value not in _DEFAULTS[name]:
            warnings.warn(f"{queue}({name}={value!r}) has no effect: {reason}.", stacklevel=stacklevel)


def check_replication_factor(queue: str, value: Any) -> None:
    """Raises a ValueError if a number of replicas cannot be used; None can."""
    if value is not None and not is_int(value, 1):
        raise ValueError(f"{queue}: replication_factor must be an integer of at least 1; got {value!r}.")
