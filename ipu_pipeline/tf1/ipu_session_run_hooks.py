"""Hooks, which are called around the runs of an estimator; one logs values of its stages."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_member
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.queues.outfeed import IPUOutfeedMode

__all__ = [
    "CheckpointSaverListener",
    "IPULoggingTensorHook",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
]

_Instance = TypeVar("_Instance")
_logger = logging.getLogger("ipu_pipeline.estimator")


@dataclass(frozen=True)
class SessionRunArgs:
    """The values that a hook asks of a run.

    Attributes:
      fetches: "loss", "global_step" (or `get_global_step()`), the full name of a variable, or lists,
        tuples and dicts of these.
    """

    fetches: Any


@dataclass(frozen=True)
class SessionRunValues:
    """The values that a hook gets of a run.

    Example:
      >>> ipu.ipu_session_run_hooks.SessionRunValues(results={"loss": 0.5}).results["loss"]
      0.5

    Attributes:
      results: the values that its `before_run` asked for, in the same structure; None if it asked for none.
    """

    results: Any


@dataclass
class SessionRunContext:
    """A run, for hooks.

    Example:
      >>> context = ipu.ipu_session_run_hooks.SessionRunContext(session=None, global_step=100)
      >>> context.request_stop()
      >>> context.stop_requested
      True

    Attributes:
      session: the `Session`.
      global_step: micro-batches trained, in `before_run` before the run and in `after_run` after it.
    """

    session: Any
    global_step: int
    stop_requested: bool = False
    scalars: dict[str, float] = field(default_factory=dict)

    def request_stop(self) -> None:
        """Ends training, evaluation or prediction after this run."""
        self.stop_requested = True

    def add_scalar(self, name: str, value: Any) -> None:
        """Adds a scalar to those that training writes; the last value before it writes counts."""
        self.scalars[name] = float(value)


class SessionRunHook:
    """The base of hooks; subclasses override some of its methods.

    Example:
      >>> class StopAtSmallLoss(ipu.ipu_session_run_hooks.SessionRunHook):
      ...     def before_run(self, run_context):
      ...         return ipu.ipu_session_run_hooks.SessionRunArgs("loss")
      ...     def after_run(self, run_context, run_values):
      ...         if np.mean(run_values.results) < 0.01:
      ...             run_context.request_stop()
    """

    def begin(self) -> None:
        """Called once, when the program is compiled and before there is a session."""

    def after_create_session(self, session: Any, coord: None) -> None:
        """Called when the session has its variables; `coord` is None."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; may ask for values."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run."""

    def end(self, session: Any) -> None:
        """Called once, at the end; not after an error."""


class CheckpointSaverListener:
    """The base of listeners to an estimator's saves; subclasses override some of its methods.

    Example:
      >>> class Announcer(ipu.ipu_session_run_hooks.CheckpointSaverListener):
      ...     def after_save(self, session, global_step):
      ...         print("saved", global_step)
    """

    def begin(self) -> None:
        """Called once, when the program is compiled and before there is a session."""

    def before_save(self, session: Any, global_step: int) -> None:
        """Called before each save."""

    def after_save(self, session: Any, global_step: int) -> bool | None:
        """Called when a checkpoint is complete; returns True to end training."""

    def end(self, session: Any, global_step: int) -> None:
        """Called once, after the last save; not after an error."""


# The logged values, and the hooks that may log, by `id`. None: all may. No dict: values are dropped.
_Logs: TypeAlias = "tuple[dict[int, Any] | None, frozenset[int] | None]"
_logs: contextvars.ContextVar[_Logs | None] = contextvars.ContextVar("logged values", default=None)


@contextlib.contextmanager
def collecting_logs(hooks: Sequence[SessionRunHook] | None) -> Iterator[dict[int, Any]]:
    """Collects, while a stage is traced, what these hooks log (None: all hooks), by their `id`."""
    logs: dict[int, Any] = {}
    with bound(_logs, (logs, None if hooks is None else frozenset(map(id, hooks)))):
        yield logs


def dropping_logs() -> contextlib.AbstractContextManager[None]:
    """Keeps hooks from logging while a function is traced once more."""
    return bound(_logs, (None, None))


class IPULoggingTensorHook(SessionRunHook):
    """Logs values from within the stages of an estimator's pipeline, one per micro-batch.

    Example:
      >>> hook = ipu.ipu_session_run_hooks.IPULoggingTensorHook(every_n_iter=10)
      >>> def stage2(x, targets):
      ...     loss = jnp.mean((x - targets) ** 2)
      ...     hook.log({"loss": loss})
      ...     return loss
      >>> def model_fn(mode, params):
      ...     return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
      ...         mode, [lambda x, targets: (2 * x, targets), stage2], training_hooks=[hook]
      ...     )
    """

    LoggingMode = IPUOutfeedMode

    def __init__(
        self,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        logging_mode: IPUOutfeedMode = IPUOutfeedMode.LAST,
    ) -> None:
        """Sets when to log.

        Args:
          every_n_iter: logs after each `every_n_iter` runs, of `iterations_per_loop` micro-batches each.
          every_n_secs: logs every `every_n_secs` seconds, after a run. Give exactly one of the two, unless
            `at_end`.
          at_end: whether to log at the end.
          formatter: turns a dict of names and values into the text; by default "name = value, ...".
          logging_mode: LAST for the last micro-batch's values; ALL for the values of all micro-batches
            since the hook logged last, stacked on a new first axis.

        Raises:
          TypeError: `logging_mode` is not an `IPUOutfeedMode`.
          ValueError: no argument says when to log, or both do.
        """
        if every_n_iter is not None and every_n_secs is not None:
            raise ValueError("Cannot provide both every_n_iter and every_n_secs")
        if every_n_iter is None and every_n_secs is None and not at_end:
            raise ValueError("Either every_n_iter, every_n_secs or at_end should be provided")
        if every_n_iter is not None and (not isinstance(every_n_iter, int) or every_n_iter < 1):
            raise ValueError(f"every_n_iter must be an integer of at least 1; got {every_n_iter!r}.")
        if every_n_secs is not None and not every_n_secs > 0:
            raise ValueError(f"every_n_secs must be above 0; got {every_n_secs!r}.")
        check_member("logging_mode", logging_mode, IPUOutfeedMode)
        self._every_n_iter = every_n_iter
        self._every_n_secs = every_n_secs
        self._at_end = at_end
        self._formatter = formatter
        self._mode = logging_mode
        self._is_recorded = False
        self._parts: list[dict[str, np.ndarray[Any, Any]]] = []
        self._num_runs = 0
        self._logged_at: float | None = None

    def log(self, tensors: Any) -> None:
        """Logs values; called in a stage, once.

        Args:
          tensors: a dict of names and arrays, an array, or a list or tuple of arrays, which are then named
            tensor_0, tensor_1, ...

        Raises:
          RuntimeError: it was called before, or not in a stage of an estimator's pipeline; or the hook is
            not among the specification's.
          TypeError: a value is not an array.
        """
        logs, allowed = _logs.get() or ({}, frozenset())
        if logs is None:
            return
        if allowed is not None and id(self) not in allowed:
            raise RuntimeError(
                "IPULoggingTensorHook.log must be called in a stage of an IPUPipelineEstimator's "
                "pipeline, and "
                "the hook must be in the specification's training_hooks, evaluation_hooks or "
                "prediction_hooks."
            )
        if self._is_recorded if allowed is not None else id(self) in logs:
            raise RuntimeError(
                "Cannot use this hook object's log function more than once. Either enqueue all "
                "tensors in a "
                "single log call using a list or dict, or create another hook."
            )
        if not isinstance(tensors, (dict, list, tuple)):
            tensors = [tensors]
        if not isinstance(tensors, dict):
            tensors = {f"tensor_{number}": tensor for number, tensor in enumerate(tensors)}
        for name, tensor in tensors.items():
            if not isinstance(tensor, (jax.Array, np.ndarray, np.generic)):
                raise TypeError(f"log: {name} must be an array; got {type(tensor).__name__}.")
        self._is_recorded = True
        logs[id(self)] = {str(name): jnp.asarray(tensor) for name, tensor in tensors.items()}

    def forget_record(self) -> None:
        """Called before the stages are traced again."""
        self._is_recorded = False

    def receive(self, stacks: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Called after each run with what was logged, stacked over its micro-batches."""
        if self._mode is IPUOutfeedMode.LAST:
            self._parts = []
        self._parts.append(dict(stacks))

    def begin(self) -> None:
        """Starts counting.

        Raises:
          RuntimeError: no stage called `log`.
        """
        if not self._is_recorded:
            raise RuntimeError(
                "This logging hook's outfeed was not enqueued. Did you forget to call the log function?"
            )
        self._parts, self._num_runs, self._logged_at = [], 0, None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs if it is time, and adds values that are scalars to those that training writes."""
        del run_values
        if self._parts:
            for name, stack in self._parts[-1].items():
                if stack.ndim == 1 and len(stack):
                    run_context.add_scalar(name, stack[-1])
        now = time.monotonic()
        is_due = self._logged_at is None
        if self._every_n_iter is not None:
            is_due = self._num_runs % self._every_n_iter == 0
        elif self._every_n_secs is not None and self._logged_at is not None:
            is_due = now - self._logged_at >= self._every_n_secs
        elif self._every_n_secs is None:
            is_due = False
        self._num_runs += 1
        if is_due:
            self._log_values(now)

    def end(self, session: Any) -> None:
        """Logs once more if `at_end` asks for it."""
        del session
        if self._at_end and self._parts:
            self._log_values(time.monotonic())

    def _log_values(self, now: float) -> None:
        if not self._parts:
            return
        names = self._parts[0]
        if self._mode is IPUOutfeedMode.LAST:
            values = {name: self._parts[-1][name][-1] for name in names}
        else:
            values = {name: np.concatenate([part[name] for part in self._parts]) for name in names}
            self._parts = []
        elapsed = "" if self._logged_at is None else f" ({now - self._logged_at:.3f} sec)"
        self._logged_at = now
        if self._formatter is not None:
            _logger.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            text = ", ".join(f"{name} = {value}" for name, value in values.items())
        _logger.info("%s%s", text, elapsed)


def check_listeners(listeners: Any, subject: str) -> tuple[CheckpointSaverListener, ...]:
    """Checks listeners, and returns them as a tuple."""
    rule = f"{subject}: saving_listeners must be a list of CheckpointSaverListener instances"
    return _check_instances(listeners, CheckpointSaverListener, rule)


def check_hooks(hooks: Any, subject: str) -> tuple[SessionRunHook, ...]:
    """Checks hooks, and returns them as a tuple."""
    return _check_instances(hooks, SessionRunHook, f"{subject}: All hooks must be SessionRunHook instances")


def _check_instances(values: Any, kind: type[_Instance], rule: str) -> tuple[_Instance, ...]:
    checked = () if values is None else tuple(values)
    for value in checked:
        if not isinstance(value, kind):
            raise TypeError(f"{rule}, given: {value!r}")
    return checked


explain_missing(__name__)
