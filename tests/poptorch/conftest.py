"""Fixtures of the tests of PopTorch's front."""

import pytest

from ipu_pipeline.poptorch import logs
from tests.support.launched import directory, restart

__all__ = ["directory", "restart"]


@pytest.fixture
def nothing_said(monkeypatch):
    """What is said once in a process is said again."""
    monkeypatch.setattr(logs, "_said", set())


@pytest.fixture
def log(monkeypatch, nothing_said):
    """What was logged."""
    lines = []
    monkeypatch.setattr(logs.logger, "warning", lines.append)
    return lines
