"""The tutorial's notebooks: they are those of their pages, and print what these say."""

import html
import re
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
# Pages about programs with arguments, whose notebooks have sources of their own.
WITHOUT = {
    *(f"tutorial/{name}.md" for name in test_tutorial.WITHOUT_NOTEBOOK),
    "tutorial/poptorch/porting/README.md",
}


def test_each_notebook_is_that_of_its_page():
    """`python scripts/write_notebooks.py` writes them."""
    folder = write_notebooks.FOLDER
    assert {path.stem for path in folder.glob("*.ipynb")} == set(write_notebooks.PAGES)
    for name in write_notebooks.PAGES:
        assert (folder / f"{name}.ipynb").read_text() == write_notebooks.write(name), name


def test_a_page_with_something_to_run_has_a_notebook():
    for path in (ROOT / "tutorial").rglob("*.md"):
        languages = {fence.language for fence in pages.find_fences(path.read_text())}
        name = str(path.relative_to(ROOT))
        has_one = name in write_notebooks.PAGES.values() or name in WITHOUT
        assert has_one == bool(languages & {"python", "console"}), path


@pytest.mark.parametrize("name", write_notebooks.PAGES)
def test_cells_need_nothing_of_the_repository(name):
    """They are code that can be changed, and pictures are in the notebook itself."""
    title, install, *cells = write_notebooks.make_notebook(name).cells
    assert title.source.startswith("# ")
    assert all(line.startswith("# ") for line in install.source.splitlines())  # offline
    for cell in cells:
        if cell.cell_type == "code":
            assert not re.search(r"tutorial/|answers/|^[%!]|argparse|subprocess", cell.source, re.MULTILINE)
        else:
            assert "![" not in cell.source
            assert len(re.findall("<img ", cell.source)) == len(re.findall('src="data:image/', cell.source))


@pytest.mark.thorough
@pytest.mark.parametrize("name", write_notebooks.PAGES)
def test_what_cells_print(name, tmp_path, monkeypatch):
    """In Jupyter's kernel, as a reader runs them, in an empty folder."""
    for variable, value in environment(as_tests=True).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TQDM_DISABLE", "1")  # bars, which a reader sees
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # there need be no ipywidgets
    notebook = nbformat.read(write_notebooks.FOLDER / f"{name}.ipynb", 4)
    expected = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, outputs in zip(cells, expected, strict=True):
        shown = [output for output in cell.outputs if output.output_type != "stream"]
        assert [output.data["text/html"][:15] for output in shown] == ["<iframe srcdoc="] * len(shown)
        assert len(shown) == ("reports.capture" in cell.source)
        assert all("<title>a notebook<" in html.unescape(one.data["text/html"]) for one in shown)
        streams = [output for output in cell.outputs if output.output_type == "stream"]
        assert {output.name for output in streams} <= {"stdout"}, streams
        wanted = "".join(output.get("text", "") for output in outputs).splitlines()
        printed = "".join(output.text for output in streams)
        if wanted:
            pages.assert_printed(printed.replace("\r\n", "\n"), wanted, NUMBERS, test_tutorial.MASKED)
        else:
            assert printed == "", cell.source
