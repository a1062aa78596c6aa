"""Checkpoints under any path: Orbax and TensorStore read some characters otherwise than the system does."""

import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ipu_pipeline import engine
from ipu_pipeline.errors import NoCheckpointError


@pytest.fixture(scope="module")
def pipeline():
    weights = [{"w": np.ones(3, "f4")}]
    return engine.Pipeline([lambda p, x: (x * p["w"]).sum()], parameters=weights, num_micro_batches=1)


@pytest.fixture(scope="module")
def state(pipeline):
    return pipeline.init(jax.random.key(0), np.ones(3, "f4"))


@pytest.mark.parametrize("name", ["layers=[1,2]", "[!x]", "a*?", "a\\b", "a\nb", "\udcff"])
def test_any_path(name, tmp_path, pipeline, state):
    path = tmp_path / name / name
    engine.save(path, state)
    engine.save(path, state)  # in place of the first one
    engine.restore(path, pipeline)
    assert [entry.name for entry in path.parent.iterdir()] == [name]


def test_where_the_link_would_be_misread(tmp_path, monkeypatch, pipeline, state):
    engine.save(tmp_path / "plain", state)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t[1]"))
    (tmp_path / "t[1]").mkdir()
    with pytest.raises(ValueError, match=r"has one of .* Set TMPDIR"):
        engine.save(tmp_path / "t[1]" / "c", state)
    assert not [*(tmp_path / "t[1]").iterdir()]
    engine.restore(tmp_path / "plain", pipeline)


def test_a_name_is_no_pattern(tmp_path, pipeline, state):
    """`run1` is being written, and replaced, by others."""
    engine.save(tmp_path / "run1", state)
    (tmp_path / "run1").rename(tmp_path / ".run1.being-replaced-1-1")
    (tmp_path / ".run1.being-written-1-1").mkdir()
    with pytest.raises(NoCheckpointError):
        engine.restore(tmp_path / "run[12]", pipeline)
    engine.save(tmp_path / "run[12]", state)
    assert len([*tmp_path.iterdir()]) == 3
    engine.restore(tmp_path / "run1", pipeline)


def test_arrays_that_are_not_found_again(tmp_path, monkeypatch, pipeline, state):
    """As when Orbax writes them somewhere else: what was there stays."""
    engine.save(tmp_path / "c", state)
    write = ocp.Checkpointer.save
    monkeypatch.setattr(
        ocp.Checkpointer, "save", lambda self, path, args: write(self, path.with_name("elsewhere"), args)
    )
    with pytest.raises(OSError, match="just written to .* are not found there"):
        engine.save(tmp_path / "c", state)
    engine.restore(tmp_path / "c", pipeline)
