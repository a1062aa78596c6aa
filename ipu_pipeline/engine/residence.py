"""Where the state of a pipeline or loop lives, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import placement
from ipu_pipeline.engine.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.engine.placement import Row
from ipu_pipeline.engine.stages import TracedPipeline
from ipu_pipeline.engine.updates import UpdateProgram, Updates

__all__ = ["Residence"]


_MAX_CONSTANTS = 4096  # per row; loops count their iterations without end


class Residence:
    """Puts variables, optimizer state and accumulators on the rows of their stages."""

    def __init__(self, traced: TracedPipeline, updates: Updates | None, rows: Sequence[Row]) -> None:
        """Jits the programs that make optimizer state; XLA compiles each at its first call.

        Args:
          traced: the pipeline.
          updates: its optimizer; None without training.
          rows: where its stages live.
        """
        self.traced = traced
        self.updates = updates
        self.rows = tuple(rows)
        self._constants: dict[tuple[int, int], Any] = {}  # (IPU, integer) -> int32 scalar there
        self._init_functions: list[Callable[..., list[Any]]] = []
        if updates is not None:
            self._init_functions = [jax.jit(program.function) for program in updates.inits]

    def place_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the variables that the pipeline has, each on its stage's row.

        They share no memory with NumPy arrays that are given.
        """
        placed: dict[str, Any] = {}
        for index, stage in enumerate(self.traced.stages):
            names = [spec.name for spec in stage.variables if spec.name in variables]
            arrays = placement.put_host_copies([variables[name] for name in names], self.rows[index])
            placed.update(zip(names, arrays, strict=True))
        return placed

    def place_accumulators(self, accumulators: Mapping[str, Any]) -> dict[str, Any]:
        """Accumulators by full name, each on its variable's row."""
        return {
            name: placement.put_host_copies([value], self.rows[self.traced.owners[name]])[0]
            for name, value in accumulators.items()
        }

    def make_accumulators(self, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """Zeros for the gradients of the variables, placed.

        Args:
          dtypes: of each accumulator, by the variable's full name.
        """
        variables = self.traced.variables
        return self.place_accumulators(
            {name: np.zeros(variables[name].shape, dtype) for name, dtype in dtypes.items()}
        )

    def place_optimizer_state(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the optimizer's state, each on its stage's row."""
        updates = self.updates
        assert updates is not None
        homes = [updates.stages[0] if leaf.stage is None else leaf.stage for leaf in updates.state_leaves]
        return [
            placement.put_host_copies([leaf], self.rows[home])[0]
            for home, leaf in zip(homes, leaves, strict=True)
        ]

    def init_optimizer_state(
        self, variables: Mapping[str, Any], outputs: Sequence[Any] | None
    ) -> list[Any]:
        """The leaves of the optimizer's state at the start.

        Args:
          variables: placed variables by full name.
          outputs: the leaves of the last stage's outputs for the first micro-batch; None if they are not
            needed.

        Returns:
          The leaves, placed.
        """
        updates = self.updates
        assert updates is not None
        leaves: list[Any] = [None] * len(updates.state_leaves)
        for program, function, stage in zip(
            updates.inits, self._init_functions, updates.stages, strict=True
        ):
            arguments = self.update_arguments(program, stage, variables, {}, (), outputs or (), 0)
            for value, result in zip(program.results, function(*arguments), strict=True):
                leaves[value.key] = result
        return self.place_optimizer_state(leaves)

    def update_arguments(
        self,
        program: UpdateProgram,
        stage: int,
        variables: Mapping[str, Any],
        accumulators: Mapping[str, Any],
        state_leaves: Sequence[Any],
        outputs: Sequence[Any],
        count: int,
    ) -> list[Any]:
        """The arguments of an update program, on the row of its stage.

        Args:
          program: the program.
          stage: its stage.
          variables: by full name.
          accumulators: by full name.
          state_leaves: of the optimizer's state.
          outputs: the leaves of the last stage's outputs, for one micro-batch.
          count: micro-batches per weight update.
        """
        row = self.rows[stage]

        def find(value: UpdateValue) -> Any:
            if value.kind == UpdateKind.PARAMETER:
                return variables[value.key]
            if value.kind == UpdateKind.GRADIENT:
                return accumulators[value.key]
            if value.kind == UpdateKind.STATE:
                return state_leaves[value.key]
            if value.kind == UpdateKind.OUTPUT:
                return outputs[value.key]
            return self.constant(count, row)

        return placement.put([find(value) for value in program.arguments], row)

    def constant(self, number: int, row: Row) -> Any:
        """An int32 scalar on a row; small ones are made once."""
        known = self._constants.get((row.ipu, number))
        if known is None:
            (known,) = placement.put([np.int32(number)], row)
            if number < _MAX_CONSTANTS:
                self._constants[row.ipu, number] = known
        return known
