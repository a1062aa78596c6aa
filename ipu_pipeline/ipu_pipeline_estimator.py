"""`IPUPipelineEstimator`: training, evaluation and prediction around a `model_fn`, with checkpoints."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_pipeline import config as ipu_config
from ipu_pipeline.checkpointing import checkpoints
from ipu_pipeline.checkpointing.checkpoints import CheckpointSeries
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.checkpointing.together import do_first
from ipu_pipeline.checkpointing.writable import check_writable
from ipu_pipeline.engine.execution.kept import KeptPrograms
from ipu_pipeline.estimator.inference import Inference, PaddedData
from ipu_pipeline.estimator.programs import (
    EstimatorProgram,
    IPUPipelineEstimatorSpec,
    ModeKeys,
    build_estimator_program,
    call_input_fn,
    check_model_fn,
)
from ipu_pipeline.estimator.scalars import ScalarWriter
from ipu_pipeline.estimator.training import Training, describe_function
from ipu_pipeline.ipu_run_config import RunConfig
from ipu_pipeline.ipu_session_run_hooks import SessionRunHook, check_hooks
from ipu_pipeline.processes.joining import join_by_environment
from ipu_pipeline.session.resuming import check_optimizers, check_program
from ipu_pipeline.session.session import Session

__all__ = ["IPUPipelineEstimator", "IPUPipelineEstimatorSpec", "ModeKeys"]

_CHECKPOINTS = "checkpoints"  # the folder in `model_dir`
_GLOBAL_STEP = "global_step"
_RESERVED = ("input_fn",)
_logger = logging.getLogger("ipu_pipeline.estimator")


def _agree_on_directory(own: str | None) -> str:
    """The model_dir, a temporary one if there is none; of several processes that of the first."""
    join_by_environment()

    def choose() -> str:
        if own is not None:
            return own
        made = tempfile.mkdtemp(prefix="ipu_pipeline_estimator_")
        _logger.warning("Using temporary folder as model directory: %s", made)
        return made

    directory = do_first(choose)
    if own is not None and directory != own:
        _logger.warning("The model_dir of process 0 is used: %s, not %s.", directory, own)
    return directory


class IPUPipelineEstimator:
    """Trains, evaluates and predicts with a pipeline.

    Example:
      def model_fn(mode, params):
          ...
          return IPUPipelineEstimatorSpec(
              mode,
              computational_stages=[stage1, stage2],
              gradient_accumulation_count=16,
              optimizer_function=optimizer_function,
              eval_metrics_fn=lambda loss: {"loss": loss},
          )

      estimator = IPUPipelineEstimator(model_fn, "model", RunConfig(ipu_run_config=...))
      estimator.train(input_fn, steps=1600)
      print(estimator.evaluate(test_input_fn))

    A step is a micro-batch of each replica, and `global_step` counts them. Messages go to the logger
    "ipu_pipeline.estimator", and what a terminal shows is in `train`.
    """

    def __init__(
        self,
        model_fn: Callable[..., IPUPipelineEstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Checks the arguments. It calls nothing, and makes no folder but a temporary `model_dir`.

        Args:
          model_fn: takes any of `mode`, `params` and `config`, returns an `IPUPipelineEstimatorSpec`.
            Variables that have the same names for all modes are shared by way of checkpoints.
          model_dir: where checkpoints and scalars go; None for that of `config`, and if that is None too, a
            temporary folder.
          config: a `RunConfig`; required.
          params: for `model_fn` and the `input_fn`s.
          warm_start_from: a checkpoint, or another estimator's `model_dir`, whose variables training begins
            with if there is no checkpoint in `model_dir`. It has all that the model has; the rest of it
            (optimizer state, steps, the data's position) is not taken.

        Raises:
          TypeError: `model_fn` is no function.
          ValueError: an argument is not usable.
        """
        check_model_fn(model_fn)
        if not isinstance(config, RunConfig):
            raise ValueError("`config` must be provided with type `ipu_run_config.RunConfig`")
        if params is not None and not isinstance(params, dict):
            raise ValueError("`params` is expected to be of type `dict`")
        if any(key in (params or {}) for key in _RESERVED):
            raise ValueError(f"{list(_RESERVED)} are reserved keys but existed in params {params}.")
        given = None if model_dir is None else os.fspath(model_dir)
        configured = None if config.model_dir is None else os.fspath(config.model_dir)
        if given is not None and configured is not None and given != configured:
            raise ValueError(
                "`model_dir` are set both in constructor and `RunConfig`, but with different values. In "
                f"constructor: '{given}', in `RunConfig`: '{configured}'."
            )
        directory = _agree_on_directory(given or configured)
        self._model_dir = Path(directory).absolute()
        self._model_fn = model_fn
        self._config = config
        self._params = copy.deepcopy(dict(params or {}))
        self._warm_start_from = warm_start_from
        self._series = CheckpointSeries(
            self._model_dir / _CHECKPOINTS, max_to_keep=config.keep_checkpoint_max or None
        )
        self._kept = {mode: KeptPrograms() for mode in ModeKeys}

    @property
    def model_dir(self) -> str:
        """Where checkpoints and scalars are."""
        return str(self._model_dir)

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., IPUPipelineEstimatorSpec]:
        """The function."""
        return self._model_fn

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> IPUPipelineEstimator:
        """Trains, from the last checkpoint in `model_dir` if there is one.

        The data set goes on where it stood at the checkpoint, if that was trained by an `input_fn` of the
        same name and the data had not ended: so training that was interrupted, or done in parts, gives the
        same as all of it at once. It has to give the same elements again.

        Checkpoints are saved as `config` says and at the end, unless a hook ends training with a
        FloatingPointError because the loss is not finite. SIGINT and SIGTERM end training after the
        running weight update: it saves a checkpoint, and the process exits with 130 or 143. A second one
        does not wait for the update.

        A terminal shows a bar. The logger is told where training begins and ends, of every checkpoint, and
        as `config` says the loss and the speed. What cannot be written is found before anything compiles.

        Args:
          input_fn: takes any of `mode`, `params` and `config`, returns a data set as `IPUInfeedQueue`
            takes it. Training ends at its end.
          hooks: called around each run, after those of the specification.
          steps: how many micro-batches each replica is to train on, a multiple of `iterations_per_loop`.
          max_steps: until which `global_step` to train, instead. The last weight update may go beyond it.

        Returns:
          The estimator.

        Raises:
          CheckpointError: no checkpoint in `model_dir` can be read, or the newest that can be is of another
            model; the data set is shorter than it was; or the last checkpoint cannot be written.
          OSError: nothing can be written to `model_dir`.
          SystemExit: a signal came.
          TypeError, ValueError: an argument, or what `model_fn` or `input_fn` returns, is not usable.
        """
        given = check_hooks(hooks, "hooks")
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        if steps is None and max_steps is None:
            raise ValueError("One of `steps` or `max_steps` must be specified.")
        self._check_steps(steps)
        _check_number("max_steps", max_steps)
        latest = self._series.latest()
        if max_steps is None or latest is None or int(latest.name) < max_steps:
            check_writable(self._model_dir, "train: checkpoints and scalars", may_be_full=True)
        self._select_devices()
        dataset = call_input_fn(input_fn, ModeKeys.TRAIN, self.params, self._config)
        made = self._build(ModeKeys.TRAIN, dataset)
        found = self._series.read_latest(set_aside=True)
        global_step = 0 if found is None else int(found[1].extra.get(_GLOBAL_STEP, found[0]))
        if max_steps is not None and global_step >= max_steps:
            _logger.info("Skipping training since max_steps has already saved.")
            return self
        path = self._series.path(found[0]) if found is not None else None
        is_same_data = begins_anew = False
        with Session(seed=self._config.tf_random_seed or 0) as session:
            if found is not None and path is not None:
                snapshot = found[1]
                check_program(snapshot, path, made.program, allow_extra=False)
                check_optimizers(snapshot, path, made.program)
                is_same_data = snapshot.extra.get("input_fn") == describe_function(input_fn)
                goes_on = is_same_data and not snapshot.extra.get("data_has_ended")
                session.take_over(snapshot, path, fits=False, feeds=goes_on)
                begins_anew = goes_on and bool(snapshot.extra.get("is_complete"))
                _logger.info("Training goes on from step %d, restored from %s.", global_step, path)
            elif self._warm_start_from is not None:
                session.load(self._warm_variables(made))
            final_step = max_steps if max_steps is not None else global_step + (steps or 0)
            every = made.spec.hooks + given
            for hook in every:
                hook.begin()
            initializer = made.infeed.initializer
            session.run(initializer)
            with contextlib.closing(ScalarWriter(self._model_dir, global_step)) as scalars:
                Training(
                    made,
                    session,
                    every,
                    self._config,
                    self._series,
                    scalars,
                    input_fn,
                    global_step,
                    initializer,
                    is_same_data,
                    begins_anew,
                ).run_until(final_step)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """Evaluates the variables of a checkpoint.

        Args:
          input_fn: as for `train`.
          steps: how many micro-batches of each replica, a multiple of `iterations_per_loop`; None for all
            of the data set. All of them count, also where there are fewer than a run takes.
          hooks: called around each run, after those of the specification.
          checkpoint_path: which checkpoint; None for the newest in `model_dir`. If there is none, the
            initial values are evaluated, with a warning.
          name: of this evaluation, if there are several: scalars go to the folder eval_<name>.

        Returns:
          The means of the metrics over micro-batches, by name, with "loss"; and "global_step".

        Raises:
          CheckpointError: the checkpoint cannot be read, or is of another model.
          KeyError, TypeError: `eval_metrics_fn` returns no dict with "loss".
          ValueError: an argument is not usable, or the data set is empty.
        """
        given = check_hooks(hooks, "hooks")
        self._check_steps(steps)
        iterations = self._config.ipu_run_config.iterations_per_loop
        with self._inferring(ModeKeys.EVAL, input_fn, given, checkpoint_path) as (inference, global_step):
            result = inference.evaluate(steps, iterations)
        folder = "eval" if name is None else f"eval_{name}"
        with contextlib.closing(ScalarWriter(self._model_dir / folder)) as scalars:
            scalars.write(global_step, result)
        _logger.info(
            "Evaluation at step %d: %s",
            global_step,
            ", ".join(f"{key} = {value:.6g}" for key, value in result.items()),
        )
        return {**result, _GLOBAL_STEP: global_step}

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        """Yields predictions for all of a data set.

        Args:
          input_fn: as for `train`.
          predict_keys: which entries, where the last stage returns a dict; None for all.
          hooks: called around each run, after those of the specification.
          checkpoint_path: as for `evaluate`.
          yield_single_examples: False yields what the last stage returns for each micro-batch, not example
            by example along the first axis. A scalar for each micro-batch is one example.
          num_predictions: how many to yield at most.

        Yields:
          An array, or a dict of arrays.

        Raises:
          CheckpointError: the checkpoint cannot be read, or is of another model.
          ValueError: an argument is not usable; or the last stage returns neither one array nor a dict.
        """
        given = check_hooks(hooks, "hooks")
        _check_number("num_predictions", num_predictions)
        keys = [predict_keys] if isinstance(predict_keys, str) else predict_keys

        def generate() -> Iterator[Any]:
            iterations = self._config.ipu_run_config.iterations_per_loop
            number = 0
            with self._inferring(ModeKeys.PREDICT, input_fn, given, checkpoint_path) as (inference, _step):
                for batch in inference.predictions(iterations):
                    for prediction in _split(_choose(batch, keys), yield_single_examples):
                        yield prediction
                        number += 1
                        if number == num_predictions:
                            inference.stop()
                            break

        return generate()

    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint in `model_dir`, or None; `Session.restore` takes it too."""
        path = self._series.latest()
        return None if path is None else str(path)

    def get_variable_names(self) -> list[str]:
        """The full names of the variables in the newest checkpoint, and "global_step".

        Raises:
          ValueError: there is no checkpoint.
        """
        document = checkpoints.read_document(self._existing_checkpoint())
        return sorted([*document["arrays"]["variables"], _GLOBAL_STEP])

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a variable, or of "global_step", in the newest checkpoint.

        Raises:
          CheckpointError: it cannot be read.
          ValueError: there is no checkpoint, or no such variable.
        """
        path = self._existing_checkpoint()
        if name == _GLOBAL_STEP:
            return np.array(checkpoints.read_document(path)["extra"][_GLOBAL_STEP])
        self._select_devices()
        variables = checkpoints.read_checkpoint(path).state.variables
        if name not in variables:
            raise ValueError(
                f"get_variable_value: there is no variable {name!r}; there are "
                f"{', '.join(sorted(variables))}."
            )
        return np.array(variables[name])

    def _existing_checkpoint(self) -> Path:
        path = self._series.latest()
        if path is None:
            raise ValueError(f"Couldn't find trained model at {self._model_dir}.")
        return path

    def _check_steps(self, steps: int | None) -> None:
        if steps is None:
            return
        _check_number("steps", steps)
        iterations_per_loop = self._config.ipu_run_config.iterations_per_loop
        if steps % iterations_per_loop != 0:
            raise ValueError(
                f"steps ({steps}) must be a multiple of iterations_per_loop ({iterations_per_loop})"
            )

    def _build(self, mode: ModeKeys, dataset: Any) -> EstimatorProgram:
        with self._kept[mode].building():
            return build_estimator_program(self._model_fn, mode, self.params, self._config, dataset)

    def _select_devices(self) -> None:
        """To be called before the user's functions and before a checkpoint is read: both may start JAX."""
        run_config = self._config.ipu_run_config
        if run_config.ipu_options is not None:
            run_config.ipu_options.configure_ipu_system()
        else:
            ipu_config.select_automatically([(run_config.ordinal, run_config.num_shards)])

    @contextlib.contextmanager
    def _inferring(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook],
        checkpoint_path: str | os.PathLike[str] | None,
    ) -> Iterator[tuple[Inference, int]]:
        """What evaluates or predicts, and the step of its variables."""
        self._select_devices()
        data = PaddedData(call_input_fn(input_fn, mode, self.params, self._config))
        made = self._build(mode, data)
        found = self._find_checkpoint(checkpoint_path)
        global_step = 0
        with Session(seed=self._config.tf_random_seed or 0) as session:
            if found is None:
                warnings.warn(
                    f"There is no checkpoint in {self._model_dir}: the initial values of the variables are "
                    "used.",
                    stacklevel=4,
                )
            else:
                path, snapshot = found
                _logger.info("The variables are those of %s.", path)
                check_program(snapshot, path, made.program, allow_extra=True)
                session.take_over(snapshot, path, fits=False, feeds=False)
                global_step = int(snapshot.extra.get(_GLOBAL_STEP, 0))
            every = (*made.spec.hooks, *hooks)
            for hook in every:
                hook.begin()
            session.run(made.infeed.initializer)
            yield Inference(made, data, session, every, global_step), global_step

    def _find_checkpoint(
        self, checkpoint_path: str | os.PathLike[str] | None
    ) -> tuple[Path, Snapshot] | None:
        if checkpoint_path is not None:
            return Path(checkpoint_path), checkpoints.read_checkpoint(checkpoint_path)
        found = self._series.read_latest()
        return None if found is None else (self._series.path(found[0]), found[1])

    def _warm_variables(self, made: EstimatorProgram) -> dict[str, Any]:
        source = Path(os.fspath(self._warm_start_from))  # type: ignore[arg-type]  # not None, see `train`
        series = CheckpointSeries(source / _CHECKPOINTS)
        if series.steps():
            found = series.read_latest()
            assert found is not None
            path, snapshot = series.path(found[0]), found[1]
        else:
            path, snapshot = source, checkpoints.read_checkpoint(source)
        check_program(snapshot, path, made.program, allow_extra=True)
        _logger.info("The variables begin as in %s.", path)
        return {name: snapshot.state.variables[name] for name in made.program.variables}


def _check_number(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
        raise ValueError(f"Must specify {name} > 0, given: {value}")


def _choose(batch: Any, keys: Sequence[str] | None) -> Any:
    if keys is None:
        return batch
    if not isinstance(batch, dict):
        raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ValueError(f"Expected to run at least one output from {list(batch)}, provided {list(keys)}.")
    return {key: batch[key] for key in keys}


def _split(batch: Any, into_examples: bool) -> Iterator[Any]:
    if not into_examples:
        yield batch
        return
    leaves = jax.tree.leaves(batch)
    if leaves and all(leaf.ndim == 0 for leaf in leaves):  # the micro-batch is one example
        yield batch
        return
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "predict: what the last stage returns must have one first axis, over examples; the shapes are "
            f"{', '.join(str(leaf.shape) for leaf in leaves)}. With yield_single_examples=False it "
            "need not."
        )
    for number in range(lengths.pop()):
        yield jax.tree.map(lambda array, n=number: array[n], batch)
