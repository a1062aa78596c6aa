"""What each test costs and reaches: processor seconds, and arcs of the package that no other test reaches.

    python scripts/measure_tests.py                    # `make test`'s tests; half an hour on two cores
    python scripts/measure_tests.py --thorough --no-arcs
    python scripts/measure_tests.py tests/queues       # one room

An arc is a pair of lines of a function that ran one after the other, as coverage.py counts branches. What
processes that a test starts reach and take counts for the test, unless they are killed. Writes a line for
each test to build/tests/tests.jsonl and, with arcs, their numbers to build/tests/arcs.npz; prints tables of
the rooms, the dearest tests, and those without an arc of their own. These are candidates to go, not more: a
fact may be theirs alone.
"""

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ipu_pipeline"
DIRECTORY_VARIABLE = "MEASURE_TESTS_DIRECTORY"
ARCS_VARIABLE = "MEASURE_TESTS_ARCS"
Arc = tuple[int, int]
Test = dict[str, Any]  # a line of tests.jsonl, and its arcs
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    options, rest = parse()
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {
            DIRECTORY_VARIABLE: directory,
            ARCS_VARIABLE: str(int(options.arcs)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1",
        }
        marks = "thorough and not soak" if options.thorough else "not thorough and not soak"
        command = [sys.executable, "-m", "pytest", "-p", "measure_tests", "-p", "no:randomly", "-m", marks]
        command += ["--dist", "worksteal", "-n", str(options.workers), *rest]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        tests = read(Path(directory))
    write(tests, options.out, options.arcs)
    print_tables(tests, options.arcs)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--thorough", action="store_true", help="the tests of `make thorough`")
    parser.add_argument(
        "--no-arcs", dest="arcs", action="store_false", help="seconds alone, a quarter faster"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "tests", help="where the figures go")
    return parser.parse_known_args()


# The plugin, in each process that runs tests.


class Recorder:
    """Writes a line for each test of this process."""

    def __init__(self, directory: Path, arcs: bool) -> None:
        self._file = open(directory / f"{os.getpid()}.jsonl", "w")  # noqa: SIM115  # until the process ends
        self._tracer = Tracer(Path(tempfile.mkdtemp(dir=directory))) if arcs else None
        self._bodies = {}

    def run(self, item: "pytest.Item") -> Iterator[None]:
        """Records a test, which runs where this yields."""
        if self._tracer is not None:
            self._tracer.take()  # of what ran between two tests
        cpu, begin = processor_seconds(), time.monotonic()
        yield
        record = {
            "id": item.nodeid,
            "cpu": round(processor_seconds() - cpu, 3),
            "wall": round(time.monotonic() - begin, 3),
            "thorough": item.get_closest_marker("thorough") is not None,
        }
        if self._tracer is not None:
            record["arcs"] = {
                str(Path(file).relative_to(ROOT)): sorted(of_functions)
                for file, arcs in self._tracer.take().items()
                if (of_functions := self._of_functions(file, arcs))
            }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _of_functions(self, file: str, arcs: set[Arc]) -> set[Arc]:
        """Without a module's own lines, which run at its import, in whichever test is the first."""
        if file not in self._bodies:
            self._bodies[file] = function_lines(Path(file).read_text())
        lines = self._bodies[file]
        return {arc for arc in arcs if abs(arc[0]) in lines or abs(arc[1]) in lines}


class Tracer:
    """coverage.py in this process and in those that it starts, emptied after each test."""

    def __init__(self, directory: Path) -> None:
        import coverage

        self._directory = directory
        config = directory / "coveragerc"
        config.write_text(
            f"[run]\nbranch = true\nparallel = true\ndata_file = {directory}/data\n"
            f"include = {PACKAGE}/*\npatch = fork, _exit\ncore = ctrace\n"
            "disable_warnings = no-data-collected, module-not-imported, couldnt-parse, trace-changed\n"
        )
        self._coverage = coverage.Coverage(config_file=str(config), data_file=None)
        self._coverage.start()
        os.environ["COVERAGE_PROCESS_START"] = str(config)

    def take(self) -> dict[str, set[Arc]]:
        """File -> arcs, since the last time."""
        from coverage import CoverageData

        data = self._coverage.get_data()
        found = {file: set(data.arcs(file) or ()) for file in data.measured_files()}
        data.erase()
        for path in self._directory.glob("data.*"):
            of_child = CoverageData(str(path))
            try:
                of_child.read()
                for file in of_child.measured_files():
                    found.setdefault(file, set()).update(of_child.arcs(file) or ())
            except Exception as error:  # a process that was killed while it wrote
                print(f"{path}: {error}", file=sys.stderr)
            path.unlink(missing_ok=True)
        return found


def function_lines(source: str) -> set[int]:
    """The lines of functions' bodies, and those at which functions begin."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for line in range(
            min(one.lineno for one in [node, *getattr(node, "decorator_list", ())]), node.end_lineno + 1
        )
    }


def processor_seconds() -> float:
    """Of this process and all below it, whether they have ended or not."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        seconds[process] = sum(map(int, fields[11:15])) / TICKS  # with those of children that it waited for
    below = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(os.times()[:4]) + sum(seconds[process] for process in below - {os.getpid()})


if DIRECTORY_VARIABLE in os.environ:
    import pytest

    _recorders = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
        if not _recorders:
            _recorders.append(
                Recorder(Path(os.environ[DIRECTORY_VARIABLE]), os.environ[ARCS_VARIABLE] == "1")
            )
        recording = _recorders[0].run(item)
        next(recording)
        result = yield
        next(recording, None)
        return result


# What is made of it.


def read(directory: Path) -> list[Test]:
    return [json.loads(line) for path in directory.glob("*.jsonl") for line in path.open()]


def write(tests: list[Test], directory: Path, arcs: bool) -> None:
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "tests.jsonl", "w") as file:
        for test in tests:
            file.write(json.dumps({key: test[key] for key in test if key != "arcs"}) + "\n")
    if arcs:
        numbers, of_tests = number_arcs(tests)
        np.savez_compressed(
            directory / "arcs.npz",
            names=np.array([f"{file}:{begin}:{end}" for file, begin, end in numbers]),
            tests=np.array([test["id"] for test in tests]),
            starts=np.cumsum([0, *map(len, of_tests)]),
            arcs=np.concatenate([np.array(one, np.int32) for one in of_tests] or [np.zeros(0, np.int32)]),
        )


