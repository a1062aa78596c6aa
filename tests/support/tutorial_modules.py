"""Programs of a tutorial's folder as modules, which import each other as where they are started."""

import contextlib
import importlib
import io
import sys

from tests.support.programs import ROOT

POPTORCH = ROOT / "tutorial" / "poptorch"


@contextlib.contextmanager
def imported(folder, *names):
    """The programs of a folder by name; they are no longer there to be imported afterwards."""
    sys.path.insert(0, str(folder))
    own = {path.stem for path in folder.glob("*.py")}
    assert not own & set(sys.modules)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in own & set(sys.modules):
            del sys.modules[name]


def run_main(program, patch, *options):
    """What a program prints, run in this process."""
    patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, options)])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        program.main()
    return printed.getvalue()
