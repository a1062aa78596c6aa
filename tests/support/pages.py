"""Pages of documentation: fenced blocks, what these print, the changes that they show, links."""

import re
from typing import NamedTuple

import numpy as np

# A block of Python, with the comment before it that says why no test runs it, and with what it prints.
PROGRAM = re.compile(
    r"(?:^<!-- Not run by a test: ([^\n]+)\. -->\n)?"
    r"^```python\n((?:(?!```).)*)^```\n"
    r"(?:\n```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)


class Fence(NamedTuple):
    """A fenced block, the heading that it stands under, and the line where it begins."""

    language: str
    heading: str
    line: int
    lines: list[str]


class Change(NamedTuple):
    """A lettered change: for each place the lines before and after."""

    letter: str
    pieces: list[tuple[list[str], list[str]]]


def find_fences(page):
    """All fences of a page's text."""
    fences, heading, current = [], "", None
    for number, line in enumerate(page.splitlines(), 1):
        if current is None and line.startswith("```"):
            current = Fence(line[3:], heading, number, [])
        elif line == "```":
            fences.append(current)
            current = None
        elif current is not None:
            current.lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    assert current is None, f"the fence of line {current.line} has no end"
    return fences


def parse_change(fence):
    letter = fence.heading.partition(".")[0]
    assert re.fullmatch(r"\d[A-Z]", letter), f"line {fence.line}: a diff under {fence.heading!r}"
    pieces = [([], [])]
    for line in fence.lines:
        mark, code = line[:1], line[1:]
        if line == "...":
            pieces.append(([], []))
            continue
        assert mark in ("", " ", "+", "-"), f"{letter}: {line!r} begins with none of space, + and -"
        before, after = pieces[-1]
        if mark != "+":
            before.append(code)
        if mark != "-":
            after.append(code)
    return Change(letter, pieces)


def apply_change(lines, change):
    """The program's lines after a change. What a piece replaces must stand in it exactly once."""
    for before, after in change.pieces:
        size = len(before)
        found = [at for at in range(len(lines) - size + 1) if lines[at : at + size] == before]
        described = "\n".join(before)
        assert len(found) == 1, f"{change.letter}: found {len(found)} times in the program:\n{described}"
        lines = [*lines[: found[0]], *after, *lines[found[0] + size :]]
    return lines


def assert_printed(output, expected, numbers, masked):
    """Compares all lines.

    Args:
      output: what was printed.
      expected: the page's lines.
      numbers: patterns of numbers that depend on the machine, and how far they may be from the page's.
      masked: what is not compared.
    """
    texts = [masked.sub("", text) for text in (output, "\n".join(expected) + "\n")]
    found = [{pattern: pattern.findall(text) for pattern in numbers} for text in texts]
    for pattern in numbers:
        texts = [pattern.sub("#", text) for text in texts]
    assert texts[0] == texts[1]
    for pattern, tolerance in numbers.items():
        actual, wanted = (np.array(of_text[pattern], float) for of_text in found)
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance, err_msg=output)


def find_commands(fences):
    """The commands of a page's consoles, with what each is to print."""
    commands = []
    for fence in fences:
        if fence.language == "console":
            assert fence.lines[0].startswith("$ "), f"line {fence.line}: a console begins with a command"
            for line in fence.lines:
                if line.startswith("$ "):
                    commands.append((line[2:], []))
                else:
                    commands[-1][1].append(line)
    return commands


def functions_of(path):
    """The names of the functions of a file."""
    return set(re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE))


def execute(path, without="\0"):
    """Runs the programs of a page in this process, but those with some text."""
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        if without not in block:
            exec(compile(block, str(path), "exec"), {"__name__": "example"})  # noqa: S102  # it is ours


def anchors(text):
    """Those of a page's headings; the first is the title's."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def check_links(path):
    """Links within a page lead to its headings, and others to files that there are."""
    text = path.read_text()
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors(text))
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
