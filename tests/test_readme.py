"""The README's example prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_pipeline as ipu

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(code):
    """What a snippet prints."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    printed = run(code)
    numbers = r"\d+\.\d+"
    assert re.sub(numbers, "#", printed) == re.sub(numbers, "#", expected)
    for actual, written in zip(re.findall(numbers, printed), re.findall(numbers, expected), strict=True):
        assert abs(float(actual) - float(written)) < 0.01  # the last digits are the machine's


@pytest.mark.parametrize("name", ["memory.md", "checkpoints.md"])
def test_what_examples_of_pages_print(name):
    page = (ROOT / "docs" / name).read_text()
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    printed = run(code)
    assert printed == expected


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tutorial" / "README.md"]
    for page in [*pages, *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target


def test_modules_in_the_design_are_those_that_there_are():
    design = (ROOT / "docs" / "design.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", design, re.MULTILINE)
    modules = [path.stem for path in (ROOT / "ipu_pipeline" / "engine").glob("*.py")]
    assert sorted(listed) == sorted(set(modules) - {"__init__"})
    order = {name: place for place, name in enumerate(listed)}
    for name in listed:  # each imports only those before it
        source = (ROOT / "ipu_pipeline" / "engine" / f"{name}.py").read_text()
        source = re.sub(r"if TYPE_CHECKING:\n(    .*\n)+", "", source)
        imported = re.findall(r"from ipu_pipeline\.engine\.(\w+) import", source)
        for names in re.findall(r"from ipu_pipeline\.engine import \(?([\w, \n]+)\)?", source):
            imported += [part.split(" as ")[0].strip() for part in names.split("\n")[0].split(",")]
        assert not [other for other in imported if other in order and order[other] >= order[name]], name


def test_public_names():
    for name in ipu.__all__:
        assert getattr(ipu, name) is not None
    assert ipu.utils.SelectionOrder.SNAKE
    assert ipu.ipu_compiler.compile
