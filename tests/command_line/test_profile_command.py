"""`ipu-pipeline profile` and scripts/profile.sh."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from ipu_pipeline.command_line.main import main
from ipu_pipeline.reports.profile import EventKind, read_profile
from tests.reports.test_capture import COUNT
from tests.support.programs import ROOT, environment

SCRIPT = ROOT / "scripts" / "profile.sh"
PROGRAM = """
import argparse
import ipu_pipeline as ipu
from tests.support import front
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--status", type=int, default=0)
args = parser.parse_args()
model = front.Model(repeat_count=args.steps)
with front.session_of(model) as session:
    session.run(model.program, {model.rate: 0.01})
    print("losses", len(session.run(model.outfeed.dequeue())))
raise SystemExit(args.status)
"""


def run(*command, cwd):
    known = {**environment(), "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=known)


def read(directory):
    return read_profile((directory / "profile.json").read_text())


@pytest.mark.parametrize("arguments", [(), ("nothing.py",)])
def test_what_cannot_be_profiled(tmp_path, arguments):
    done = run(SCRIPT, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "usage" in done.stderr or "there is no" in done.stderr
    assert not list(tmp_path.iterdir())


def test_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--help"])
    assert ended.value.code == 0
    flags = "--batches-to-accumulate 16 --repeat-count 1 --steps 1"
    text = " ".join(capsys.readouterr().out.split())
    assert flags in text
    assert "--synthetic" in text


@pytest.mark.parametrize(
    ("given", "variables", "seen"),
    [
        ([], {}, "None None"),
        (["--synthetic"], {}, "zeros None"),
        (["--synthetic"], {"TF_POPLAR_FLAGS": "--use_synthetic_data"}, " --use_synthetic_data"),
    ],
)
def test_which_data(tmp_path, monkeypatch, capfd, given, variables, seen):
    """It ran on synthetic data unasked, on which a user's program is not what it is."""
    for name in ("IPU_PIPELINE_SYNTHETIC_DATA", "TF_POPLAR_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    names = "'IPU_PIPELINE_SYNTHETIC_DATA', 'TF_POPLAR_FLAGS'"
    (tmp_path / "hello.py").write_text(f"import os; print('seen', *map(os.environ.get, ({names})))")
    assert main(["profile", *given, "hello.py"]) == 1
    told = capfd.readouterr()
    assert f"seen {seen}" in told.out.splitlines()
    assert ("Running hello.py on synthetic data" in told.out) == bool(given)


def test_its_report_is_opened(tmp_path, monkeypatch, capfd):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address))
    monkeypatch.chdir(tmp_path)
    written = "write_reports(Path('profile_hello'), {'report.html': '', 'profile.json': ''})"
    (tmp_path / "hello.py").write_text(
        f"from pathlib import Path\nfrom ipu_pipeline.reports.report_files import write_reports\n{written}"
    )
    assert main(["profile", "--open", "hello.py"]) == 0
    assert opened == [(tmp_path / "profile_hello" / "report.html").as_uri()]
    assert capfd.readouterr().err.startswith(f"There is no browser to open {opened[0]}: ")


@pytest.mark.thorough
def test_a_users_program(tmp_path):
    elsewhere = tmp_path / "a folder with spaces"
    elsewhere.mkdir()
    program = elsewhere / "my program.py"
    program.write_text(PROGRAM)
    done = run(SCRIPT, program, "--status", "3", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "--steps 1 --status 3\n" in done.stdout
    assert "--repeat-count" not in done.stdout
    assert "losses 3" in done.stdout
    directory = tmp_path / "profile_my program"
    profile = read(directory)
    steps = {event.step for event in profile.events if event.kind is EventKind.FORWARD}
    assert steps == {0}
    # What is there of an earlier run goes; what is somebody's own stays.
    (directory / "notes.txt").write_text("mine")
    os.replace(directory / "trace.json", tmp_path / "kept.json")
    (directory / "trace.json").symlink_to(tmp_path / "kept.json")
    done = run(SCRIPT, program, cwd=tmp_path)
    assert (done.returncode, "'trace.json' that its manifest.json" in done.stderr) == (2, True)
    assert "Removed" in done.stdout
    (directory / "trace.json").unlink()
    done = run(SCRIPT, "--synthetic", program, "--steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--steps=2 on synthetic data\n" in done.stdout
    assert "losses 6" in done.stdout
    assert {event.step for event in read(directory).events if event.kind is EventKind.FORWARD} == {0, 1}
    assert (directory / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "kept.json").read_text())["traceEvents"]


@pytest.mark.thorough
def test_a_program_without_a_pipeline(tmp_path):
    (tmp_path / "hello.py").write_text("print('hello')")
    done = run(SCRIPT, "hello.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ran no pipeline or loop" in done.stderr
    assert not (tmp_path / "profile_hello").exists()


@pytest.mark.thorough
def test_a_program_that_calls_the_engine(tmp_path):
    """`ipu-pipeline profile` said that it ran no pipeline or loop."""
    program = tmp_path / "plain.py"
    program.write_text(
        "from ipu_pipeline import set_num_devices\nset_num_devices(2)\n"
        "from tests.reports.test_capture import make_pipeline, run\n"
        "run(*make_pipeline((0, 1), num_stages=2))\n"
    )
    done = run(SCRIPT, program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"report.html", "trace.json"} <= {path.name for path in (tmp_path / "profile_plain").iterdir()}
    profile = read(tmp_path / "profile_plain")
    kinds = Counter(event.kind for event in profile.events)
    assert (kinds[EventKind.FORWARD], kinds[EventKind.UPDATE]) == (2 * COUNT * 2, 4)
