"""Fixtures that give a test what a launcher gives its processes, as far as the library knows."""

import threading
from collections import Counter

import pytest

from ipu_pipeline.checkpointing import in_memory
from ipu_pipeline.processes.launcher import MEMORY_VARIABLE, RESTART_VARIABLE


class KilledError(Exception):
    """Ends a program where its process would be killed."""


def finish_writing():
    """Waits until what was begun is in memory: a process may end before or after."""
    for thread in threading.enumerate():
        if thread.name == in_memory._THREAD:
            thread.join()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The directory in memory."""
    made = tmp_path / "memory"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(in_memory, "_begun", {})
    monkeypatch.setenv(MEMORY_VARIABLE, str(made))
    return made


@pytest.fixture
def restart(directory, monkeypatch):
    """Begins anew, as in a process that was started so often again."""

    def begin(number):
        finish_writing()
        monkeypatch.setenv(RESTART_VARIABLE, str(number))
        monkeypatch.setattr(in_memory, "_begun", {})
        monkeypatch.setattr(in_memory, "_named", Counter())

    return begin
