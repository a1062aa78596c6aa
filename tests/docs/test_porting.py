"""docs/porting.md: its tables are what the package is, name by name."""

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import ipu_pipeline as ipu
from ipu_pipeline.graphcore import table

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("porting", ROOT / "scripts" / "write_porting_page.py")
page = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(page)
ROWS = [*table.read_rows().values(), *page.read_settings()]
STATUSES = ("same", "renamed", "no effect", "not there")


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


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_name(row):
    """What is not there is in tests/graphcore/test_sdk_names.py."""
    assert row.status in STATUSES
    assert bool(row.here) == (row.status != "not there")
    if row.status == "renamed":
        assert row.here != row.name
    if row.status in ("no effect", "not there"):
        assert row.why
    if row.status == "same":
        assert row.here == row.name
    if row.here and "*" not in row.name:
        with warnings.catch_warnings(action="ignore"):
            find(row.here if row.status == "renamed" else row.name)


def test_names_stand_there_once():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


def test_all_public_modules_are_in_it():
    """What the package has besides Graphcore's names is ours."""
    ours = {"errors", "load_program", "next_rng_key", "ops", "set_num_devices", "reports"}
    known = {row.here.split(".")[0] for row in ROWS if row.status in ("same", "renamed")}
    assert {name for name in ipu.__all__ if not name.startswith("__")} - known == ours


def test_texts_are_sentences_and_code_keeps_its_case():
    for row in ROWS:
        assert row.why == "" or row.why.endswith("."), row
        assert not re.match(r"[a-z]", row.why.removeprefix("docs/pipeline")), row
        assert row.why.count("`") % 2 == 0, row
        words = re.sub(r"`[^`]*`|docs/\w+\.md", "", row.why)
        assert not re.search(r"\w\(|[a-z]\.[a-z]{2}|\w_\w", words), row


def test_sentences_of_what_the_package_says():
    assert page.as_sentence("optax.sgd(rate) does so") == "`optax.sgd(rate)` does so."
    assert (
        page.as_sentence("infeeds fetch; IPUInfeedQueue says it")
        == "Infeeds fetch; `IPUInfeedQueue` says it."
    )


def test_the_error_that_the_page_shows():
    with pytest.raises(ModuleNotFoundError) as error:
        from ipu_pipeline.scopes import stochastic_rounding  # noqa: F401
    shown = " ".join(page.PAGE.read_text().split())
    assert (
        f">>> from ipu_pipeline.scopes import stochastic_rounding ModuleNotFoundError: {error.value} ```"
        in shown
    )


def test_several_processes_are_told_as_docs_distributed_has_them():
    row = table.find_row("ipu_multi_worker_strategy", "IPUMultiWorkerStrategyV1")
    assert "`distributed.initialize` joins the processes" in row.why
    assert "docs/distributed.md" in row.why
    assert callable(ipu.distributed.initialize)
