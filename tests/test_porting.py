"""docs/porting.md: its table is what the package is, name by name."""

import importlib.util
import warnings
from pathlib import Path

import pytest

import ipu_pipeline as ipu

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("porting", ROOT / "scripts" / "write_porting_page.py")
page = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(page)
ROWS = page.read_rows()


def find(name):
    """What stands under a dotted name of the package."""
    found = ipu
    for part in name.split("."):
        if isinstance(found, type) and found is ipu.config.IPUConfig:
            found = found()  # whose attributes are those of an object
        found = getattr(found, part)
    return found


def test_the_page_is_up_to_date():
    assert page.PAGE.read_text() == page.make_page(), "python scripts/write_porting_page.py"


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_name(row):
    status, name = row["status"], row["name"]
    assert status in ("same", "renamed", "no effect", "not there")
    if status == "same":
        assert row["here"] == name
        find(name)
    elif status == "renamed":
        find(row["here"])
    elif status == "no effect":
        with warnings.catch_warnings(action="ignore"):
            find(name)
        assert row["why"]
    else:
        assert row["why"]
        if not name.startswith("tf."):
            with pytest.raises(AttributeError):
                find(name)


def test_names_stand_there_once():
    names = [row["name"] for row in ROWS]
    assert len(names) == len(set(names))


def test_all_public_modules_are_in_it():
    """What the package has besides Graphcore's names is ours."""
    ours = {"assign", "errors", "load_program", "next_rng_key", "ops", "set_num_devices", "functional_ops"}
    ours |= {"distributed", "reports"}
    known = {row["here"].split(".")[0] for row in ROWS if row["status"] in ("same", "renamed")}
    assert {name for name in ipu.__all__ if not name.startswith("__")} - known == ours
