"""The training loop of an estimator: runs, checkpoints, scalars, signals."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ipu_pipeline.checkpointing.checkpoint_directories import CheckpointSeries
from ipu_pipeline.checkpointing.collective_calls import do_first, is_any, largest
from ipu_pipeline.ground.errors import CheckpointError, OutOfRangeError
from ipu_pipeline.ground.tables import between_bars, is_shown_on
from ipu_pipeline.processes.interrupts import StoppedAtOnce, StopRequest, stopping_on_signals
from ipu_pipeline.processes.launcher import JobHistory, useful_seconds
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, Runs
from ipu_pipeline.tf1.estimator.summaries import ScalarWriter
from ipu_pipeline.tf1.ipu_run_config import RunConfig
from ipu_pipeline.tf1.ipu_session_run_hooks import CheckpointSaverListener, SessionRunHook
from ipu_pipeline.tf1.session.session import Session

_SIGNAL_EXIT = 128  # the exit status of a process that a signal ends is this and the signal's number
_logger = logging.getLogger("ipu_pipeline.estimator")


def describe_function(function: Any) -> str:
    """Identifies an `input_fn` in checkpoints: module, name, plain arguments of a partial."""
    bound: list[str] = []
    while isinstance(function, functools.partial):
        values = [*function.args, *sorted(function.keywords.items())]
        bound += [repr(value) for value in values if _is_plain(value)]
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    arguments = f"({', '.join(bound)})" if bound else ""
    return f"{getattr(function, '__module__', '')}.{name}{arguments}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _is_stopped(request: StopRequest) -> bool:
    """Whether a signal has come to any process; all processes call it at the same places."""
    request.elsewhere = largest(request.number or 0, "stopping by a signal") or None
    return request.elsewhere is not None


class _LossMeter:
    """The losses and the time since the last report; log lines and scalars have one each."""

    def __init__(self, interval: int | None, step: int) -> None:
        """Begins now."""
        self._interval = interval
        self._begin_anew(step)

    def _begin_anew(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()
        self._total, self._count = 0.0, 0

    def add(self, total: float, count: int) -> None:
        """Adds the sum of the losses of `count` micro-batches."""
        self._total += total
        self._count += count

    def take(self, step: int, is_due: bool) -> tuple[float, float] | None:
        """Returns the mean loss and the steps per second, and begins anew; None if that is not due."""
        interval = self._interval
        if (
            interval is None
            or not self._count
            or not (is_due or step // interval != self._step // interval)
        ):
            return None
        means = self._total / self._count, (step - self._step) / max(time.monotonic() - self._time, 1e-9)
        self._begin_anew(step)
        return means


class Training:
    """Trains from the state of a session until a step."""

    def __init__(
        self,
        program: EstimatorProgram,
        session: Session,
        hooks: Sequence[SessionRunHook],
        config: RunConfig,
        series: CheckpointSeries,
        scalars: ScalarWriter,
        input_fn: Any,
        global_step: int,
        is_same_data: bool,
        first_step: int,
        listeners: Sequence[CheckpointSaverListener] = (),
        saved_step: int | None = None,
    ) -> None:
        """Takes what it needs."""
        self._runs = Runs(program, session, hooks, global_step, first_step)
        self._begun_step = first_step
        self._program = program
        self._session = session
        self._config = config
        self._series = series
        self._scalars = scalars
        self._input_fn = describe_function(input_fn)
        self._first_step = self._step = global_step
        self._saved_step = global_step if saved_step is None else saved_step
        self._is_same_data = is_same_data
        self._listeners = listeners
        self._has_ended = False  # whether the data have ended
        self._is_complete = False  # whether all steps were done that were asked for
        self._logged = _LossMeter(config.log_step_count_steps, global_step)
        self._written = _LossMeter(config.save_summary_steps, global_step)
        self._last_loss = 0.0  # the last run's
        self._extra_scalars: dict[str, float] = {}
        self._begun_at = self._saved_at = time.monotonic()

    def run_until(self, final_step: int) -> None:
        """Trains until step `final_step`, or until the data end, a hook stops it or a signal comes.

        Whatever ends it, completed weight updates are saved, unless a hook raises FloatingPointError and
        the loss is not finite.
        """
        _logger.info(
            "Training from step %d to %d: %d micro-batches per weight update, up to %d per run%s.",
            self._first_step,
            final_step,
            self._program.spec.micro_batches_per_update,
            self._config.ipu_run_config.iterations_per_loop,
            f", in each of {self._program.num_replicas} replicas" if self._program.num_replicas > 1 else "",
        )
        with stopping_on_signals() as request:
            try:
                with self._runs.started(), self._showing(final_step) as bar:
                    self._loop(final_step, request, bar)
                    _is_stopped(request)  # also in the last run
                    self._report(is_due=True)
                    self._is_complete = not request.is_made()
            except StoppedAtOnce:
                pass
            except BaseException as error:
                if isinstance(error, FloatingPointError) and not math.isfinite(self._last_loss):
                    self._series.wait()  # such a state is of no use for more training
                    text = "The state after step %d is not saved, since the loss is %s."
                    _logger.error(text, self._step, self._last_loss)
                else:
                    self._save_finally(request, is_error=True)
                raise
            is_saved = self._series.is_complete(self._step) or self._step == 0
            if not is_saved and not request.is_made():
                for listener in self._listeners:
                    listener.before_save(self._session, self._step)
            self._save_finally(request, is_error=request.is_made())
            number = request.number or request.elsewhere
            if number is not None:
                where = "" if request.number is not None else " to another process"
                _logger.warning("Training ends at step %d by signal %d%s.", self._step, number, where)
                raise SystemExit(_SIGNAL_EXIT + number)
            seconds = time.monotonic() - self._begun_at
            _logger.info("Training ended at step %d, after %.1f s.", self._step, seconds)
        if not is_saved:
            self._tell_listeners()  # listeners may be interrupted
        for listener in self._listeners:
            listener.end(self._session, self._step)

    @contextlib.contextmanager
    def _showing(self, final_step: int) -> Iterator[tqdm | None]:
        """Shows a bar on the standard error, if that is a terminal or Jupyter's.

        Elsewhere no bar is created: a process's first bar fixes the start method of multiprocessing.
        """
        if not is_shown_on(sys.stderr):
            yield None
            return
        with tqdm(
            total=final_step - self._first_step, desc="Training", unit=" steps", disable=False
        ) as bar:
            yield bar

    def _loop(self, final_step: int, request: StopRequest, bar: tqdm | None) -> None:
        per_update = self._program.spec.micro_batches_per_update
        is_first = True
        if is_any(self._step > self._saved_step and self._save_if_due(), "stopping by a hook"):
            return  # of a state from memory, which was to be saved when a process died
        while self._step < final_step and not _is_stopped(request):
            max_updates = -(-(final_step - self._step) // per_update)
            interval = self._config.save_checkpoints_steps
            if interval is not None:
                due = self._saved_step - self._saved_step % interval + interval
                max_updates = min(max_updates, -(-(due - self._step) // per_update))
            before = self._session.execution_count(self._program.name)
            try:
                # All processes stop after the same update.
                stops = functools.partial(_is_stopped, request)
                run = self._runs.run(self._step, max_updates, self._mean_loss, stops)
            except OutOfRangeError as error:
                self._end_with_data(error)
                return
            except BaseException:
                self._step += (self._session.execution_count(self._program.name) - before) * per_update
                raise
            if bar is not None:
                bar.set_postfix_str(f"loss {self._last_loss:.6g}", refresh=False)
                bar.update(run.context.global_step - self._step)
            self._step = run.context.global_step
            for since in (self._logged, self._written):
                since.add(*self._sum_losses(run.outputs))
            self._extra_scalars.update(run.context.scalars)
            self._report(is_due=is_first)
            is_first = False
            if run.data_end is not None:
                self._end_with_data(run.data_end)
                return
            wants_to_stop = self._save_if_due() or run.context.stop_requested
            if is_any(wants_to_stop, "stopping by a hook"):
                return

    def _end_with_data(self, error: OutOfRangeError) -> None:
        self._has_ended = True
        _logger.info("Training ends at step %d: %s", self._step, error)
        if self._step == self._first_step:
            warnings.warn(
                "train: nothing was trained, since the data of input_fn, or what an interrupted training "
                f"left of them, ended within the first weight update: {error} Give more of them, or repeat "
                "them, or a smaller gradient_accumulation_count.",
                stacklevel=5,
            )

    def _mean_loss(self, outputs: Any) -> float:
        total, count = self._sum_losses(outputs)
        self._last_loss = total / max(count, 1)
        return self._last_loss

    def _sum_losses(self, outputs: Any) -> tuple[float, int]:
        """The sum of the losses of a run, and the number of micro-batches."""
        per_update = self._program.spec.micro_batches_per_update  # per replica
        sums = outputs
        if self._program.has_logs:  # one loss per micro-batch, which are summed as the pipeline would do
            dtype = self._program.spec.loss_accumulator_dtype or outputs.dtype
            replicas = outputs.reshape(-1, per_update, self._program.num_replicas)
            sums = np.sum(replicas, axis=1, dtype=dtype)
        return float(np.sum(np.asarray(sums, np.float64))), sums.size * per_update

    def _report(self, is_due: bool) -> None:
        """Logs, and writes scalars, if these are due."""
        if (means := self._logged.take(self._step, is_due)) is not None:
            loss, speed = means
            examples = speed * self._program.num_examples
            with between_bars():
                _logger.info("loss = %.6g, step = %d", loss, self._step)
                _logger.info("global_step/sec: %.6g, examples/sec: %.6g", speed, examples)
        if (means := self._written.take(self._step, is_due)) is not None:
            loss, speed = means
            examples = speed * self._program.num_examples
            scalars = {"loss": loss, "steps/s": speed, "examples/s": examples, **self._extra_scalars}
            history = JobHistory.of_environment()
            goodput = None if history is None else history.goodput(useful_seconds())
            if goodput is not None:
                scalars["goodput"] = goodput
            self._scalars.write(self._step, {**self._mean_metrics(), **scalars})
            self._extra_scalars = {}

    def _mean_metrics(self) -> dict[str, float]:
        """The means of the metrics that the pipeline reported since the last call."""
        metrics = self._session.metrics(self._program.name)
        return {name: float(np.nanmean(values)) for name, values in metrics.items() if name != "update"}

    def _save_if_due(self) -> bool:
        """Saves a checkpoint if it is due. Returns whether a listener asks to stop."""
        interval, seconds = self._config.save_checkpoints_steps, self._config.seconds_between_checkpoints
        if interval is not None:
            is_due = self._step // interval > self._saved_step // interval
        else:
            assert seconds is not None
            is_own = time.monotonic() - self._saved_at >= seconds
            is_due = is_any(is_own, "saving after a time")
        return is_due and self._save()

    def _save(self) -> bool:
        """Saves a checkpoint. Returns whether a listener asks to stop."""
        for listener in self._listeners:
            listener.before_save(self._session, self._step)
        try:
            snapshot = self._session.take_snapshot(extra=self.describe())
        except Exception:
            _logger.exception("The checkpoint of step %d could not be taken. Training goes on.", self._step)
            return False
        finally:
            self._saved_step, self._saved_at = self._step, time.monotonic()
        self._series.start_saving(self._step, snapshot)
        return self._tell_listeners()

    def _tell_listeners(self) -> bool:
        """Tells listeners of a checkpoint when it is complete. Returns whether one of them asks to stop."""
        if not self._listeners:
            return False
        self._series.wait()
        if not self._series.is_complete(self._step):
            return False  # the log says why
        wishes = [listener.after_save(self._session, self._step) for listener in self._listeners]
        return any(wishes)  # all of them were told

    def describe(self) -> dict[str, Any]:
        """Returns what checkpoints have besides the session's state."""
        return {
            "global_step": self._step,
            "first_step": self._begun_step,
            "input_fn": self._input_fn,
            "data_has_ended": self._has_ended,
            "is_complete": self._is_complete,
        }

    def _save_finally(self, request: StopRequest, is_error: bool) -> None:
        """Saves what has been done since the last checkpoint, in this thread."""
        request.is_final = True
        self._series.wait()
        if self._step == 0:
            return
        try:
            if self._series.is_complete(self._step):
                # An earlier training's checkpoint is about its own data, unless the data are the same.
                if self._step > self._first_step or (self._is_same_data and not is_error):
                    do_first(lambda: self._series.amend(self._step, self.describe()))
            else:
                self._series.save(self._step, self._session.take_snapshot(extra=self.describe()))
        except Exception as error:
            latest = self._series.latest()
            text = (
                f"The last checkpoint of training, of step {self._step}, could not be saved in "
                f"{self._series.directory}: {error or type(error).__name__}. The last good one is {latest}."
            )
            if not is_error:
                raise CheckpointError(text) from error
            _logger.error("%s", text)
