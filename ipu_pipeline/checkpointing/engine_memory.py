"""States of the engine's pipelines in the machines' memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ipu_pipeline.checkpointing.engine_snapshots import place_state, take_parts
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, name_next
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import check_pipeline, check_state
from ipu_pipeline.engine.inspect import find_separate_variables

__all__ = ["InMemoryCheckpoints"]

_EXTRA = "engine_extra"  # in `Snapshot.extra`: what a program adds


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
                found = place_state(snapshot, "What is in memory", self._pipeline)
            except BaseException:
                series.leave()  # for a call that comes with the right pipeline
                raise
            if found.execution_count >= state.execution_count:
                state, self.extra = found, snapshot.extra[_EXTRA]
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
        kept = {_EXTRA: _check_extra(extra)}
        series = self._series
        if series is None:
            return
        if self._has_saved:  # steps run asynchronously: a step counts when the next one begins
            series.note_run(state.update_count)
        self._has_saved = True
        # Arrays of NumPy, which only the user can have put there, may be written to.
        own = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in state.variables.items()}
        state, separate = dataclasses.replace(state, variables=own), find_separate_variables(self._pipeline)
        series.meet()
        series.take(lambda: take_parts(state, separate, kept))


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
