"""Options of how a model is captured."""

from __future__ import annotations

from typing import Any

from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup

__all__ = ["JitOptions"]


def _check_trace(name: str, value: Any) -> bool:
    if checks.boolean(name, value):
        raise ValueError(
            f"{name} must be False; got True. Models are captured by torch.export, not by torch.jit.trace."
        )
    return False


class JitOptions(OptionGroup):
    """`Options.Jit`."""

    path = "poptorch.Options().Jit"

    trace_model = Option(_check_trace, False)

    @trace_model.setter
    def traceModel(self, trace_model: bool) -> None:
        """Whether torch.jit.trace captures the model. It must be False, as in PopTorch's last versions.

        Raises:
          AssertionError: it is not a boolean.
          ValueError: it is True.
        """
