"""Training that goes on from memory, after its processes have been started again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from ipu_pipeline.checkpointing.engine_snapshots import first_rows, place_state, take_parts
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, name_next
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.inspect import find_separate_variables
from ipu_pipeline.poptorch.dtypes import to_torch
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.host_changes import writing
from ipu_pipeline.poptorch.execution.training import ModelOptimizer
from ipu_pipeline.poptorch.execution.weights import on_host

__all__ = ["Resumption"]

# In `Snapshot.extra`: the names of the tensors that variables are of, and what is known of the optimizer.
_NAMES, _OPTIMIZER = "poptorch_names", "poptorch_optimizer"


class Resumption:
    """The in-memory checkpoints of a model that trains, one before each call.

    Attributes:
      num_calls: how many calls are done, with those before this process was started.
      has_new_values: whether the optimizer's values were set by the program since, before the first call.
    """

    @processes.one_thread("resuming a PopTorch model")
    def __init__(self, model: torch.nn.Module, num_done: int) -> None:
        """Looks for a checkpoint, and puts its weights into the model on the host."""
        self._model = model
        self.has_new_values = False
        self.num_calls = num_done
        self._names: dict[str, str] = {}  # variable -> tensor
        self._found: Snapshot | None = None
        self._series = series = InMemorySeries.of_environment(name_next("poptorch"))
        if series is None:
            return
        found = series.find()
        if found is None or series.runs < num_done:
            series.runs = num_done
            return
        _write_to_host(found, model)
        self._found, self._names, self.num_calls = found, found.extra[_NAMES], series.runs

    @property
    def is_pending(self) -> bool:
        """Whether there is a checkpoint that no model has taken over."""
        return self._found is not None

    def take_over(self, compiled: CompiledModel, training: ModelOptimizer) -> None:
        """Puts what was found into a model that has just been compiled."""
        snapshot = self._found
        assert snapshot is not None
        # With several shapes, variables that only other programs use are not the pipeline's.
        names, variables = compiled.pipeline.variables, snapshot.state.variables
        own = {name: value for name, value in variables.items() if name in names}
        state = place_state(
            dataclasses.replace(snapshot, state=dataclasses.replace(snapshot.state, variables=own)),
            "What is in memory",
            compiled.pipeline,
        )
        if not self.has_new_values:
            training.go_on_with(snapshot.extra[_OPTIMIZER])
        compiled.replace(
            **{
                **vars(state),
                "variables": {**first_rows(snapshot), **state.variables},
                "optimizer_state": training.put_values(state.optimizer_state),
            }
        )
        _write_to_host(snapshot, self._model)  # once more: the program may have loaded older weights
        assert self._series is not None
        self._series.say_resumed()
        self._found = None

    @processes.one_thread("a call of a PopTorch model")
    def keep(self, compiled: CompiledModel, training: ModelOptimizer) -> None:
        """Keeps the state of a model that is about to run."""
        compiled.check_not_lost()
        if self._series is None:
            return
        assert compiled.state is not None
        if not compiled.tensors.keys() <= self._names.keys():
            names = {id(tensor): name for name, tensor in _named_tensors(self._model).items()}
            own = {n: names[id(t)] for n, t in compiled.tensors.items() if id(t) in names}
            self._names = {**self._names, **own}
        state = dataclasses.replace(compiled.state, variables=compiled.variables)
        extra = {_NAMES: self._names, _OPTIMIZER: training.describe()}
        self._series.meet()
        self._series.take(lambda: take_parts(state, find_separate_variables(compiled.pipeline), extra))

    def note_call(self, compiled: CompiledModel) -> None:
        """Counts a call that is done."""
        if self._series is not None:
            assert compiled.state is not None
            self._series.note_run(compiled.state.update_count)


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def _write_to_host(snapshot: Snapshot, model: torch.nn.Module) -> None:
    """Writes a snapshot's variables into the user's model."""
    named, values = _named_tensors(model), first_rows(snapshot)
    names: Mapping[str, str] = snapshot.extra[_NAMES]
    if missing := sorted({name for name in names.values() if name not in named}):
        raise ValueError(
            f"What is in memory is of another model: this one has no {', '.join(missing)}. A program that "
            "is started again must make the model that it made before."
        )
    with on_host(*named.values()):
        for variable, name in names.items():
            tensor, value = named[name], np.asarray(values[variable])
            if tuple(tensor.shape) == value.shape:  # not rows of groups of replicas, which come later
                with writing(tensor):
                    tensor.copy_(to_torch(value, tensor.dtype))
