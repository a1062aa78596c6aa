"""States of the engine's pipelines as snapshots, on disk and in the machines' memory."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.checkpoint_directories import read_same_checkpoint, write_checkpoint
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, name_next, parts_of, rows_of
from ipu_pipeline.checkpointing.states import Counts, State
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import check_pipeline, check_state, leaves_by_path, move_state
from ipu_pipeline.engine.inspect import find_separate_variables
from ipu_pipeline.ground.errors import CheckpointError

# Snapshots.

_NAME = "Pipeline"
# In `State.extra`: the data of the state's random key, and the variables with a row for each replica.
_KEY, _ROWS = "engine_key", "engine_rows"


def take_state(state: PipelineState, prepare: Callable[[list[Any]], list[Any]]) -> State:
    """A snapshot of a state."""
    leaves = leaves_by_path(state.optimizer_state)
    return State(
        0,
        str(jax.random.key_impl(state.key)),
        state.variables,
        {} if leaves is None else {_NAME: leaves},
        counts={_NAME: Counts(int(state.update_count), int(state.execution_count))},
        extra={_KEY: np.asarray(jax.random.key_data(state.key)).tolist()},
    ).replace_arrays(prepare)


def take_parts(state: PipelineState, separate: Set[str], extra: Mapping[str, Any]) -> State:
    """A snapshot of this process's parts of a state."""
    own_values = {name: value for name, value in state.variables.items() if name in separate}
    common_values = {name: value for name, value in state.variables.items() if name not in separate}
    snapshot = take_state(dataclasses.replace(state, variables=common_values), parts_of)
    snapshot.variables.update(zip(own_values, rows_of(list(own_values.values())), strict=True))
    snapshot.extra.update({_ROWS: list(own_values), **extra})
    return snapshot


def place_state(snapshot: State, what: str, pipeline: Pipeline) -> PipelineState:
    """The state that a snapshot is of, on the devices of a pipeline."""
    if len(snapshot.counts) > 1 or snapshot.accumulators:
        names = ", ".join(map(repr, snapshot.counts))
        raise CheckpointError(
            f"{what} is of a session with {names}, and not of one pipeline between two updates."
        )
    name, counts = next(iter(snapshot.counts.items()), (_NAME, Counts()))
    data = snapshot.extra.get(_KEY)
    if data is None:
        key = jax.random.key(snapshot.seed, impl=snapshot.key_implementation)
    else:
        key = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32), impl=snapshot.key_implementation)
    state = PipelineState(first_rows(snapshot), None, counts.update_count, counts.execution_count, key)
    placed = move_state(state, snapshot.optimizers.get(name), pipeline)
    for name in find_separate_variables(pipeline) & set(snapshot.extra.get(_ROWS, ())):
        rows = snapshot.variables[name]
        if len(rows) == pipeline.num_replicas:
            placed.variables[name] = processes.spread_rows(rows, placed.variables[name])
    return placed


def first_rows(snapshot: State) -> dict[str, Any]:
    """The variables of a snapshot; where each replica has its own values, the first one's."""
    rows = snapshot.extra.get(_ROWS, ())
    return {name: value[0] if name in rows else value for name, value in snapshot.variables.items()}


# On disk.


@processes.one_thread("saving a state")
def save(path: str | os.PathLike[str], state: PipelineState) -> None:
    """Saves a state of a pipeline exactly. With several processes, all call it with the same path.

    Orbax writes the arrays, each from a process that has it. If values differ between replicas, the first
    replica's are written. The function returns when the checkpoint is complete. It then replaces an
    existing one, which is kept if saving fails or the process is killed. (Orbax's own
    `StandardCheckpointer` can also save a state, in one process only.)

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.save("state", state)
      >>> restored = engine.restore("state", pipeline)
      >>> bool((restored.variables["dense/kernel"] == state.variables["dense/kernel"]).all())
      True

    Args:
      path: a directory that all processes can reach; its parents are created.
      state: from `init` or a step.

    Raises:
      TypeError: an argument has a wrong type, or it is called within a transformation such as `jax.jit`.
      ValueError: a step with `donate` has destroyed the state. Or something else is at the path, or
        processes give different paths.
      OSError: the checkpoint cannot be written.
      RuntimeError: JAX has joined several processes, but this library has not.
    """
    check_state("engine.save", state)
    _check_path("save", path)
    processes.check_joined("engine.save")
    snapshot = take_state(state, lambda leaves: list(map(processes.only_if_written_here, leaves)))
    write_checkpoint(path, snapshot)


@processes.one_thread("restoring a state")
def restore(path: str | os.PathLike[str], pipeline: Pipeline) -> PipelineState:
    """Restores a saved state, for a pipeline with any split of the same layers.

    With several processes, all call it. The numbers of processes, devices and replicas may differ from
    those of the saved run. If the stages differ, parameters are moved as by `resplit`. A checkpoint of a
    `Session` with one pipeline can be restored, too, with the random key of its seed.

    Args:
      path: the directory.
      pipeline: a pipeline traced by `trace` or `init`.

    Returns:
      The state, on the pipeline's devices.

    Raises:
      TypeError: an argument has a wrong type.
      CheckpointError: there is no checkpoint, it is damaged, or it belongs to a session with several
        pipelines.
      ValueError: the pipeline has other variables, or another optimizer.
      RuntimeError: the pipeline has not been traced, or as for `save`.
    """
    _check_path("restore", path)
    check_pipeline("engine.restore", pipeline)
    processes.check_joined("engine.restore")
    return place_state(read_same_checkpoint(path), f"The checkpoint {os.fspath(path)}", pipeline)


