"""All stage programs of a micro-batch, or of several, called one after another within one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.offloading import load, store
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.chunks import chunk_programs
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms
from ipu_pipeline.engine.tracing.traced import Source

__all__ = ["Environment", "MicroBatches"]

Environment: TypeAlias = dict[Binding, Any]


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Forwards and backwards, to be called within a trace."""

    placement: StatePlacement  # knows what lies in host memory, and which accumulators there are
    programs: Sequence[StagePrograms]  # the programs of the pipeline's stages

    def run(self, environment: Environment, size: int = 1) -> Environment:
        """Runs forward and backward of one or several micro-batches, program by program."""
        known = dict(environment)
        programs = chunk_programs(self.placement.traced, self.programs, size)
        for index, own in enumerate(programs):
            self._call(index, own.forward, known)
            if own.backward is not None and self.placement.offloads_activations:
                self._store_inputs(index, own.backward, known)
        for index, own in reversed(list(enumerate(programs))):
            if own.backward is not None:
                self._call(index, own.backward, known, is_backward=True)
        return known

    def find(self, environment: Environment, source: Source, size: int = 1) -> Any:
        """A value between stages after `run`; stacked for several micro-batches, inputs too."""
        if source.kind != "input":
            return environment[Binding(BindingKind.VALUE, source)]
        value = environment[Binding(BindingKind.INPUT, source.index)]
        return value if size == 1 else jnp.broadcast_to(value, (size, *jnp.shape(value)))

    @property
    def _group(self) -> DeviceGroup:
        return self.placement.groups[0]

    def _bindings(self) -> Bindings:
        return Bindings(self.placement.traced, self.placement.accumulator_plan.keys)

    def _call(
        self, index: int, program: StageProgram, known: Environment, is_backward: bool = False
    ) -> None:
        bindings = self._bindings()
        arguments = []
        for binding in bindings.arguments(index, program):
            if is_backward and self.placement.offloads_activations and binding.kind is BindingKind.VALUE:
                binding = _stored(index, binding)
            is_number = binding.kind is BindingKind.KEY_NUMBER
            value = np.uint32(binding.key) if is_number else known[binding]
            arguments.append(load(value, self._group) if self._is_offloaded(binding) else value)
        results = program.function(*arguments)
        for bound, result in zip(bindings.results(index, program), results, strict=True):
            for binding in bound:
                known[binding] = store(result, self._group) if self._is_offloaded(binding) else result

    def _store_inputs(self, index: int, backward: StageProgram, known: Environment) -> None:
        """Puts the values that a stage's backward takes again into host memory."""
        for binding in self._bindings().arguments(index, backward):
            if binding.kind is BindingKind.VALUE:
                known[_stored(index, binding)] = store(known[binding], self._group)

    def _is_offloaded(self, binding: Binding) -> bool:
        """Whether a value lies in host memory while no program uses it."""
        placement = self.placement
        if binding.kind is BindingKind.VARIABLE:
            return binding.key in placement.offloaded
        if binding.kind is BindingKind.ACCUMULATOR:
            return placement.offloads_accumulators
        is_activation = binding.kind in (BindingKind.RESIDUAL, BindingKind.STORED)
        return is_activation and placement.offloads_activations


def _stored(index: int, binding: Binding) -> Binding:
    return Binding(BindingKind.STORED, (index, binding.key))
