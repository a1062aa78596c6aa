"""Writes docs/porting.md's table, from scripts/porting/names.json and what the package itself says.

    python scripts/write_porting_page.py

What stands before the table is written by hand, and stays.
"""

from __future__ import annotations

import json
from pathlib import Path

from ipu_pipeline import utils
from ipu_pipeline.config_categories import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "porting.md"
NAMES = ROOT / "scripts" / "porting" / "names.json"
HEADING = "## Every name\n"
_HERE = {"same": "the same", "no effect": "known, no effect", "not there": "not there"}


def read_rows() -> list[dict[str, str]]:
    """The names with what they are here: those of the file, and those that have no effect."""
    rows: list[dict[str, str]] = json.loads(NAMES.read_text())
    rows += [
        {"name": f"config.IPUConfig.{name}", "status": "no effect", "here": name, "why": setting.reason}
        for name, setting in SETTINGS.items()
        if setting.reason
    ]
    rows += [
        {"name": f"utils.{name}", "status": "no effect", "here": name, "why": f"it {did}: {reason}"}
        for name, (did, reason) in utils.WITHOUT_EFFECT.items()
    ]
    return rows


def make_table() -> str:
    """The table, as it stands at the end of the page."""
    lines = ["| Graphcore's name | here | |", "| --- | --- | --- |"]
    for row in read_rows():
        here = _HERE.get(row["status"])
        why = row["why"]
        sentence = why if not why or why.endswith(".") else f"{why}."
        where = here or f"`{row['here']}`"
        lines.append(f"| `{row['name']}` | {where} | {sentence[:1].upper()}{sentence[1:]} |")
    return "\n".join(lines) + "\n"


def make_page() -> str:
    """The whole page, with the text that it has."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + "\n" + make_table()


if __name__ == "__main__":
    PAGE.write_text(make_page())
