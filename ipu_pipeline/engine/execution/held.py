"""Measures what stages hold of micro-batches in flight, from their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.plan.lowering import Key
from ipu_pipeline.engine.plan.plan import Block, Numbered, Op, Plan, Value
from ipu_pipeline.engine.plan.readers.run import Linked
from ipu_pipeline.engine.plan.registers import Registers
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind
from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["Held", "LiveBytes", "observed"]


class Held:
    """Finds the most that each stage of a replica holds between forwards and backwards.

    Attributes:
      peaks: per stage, in bytes.
    """

    def __init__(self, replica: int, num_stages: int) -> None:
        """Begins before anything has run."""
        self.peaks = [0] * num_stages
        self._replica = replica
        # by stage and frame of a micro-batch in flight, what is held of it
        self._running: list[dict[Any, set[Value]]] = [{} for _stage in range(num_stages)]

    def find_held(self, blocks: dict[Key, Block], key: Key) -> set[Value]:
        """What a stage holds of a micro-batch once one of its programs has run."""
        kind, stage = key

        def read(other: ActionKind) -> set[Value]:
            block = blocks.get((other, stage))
            return set() if block is None else {v for v in _reads(block) if v.replica == self._replica}

        later = read(ActionKind.WEIGHT_GRADIENTS)
        if kind is ActionKind.INPUT_GRADIENTS:
            return later
        if kind is not ActionKind.FORWARD:
            return set()
        next_read = read(ActionKind.BACKWARD) | read(ActionKind.INPUT_GRADIENTS)
        if not next_read:
            return later
        # A cotangent comes from the stage behind, so until it is used it is sent, not held.
        return {value for value in next_read | later if value.what.kind is not BindingKind.COTANGENT}

    def look(
        self, key: Key, frame: Any, held: set[Value], find: Registers, registers: Sequence[Any]
    ) -> None:
        """Measures after a program and what follows it."""
        self._running[key[1]][frame] = held
        for stage, running in enumerate(self._running):
            unique: dict[int, int] = {}
            for own, values in running.items():
                for value in values:
                    places = [find.find(value._replace(is_away=is_away), own) for is_away in (True, False)]
                    there = [registers[p] for p in places if p < len(registers)]
                    array = next((array for array in there if array is not None), None)
                    if array is not None and array.addressable_shards:
                        # With tensor parallelism, one device's part.
                        unique[id(array)] = array.addressable_shards[0].data.nbytes
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))


def _reads(block: Block) -> list[Value]:
    """A micro-batch's values that programs read, where they lie between programs."""
    return [
        value._replace(is_away=False, copy=0)
        for one in block.code
        if one.op in (Op.RUN, Op.JOIN, Op.LOAD)
        for value in one.reads
        if isinstance(value.what, Binding) and value.what.is_of_micro_batch
    ]


def observed(
    plan: Plan,
    linked: Sequence[list[Linked]],
    held: Sequence[Held],
    numbers: Registers,
    registers: Sequence[Any],
) -> list[list[Linked]]:
    """The same blocks, behind each of which it is measured what is held."""
    of_scopes: dict[Any, dict[Key, Block]] = {}
    for block in dict.fromkeys(numbered.block for numbered in plan.blocks):
        if isinstance(block.name, tuple):
            of_scopes.setdefault(block.scope, {})[block.name] = block

    def look(numbered: Numbered) -> list[Linked]:
        block = numbered.block
        blocks = of_scopes[block.scope]
        found = [(one, one.find_held(blocks, block.name)) for one in held]

        def measure() -> tuple[()]:
            for one, values in found:
                one.look(block.name, numbered.frame, values, numbers, registers)
            return ()

        return [(measure, (), (), ())]

    looks = {
        numbered: look(numbered)
        for numbered in dict.fromkeys(plan.blocks)
        if isinstance(numbered.block.name, tuple)
    }
    return [[*own, *looks.get(numbered, ())] for numbered, own in zip(plan.blocks, linked, strict=True)]


class LiveBytes:
    """Measures the peak memory of each stage between forwards and backwards, in bytes.

    Attributes:
      by_replica: the peaks per replica and stage; 0 for a stage without its own backward, or of another
        process.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        """Starts observing.

        Args:
          runner: the result of `Pipeline.prepare`. Its buffers are measured after each program.

        Raises:
          TypeError: it runs all stages as one program, on one device, which has no buffers between them.
        """
        self.by_replica = runner.observe_held()

    @property
    def peaks(self) -> list[int]:
        """The peak per stage, the largest of all replicas."""
        return [max(peaks) for peaks in zip(*self.by_replica, strict=True)]
