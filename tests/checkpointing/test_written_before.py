"""Checkpoints and an exported program of an earlier commit, used by today's code.

`written_before/write.py` says how they were made.
"""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.checkpointing.written_before import write
from tests.support import forked

FOLDER = Path(write.__file__).parent


def unpack(name, folder):
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def read_arrays(path):
    with np.load(path) as file:
        return dict(file)


def assert_as_before(folder, name, is_compiled_alike=True):
    expected, found = read_arrays(FOLDER / f"{name}.npz"), read_arrays(folder / f"{name}.npz")
    is_exact = str(expected.pop("machine")) == str(found.pop("machine")) and is_compiled_alike
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert (found[path].dtype, found[path].shape) == (array.dtype, array.shape), path
        if is_exact or path.startswith("saved/"):
            assert found[path].tobytes() == array.tobytes(), path
        else:
            np.testing.assert_allclose(found[path], array, rtol=1e-4, atol=1e-5, err_msg=path)
    assert any("accumulated" in path for path in found) == (name == "loop")


NAMES = [*write.PARTS, "exported"]


@pytest.mark.thorough
def test_everything_goes_on_exactly_as_the_earlier_commit_did(tmp_path):
    """What is restored is the same to the last bit, and so are results on the same kind of processor.

    In a process of its own, as what was written: XLA is to compile with the same options.
    """
    for name in NAMES:
        unpack(name, tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    code = f"""
import sys
from tests.checkpointing.written_before import write
sys.argv = ["write.py", "--go-on", {str(tmp_path)!r}]
write.main()
"""
    done = forked.run(code, kept)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        assert_as_before(tmp_path, name)


@pytest.mark.parametrize("name", ["pipeline", "exported"])
def test_it_goes_on_as_the_earlier_commit_did(name, tmp_path):
    unpack(name, tmp_path)
    write.predict(tmp_path) if name == "exported" else write.go_on(tmp_path, name)
    assert_as_before(tmp_path, name, is_compiled_alike=False)


@pytest.mark.thorough
def test_the_script_writes_today_what_it_wrote_then(tmp_path):
    with write.write_training(tmp_path, "pipeline") as session:
        write.write_exported(tmp_path, session)
    for name in ("pipeline", "exported"):
        expected, found = read_arrays(FOLDER / f"{name}.npz"), read_arrays(tmp_path / f"{name}.npz")
        del expected["machine"], found["machine"]
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_allclose(found[path], array, rtol=1e-4, atol=1e-5, err_msg=path)
