"""The training loop of an estimator: runs, checkpoints, scalars, signals."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ipu_pipeline.checkpoints import CheckpointSeries
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.estimator_programs import EstimatorProgram
from ipu_pipeline.estimator_runs import Run, Runs
from ipu_pipeline.interrupts import StoppedAtOnce, StopRequest, stopping_on_signals
from ipu_pipeline.ipu_run_config import RunConfig
from ipu_pipeline.ipu_session_run_hooks import SessionRunHook
from ipu_pipeline.scalars import ScalarWriter
from ipu_pipeline.session import Session

__all__ = ["Training", "describe_function"]

_SIGNAL_EXIT = 128  # the exit status of a process that a signal ends is this and the signal's number
_logger = logging.getLogger("ipu_pipeline")


def describe_function(function: Any) -> str:
    """What an `input_fn` is known by in checkpoints: its module and name."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


class Training:
    """Trains until a step, from where a session is."""

    def __init__(
        self,
        made: EstimatorProgram,
        session: Session,
        hooks: Sequence[SessionRunHook],
        config: RunConfig,
        series: CheckpointSeries,
        scalars: ScalarWriter,
        input_fn: Any,
        global_step: int,
    ) -> None:
        """Takes what it needs.

        Args:
          made: the program.
          session: with the state to go on from; its infeed is initialized.
          hooks: all of them.
          config: the estimator's.
          series: where checkpoints go.
          scalars: where scalars go.
          input_fn: where the data came from.
          global_step: where it begins.
        """
        self._runs = Runs(made, session, hooks)
        self._made = made
        self._session = session
        self._config = config
        self._series = series
        self._scalars = scalars
        self._input_fn = describe_function(input_fn)
        self._step = self._saved_step = self._reported_step = global_step
        self._has_ended = False  # the data
        self._losses: list[tuple[float, int]] = []  # sums, and of how many micro-batches, to be reported
        self._extra_scalars: dict[str, float] = {}
        self._saved_at = self._reported_at = time.monotonic()

    def run_until(self, final_step: int) -> None:
        """Trains until a number of micro-batches, or until the data end, a hook stops it or a signal comes.

        Raises:
          SystemExit: SIGINT or SIGTERM came; the state after the running weight update is saved.
        """
        with stopping_on_signals() as request:
            try:
                with self._runs.started():
                    self._loop(final_step, request)
                    if not request.is_made():
                        self._save_finally(request)
            except StoppedAtOnce:
                pass
            except Exception:
                self._save_finally(request)
                raise
            if request.number is not None:
                self._save_finally(request)
                _logger.info("Training ends at step %d by signal %d.", self._step, request.number)
                raise SystemExit(_SIGNAL_EXIT + request.number)

    def _loop(self, final_step: int, request: StopRequest) -> None:
        per_update = self._made.spec.micro_batches_per_update
        is_first = True
        while self._step < final_step and not request.is_made():
            wanted = -(-(final_step - self._step) // per_update)
            every = self._config.save_checkpoints_steps
            if every is not None:
                due = self._saved_step - self._saved_step % every + every
                wanted = min(wanted, -(-(due - self._step) // per_update))
            before = self._session.execution_count(self._made.name)
            try:
                run = self._runs.run(self._step, wanted, self._mean_loss, request.is_made)
            except OutOfRangeError as error:
                # Updates before the data's end were done.
                self._step += (self._session.execution_count(self._made.name) - before) * per_update
                outputs = self._session.run(self._made.outfeed.dequeue())
                self._losses.append(
                    self._sum_losses(outputs["loss"] if self._made.hooks_that_log else outputs)
                )
                self._report(is_first)
                self._has_ended = True
                _logger.info("Training ends at step %d: %s", self._step, error)
                return
            except BaseException:
                self._step += (self._session.execution_count(self._made.name) - before) * per_update
                raise
            self._step = run.context.global_step
            self._note(run)
            self._report(is_first)
            is_first = False
            self._save_if_due()
            if run.context.stop_requested:
                return

    def _mean_loss(self, outputs: Any) -> float:
        total, count = self._sum_losses(outputs)
        return total / max(count, 1)

    def _sum_losses(self, outputs: Any) -> tuple[float, int]:
        """The sum of the losses of a run, and of how many micro-batches."""
        if self._made.hooks_that_log:  # a loss per micro-batch
            dtype = self._made.spec.loss_accumulator_dtype or outputs.dtype
            return float(np.sum(outputs, dtype=dtype)), len(outputs)
        sums = np.asarray(outputs, np.float64)  # one per weight update
        return float(np.sum(sums)), len(sums) * self._made.spec.micro_batches_per_update

    def _note(self, run: Run) -> None:
        self._losses.append(self._sum_losses(run.outputs))
        self._extra_scalars.update(run.context.scalars)

    def _report(self, is_first: bool) -> None:
        """Logs and writes scalars if it is time: at the first run, and when so many steps have passed."""
        every = self._config.log_step_count_steps
        if every is None or not self._losses:
            return
        if not is_first and self._step // every == self._reported_step // every:
            return
        now = time.monotonic()
        speed = (self._step - self._reported_step) / max(now - self._reported_at, 1e-9)
        loss = sum(total for total, _count in self._losses) / max(sum(n for _total, n in self._losses), 1)
        examples = speed * self._made.num_examples
        _logger.info("loss = %.6g, step = %d", loss, self._step)
        _logger.info("global_step/sec: %.6g, examples/sec: %.6g", speed, examples)
        scalars = {"loss": loss, "steps/s": speed, "examples/s": examples, **self._extra_scalars}
        self._scalars.write(self._step, scalars)
        self._losses, self._extra_scalars = [], {}
        self._reported_step, self._reported_at = self._step, now

    def _save_if_due(self) -> None:
        every, seconds = self._config.save_checkpoints_steps, self._config.seconds_between_checkpoints
        if every is not None:
            is_due = self._step // every > self._saved_step // every
        else:
            assert seconds is not None
            is_due = time.monotonic() - self._saved_at >= seconds
        if is_due:
            self._save()

    def _save(self) -> None:
        self._series.start_saving(self._step, self._session.take_snapshot(extra=self._extra()))
        self._saved_step, self._saved_at = self._step, time.monotonic()

    def _extra(self) -> dict[str, Any]:
        return {
            "global_step": self._step,
            "input_fn": self._input_fn,
            "data_has_ended": self._has_ended,
        }

    def _save_finally(self, request: StopRequest) -> None:
        request.is_final = True
        self._series.wait()
        if self._step > self._saved_step or self._series.has_failed:
            self._save()
            self._series.wait()
        elif self._has_ended and self._step > 0:
            self._series.amend(self._step, self._extra())
