"""Libraries that ask, while a model is captured, whether it is compiled or exported are told that it is."""

from __future__ import annotations

import sys
from typing import Any

from ipu_pipeline.poptorch import markers

# What computes the same either way, but otherwise asks for values, or calls kernels of its own.
_INDEPENDENT = ("torch", "functorch", "torch_geometric", "transformers")
_MASKS = "transformers.masking_utils"  # makes masks that Informer cannot use, if it is exported


def is_told_of_compiling() -> bool:
    """Whether the caller's caller is told that it is compiled."""
    return _find_asker().partition(".")[0] in _INDEPENDENT


def is_told_of_exporting() -> bool:
    """Whether the caller's caller is told that it is exported."""
    asker = _find_asker()
    return asker.partition(".")[0] in _INDEPENDENT and asker != _MASKS


def _find_asker() -> str:
    """The module whose function asks; torch's if no model is captured in this thread."""
    frame: Any = sys._getframe(3)  # noqa: SLF001  # torch uses it itself
    while frame.f_code.co_name.startswith("is_") and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if markers.is_captured() else "torch"
