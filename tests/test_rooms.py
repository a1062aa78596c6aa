"""Rooms: each imports only those before it, and modules import each other in no circle."""

import importlib
import re
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from figures import rooms  # noqa: E402  # scripts are no package


def test_every_module_is_in_a_room():
    assert {rooms.room_of(module) for module in rooms.MODULES} == set(range(len(rooms.FLOORS)))
    with pytest.raises(ValueError, match="somewhere is in no room"):
        rooms.room_of("somewhere")
    with pytest.raises(ValueError, match="engine.somewhere is in no room"):
        rooms.room_of("engine.somewhere")


def test_imports_only_rooms_before_its_own():
    imports = rooms.read_all_imports()
    numbers = {module: rooms.room_of(module) for module in imports}
    upwards = [(m, i) for m, imported in imports.items() for i in imported if numbers[i] > numbers[m]]
    assert not upwards


@pytest.mark.parametrize(("front", "other"), [("tf1", "poptorch"), ("poptorch", "tf1")])
def test_fronts_stand_beside_each_other(front, other):
    imports = rooms.read_all_imports()
    of_front = {module: imported for module, imported in imports.items() if module.startswith(f"{front}.")}
    assert len(of_front) > 50
    across = [
        (m, i) for m, found in of_front.items() for i in found if i.split(".")[0] in (other, "__init__")
    ]
    assert not across


# What others may import of the engine: users the first, fronts all.
SURFACE = {
    "engine.__init__",
    "engine.schedules.__init__",
    "engine.inspect.__init__",
    "engine.planning.__init__",
    "engine.processes",
    "engine.fronts",
}


def test_imports_of_the_engine_what_it_shows():
    imports = rooms.read_all_imports()
    others = {module: found for module, found in imports.items() if not module.startswith("engine.")}
    within = [(m, i) for m, found in others.items() for i in found - SURFACE if i.startswith("engine.")]
    assert not within


def test_the_engine_imports_what_it_needs_where_it_is_made():
    for_others = SURFACE - {"engine.__init__", "engine.schedules.__init__"}
    imports = rooms.read_all_imports()
    of_engine = {module: found for module, found in imports.items() if module.startswith("engine.")}
    assert not [(module, found & for_others) for module, found in of_engine.items() if found & for_others]


def test_no_circle():
    left = dict(rooms.read_all_imports())
    while ground := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in ground}
    assert not left, f"these import each other in a circle: {sorted(left)}"


def test_reads_imports_of_every_form():
    source = """
from typing import TYPE_CHECKING
import ipu_pipeline.engine.state
from ipu_pipeline.tf1 import config
from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.flat import flatten
if TYPE_CHECKING:
    from ipu_pipeline.tf1.session import Session
def inner():
    import ipu_pipeline as ipu
"""
    assert rooms.read_imports("x", source) == {
        "engine.state",
        "tf1.config",
        "engine.jaxprs.__init__",
        "engine.jaxprs.flat",
        "tf1.session.__init__",
        "__init__",
    }


def classes_of(path):
    """The names of the bases of each class, by its name."""
    found = re.findall(r"^class (\w+)(?:\((.*?)\))?:", path.read_text(), re.MULTILINE | re.DOTALL)
    return {name: [base.strip() for base in bases.split(",")] for name, bases in found}


def test_a_class_is_in_one_file():
    """A class with many bases of ours is one that was cut in pieces."""
    classes = {module: classes_of(path) for module, path in rooms.MODULES.items()}
    made = {name for found in classes.values() for name in found}
    assert len(made) > 300
    cut = {}
    for module, found in classes.items():
        for name, bases in found.items():
            if len(own := [base for base in bases if base in made]) > 2:
                cut[f"{module}.{name}"] = own
    assert not cut, f"these are cut in pieces: {cut}"


def test_a_public_name_is_in_one_place():
    found = {}
    for module in sorted(SURFACE):
        known = importlib.import_module(f"ipu_pipeline.{module.removesuffix('.__init__')}")
        for name in known.__all__:
            places = found.setdefault(name, {})
            places[module] = getattr(known, name)
            # `engine` has what everybody wants of the simulator, too.
            assert len(set(map(id, places.values()))) == 1
            assert len(places) == 1 or set(places) == {"engine.__init__", "engine.schedules.__init__"}
