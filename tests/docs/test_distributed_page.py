"""The page about several processes: its programs, and what it says is survived, held by tests."""

import re
import tempfile

import pytest

from tests.support import forked, pages
from tests.support.programs import ROOT, begin, environment, start

PAGE = (ROOT / "docs" / "distributed.md").read_text()

MEMORY = "test_memory_is_the_launchers_own_and_goes_with_it"
ON_RAY = "test_processes_are_killed_and_stopped"
LOST = "test_a_node_is_lost_with_its_memory_and_another_one_comes"
DRIVER = "test_a_driver_is_killed_and_another_one_interrupted"
# How a row begins -> the tests that show what it says.
ROWS = {
    "a process is killed or raises an error": [
        "test_killed_at_random_moments",
        "test_all_are_started_again_until_there_were_too_many_failures_of_one_cause",
        "test_the_coordinator_is_killed",
        ON_RAY,
    ],
    "a process is stopped, or hangs": ["test_a_process_that_is_stopped", ON_RAY],
    "a node is lost": [LOST],
    "a node comes": [LOST],
    "nodes are lost at once": [
        "test_what_is_not_complete_is_not_found",
        "test_an_estimator_goes_on_from_disk_if_memory_is_not_newer",
        ON_RAY,
    ],
    "Ctrl-C": ["test_signals_reach_all_processes_which_end_with_the_launcher", MEMORY, DRIVER],
    "SIGTERM": ["test_signals_reach_all_processes_which_end_with_the_launcher", LOST],
    "the launcher, or the program that calls `train`, is killed": [MEMORY, DRIVER],
}


PROGRAMS = [(code, text) for comment, code, text in pages.PROGRAM.findall(PAGE) if not comment]
(JAX, ESTIMATOR, (ON_RAY_PROGRAM, _nothing)) = PROGRAMS
IN_TURN = pytest.mark.parametrize(
    "program", [JAX, pytest.param(ESTIMATOR, marks=pytest.mark.thorough)], ids=["jax", "tf1"]
)


def assert_printed(output, program):
    numbers = {re.compile(r"0\.\d+"): 0.002}
    pages.assert_printed(output, program[1].splitlines(), numbers, re.compile(r"^$"))


@IN_TURN
def test_the_programs_in_one_process(program, tmp_path):
    done = forked.run(program[0], environment(as_tests=True), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_printed(done.stdout, program)


@pytest.mark.thorough
@IN_TURN
def test_the_programs_in_two_processes(program, tmp_path):
    (tmp_path / "train.py").write_text(program[0])
    process = begin("-m", "ipu_pipeline", "launch", "-n", 2, "--restarts", 3, "train.py", folder=tmp_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert_printed(re.sub(r"^\[\d\] ", "", output, flags=re.MULTILINE), program)


@pytest.mark.thorough
def test_the_program_on_ray(tmp_path):
    (tmp_path / "train.py").write_text(JAX[0])
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # of Ray's sockets: short
        variables = {"RAY_TMPDIR": folder, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"}
        done = start("-c", ON_RAY_PROGRAM, folder=tmp_path, as_tests=True, **variables)
    assert done.returncode == 0, done.stderr
    lines = [
        re.fullmatch(r".*RayTrainWorker pid=\d+\)\S* (\d+ 0\.\d+)", line)
        for line in done.stdout.splitlines()
    ]
    assert_printed("".join(f"{line[1]}\n" for line in lines if line), JAX)


def test_every_row_is_held_by_tests():
    (table,) = re.findall(r"^\| what happens .*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = table.splitlines()
    found = [next((known for known in ROWS if row.startswith(f"| {known}")), row) for row in rows]
    assert sorted(found) == sorted(ROWS)
    rooms = (ROOT / "tests" / name for name in ("processes", "checkpointing"))
    defined = set().union(*(pages.functions_of(path) for room in rooms for path in room.glob("*.py")))
    assert [name for names in ROWS.values() for name in names if name not in defined] == []
