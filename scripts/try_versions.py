"""Runs a part of the tests with each version that the library runs with, in an environment of its own.

    python scripts/try_versions.py [NAME ...]

`make versions` runs it. The environments are made in build/versions, which takes minutes and a network the
first time, and stay there. The newest JAX with the oldest Python is what `make test` runs with.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
# What differs between versions of JAX, and pipelines as a whole.
TESTS = (
    "tests/ground",
    "tests/engine/jaxprs",
    "tests/engine/tracing",
    "tests/engine/updates",
    "tests/engine/test_pipeline.py",
    "tests/engine/test_features.py",
    "tests/engine/test_finding_faults.py",
    "tests/checkpointing/test_written_before.py",
    "tests/reports/test_capture.py",
    "tests/tf1/ops/test_auto_stages.py",
    "tests/tf1/ops/test_host_embedding.py",
    "tests/tf1/ops/test_pipelining_ops.py",
    "tests/tf1/program",
)
PACKAGES = (
    "flax",
    "grain",
    "hypothesis",
    "jax",
    "jaxlib",
    "plotly",
    "pytest",
    "pytest-xdist",
    "tensorboardX",
)
# With the Python of `make test` alone: torch is large.
TORCH_TESTS = (
    "tests/poptorch/test_poptorch_small.py",
    "tests/poptorch/graphs",
    "tests/poptorch/operations",
)
TORCH_PACKAGES = ("expecttest", "safetensors", "torch")
PASSED, NOT_RUN = "passed", "not run: this Python is not on this machine"


@dataclass(frozen=True)
class Environment:
    """A Python, packages at other versions than in pyproject.toml, and which tests run."""

    python: str
    packages: dict[str, str]
    tests: tuple[str, ...] = TESTS
    left_out: tuple[str, ...] = ()  # tests of what these versions have not


# On CPUs, XLA of JAX 0.9 has no host memory within a program (docs/versions.md).
_PLAIN = "tests/engine/test_features.py::test_equals_a_plain_loop"
_SCALED = "tests/engine/updates/test_updates_loss_scaling.py::test_a_pipeline_equals_a_loop_by_hand"
_OFFLOADED_ON_ONE_IPU = (
    f"{_PLAIN}[groups, recomputed-layers-float32-same]",
    f"{_PLAIN}[all offloaded, one IPU-branches-float32-same]",
    f"{_SCALED}[float16-False-options1]",
)
ENVIRONMENTS = {
    "jax-0.9.0": Environment(
        "python3.11",
        {"jax": "0.9.0", "jaxlib": "0.9.0", "flax": "0.12.6"},
        (*TESTS, TORCH_TESTS[0]),
        _OFFLOADED_ON_ONE_IPU,
    ),
    "torch-2.14.1": Environment("python3.11", {"torch": "2.14.1"}, TORCH_TESTS),
    "python-3.12": Environment("python3.12", {}),
    "python-3.13": Environment("python3.13", {}),
}


def pinned() -> dict[str, str]:
    """The versions that `make test` runs with, by package."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    entries = [entry for group in ("docs", "dev") for entry in groups[group] if isinstance(entry, str)]
    return dict(entry.split(" ==") for entry in entries)


def make(name: str, python: str) -> Path:
    """Makes an environment, or brings it up to date; returns its Python."""
    found = FOLDER / name / "bin" / "python"
    # Not in one that was interrupted: it may have no pip.
    if not found.exists() or subprocess.run([found, "-m", "pip", "--version"], check=False).returncode != 0:
        subprocess.run([python, "-m", "venv", "--clear", FOLDER / name], check=True)
    versions = pinned() | ENVIRONMENTS[name].packages
    has_torch = TORCH_TESTS[0] in ENVIRONMENTS[name].tests
    packages = (*PACKAGES, *(TORCH_PACKAGES if has_torch else ()))
    wanted = [f"{package}=={versions[package]}" for package in packages]
    pip = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted, "--editable", f"{ROOT}[datasets]"], check=True)
    return found


def run(name: str) -> str:
    """Runs the tests of an environment; returns "passed", or what else became of them."""
    environment = ENVIRONMENTS[name]
    python = shutil.which(environment.python)
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode != 0:
        return NOT_RUN
    left_out = [part for test in environment.left_out for part in ("--deselect", test)]
    options = ["-q", "-m", "not thorough", "-n", "2", "--dist", "worksteal", *left_out]
    options += environment.tests
    try:
        done = subprocess.run([make(name, python), "-m", "pytest", *options], cwd=ROOT, check=False)
    except subprocess.CalledProcessError as error:
        return f"FAILED: {error}"
    return PASSED if done.returncode == 0 else "FAILED"


def main() -> None:
    names = sys.argv[1:] or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        sys.exit(f"There is no environment {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    results = {name: run(name) for name in names}
    for name, result in results.items():
        print(f"{name}: {result}")
    # Those whose Python is not here are no fault, unless nothing is left.
    sys.exit(PASSED not in results.values() or any("FAILED" in result for result in results.values()))


if __name__ == "__main__":
    main()
