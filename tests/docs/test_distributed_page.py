"""The page about several processes: its program, and what it says is survived, row by row held by tests."""

import re

import pytest

from tests.support import forked, pages
from tests.support.programs import ROOT, begin, environment

PAGE = (ROOT / "docs" / "distributed.md").read_text()

MEMORY = "test_memory_is_the_launchers_own_and_goes_with_it"
RESIZED = "test_a_job_goes_on_with_fewer_nodes_and_with_more_again"
# How a row begins -> the tests that show what it says.
ROWS = {
    "processes are killed or raise an error, or the coordinator is killed": [
        "test_killed_at_random_moments",
        "test_all_are_started_again_until_there_were_too_many_failures_of_one_cause",
        "test_the_coordinator_is_killed",
    ],
    "a process is stopped, or hangs": ["test_a_process_that_is_stopped"],
    "Ctrl-C, SIGTERM or SIGHUP to the launcher": [
        "test_signals_reach_all_processes_which_end_with_the_launcher",
        MEMORY,
    ],
    "the launcher of a single machine is killed": [MEMORY],
    "a node or its launcher is lost": ["test_nodes_are_lost_with_their_memory"],
    "two nodes are lost at once": [
        "test_what_is_not_complete_is_not_found",
        "test_an_estimator_goes_on_from_disk_if_memory_is_not_newer",
    ],
    "SIGTERM or SIGHUP to one of several launchers": [
        "test_a_node_that_is_preempted_saves_and_is_replaced"
    ],
    "no replacement within `--wait`, with `--shrink`": [RESIZED],
    "a launcher of the lost rank comes later": [RESIZED],
    "a launcher is stopped": [
        "test_a_lost_node_is_replaced",
        "test_a_launcher_that_gives_no_reports_is_silent",
        "test_the_leaders_own_node_is_not_lost",
    ],
    "Ctrl-C on one node": ["test_signals_to_the_launcher_of_one_node"],
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
    lines = output.splitlines()
    assert [line[:4] for line in lines] == ["[1] "] * 4
    assert_printed("".join(f"{line[4:]}\n" for line in lines))


def test_every_row_is_held_by_tests():
    (table,) = re.findall(r"^\| what happens .*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = table.splitlines()
    found = [next((known for known in ROWS if row.startswith(f"| {known}")), row) for row in rows]
    assert sorted(found) == sorted(ROWS)
    rooms = (ROOT / "tests" / name for name in ("processes", "checkpointing"))
    defined = set().union(*(pages.functions_of(path) for room in rooms for path in room.glob("*.py")))
    assert [name for names in ROWS.values() for name in names if name not in defined] == []
