"""`Options._Popart`: settings of PopTorch's compiler, which is not used here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ipu_pipeline.poptorch import logs

__all__ = ["PopartOptions"]


class PopartOptions:
    """Accepts any option of PopART. Each warns once, because XLA compiles instead."""

    def __init__(self) -> None:
        """Starts unfrozen."""
        self._frozen = False

    def freeze(self) -> None:
        """Forbids further settings."""
        self._frozen = True

    def set(self, key: str, value: Any) -> Self:
        """Has no effect, and warns."""
        return self._tell(f"set({key!r}, {value!r})")

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> Self:
        """Has no effect, and warns."""
        return self._tell(f"setPatterns({dict(patterns)!r}, {level!r})")

    def _tell(self, call: str) -> Self:
        if self._frozen:
            raise AttributeError("Can't modify frozen Options")
        logs.warn_once(
            f"poptorch.Options()._Popart.{call} has no effect: models are compiled by XLA, not by PopART."
        )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PopartOptions:
        return PopartOptions()  # a copy of the options is not frozen

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]  # as other groups of options
