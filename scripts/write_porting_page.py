"""Writes docs/porting.md's tables, from ipu_pipeline/graphcore/names.json and what the package itself says.

    python scripts/write_porting_page.py

What stands before the tables is written by hand, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ipu_pipeline.graphcore.table import Row, read_rows
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.config_categories import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "porting.md"
HEADING = "## Every name\n"
INTRODUCTION = """
What Graphcore's programs import, and what it is here. `ipu.ops.X`, `ipu.optimizers.X` and the module paths
of `tensorflow.python.ipu` lead to the same names. A `*` stands for any characters. Importing or using a
name that is not there raises an error with the text of its row.
"""
_HERE = {"same": "the same", "no effect": "known, no effect", "not there": "not there"}
# In texts of the package: calls, dotted names, names with underscores, names of classes.
_CODE = re.compile(r"\w+(?:\.\w+)*\([^()]*\)|\w+(?:\.\w+)+|\w*_\w+|IPU[A-Z][a-z]\w+")


def read_settings() -> list[Row]:
    """The settings and functions of Graphcore's that have no effect, as the package knows them."""
    settings = {
        f"config.IPUConfig.{name}": as_sentence(setting.reason)
        for name, setting in SETTINGS.items()
        if setting.reason
    }
    functions = {
        f"utils.{name}": f"{as_sentence(f'it {did}')} {as_sentence(reason)}"
        for name, (did, reason) in utils.WITHOUT_EFFECT.items()
    }
    return [Row(name, "no effect", name, why) for name, why in (settings | functions).items()]


def as_sentence(text: str) -> str:
    """A text of the package as a sentence of the page: code is marked as such, and keeps its case."""
    marked = _CODE.sub(lambda match: f"`{match[0]}`", text)
    return f"{marked[0].upper()}{marked[1:]}."


def make_table(rows: Iterable[Row]) -> str:
    """Rows as a table."""
    lines = ["| name | here | |", "| --- | --- | --- |"]
    for row in rows:
        code, _, words = row.name.partition(" ")
        name = f"`{code}` {words}".rstrip()
        lines.append(f"| {name} | {_HERE.get(row.status) or f'`{row.here}`'} | {row.why} |")
    return "\n".join(lines) + "\n"


def make_tables() -> str:
    """All that stands below the heading."""
    rows = list(read_rows().values())
    first = next(number for number, row in enumerate(rows) if row.name.startswith("tf."))
    parts = {
        "Graphcore's names": rows[:first],
        "TensorFlow 1's names": rows[first:],
        "Settings and functions without effect": read_settings(),
    }
    return "\n".join(
        [INTRODUCTION, *(f"### {title}\n\n{make_table(part)}" for title, part in parts.items())]
    )


def make_page() -> str:
    """The whole page, with the text that it has."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + make_tables()


if __name__ == "__main__":
    PAGE.write_text(make_page())
