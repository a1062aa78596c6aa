"""The tutorial's programs, run as a reader runs them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ipu_pipeline import datasets
from ipu_pipeline.processes import announcements, board
from tests.support import forked

ROOT = Path(__file__).parents[2]
QUICK_COMPILATION = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # see conftest
# XLA optimizes little in `make test`; in `make thorough` as for a reader, which takes twice as long.
AS_TESTS = [True, pytest.param(False, marks=pytest.mark.thorough, id="as a reader")]
STEP1 = "tutorial/step1_single_ipu.py"
STEP2 = "answers/step2_sharding.py"
STEP3 = "answers/step3_pipelining.py"
STEP4 = "answers/step4_configurable_stages.py"
ESTIMATOR = "answers/ipu_pipeline_estimator.py"

_RECORD = """
import runpy, sys
import ipu_pipeline
import numpy as np
from ipu_pipeline import session, tutorial_support
found = {"losses": []}
class Session(session.Session):
    def run(self, fetch, feed_dict=None):
        if "start" not in found:
            super().run(ipu_pipeline.global_variables_initializer())
            found["start"] = self.variables
        return super().run(fetch, feed_dict)
ipu_pipeline.Session = Session
original = tutorial_support.train
def train(run_step, *rest):
    def recorded():
        losses = run_step()
        found["losses"].append(losses)
        return losses
    original(recorded, *rest)
tutorial_support.train = train
target, program, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(program, run_name="__main__")
np.savez(target, losses=np.stack(found["losses"]), **found["start"])
"""


def environment(as_tests=False):
    """That of processes that tests start, without MNIST's folder.

    They have compilation caches of their own, as many compile the same. Not that of the tests: JAX writes
    an entry piece by piece, and a process that is killed leaves a part of one.

    Args:
      as_tests: whether XLA compiles as it does in the tests, so that all bits are the same; else as for a
        reader, which is faster where a program runs for long.
    """
    found = {key: value for key, value in os.environ.items() if key != datasets.DATA_DIR_VARIABLE}
    if board.DIRECTORY_VARIABLE in found:  # see conftest
        found.pop(announcements.SWITCH_VARIABLE, None)
    if not as_tests:
        found = {key: value for key, value in found.items() if key not in QUICK_COMPILATION}
    if jax.config.jax_compilation_cache_dir is not None:
        name = f"tests{os.environ.get('PYTEST_XDIST_WORKER', '')}" if as_tests else "readers"
        found["JAX_COMPILATION_CACHE_DIR"] = f"{jax.config.jax_compilation_cache_dir}-{name}"
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        found["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return found


_left = []


class Started(subprocess.Popen):
    """A process that ends with its test at the latest; else Python warns of it, in another test."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        _left.append(self)


def begin(
    *arguments,
    as_tests=True,
    folder=ROOT,
    output=subprocess.PIPE,
    error_output=subprocess.PIPE,
    **variables,
):
    """Starts Python as `start` does, and goes on."""
    return Started(
        [sys.executable, *map(str, arguments)],
        stdout=output,
        stderr=error_output,
        text=True,
        cwd=folder,
        env={**environment(as_tests), "PYTHONPATH": str(ROOT), **variables},
    )


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_what_is_left():
    while _left:
        with _left.pop() as process:
            process.kill()


def start(*arguments, as_tests=False, folder=ROOT, **variables):
    """Runs Python in a folder, with more variables in its environment; see `environment`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={**environment(as_tests), "PYTHONPATH": str(ROOT), **variables},
        check=False,
    )


def run_each(codes, folder, as_tests=False):
    """What each of some programs prints; warnings are errors.

    Args:
      codes: their texts, by names.
      folder: each runs in one within it, named as the program.
      as_tests: see `environment`.
    """
    printed = {}
    for name, code in codes.items():
        (folder / name).mkdir()
        result = forked.run(code, environment(as_tests), folder / name)
        assert result.returncode == 0, f"{name}: {result.stderr}"
        printed[name] = result.stdout
    return printed


def run(program, *options, code=0, **settings):
    """What a program prints; with another code than 0, its errors. Settings are those of `start`."""
    result = start(program, *options, **settings)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stderr


def start_forked(program, *options):
    """As `start` as in the tests, of a program that starts at once; see `forked`."""
    arguments = [str(ROOT / program), *map(str, options)]
    code = f"import runpy, sys\nsys.argv = {arguments}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return forked.run(code, environment(as_tests=True))


def record(target, program, *options):
    """Runs a program, with its arrays going to a file.

    Returns:
      What it prints, its losses [steps, micro-batches], and the variables at the start by full name.
    """
    result = start("-c", _RECORD, target, program, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    with np.load(target) as archive:
        variables = {name: archive[name] for name in archive.files if name != "losses"}
        return result.stdout, archive["losses"], variables


def printed_losses(output):
    """The mean loss of each step that is printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"Step (\d+), .*loss: (\S+)", output)}
