"""Importing: neither front loads what it does not need."""

import subprocess
import sys


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_importing_the_package_does_not_import_torch():
    done = run("import sys, ipu_pipeline; ipu_pipeline.Session; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_without_torch_the_front_says_what_to_install():
    done = run("import sys; sys.modules['torch'] = None; import ipu_pipeline.poptorch")
    assert done.returncode == 1
    assert (
        "ipu_pipeline.poptorch needs torch, which is not installed. Install the extra: pip" in done.stderr
    )


def test_the_front_starts_no_backend_and_loads_no_export():
    program = """
import sys
import ipu_pipeline.poptorch as poptorch
from jax._src import xla_bridge
assert not xla_bridge._backends
assert "torch._dynamo" not in sys.modules
missing = [name for name in poptorch.__all__ if not hasattr(poptorch, name)]
assert not missing, missing
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
