"""Names of Graphcore's SDK: a table that says what each is here, and finders that import by them."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# The table of names, `names.json`, and the SDK's public names by module, `sdk_names.json`.
#
# A `*` in a row's name stands for any characters, so that one row may be about several names, or all of a
# module. A row for a single one of them takes precedence. Graphcore's package also has every module of
# `ops` and `optimizers` as an attribute of its own (`ipu.ops.rand_ops` is `ipu.rand_ops`), and `optimizers`
# has the classes of its modules; rows use the shortest of such names.

_FOLDER = Path(__file__).parent
_SDK = "of Graphcore's TensorFlow"


@dataclass(frozen=True)
class Row:
    """A row of the table: what a name stands for here.

    Attributes:
      name: Graphcore's, or one of TensorFlow 1's that begins with "tf.".
      status: "same", "renamed" (to `here`), "no effect" (it can be used, and does nothing) or "not there".
      here: the name here, if it is the same or renamed.
      why: sentences for a user; of a name that is not there, what it was for and what to use.
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
    first, _dot, tail = path.partition(".")
    if first in ("ops", "optimizers") and tail:
        return tail.rpartition(".")[2] if path in read_sdk_names() else tail
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
    names_here = {name: row.here for name, row in rows.items() if row is not None and row.status == "same"}
    if not rows and (row := find_row(module, "")) is not None and row.is_here:
        return {}
    return names_here or None


def describe_missing(path: str) -> str | None:
    """The error text for a name of Graphcore's, or of TensorFlow's, that is not here."""
    module = find_module(path) if path else None
    if module:
        return _describe_several(path, _rows_of(module))
    parent, _dot, name = path.rpartition(".")
    parent_module = find_module(parent)
    if parent_module is not None and name in read_sdk_names()[parent_module]:
        row = find_row(parent_module, name)
        return None if row is None or row.is_here else _describe(_SDK, f"ipu.{_short_name(row, path)}", row)
    submodules = [module for module in read_sdk_names() if module.startswith(f"{path}.")]
    if submodules:
        return _describe_several(path, [row for module in submodules for row in _rows_of(module)])
    return _describe_tensorflow(path)


def _short_name(row: Row, path: str) -> str:
    """The name that errors use for a path."""
    if "*" not in row.name:
        return row.name
    parent, _dot, name = path.rpartition(".")
    return f"{shorten(parent)}.{name}" if parent else name


def _rows_of(module: str) -> list[Row]:
    """The rows of a module's names that are not here; names with a row of their own come first."""
    candidates = (find_row(module, name) for name in read_sdk_names()[module])
    rows = [row for row in dict.fromkeys(candidates) if row is not None and not row.is_here]
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
    """The error text for a name of TensorFlow's own, which is under `tf.` or a module of it."""
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


# The finders of modules.
#
# `install` adds a finder before Python's own finders and one behind them. The first one gives modules under
# other paths than their own, each the same object under all of its paths, whichever was imported first:
#
# 1. Users import the TF1 front without its folders: `ipu_pipeline.pipelining_ops` is
#    `ipu_pipeline.tf1.ops.pipelining_ops`. `PATHS` is the table.
# 2. A module within such a module can be imported by both paths: `ipu_pipeline.ops.rand_ops`.
#
# The second one is only asked for modules of this package that have no file:
#
# 3. A path of Graphcore's that has no module here, but some of whose names are here, such as
#    `ipu_pipeline.optimizers.cross_replica_optimizer`, gives a module of these names. Each is looked up
#    when it is used.
# 4. Any other path or name of Graphcore's raises an error that says what to use, from the table of names.
#
# `from m import x` replaces an AttributeError of `m` by an ImportError with Python's own text. But if `m`
# has a `__path__`, Python first looks for a module `m.x`. So each module that Graphcore also has calls
# `explain_missing`: it gets an empty `__path__`, and the finder raises the error. (An ImportError from
# `__getattr__` would make `hasattr` raise, and files for all of Graphcore's modules would be sixty.)

