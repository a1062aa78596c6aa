"""Execution strategies: the stage, the IPU and the phase of each block of a model."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch.enums import AutoStage, Liveness
from ipu_pipeline.poptorch.graphs.partitions import Placement
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import configurable

# Stages and phases: which blocks of a model run together.


class EqualByValue:
    """A mutable object that equals another of its class with the same attributes."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it can be changed


class Stage(EqualByValue):
    """Blocks that run one after another on one IPU.

    Example:
      poptorch.Stage("encoder", "pooler").ipu(1)
    """

    def __init__(self, *block_ids: str) -> None:
        """Takes the blocks by their `user_id`.

        Raises:
          AssertionError: there is none, or one is not a string.
        """
        if not block_ids:
            raise AssertionError("poptorch.Stage needs at least one block.")
        for block_id in block_ids:
            checks.string("A block of poptorch.Stage", block_id)
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> list[str]:
        """The blocks' names."""
        return list(self._blocks)

    @property
    def ipu_id(self) -> int | None:
        """The IPU of the stage, None if `ipu` was not called."""
        return self._ipu

    @configurable
    def ipu(self, ipu: int) -> Self:
        """Sets the IPU that the stage is on.

        Raises:
          AssertionError: it is not an integer.
          ValueError: it is negative.
        """
        self._ipu = checks.integer(0)(f"{self!r}: ipu", ipu)
        return self

    def __repr__(self) -> str:
        ipu = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){ipu}"


class Phase(EqualByValue):
    """Stages that run at the same time, for phased executions."""

    def __init__(self, *stages: Stage | str) -> None:
        """Takes stages, or names of blocks that make one stage.

        Raises:
          AssertionError: there are none, one is something else, or both kinds are given.
        """
        if not stages:
            raise AssertionError("poptorch.Phase needs at least one stage, or the names of blocks.")
        if all(isinstance(stage, str) for stage in stages):
            stages = (Stage(*stages),)  # type: ignore[arg-type]  # they are strings
        check = checks.instance(Stage, "all stages, or all names")
        self._stages = tuple(check("The arguments of poptorch.Phase", stage) for stage in stages)

    @property
    def stages(self) -> list[Stage]:
        """The stages."""
        return list(self._stages)

    def stage(self, index: int) -> Stage:
        """Returns a stage by its position.

        Raises:
          AssertionError: it is not an integer.
          IndexError: there are fewer stages.
        """
        return pick("Phase.stage", self._stages, index)

    @configurable
    def ipus(self, *ipus: int) -> Self:
        """Sets the IPU that each stage is on.

        Raises:
          AssertionError: their number is not the number of stages, or one is not an integer.
          ValueError: one is negative.
        """
        if len(ipus) != len(self._stages):
            raise AssertionError(
                f"Phase contains {len(self._stages)} stages but you provided {len(ipus)} ipus"
            )
        for stage, ipu in zip(self._stages, ipus, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self._stages))})"


def pick(caller: str, values: tuple[Any, ...], index: int) -> Any:
    """Returns a value by its position, from the end if negative. `caller` is for errors."""
    number = checks.integer()(f"{caller}: the index", index)
    if not -len(values) <= number < len(values):
        raise IndexError(
            f"{caller}: the index must be at least {-len(values)} and below {len(values)}; got {number}."
        )
    return values[number]


def associate(stages: list[Stage]) -> dict[str, int]:
    """Returns the position of each block's stage."""
    positions: dict[str, int] = {}
    for position, stage in enumerate(stages):
        for block in stage.blocks:
            if positions.setdefault(block, position) != position:
                raise AssertionError(f"{block} associated with more than one stage")
    return positions


# Strategies without phases: the stage and the IPU of each block of a model.