def number_arcs(tests: list[Test]) -> tuple[dict[tuple, int], list[list[int]]]:
    """The arcs in the order in which they were met, and of each test the numbers of its own."""
    numbers = {}
    return numbers, [
        [
            numbers.setdefault((file, *arc), len(numbers))
            for file, arcs in test["arcs"].items()
            for arc in map(tuple, arcs)
        ]
        for test in tests
    ]


def room(test: Test) -> str:
    parts = test["id"].partition("::")[0].split("/")[1:-1]
    return "/".join(parts[:2]) or "tests"


def print_tables(tests: list[Test], arcs: bool) -> None:
    alone = collections.Counter()
    if arcs:
        numbers, of_tests = number_arcs(tests)
        reached = collections.Counter(arc for one in of_tests for arc in one)
        alone = {
            test["id"]: sum(reached[arc] == 1 for arc in one)
            for test, one in zip(tests, of_tests, strict=True)
        }
        print(f"\n{len(numbers)} arcs")
    rooms = collections.defaultdict(list)
    for test in tests:
        rooms[room(test)].append(test)
    print(f"{len(tests)} tests, {sum(test['cpu'] for test in tests):.0f} processor seconds\n")
    print(f"{'room':32}{'tests':>6}{'CPU s':>8}" + (f"{'none alone':>12}{'CPU s':>8}" if arcs else ""))
    for name, own in sorted(rooms.items(), key=lambda item: -sum(test["cpu"] for test in item[1])):
        without = [test for test in own if not alone[test["id"]]]
        print(
            f"{name:32}{len(own):6}{sum(test['cpu'] for test in own):8.1f}"
            + (f"{len(without):12}{sum(test['cpu'] for test in without):8.1f}" if arcs else "")
        )
    print("\ndearest: CPU s" + (", arcs that no other test reaches" if arcs else ""))
    for test in sorted(tests, key=lambda test: -test["cpu"])[:60]:
        print(f"{test['cpu']:7.2f} " + (f"{alone[test['id']]:6} " if arcs else "") + test["id"])


if __name__ == "__main__":
    main()
