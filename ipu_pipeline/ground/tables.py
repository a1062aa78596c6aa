"""Text for people: tables, sizes, times and shares, and where bars of progress are shown."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def align(rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Makes the lines of a table; the columns `numbers` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(cell: str, place: int) -> str:
        return cell.rjust(widths[place]) if place in numbers else cell.ljust(widths[place])

    return [indent + "  ".join(pad(cell, place) for place, cell in enumerate(row)).rstrip() for row in rows]


def describe_bytes(number: float) -> str:
    """Describes a size in bytes, in three digits: `1.25 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return _with_unit(number, unit)
        number /= 1024
    return _with_unit(number, "TiB")


def describe_flop(number: float) -> str:
    """Describes a number of floating-point operations, in three digits: `1.25 Gflop`."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return _with_unit(number, f"{prefix}flop")
        number /= 1000
    return _with_unit(number, "Pflop")


def printable(text: str) -> str:
    """Puts escapes in place of what a terminal would obey or not show in a user's text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """Shortens a text to at most `width` characters: its beginning and its end."""
    if len(text) <= width:
        return text
    room = width - 3
    return f"{text[: room - room // 2]}...{text[len(text) - room // 2 :]}"


def describe_time(microseconds: float | None) -> str:
    """A time in three digits: `1.25 ms`; "not seen" for None."""
    if microseconds is None:
        return "not seen"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{_three_digits(microseconds / size)} {unit}"
    return f"{_three_digits(microseconds)} µs"


def describe_speed(per_second: float) -> str:
    """A number per second, in three digits, or in all digits before the point: `1,250`."""
    return _three_digits(per_second)


def describe_share(share: float) -> str:
    """A share, in percent."""
    return f"{100 * share:.1f}%"


def say_device(text: str, word: str) -> str:
    """Replaces "IPU" in words of reports by the word that a pipeline's interface has for it."""
    if word == "IPU":
        return text
    text = re.sub(r"\b([Aa])n IPU\b", rf"\1 {word}", text)
    text = re.sub(r"(?<=\. )IPU(?=s?\b)", word.capitalize(), text)
    return re.sub(r"\bIPU(?=s?\b)", word, text)


def _with_unit(number: float, unit: str) -> str:
    return f"{number:,.0f} {unit}" if number == int(number) else f"{_three_digits(number)} {unit}"


def _three_digits(number: float) -> str:
    num_decimals = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{num_decimals}f}"


# Bars of progress.


def is_shown_on(stream: Any) -> bool:
    """Whether bars are shown on a stream: on terminals and in Jupyter, unless TQDM_DISABLE is set."""
    if os.environ.get("TQDM_DISABLE"):
        return False
    try:
        return bool(stream.isatty() or type(stream).__module__ == "ipykernel.iostream")
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False


@contextlib.contextmanager
def between_bars() -> Iterator[None]:
    """Wraps printing or logging while there may be bars of tqdm: these are drawn again below the text.

    Without bars tqdm is not asked, as its lock would fix the start method of the user's multiprocessing.
    """
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(bars, "_instances", None):
        yield
        return
    with bars.external_write_mode():  # type: ignore[union-attr]  # it has instances
        yield
