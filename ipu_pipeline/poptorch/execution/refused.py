"""What a wrapped model is asked for and does not do, or does to the user's model only."""

from __future__ import annotations

import abc
from typing import Any, NoReturn

import torch

from ipu_pipeline.poptorch.execution.building import Wrapped
from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["Refused"]


def _refuse_export(method: str) -> NoReturn:
    raise NotImplementedError(
        f"{method} does not exist here yet: compiled models are not written to files. Keep the weights by "
        "torch.save(model.state_dict(), ...); Options.enableExecutableCaching keeps what was compiled."
    )


class Refused(abc.ABC):
    """The part of a wrapped model that says no, and why."""

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

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> NoReturn:
        """Raises a NotImplementedError."""
        del filename, export_model, save_rng_state
        _refuse_export("save")

    def compileAndExport(
        self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> NoReturn:
        """Raises a NotImplementedError."""
        del filename, args, export_model, kwargs
        _refuse_export("compileAndExport")

    def loadExecutable(self, filename: str) -> NoReturn:
        """Raises a NotImplementedError."""
        del filename
        _refuse_export("loadExecutable")
