"""States of the engine's pipelines, on disk and in memory."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.checkpoints import read_same_checkpoint, write_checkpoint
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, parts_of
from ipu_pipeline.checkpointing.session_state import KeptOptimizer, Record, SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import between_bars, check_pipeline, check_state, move_state
from ipu_pipeline.ground.errors import CheckpointError

__all__ = ["InMemoryCheckpoints", "restore", "save"]

_NAME = "Pipeline"
# In `Snapshot.extra`: the data of the state's random key, and what a program adds.
_KEY, _EXTRA = "engine_key", "engine_extra"
_numbers = itertools.count()  # of trainings, in the order of the program
_logger = logging.getLogger("ipu_pipeline")


@processes.one_thread("saving a state")
def save(path: str | os.PathLike[str], state: PipelineState) -> None:
    """Saves a state of a pipeline, to the last bit. In several processes, all call it with the same path.

    Arrays are written by Orbax, each by a process that has it. It returns when the checkpoint is complete;
    one that was there is then replaced, and stays if this ends in an error, or the process is killed.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.save("state", state)
      >>> restored = engine.restore("state", pipeline)
      >>> bool((restored.variables["dense/kernel"] == state.variables["dense/kernel"]).all())
      True

    Args:
      path: a directory, which all processes reach; its parents are made.
      state: from `init` or a step.

    Raises:
      TypeError: an argument is of another type, or it is called within a transformation such as `jax.jit`.
      ValueError: a step with `donate` has destroyed the state. Or there is something else at the path, or
        processes name different paths.
      OSError: it cannot be written.
      RuntimeError: JAX has joined several processes, and this library has not.
    """
    check_state("engine.save", state)
    _check_path("save", path)
    processes.check_joined("engine.save")
    write_checkpoint(path, _take(state, lambda leaves: list(map(processes.only_if_written_here, leaves))))


@processes.one_thread("restoring a state")
def restore(path: str | os.PathLike[str], pipeline: Pipeline) -> PipelineState:
    """Restores a state that `save` saved, for a pipeline that cuts the same layers in any way.

    In several processes, all call it; their number, the devices and the replicas may be others than when it
    was saved. Where stages are others, parameters move as by `resplit`. A checkpoint of a `Session` with
    one pipeline can be restored, too, with the random key of its seed.

    Args:
      path: the directory.
      pipeline: traced, by `trace` or `init`.

    Returns:
      The state, on the pipeline's devices.

    Raises:
      TypeError: an argument is of another type.
      CheckpointError: there is none, it is damaged, or it is of a session with several pipelines.
      ValueError: the pipeline has other variables, or another optimizer.
      RuntimeError: the pipeline has not been traced, or as for `save`.
    """
    _check_path("restore", path)
    check_pipeline("engine.restore", pipeline)
    processes.check_joined("engine.restore")
    return _place(read_same_checkpoint(path), f"The checkpoint {os.fspath(path)}", pipeline)


class InMemoryCheckpoints:
    """Checkpoints in the machines' memory, for programs that `ipu-pipeline launch` starts again.

    Losses and variables are then, to the last bit, those of a job in which nothing failed. Without this
    launcher, nothing is kept and `restore` returns what it gets. Several in one program are known by their
    order, in which all processes make them.

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
      extra: what was saved as `extra` with the state that `restore` returned; {} if that was another one.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Looks for nothing yet.

        Args:
          pipeline: whose states they are; `restore` needs it traced.

        Raises:
          TypeError: it is none.
        """
        check_pipeline("engine.InMemoryCheckpoints", pipeline)
        self.extra: dict[str, Any] = {}
        self._pipeline = pipeline
        self._name = f"engine {next(_numbers)}"
        self._series: InMemorySeries | None = None
        self._has_restored = self._has_saved = False

    @processes.one_thread("restoring a state")
    def restore(self, state: PipelineState) -> PipelineState:
        """Returns the newest state, once, before the first step; all processes call it.

        Args:
          state: from `init`, or from a checkpoint on disk.

        Returns:
          The newest state in memory of which all parts are there, on the pipeline's devices, or `state`
          if that is of as many steps or more.

        Raises:
          TypeError: it is called within a transformation such as `jax.jit`, or the state is none.
          ValueError: a step with `donate` has destroyed the state; the state in memory is of another model
            or optimizer; or processes have been given different directories by their launchers.
          OSError: the launcher's directory cannot be made, or another user may write to it.
          RuntimeError: it was called before, or JAX has joined several processes, and this library has not.
        """
        check_state("InMemoryCheckpoints.restore", state)
        processes.check_joined("InMemoryCheckpoints.restore")
        if self._has_restored:
            raise RuntimeError("InMemoryCheckpoints.restore was called before; steps go on from one state.")
        self._has_restored = True
        self._series = series = InMemorySeries.of_environment(self._name)
        snapshot = None if series is None else series.find()
        if series is None or snapshot is None:
            return state
        found = _place(snapshot, "What is in memory", self._pipeline)
        if found.execution_count <= state.execution_count:
            return state
        self.extra = snapshot.extra[_EXTRA]
        series.tell_resumed()
        with between_bars():
            _logger.info("Training goes on with step %d, restored from memory.", found.execution_count)
        return found

    @processes.one_thread("keeping a state")
    def save(self, state: PipelineState, extra: Mapping[str, Any] | None = None) -> None:
        """Keeps a state, before the step that it is given to. All processes call it before each step.

        It is written while that step runs. If memory is full, a warning says so, and training goes on.

        Args:
          state: of the pipeline; the step may be one with `donate`.
          extra: what else belongs to it, as JSON, such as the position of the data; of process 0.

        Raises:
          TypeError: it is called within a transformation such as `jax.jit`, the state is none, or `extra`
            is no dict that can be written as JSON.
          ValueError: a step with `donate` has destroyed the state.
          RuntimeError: `restore` has not been called, so what is there would be lost.
          ProcessError: another process has ended, or does not go on.
        """
        check_state("InMemoryCheckpoints.save", state)
        if not self._has_restored:
            raise RuntimeError(
                "InMemoryCheckpoints.save: call restore before the first step, which reads what is there."
            )
        series = self._series
        if series is None:
            return
        kept = {_EXTRA: _check_extra(extra)}
        if self._has_saved:
            series.note_run(state.update_count)
        self._has_saved = True
        told: Sequence[str] = ()
        if series.is_due:
            series.wait()
            others = processes.current()
            told = [series.tell()] if others is None else others.exchange(self._name, series.tell())
        series.hear(told)
        series.take(lambda: _take(state, parts_of, kept))


def _check_extra(extra: Any) -> dict[str, Any]:
    """A copy of what belongs to a state, as it will be read."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"InMemoryCheckpoints.save: extra must be a dict; got {type(extra).__name__}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"InMemoryCheckpoints.save: extra must be JSON: {error}.") from error
    return copy