class Strategy(EqualByValue, abc.ABC):
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
        ipu_of: dict[str, int] = {}
        placements = []
        place = self._make_placer()
        for name, ipu_id in blocks:
            ipu = ipu_of.get(name) if ipu_id is None and name is not None else ipu_id
            if name is not None and ipu is not None:
                ipu_of[name] = ipu
            placements.append(place(name, ipu))
        return placements

    def find_unused(self, blocks: Iterable[tuple[str | None, int | None]]) -> list[str]:
        """Finds the names of blocks in its stages that a model does not open.

        Args:
          blocks: as for `place`.
        """
        opened = {name for name, _ipu in blocks}
        return [name for stage in self._stages for name in stage.blocks if name not in opened]

    @abc.abstractmethod
    def _make_placer(self) -> Callable[[str | None, int | None], Placement]:
        """Returns a function that places a model's blocks, called in their order, by name and IPU."""

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

    def _make_placer(self) -> Callable[[str | None, int | None], Placement]:
        if self.auto_stage is None:
            return self._place_in_stage
        return _place_by_ipu if self.auto_stage is AutoStage.SameAsIpu else _Counter().place

    def _place_in_stage(self, name: str | None, ipu: int | None) -> Placement:
        index = self._find(name)
        stage_ipu = self._stages[index].ipu_id
        return Placement(index, stage_ipu if stage_ipu is not None else index if ipu is None else ipu)

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


def _as_stage(caller: str, value: Any) -> Stage:
    if isinstance(value, Stage):
        return value
    if isinstance(value, str):
        return Stage(value)
    if isinstance(value, (list, tuple)):
        return Stage(*value)
    raise checks.fail(f"An argument of {caller}", "a Stage, the name of a block, or a list of names", value)


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


# Strategies with phases: a model runs phase by phase, and each phase's tensors move to the devices.


class PhasedExecution(Strategy):
    """The base class of the two strategies with phases.

    The weight update goes phase by phase, too. Stages of a phase run at the same time, unless one reads
    another's values. A phase may read a buffer's value from before an earlier phase wrote it, but not a
    value that a later or simultaneous phase overwrites. Buffers that the model writes, and outputs, stay on
    the devices.

    A stage is on the IPU that it sets, or that its blocks set. Otherwise `SerialPhasedExecution` takes the
    stage's position in its phase, and `ParallelPhasedExecution` twice that, plus 1 in odd phases.

    Attributes:
      separate_backward_phase: whether the last phase's backward is a separate phase.
    """

    separate_backward_phase: bool

    def __init__(self, *phases: Phase | Sequence[Stage] | Sequence[str] | Stage | str) -> None:
        """Takes the phases.

        Args:
          phases: each is a `Phase` or what makes one: a list of stages, which run at the same time; or a
            stage, a block's name or a list of names, which make one stage.

        Raises:
          AssertionError: there are none, one is something else, or a block is in two stages.
        """
        name = type(self).__name__
        if not phases or any(isinstance(phase, AutoStage) for phase in phases):
            raise AssertionError(f"There is no AutoStage for {name}: explicitly specify the phases.")
        self._phases = tuple(_as_phase(name, phase) for phase in phases)
        self.separate_backward_phase = False
        super().__init__([stage for phase in self._phases for stage in phase.stages])

    @property
    def phases(self) -> list[Phase]:
        """The phases, in the order of the forward."""
        return list(self._phases)

    def phase(self, index: int) -> Phase:
        """Returns a phase by its position.

        Raises:
          AssertionError: it is not an integer.
          ValueError: it is negative.
          IndexError: there are fewer phases.
        """
        phase: Phase = pick(f"{type(self).__name__}.phase", self._phases, index)
        return phase

    def _make_placer(self) -> Callable[[str | None, int | None], Placement]:
        places = [
            (number, position)
            for number, phase in enumerate(self._phases)
            for position in range(len(phase.stages))
        ]

        def place(name: str | None, ipu: int | None) -> Placement:
            number = self._find(name)
            phase, position = places[number]
            stage_ipu = self._stages[number].ipu_id
            if stage_ipu is None:
                stage_ipu = self._default_ipu(phase, position) if ipu is None else ipu
            return Placement(number, stage_ipu, phase)

        return place

    @property
    @abc.abstractmethod
    def liveness(self) -> Liveness:
        """When tensors of a phase are off the device."""

    @abc.abstractmethod
    def _default_ipu(self, phase: int, position: int) -> int:
        """Returns the IPU of a phase's stage if neither the stage nor its blocks set it."""

    @configurable
    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Sets whether the last phase's backward is a separate phase.

        Otherwise it belongs to the phase of the forward, whose values then stay on the devices.

        Raises:
          AssertionError: it is not a boolean.
        """
        self.separate_backward_phase = checks.boolean("useSeparateBackwardPhase: use", use)
        return self

    def __repr__(self) -> str:
        parts = [*map(repr, self._phases)]
        hidden = ("_phases", "_stages", "_positions")
        parts += [f"{name}={value!r}" for name, value in vars(self).items() if name not in hidden]
        return f"{type(self).__name__}({', '.join(parts)})"


class SerialPhasedExecution(PhasedExecution):
    """Phases run one after another, all on the same IPUs.

    Attributes:
      tensors_liveness: the time at which tensors of a phase are off the device.
    """

    tensors_liveness: Liveness

    def __init__(self, *phases: Phase | Sequence[Stage] | Sequence[str] | Stage | str) -> None:
        """Takes the phases, as `PhasedExecution` does."""
        super().__init__(*phases)
        self.tensors_liveness = Liveness.AlwaysLive

    @property
    def liveness(self) -> Liveness:
        """When tensors of a phase are off the device."""
        return self.tensors_liveness

    def _default_ipu(self, phase: int, position: int) -> int:
        del phase  # all have the same IPUs
        return position

    @configurable
    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Sets when tensors of a phase are off the device.

        Raises:
          AssertionError: it is not a `Liveness`.
        """
        self.tensors_liveness = checks.member(Liveness)("setTensorsLiveness: liveness", liveness)
        return self


