"""Micro-batches on their way to the devices."""

import pytest

from ipu_pipeline.engine.devices.feeds import gather, take_from


def test_a_take_that_returns_nothing_is_an_error():
    """In place of an endless loop."""
    with pytest.raises(RuntimeError, match="take returned no micro-batch, of 2 that were asked for"):
        gather(take_from([1, 2]), 4, 4)
