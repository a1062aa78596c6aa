"""docs/comparison.md and its benchmark, without running a check: the table, and what a check relies on."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import features
from benchmarks.features import run, values

ROOT = Path(run.__file__).parent
PAGE = (ROOT.parents[1] / "docs" / "comparison.md").read_text()


def test_each_library_has_a_check_of_each_feature():
    for library in run.LIBRARIES.values():
        tree = ast.parse((ROOT / f"{library.module}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        checks = {node.name for node in functions if ast.unparse(node.returns) == "Verdict"}
        assert checks == set(run.FEATURES), library


def test_the_page_has_a_cell_of_each_check_and_says_what_was_run():
    cells, versions = run.read_cells(PAGE), run.read_versions(PAGE)
    assert run.write_table(PAGE, cells, versions) == PAGE
    for library in run.LIBRARIES:
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*, \d{4}-\d\d-\d\d", versions[library]), versions
        for check in run.FEATURES:
            assert cells[library][check].startswith(("**yes**: ", "**with** ", "**no**: "))


def test_a_row_counts_what_works_as_it_is():
    cells = {
        "engine": {"hang": "**yes**: a", "nan_origin": "**yes**: b"},
        "torch": {"hang": "**with** c", "nan_origin": "**yes**: d"},
    }
    row = run.count("torch", cells)
    assert (row.ours, row.other, row.value) == ("2", "1", 2.0)


def test_a_run_writes_its_cells_and_leaves_the_others(tmp_path, monkeypatch, capsys):
    """Columns of what is not installed stay, a bar does not end its cell, a failure writes nothing."""
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    notes = {"engine": "a | b", "torch": "<c>"}

    def ask(_python, library, *arguments):
        if not arguments:
            return json.dumps({"version": "9.9.9"} if library in notes else {})
        if notes[library] is None:
            raise RuntimeError(library)
        return "verdict " + json.dumps({"kind": "yes", "note": notes[library]}) + "\n"

    monkeypatch.setattr(run, "ask", ask)
    arguments = ["--only", "hang", "--write", str(path)]
    run.main(arguments)
    written = path.read_text()
    cells, old = run.read_cells(written), run.read_cells(PAGE)
    assert (cells["engine"]["hang"], cells["torch"]["hang"]) == ("**yes**: a \\| b", "**yes**: &lt;c>")
    assert cells["spectrax"] == old["spectrax"]
    assert run.read_versions(written)["spectrax"] == run.read_versions(PAGE)["spectrax"]
    notes["torch"] = None
    with pytest.raises(SystemExit, match="page is left as it was"):
        run.main(arguments)
    assert path.read_text() == written
    assert "features" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["--python", "numpy=python"])


def test_a_check_fails_where_what_it_says_is_no_longer_so():
    assert values.said_by(lambda: int("x"), ValueError).startswith("ValueError: invalid literal")
    with pytest.raises(AssertionError, match="write the check anew"):
        values.said_by(lambda: int("1"), ValueError)
    with pytest.raises(AssertionError, match="array 0 differs"):
        values.check_close([np.ones(3)], [np.ones(3) * (1 + 2e-5)])
    values.check_close([np.ones(3)], [np.ones(3) * (1 + 2e-6)])
    with pytest.raises(ValueError, match="kind must be"):
        values.Verdict("works", "")
    assert values.names_in(features, "^(said_by|no_such_name)$") == ["said_by"]
