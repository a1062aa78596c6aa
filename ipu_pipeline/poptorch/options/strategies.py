"""Strategies without phases: the stage and the IPU of each block of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch.enums import AutoStage
from ipu_pipeline.poptorch.graphs.blocks import Placement
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.stages import EqualByValue, Stage, associate

__all__ = ["PipelinedExecution", "ShardedExecution", "Strategy"]


class Strategy(EqualByValue):
    """The base of execution strategies: stages of blocks, and their IPUs."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Takes all stages.

        Raises:
          AssertionError: a block is in two of them.
        """
        self._stages = tuple(stages)
        self._positions = associate(list(stages))

    @property
    def stages(self) -> list[Stage]:
        """Returns all stages; none where blocks become stages by themselves."""
        return list(self._stages)

    def stage(self, block_id: str) -> Stage:
        """Returns the stage of a block.

        Raises:
          AssertionError: no stage has it.
        """
        return self._stages[self._find(block_id)]

    def place(self, blocks: Iterable[tuple[str | None, int | None]]) -> list[Placement]:
        """Places each block.

        Args:
          blocks: the name and IPU of each block, None where it has none, in the order in which the model
            opens them. A repeated name means the same block.

        Returns:
          A placement for each.

        Raises:
          AssertionError: no stage has a block, or nothing says the IPU of one.
        """
        known: dict[str, int] = {}
        placements = []
        place = self._placing()
        for name, given in blocks:
            ipu = known.get(name) if given is None and name is not None else given
            if name is not None and ipu is not None:
                known[name] = ipu
            placements.append(place(name, ipu))
        return placements

    def find_unused(self, blocks: Iterable[tuple[str | None, int | None]]) -> list[str]:
        """Finds the names of blocks in its stages that a model does not open.

        Args:
          blocks: as for `place`.
        """
        opened = {name for name, _ipu in blocks}
        return [name for stage in self._stages for name in stage.blocks if name not in opened]

    def _placing(self) -> Callable[[str | None, int | None], Placement]:
        """Returns a function that places a model's blocks, called in their order, by name and IPU."""
        raise NotImplementedError

    def clone(self) -> Self:
        """Returns a copy that shares nothing with the original."""
        return copy.deepcopy(self)

    def _find(self, block_id: str | None) -> int:
        if block_id not in self._positions:
            name = "None" if block_id is None else f"'{block_id}'"
            hint = " (a block gets a name by its user_id, or by poptorch.Block.useAutoId())"
            raise AssertionError(
                f"Unknown Block {name} list of expected Blocks: {list(self._positions)}"
                f"{hint if block_id is None else ''}"
            )
        return self._positions[block_id]


class PipelinedExecution(Strategy):
    """Stages work at the same time, each on a different micro-batch.

    Attributes:
      auto_stage: the way in which blocks become stages; None if stages were given.
      schedule: the order of forwards and backwards; None: see `Options.setPipelineSchedule`.

    Example:
      poptorch.PipelinedExecution(poptorch.Stage("B1", "B2").ipu(0), poptorch.Stage("B3").ipu(1))
    """

    auto_stage: AutoStage | None
    schedule: schedules.Schedule | None

    def __init__(
        self,
        *args: AutoStage | Stage | str | Sequence[str],
        schedule: schedules.Schedule | None = None,
    ) -> None:
        """Takes the stages, or the way in which blocks become stages.

        Args:
          args: one `AutoStage`, by default `AutoStage.SameAsIpu`; or the stages, each a `Stage`, the name
            of a block, or a list of names.
          schedule: as for `Options.setPipelineSchedule`. Not in PopTorch.

        Raises:
          AssertionError: an argument has a wrong type, or a block is in two stages.
          ValueError: there is no such schedule.
          TypeError: the schedule is not a function of the four arguments of `grouped`.
        """
        name = f"{type(self).__name__}: schedule"
        self.schedule = None if schedule is None else schedules.check_schedule(schedule, name)
        automatic = [arg for arg in args if isinstance(arg, AutoStage)]
        if automatic and len(args) > 1:
            raise AssertionError(
                f"{type(self).__name__} takes one poptorch.AutoStage, or stages; got {list(args)}."
            )
        self.auto_stage = automatic[0] if automatic else None if args else AutoStage.SameAsIpu
        super().__init__([] if automatic else [_as_stage(type(self).__name__, arg) for arg in args])

    def _placing(self) -> Callable[[str | None, int | None], Placement]:
        if self.auto_stage is None:
            return self._place_in_stage
        return _place_by_ipu if self.auto_stage is AutoStage.SameAsIpu else _Counter().place

    def _place_in_stage(self, name: str | None, ipu: int | None) -> Placement:
        index = self._find(name)
        own = self._stages[index].ipu_id
        return Placement(index, own if own is not None else index if ipu is None else ipu)

    def __repr__(self) -> str:
        args: list[Any] = [*self._stages]
        if self.auto_stage is not None:
            args = [f"AutoStage.{self.auto_stage.name}"]
        if self.schedule is not None:
            args.append(f"schedule={self.schedule!r}")
        return f"{type(self).__name__}({', '.join(map(str, args))})"


class ShardedExecution(PipelinedExecution):
    """A micro-batch goes through all stages before the next one starts: one IPU works at a time.

    Its arguments are those of `PipelinedExecution`, without a schedule.
    """

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        """Takes the stages, or the way in which blocks become stages; see `PipelinedExecution`."""
        super().__init__(*args)


def _as_stage(what: str, value: Any) -> Stage:
    if isinstance(value, Stage):
        return value
    if isinstance(value, str):
        return Stage(value)
    if isinstance(value, (list, tuple)):
        return Stage(*value)
    raise checks.fail(f"An argument of {what}", "a Stage, the name of a block, or a list of names", value)


def _place_by_ipu(name: str | None, ipu: int | None) -> Placement:
    if ipu is None:
        raise AssertionError(
            f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {name}. Give "
            "it an ipu_id, or set poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)."
        )
    return Placement(ipu, ipu)


class _Counter:
    """Gives each new block the next stage. Blocks without a name are always new."""

    def __init__(self) -> None:
        self._stages: dict[object, int] = {}

    def place(self, name: str | None, ipu: int | None) -> Placement:
        stage = self._stages.setdefault(object() if name is None else name, len(self._stages))
        return Placement(stage, stage if ipu is None else ipu)
