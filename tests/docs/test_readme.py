"""What the README and the pages of docs say is true: examples, names, commands, figures, links, rooms."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from benchmarks import harness, history, page
from tests.support.pages import PROGRAM
from tests.support.programs import run_each

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from figures import rooms  # noqa: E402  # scripts are no package

README = (ROOT / "README.md").read_text()


def example():
    """The README's program; its blocks are one, as the second one uses the stages of the first."""
    return "".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))


def assert_is_what_the_example_prints(printed):
    expected = "".join(re.findall(r"```text\n(.*?)```", README, re.DOTALL))
    numbers = r"\d+\.\d+"
    assert re.sub(numbers, "#", printed) == re.sub(numbers, "#", expected)
    for actual, written in zip(re.findall(numbers, printed), re.findall(numbers, expected), strict=True):
        assert abs(float(actual) - float(written)) < 0.01  # the last digits are the machine's


@pytest.mark.thorough
def test_example(tmp_path):
    assert_is_what_the_example_prints(run_each({"readme": example()}, tmp_path, as_tests=True)["readme"])


def test_the_readme_is_a_front_page_whose_commands_are_in_the_makefile():
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"(?:`|^    )make (\w+)", README, re.MULTILINE))
    assert commands >= {"tutorial", "test", "bench"}
    for name in commands:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def section(heading):
    """The rows of a section's table, as lists of cells."""
    text = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_feature_is_a_link_of_a_few_words():
    for cell in itertools.chain(*section("Features")):
        ((words, _target),) = re.findall(r"^\[([^]]+)\]\((.+)\)$", cell)
        assert len(words.split()) <= 5


def test_figures_of_speed_are_those_of_the_benchmarks_page():
    """After `make bench`, the README's three figures have to be brought up to date as well."""
    machines = {}
    for measured in page.newest(history.read()).values():
        row = measured.row
        figures = harness.format_figure(row)[:3]
        machines[row.question, row.case] = (row.question, *figures, row.is_met), measured.machine
    rows = section("How fast it is")
    assert len(rows) == 3
    for what, figure, spread, target in rows:
        (question,) = re.findall(r"benchmarks/(\w+)\)", what)
        bound, _, verdict = target.partition(", ")
        given = (question, figure, spread, bound, {"met": True, "missed": False}[verdict])
        on = [machine for row, machine in machines.values() if row == given]
        assert on, what
        assert on[0] in " ".join(README.split())


PAGES = [
    *("memory.md", "checkpoints.md", "watching.md", "mixed_precision.md", "engine.md"),
    *("schedules.md", "profiling.md", "simulator.md", "tensor_parallel.md", "splits.md", "lengths.md"),
    *("generation.md", "faults.md", "exactness.md"),
    *(f"how_to/{name}.md" for name in ("port_a_script", "choose_a_split", "resume", "serve")),
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*PAGES, "porting.md"])
def test_what_examples_of_a_page_print(name, tmp_path, monkeypatch):
    """A page's blocks are one program, but for those that say why not; each of the porting page is one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    page = (ROOT / "docs" / name).read_text()
    pairs = [(code, text) for comment, code, text in PROGRAM.findall(page) if not comment]
    programs = {f"example {number}": [pair] for number, pair in enumerate(pairs)}
    if name == "porting.md":
        assert len(pairs) == 2
    else:
        programs = {"page": pairs}

    def without_temporaries(text):  # XLA plans them for the machine
        return re.sub(r"\d+ (of temporaries)", r"\1", text)

    codes = {key: "\n".join(code for code, _text in blocks) for key, blocks in programs.items()}
    for key, text in run_each(codes, tmp_path, as_tests=True).items():
        expected = "".join(text for _code, text in programs[key])
        assert without_temporaries(text) == without_temporaries(expected), key


def test_links_lead_somewhere():
    pages = [path for folder in ("tutorial", "docs") for path in sorted((ROOT / folder).rglob("*.md"))]
    for path in [*sorted(ROOT.glob("*.md")), *pages]:
        for target in re.findall(r"\]\((?!https://)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), target


def test_the_design_has_the_rooms_in_order_and_paths_that_exist():
    design = (ROOT / "docs" / "design.md").read_text()
    table = design.split("| what it is for |")[1].split("\n\n")[0]
    listed = re.findall(r"`([\w/]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    numbers = [rooms.room_of(name.replace("/", ".")) for name in listed]
    assert numbers == sorted(numbers)
    folders = [number for number, room in enumerate(rooms.FLOORS) if room.name.endswith("/")]
    assert set(folders) <= set(numbers)
    paths = [str(path.with_suffix("")) for path in rooms.MODULES.values()]
    questions = design.split("| question | path |")[1].split("\n\n")[0]
    for name in re.findall(r"`(\w+/\w+)`", questions):
        assert any(path.endswith(f"/{name}") for path in paths), name