_ROOT = "ipu_pipeline"
_FRONT = "tf1"
_IN_FRONT = (
    "config distributed estimator gradient_accumulation graph ipu_compiler ipu_estimator "
    "ipu_infeed_queue ipu_outfeed_queue ipu_pipeline_estimator ipu_run_config ipu_session_run_hooks layers "
    "loops metrics ops optimizers popdist program scopes serving session tutorial_support utils"
)
_OPS = (
    "cross_replica_ops embedding_ops functional_ops nn_ops normalization_ops pipelining_ops rand_ops "
    "replication_ops rnn_ops"
)
# The locations of modules that users import by other paths.
PATHS = {
    "datasets": "data.datasets",
    "errors": "ground.errors",
    "executable_cache": "processes.executable_cache",
    "optimizers.accumulating": f"{_FRONT}.optimizers.wrappers",
    "optimizers.cross_replica": f"{_FRONT}.optimizers",
    "optimizers.gradients": f"{_FRONT}.optimizers.wrappers",
    "tables": "ground.tables",
    **{name: f"{_FRONT}.{name}" for name in _IN_FRONT.split()},
    **{name: f"{_FRONT}.ops.{name}" for name in _OPS.split()},
}


def install() -> None:
    """Adds the finders, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PathFinder())
        sys.meta_path.append(_Finder())


def explain_missing(module_name: str) -> None:
    """Makes a module explain Graphcore's names that it does not have. Called at the module's end."""
    attributes = vars(sys.modules[module_name])
    attributes.setdefault("__getattr__", functools.partial(find_attribute, module_name))
    attributes.setdefault("__path__", [])


def find_attribute(module_name: str, name: str) -> Any:
    """Finds a name that a module does not have; called by the module's `__getattr__`."""
    module = sys.modules[module_name]
    ordinary = f"module {module_name!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(ordinary, name=name, obj=module)
    path = _join(module_name, name)
    if find_names(path) is not None:
        return importlib.import_module(f"{module_name}.{name}")
    # Without a name, Python adds no suggestion of its own.
    text = describe_missing(path) or ordinary + _suggest(module_name, name)
    raise AttributeError(text, obj=module)


def _join(module_name: str, name: str) -> str:
    """The path behind `ipu.`."""
    return f"{_path_of(module_name)}.{name}".removeprefix(".")


def _path_of(module_name: str) -> str:
    """The path of a module behind `ipu.`, as Graphcore's programs have it; empty for the package."""
    return module_name.removeprefix(_ROOT).removeprefix(".").removeprefix(_FRONT).removeprefix(".")


def _suggest(module_name: str, name: str) -> str:
    """Says where one of Graphcore's names is, or which similar name the module has here or in the SDK."""
    module_path = _path_of(module_name)
    sdk_modules = read_sdk_names().items()
    places = sorted({shorten(path) for path, names in sdk_modules if name in names})
    if places and module_path not in places:
        texts = {
            path: describe_missing(path)
            for path in (f"{place}.{name}".removeprefix(".") for place in places)
        }
        location = next((f"It is ipu.{path}." for path, text in texts.items() if text is None), None)
        return f". {location or next(iter(texts.values()))}"
    sdk_module = find_module(module_path)
    names = set(dir(sys.modules[module_name]))
    if sdk_module is not None:
        names |= set(read_sdk_names()[sdk_module])
        if not sdk_module:
            names |= {shorten(module).partition(".")[0] for module in read_sdk_names()}
    matches = difflib.get_close_matches(name, sorted(n for n in names if not n.startswith("_")), n=1)
    return f". Did you mean {matches[0]!r}?" if matches else ""


