"""Puts small faults into a room's code, one at a time, and looks whether the fast tests find them.

    python scripts/mutants.py engine/schedules --number 20
    python scripts/mutants.py --by-hand mutants.txt    # lines of "path:line: old text => new text"

Each mutant is a copy of the package in which one operator, number or call is another. If
scripts/measure_tests.py has run, the tests that reach its line are run, cheapest first; else the room's.
A mutant that survives is a question, not yet a gap: some change nothing that anybody can see. mutmut runs
mutants in processes forked from one in which tests ran, where XLA's threads are missing.
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import dataclasses
import itertools
import json
import os
import queue
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = "not thorough and not soak"
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change. `path` is relative to the package; `text` is the whole file with the change in it."""

    path: str
    line: int
    change: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "room", nargs="?", default="", help="a folder of the package, such as engine/schedules"
    )
    parser.add_argument("--number", type=int, default=20, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-hand", type=Path, help="a file of mutants in place of drawn ones")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant, as measured")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--measured", type=Path, default=ROOT / "build" / "tests", help="of measure_tests.py"
    )
    options = parser.parse_args()
    mutants = read(options.by_hand) if options.by_hand else draw(options.room, options.number, options.seed)
    tests = tests_of(mutants, options)
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.workers):
            copies.put(make_copy(Path(directory) / str(number)))

        def judge(mutant: Mutant, tests: list[str]) -> bool:
            folder = copies.get()
            try:
                found = run(folder, mutant, tests, options.seconds)
            finally:
                copies.put(folder)
            print(f"{mutant.path}:{mutant.line}: {mutant.change}: {found or 'SURVIVED'}", flush=True)
            return found is not None

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            found = list(pool.map(judge, mutants, tests))
    print(f"{sum(found)} of {len(found)} found")


def read(path: Path) -> list[Mutant]:
    """Mutants by hand."""
    mutants = []
    for entry in filter(str.strip, path.read_text().splitlines()):
        file, line, old, new = re.fullmatch(r"(.+?):(\d+): (.*) => (.*)", entry).groups()
        lines = (ROOT / "ipu_pipeline" / file).read_text().splitlines(keepends=True)
        if lines[int(line) - 1].count(old) != 1:
            raise SystemExit(f"{entry}: not once in the line {lines[int(line) - 1].strip()}")
        lines[int(line) - 1] = lines[int(line) - 1].replace(old, new)
        mutants.append(Mutant(file, int(line), f"{old} -> {new}", "".join(lines)))
    return mutants


def draw(room: str, number: int, seed: int) -> list[Mutant]:
    """Some of all that can be made of a room's functions."""
    files = sorted((ROOT / "ipu_pipeline" / room).rglob("*.py"))
    possible = [mutant for file in files for mutant in mutants_of(file)]
    return random.Random(seed).sample(possible, min(number, len(possible)))  # noqa: S311  # no secret


def mutants_of(file: Path) -> Iterator[Mutant]:
    source = file.read_text()
    path = str(file.relative_to(ROOT / "ipu_pipeline"))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    seen = set()
    for statement in (statement for function in functions for statement in function.body):
        for node in ast.walk(statement):
            place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0), type(node))
            if place in seen:  # of a function within a function
                continue
            seen.add(place)
            for changed in changes_of(node):
                old, new = ast.get_source_segment(source, node) or "", f"({ast.unparse(changed)})"
                if isinstance(node, ast.Expr):
                    new = new[1:-1]
                text = replace(source, node, new)
                yield Mutant(path, node.lineno, f"{' '.join(old.split())} -> {new}", text)


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    changed = copy.copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        changed.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        changed = ast.Pass()
    else:
        return
    yield changed


def replace(source: str, node: ast.AST, new: str) -> str:
    """The source with other text in a node's place; its offsets count bytes."""
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + after).decode()


def tests_of(mutants: list[Mutant], options: argparse.Namespace) -> list[list[str]]:
    """The tests to run for each mutant: of those that reach its line the cheapest, if that was measured."""
    measured = options.measured / "arcs.npz"
    if not measured.exists():
        return [[f"tests/{options.room or Path(mutant.path).parent}"] for mutant in mutants]
    import numpy as np

    with open(options.measured / "tests.jsonl") as file:
        seconds = {test["id"]: test["cpu"] for test in map(json.loads, file)}
    with np.load(measured) as file:
        names, tests, starts, arcs = (file[name] for name in ("names", "tests", "starts", "arcs"))
    of_lines = collections.defaultdict(list)
    for number, name in enumerate(map(str, names)):
        path, _, end = name.split(":")
        of_lines[path.removeprefix("ipu_pipeline/"), abs(int(end))].append(number)
    chosen = []
    for mutant in mutants:
        reaching = np.isin(arcs, of_lines[mutant.path, mutant.line]).nonzero()[0]
        found = map(str, tests[np.unique(np.searchsorted(starts, reaching, side="right") - 1)])
        cheapest = sorted(found, key=seconds.__getitem__)
        spent = itertools.accumulate((seconds[test] for test in cheapest), initial=0.0)
        chosen.append(
            [test for test, before in zip(cheapest, spent, strict=False) if before < options.seconds]
        )
    return chosen


def make_copy(folder: Path) -> Path:
    left_out = shutil.ignore_patterns(".git", ".venv", "build", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    return folder


def run(folder: Path, mutant: Mutant, tests: list[str], seconds: float) -> str | None:
    """The first test that fails, or None. What takes far more than `seconds` of CPU time hangs."""
    if not tests:
        return None
    path = folder / "ipu_pipeline" / mutant.path
    original = path.read_text()
    (folder / "tests.txt").write_text("\n".join(tests))
    path.write_text(mutant.text)
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:randomly", "-m", FAST]
    command += ["-o", f"cache_dir={ROOT / '.pytest_cache'}"]  # of programs that are compiled already
    command.append("@tests.txt")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            limit = int(3 * seconds) + 60
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
            printed, _ = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            process.kill()
            return "a test that hangs"
        finally:
            path.write_text(original)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return None if process.returncode == 0 else (failed or [f"exit code {process.returncode}"])[0]


if __name__ == "__main__":
    main()
