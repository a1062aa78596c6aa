"""What a wrapped model is asked for and does to the user's model only."""

from __future__ import annotations

import abc
from typing import Any, NoReturn

import torch

from ipu_pipeline.poptorch.execution.building import Wrapped
from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["Refused"]


class Refused(abc.ABC):
    """The part of a wrapped model that says what it does not do, and why."""

    _wrapped: Wrapped

    @property
    @abc.abstractmethod
    def model(self) -> torch.nn.Module:
        """The user's model."""

    def train(self, mode: bool = True) -> torch.nn.Module:
        """Changes the user's model, not what was compiled, which keeps the modes of when it was wrapped."""
        if any(was != mode for was in self._wrapped.modes.values()):
            warn_once(
                "train() and eval() of a wrapped model change the user's model. On the devices its modules "
                "keep the modes that they had when it was wrapped: wrap it again for others."
            )
        return self.model.train(mode)

    def eval(self) -> torch.nn.Module:
        """See `train`."""
        return self.train(False)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy`, `pickle` and `torch.save`: what is compiled, and on devices, cannot be copied.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "A wrapped model cannot be copied, pickled or given to torch.save. That works with the user's "
            "model, which is its attribute `model`, and with its state_dict(); its method "
            "save(filename) writes what poptorch.load(filename) wraps again."
        )
