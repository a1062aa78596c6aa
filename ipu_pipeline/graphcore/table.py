"""The table of names: `names.json`, whose rows docs/api/names.md shows, and `sdk_names.json`.

A row of `names.json` has a name of Graphcore's, or one of TensorFlow 1's that begins with "tf.", and says
what it is here:

  same: it stands under that name;
  renamed: it stands under the name `here`;
  no effect: it can be used, and does nothing;
  not there: `why` says what it was for and what to use.

A `*` in a name stands for any characters, so that one row may be about several names, or all of a module.
A row for a single one of them takes precedence.

`sdk_names.json` lists the public names of `tensorflow.python.ipu` by module, a line for each. Graphcore's
package also has every module of `ops` and `optimizers` as an attribute of its own (`ipu.ops.rand_ops` is
`ipu.rand_ops`), and `optimizers` has the classes of its modules; rows use the shortest of such names.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Row", "describe_missing", "find_names", "find_row", "read_rows", "read_sdk_names", "shorten"]

_FOLDER = Path(__file__).parent
_SDK = "of Graphcore's TensorFlow"


@dataclass(frozen=True)
class Row:
    """A row of the table: what a name stands for here.

    Attributes:
      name: Graphcore's, or TensorFlow's.
      status: "same", "renamed", "no effect" or "not there".
      here: the name here, if it is the same or renamed.
      why: sentences for a user.
    """

    name: str
    status: str
    here: str = ""
    why: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the name itself can be used."""
        return self.status in ("same", "no effect")


@functools.cache
def read_rows() -> Mapping[str, Row]:
    """The rows by name, in the order of the file."""
    rows = [Row(**fields) for fields in json.loads((_FOLDER / "names.json").read_text())]
    return {row.name: Row(row.name, row.status, row.name, row.why) if row.is_here else row for row in rows}


@functools.cache
def read_sdk_names() -> Mapping[str, Sequence[str]]:
    """The public names of Graphcore's modules, by module; "" is the package itself."""
    modules: dict[str, list[str]] = json.loads((_FOLDER / "sdk_names.json").read_text())
    return modules


def shorten(path: str) -> str:
    """The shortest path of a module: `ops.rand_ops` is `rand_ops`."""
    first, _dot, rest = path.partition(".")
    if first in ("ops", "optimizers") and rest:
        return rest.rpartition(".")[2] if path in read_sdk_names() else rest
    return path


def find_module(path: str) -> str | None:
    """The module of Graphcore's at a path, by its name in `sdk_names.json`; None if there is none."""
    modules = read_sdk_names()
    if path in modules:
        return path
    return next((module for module in modules if shorten(module) == path), None)


def find_row(module: str, name: str) -> Row | None:
    """The row about a name."""
    short = f"{shorten(module)}.{name}" if module else name
    candidates = [f"{module}.{name}", short]
    if module.startswith("optimizers."):
        candidates.append(f"optimizers.{name}")
    rows = read_rows()
    for candidate in candidates:
        if candidate in rows:
            return rows[candidate]
    patterns = [row for row in rows.values() if "*" in row.name]
    for candidate in candidates:
        for row in patterns:
            if fnmatch.fnmatchcase(candidate, row.name):
                return row
    return None


def find_names(path: str) -> Mapping[str, str] | None:
    """The names of a module of Graphcore's that are here, and where; None if there are none."""
    module = find_module(path)
    if not module:
        return None
    rows = {name: find_row(module, name) for name in read_sdk_names()[module]}
    found = {name: row.here for name, row in rows.items() if row is not None and row.status == "same"}
    if not rows and (row := find_row(module, "")) is not None and row.is_here:
        return {}
    return found or None


def describe_missing(path: str) -> str | None:
    """The error text for a name of Graphcore's, or of TensorFlow's, that is not here."""
    module = find_module(path) if path else None
    if module:
        return _describe_several(path, _rows_of(module))
    parent, _dot, name = path.rpartition(".")
    known = find_module(parent)
    if known is not None and name in read_sdk_names()[known]:
        row = find_row(known, name)
        return None if row is None or row.is_here else _describe(_SDK, f"ipu.{_short_name(row, path)}", row)
    below = [module for module in read_sdk_names() if module.startswith(f"{path}.")]
    if below:
        return _describe_several(path, [row for module in below for row in _rows_of(module)])
    return _describe_tensorflow(path)


def _short_name(row: Row, path: str) -> str:
    """The name that errors use for a path."""
    if "*" not in row.name:
        return row.name
    parent, _dot, name = path.rpartition(".")
    return f"{shorten(parent)}.{name}" if parent else name


def _rows_of(module: str) -> list[Row]:
    """The rows of a module's names that are not here; names with a row of their own come first."""
    found = (find_row(module, name) for name in read_sdk_names()[module])
    rows = [row for row in dict.fromkeys(found) if row is not None and not row.is_here]
    return sorted(rows, key=lambda row: "*" in row.name)


def _describe(whose: str, name: str, row: Row) -> str:
    if row.status == "renamed":
        return f"{name}, {whose}, is ipu.{row.here} in ipu_pipeline. {row.why}".rstrip()
    return f"{name}, {whose}, is not in ipu_pipeline. {row.why}"


def _describe_several(path: str, rows: Sequence[Row], whose: str = _SDK) -> str | None:
    name = shorten(path) if find_module(path) else path
    advice: dict[str, list[str]] = {}
    for row in dict.fromkeys(rows):
        text = f"ipu.{row.here}. {row.why}".rstrip() if row.here else row.why
        advice.setdefault(text, []).append(row.name)
    if not advice:
        return None
    if len(advice) == 1 and whose == _SDK:
        return f"ipu.{name}, {whose}, is not in ipu_pipeline. {next(iter(advice))}"
    lines = [f"  {', '.join(names)}: {text}" for text, names in advice.items()]
    return "\n".join([f"ipu.{name}, {whose}, is not in ipu_pipeline. By name:", *lines])


def _describe_tensorflow(path: str) -> str | None:
    """Same as `describe_missing`, for TensorFlow's own names, which are under `tf.` or a module of it."""
    rows = [row for row in read_rows().values() if row.name.startswith("tf.")]
    name = path.rpartition(".")[2]
    for row in sorted(rows, key=lambda row: "*" in row.name):  # a row for one name comes first
        module, _dot, pattern = row.name.rpartition(".")
        # A name is found in whatever module it is looked for.
        is_own = pattern != "*" and fnmatch.fnmatchcase(name, pattern)
        if is_own or fnmatch.fnmatchcase(f"tf.{path}", row.name):
            return _describe("of TensorFlow", f"{module}.{name}" if "*" in pattern else row.name, row)
    within = [
        Row(row.name, row.status, row.here) if row.here else row
        for row in rows
        if row.name.startswith(f"tf.{path}.")
    ]
    return _describe_several(path, within, f"as tf.{path} of TensorFlow") if within else None
