"""Plain tables for terminals: columns, sizes and names."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["align", "describe_bytes", "describe_flop", "printable", "shorten"]


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
            return _three_digits(number, unit)
        number /= 1024
    return _three_digits(number, "TiB")


def describe_flop(number: float) -> str:
    """Describes a number of floating-point operations, in three digits: `1.25 Gflop`."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return _three_digits(number, f"{prefix}flop")
        number /= 1000
    return _three_digits(number, "Pflop")


def _three_digits(number: float, unit: str) -> str:
    num_decimals = 0 if number == int(number) or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{num_decimals}f} {unit}"


def printable(text: str) -> str:
    """Puts escapes in place of what a terminal would obey or not show in a user's text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """Shortens a text to at most `width` characters: its beginning and its end."""
    if len(text) <= width:
        return text
    left = width - 3
    return f"{text[: left - left // 2]}...{text[len(text) - left // 2 :]}"
