"""`ipu-pipeline new`: the project that it makes trains, passes its test, and has a report."""

import re
from pathlib import Path

import pytest

from ipu_pipeline.command_line import main
from tests.support import forked
from tests.support.programs import environment


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["new", "digits"]) == 0
    assert capsys.readouterr().out == "Created digits. Next:\n  cd digits\n  python train.py\n"
    return tmp_path / "digits"


def test_its_files(project):
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "test_train.py", "train.py"]
    assert [path.name for path in project.parent.iterdir()] == ["digits"]
    readme = (project / "README.md").read_text()
    assert readme.startswith("# digits\n")
    assert "$" not in readme


_TRAIN_AND_TEST = """
import sys
sys.path.insert(0, "")
sys.argv = ["train.py"]
import train
train.main()
import test_train
test_train.test_a_step_equals_that_of_one_device()
"""


@pytest.mark.thorough
def test_it_trains_and_passes_its_test(project):
    trained = forked.run(_TRAIN_AND_TEST, environment(as_tests=True), project)
    assert trained.returncode == 0, trained.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", trained.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < 0.1 * losses[0]
    (accuracy,) = re.findall(r"^accuracy: (\S+)%$", trained.stdout, re.MULTILINE)
    assert float(accuracy) > 90


def test_what_is_there_is_left(project, capsys):
    before = (project / "train.py").stat()
    assert main.main(["new", "digits"]) == 2
    assert "'digits' exists already; give another name." in capsys.readouterr().err
    assert main.main(["new", "nowhere/digits"]) == 2
    assert "there is no folder 'nowhere'." in capsys.readouterr().err
    assert (project / "train.py").stat() == before


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    def fails(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", fails)
    assert main.main(["new", str(tmp_path / "digits")]) == 2
    assert "cannot be created: Permission denied." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_leaves_nothing(tmp_path, monkeypatch):
    write, written = Path.write_text, []

    def interrupted(path, *args, **options):
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main.main(["new", str(tmp_path / "digits")])
    assert list(tmp_path.iterdir()) == []
