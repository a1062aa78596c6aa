"""The base of estimators: training, evaluation and prediction around a `model_fn`, with checkpoints."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.checkpointing.checkpoint_directories import CheckpointSeries, check_writable
from ipu_pipeline.checkpointing.in_memory import InMemorySeries
from ipu_pipeline.engine.fronts import KeptPrograms
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.processes import device_selection
from ipu_pipeline.tf1.estimator.inference import Inference, PaddedData, check_export, export_prediction
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, ModeKeys, call_input_fn
from ipu_pipeline.tf1.estimator.summaries import ScalarWriter
from ipu_pipeline.tf1.estimator.training import Training, describe_function
from ipu_pipeline.tf1.ipu_run_config import RunConfig
from ipu_pipeline.tf1.ipu_session_run_hooks import (
    CheckpointSaverListener,
    SessionRunHook,
    check_hooks,
    check_listeners,
)
from ipu_pipeline.tf1.session.resumption import check_optimizers, check_program
from ipu_pipeline.tf1.session.saver import (
    CHECKPOINTS,
    GLOBAL_STEP,
    agree_on_directory,
    find_checkpoint,
    find_newest,
    find_warm_variables,
    take_weights,
)
from ipu_pipeline.tf1.session.session import Session

_RESERVED = ("input_fn",)
_numbers = itertools.count()  # of estimators without a folder of their own
_logger = logging.getLogger("ipu_pipeline.estimator")


class Estimator(abc.ABC):
    """Trains, evaluates and predicts.

    A step is a micro-batch of each replica, and `global_step` counts them. Messages go to the logger
    "ipu_pipeline.estimator"; `train` describes the output on a terminal.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        params: Mapping[str, Any] | None,
        warm_start_from: str | os.PathLike[str] | None,
    ) -> None:
        """Checks the arguments; see the estimators."""
        if not isinstance(config, RunConfig):
            raise ValueError("`config` must be provided with type `ipu_run_config.RunConfig`")
        if params is not None and not isinstance(params, dict):
            raise ValueError("`params` is expected to be of type `dict`")
        if any(key in (params or {}) for key in _RESERVED):
            raise ValueError(f"{list(_RESERVED)} are reserved keys but existed in params {params}.")
        argument = None if model_dir is None else os.fspath(model_dir)
        configured = None if config.model_dir is None else os.fspath(config.model_dir)
        if argument is not None and configured is not None and argument != configured:
            raise ValueError(
                "`model_dir` are set both in constructor and `RunConfig`, but with different values. In "
                f"constructor: '{argument}', in `RunConfig`: '{configured}'."
            )
        directory = agree_on_directory(argument or configured)
        self._model_dir = Path(directory).absolute()
        # A temporary folder has another name after a restart.
        identity = str(self._model_dir) if argument or configured else f"number {next(_numbers)}"
        self._name_in_memory = f"estimator {identity}"
        self._model_fn = model_fn
        self._config = config
        self._params = copy.deepcopy(dict(params or {}))
        self._warm_start_from = warm_start_from
        self._series = CheckpointSeries(
            self._model_dir / CHECKPOINTS, max_to_keep=config.keep_checkpoint_max or None
        )
        # Of a mode's last call only what XLA compiled is kept: `model_fn` may return another model, or one
        # whose functions have closed over other values, which only tracing shows.
        self._kept_programs = {mode: KeptPrograms() for mode in ModeKeys}

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and scalars."""
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
    def model_fn(self) -> Callable[..., Any]:
        """The function."""
        return self._model_fn

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Self:
        """Trains, from the last checkpoint in `model_dir` if there is one.

        As in TensorFlow, the data set of `input_fn` starts with its first element. But training that was
        interrupted by a signal, an error or the end of a process continues at the checkpoint's position in
        the data, if `input_fn` has the same name, so that the result is the same as without interruption.
        The data set must yield the same elements again. A `functools.partial` is identified by its
        function's name and the numbers and strings that it binds; lambdas of one function have the same
        name.

        Checkpoints are saved as set in `config`, and at the end, unless a hook ends training with a
        FloatingPointError because the loss is not finite. SIGINT and SIGTERM end training after the current
        weight update: a checkpoint is saved, and the process exits with 130 or 143. A second signal does
        not wait for the update.

        A terminal shows a progress bar, unless TQDM_DISABLE=1 is set. The logger gets the steps at which
        training starts and ends, every checkpoint, and, as often as set in `config`, the loss and the
        speed. Files that cannot be written cause an error before anything compiles.

        Args:
          input_fn: a function of any of `mode`, `params` and `config` that returns a data set for
            `IPUInfeedQueue`. Training ends when it ends.
          hooks: called around each run, after the specification's hooks.
          steps: the number of micro-batches for each replica, a multiple of `iterations_per_loop`.
          max_steps: in place of `steps`, the last `global_step`. The last weight update may go beyond it.
          saving_listeners: called around each save of a checkpoint; training then waits for the save.

        Returns:
          The estimator.

        Raises:
          CheckpointError: no checkpoint in `model_dir` can be read, or the newest readable one belongs to
            another model; the data set is shorter than before; or the last checkpoint cannot be written.
          OSError: `model_dir` cannot be written to.
          SystemExit: a signal was received.
          TypeError, ValueError: an argument, or the result of `model_fn` or `input_fn`, is wrong.
        """
        # Checks.
        call_hooks = check_hooks(hooks, "hooks")
        listeners = check_listeners(saving_listeners, "train")
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        if steps is None and max_steps is None:
            raise ValueError("One of `steps` or `max_steps` must be specified.")
        self.check_steps(steps)
        _check_number("max_steps", max_steps)
        latest = self._series.latest()
        if max_steps is None or latest is None or int(latest.name) < max_steps:
            check_writable(self._model_dir, "train: checkpoints and scalars", may_be_full=True)
        # The program, and the state that training goes on from.
        self._select_devices()
        dataset = self._call_input_fn(input_fn, ModeKeys.TRAIN)
        with self._kept_programs[ModeKeys.TRAIN].building():
            program = self._build(ModeKeys.TRAIN, dataset)
        in_memory = InMemorySeries.of_environment(self._name_in_memory)
        newest = find_newest(self._series, in_memory)
        global_step = 0 if newest is None else newest.global_step
        if max_steps is not None and global_step >= max_steps:
            _logger.info("Skipping training since max_steps has already saved.")
            if in_memory is not None:
                in_memory.leave()  # a later call may be the one that was interrupted
            return self
        # Training.
        is_same_data, first_step = False, global_step
        with Session(seed=self._config.tf_random_seed or 0) as session:
            if newest is not None:
                snapshot, path = newest.snapshot, newest.source
                check_program(snapshot, path, program.program, allow_extra=False)
                check_optimizers(snapshot, path, program.program)
                is_same_data = snapshot.extra.get("input_fn") == describe_function(input_fn)
                has_ended = snapshot.extra.get("data_has_ended") or snapshot.extra.get("is_complete")
                goes_on = is_same_data and not has_ended
                session.take_over(snapshot, path, fits=False, feeds=goes_on)
                if goes_on:
                    first_step = int(snapshot.extra.get("first_step", global_step))
                _logger.info("Training goes on from step %d, restored from %s.", global_step, path)
            elif self._warm_start_from is not None:
                session.load(find_warm_variables(self._warm_start_from, program.program))
            final_step = max_steps if max_steps is not None else global_step + (steps or 0)
            all_hooks = program.spec.hooks + call_hooks
            for hook in all_hooks:
                hook.begin()
            for listener in listeners:
                listener.begin()
            session.run(program.infeed.initializer)
            with contextlib.closing(ScalarWriter(self._model_dir, global_step)) as scalars:
                training = Training(
                    program,
                    session,
                    all_hooks,
                    self._config,
                    self._series,
                    scalars,
                    input_fn,
                    global_step,
                    is_same_data,
                    first_step,
                    listeners,
                    saved_step=0 if newest is None else newest.saved_step,
                )
                if in_memory is not None:
                    session.keep_in_memory(in_memory, training.describe)
                training.run_until(final_step)
        if in_memory is not None:
            in_memory.drop()  # what has been done is on disk
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """Evaluates the variables of a checkpoint. All other arguments are those of `train`.

        Args:
          steps: the number of micro-batches of each replica, a multiple of `iterations_per_loop`; None: the
            whole data set, including a last run with fewer micro-batches.
          checkpoint_path: the checkpoint; None: the newest in `model_dir`. If there is none, the initial
            values are evaluated, with a warning.
          name: the name of this evaluation, if there are several: scalars go to the folder eval_<name>.

        Returns:
          The means of the metrics over micro-batches, by name, with "loss"; and "global_step".

        Raises:
          CheckpointError: the checkpoint cannot be read, or belongs to another model.
          KeyError, TypeError: `eval_metrics_fn` does not return a dict with "loss".
          ValueError: an argument is not usable, or the data set is empty.
        """
        call_hooks = check_hooks(hooks, "hooks")
        self.check_steps(steps)
        iterations = self._config.ipu_run_config.iterations_per_loop
        with self._inferring(ModeKeys.EVAL, input_fn, call_hooks, checkpoint_path) as (
            inference,
            global_step,
        ):
            result = inference.evaluate(steps, iterations)
        folder = "eval" if name is None else f"eval_{name}"
        with contextlib.closing(ScalarWriter(self._model_dir / folder)) as scalars:
            scalars.write(global_step, result)
        _logger.info(
            "Evaluation at step %d: %s",
            global_step,
            ", ".join(f"{key} = {value:.6g}" for key, value in result.items()),
        )
        return {**result, GLOBAL_STEP: global_step}

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        """Yields predictions for a whole data set. All other arguments are those of `train` and `evaluate`.

        Args:
          predict_keys: the entries to yield, if the last stage returns a dict; None: all.
          yield_single_examples: whether to yield single examples along the first axis. False: the last
            stage's results for each micro-batch. A scalar per micro-batch is one example.
          num_predictions: the most predictions to yield.

        Yields:
          An array, or a dict of arrays.

        Raises:
          CheckpointError: the checkpoint cannot be read, or is of another model.
          ValueError: an argument is not usable; or the last stage returns neither one array nor a dict.
        """
        call_hooks = check_hooks(hooks, "hooks")
        _check_number("num_predictions", num_predictions)
        keys = [predict_keys] if isinstance(predict_keys, str) else predict_keys

        def generate() -> Iterator[Any]:
            iterations = self._config.ipu_run_config.iterations_per_loop
            number = 0
            with self._inferring(ModeKeys.PREDICT, input_fn, call_hooks, checkpoint_path) as (
                inference,
                _step,
            ):
                for batch in inference.predictions(iterations):
                    for prediction in _split_examples(_choose_entries(batch, keys), yield_single_examples):
                        yield prediction
                        number += 1
                        if number == num_predictions:
                            inference.stop()
                            break

        return generate()

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: None = None,
        as_text: bool = False,
        checkpoint_path: str | os.PathLike[str] | None = None,
        experimental_mode: ModeKeys | str = ModeKeys.PREDICT,
    ) -> str:
        """Exports the prediction, with a checkpoint's variables, so that it runs without its Python code.

        Args:
          export_dir_base: the folder in which a new folder is written, named by the time, in seconds.
          serving_input_receiver_fn: a function without arguments that describes a micro-batch, for the
            first stage or, as features, for the `model_fn`: a pytree of `jax.ShapeDtypeStruct`s,
            placeholders or arrays; or an object with such `features`.
          assets_extra: only None.
          as_text: only False.
          checkpoint_path: the checkpoint; None for the newest in `model_dir`.
          experimental_mode: only PREDICT.

        Returns:
          The new folder, for `ipu.load_program`, whose programs take any multiple of a micro-batch's rows.

        Raises:
          CheckpointError: the checkpoint cannot be read, or is of another model.
          NotImplementedError, TypeError, ValueError: an argument is not usable, or there is no checkpoint.
        """
        options = (assets_extra, as_text, experimental_mode)
        receive = check_export(export_dir_base, serving_input_receiver_fn, *options)
        self._select_devices()
        checkpoint = find_checkpoint(self._series, checkpoint_path)
        if checkpoint is None:
            raise ValueError(f"Couldn't find trained model at {self._model_dir}.")
        program = self._build(ModeKeys.PREDICT, [receive()], is_exported=True)
        with Session(seed=self._config.tf_random_seed or 0) as session:
            global_step = take_weights(session, *checkpoint, program.program)
            return export_prediction(session, program, global_step, export_dir_base)

    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint in `model_dir`, or None; `Session.restore` takes it too."""
        path = self._series.latest()
        return None if path is None else str(path)

    def get_variable_names(self) -> list[str]:
        """The full names of the variables in the newest checkpoint, and "global_step".

        Raises:
          ValueError: there is no checkpoint.
        """
        document = checkpoint_directories.read_document(self._existing_checkpoint())
        return sorted([*document["arrays"]["variables"], GLOBAL_STEP])

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a variable, or of "global_step", in the newest checkpoint.

        Raises:
          CheckpointError: it cannot be read.
          ValueError: there is no checkpoint, or no such variable.
        """
        path = self._existing_checkpoint()
        if name == GLOBAL_STEP:
            return np.array(checkpoint_directories.read_document(path)["extra"][GLOBAL_STEP])
        self._select_devices()
        variables = checkpoint_directories.read_checkpoint(path).variables
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

    def check_steps(self, steps: int | None) -> None:
        """Raises if this number of steps cannot be evaluated, or trained.

        Raises:
          ValueError: it is not a multiple of `iterations_per_loop`.
        """
        if steps is None:
            return
        _check_number("steps", steps)
        iterations_per_loop = self._config.ipu_run_config.iterations_per_loop
        if steps % iterations_per_loop != 0:
            raise ValueError(
                f"steps ({steps}) must be a multiple of iterations_per_loop ({iterations_per_loop})"
            )

    @abc.abstractmethod
    def _build(self, mode: ModeKeys, dataset: Any, is_exported: bool = False) -> EstimatorProgram:
        """Calls the `model_fn` and compiles what it returns. It does not start JAX's backend."""

    def _params_of(self, mode: ModeKeys) -> dict[str, Any]:
        """The parameters for the `model_fn` and the `input_fn` in a mode."""
        del mode
        return self.params

    def _call_input_fn(self, input_fn: Callable[..., Any], mode: ModeKeys) -> Any:
        return call_input_fn(input_fn, mode, self._params_of(mode), self._config)

    def _select_devices(self) -> None:
        """Called before the user's functions and before a checkpoint is read, as both may start JAX."""
        run_config = self._config.ipu_run_config
        if run_config.ipu_options is not None:
            run_config.ipu_options.configure_ipu_system()
        else:
            device_selection.select_automatically([(run_config.ordinal, run_config.num_shards)])

    @contextlib.contextmanager
    def _inferring(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook],
        checkpoint_path: str | os.PathLike[str] | None,
    ) -> Iterator[tuple[Inference, int]]:
        """Yields the `Inference` that evaluates or predicts, and the step of its variables."""
        self._select_devices()
        data = PaddedData(self._call_input_fn(input_fn, mode))
        with self._kept_programs[mode].building():
            program = self._build(mode, data)
        checkpoint = find_checkpoint(self._series, checkpoint_path)
        global_step = 0
        with Session(seed=self._config.tf_random_seed or 0) as session:
            if checkpoint is None:
                warnings.warn(
                    f"There is no checkpoint in {self._model_dir}: the initial values of the variables are "
                    "used.",
                    stacklevel=4,
                )
            else:
                global_step = take_weights(session, *checkpoint, program.program)
            all_hooks = (*program.spec.hooks, *hooks)
            for hook in all_hooks:
                hook.begin()
            session.run(program.infeed.initializer)
            yield Inference(program, data, session, all_hooks, global_step), global_step


def _check_number(name: str, value: Any) -> None:
    if value is not None and not is_int(value, 1):
        raise ValueError(f"Must specify {name} > 0, given: {value}")


def _choose_entries(batch: Any, keys: Sequence[str] | None) -> Any:
    """Chooses entries of a dict of predictions; None for all."""
    if keys is None:
        return batch
    if not isinstance(batch, dict):
        raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ValueError(f"Expected to run at least one output from {list(batch)}, provided {list(keys)}.")
    return {key: batch[key] for key in keys}


def _split_examples(batch: Any, into_examples: bool) -> Iterator[Any]:
    """Yields the examples of a micro-batch, along the first axis, or the micro-batch as it is."""
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
