"""Scalars of training for users of a `Session`, as the estimator writes them."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.tf1.estimator.scalars import FILE, ScalarWriter

__all__ = ["SummaryWriter"]


class SummaryWriter:
    """Writes scalars as JSON lines, and as a TensorBoard event file if tensorboardX is installed.

    The lines are appended to `metrics.jsonl`: each is an object with `step`, `time` (seconds since 1970),
    `name` and `value`, which is null where it is not finite. They are there as soon as they have been
    written; the event file has them a few seconds later, and when the writer is closed.

    Example:
      >>> with ipu.SummaryWriter("runs/first") as writer:
      ...     for step in range(100):
      ...         writer.write(step, {"loss": 1 / (1 + step)})
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """Opens the files.

        Args:
          directory: the directory of the files; it is created. One writer at a time uses it.
          step: the step from which training goes on, for example `session.update_count()` after a restore:
            scalars that an earlier run wrote for later steps are dropped. None keeps everything.

        Raises:
          OSError: they cannot be opened.
          ValueError: the step is not an integer from 0.
        """
        if step is not None:
            _check_step(step)
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, FILE), "a", encoding="utf-8"):
            pass  # errors in opening are raised here; later errors are logged, and training goes on
        self._writer: ScalarWriter | None = ScalarWriter(directory, step)
        if not self._writer.is_open:
            raise OSError(
                f"SummaryWriter: the scalars in {directory} could not be opened, or those after step "
                f"{step} not be dropped; the log says why."
            )

    def __enter__(self) -> SummaryWriter:
        """Returns the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the writer."""
        self.close()

    def close(self) -> None:
        """Closes the files. It may be called again."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes scalars of one step. If they cannot be written, an error is logged.

        Args:
          step: an integer from 0, such as `session.update_count()`.
          scalars: real numbers, or arrays of one element, by name.

        Raises:
          TypeError: `scalars` is not a dict, a name is not a string, or a value is not such a number.
          ValueError: the step is not an integer from 0, or the writer was closed.
        """
        if self._writer is None:
            raise ValueError("SummaryWriter: write was called after close.")
        _check_step(step)
        if not isinstance(scalars, Mapping):
            raise TypeError(f"SummaryWriter.write: scalars must be a dict; got {scalars!r}.")
        self._writer.write(
            int(step), {_check_name(name): _number(name, value) for name, value in scalars.items()}
        )

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Writes what `Session.metrics` returned; the step of each value is the number of its update.

        Args:
          metrics: arrays by name, with the numbers of the updates as "update". NaN, where a program did not
            report a metric, is written as null.

        Raises:
          ValueError: "update" is missing, or the arrays are not of one length; or the writer was closed.
        """
        if self._writer is None:
            raise ValueError("SummaryWriter: write_metrics was called after close.")
        if not isinstance(metrics, Mapping):
            raise TypeError(f"SummaryWriter.write_metrics: metrics must be a dict; got {metrics!r}.")
        if "update" not in metrics:
            raise ValueError(
                'SummaryWriter.write_metrics: metrics must have "update", as from Session.metrics; got '
                f"{', '.join(metrics) or 'none'}."
            )
        values = {name: np.atleast_1d(np.asarray(value)) for name, value in metrics.items()}
        steps = values.pop("update")
        different = [name for name, value in values.items() if value.shape != steps.shape]
        if different:
            raise ValueError(
                "SummaryWriter.write_metrics: each metric must have one value per update; there are "
                f"{len(steps)} updates, and {different[0]!r} has the shape "
                f"{list(values[different[0]].shape)}."
            )
        for place, step in enumerate(steps):
            self.write(step, {name: value[place] for name, value in values.items()})


def _check_step(step: Any) -> None:
    if not is_integer(step, 0):
        raise ValueError(f"SummaryWriter: step must be an integer from 0; got {step!r}.")


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"SummaryWriter.write: names must be strings, not empty; got {name!r}.")
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    array = np.asarray(value)
    if array.size != 1 or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise TypeError(
            f"SummaryWriter.write: the value of {name!r} must be a real number; it is "
            f"{array.dtype.name}{list(array.shape)}."
        )
    return float(array.reshape(()).astype(np.float64))
