"""`ipu-pipeline doctor`."""

import importlib.util

import jax
import jaxlib
import pytest

from ipu_pipeline.command_line import doctor, main
from ipu_pipeline.processes import executable_cache


@pytest.fixture(autouse=True)
def _without_cache(monkeypatch):
    monkeypatch.delenv(executable_cache.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(executable_cache, "enable_executable_cache", lambda directory: None)


def lines_of(capsys, status=0):
    """The states and texts, by subject."""
    assert main.main(["doctor"]) == status
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {rest.split("  ")[0]: (state, rest.split("  ")[-1].strip()) for state, rest in rows}


def test_a_line_each(capsys):
    found = lines_of(capsys)
    assert list(found)[:6] == [
        "ipu_pipeline",
        "Python",
        "JAX",
        "devices",
        "cores",
        "compiled programs kept",
    ]
    assert {name: state for name, (state, _text) in found.items() if state != "ok"} == {
        "compiled programs kept": "note"
    }
    assert found["JAX"][1].startswith(f"{jax.__version__}, jaxlib {jaxlib.__version__}; tested with 0.9.0")
    assert found["poptorch"][1].startswith("torch 2.")
    assert "pillow" in found["MNIST of tensorflow-datasets"][1]


def test_what_is_missing_has_its_mend(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = lines_of(capsys)
    assert found["report pages"] == (
        "missing",
        "plotly not installed: pip install 'ipu_pipeline[reports]'",
    )
    assert found["custom operations in C++"][0] == "missing"


def test_jax_that_does_not_start_is_wrong(capsys, monkeypatch):
    def devices():
        raise RuntimeError("no backend\nand more")

    monkeypatch.setattr(jax, "devices", devices)
    assert lines_of(capsys, status=1)["devices"] == ("wrong", "RuntimeError: no backend")


def test_the_directory_of_compiled_programs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(executable_cache.CACHE_DIR_VARIABLE, str(tmp_path))
    (tmp_path / "entry").write_bytes(bytes(2048))
    assert lines_of(capsys)["compiled programs kept"] == ("ok", f"in {tmp_path}: 2 KiB")
    monkeypatch.undo()
    monkeypatch.setenv(executable_cache.CACHE_DIR_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    state, text = lines_of(capsys, status=1)["compiled programs kept"]
    assert state == "wrong"
    assert "cannot be used" in text


def test_another_jax_is_noted(capsys, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 99, 0))
    assert lines_of(capsys)["JAX"][0] == "note"
