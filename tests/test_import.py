"""What `import ipu_pipeline` does, in a process of its own."""

import subprocess
import sys

import pytest

import ipu_pipeline as ipu

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
        "ipu_pipeline.layers",
    ]
