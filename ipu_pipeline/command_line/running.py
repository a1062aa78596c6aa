"""Runs scripts written for PopTorch, unchanged."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run"]

SHIMS = Path(__file__).parent / "shims"  # packages with other libraries' names


def run(script: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Runs a script as Python would, in this process.

    Args:
      script: its file; or with `is_module` the module's name.
      arguments: become `sys.argv[1:]`.
      is_module: whether it is run as by `python -m`.

    Returns:
      2 if there is no such script, else 0; it may also end by raising what it raises.
    """
    found = _find_module(script) if is_module else os.path.isfile(script)
    if not found:
        kind = "module" if is_module else "file"
        print(f"ipu-pipeline run: there is no {kind} {script!r}.", file=sys.stderr)  # noqa: T201  # a program
        return 2
    sys.path.insert(0, os.getcwd() if is_module else str(Path(script).resolve().parent))
    sys.path.insert(1, str(SHIMS))  # before a PopTorch that is installed; processes that are spawned get it
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIMS), *([inherited] if inherited else [])])
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")
    return 0


def _find_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
