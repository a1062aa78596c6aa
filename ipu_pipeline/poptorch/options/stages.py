"""Stages and phases: which blocks of a model run together."""

from __future__ import annotations

from typing import Any, Self

from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import configurable

__all__ = ["EqualByValue", "Phase", "Stage", "associate", "pick"]


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
        for stage in stages:
            if not isinstance(stage, Stage):
                raise checks.fail("The arguments of poptorch.Phase", "all stages, or all names", stage)
        self._stages: tuple[Stage, ...] = stages  # type: ignore[assignment]  # they are stages

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


def pick(what: str, values: tuple[Any, ...], index: int) -> Any:
    """Returns a value by its position, from the end if negative. `what` names the caller in errors."""
    number = checks.integer()(f"{what}: the index", index)
    if not -len(values) <= number < len(values):
        raise IndexError(
            f"{what}: the index must be at least {-len(values)} and below {len(values)}; got {number}."
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
