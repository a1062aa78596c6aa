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
import json
import os
import queue
import random
import re
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
    tests = tests_by_line(options.measured)
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.workers):
            copies.put(make_copy(Path(directory) / str(number)))

        def judge(mutant: Mutant) -> bool:
            folder = copies.get()
            try:
                found = run(folder, mutant, tests_of(mutant, tests, options))
            finally:
                copies.put(folder)
            print(f"{mutant.path}:{mutant.line}: {mutant.change}: {found or 'SURVIVED'}", flush=True)
            return found is not None

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            found = list(pool.map(judge, mutants))
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


def tests_by_line(measured: Path) -> dict[tuple[str, int], list[tuple[float, str]]]:
    """(Path in the package, line) -> (seconds, test) of what reaches it, the cheapest first."""
    if not (measured / "arcs.npz").exists():
        return {}
    import numpy as np

    seconds = {}
    for line in (measured / "tests.jsonl").open():
        test = json.loads(line)
        seconds[test["id"]] = test["cpu"]
    with np.load(measured / "arcs.npz") as file:
        names, tests, starts, arcs = (file[name] for name in ("names", "tests", "starts", "arcs"))
    lines = [name.split(":") for name in names]
    found = collections.defaultdict(set)
    for number, test in enumerate(map(str, tests)):
        entry = (seconds[test], test)
        for arc in arcs[starts[number] : starts[number + 1]]:
            path, _, end = lines[arc]
            found[path.removeprefix("ipu_pipeline/"), abs(int(end))].add(entry)
    return {place: sorted(of_line) for place, of_line in found.items()}


def tests_of(mutant: Mutant, tests: dict, options: argparse.Namespace) -> list[str]:
    if not tests:
        return [f"tests/{options.room or Path(mutant.path).parent}"]
    chosen, spent = [], 0.0
    for cost, test in tests.get((mutant.path, mutant.line), []):
        if spent < options.seconds:
            chosen.append(test)
            spent += cost
    return chosen


def make_copy(folder: Path) -> Path:
    left_out = shutil.ignore_patterns(".git", ".venv", "build", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    return folder


def run(folder: Path, mutant: Mutant, tests: list[str]) -> str | None:
    """The first test that fails, or None."""
    if not tests:
        return None
    path = folder / "ipu_pipeline" / mutant.path
    original = path.read_text()
    (folder / "tests.txt").write_text("\n".join(tests))
    path.write_text(mutant.text)
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:randomly", "-m", FAST]
    command += ["-o", f"cache_dir={ROOT / '.pytest_cache'}"]  # of programs that are compiled already
    try:
        result = subprocess.run(
            [*command, "@tests.txt"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    finally:
        path.write_text(original)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return None if result.returncode == 0 else (failed or [f"exit code {result.returncode}"])[0]


if __name__ == "__main__":
    main()
