"""PopTorch's names for mixed precision. Here `torch.autocast` chooses dtypes, by torch's own lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["Policy", "autocast"]


@dataclass(frozen=True)
class Policy:
    """The dtypes that operations compute in. It is accepted, but has no effect.

    Attributes:
      fp16: operations that compute in float16.
      fp32: operations that compute in float32.
      promote: operations that compute in the widest dtype of their inputs.
      demote: operations that compute in the narrowest one.
    """

    fp16: Iterable[Any] = ()
    fp32: Iterable[Any] = ()
    promote: Iterable[Any] = ()
    demote: Iterable[Any] = ()


class autocast(contextlib.ContextDecorator):
    """A context manager and decorator without effect, which warns once: dtypes do not change."""

    def __init__(self, enabled: bool = True) -> None:
        """Warns, if it is enabled."""
        if enabled:
            warn_once(
                "poptorch.autocasting.autocast has no effect: what is within keeps its types. "
                'torch.autocast("cpu", torch.float16) casts.'
            )

    def __enter__(self) -> autocast:
        """Does nothing."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""
