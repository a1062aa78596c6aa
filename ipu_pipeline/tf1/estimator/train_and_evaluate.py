"""`train_and_evaluate`: one training, evaluated at its checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.checkpointing.collective_calls import is_any
from ipu_pipeline.ground.checks import is_int, is_real, require
from ipu_pipeline.tf1.estimator.base import Estimator
from ipu_pipeline.tf1.estimator.programs import check_input_fn
from ipu_pipeline.tf1.ipu_session_run_hooks import (
    CheckpointSaverListener,
    SessionRunHook,
    check_hooks,
    check_listeners,
)

_START_DELAY = 120


@dataclass(frozen=True)
class TrainSpec:
    """The settings of the training in `train_and_evaluate`.

    Attributes:
      input_fn: same as for an estimator's `train`.
      max_steps: the `global_step` until which to train; required, as in Graphcore's estimators.
      hooks: called around each run, after those of the model's specification.
      saving_listeners: called around each save of a checkpoint.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] | None = None
    saving_listeners: Sequence[CheckpointSaverListener] | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_input_fn("TrainSpec: input_fn", self.input_fn)
        if not is_int(self.max_steps, 1):
            raise ValueError(
                f"TrainSpec: max_steps must be an integer above 0; got {self.max_steps!r}. Training ends "
                "earlier where its data end."
            )
        check_hooks(self.hooks, "TrainSpec: hooks")
        check_listeners(self.saving_listeners, "TrainSpec: saving_listeners")


@dataclass(frozen=True)
class EvalSpec:
    """The settings of the evaluations in `train_and_evaluate`.

    Attributes:
      input_fn: same as for an estimator's `evaluate`.
      steps: the number of micro-batches of each replica, a multiple of `iterations_per_loop`; None for the
        whole data set.
      name: the name of the evaluation; see `evaluate`.
      hooks: called around each run of an evaluation.
      exporters: only None.
      start_delay_secs: has no effect: it was for an evaluating process beside the training one.
      throttle_secs: seconds from the end of an evaluation until a checkpoint is evaluated again. The first
        checkpoint and the last one are evaluated in any case.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = None
    exporters: None = None
    start_delay_secs: float = _START_DELAY
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_input_fn("EvalSpec: input_fn", self.input_fn)
        if self.exporters:
            raise NotImplementedError(
                "EvalSpec: exporters must be None, since those of TensorFlow write its SavedModel. Call "
                "the estimator's export_saved_model after train_and_evaluate, or in a saving listener."
            )
        steps = self.steps
        if steps is not None and not is_int(steps, 1):
            raise ValueError(f"EvalSpec: steps must be an integer above 0, or None; got {steps!r}.")
        for name in ("start_delay_secs", "throttle_secs"):
            seconds = getattr(self, name)
            if not is_real(seconds) or not seconds >= 0:
                raise ValueError(f"EvalSpec: {name} must be a number of seconds from 0; got {seconds!r}.")
        if self.start_delay_secs != _START_DELAY:
            warnings.warn(
                "EvalSpec: start_delay_secs has no effect, since the process that trains evaluates, too, "
                "from the first checkpoint on.",
                stacklevel=3,
            )
        check_hooks(self.hooks, "EvalSpec: hooks")


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, float] | None, list[Any]]:
    """Trains an estimator, and evaluates it at the first checkpoint, at later ones, and at the end.

    Checkpoints are saved as the estimator's `RunConfig` says. A checkpoint is evaluated when it is complete
    and `throttle_secs` have passed since the last evaluation. Training waits for the evaluation, and goes
    on with the same numbers as without it.

    Example:
      >>> def model_fn(features, labels, mode):
      ...     loss = jnp.mean((layers.Dense(1)(features) - labels) ** 2)
      ...     train_op = ipu.optimizers.tf1.GradientDescentOptimizer(0.1).minimize(loss)
      ...     return ipu.ipu_estimator.IPUEstimatorSpec(
      ...         mode,
      ...         loss=loss,
      ...         train_op=train_op if mode == ipu.ModeKeys.TRAIN else None,
      ...         eval_metric_ops={"mean_error": ipu.metrics.mean(jnp.abs(features[:, :1] - labels))},
      ...     )
      >>> def input_fn():
      ...     return [(np.ones([4, 8], np.float32), np.zeros([4, 1], np.float32))] * 8
      >>> estimator = ipu.ipu_estimator.IPUEstimator(model_fn, "trained", ipu.ipu_run_config.RunConfig())
      >>> metrics, _ = ipu.train_and_evaluate(
      ...     estimator, ipu.TrainSpec(input_fn, max_steps=8), ipu.EvalSpec(input_fn, steps=4)
      ... )
      >>> metrics["global_step"], metrics["mean_error"]
      (8, 1.0)

    Args:
      estimator: an `IPUPipelineEstimator` or `IPUEstimator`.
      train_spec: the settings of the training.
      eval_spec: the settings of the evaluations.

    Returns:
      The result of the last evaluation, None if nothing was trained and there is no checkpoint; and an
      empty list, because there are no exporters.

    Raises:
      SystemExit: a signal came: after an evaluation that is running, training ends with its state saved.
      TypeError, ValueError: an argument is not usable.
      Others: the errors of `train` and `evaluate`.
    """
    rule = "train_and_evaluate: estimator must be an IPUPipelineEstimator or IPUEstimator"
    require(isinstance(estimator, Estimator), rule, estimator, TypeError)
    for name, spec, kind in (("train_spec", train_spec, TrainSpec), ("eval_spec", eval_spec, EvalSpec)):
        if not isinstance(spec, kind):
            raise TypeError(f"train_and_evaluate: {name} must be a {kind.__name__}; got {spec!r}.")
    estimator.check_steps(eval_spec.steps)
    evaluator = _Evaluator(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*(train_spec.saving_listeners or ()), evaluator],
    )
    latest = estimator.latest_checkpoint()
    if latest is None:
        return None, []
    if evaluator.result is None or evaluator.step != int(estimator.get_variable_value("global_step")):
        evaluator.evaluate()
    return evaluator.result, []


class _Evaluator(CheckpointSaverListener):
    """Evaluates checkpoints, but not too often."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self.result: dict[str, float] | None = None
        self.step = 0  # the step of the result
        self._estimator = estimator
        self._spec = spec
        self._evaluated_at = -math.inf

    def after_save(self, session: Any, global_step: int) -> None:
        """Evaluates the checkpoint, if it is time."""
        del session, global_step
        # All processes evaluate the same checkpoints.
        is_due = time.monotonic() - self._evaluated_at >= self._spec.throttle_secs
        if is_any(is_due, "evaluating a checkpoint"):
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluates the newest checkpoint."""
        spec = self._spec
        self.result = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name)
        self.step = int(self.result["global_step"])
        self._evaluated_at = time.monotonic()
