"""Lets another process continue this one's random numbers, so that seeds have an effect there."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Randomness"]


class Randomness(NamedTuple):
    """The states of the generators of Python, NumPy and torch.

    A data set's shuffling and transformations then draw the same numbers in the other process as here.
    """

    of_python: Any
    of_numpy: Any
    of_torch: bytes

    @classmethod
    def take(cls) -> Randomness:
        """Returns this process's states, and advances torch's generator, so that the next call differs."""
        of_torch = torch.get_rng_state().numpy().tobytes()
        taken = cls(random.getstate(), np.random.get_state(), of_torch)  # noqa: NPY002
        torch.empty((), dtype=torch.int64).random_()
        return taken

    def use(self) -> None:
        """Sets this process's generators to the states."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002  # the user's data sets may use this one
        torch.set_rng_state(torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8))
