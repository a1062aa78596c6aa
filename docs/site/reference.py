"""The API reference: what is public, each object once, and where names of other libraries lead.

Sphinx's autodoc makes a page for each public name from its docstring, and the pages of docs/api list them.
Here is what it does not know: which of several public modules an object belongs to, which pages have
programs that use it, and, since the site is built without a network, the addresses of other libraries'
pages.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.ext.autosummary import Autosummary

ROOT = Path(__file__).parents[2]
# In this order: an object that several of them have is documented with the first.
PUBLIC = (
    "pipelining_ops",
    "loops",
    "scopes",
    "ipu_compiler",
    "gradient_accumulation",
    "ipu_infeed_queue",
    "ipu_outfeed_queue",
    "optimizers",
    "optimizers.tf1",
    "layers",
    "cross_replica_ops",
    "embedding_ops",
    "functional_ops",
    "nn_ops",
    "normalization_ops",
    "rand_ops",
    "replication_ops",
    "rnn_ops",
    "config",
    "distributed",
    "ray",
    "popdist",
    "utils",
    "serving",
    "metrics",
    "reports",
    "errors",
    "datasets",
    "ipu_pipeline_estimator",
    "ipu_estimator",
    "ipu_run_config",
    "ipu_session_run_hooks",
    "",
    "engine",
    "engine.schedules",
    "engine.inspect",
    "engine.planning",
)
# PopTorch's modules, which need torch to be imported: the site has them, and pages show how they are used.
POPTORCH = ("poptorch", "poptorch.optim", "poptorch.autocasting", "poptorch.profiling")
# Where the page of each name is, from the root: made anew by each build.
PAGES = "build/api"
# Of a module whose other names are for the library's own parts, those that people meet.
_ONLY = {
    "engine.inspect": (
        "Edge",
        "Flow",
        "IpuMemory",
        "LayerFacts",
        "Part",
        "PipelineDetails",
        "PipelineSummary",
        "Sent",
        "StageDetails",
        "StageMemory",
        "Work",
        "count_costs",
        "count_work",
        "find_facts",
        "find_searched",
        "summarize",
    )
}
# Of a class whose other members are for the library's own parts.
_MEMBERS = {
    "ipu_pipeline.engine.Pipeline": (
        "adopt",
        "compile",
        "device_mapping",
        "dispatch_plan",
        "for_shapes",
        "init",
        "init_optimizer_state",
        "num_devices",
        "num_replicas",
        "options",
        "parameters",
        "place_micro_batches",
        "run",
        "step",
        "trace",
        "variables",
        "with_parameters",
    )
}
# What examples in docstrings begin with; the page "Look up" says so.
PREAMBLE = """\
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets, engine, layers
from ipu_pipeline.engine import schedules
"""
_JAX = "https://docs.jax.dev/en/latest"
_NUMPY = "https://numpy.org/doc/stable/reference"
_OPTAX = "https://optax.readthedocs.io/en/latest/api/transformations.html#optax"
_PYTHON = "https://docs.python.org/3/library"
_PACKAGES = ("collections.", "contextlib.", "ipu_pipeline.", "jax.", "numpy.", "optax.", "os.", "typing.")
# The names of other libraries that signatures have, and where they are described.
ELSEWHERE = {
    "contextlib.AbstractContextManager": f"{_PYTHON}/contextlib.html#contextlib.AbstractContextManager",
    "jax.Array": f"{_JAX}/_autosummary/jax.Array.html",
    "jax.P": f"{_JAX}/jax.sharding.html#jax.sharding.PartitionSpec",
    "jax.ShapeDtypeStruct": f"{_JAX}/_autosummary/jax.ShapeDtypeStruct.html",
    "jax._src.mesh.AbstractMesh": f"{_JAX}/jax.sharding.html",
    "jax._src.mesh.Mesh": f"{_JAX}/jax.sharding.html#jax.sharding.Mesh",
    "jax.jaxlib._jax.Array": f"{_JAX}/_autosummary/jax.Array.html",
    "jax.sharding.NamedSharding": f"{_JAX}/jax.sharding.html#jax.sharding.NamedSharding",
    "numpy.dtype": f"{_NUMPY}/generated/numpy.dtype.html",
    "numpy.float32": f"{_NUMPY}/arrays.scalars.html#numpy.float32",
    "numpy.int32": f"{_NUMPY}/arrays.scalars.html#numpy.int32",
    "numpy.ndarray": f"{_NUMPY}/generated/numpy.ndarray.html",
    "optax.GradientTransformation": f"{_OPTAX}.GradientTransformation",
    "optax._src.base.GradientTransformation": f"{_OPTAX}.GradientTransformation",
    "optax._src.base.GradientTransformationExtraArgs": f"{_OPTAX}.GradientTransformationExtraArgs",
    "optax._src.base.TransformInitFn": f"{_OPTAX}.TransformInitFn",
    "optax._src.base.TransformUpdateFn": f"{_OPTAX}.TransformUpdateFn",
    "os.PathLike": f"{_PYTHON}/os.html#os.PathLike",
    "typing.Any": f"{_PYTHON}/typing.html#typing.Any",
    **{
        f"collections.abc.{name}": f"{_PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence")
    },
}


def full_name(module: str) -> str:
    """The name by which it is imported."""
    return f"ipu_pipeline.{module}" if module else "ipu_pipeline"


def find_homes(modules: Sequence[str] = PUBLIC) -> dict[tuple[str, str], str]:
    """The public module that documents an object, by each public module and name that it has."""
    first: dict[Any, str] = {}
    homes = {}
    for short in modules:
        module = full_name(short)
        found = importlib.import_module(module)
        for name in _ONLY.get(short, found.__all__):
            value = getattr(found, name)
            # Equal numbers and texts may be one object without being the same thing.
            key = (module, name) if isinstance(value, (str, int, tuple)) else id(value)
            homes[module, name] = first.setdefault(key, module)
    return homes


def _is_inner(name: str) -> bool:
    """Whether it is the full name of something in a module of the library."""
    module, _, last = name.rpartition(".")
    if not module.startswith("ipu_pipeline."):
        return False
    try:
        return hasattr(importlib.import_module(module), last)
    except ModuleNotFoundError:
        return False


def _as_code(match: re.Match[str]) -> str:
    separator = "\\ " if match[2] else ""
    return f"``{match[1]}``{separator}{match[2]}"


def _readable(
    _app: Any, _what: str, _name: str, _obj: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A signature whose defaults are Python's: those that have no text of their own are three dots."""
    return signature and re.sub(r"<[^<>]*>", "...", signature), returns


