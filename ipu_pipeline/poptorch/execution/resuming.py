"""Training that goes on from memory, after its processes have been started again."""

from __future__ import annotations

import dataclasses
import itertools

from ipu_pipeline.checkpointing.engine_memory import StateSeries
from ipu_pipeline.checkpointing.engine_snapshots import place_state
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import processes
from ipu_pipeline.poptorch.execution.compiled import CompiledModel

__all__ = ["Resumption"]

_numbers = itertools.count()  # of models, in the order of the program


class Resumption:
    """The in-memory checkpoints of a model that trains, one before each call."""

    @processes.one_thread("resuming a PopTorch model")
    def __init__(self) -> None:
        """Looks for a checkpoint. All processes do, for their models in the same order.

        Raises:
          OSError: the launcher's directory cannot be used.
          ValueError: processes have been given different directories.
        """
        self._series = StateSeries(f"poptorch {next(_numbers)}")
        self._found: Snapshot | None = self._series.find()

    @property
    def num_calls(self) -> int:
        """How many calls are done, with those before this process was started."""
        return self._series.num_runs

    def take_over(self, compiled: CompiledModel) -> bool:
        """Puts what was found into a model that has just been compiled; whether there was anything.

        Raises:
          ValueError: it is of another model or optimizer.
        """
        snapshot, self._found = self._found, None
        if snapshot is None:
            return False
        # With several shapes, variables that only other programs use are not the pipeline's.
        names, variables = compiled.pipeline.variables, snapshot.state.variables
        own = {name: value for name, value in variables.items() if name in names}
        state = place_state(
            dataclasses.replace(snapshot, state=dataclasses.replace(snapshot.state, variables=own)),
            "What is in memory",
            compiled.pipeline,
        )
        compiled.replace(**{**vars(state), "variables": {**variables, **state.variables}})
        self._series.tell_resumed()
        return True

    @processes.one_thread("a call of a PopTorch model")
    def keep(self, compiled: CompiledModel) -> None:
        """Keeps the state of a model that is about to run."""
        assert compiled.state is not None
        self._series.keep(dataclasses.replace(compiled.state, variables=compiled.variables))

    def note_call(self, compiled: CompiledModel) -> None:
        """Counts a call that is done."""
        assert compiled.state is not None
        self._series.note_run(compiled.state.update_count)
