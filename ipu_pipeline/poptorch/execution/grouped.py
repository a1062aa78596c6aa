"""Parameters with a value for each group of replicas: `replicaGrouping`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs.capture import Captured
from ipu_pipeline.poptorch.replica_groups import GroupRows, ReplicaGrouping
from ipu_pipeline.poptorch.thread_views import changed_for_this_thread_alone

__all__ = ["check_groupings", "one_row_each"]


def check_groupings(
    model: torch.nn.Module, groupings: Mapping[str, Any], num_replicas: int
) -> dict[int, GroupRows]:
    """Checks groupings of a model's parameters. Returns the rows of each, by the parameter's id."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[str, ReplicaGrouping]] = {}
    for name, values in groupings.items():
        if name not in parameters:
            raise Error(
                f"per_replica_params names {name!r}, which is no parameter of the model. It has "
                f"{', '.join(parameters) or 'none'}."
            )
        grouping = ReplicaGrouping.check(f"replicaGrouping of {name}", values, num_replicas)
        other, known = found.setdefault(id(parameters[name]), (name, grouping))
        if known != grouping:
            raise Error(
                f"{other} and {name} are one parameter, and have different groupings: {known} and "
                f"{grouping}."
            )
    made: dict[int, GroupRows] = {}
    for key, (name, grouping) in found.items():
        rows = grouping.rows(num_replicas)
        if rows is not None:
            rows.check(name, tuple(parameters[name].shape))
            made[key] = rows
    return made


@contextlib.contextmanager
def one_row_each(
    model: torch.nn.Module, rows: Mapping[int, GroupRows]
) -> Iterator[Callable[[Captured], Captured]]:
    """Shows the model's forward only the first row of parameters with rows, inside this `with` block.

    Yields:
      A function that puts the parameters themselves back into a model captured in the block.
    """
    shown: dict[int, torch.nn.Parameter] = {}
    originals: dict[int, torch.Tensor] = {}

    def restored(captured: Captured) -> Captured:
        tensors = {key: originals.get(id(tensor), tensor) for key, tensor in captured.tensors.items()}
        return dataclasses.replace(captured, tensors=tensors)

    with changed_for_this_thread_alone(model):
        for module in model.modules():
            held: dict[str, Any] = vars(module)["_parameters"]
            for name, parameter in list(held.items()):
                if id(parameter) not in rows:
                    continue
                if id(parameter) not in shown:
                    with torch.inference_mode(False):
                        row = torch.nn.Parameter(parameter.detach()[0].clone(), parameter.requires_grad)
                    shown[id(parameter)], originals[id(row)] = row, parameter
                held[name] = shown[id(parameter)]
        yield restored
