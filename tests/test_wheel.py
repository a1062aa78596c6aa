"""The package as a wheel: everything is in it, and it works where there is no repository."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from tests.docs.test_readme import assert_is_what_the_example_prints, example
from tests.support.programs import ROOT

NEEDED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*command, **options):
    """What a process prints that has nothing of this one's environment that matters to Python or JAX."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON", "IPU_"))}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=kept, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since setuptools leaves files where it builds."""
    source = tmp_path_factory.mktemp("source") / "copy"
    shutil.copytree(
        ROOT / "ipu_pipeline", source / "ipu_pipeline", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in NEEDED:
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", target, source)
    (path,) = target.iterdir()
    return path


@pytest.mark.thorough
def test_the_whole_package_is_in_it_and_nothing_else(wheel):
    files = [path for path in (ROOT / "ipu_pipeline").rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}
    assert expected >= {"ipu_pipeline/py.typed", "ipu_pipeline/data/digits.npz"}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


@pytest.fixture
def environment(tmp_path):
    """An empty one. It becomes large, and pytest would keep it."""
    path = tmp_path / "environment"
    venv.create(path, with_pip=False)
    yield path
    shutil.rmtree(path)


@pytest.mark.thorough
def test_the_readme_s_example_in_an_empty_environment(wheel, environment, tmp_path):
    """With the versions of this environment, which pip has at hand."""
    folder = tmp_path / "folder"
    folder.mkdir()
    python = environment / "bin" / "python"
    known = tmp_path / "known.txt"
    frozen = pip("freeze", "--exclude-editable").splitlines()
    known.write_text("\n".join(line for line in frozen if "==" in line))
    pip("--python", python, "install", "--quiet", "--no-compile", "--constraint", known, wheel)
    code = example() + "\nimport ipu_pipeline\nprint(ipu_pipeline.__file__)\n"
    *printed, path = run(python, "-W", "error", "-c", code, cwd=folder, timeout=300).splitlines()
    assert path.startswith(str(environment))
    assert_is_what_the_example_prints("".join(f"{line}\n" for line in printed))
    assert [path.name for path in folder.iterdir()] == ["cache"]
