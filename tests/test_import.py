"""What `import ipu_pipeline` does, in a process of its own."""

import subprocess
import sys

import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, reports
from ipu_pipeline.engine import inspect
from tests.support import traces

HEAVY = ("ipu_pipeline.engine", "tensorflow_datasets", "flax", "orbax", "plotly", "tensorflow", "torch")


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", ["ipu_pipeline", "jax, optax, ipu_pipeline"])
def test_imports_only_what_is_used(module):
    loaded = run(f"import {module}, sys; print(*sys.modules)")
    assert not set(HEAVY) & set(loaded)


def test_starts_no_backend():
    program = """
import ipu_pipeline as ipu
for name in dir(ipu):
    getattr(ipu, name)
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run(program) == ["False"]


def test_layers_come_when_they_are_used():
    program = """
import sys
import ipu_pipeline as ipu
before = "ipu_pipeline.layers" in sys.modules
ipu.layers.Dense
print(before, "ipu_pipeline.layers" in sys.modules, "flax" in sys.modules)
"""
    assert run(program) == ["False", "True", "False"]


def test_all_names_are_there():
    assert dir(ipu) == sorted(ipu.__all__)
    for name in dir(ipu):
        assert getattr(ipu, name) is not None
    assert ipu.Session is ipu.Session
    with pytest.raises(AttributeError, match="module 'ipu_pipeline' has no attribute 'pipelines'"):
        _ = ipu.pipelines


def test_what_is_imported_from_it():
    assert run("from ipu_pipeline import Session, layers; print(Session.__name__, layers.__name__)") == [
        "Session",
        "ipu_pipeline.tf1.layers",
    ]


def test_the_engine_s_names_come_when_they_are_used():
    for module in (engine, inspect, reports):
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name) is getattr(module, name) is not None
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
            _ = module.nothing
        with pytest.raises(ImportError):
            exec(f"from {module.__name__} import nothing")  # noqa: S102
    program = """
import sys
from ipu_pipeline.engine import Costs, Scenario, schedules, simulate
from ipu_pipeline.engine.inspect import IpuMemory, PipelineDetails, PipelineFacts
from ipu_pipeline import engine
print(engine.schedules is schedules, engine.simulate is simulate, "jax" in sys.modules)
print(engine.pipeline.Pipeline is engine.Pipeline, "jax" in sys.modules)
"""
    assert run(program) == ["True", "True", "False", "True", "True"]


# What commands that need no devices may not import: it takes longer than what they do.
SLOW = {"jax", "jaxlib", "optax", "flax", "torch"}
SIZES = "'--stages', '4', '--micro-batches', '8'"


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        ("'--help'", {"numpy"}),
        ("'run', '--help'", {"numpy"}),
        ("'profile', '--help'", {"numpy"}),
        ("'devices', '--help'", {"numpy"}),
        ("'monitor'", {"numpy"}),
        ("'run', 'script.py'", {"numpy"}),
        (f"'schedule', {SIZES}", {"plotly"}),
        (f"'simulate', {SIZES}", {"plotly"}),
        ("'report', '.'", set()),
    ],
)
def test_commands_start_without_what_they_do_not_use(tmp_path, arguments, without):
    """`ipu-pipeline --help` imported JAX and Optax, and took more than a second."""
    (tmp_path / "script.py").write_text("import sys")
    (tmp_path / "profile.json").write_text(traces.make_profile().to_json())
    program = f"""
import contextlib, io, os, sys
from ipu_pipeline.command_line.main import main
os.chdir({str(tmp_path)!r})
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    assert main([{arguments}]) == 0
print(*sys.modules)
"""
    loaded = run(program)
    assert "ipu_pipeline.command_line.main" in loaded
    assert not (SLOW | without) & set(loaded)
