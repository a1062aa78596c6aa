"""`ipu-pipeline new`: creates a small project with a pipeline, its test, and a page about them."""

from __future__ import annotations

import argparse
import importlib.resources
import string
import sys
import tempfile
from pathlib import Path

__all__ = ["add"]

_TEMPLATES = ("README.md", "train.py", "test_train.py")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Create the folder NAME with a program that trains a model in two stages, a test that compares it "
        "with plain JAX, and a README that says how to run and profile them."
    )
    parser.add_argument("name", metavar="NAME", help="a folder that does not exist yet")
    parser.set_defaults(call=lambda parsed: _make(Path(parsed.name)))


def _make(folder: Path) -> int:
    if folder.exists() or folder.is_symlink():
        return _refuse(f"{str(folder)!r} exists already; give another name")
    if not folder.parent.is_dir():
        return _refuse(f"there is no folder {str(folder.parent)!r}")
    source = importlib.resources.files("ipu_pipeline.command_line") / "project"
    try:
        # Under another name until it is complete, so that an interrupted call leaves none of this name.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
            project = Path(temporary) / folder.name
            project.mkdir()
            for name in _TEMPLATES:
                text = (source / f"{name}.txt").read_text(encoding="utf-8")
                if name == "README.md":
                    text = string.Template(text).substitute(name=folder.name)
                (project / name).write_text(text, encoding="utf-8")
            project.rename(folder)
    except OSError as error:
        return _refuse(f"the folder {str(folder)!r} cannot be created: {error.strerror}")
    print(f"Created {folder}. Next:\n  cd {folder}\n  python train.py")  # noqa: T201  # a program
    return 0


def _refuse(message: str) -> int:
    print(f"ipu-pipeline new: {message}.", file=sys.stderr)  # noqa: T201  # a program
    return 2
