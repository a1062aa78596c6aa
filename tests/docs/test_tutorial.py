"""The tutorial's pages: their changes make the answers, and a command prints what they say.

What a fence is, by its language:

* diff: a change of the program, or a quotation of it, if no line has + or -.
* console: lines with `$ ` are commands, each followed by what it prints.
* python: a program that is complete in itself.
* text: what the python block above it prints.

Pages whose blocks are a notebook's cells are run in test_notebooks.
"""

import inspect
import itertools
import re
import shlex

import pytest

from ipu_pipeline import pipelining_ops
from tests.support.pages import (
    PROGRAM,
    Fence,
    anchors,
    apply_change,
    assert_printed,
    find_commands,
    find_fences,
    parse_change,
)
from tests.support.programs import ROOT, STEP1, STEP2, STEP3, STEP4, run, run_each

FOLDER = ROOT / "tutorial"
NAMES = [
    *("README", "why", "step1", "step2", "step3", "arguments", "schedules", "step4"),
    *("things_to_try", "further"),
]
WITHOUT_NOTEBOOK = ["step1", "step2", "step3", "step4", "things_to_try"]  # of its own
PAGES = {name: (FOLDER / f"{name}.md").read_text() for name in NAMES}
TEXT = "\n".join(PAGES.values())
PROGRAMS = {1: STEP1, 2: STEP2, 3: STEP3, 4: STEP4}
MASKED = re.compile(r"Elapsed \d+\.\d\d s, [\d,]+ samples/sec")
NUMBERS = {  # and how far they may be from the page's
    re.compile(r"(?<=loss: )\d+\.\d+"): 0.002,
    re.compile(r"(?<=accuracy: )\d+\.\d+"): 0.03,
    re.compile(r"(?<=\()\d+(?= of \d+ images)"): 10,
}


FENCES = [fence for page in PAGES.values() for fence in find_fences(page)]
CHANGES = [parse_change(fence) for fence in FENCES if fence.language == "diff"]


def make_program(last_step):
    """The text of the program after a step, by all changes up to there."""
    lines = (ROOT / STEP1).read_text().split("\n")
    for change in CHANGES:
        if int(change.letter[0]) <= last_step:
            lines = apply_change(lines, change)
    return "\n".join(lines)


def test_changes_make_the_answers():
    for step, program in PROGRAMS.items():
        assert make_program(step) == (ROOT / program).read_text(), step


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITHOUT_NOTEBOOK)
def test_what_a_page_prints(name, tmp_path):
    for command, expected in find_commands(find_fences(PAGES[name])):
        assert_printed(run(*shlex.split(command)[1:], as_tests=True), expected, NUMBERS, MASKED)
    for _comment, code, text in PROGRAM.findall(PAGES[name]):
        assert run_each({"page": code}, tmp_path, as_tests=True) == {"page": text}


def test_letters_are_in_order():
    headings = re.findall(r"^#+ (\d[A-Z])\. ", TEXT, re.MULTILINE)
    expected = {step: [letter for letter in headings if letter.startswith(str(step))] for step in PROGRAMS}
    for step, letters in expected.items():
        assert letters == [f"{step}{chr(ord('A') + place)}" for place in range(len(letters))]
    assert headings == [letter for letters in expected.values() for letter in letters]
    letters = [change.letter for change in CHANGES]
    assert list(dict.fromkeys(letters)) == headings  # each has code
    assert [letter for letter in letters if letter[0] != "1"] == [h for h in headings if h[0] != "1"]
    changing = [change.letter for change in CHANGES if any(old != new for old, new in change.pieces)]
    assert changing == [letter for letter in headings if letter[0] != "1"]  # step 1 is only quoted


def test_each_page_leads_to_the_next():
    assert {path.stem for path in FOLDER.glob("*.md")} == set(NAMES)
    for (_name, page), following in zip(PAGES.items(), NAMES[1:], strict=False):
        assert re.fullmatch(rf"Next: \[[\w ,]+\]\({following}\.md\)\.", page.splitlines()[-1])
        assert re.search(rf"^\d+\. \[.*\]\({following}\.md\)", PAGES["README"], re.MULTILINE), following


def test_fences_have_known_languages():
    assert {fence.language for fence in FENCES} == {"diff", "console", "python", "text"}
    outputs = [before.language for before, fence in itertools.pairwise(FENCES) if fence.language == "text"]
    assert set(outputs) == {"python"}


def test_arguments_of_pipeline():
    """Each is in a table, with its default if that is a number."""
    rows = re.findall(r"^\| ((?:`\w+`(?: \(\d+\))?(?:, )?)+) \| .* \|$", PAGES["arguments"], re.MULTILINE)
    found = dict(re.findall(r"`(\w+)`(?: \((\d+)\))?", " ".join(rows)))
    parameters = inspect.signature(pipelining_ops.pipeline).parameters.values()
    assert sorted(found) == sorted(parameter.name for parameter in parameters)
    for parameter in parameters:
        is_number = type(parameter.default) is int
        assert found[parameter.name] == (str(parameter.default) if is_number else ""), parameter.name
    with pytest.raises(NotImplementedError, match="^Continuous weight updates"):
        pipelining_ops.pipeline([abs], gradient_accumulation_count=1, continuous_weight_updates=True)


def test_links():
    for page in PAGES.values():
        for name, anchor in re.findall(r"\]\((\w*)(?:\.md)?#([^)]+)\)", page):
            assert anchor in anchors(PAGES[name] if name else page)
    drawn = {path.name for path in (FOLDER / "figures").iterdir()}
    assert set(re.findall(r"!\[[^\]]+\]\(figures/([^)]+)\)", TEXT)) == drawn  # each is shown


def test_a_change_is_applied_at_its_places_or_named():
    lines = ["a = 1", "b = 2", "", "b = 2"]

    def apply(diff):
        return apply_change(lines, parse_change(Fence("diff", "2A. A change", 1, diff)))

    diff = [" a = 1", "-b = 2", "+b = 3", "...", "", " b = 2", "+c = 4"]
    assert apply(diff) == ["a = 1", "b = 3", "", "b = 2", "c = 4"]
    for diff, message in [
        ([" a = 1", "-b = 3"], r"2A: found 0 times in the program:\s+a = 1\s+b = 3"),
        (["-b = 2", "+b = 3"], "2A: found 2 times"),
        (["b = 2"], "2A: 'b = 2' begins with none of"),
    ]:
        with pytest.raises(AssertionError, match=message):
            apply(diff)