def _check_path(caller: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{caller}: path must be a string or a path; got {path!r}.")


# In the machines' memory.

_EXTRA = "engine_extra"  # in `State.extra`: what a program adds


class InMemoryCheckpoints:
    """Checkpoints in the machines' memory, for programs that `ipu-pipeline launch` restarts.

    Losses and variables are then exactly those of a job without failures. Without this launcher, nothing is
    kept, and `restore` returns its argument. If a program makes several, all processes must make them in
    the same order.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> checkpoints = engine.InMemoryCheckpoints(pipeline)
      >>> x = np.ones([2, 8], np.float32)
      >>> state = checkpoints.restore(pipeline.init(jax.random.key(0), x))
      >>> for step in range(state.execution_count, 3):
      ...     checkpoints.save(state)
      ...     state, outputs = pipeline.step(state, [x])
      >>> state.execution_count
      3

    Attributes:
      extra: the `extra` that was saved with the state returned by `restore`; {} if that state is its
        argument.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Does not look for checkpoints yet.

        Args:
          pipeline: the pipeline of the states; `restore` needs it traced.

        Raises:
          TypeError: it is not a pipeline.
        """
        check_pipeline("engine.InMemoryCheckpoints", pipeline)
        self.extra: dict[str, Any] = {}
        self._pipeline = pipeline
        self._name = name_next("engine")
        self._series: InMemorySeries | None = None  # None also without a launcher
        self._has_restored = self._has_saved = False

    @processes.one_thread("restoring a state")
    def restore(self, state: PipelineState) -> PipelineState:
        """Returns the newest state. All processes call it once, before the first step.

        Args:
          state: from `init`, or from a checkpoint on disk.

        Returns:
          The newest complete state in memory, on the pipeline's devices, or `state` if that has more steps.

        Raises:
          TypeError: it is called within a transformation such as `jax.jit`, or `state` is not a state.
          ValueError: a step with `donate` has destroyed the state; the state in memory belongs to another
            model or optimizer; or launchers gave processes different directories.
          OSError: the launcher's directory cannot be made, or another user may write to it.
          RuntimeError: it was called before; the pipeline has not been traced; or JAX has joined several
            processes, but this library has not.
        """
        check_state("InMemoryCheckpoints.restore", state)
        processes.check_joined("InMemoryCheckpoints.restore")
        if self._has_restored:
            raise RuntimeError("InMemoryCheckpoints.restore was called before; steps go on from one state.")
        series = InMemorySeries.of_environment(self._name)
        snapshot = None if series is None else series.find()
        if series is not None and snapshot is not None:
            try:
                restored = place_state(snapshot, "What is in memory", self._pipeline)
            except BaseException:
                series.leave()  # for a call that comes with the right pipeline
                raise
            if restored.execution_count >= state.execution_count:
                state, self.extra = restored, snapshot.extra[_EXTRA]
                series.say_resumed()
        self._series, self._has_restored = series, True
        return state

    @processes.one_thread("keeping a state")
    def save(self, state: PipelineState, extra: Mapping[str, Any] | None = None) -> None:
        """Keeps a state. All processes call it before each step, with the argument of the step.

        The state is written while the step runs. If memory is full, a warning says so, and training
        continues.

        Args:
          state: the state; the step may use `donate`.
          extra: further JSON data of process 0, such as the position in the data.

        Raises:
          TypeError: it is called within a transformation such as `jax.jit`, `state` is not a state, or
            `extra` is not a dict that can be written as JSON.
          ValueError: a step with `donate` has destroyed the state.
          RuntimeError: `restore` has not been called, or has failed, so kept states would be lost.
          ProcessError: another process has ended, or does not continue.
        """
        check_state("InMemoryCheckpoints.save", state)
        if not self._has_restored:
            raise RuntimeError(
                "InMemoryCheckpoints.save: call restore before the first step, which reads what is there."
            )
        saved_extra = {_EXTRA: _check_extra(extra)}
        series = self._series
        if series is None:
            return
        if self._has_saved:  # steps run asynchronously: a step counts when the next one begins
            series.note_run(state.update_count)
        self._has_saved = True
        # Arrays of NumPy, which only the user can have put there, may be written to.
        copies = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in state.variables.items()}
        state = dataclasses.replace(state, variables=copies)
        separate = find_separate_variables(self._pipeline)
        series.meet()
        series.take(lambda: take_parts(state, separate, saved_extra))


def _check_extra(extra: Any) -> dict[str, Any]:
    """A copy of the extra data, as it will be read back."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"InMemoryCheckpoints.save: extra must be a dict; got {type(extra).__name__}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"InMemoryCheckpoints.save: extra must be JSON: {error}.") from error
    return copy
