"""What a launcher gives its processes, as far as the library knows."""

import pytest

from ipu_pipeline.checkpointing import in_memory
from ipu_pipeline.processes.launched import MEMORY_VARIABLE


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The directory in memory."""
    made = tmp_path / "memory"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(in_memory, "_begun", {})
    monkeypatch.setenv(MEMORY_VARIABLE, str(made))
    return made
