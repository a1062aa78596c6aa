"""What `Session.run` runs beside a program's operations: it sets variables, and reads those on the host."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine import VariableSpec

__all__ = ["HostVariable", "InitializerOperation", "global_variables_initializer"]


@dataclass(frozen=True, eq=False)
class HostVariable:
    """What `Session.run` runs to read a variable that stays in host memory."""

    spec: VariableSpec  # the variable


class InitializerOperation:
    """What `Session.run` runs to set all variables to their initial values."""


def global_variables_initializer() -> InitializerOperation:
    """The operation that sets every variable to its initial value, and forgets optimizer state.

    It is never required: a program's variables are created when it first runs.
    """
    return InitializerOperation()
