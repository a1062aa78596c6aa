"""`ipu-pipeline run`: runs scripts written for PopTorch, unchanged."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"  # packages with other libraries' names

# Modules that scripts for IPUs import and that are not here, with what to do.
_MISSING = {
    "horovod": "leave it out: processes that are launched together average their gradients by themselves, "
    "compare their weights, and are numbered by popdist",
    "popart": "of popart, only enumerations are. poptorch.Options has what is set through others; for "
    "operations of your own, use torch.library and poptorch.register_lowering",
    "poplar": "leave it out: its graphs run on Graphcore's devices only",
    "popxl": "write the model with torch, or with ipu_pipeline's pipelining_ops",
    "pva": "ipu-pipeline report reads the profiles that are written here",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Run a Python script written for PopTorch. In it, and in processes that it starts, `import "
        "poptorch` imports ipu_pipeline.poptorch. popdist and popdist.poptorch can be imported too."
    )
    parser.usage = "ipu-pipeline run [-h] [-m] SCRIPT [ARGS ...]"
    add_script(parser)
    parser.set_defaults(call=lambda parsed: run(parsed.script, parsed.arguments, parsed.is_module))


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a script. Everything after the script's name belongs to the script."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, followed by its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(script: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Runs a script as Python would, in this process. It stays the main module when it has ended."""
    sys.excepthook = functools.partial(_show, sys.excepthook)
    try:
        return _run(script, arguments, is_module)
    except (ImportError, AttributeError) as error:
        _explain(error)
        raise


def _show(
    show: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    """Shows an error that ends the program, from the script's own lines on."""
    script = trace
    frame = trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            script = frame.tb_next
        frame = frame.tb_next
    while script is not None and script.tb_frame.f_code.co_filename.startswith("<frozen "):  # runpy
        script = script.tb_next
    if script is None and not isinstance(error, SyntaxError):  # of the script, which has no frame yet
        script = trace
    show(kind, error.with_traceback(script), script)


def _explain(error: ImportError | AttributeError) -> None:
    if isinstance(error, ImportError):
        name = error.name
    else:  # other objects may raise when they are asked for a name
        name = error.obj.__name__ if isinstance(error.obj, types.ModuleType) else None
    package = str(name or "").split(".")[0]
    if package not in _MISSING:
        return
    traced = traceback.extract_tb(error.__traceback__)
    shims = str(SHIMS)
    place = next((f for f in reversed(traced) if not f.filename.startswith(("<", shims))), None)
    line = f"Line {place.lineno} of {place.filename}" if place is not None else "The script"
    error.add_note(f"{line} needs {name}, which is not here: {_MISSING[package]}.")


def _run(script: str, arguments: Sequence[str], is_module: bool) -> int:
    sys.argv = [script, *arguments]
    if is_module:
        _extend_path(os.getcwd())
        spec = _find_module(script)
        if spec is None or spec.loader is None:
            return _refuse("module", script)
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]  # of modules that can be run
        sys.argv[0] = str(spec.origin)
        _run_main(code, str(spec.origin), spec)
        return 0
    path = Path(script)
    if not path.exists():
        return _refuse("file", script)
    if path.is_dir() or not _is_source(path):
        _extend_path(script)
        runpy.run_path(script, run_name="__main__")
        return 0
    _extend_path(str(path.resolve().parent))
    _run_main(compile(path.read_bytes(), script, "exec"), script, None)
    return 0


def _is_source(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) != b"PK"  # the first bytes of archives


def _refuse(kind: str, script: str) -> int:
    print(f"ipu-pipeline run: there is no {kind} {script!r}.", file=sys.stderr)  # noqa: T201  # a program
    return 2


def _extend_path(first: str) -> None:
    sys.path.insert(0, first)
    sys.path.insert(1, str(SHIMS))  # before an installed PopTorch; spawned processes get it
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIMS), *([inherited] if inherited else [])])


def _run_main(code: types.CodeType, file: str, spec: ModuleSpec | None) -> None:
    """Runs code as the main module. Classes of a script can then be pickled when it ends, too."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=file, __spec__=spec, __builtins__=__builtins__)
    if spec is not None:
        vars(module)["__package__"] = spec.parent
    sys.modules["__main__"] = module
    exec(code, vars(module))  # noqa: S102  # what the program is for


def _find_module(name: str) -> ModuleSpec | None:
    """The module that `python -m` would run. A package's own errors are not hidden."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        return spec
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError:
        return None