def _owner(module: str) -> str:
    """What programs call a module."""
    return "ipu" if module == "ipu_pipeline" else module.rpartition(".")[2]


def is_shown(value: Any) -> bool:
    """Whether a public object is to have an example: a function, or a class other than an error."""
    return inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, BaseException))


def _is_documented(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def example_in(docstring: str | None) -> str:
    """The example that a docstring has, without its indentation; empty if there is none."""
    found = re.search(r"^Example:\n((?:\n|  .*\n?)+)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return textwrap.dedent(found[1]).strip("\n") if found else ""


def _arguments_of(value: type) -> list[str]:
    """The lines about the arguments of a class, which are in the docstring of its `__init__`."""
    init = value.__init__  # type: ignore[misc]
    text = inspect.cleandoc(init.__doc__ or "") if inspect.isfunction(init) else ""
    _summary, _blank, rest = text.partition("\n\n")
    return ["", *rest.splitlines(), ""] if rest else []


def _with_whole_code(lines: list[str]) -> list[str]:
    """Lines in which what stands between backticks does not go on in the next line."""
    found: list[str] = []
    for line in lines:
        if found and found[-1].count("`") % 2:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


class Examples:
    """The examples in docstrings, and the programs of pages, by the page's name without its ending."""

    def __init__(self, homes: Mapping[tuple[str, str], str]) -> None:
        self._in_docstrings = {}
        for (module, name), home in homes.items():
            value = getattr(importlib.import_module(module), name)
            if home == module and callable(value):
                self._in_docstrings[module, name] = example_in(value.__doc__)
        self._programs = {}
        for folder in ("docs", "docs/how_to", "tutorial"):
            for path in sorted(set((ROOT / folder).glob("*.md")) - {ROOT / "docs" / "design.md"}):
                blocks = re.findall(
                    r"^```(?:python|diff)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
                )
                self._programs[f"{folder}/{path.stem}"] = "\n".join(blocks)

    def pages_of(self, module: str, name: str) -> list[str]:
        """At most three pages, those of the shortest programs, that use a name of a module."""
        owner = _owner(module)
        use = re.compile(
            rf"\b{owner}\.{name}\b|^from [\w.]*\b{owner} import [^\n]*\b{name}\b", re.MULTILINE
        )
        found = [page for page, program in self._programs.items() if use.search(program)]
        return sorted(found, key=lambda page: len(self._programs[page]))[:3]

    def others_of(self, module: str, name: str) -> list[tuple[str, str]]:
        """At most three other names whose examples use a name, or print its object: the shortest ones."""
        use = re.compile(rf"\b{_owner(module)}\.{name}\b|^\W*{name}\(", re.MULTILINE)
        found = [at for at, code in self._in_docstrings.items() if use.search(code)]
        found = [at for at in found if at != (module, name)]
        return sorted(found, key=lambda at: len(self._in_docstrings[at]))[:3]

    def has(self, module: str, name: str) -> bool:
        """Whether a public name has an example, its own or one of another name, or is used in a page."""
        own = self._in_docstrings.get((module, name))
        return bool(own or self.others_of(module, name) or self.pages_of(module, name))


class Reference:
    """What autodoc and Sphinx ask while they build."""

    def __init__(self) -> None:
        self._homes = find_homes(PUBLIC + POPTORCH)
        self._examples = Examples(self._homes)
        # By the module and name that an object says that it has, which annotations show.
        self._public = {}
        for (module, name), home in self._homes.items():
            value = getattr(importlib.import_module(module), name)
            if callable(value) and (value.__module__ or "").startswith("ipu_pipeline."):
                self._public[f"{value.__module__}.{value.__qualname__}"] = f"{home}.{name}"

    def home_of(self, module: str, name: str) -> str:
        """A name of a module, as autosummary takes it in the list of that module."""
        home = self._homes[module, name]
        return name if home == module else f"~{home}.{name}"

    def names_of(self, module: str) -> list[str]:
        """The functions and classes that a public module documents; constants have entries on its page."""
        return [
            name
            for (of, name), home in self._homes.items()
            if of == home == module and _is_documented(getattr(importlib.import_module(module), name))
        ]

    def write_pages(self, app: Any) -> None:
        """Writes the page of each name, for autodoc to fill."""
        folder = Path(app.srcdir, PAGES)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for module in dict.fromkeys(self._homes.values()):
            for name in self.names_of(module):
                value = getattr(importlib.import_module(module), name)
                lines = [name, "=" * len(name), "", f".. currentmodule:: {module}", ""]
                if inspect.isclass(value):
                    members = ", ".join(_MEMBERS.get(f"{module}.{name}", ()))
                    lines += [f".. autoclass:: {name}", f"   :members: {members}"]
                else:
                    lines += [f".. autofunction:: {name}"]
                Path(folder, f"{module}.{name}.rst").write_text("\n".join(lines) + "\n")

    def skip(self, _app: Any, _what: str, _name: str, obj: Any, _skip: bool, _options: Any) -> bool | None:
        """Skips the fields of named tuples, which their class describes."""
        return (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") or None

    def prepare(self, _app: Any, what: str, name: str, obj: Any, _options: Any, lines: list[str]) -> None:
        """Makes of our docstrings, which people read as they are, what Sphinx reads: in place.

        An example is code, and so is what stands between backticks, whatever follows it. Arguments of a
        class follow its own docstring.
        """
        text, code = [], False
        for line in _with_whole_code([*lines, *(_arguments_of(obj) if what == "class" else ())]):
            if line == "Example:":
                code = True
                text += [".. code-block:: pycon", ""]
                continue
            code = code and (not line or line.startswith(" "))
            text.append(line if code else re.sub(r"`([^`]+)`(\w?)", _as_code, line).replace("[*", r"[\*"))
        lines[:] = text
        module, _, short = name.rpartition(".")
        if self._homes.get((module, short)) != module:
            return
        found = [f":doc:`/{page}`" for page in self._examples.pages_of(module, short)]
        if not found and ".. code-block:: pycon" not in text and is_shown(obj):
            others = self._examples.others_of(module, short)
            found = [f"the example of :py:obj:`{name} <{home}.{name}>`" for home, name in others]
        if found:
            lines += ["", "Used in " + ", ".join(found) + "."]

    def resolve(self, app: Any, env: Any, node: Any, content: Any) -> Any:
        """Where a name leads that Sphinx does not find; None, which fails, if there is no such name."""
        target = node.get("reftarget", "")
        if node.get("refdomain") != "py":
            return None
        if public := self._public.get(target):
            node["reftarget"] = public
            python = env.get_domain("py")
            return python.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)
        if target in ELSEWHERE:
            return nodes.reference("", "", content, internal=False, refuri=ELSEWHERE[target])
        # Words of a docstring, Python's own types, and what modules call each other have no dot, or one.
        return content if _is_inner(target) or not target.startswith(_PACKAGES) else None


class Names(Autosummary):
    """Lists the names of the current module with their pages: first the ones in the content, in that order.

    These may be of another module that documents them.
    """

    reference: ClassVar[Reference]

    def run(self) -> list[Any]:
        """Completes the list, and makes the table of it."""
        module = self.env.ref_context["py:module"]
        first = [self.reference.home_of(module, name) for name in self.content]
        self.content = StringList(dict.fromkeys([*first, *self.reference.names_of(module)]))
        self.options |= {"nosignatures": None, "toctree": f"../../{PAGES}"}
        return super().run()


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.autosummary")
    Names.reference = reference = Reference()
    app.add_directive("names", Names)
    app.connect("builder-inited", reference.write_pages)
    app.connect("autodoc-skip-member", reference.skip)
    app.connect("autodoc-process-docstring", reference.prepare, priority=400)  # before napoleon, with 500
    app.connect("autodoc-process-signature", _readable)
    app.connect("missing-reference", reference.resolve)
    return {"parallel_read_safe": False}
