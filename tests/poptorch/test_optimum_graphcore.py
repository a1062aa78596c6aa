"""optimum-graphcore, the largest library that is written for PopTorch, runs unchanged.

Its trainers train and evaluate models of transformers under `ipu-pipeline run` as plain torch does. The
versions are its own, of 2023, in a folder before this environment's packages.
"""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support.programs import ROOT, start

pytestmark = pytest.mark.thorough

PACKAGES = (
    "optimum-graphcore==0.7.1",
    "optimum==1.6.1",
    "transformers==4.29.2",
    "tokenizers==0.13.3",  # the last that this transformers takes; wheels are for Pythons up to 3.11
    "huggingface-hub==0.36.2",  # the last without what 1.0 removed
    "typeguard==4.6.1",
    "coloredlogs==15.0.1",
    "humanfriendly==10.0",
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with them, which pytest would keep. What else they need is in this environment."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "install"]
    command += ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", folder]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(folder)
        pytest.skip(f"pip cannot get optimum-graphcore's packages: {done.stderr.strip().splitlines()[-1]}")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def results(packages, tmp_path_factory):
    """What the program found."""
    folder = tmp_path_factory.mktemp("folder")
    variables = {
        "PYTHONPATH": f"{ROOT}:{packages}",
        "IPU_PIPELINE_HARDWARE_VERSION": "21",  # it insists on an Mk2
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # its checkpoints have NumPy's random state
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    program = ROOT / "tests" / "support" / "optimum_program.py"
    done = start("-m", "ipu_pipeline", "run", program, folder, as_tests=True, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def assert_close(found, expected, tolerance=1e-5):
    assert np.shape(found) == np.shape(expected)
    assert np.linalg.norm(np.subtract(found, expected)) <= tolerance * np.linalg.norm(expected)


def test_a_trainer_trains_evaluates_and_continues_as_plain_torch(results):
    found = results["classify"]
    assert len(found["losses"]) == 4
    for name in ("losses", "weights", "predictions"):
        assert_close(found[name], found[f"{name} of plain torch"])
    assert_close(found["evaluated"], [found["evaluated by plain torch"]] * 2)
    assert found["shape"] == [4, 3]
    assert found["losses after a checkpoint"] == found["losses"][2:]
    assert found["weights after a checkpoint"] == found["weights"]


def test_a_trainer_generates_between_its_steps(results):
    """With caches on the devices. Its AdamW is transformers', without corrections of the first steps."""
    found = results["translate"]
    assert len(found["losses"]) == 4
    assert_close(found["losses"], found["losses of plain torch"])
    assert found["predictions"] == found["predictions of plain torch"]
    assert len({tuple(row) for row in found["predictions"]}) > 1
