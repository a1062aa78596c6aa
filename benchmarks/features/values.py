"""What all checks share: verdicts, the numbers of a small model, and how results are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "DOES_NOT",
    "NUM_TOKENS",
    "RATE",
    "WIDTH",
    "WORKS",
    "WORKS_WITH",
    "Verdict",
    "check_close",
    "draw",
    "layers",
    "names_in",
    "said_by",
    "shorten",
    "speaker",
]

WORKS, WORKS_WITH, DOES_NOT = "yes", "with", "no"
WIDTH = 8
RATE = 0.1  # of learning
NUM_WORDS, NUM_TOKENS = 16, 8  # of what generates
_TOLERANCE = 1e-5  # of the 2-norm


@dataclass(frozen=True)
class Verdict:
    """A cell of the table.

    Attributes:
      kind: `WORKS`; `WORKS_WITH` something that the user has to write or to know; `DOES_NOT`.
      note: what was run, with what, or what the library says.
    """

    kind: str
    note: str

    def __post_init__(self) -> None:
        """Checks the kind."""
        if self.kind not in (WORKS, WORKS_WITH, DOES_NOT):
            raise ValueError(f"kind must be {WORKS!r}, {WORKS_WITH!r} or {DOES_NOT!r}; got {self.kind!r}.")


def layers(number: int, width: int = WIDTH) -> list[Any]:
    """Square matrices, float32."""
    random = np.random.default_rng(0)
    drawn = [random.normal(size=(width, width), scale=width**-0.5) for _layer in range(number)]
    return [matrix.astype(np.float32) for matrix in drawn]


def speaker(number: int = 4) -> Any:
    """What generates: a table of words, a matrix for each stage, and a projection to words."""
    random = np.random.default_rng(3)

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    return (
        normal(NUM_WORDS, WIDTH),
        [normal(WIDTH, WIDTH) for _stage in range(number)],
        normal(WIDTH, NUM_WORDS),
    )


def draw(*shape: int, seed: int = 1) -> Any:
    """Normal numbers, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises AssertionError unless each array is the expected one, up to 1e-5 of its 2-norm."""
    assert len(found) == len(expected), f"{len(found)} arrays, not {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert a.shape == b.shape, f"array {number} is {a.shape}, not {b.shape}"
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= _TOLERANCE, f"array {number} differs by {error:.1e} of its norm"


def said_by(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The error of a call, in one line.

    Raises:
      AssertionError: the call raises nothing, so that what the table says of it is no longer true.
    """
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {shorten(str(error))}"
    raise AssertionError("This raised nothing: write the check anew.")


def shorten(text: str, most: int = 170) -> str:
    """A text in one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 4] + " ..."


def names_in(package: Any, pattern: str) -> list[str]:
    """The public functions and classes that a package's source defines and whose names match."""
    found = set()
    for path in Path(package.__path__[0]).rglob("*.py"):
        for name in re.findall(r"^\s*(?:def|class) ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            if re.search(pattern, name, re.IGNORECASE):
                found.add(name)
    return sorted(found)
