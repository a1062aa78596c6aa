"""Writes the notebooks of tutorial/notebooks from pages, and from the Markdown files beside them.

    python scripts/write_notebooks.py

A page's text becomes cells of Markdown, with pictures in themselves. A python block becomes a cell of code,
with what the page says that it prints, and with the picture of its report. So a notebook needs the library
and nothing else of this repository.
"""

import ast
import base64
import mimetypes
import os
import re
from pathlib import Path

import nbformat
from nbformat import v4

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tutorial" / "notebooks"
# Notebooks and their pages. Steps 1 to 4 and things to try, whose pages are about programs with arguments,
# are one notebook; so is the page that ports a program.
PAGES = {
    "first_minutes": "docs/first_minutes.md",
    "pipelining": "tutorial/notebooks/pipelining.md",
    "arguments": "tutorial/arguments.md",
    "schedules": "tutorial/schedules.md",
    "further": "tutorial/further.md",
    "poptorch_first_model": "tutorial/poptorch/fashion_mnist/README.md",
    "poptorch_pipeline": "tutorial/poptorch/README.md",
    "poptorch_porting": "tutorial/notebooks/poptorch_porting.md",
}
_FENCE = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
_REPORT = re.compile(r"reports\.capture\(.*\) as (\w+):")
# About the repository's programs, which a notebook has not.
_SETTING_UP = re.compile(r"^## Before you start\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
_INSTALL = """\
# If the library is not installed, from a clone of the repository:
# %pip install "../..[{extra}]" ipywidgets{others}"""
_IN_NOTEBOOKS = {  # in place of a file of the repository
    """path = "tutorial/poptorch/fashion_mnist/pictures/seven.jpg"
""": """path = "seven.png"  # or a picture of yours
drawn = Image.new("L", (280, 280), "white")
ImageDraw.Draw(drawn).line([(80, 60), (200, 60), (130, 230)], fill="black", width=28)
drawn.save(path)
""",
    "from PIL import Image, ImageOps\n": "from PIL import Image, ImageDraw, ImageOps\n",
}


def _read_picture(path: Path) -> tuple[str, str]:
    """A picture's kind, and its bytes in base64."""
    return str(mimetypes.guess_type(path)[0]), base64.b64encode(path.read_bytes()).decode()


def _embed(text: str, page: Path) -> str:
    """A page's text with its pictures in itself, and links to notebooks, where there are, or to files."""
    notebooks = {ROOT / path: f"{name}.ipynb" for name, path in PAGES.items()}

    def picture(match: re.Match[str]) -> str:
        kind, data = _read_picture(page.parent / match[2])
        return f'<img alt="{match[1]}" src="data:{kind};base64,{data}">'

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        return f"]({notebooks.get(target) or os.path.relpath(target, FOLDER)}{match[2] or ''})"

    return _LINK.sub(link, _PICTURE.sub(picture, text))


def _as_cell(code: str) -> str:
    """Code that shows the report that it records, but no other value: pages say only what is printed."""
    for old, new in _IN_NOTEBOOKS.items():
        code = code.replace(old, new)
    if report := _REPORT.search(code):
        return f"{code}{report[1]}"
    last = ast.parse(code).body[-1]
    is_method = isinstance(last, ast.Expr) and isinstance(getattr(last.value, "func", None), ast.Attribute)
    return code.rstrip("\n") + (";" if is_method else "")


def make_notebook(name: str) -> nbformat.NotebookNode:
    """The notebook of a name in `PAGES`."""
    page = ROOT / PAGES[name]
    cells: list[nbformat.NotebookNode] = []

    def add_text(text: str) -> None:
        if text.strip():
            cells.append(v4.new_markdown_cell(_embed(text.strip("\n"), page)))

    title, _, text = page.read_text().partition("\n")
    add_text(title)
    is_of_torch = name.startswith("poptorch")
    others = " scikit-learn" if name == "poptorch_first_model" else ""
    install = _INSTALL.format(extra="torch" if is_of_torch else "reports", others=others)
    cells.append(v4.new_code_cell(install))
    text, *rest = _FENCE.split(_SETTING_UP.sub("", text))
    add_text(text)
    for language, block, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if language == "text":
            cells[-1].outputs = [v4.new_output("stream", name="stdout", text=block)]
        else:
            cells.append(v4.new_code_cell(_as_cell(block)))
        picture = _PICTURE.match(text.strip())
        if picture and _REPORT.search(cells[-1].source):  # a run shows the report in its place
            data = dict([_read_picture(page.parent / picture[2])])
            cells[-1].outputs.append(v4.new_output("display_data", {"text/plain": picture[1], **data}))
            text = text.replace(picture[0], "")
        add_text(text)
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # else a random one
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def write(name: str) -> str:
    """The notebook's file."""
    notebook = make_notebook(name)
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / f"{name}.ipynb").write_text(write(name))
