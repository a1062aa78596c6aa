"""The tutorial's notebooks: they are those of its pages, and print what these say."""

import re
import shutil
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs import test_poptorch_tutorial, test_tutorial
from tests.support import pages
from tests.support.programs import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))
import write_notebooks  # scripts are no package

NUMBERS = {**test_poptorch_tutorial.NUMBERS, **test_tutorial.NUMBERS}
MASKED = re.compile(
    "|".join(
        [
            *(pattern.pattern for pattern in (test_tutorial.MASKED, test_poptorch_tutorial.SPEED)),
            r"(?<=Recognized )\w+: .*|^(?:Overwriting|Writing) (?=\w+\.py$)",
        ]
    ),
    re.MULTILINE,
)


def test_each_notebook_is_that_of_its_page():
    """`python scripts/write_notebooks.py` writes them."""
    folder = write_notebooks.FOLDER
    assert {path.stem for path in folder.glob("*.ipynb")} == set(write_notebooks.PAGES)
    for name in write_notebooks.PAGES:
        assert (folder / f"{name}.ipynb").read_text() == write_notebooks.write(name), name


def test_a_page_with_something_to_run_has_a_notebook():
    for path in (ROOT / "tutorial").rglob("*.md"):
        languages = {fence.language for fence in pages.find_fences(path.read_text())}
        has_one = str(path.relative_to(ROOT)) in write_notebooks.PAGES.values()
        assert has_one == bool(languages & {"python", "console"}), path


# They train longest. test_poptorch_pages runs what their pages have.
LONGEST = {"poptorch_first_model", "poptorch_pipeline", "poptorch_porting"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(write_notebooks.PAGES.keys() - LONGEST))
def test_what_cells_print(name, tmp_path, monkeypatch):
    """In Jupyter's kernel, as a reader runs them, in a folder beside the files that pages name."""
    folder = tmp_path / "tutorial" / "notebooks"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "tutorial/poptorch", tmp_path / "tutorial/poptorch")
    for variable, value in environment(as_tests=True).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TQDM_DISABLE", "1")  # bars, which a reader sees
    notebook = nbformat.read(write_notebooks.FOLDER / f"{name}.ipynb", 4)
    expected = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, outputs in zip(cells, expected, strict=True):
        assert {output.get("name") for output in cell.outputs} <= {"stdout"}, cell.outputs
        wanted = "".join(output.text for output in outputs).splitlines()
        printed = "".join(output.text for output in cell.outputs)
        if wanted:
            pages.assert_printed(printed.replace("\r\n", "\n"), wanted, NUMBERS, MASKED)
        else:
            assert printed == "", cell.source