class ParallelPhasedExecution(PhasedExecution):
    """While a phase runs on some IPUs, the next one is brought to the others.

    Attributes:
      tensors_off_chip_after_fwd: whether tensors leave the device after a phase's forward.
    """

    tensors_off_chip_after_fwd: bool

    def __init__(self, *phases: Phase | Sequence[Stage] | Sequence[str] | Stage | str) -> None:
        """Takes the phases, as `PhasedExecution` does."""
        super().__init__(*phases)
        self.tensors_off_chip_after_fwd = False

    @property
    def liveness(self) -> Liveness:
        """When tensors of a phase are off the device."""
        return Liveness.OffChipAfterFwd if self.tensors_off_chip_after_fwd else Liveness.AlwaysLive

    def _default_ipu(self, phase: int, position: int) -> int:
        return 2 * position + phase % 2  # even phases on even IPUs, odd ones on odd IPUs

    @configurable
    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Sets whether tensors leave the device after a phase's forward.

        Raises:
          AssertionError: it is not a boolean.
        """
        self.tensors_off_chip_after_fwd = checks.boolean("sendTensorsOffChipAfterFwd: off_chip", off_chip)
        return self


def _as_phase(caller: str, value: Any) -> Phase:
    if isinstance(value, Phase):
        return value
    if isinstance(value, (Stage, str)):
        return Phase(value)
    if isinstance(value, (list, tuple)):
        if any(isinstance(part, (Phase, list, tuple)) for part in value):
            raise AssertionError(
                f"{caller} takes its phases as arguments, as {caller}(*phases), and each is a list of "
                f"stages or names; got a list of lists or phases, {list(value)}."
            )
        return Phase(*value)
    raise checks.fail(
        f"An argument of {caller}",
        "a Phase, a Stage, the name of a block, or a list of stages or names",
        value,
    )
