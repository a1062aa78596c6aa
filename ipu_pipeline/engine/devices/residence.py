"""Where the state of a pipeline or loop lives, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.devices.offloading import Offload
from ipu_pipeline.engine.devices.rows import Row, put, put_host_copies
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.updates.accumulators import Accumulator, AccumulatorPlan, variable_of
from ipu_pipeline.engine.updates.cutting import UpdateProgram, Updates
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = ["NO_LOSS_SCALE", "Residence"]


NO_LOSS_SCALE = np.float32(1)
_MAX_CONSTANTS = 4096  # per row; loops count their iterations without end


class Residence:
    """Puts variables, optimizer state and accumulators on the rows of their stages."""

    def __init__(
        self,
        traced: TracedPipeline,
        updates: Updates | None,
        rows: Sequence[Row],
        accumulator_plan: AccumulatorPlan,
        offload: Collection[Offload] = (),
    ) -> None:
        """Jits the programs that make optimizer state; XLA compiles each at its first call.

        Args:
          traced: the pipeline.
          updates: its optimizer; None without training.
          rows: where its stages live.
          accumulator_plan: its accumulators.
          offload: what lies in host memory.
        """
        self.offloads_state = Offload.WEIGHT_UPDATE_VARIABLES in offload
        self.offloads_accumulators = Offload.GRADIENT_ACCUMULATION_BUFFERS in offload
        self.offloads_activations = Offload.ACTIVATIONS in offload
        self.offloaded: frozenset[str] = frozenset()  # full names of variables
        if Offload.WEIGHTS in offload:
            self.offloaded = frozenset(n for n, spec in traced.variables.items() if spec.trainable)
        self.accumulator_plan = accumulator_plan
        self.traced = traced
        self.updates = updates
        self.rows = tuple(rows)
        self._constants: dict[tuple[int, int], Any] = {}  # (IPU, integer) -> int32 scalar there
        self._keys: dict[int, tuple[Any, Any]] = {}  # IPU -> the last random key, and the same there
        self._init_functions: list[Callable[..., list[Any]]] = []
        if updates is not None:
            self._init_functions = [jax.jit(program.function) for program in updates.inits]

    def place_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the variables that the pipeline has, each on its home's row.

        They share no memory with NumPy arrays that are given.
        """
        placed: dict[str, Any] = {}
        for index, row in enumerate(self.rows):
            for is_offloaded in (False, True):
                names = [
                    name
                    for name, home in self.traced.owners.items()
                    if home == index and name in variables and (name in self.offloaded) is is_offloaded
                ]
                arrays = [variables[name] for name in names]
                placed.update(zip(names, put_host_copies(arrays, row, is_offloaded), strict=True))
        return placed

    def place_accumulators(self, accumulators: Mapping[str, Any]) -> dict[str, Any]:
        """Accumulators by key, each on its row."""
        placed = {}
        for key, value in accumulators.items():
            row = self.rows[self._accumulator(key).stage]
            (placed[key],) = put_host_copies([value], row, self.offloads_accumulators)
        return placed

    def make_accumulators(
        self, dtypes: Mapping[str, Any], known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Accumulators of the variables' gradients, placed, by key; zeros where nothing is known.

        Args:
          dtypes: of each variable's accumulators, by the variable's full name.
          known: accumulators by key, also of stages that share a variable only elsewhere, where the same
            operations are cut otherwise: these are added to the variable's own.
        """
        variables = self.traced.variables
        keys = {key: self._accumulator(key).variable for key in (*dtypes, *self.accumulator_plan.extra)}
        found: dict[str, Any] = {}
        for key, value in (known or {}).items():
            own = key if key in keys else variable_of(key)
            found[own] = np.asarray(found[own]) + np.asarray(value) if own in found else value
        for key, name in keys.items():
            if key not in found:
                found[key] = np.zeros(variables[name].shape, dtypes[name])
        return self.place_accumulators(found)

    def _accumulator(self, key: str) -> Accumulator:
        return self.accumulator_plan.extra.get(key) or Accumulator(key, self.traced.owners[key])

    def place_optimizer_state(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the optimizer's state, each on its stage's row."""
        updates = self.updates
        assert updates is not None
        return [
            put_host_copies([leaf], self.rows[known.stage], self.offloads_state)[0]
            for known, leaf in zip(updates.state_leaves, leaves, strict=True)
        ]

    def loss_scale(self, state_leaves: Sequence[Any] | None) -> Any:
        """The scale that the backward starts from; 1 without loss scaling.

        Args:
          state_leaves: of the optimizer's state; None if it has not been made yet.
        """
        known = None if self.updates is None else self.updates.loss_scale
        if known is None:
            return NO_LOSS_SCALE
        return np.float32(known.initial) if state_leaves is None else state_leaves[known.leaf]

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
        nothing = [None] * len(updates.state_leaves)
        environment = UpdateEnvironment(variables, {}, nothing, outputs or (), UpdateCounts(0, 0))
        self.run_update(updates.inits, self._init_functions, environment)
        return self.place_optimizer_state(environment.state_leaves)

    def run_update(
        self,
        programs: Sequence[UpdateProgram],
        functions: Sequence[Callable[..., list[Any]]],
        environment: UpdateEnvironment,
    ) -> None:
        """Runs the programs of an update, each on the row of its stage.

        Args:
          programs: in order.
          functions: the same, jitted.
          environment: what they read; what they make is entered there.
        """
        copies: dict[tuple[UpdateValue, int], Any] = {}  # on another IPU than the value's own
        for program, function in zip(programs, functions, strict=True):
            row = self.rows[program.stage]
            found = [
                self.constant(environment[value], row)
                if value.kind in (UpdateKind.COUNT, UpdateKind.UPDATE_COUNT)
                else copies.get((value, row.ipu), environment[value])
                for value in program.arguments
            ]
            arguments = put(found, row)
            for value, before, after in zip(program.arguments, found, arguments, strict=True):
                if after is not before:
                    copies[value, row.ipu] = after
            for value, result in zip(program.results, function(*arguments), strict=True):
                if self.offloads_anything and self.is_offloaded(value):
                    (result,) = put([result], row, offloaded=True)
                environment[value] = result

    @property
    def offloads_in_micro_batches(self) -> bool:
        """Whether anything in host memory is needed for micro-batches."""
        return bool(self.offloaded) or self.offloads_accumulators or self.offloads_activations

    @property
    def offloads_anything(self) -> bool:
        """Whether anything lies in host memory."""
        return self.offloads_state or self.offloads_in_micro_batches

    def is_offloaded(self, value: UpdateValue) -> bool:
        """Whether what an update makes goes to host memory."""
        if value.kind == UpdateKind.PARAMETER:
            return value.key in self.offloaded
        if value.kind == UpdateKind.GRADIENT:
            return self.offloads_accumulators
        return value.kind == UpdateKind.STATE and self.offloads_state

    def place_key(self, key: Any, row: Row) -> Any:
        """A random key on a row. The last one is remembered: steps have the same, and placing is slow."""
        known = self._keys.get(row.ipu)
        if known is None or known[0] is not key:
            (placed,) = put([key], row)
            known = self._keys[row.ipu] = (key, placed)
        return known[1]

    def constant(self, number: int, row: Row) -> Any:
        """An int32 scalar on a row; small ones are made once."""
        known = self._constants.get((row.ipu, number))
        if known is None:
            (known,) = put([np.int32(number)], row)
            if number < _MAX_CONSTANTS:
                self._constants[row.ipu, number] = known
        return known
