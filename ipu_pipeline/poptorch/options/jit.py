"""Options of how a model is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ipu_pipeline.poptorch.options import checks
from ipu_pipeline.poptorch.options.base import OptionGroup, Setting, configurable

__all__ = ["JitOptions"]


def _check_trace(name: str, value: Any) -> bool:
    if checks.boolean(name, value):
        raise ValueError(
            f"{name} must be False; got True. Models are captured by torch.export, not by torch.jit.trace."
        )
    return False


class JitOptions(OptionGroup):
    """`Options.Jit`.

    Attributes:
      trace_model: always False.
    """

    trace_model: bool

    path = "poptorch.Options().Jit"
    settings: ClassVar[Mapping[str, Setting]] = {"trace_model": Setting(_check_trace, False)}

    @configurable
    def traceModel(self, trace_model: bool) -> Self:
        """Whether torch.jit.trace captures the model; only False, as in PopTorch's last versions.

        Raises:
          AssertionError: it is no boolean.
          ValueError: it is True.
        """
        return self.set(trace_model=trace_model)
