"""Random numbers of another process that go on from this one's, so that seeds have an effect there."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Randomness"]


class Randomness(NamedTuple):
    """The states of the generators of Python, NumPy and torch.

    A data set's shuffling and transformations then draw the same in the other process as they would here.
    """

    of_python: Any
    of_numpy: Any
    of_torch: bytes

    @classmethod
    def take(cls) -> Randomness:
        """That of this process. torch's generator is moved on: the next to take it gets another one."""
        of_torch = torch.get_rng_state().numpy().tobytes()
        taken = cls(random.getstate(), np.random.get_state(), of_torch)  # noqa: NPY002
        torch.empty((), dtype=torch.int64).random_()
        return taken

    def use(self) -> None:
        """Continues with it in this process."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002  # the user's data sets may use this one
        torch.set_rng_state(torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8))
