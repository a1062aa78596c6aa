"""Strategies with phases: a model runs phase by phase, and each phase's tensors move to the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from ipu_pipeline.poptorch.enums import AutoStage, Liveness
from ipu_pipeline.poptorch.graphs.blocks import Placement
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import configurable
from ipu_pipeline.poptorch.options.stages import Phase, Stage, pick
from ipu_pipeline.poptorch.options.strategies import Strategy

__all__ = ["ParallelPhasedExecution", "PhasedExecution", "SerialPhasedExecution"]


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
        found: Phase = pick(f"{type(self).__name__}.phase", self._phases, index)
        return found

    def _placing(self) -> Callable[[str | None, int | None], Placement]:
        places = [
            (phase, position)
            for phase, found in enumerate(self._phases)
            for position in range(len(found.stages))
        ]

        def place(name: str | None, ipu: int | None) -> Placement:
            number = self._find(name)
            phase, position = places[number]
            own = self._stages[number].ipu_id
            if own is None:
                own = self._default_ipu(phase, position) if ipu is None else ipu
            return Placement(number, own, phase)

        return place

    @property
    def liveness(self) -> Liveness:
        """When tensors of a phase are off the device."""
        raise NotImplementedError

    def _default_ipu(self, phase: int, position: int) -> int:
        """Returns the IPU of a phase's stage if neither the stage nor its blocks set it."""
        raise NotImplementedError

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
        shown = [*map(repr, self._phases)]
        hidden = ("_phases", "_stages", "_positions")
        shown += [f"{name}={value!r}" for name, value in vars(self).items() if name not in hidden]
        return f"{type(self).__name__}({', '.join(shown)})"


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


def _as_phase(what: str, value: Any) -> Phase:
    if isinstance(value, Phase):
        return value
    if isinstance(value, (Stage, str)):
        return Phase(value)
    if isinstance(value, (list, tuple)):
        if any(isinstance(one, (Phase, list, tuple)) for one in value):
            raise AssertionError(
                f"{what} takes its phases as arguments, as {what}(*phases), and each is a list of stages "
                f"or names; got a list of lists or phases, {list(value)}."
            )
        return Phase(*value)
    raise checks.fail(
        f"An argument of {what}",
        "a Phase, a Stage, the name of a block, or a list of stages or names",
        value,
    )