class _PathFinder(importlib.abc.MetaPathFinder):
    """Finds modules by other paths than their own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module of a path in `PATHS`, or within a module that was imported by such a path."""
        del target
        if not fullname.startswith(f"{_ROOT}."):
            return None
        parent, _dot, child = fullname.rpartition(".")
        name, parent_module = fullname.removeprefix(f"{_ROOT}."), sys.modules.get(parent)
        if name in PATHS:
            real = f"{_ROOT}.{PATHS[name]}"
        elif parent_module is not None and parent_module.__name__ != parent:
            real = f"{parent_module.__name__}.{child}"
            if importlib.machinery.PathFinder.find_spec(real, path) is None:
                return None
        else:
            return None
        real_spec = importlib.util.find_spec(real)
        assert real_spec is not None
        spec = importlib.machinery.ModuleSpec(fullname, _RealLoader(real_spec), origin=real_spec.origin)
        spec.submodule_search_locations = real_spec.submodule_search_locations
        spec.has_location = real_spec.has_location
        return spec


class _RealLoader(importlib.abc.InspectLoader):
    """Gives the module of another path, which is whole before another thread can see it under this one."""

    def __init__(self, real_spec: importlib.machinery.ModuleSpec) -> None:
        self._real_spec = real_spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Imports the module by its own path."""
        del spec
        module = importlib.import_module(self._real_spec.name)
        self._real_spec = module.__spec__ or self._real_spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own specification again."""
        module.__spec__ = self._real_spec

    def get_code(self, fullname: str) -> Any:
        """The code that `python -m` runs."""
        del fullname
        return self._loader.get_code(self._real_spec.name)

    def get_source(self, fullname: str) -> str | None:
        """The text of the file."""
        del fullname
        return self._loader.get_source(self._real_spec.name)

    def is_package(self, fullname: str) -> bool:
        """Whether the module is a folder."""
        del fullname
        return self._real_spec.submodule_search_locations is not None

    @property
    def _loader(self) -> importlib.abc.InspectLoader:
        loader = self._real_spec.loader
        assert isinstance(loader, importlib.abc.InspectLoader)
        return loader


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules by Graphcore's paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module of a path. Only called for modules that have no file."""
        del path, target
        parent, _dot, child = fullname.rpartition(".")
        if not fullname.startswith(f"{_ROOT}.") or child.startswith("_"):
            return None
        name = _join(parent, child)
        names = find_names(name)
        if names is not None:
            return importlib.machinery.ModuleSpec(fullname, _Loader(name, names))
        # An import gets an error that explains. `importlib.util.find_spec` only asks, and gets None.
        caller = sys._getframe(1).f_back  # noqa: SLF001
        if caller is None or caller.f_code is importlib.util.find_spec.__code__:
            return None
        text = describe_missing(name)
        if text is None and hasattr(sys.modules.get(parent), "__getattr__"):
            near = _suggest(parent, child)
            text = f"cannot import name {child!r} from {parent!r}{near}" if near else None
        if text is None:
            return None
        # With the module's own name, `from m import x` would replace the error by Python's.
        raise ModuleNotFoundError(text, name=f"ipu.{name}")


class _Loader(importlib.abc.Loader):
    """Makes a module of names that are elsewhere here."""

    def __init__(self, path: str, names: Mapping[str, str]) -> None:
        self._path = path  # behind `ipu.`
        self._names = names  # the module's names, and where each one is here

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module."""
        module.__doc__ = f"Names of Graphcore's `ipu.{self._path}`."
        attributes = {
            "__all__": sorted(self._names),
            "__getattr__": functools.partial(self._resolve, module),
            "__dir__": lambda: sorted(self._names),
        }
        vars(module).update(attributes)
        explain_missing(module.__name__)

    def _resolve(self, module: ModuleType, name: str) -> Any:
        if name not in self._names:
            return find_attribute(module.__name__, name)
        value: Any = sys.modules[_ROOT]
        for part in self._names[name].split("."):
            value = getattr(value, part)
        vars(module)[name] = value
        return value
