"""`Options._Popart`: what scripts say to PopTorch's compiler, which is not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ipu_pipeline.poptorch import logs

__all__ = ["PopartOptions"]


class PopartOptions:
    """Takes any option of PopART. Each warns once: XLA compiles in its place."""

    def __init__(self) -> None:
        """Not frozen."""
        self._frozen = False

    def freeze(self) -> None:
        """Lets nothing be said any more."""
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
        return PopartOptions()  # of a copy of the options, which is not frozen

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]  # as other groups of options
