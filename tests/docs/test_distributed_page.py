"""The page about several processes: its program, and what it says is survived, row by row held by tests."""

import re

import pytest

from tests.support import forked, pages
from tests.support.programs import ROOT, begin, environment

PAGE = (ROOT / "docs" / "distributed.md").read_text()

MEMORY = "test_memory_is_the_launchers_own_and_goes_with_it"
LOST = "test_nodes_are_lost_with_their_memory"
RESIZED = "test_a_job_goes_on_with_fewer_nodes_and_with_more_again"
# How a row begins -> the tests that show what it says.
ROWS = {
    "one or several processes are killed at once": ["test_killed_at_random_moments"],
    "the coordinator's program is killed": ["test_the_coordinator_is_killed"],
    "a process raises an error, or an operation fails": [
        "test_all_are_started_again_until_there_were_too_many_failures_of_one_cause"
    ],
    "a process is stopped, or hangs": ["test_a_process_that_is_stopped"],
    "Ctrl-C, SIGTERM or SIGHUP to the launcher": [
        "test_signals_reach_all_processes_which_end_with_the_launcher",
        MEMORY,
    ],
    "the launcher is killed": [MEMORY],
    "a node of several is lost with its memory": [LOST],
    "two nodes are lost at once": [
        "test_what_is_not_complete_is_not_found",
        "test_an_estimator_goes_on_from_disk_if_memory_is_not_newer",
    ],
    "its launcher is killed, or the machine is lost": [LOST],
    "its launcher gets SIGTERM or SIGHUP": ["test_a_node_that_is_preempted_saves_and_is_replaced"],
    "no launcher replaces it within `--wait`, with `--shrink`": [
        RESIZED,
        "test_a_node_with_a_replica_is_lost_and_comes_again",
    ],
    "a launcher of its rank comes later": [RESIZED],
    "Ctrl-C on it": ["test_signals_to_the_launcher_of_one_node"],
    "its launcher is stopped": [
        "test_a_lost_node_is_replaced",
        "test_a_launcher_that_gives_no_reports_is_silent",
        "test_the_leaders_own_node_is_not_lost",
    ],
}


((PROGRAM, PRINTED),) = [(code, text) for comment, code, text in pages.PROGRAM.findall(PAGE) if not comment]


def assert_printed(output):
    pages.assert_printed(output, PRINTED.splitlines(), {re.compile(r"0\.\d+"): 0.002}, re.compile(r"^$"))


def test_the_program_in_one_process(tmp_path):
    done = forked.run(PROGRAM, environment(as_tests=True), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_printed(done.stdout)


@pytest.mark.thorough
def test_the_program_in_two_processes(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    process = begin("-m", "ipu_pipeline", "launch", "-n", 2, "--restarts", 3, "train.py", folder=tmp_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = sorted(output.splitlines(), key=lambda line: line.startswith("[0]"))
    assert [line[:4] for line in lines] == ["[1] "] * 4 + ["[0] "]
    assert_printed("".join(f"{line[4:]}\n" for line in lines))


def test_every_row_is_held_by_tests():
    tables = re.findall(r"^\| what happens.*what it costs \|\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(tables) == 2
    found = [next((known for known in ROWS if row.startswith(f"| {known}")), row) for row in rows]
    assert sorted(found) == sorted(ROWS)
    rooms = (ROOT / "tests" / name for name in ("processes", "checkpointing"))
    defined = set().union(*(pages.functions_of(path) for room in rooms for path in room.glob("*.py")))
    assert [name for names in ROWS.values() for name in names if name not in defined] == []
