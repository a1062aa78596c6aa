"""Writes the notebooks of tutorial/notebooks from the tutorial's pages.

    python scripts/write_notebooks.py

A page's text becomes cells of Markdown. A python block becomes a cell of code, with what the page says that
it prints. A command becomes a cell that runs it, and its program the cell before, which writes its file:
change it there, and run both again. So a notebook needs the library and nothing else of this repository but
its pictures.
"""

import ast
import os
import re
import shlex
from pathlib import Path

import nbformat
from nbformat import v4

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tutorial" / "notebooks"
# Notebooks and their pages. The other pages of the tutorial have nothing to run.
PAGES = {
    "first_minutes": "docs/first_minutes.md",
    "step1": "tutorial/step1.md",
    "step2": "tutorial/step2.md",
    "step3": "tutorial/step3.md",
    "arguments": "tutorial/arguments.md",
    "schedules": "tutorial/schedules.md",
    "step4": "tutorial/step4.md",
    "things_to_try": "tutorial/things_to_try.md",
    "further": "tutorial/further.md",
    "poptorch_pipeline": "tutorial/poptorch/README.md",
    "poptorch_first_model": "tutorial/poptorch/fashion_mnist/README.md",
    "poptorch_porting": "tutorial/poptorch/porting/README.md",
}
_PACKAGES = {  # what a notebook needs, if that is more than the library
    "first_minutes": "`ipu_pipeline[reports]`",
    "poptorch_pipeline": "`ipu_pipeline[torch]`",
    "poptorch_first_model": "`ipu_pipeline[torch]`, scikit-learn and matplotlib",
    "poptorch_porting": "`ipu_pipeline[torch]`",
}
_FENCE = re.compile(r"^```(console|python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# In place of IPython's `!`, which forks a kernel that has JAX's threads, and shows bars.
_RUN = '''\
import os
import shlex
import subprocess
import sys


def run(command):
    """Runs a program in a process of its own, as `python` does in a shell."""
    program = subprocess.Popen(
        [sys.executable, "-u", *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TQDM_DISABLE": "1"},  # no bars
    )
    for line in program.stdout:
        print(line, end="")
    if program.wait() != 0:
        raise RuntimeError(f"{command} ended with {program.returncode}")'''
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def _relink(text: str, page: Path) -> str:
    """Links of a page, as its notebook has them: to notebooks, where there are, and else to the files."""
    notebooks = {ROOT / path: f"{name}.ipynb" for name, path in PAGES.items()}

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        found = notebooks.get(target) or os.path.relpath(target, FOLDER)
        return f"]({found}{match[2] or ''})"

    return _LINK.sub(link, text)


def _local_modules(program: Path) -> list[Path]:
    """The files beside a program that it imports, and what these import, each after its own."""
    found: list[Path] = []
    for name in re.findall(r"^(?:from|import) (\w+)", program.read_text(), re.MULTILINE):
        module = program.parent / f"{name}.py"
        if module.exists():
            found += [*_local_modules(module), module]
    return list(dict.fromkeys(found))


class _Notebook:
    """The cells of one page, in order."""

    def __init__(self) -> None:
        self._cells: list[nbformat.NotebookNode] = []
        self._written: set[Path] = set()
        self._has_run = False  # the function

    def _add(self, cell: nbformat.NotebookNode) -> None:
        cell.id = f"cell-{len(self._cells)}"  # else a random one
        self._cells.append(cell)

    def add_text(self, text: str) -> None:
        if text.strip():
            self._add(v4.new_markdown_cell(text.strip("\n")))

    def add_program(self, code: str) -> None:
        """Code whose last expression, if it ends with one, is not shown: pages print what they show."""
        last = ast.parse(code).body[-1]
        is_shown = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
        self.add_code(code.rstrip("\n") + (";" if is_shown else ""))

    def add_code(self, code: str) -> None:
        count = sum(cell.cell_type == "code" for cell in self._cells) + 1
        # Files are named as seen from the repository's root; notebooks lie in tutorial/notebooks.
        self._add(v4.new_code_cell(code.replace('"tutorial/', '"../').rstrip("\n"), execution_count=count))

    def add_output(self, text: str) -> None:
        self._cells[-1].outputs = [v4.new_output("stream", name="stdout", text=text)]

    def add_commands(self, console: str) -> None:
        for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            python, program, *arguments = shlex.split(command)
            assert python == "python", command
            path = ROOT / program
            for file in [*_local_modules(path), path]:
                if file not in self._written:
                    self._written.add(file)
                    self.add_code(f"%%writefile {file.name}\n{file.read_text()}")
                    self.add_output(f"Writing {file.name}\n")
            here = [os.path.relpath(ROOT / word, FOLDER) if "/" in word else word for word in arguments]
            line = shlex.join([path.name, *here])
            if not self._has_run:
                self._has_run = True
                self.add_code(_RUN)
            self.add_code(f'run("{line}")')
            self.add_output(output)

    def finish(self) -> nbformat.NotebookNode:
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        metadata = {"kernelspec": kernel, "language_info": {"name": "python", "pygments_lexer": "ipython3"}}
        return v4.new_notebook(cells=self._cells, metadata=metadata)


def make_notebook(name: str) -> nbformat.NotebookNode:
    """The notebook of a name in `PAGES`."""
    page = ROOT / PAGES[name]
    notebook = _Notebook()
    add = {"python": notebook.add_program, "text": notebook.add_output, "console": notebook.add_commands}
    text, *rest = _FENCE.split(page.read_text())
    title, _, text = text.partition("\n")
    packages = _PACKAGES.get(name, "`ipu_pipeline`")
    notebook.add_text(
        f"{title}\n\nThis notebook is made of [a page]({os.path.relpath(page, FOLDER)}). It needs "
        f"{packages}, and no network. Under its cells stands what the page says that they print; run "
        "them to see for yourself."
    )
    notebook.add_text(_relink(text, page))
    for language, block, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        add[language](block)
        notebook.add_text(_relink(text, page))
    return notebook.finish()


def write(name: str) -> str:
    """The notebook's file."""
    notebook = make_notebook(name)
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.ipynb").write_text(write(name))
