"""Evaluates code within a trace: all stages are on one device, and become one program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.devices.state_placement import StatePlacement, load, store
from ipu_pipeline.engine.devices.xla_settings import NO_OPTIONS
from ipu_pipeline.engine.plan import passes
from ipu_pipeline.engine.plan.lowering import (
    Layout,
    Programs,
    accumulator,
    lower_micro_batch,
    lower_update,
    update_results,
)
from ipu_pipeline.engine.plan.plan import Instruction, Op, Value
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind, StagePrograms, chunk_programs
from ipu_pipeline.engine.tracing.stages import Source

Environment: TypeAlias = dict[Binding, Any]


class TracedCode:
    """The code of a pipeline or loop on one device, to be evaluated within a trace.

    Attributes:
      placement: knows what lies in host memory, and which accumulators there are.
    """

    def __init__(self, placement: StatePlacement, programs: Sequence[StagePrograms]) -> None:
        """Takes where everything is, and the programs of the stages, for one micro-batch."""
        self.placement, self._stage_programs = placement, programs
        self._layout, self._programs = Layout(placement, [placement]), Programs(NO_OPTIONS, False)
        self._home = passes.at_home(self._layout)

    def run(self, environment: Environment, size: int = 1) -> Environment:
        """Runs forward and backward of one or several micro-batches, program by program."""
        placement, home = self.placement, self._home
        chunked = chunk_programs(placement.traced, self._stage_programs, size)
        find_program = functools.partial(self._programs.of_stage, size, placement=placement)
        code = lower_micro_batch(self._layout, 0, chunked, find_program)
        if placement.offloads_activations:
            code = passes.leave_activations(code)

        def find_value(value: Value) -> Any:
            kind, key = value.what
            if kind is BindingKind.KEY_NUMBER:
                return np.uint32(key)
            is_assigned = kind is BindingKind.ASSIGNED
            return environment[Binding(BindingKind.VARIABLE, key) if is_assigned else value.what]

        pairs = enumerate(code.values(), 1)
        blocks = (passes.load_and_store(block, home, number) for number, block in pairs)
        values = _evaluate(itertools.chain.from_iterable(blocks), find_value)
        return environment | {
            value.what: result
            for value, result in values.items()
            if not value.copy and value == home(value._replace(is_away=False))
        }

    def find(self, environment: Environment, source: Source, size: int = 1) -> Any:
        """A value between stages after `run`; stacked for several micro-batches, inputs too."""
        if source.kind != "input":
            return environment[Binding(BindingKind.VALUE, source)]
        value = environment[Binding(BindingKind.INPUT, source.index)]
        return value if size == 1 else jnp.broadcast_to(value, (size, *jnp.shape(value)))

    def update(
        self, keys: Iterable[str], places: Collection[int], find_value: Callable[[Any], Any]
    ) -> dict[Any, Any]:
        """Runs a weight update.

        Returns:
          What is new, by `UpdateValue`, and zeros, by the accumulator's key.
        """
        layout, placement, home = self._layout, self.placement, self._home
        assert placement.updates is not None
        find_program = functools.partial(
            self._programs.of_update, placement=placement, donate=False, may_raise=True
        )
        gradients = {key: accumulator(layout, key, 0) for key in keys}
        outputs = {place: Value(place, placement.groups[0]) for place in places}
        code = lower_update(
            layout, placement.updates.updates, find_program, self._programs, gradients, outputs
        )
        values = _evaluate(
            passes.load_and_store(code, home, 1, ({}, 1, lambda _value: True)),
            lambda value: find_value(value.what),
        )
        return {target: values[home(value)] for target, value in update_results(code).items()}


def _evaluate(code: Iterable[Instruction], find_value: Callable[[Value], Any]) -> dict[Value, Any]:
    """Evaluates instructions; `find_value` finds what they read that none of them makes."""
    values: dict[Value, Any] = {}
    for instruction in code:
        results: Sequence[Any] = [
            values[value] if value in values else find_value(value) for value in instruction.reads
        ]
        if instruction.op is Op.RUN:
            assert instruction.program is not None
            results = instruction.program.source(*results)
        elif instruction.op is not Op.SAME:
            move = load if instruction.op is Op.LOAD else store
            results = [move(value, instruction.group) for value in results]
        values.update(zip(instruction.writes, results, strict=True))
    return values
