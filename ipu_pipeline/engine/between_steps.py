"""What a pipeline has between two steps: accumulators, and the state that is in place."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.state import PipelineState, RunState
from ipu_pipeline.engine.updates.loss_weights import is_loss_weight, without_weights

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """The accumulators that the last update left, zeros, and the last state that is known to be placed."""

    def __init__(self) -> None:
        self.accumulators: dict[str, Any] | None = None
        # The state, and its variables that count weights, which users do not see. One value, as another
        # thread may step the pipeline between two reads.
        self._placed: tuple[Callable[[], PipelineState | None], Mapping[str, Any]] = (lambda: None), {}

    def take_accumulators(self, runner: Runner[Any], dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the accumulators. If there are none, the runner makes them."""
        accumulators, self.accumulators = self.accumulators, None
        return runner.make_accumulators(dtypes) if accumulators is None else accumulators

    def keep(self, state: RunState) -> None:
        """Keeps the accumulators after an update, and notes that the new state is placed."""
        self.accumulators = state.accumulators
        self._placed = weakref.ref(state.pipeline), {}

    def hide_weights(self, state: PipelineState) -> PipelineState:
        """The placed state without the variables that count weights, which are kept here."""
        hidden = {name: value for name, value in state.variables.items() if is_loss_weight(name)}
        if not hidden:
            return state
        given = dataclasses.replace(state, variables=without_weights(state.variables))
        self._placed = weakref.ref(given), hidden
        return given

    def is_placed(self, state: Any) -> bool:
        """Whether a state is the last one that is known to be placed."""
        return state is self._placed[0]()

    def find_placed(self, state: PipelineState) -> PipelineState | None:
        """The last state with the variables that count weights; None if the given one is another."""
        placed, hidden = self._placed
        if state is not placed():
            return None
        return dataclasses.replace(state, variables={**state.variables, **hidden}) if hidden else state
