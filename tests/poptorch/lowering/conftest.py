"""torch's lists of operators and modules import setuptools, which adds a folder to the path."""

import sys

import pytest


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
