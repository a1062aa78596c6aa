"""States of the engine's pipelines in the machines' memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from ipu_pipeline.checkpointing.engine_snapshots import place_state, take_parts
from ipu_pipeline.checkpointing.in_memory import InMemorySeries
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import between_bars, check_pipeline, check_state
from ipu_pipeline.processes.launched import wait_on_standby

__all__ = ["InMemoryCheckpoints", "StateSeries"]

_EXTRA = "engine_extra"  # in `Snapshot.extra`: what a program adds
_numbers = itertools.count()  # of trainings, in the order of the program
_logger = logging.getLogger("ipu_pipeline")


class StateSeries:
    """The in-memory checkpoints of a pipeline's training; none if no launcher has given a directory.

    All processes call everything here, in the same order.
    """

    def __init__(self, name: str) -> None:
        """Writes nothing yet.

        Args:
          name: of the training, the same in all processes and after a restart.

        Raises:
          As for `InMemorySeries.of_environment`.
        """
        self._name = name
        self._series = InMemorySeries.of_environment(name)

    @property
    def num_runs(self) -> int:
        """How many runs are done, with those before this process was started."""
        return 0 if self._series is None else self._series.runs

    def find(self) -> Snapshot | None:
        """What `InMemorySeries.find` does."""
        return None if self._series is None else self._series.find()

    def leave(self) -> None:
        """Leaves what was found to a later series of this name."""
        if self._series is not None:
            self._series.leave()

    def go_on_with(self, num_runs: int) -> None:
        """Says that training goes on after so many runs from somewhere else than memory."""
        if self._series is not None:
            self._series.runs = num_runs

    def tell_resumed(self) -> None:
        """Says that training goes on with what was found."""
        if self._series is not None:
            self._series.tell_resumed()
            with between_bars():
                _logger.info("Training goes on with run %d, restored from memory.", self._series.runs)

    def keep(self, state: PipelineState, separate: Set[str], extra: Mapping[str, Any]) -> None:
        """Keeps a state, before the run that changes it.

        Args:
          state: whose arrays may be given away afterwards.
          separate: the variables of which each replica has its own values.
          extra: what else belongs to it, as JSON.

        Raises:
          ProcessError: another process has ended, or does not go on.
        """
        series = self._series
        if series is None:
            return
        told: Sequence[str] = ()
        if series.is_due:
            series.wait()
            others = processes.current()
            told = [series.tell()] if others is None else others.exchange(self._name, series.tell())
        series.hear(told)
        series.take(lambda: take_parts(state, separate, extra))

    def note_run(self, update_count: int) -> None:
        """Counts a run that is done, with the number of weight updates after it."""
        if self._series is not None:
            self._series.note_run(update_count)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._series is not None:
            self._series.wait()


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
        """Looks for nothing yet. A process on standby waits here, if it has not joined others before.

        Args:
          pipeline: whose states they are; `restore` needs it traced.

        Raises:
          TypeError: it is none.
        """
        check_pipeline("engine.InMemoryCheckpoints", pipeline)
        wait_on_standby()
        self.extra: dict[str, Any] = {}
        self._pipeline = pipeline
        self._name = f"engine {next(_numbers)}"
        self._series: StateSeries | None = None
        self._has_saved = False

    @processes.one_thread("restoring a state")
    def restore(self, state: PipelineState) -> PipelineState:
        """Returns the newest state, once, before the first step; all processes call it.

        Args:
          state: from `init`, or from a checkpoint on disk.

        Returns:
          The newest state in memory of which all parts are there, on the pipeline's devices, or `state`
          if that is of more steps.

        Raises:
          TypeError: it is called within a transformation such as `jax.jit`, or the state is none.
          ValueError: a step with `donate` has destroyed the state; the state in memory is of another model
            or optimizer; or processes have been given different directories by their launchers.
          OSError: the launcher's directory cannot be made, or another user may write to it.
          RuntimeError: it was called before; the pipeline has not been traced; or JAX has joined several
            processes, and this library has not.
        """
        check_state("InMemoryCheckpoints.restore", state)
        processes.check_joined("InMemoryCheckpoints.restore")
        if self._series is not None:
            raise RuntimeError("InMemoryCheckpoints.restore was called before; steps go on from one state.")
        series = StateSeries(self._name)
        snapshot = series.find()
        if snapshot is not None:
            try:
                found = place_state(snapshot, "What is in memory", self._pipeline)
            except BaseException:
                series.leave()  # to who restores with another pipeline
                raise
            if found.execution_count >= state.execution_count:
                state, self.extra = found, snapshot.extra[_EXTRA]
                series.tell_resumed()
        self._series = series
        return state

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
          RuntimeError: `restore` has not been called, or has failed, so what is there would be lost.
          ProcessError: another process has ended, or does not go on.
        """
        check_state("InMemoryCheckpoints.save", state)
        if self._series is None:
            raise RuntimeError(
                "InMemoryCheckpoints.save: call restore before the first step, which reads what is there."
            )
        kept = {_EXTRA: _check_extra(extra)}
        if self._has_saved:  # a step counts when the next one begins, as nobody waits for its end
            self._series.note_run(state.update_count)
        self._has_saved = True
        # Arrays of NumPy, which only the user can have put there, may be written to.
        own = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in state.variables.items()}
        state = dataclasses.replace(state, variables=own)
        self._series.keep(state, self._pipeline.separate_variables, kept)


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
