"""What `import ipu_pipeline` does, in a process of its own."""

import subprocess
import sys

import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, reports
from ipu_pipeline.engine import inspect, planning
from tests.support import forked, traces
from tests.support.programs import environment

HEAVY = ("ipu_pipeline.engine", "tensorflow_datasets", "flax", "orbax", "plotly", "tensorflow", "torch")


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_imports_only_what_is_used_and_starts_no_backend():
    """Without JAX, `import ipu_pipeline` imports even less; tests/graphcore/test_sdk_names.py has that."""
    program = f"""
import sys
import jax, optax, ipu_pipeline as ipu
print("ipu_pipeline.layers" in sys.modules, *set({HEAVY}) & set(sys.modules))
from ipu_pipeline import Session, layers
print(Session.__name__, layers.__name__)
ipu.layers.Dense
print("ipu_pipeline.layers" in sys.modules, "flax" in sys.modules)
for name in dir(ipu):
    getattr(ipu, name)
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run(program) == ["False", "Session", "ipu_pipeline.tf1.layers", "True", "False", "False"]


def test_all_names_are_there():
    assert dir(ipu) == sorted(ipu.__all__)
    for name in dir(ipu):
        assert getattr(ipu, name) is not None
    assert ipu.Session is ipu.Session
    assert ipu.utils.SelectionOrder.SNAKE
    assert ipu.ipu_compiler.compile
    with pytest.raises(AttributeError, match="module 'ipu_pipeline' has no attribute 'pipelines'"):
        _ = ipu.pipelines


def test_the_engine_s_names_come_when_they_are_used():
    for module in (engine, inspect, planning, reports):
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name) is getattr(module, name) is not None
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
            _ = module.nothing
        with pytest.raises(ImportError):
            exec(f"from {module.__name__} import nothing")  # noqa: S102
    assert engine.pipeline.Pipeline is engine.Pipeline


WITH_TORCH = """
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
    done = forked.run(WITH_TORCH, environment(as_tests=True))
    assert done.returncode == 0, done.stderr


# What commands that need no devices may not import: it takes longer than what they do.
SLOW = {"jax", "jaxlib", "optax", "flax", "torch"}


COMMANDS = [
    *(
        (arguments, {"numpy"})
        for arguments in ("--help", "run --help", "profile --help", "devices --help", "launch --help")
    ),
    ("monitor", {"numpy"}),
    ("run script.py", {"numpy"}),
    ("schedule --stages 4 --micro-batches 8", {"plotly"}),
    ("simulate --stages 4 --micro-batches 8", {"plotly"}),
    ("report .", set()),
]


def test_commands_and_the_simulator_start_without_what_they_do_not_use(tmp_path):
    """`ipu-pipeline --help` imported JAX and Optax, and took more than a second; one process for all."""
    (tmp_path / "script.py").write_text("import sys")
    (tmp_path / "profile.json").write_text(traces.make_profile().to_json())
    program = f"""
import contextlib, io, os, sys
from ipu_pipeline.command_line.main import main
os.chdir({str(tmp_path)!r})
for arguments, without in {COMMANDS!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        assert main(arguments.split()) == 0, arguments
    print(len(({SLOW!r} | without) & sys.modules.keys()))
from ipu_pipeline.engine import Chunking, Costs, Offload, Recomputation, Reduction, Scenario, Shard
from ipu_pipeline.engine import schedules, simulate
from ipu_pipeline.engine.inspect import IpuMemory, PipelineDetails, PipelineFacts
from ipu_pipeline import engine
print(engine.schedules is schedules, engine.simulate is simulate, "jax" in sys.modules)
"""
    assert run(program) == [*["0"] * len(COMMANDS), "True", "True", "False"]