def _take(
    state: PipelineState,
    prepare: Callable[[list[Any]], list[Any]],
    extra: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of a state.

    Args:
      state: the state.
      prepare: makes of its arrays what a snapshot has of them.
      extra: what else belongs to it, as JSON.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state.optimizer_state)[0]
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    prepared = prepare([*state.variables.values(), *named.values()])
    variables = dict(zip(state.variables, prepared, strict=False))
    kept = None
    if state.optimizer_state is not None:
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named.items()}
        kept = KeptOptimizer(shapes, prepared[len(variables) :])
    record = Record(kept, int(state.update_count), int(state.execution_count))
    data = np.asarray(jax.random.key_data(state.key)).tolist()
    implementation = str(jax.random.key_impl(state.key))
    own = SessionState(variables, {_NAME: record})
    return Snapshot(own, 0, implementation, extra={_KEY: data, **(extra or {})})


def _place(snapshot: Snapshot, what: str, pipeline: Pipeline) -> PipelineState:
    """The state that a snapshot is of, on the devices of a pipeline.

    Args:
      snapshot: the snapshot.
      what: where it is from, for the error; the beginning of a sentence.
      pipeline: traced.

    Raises:
      As for `restore`.
    """
    records = list(snapshot.state.pipelines.values())
    if len(records) > 1 or any(record.accumulated is not None for record in records):
        names = ", ".join(map(repr, snapshot.state.pipelines))
        raise CheckpointError(
            f"{what} is of a session with {names}, and not of one pipeline between two updates."
        )
    record = records[0] if records else Record()
    data = snapshot.extra.get(_KEY)
    if data is None:
        key = jax.random.key(snapshot.seed, impl=snapshot.key_implementation)
    else:
        key = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32), impl=snapshot.key_implementation)
    leaves = None
    if record.optimizer is not None:
        leaves = dict(zip(record.optimizer.shapes, jax.tree.leaves(record.optimizer.tree), strict=True))
    state = PipelineState(snapshot.state.variables, None, record.update_count, record.execution_count, key)
    return move_state(state, leaves, pipeline)


def _check_path(caller: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{caller}: path must be a string or a path; got {path!r}.")
