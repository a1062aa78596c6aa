"""Importing: neither front loads what it does not need."""

from tests.support import forked
from tests.support.programs import environment

PROGRAM = """
import sys
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    import ipu_pipeline.poptorch
except ImportError as error:
    said = str(error)
assert said.startswith(
    "ipu_pipeline.poptorch needs torch, which is not installed. Install the extra: pip"
), said
del sys.modules["torch"]
assert not any(name.startswith("ipu_pipeline.poptorch") for name in sys.modules)
import ipu_pipeline.poptorch as poptorch
from jax._src import xla_bridge
assert not xla_bridge._backends
assert "torch._dynamo" not in sys.modules
missing = [name for name in poptorch.__all__ if not hasattr(poptorch, name)]
assert not missing, missing
"""


def test_torch_is_imported_by_its_front_alone_which_starts_no_backend_and_loads_no_export():
    """All other names of the package are there in the process that this one is forked from."""
    done = forked.run(PROGRAM, environment(as_tests=True))
    assert done.returncode == 0, done.stderr
