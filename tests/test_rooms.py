"""Rooms: each imports only those before it, and modules import each other in no circle."""

import ast
import pathlib

import pytest

import ipu_pipeline

PACKAGE = pathlib.Path(ipu_pipeline.__file__).parent
ENGINE = [
    ["errors", "state", "jax_compat"],
    ["jaxprs"],
    ["schedules"],
    ["tracing"],
    ["programs"],
    ["updates"],
    ["devices"],
    ["planning"],
    ["execution"],
    ["loops"],
    ["building", "pipeline", "measuring", "reference", "__init__"],
]
FRONT = [
    ["errors", "utils", "config", "gradient_accumulation", "scopes", "ipu_run_config"],
    ["reports"],
    ["graph"],
    ["optimizers"],
    ["data"],
    ["datasets"],
    ["queues"],
    ["ipu_session_run_hooks"],
    ["checkpointing"],
    ["program"],
    ["session"],
    ["layers"],
    ["loops", "pipelining_ops", "ipu_compiler", "ipu_infeed_queue", "ipu_outfeed_queue"],
    ["estimator"],
    ["ipu_pipeline_estimator", "tutorial_support"],
    ["__init__"],
]
FLOORS = [[f"engine.{name}" for name in rooms] for rooms in ENGINE] + FRONT
LEVELS = {name: level for level, names in enumerate(FLOORS) for name in names}
MODULES = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
MAX_MODULES, MAX_LINES, MAX_LONG = 24, 450, 3


def room_of(module):
    """The room of a module, or the module itself where it is in none."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "engine" and len(parts) > 1 else parts[0]


def read_imports(module, source):
    """The modules of the package that a module imports, in functions and for annotations too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for base, name in names:
            first, _, inner = base.partition(".")
            if first != "ipu_pipeline":
                continue
            both = ".".join(part for part in (inner, name) if part)
            known = [both, f"{both}.__init__".lstrip("."), inner, f"{inner}.__init__".lstrip(".")]
            found.add(next(candidate for candidate in known if candidate in MODULES))
    return found


IMPORTS = {module: read_imports(module, path.read_text()) for module, path in MODULES.items()}


def test_every_module_is_in_a_room():
    assert {room_of(module) for module in MODULES} <= LEVELS.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_rooms_before_its_own(module):
    room = room_of(module)
    for imported in IMPORTS[module]:
        other = room_of(imported)
        # Single modules may share a floor, and import each other; the test below finds circles.
        assert LEVELS[other] <= LEVELS[room], f"{module} imports {imported}"


def test_no_circle():
    left = {module: set(imported) - {module} for module, imported in IMPORTS.items()}
    while True:
        ground = {module for module, imported in left.items() if not imported & left.keys()}
        if not ground:
            break
        left = {module: imported for module, imported in left.items() if module not in ground}
    assert not left, f"these import each other in a circle: {sorted(left)}"


def test_reads_imports_of_every_form():
    source = """
from typing import TYPE_CHECKING
import ipu_pipeline.engine.state
from ipu_pipeline import config
from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.flat import flatten
if TYPE_CHECKING:
    from ipu_pipeline.session import Session
def inner():
    import ipu_pipeline as ipu
"""
    assert read_imports("x", source) == {
        "engine.state",
        "config",
        "engine.jaxprs.__init__",
        "engine.jaxprs.flat",
        "session.__init__",
        "__init__",
    }


def test_rooms_are_of_a_size():
    folders = {}
    for path in MODULES.values():
        folders.setdefault(path.parent, []).append(path)
    del folders[PACKAGE]  # the public interface, which may have more
    assert max(map(len, folders.values())) <= MAX_MODULES
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    long = {module: number for module, number in lines.items() if number > MAX_LINES}
    assert len(long) <= MAX_LONG, long
