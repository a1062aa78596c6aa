"""The arguments of `Session`, and of TensorFlow's own session."""

from __future__ import annotations

from collections.abc import Collection

from ipu_pipeline.graphcore import table
from ipu_pipeline.tf1 import utils

__all__ = ["choose_seed"]

_OF_TENSORFLOW = {"config": "tf.ConfigProto", "graph": "tf.Graph"}


def choose_seed(seed: int | None, others: Collection[str]) -> int:
    """Checks the arguments, and returns the seed of a session.

    Raises:
      TypeError: the seed is not an integer, or there are other arguments.
      ValueError: the seed does not fit 64 bits.
    """
    for name in others:
        text = f"Session() got an unexpected keyword argument {name!r}"
        if name in _OF_TENSORFLOW:
            text += f", which is TensorFlow's. {table.read_rows()[_OF_TENSORFLOW[name]].why}"
        raise TypeError(text)
    if seed is None:
        return utils.current_seed()
    utils.check_seed(seed, "Session")
    return int(seed)
