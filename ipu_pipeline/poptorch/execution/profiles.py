"""JAX's profile of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.poptorch.options import Options

__all__ = ["Profile"]


class Profile:
    """Writes a profile of a model's first call, if its options ask for one."""

    def __init__(self, options: Options, trains: bool) -> None:
        """Takes what the options say.

        Args:
          options: of the model.
          trains: whether it trains, for the name of the directory.
        """
        self._options = options
        self._name = (
            options.model_name if options.is_set("model_name") else "training" if trains else "inference"
        )
        self._is_wanted = options.profiling

    @contextlib.contextmanager
    def of_first_call(self) -> Iterator[None]:
        """Around each call; all but the first are left alone."""
        if not self._is_wanted:
            yield
            return
        self._is_wanted = False
        directory = Path(self._options.profile_dir or ".") / self._name
        distributed = self._options.Distributed
        if distributed.numProcesses > 1:
            directory /= f"process_{distributed.processId}"
        with jax.profiler.trace(str(directory)):
            yield
        logger.info("The profile of a call is in %s", directory)
