"""Operations: what recorded actions return, and what `Session.run` runs."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.tracing.specs import VariableSpec

__all__ = ["HostVariable", "InitializerOperation", "Operation", "global_variables_initializer"]


class Operation:
    """What `pipeline`, `minimize` and `enqueue` return: something that runs, without a value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name


@dataclass(frozen=True, eq=False)
class HostVariable:
    """What `Session.run` runs to read a variable that stays in host memory.

    Attributes:
      spec: the variable.
    """

    spec: VariableSpec


class InitializerOperation:
    """What `Session.run` runs to set all variables to their initial values."""


def global_variables_initializer() -> InitializerOperation:
    """The operation that sets every variable to its initial value, and forgets optimizer state.

    It is never required: a program's variables are created when it first runs.
    """
    return InitializerOperation()
