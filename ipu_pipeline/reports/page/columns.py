"""Actions as columns of small integers, which `trace.js` reads.

A trace with 40,000 actions has 70,000 events, which would be 15 MB of JSON as objects. As columns, it is
2 MB. A column whose entries are all the same is that entry. Any other is text: each integer is folded (0,
-1, 1, -2 become 0, 1, 2, 3), written in groups of seven bits, the lowest first, with the eighth bit set
where another one follows (LEB128, as in DWARF), and all bytes together are in base64.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from ipu_pipeline.reports.events import Event, EventKind

__all__ = ["Columns", "pack", "pack_column"]

Columns: TypeAlias = dict[str, Any]

_KINDS = tuple(EventKind)
_SHARED, _BOUNDED = 1, 2
_PER_MICROSECOND = 1000


def pack(events: Iterable[Event]) -> Columns:
    """Packs events as columns.

    Returns:
      A value for JSON: "count", and columns with an entry for each event, by begin: "kind" (a place in
      "kinds"), "begin" and "length" (in nanoseconds, the begin from the last entry's), "ipu",
      "pipeline", "stage", "batch" (the micro-batch), "step", "source" (all of them -1 for None; the host of
      process n is IPU -1 - n), "bytes",
      "flags" (1: shared, 2: bounded) and "name" (a place in "names").
    """
    ordered = sorted(events, key=lambda event: (event.begin, event.end))
    names: dict[str, int] = {}
    begins = [round(event.begin * _PER_MICROSECOND) for event in ordered]
    ends = [round(event.end * _PER_MICROSECOND) for event in ordered]
    columns = {
        "kind": [_KINDS.index(event.kind) for event in ordered],
        "begin": [begin - before for before, begin in zip([0, *begins], begins, strict=False)],
        "length": [end - begin for begin, end in zip(begins, ends, strict=True)],
        "ipu": [-1 - event.process if event.ipu is None else event.ipu for event in ordered],
        "pipeline": [_number(event.pipeline) for event in ordered],
        "stage": [_number(event.stage) for event in ordered],
        "batch": [_number(event.micro_batch) for event in ordered],
        "step": [_number(event.step) for event in ordered],
        "source": [_number(event.source) for event in ordered],
        "bytes": [event.num_bytes for event in ordered],
        "flags": [_SHARED * event.is_shared + _BOUNDED * event.is_bounded for event in ordered],
        "name": [names.setdefault(event.name, len(names)) for event in ordered],
    }
    packed: Columns = {name: pack_column(values) for name, values in columns.items()}
    return {
        "count": len(ordered),
        "kinds": [kind.value for kind in _KINDS],
        "names": list(names),
        **packed,
    }


def _number(value: int | None) -> int:
    return -1 if value is None else value


def pack_column(values: Sequence[int]) -> int | str:
    """Integers as text, or as one integer if all are equal."""
    if values and all(value == values[0] for value in values):
        return values[0]
    written = bytearray()
    for value in values:
        left = 2 * value if value >= 0 else -2 * value - 1
        while left > 127:
            written.append(left & 127 | 128)
            left >>= 7
        written.append(left)
    return base64.b64encode(written).decode()
