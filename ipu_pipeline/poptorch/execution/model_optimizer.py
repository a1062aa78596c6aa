"""Optimizer of a model that trains: its formulas for the engine, its values and its state."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ipu_pipeline.engine import PipelineState, Reduction
from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.enums import MeanReductionStrategy, ReductionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.host_weights import OptimizerChanges, on_host
from ipu_pipeline.poptorch.execution.process_groups import agree
from ipu_pipeline.poptorch.graphs.stages import SCOPE
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.optim.device_state import SavedState, split_key
from ipu_pipeline.poptorch.optim.specs import (
    OptimizerSpec,
    assign_groups,
    check_compatible,
    check_same_groups,
    describe,
)
from ipu_pipeline.poptorch.optim.transformations import (
    export_state,
    import_state,
    make_transformation,
    read_torch_state,
    with_hyperparameters,
    write_torch_state,
)
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.replica_groups import GroupRows


class ModelOptimizer:
    """An optimizer as a compiled model uses it.

    Attributes:
      spec: its description, with the values in use.
      group_of: the group of each variable that it trains.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[str, torch.Tensor],
        trainable: Collection[str],
        options: Options,
        model: torch.nn.Module,
        group_rows: Mapping[str, GroupRows] | None = None,
    ) -> None:
        """Reads an optimizer."""
        self._options = options
        self._group_rows = dict(group_rows or {})
        self._is_automatic = options.Training.automatic_loss_scaling
        self.spec = describe(optimizer, self._is_automatic)
        self._tensors = {name: tensors[name] for name in sorted(trainable)}
        named = {f"{SCOPE}/{name}": parameter for name, parameter in model.named_parameters()}
        self._names = {id(tensor): name for name, tensor in (named | dict(tensors)).items()}
        self._required = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self.group_of = assign_groups(optimizer, self._tensors)
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if strangers := len(parameters - {id(tensor) for tensor in model.parameters()}):
            warn_once(
                f"The optimizer has {strangers} parameters that are not the model's. They are not trained."
            )
        if not self.group_of:
            raise Error(
                "There is nothing to train: the loss depends on "
                f"{', '.join(self._tensors) or 'no parameter that requires a gradient'}, and the "
                "optimizer's groups have none of these parameters. Give the optimizer this model's "
                "parameters: model.parameters()."
            )
        if complex_ones := [name for name in self.group_of if self._tensors[name].is_complex()]:
            raise Error(
                f"Parameter {complex_ones[0]} has complex numbers, which no optimizer trains here. Make "
                "a real parameter of its parts (torch.view_as_real), and call torch.view_as_complex in "
                "forward."
            )
        self._agree(self.spec)
        self._changes = OptimizerChanges(optimizer)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that it trains, by the names of their variables."""
        return {name: self._tensors[name] for name in self.group_of}

    @property
    def reduction(self) -> Reduction:
        """How gradients of micro-batches are reduced to one."""
        training = self._options.Training
        if training.accumulation_and_replication_reduction_type is ReductionType.Sum:
            return Reduction.SUM
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        runs = strategy is MeanReductionStrategy.Running or self.spec.needs_running_mean
        return Reduction.RUNNING_MEAN if runs else Reduction.MEAN

    def pipeline_options(self) -> dict[str, Any]:
        """Returns the optimizer's options for `engine.Pipeline`."""
        options = self._options
        num_replicas = options.replication_factor * options.Distributed.numProcesses
        num_summed = num_replicas if self.reduction is Reduction.SUM else 1
        return {
            "optimizer": make_transformation(
                self.spec, self.group_of, num_summed=num_summed, with_rows=self._group_rows
            ),
            "trained": sorted(self.group_of),
            "reduction": self.reduction,
            "accumulator_dtype": self.spec.accumulator_dtype,
        }

    def warn_of_changes(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warns of changes that have no effect on the devices.

        These are changes in the optimizer in use, and parameters that were frozen or unfrozen since the
        model was compiled.
        """
        assert optimizer is not None
        self._changes.warn(optimizer)
        if changed := self._find_changed():
            warn_once(
                f"requires_grad of {', '.join(changed)} has changed since the model was compiled, which "
                "has no effect on what is trained. Call destroy() on the model and wrap it again."
            )

    def check_same_frozen(self) -> None:
        """Checks that the same parameters train, because the model is captured anew for other shapes."""
        if changed := self._find_changed():
            raise Error(
                f"requires_grad of {', '.join(changed)} has changed since the model was compiled, so it "
                "cannot be compiled for other shapes. Call destroy() on the model and wrap it again."
            )

    def _find_changed(self) -> list[str]:
        with on_host():
            return [name for name, tensor, was in self._required if tensor.requires_grad is not was]

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the values of another optimizer."""
        spec = describe(optimizer, self._is_automatic)
        relaxed = self._options.relax_optimizer_attributes_checks
        compatible = check_compatible(self.spec, spec, relaxed)
        check_same_groups(self.group_of, assign_groups(optimizer, self._tensors))
        self._agree(compatible)
        self.spec = compatible
        self._changes.note(optimizer)

    def _agree(self, spec: OptimizerSpec) -> None:
        """Checks that all processes have the same optimizer."""
        values = [dict(sorted(group.items())) for group in spec.values]
        agree(
            "an optimizer of PopTorch",
            {
                "the optimizer": f"{spec.name}, {spec.structure}",
                "the optimizer's values": f"{values}, {spec.loss_scaling}, {spec.max_grad_norm}",
                "the groups of parameters": str(dict(self.group_of)),
            },
        )

    def describe(self) -> dict[str, Any]:
        """Returns the values in use, as JSON."""
        spec = self.spec
        return {
            "values": list(map(dict, spec.values)),
            "loss_scaling": spec.loss_scaling,
            "max_grad_norm": spec.max_grad_norm,
        }

    def restore_values(self, described: Mapping[str, Any]) -> None:
        """Takes the values that `describe` returned of an optimizer of the same class and groups."""
        groups = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
            for group in described["values"]
        ]
        common = {name: described[name] for name in ("loss_scaling", "max_grad_norm")}
        self.spec = dataclasses.replace(self.spec, values=tuple(groups), **common)

    def put_values(self, optimizer_state: Any) -> Any:
        """Returns an optimizer's state with the values in use."""
        return with_hyperparameters(optimizer_state, self.spec)

    def put_state(self, optimizer_state: Any, saved: SavedState | None) -> Any:
        """Returns an optimizer's initial state with the saved one put in, and with the values in use."""
        if saved is None:
            return self.put_values(optimizer_state)
        tensors = {
            key: tensor if rows is None else to_torch(rows.to_device(key, to_numpy(tensor, key)))
            for key, tensor, rows in self._with_rows(saved)
        }
        saved = saved._replace(ipu_state=tensors)
        return self.put_values(import_state(optimizer_state, saved, self.spec, self.group_of))

    def save(self, state: PipelineState) -> SavedState:
        """Returns the optimizer's state for its `state_dict`."""
        saved = export_state(state.optimizer_state, self.spec, self.group_of)
        tensors = {
            key: tensor if rows is None else to_torch(rows.to_host(to_numpy(tensor, key)))
            for key, tensor, rows in self._with_rows(saved)
        }
        return saved._replace(ipu_state=tensors)

    def _with_rows(self, saved: SavedState) -> Iterator[tuple[str, torch.Tensor, GroupRows | None]]:
        """Yields the variables' state, with the group rows of each tensor. Counts have none."""
        for key, tensor in saved.ipu_state.items():
            rows = self._group_rows.get(split_key(key)[1])
            yield key, tensor, rows if tensor.dim() else None

    def take_state(self, optimizer: torch.optim.Optimizer) -> SavedState | None:
        """Returns the state that an optimizer has when a model begins to use it; None if it has none."""
        if isinstance(optimizer, optim.Optimizer):
            parameters = optimizer.all_parameters
            named = {self._names[id(p)]: p for p in parameters if id(p) in self._names}
            saved = optimizer.device_state.take(named, parameters)
            if saved is None:
                return None
            frozen = named.keys() - self.group_of.keys()
            tensors = {
                key: tensor for key, tensor in saved.ipu_state.items() if split_key(key)[1] not in frozen
            }
            return saved._replace(ipu_state=tensors)
        with on_host(*self._tensors.values()):
            return read_torch_state(optimizer, self.parameters)

    def keep_state(self, optimizer: torch.optim.Optimizer, saved: SavedState) -> None:
        """Gives an optimizer that no model has used yet the state that another one had."""
        if not isinstance(optimizer, optim.Optimizer):
            with on_host(*self._tensors.values()):
                write_torch_state(optimizer, saved, self._tensors)
        elif not optimizer.device_state.is_loaded:
            optimizer.device_state.keep(saved, self.parameters)

    def leave_state(self, optimizer: torch.optim.Optimizer, state: PipelineState) -> None:
        """Gives torch's optimizer its state when a model no longer uses it. Ours keep it themselves."""
        if isinstance(optimizer, optim.Optimizer):
            return
        with on_host(*self._tensors.values()):
            write_torch_state(optimizer, self.save(state), self._tensors)


def call_before_saving(
    optimizer: torch.optim.Optimizer, leave_state: Callable[[], None]
) -> RemovableHandle:
    """Calls a method, held weakly, whenever an optimizer's `state_dict` is called."""
    leave = weakref.WeakMethod(leave_state)

    def hook(_optimizer: torch.optim.Optimizer) -> None:
        if (method := leave()) is not None:
            method()

    return optimizer.register_state_dict_pre_hook(hook)
