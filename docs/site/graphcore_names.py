"""The tables of docs/api/names.md: each Graphcore and TensorFlow 1 name, and what it is here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ipu_pipeline.graphcore.sdk_names import Row, read_rows
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.config import SETTINGS

PAGE = "docs/api/names"
_HERE = {"same": "The same", "no effect": "Accepted, no effect", "not there": "Not available"}
# In texts of the package: calls, dotted names, names with underscores, names of classes.
_CODE = re.compile(r"\w+(?:\.\w+)*\([^()]*\)|\w+(?:\.\w+)+|\w*_\w+|IPU[A-Z][a-z]\w+")


def read_settings() -> list[Row]:
    """Graphcore's settings and functions that have no effect, as the package knows them."""
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
    """Rows as a table of Markdown, whose pages are links."""
    lines = ["| name | here |", "| --- | --- |"]
    for row in rows:
        code, _, words = row.name.partition(" ")
        name = f"`{code}` {words}".rstrip()
        why = re.sub(r"docs/(?:api/)?(\w+)\.md", r"[\g<0>](/\g<0>)", row.why)
        here = _HERE.get(row.status) or f"`{row.here}`"
        lines.append(f"| {name} | {'. '.join(filter(None, (here, why)))} |")
    return "\n".join(lines) + "\n"


def make_tables() -> str:
    """All tables, each below its heading."""
    rows = list(read_rows().values())
    first = next(number for number, row in enumerate(rows) if row.name.startswith("tf."))
    parts = {
        "Graphcore's names": rows[:first],
        "TensorFlow 1's names": rows[first:],
        "Settings and functions without effect": read_settings(),
    }
    return "\n".join(f"## {title}\n\n{make_table(part)}" for title, part in parts.items())


def _add_tables(_app: Any, page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] += f"\n{make_tables()}"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _add_tables)
    return {"parallel_read_safe": True}
