"""`ipu-pipeline run`."""

import sys

import pytest

import ipu_pipeline
from ipu_pipeline.command_line import main
from tests.support import forked
from tests.support.programs import environment, start

PROGRAM = ("-m", "ipu_pipeline", "run")
SCRIPT = """
import atexit, importlib.metadata, importlib.util, multiprocessing, os, pickle, sys
import poptorch, poptorch.optim
import popart, popdist, popdist.poptorch
from poptorch.enums import OutputMode
import ipu_pipeline.poptorch as ours
import beside

class Kept:
    pass

def show():
    import poptorch
    print("child", poptorch.__name__)

if __name__ == "__main__":
    assert poptorch is ours and poptorch.optim is ours.optim and OutputMode is ours.OutputMode
    assert poptorch.optim.__name__ == poptorch.optim.__spec__.name == "ipu_pipeline.poptorch.optim"
    names = ("optim.optimizers", "optin", "_poplar_executor")
    found = [importlib.util.find_spec(f"poptorch.{name}") for name in names]
    assert [spec is not None for spec in found] == [True, False, True]
    assert found[2].loader.load_module().PoplarExecutor is poptorch._poplar_executor.PoplarExecutor
    assert importlib.metadata.version("poptorch") == "3.3.0"
    assert (popart.SyntheticDataMode.RandomNormal, int(popart.PatternsLevel.All)) == (2, 3)
    assert isinstance(popdist.poptorch.Options(), ours.Options) and not popdist.isPopdistEnvSet()
    assert (popdist.getInstanceIndex(), popdist.getNumTotalReplicas()) == (0, 1)
    print(sys.argv[1:], os.path.basename(__file__), beside.NAME)
    sys.stdout.flush()
    if sys.argv[1] == "child":
        process = multiprocessing.get_context("spawn").Process(target=show)
        process.start()
        process.join()
    atexit.register(lambda: print(len(pickle.dumps(Kept())) > 0))
    sys.exit(3)
"""
RUN = """
import sys
from ipu_pipeline.command_line.main import main
sys.exit(main(["run", "script.py", "alone", "--epochs", "3", "-m", "--"]))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    return tmp_path


def test_a_script_imports_poptorch(script):
    done = forked.run(RUN, environment(as_tests=True), script)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["['alone', '--epochs', '3', '-m', '--'] script.py beside", "True"]


@pytest.mark.thorough
def test_a_module_that_starts_a_process(script):
    done = start(*PROGRAM, "-m", "script", "child", folder=script)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["['child'] script.py beside", "child ipu_pipeline.poptorch", "True"]


@pytest.fixture
def changes_nothing(monkeypatch):
    """What a script that runs in this process changes of it is as before afterwards."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_what_is_not_there(changes_nothing, capsys):
    assert main.main(["run", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "ipu-pipeline run: there is no file 'nowhere.py'.\n"
    assert main.main(["run", "-m", "no.where"]) == 2
    assert capsys.readouterr().err == "ipu-pipeline run: there is no module 'no.where'.\n"


def test_an_error_of_the_script_is_shown_as_it_is(tmp_path):
    """From the script's first line on, and only what happened in it."""
    (tmp_path / "script.py").write_text("try:\n    import horovod\nfinally:\n    raise ValueError('mine')")
    done = start(*PROGRAM, tmp_path / "script.py")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: mine")
    files = {line.split('"')[1] for line in lines if line.startswith('  File "')}
    assert files == {str(tmp_path / "script.py")}


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        (
            "class Strict:\n"
            "    def __getattribute__(self, name):\n"
            "        if name == '__name__': raise RuntimeError('no names')\n"
            "        raise AttributeError(name, name=name, obj=self)\n"
            "Strict().missing",
            "AttributeError: missing",
        ),
    ],
)
def test_an_error_stays_what_it_is(tmp_path, line, last):
    (tmp_path / "script.py").write_text(line)
    lines = start(*PROGRAM, tmp_path / "script.py").stderr.splitlines()
    assert lines[-1] == last
    assert {text.split('"')[1] for text in lines if 'File "' in text} == {str(tmp_path / "script.py")}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import horovod.torch as hvd", "horovod, which is not here: leave it out"),
        ("from popart import Builder", "popart, which is not here: of popart, only enumerations are"),
        ("import popart; popart.Builder()", "popart, which is not here: of popart, only enumerations are"),
    ],
)
def test_libraries_that_are_not_there(changes_nothing, tmp_path, line, text):
    (tmp_path / "script.py").write_text(f"import os\n{line}")
    with pytest.raises((ImportError, AttributeError)) as caught:
        main.main(["run", str(tmp_path / "script.py")])
    (note,) = caught.value.__notes__
    assert note.startswith(f"Line 2 of {tmp_path}/script.py needs {text}")


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert "run a script that imports poptorch" in capsys.readouterr().out
    assert main.main([]) == 0
    assert "Create, run, profile and inspect pipelines." in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ipu_pipeline {ipu_pipeline.__version__}\n")
    with pytest.raises(SystemExit):
        main.main(["trian"])
    assert "invalid choice: 'trian' (choose from " in capsys.readouterr().err
    for name in main._COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main.main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: ipu-pipeline {name} " in capsys.readouterr().out


def test_modules_of_packages(changes_nothing, tmp_path, capsys, monkeypatch):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "__init__.py").write_text("NAME = 5")
    (tmp_path / "good" / "__main__.py").write_text(
        "import sys\nfrom . import NAME\nprint(NAME, sys.argv[1:])"
    )
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "__init__.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    assert main.main(["run", "-m", "good", "--x"]) == 0
    assert capsys.readouterr().out == "5 ['--x']\n"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main.main(["run", "-m", "bad.inner"])
