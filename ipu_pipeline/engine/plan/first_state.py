"""Makes the optimizer's state at the start, by a plan of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine.devices.compiler_options import NO_OPTIONS
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.plan import passes
from ipu_pipeline.engine.plan.lowering import Layout, lower_update, update_results
from ipu_pipeline.engine.plan.making import FIRST, read_outputs
from ipu_pipeline.engine.plan.plan import Block, Results
from ipu_pipeline.engine.plan.programs import Programs
from ipu_pipeline.engine.plan.readers.run import Cursor, Linker, run
from ipu_pipeline.engine.plan.registers import Laid, Registers
from ipu_pipeline.engine.programs.bindings import Binding
from ipu_pipeline.engine.updates.cutting import find_read
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind

__all__ = ["FirstState"]


class FirstState:
    """Makes the leaves of the optimizer's state at the start."""

    def __init__(self, layout: Layout) -> None:
        """Jits the programs; XLA compiles each at its first call."""
        self._placement = placement = layout.whole
        assert placement.updates is not None
        inits, programs = placement.updates.inits, Programs(NO_OPTIONS, False)
        code, outputs = read_outputs(layout, programs, FIRST, sorted(find_read(inits)))
        find_program = functools.partial(programs.of_init, placement=placement)
        code += lower_update(layout, inits, find_program, programs, {}, outputs)
        made, home = update_results(code), passes.at_home(layout)
        code = passes.place_update(layout, code)
        code = passes.load_and_store(code, home, 1, ({}, 1, lambda _value: True))
        self._made = sorted(what.key for what in made if what.kind == UpdateKind.STATE)
        values = {what.key: home(value) for what, value in made.items() if what.kind == UpdateKind.STATE}
        results = Results({}, [values[number] for number in self._made], {}, (), (), (), (), ())
        self._plan = Registers().number(Laid([Block("first state", tuple(code))]), 1, results)
        self._linker = Linker(layout)

    def make(self, variables: Mapping[str, Any], outputs: Sequence[Mapping[int, Any]]) -> list[Any]:
        """The leaves, placed; `outputs`: what the last stage returned first, by replica and place."""
        placement, plan = self._placement, self._plan
        updates = placement.updates
        assert updates is not None
        if placement.has_peers:
            placement.begin_step()
        registers: list[Any] = [None] * len(plan.names)
        for register, value in plan.given.items():
            what = value.what
            if isinstance(what, Binding):
                registers[register] = variables[what.key]
            elif type(what) is tuple and what[0] == FIRST:
                (registers[register],) = put([outputs[value.replica][what[1]]], value.group)
            else:  # a count of what has been before
                registers[register] = placement.constants.scalar(0, value.group)
        self._linker.cursor = cursor = Cursor(plan, 0, 0, 1)
        run(cursor.over(self._linker.link(plan), 0, len(plan.blocks)), registers)
        leaves = [  # made without XLA, which would compile zeros of each shape
            _fill(leaf.aval, updates.initial[number]) if number in updates.initial else None
            for number, leaf in enumerate(updates.state_leaves)
        ]
        for number, register in zip(self._made, plan.results.leaves, strict=True):
            leaves[number] = registers[register]
        return placement.place_optimizer_state(leaves)


def _fill(aval: Any, number: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array with the same number everywhere. Zeros take no memory before they are read."""
    zeros = np.zeros(aval.shape, aval.dtype)
    if any(number.tobytes()):  # which -0.0 has
        zeros[...] = number
    return zeros
