"""Makes the state that training begins with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.progress import initializing
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value

__all__ = ["initial_values", "make_optimizer_state", "make_state", "make_variables"]


def make_state(runner: Runner[Any], key: Any) -> PipelineState:
    """Makes a state, on the devices of its stages."""
    placement = runner.placement
    variables = make_variables(placement, placement.traced.variables, key)
    return PipelineState(
        variables=variables,
        optimizer_state=make_optimizer_state(runner, variables),
        update_count=0,
        execution_count=0,
        key=key,
    )


def initial_values(specs: Sequence[VariableSpec], key: Any) -> dict[str, Any]:
    """Makes the initial values of variables, by full name."""
    with initializing(len(specs)) as progress:
        values = {}
        for spec in specs:
            values[spec.name] = initial_value(spec, key)
            progress.num_done += 1
    return values


def make_variables(placement: StatePlacement, names: Iterable[str], key: Any) -> dict[str, Any]:
    """Makes the initial values of variables, placed."""
    variables: dict[str, Any] = {}
    names = list(names)
    with initializing(len(names)) as progress:
        for name in names:  # one at a time: all of them may not fit one device
            spec = placement.traced.variables[name]
            made = initial_value(spec, key) if placement.has_variable(name) else spec
            variables |= placement.place_variables({name: made})
            progress.num_done += 1
    return variables


def make_optimizer_state(
    runner: Runner[Any], variables: Mapping[str, Any], outputs: Sequence[Any] | None = None
) -> Any:
    """Makes the optimizer's state; None without training, or if it needs outputs that are not given."""
    updates = runner.placement.updates
    if updates is None or (updates.init_needs_outputs and outputs is None):
        return None
    placed = runner.placement.place_variables(variables)
    return runner.init_optimizer_state(placed, [dict(enumerate(outputs or ()))] * len(runner.homes))
