"""Times, speeds and shares as people read them."""

from __future__ import annotations

import re

__all__ = ["describe_share", "describe_speed", "describe_time", "say_device"]


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


def _three_digits(number: float) -> str:
    num_decimals = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{num_decimals}f}"
