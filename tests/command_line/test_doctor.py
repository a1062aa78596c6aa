"""`ipu-pipeline doctor`."""

import importlib.metadata
import os
import re

import jax
import jaxlib
import pytest

from ipu_pipeline.command_line import main, setup_commands
from ipu_pipeline.processes import executable_cache
from tests.support.programs import ROOT, start


@pytest.fixture(autouse=True)
def _without_cache(monkeypatch):
    monkeypatch.delenv(executable_cache.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the command does
    monkeypatch.setattr(executable_cache, "enable_executable_cache", lambda directory: None)


def lines_of(capsys, status=0):
    """The states and texts, by subject."""
    assert main.main(["doctor"]) == status
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {rest.split("  ")[0]: (state, rest.split("  ")[-1].strip()) for state, rest in rows}


def test_a_line_each(capsys):
    found = lines_of(capsys)
    names = ["ipu_pipeline", "Python", "JAX", "devices", "cores", "compiled programs kept"]
    assert list(found)[:6] == names
    others = {name: state for name, (state, _text) in found.items() if state != "ok"}
    assert others == {"compiled programs kept": "note"}
    assert found["JAX"][1].startswith(f"{jax.__version__}, jaxlib {jaxlib.__version__}; tested with 0.9.0")
    assert found["poptorch"][1].startswith("torch 2.")
    assert "pillow" in found["MNIST of tensorflow-datasets"][1]


def test_what_is_missing_has_its_mend(capsys, monkeypatch, tmp_path):
    """Also where a folder here has the name of a package."""
    found = importlib.metadata.packages_distributions()
    del found["plotly"], found["torch"], found["safetensors"]
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: found)
    monkeypatch.setattr(setup_commands.shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plotly").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    lines = lines_of(capsys)
    mend = "pip install 'ipu_pipeline[reports]'"
    assert lines["report pages"] == ("missing", f"plotly is not installed: {mend}")
    assert lines["poptorch"][1].startswith("torch and safetensors are not installed: ")
    assert lines["custom operations in C++"][0] == "missing"


def test_a_broken_jax_is_wrong(tmp_path):
    """Nothing that imports it is asked."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('a library is missing')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = start("-m", "ipu_pipeline", "doctor", folder=tmp_path, as_tests=True, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    wrong = r"^  wrong +JAX +\S+ jaxlib \S+: ImportError: a library is missing$"
    assert re.search(wrong, done.stdout, re.M)
    assert "devices" not in done.stdout
    assert re.search(r"^  ok +poptorch ", done.stdout, re.M)


def test_jax_that_does_not_start_is_wrong(capsys, monkeypatch):
    def devices():
        raise RuntimeError("no backend\nand more")

    monkeypatch.setattr(jax, "devices", devices)
    assert lines_of(capsys, status=1)["devices"] == ("wrong", "RuntimeError: no backend")


def test_the_directory_of_compiled_programs(capsys, monkeypatch, tmp_path):
    kept = tmp_path / "kept"
    monkeypatch.setenv(executable_cache.CACHE_DIR_VARIABLE, str(kept))
    found = lines_of(capsys)["compiled programs kept"]
    assert found == ("ok", f"in {kept}, which the first program makes")
    assert not kept.exists()
    kept.mkdir(mode=0o700)
    (kept / "entry").write_bytes(bytes(2048))
    (kept / "removed").symlink_to("nowhere")
    assert lines_of(capsys)["compiled programs kept"] == ("ok", f"in {kept}: 2 KiB")
    monkeypatch.undo()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv(executable_cache.CACHE_DIR_VARIABLE, str(kept))
    kept.chmod(0o777)
    state, text = lines_of(capsys, status=1)["compiled programs kept"]
    assert state == "wrong"
    assert "cannot be used" in text


def test_another_jax_is_noted(capsys, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    assert lines_of(capsys)["JAX"][0] == "note"
