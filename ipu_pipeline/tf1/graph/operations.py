"""Operations for `Session.run` that belong to no program: they set variables, or read those on the host."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine import VariableSpec

__all__ = ["HostVariable", "InitializerOperation", "global_variables_initializer"]


@dataclass(frozen=True, eq=False)
class HostVariable:
    """An operation for `Session.run`, which reads a variable that stays in host memory."""

    spec: VariableSpec  # the variable


class InitializerOperation:
    """An operation for `Session.run`, which sets all variables to their initial values."""


def global_variables_initializer() -> InitializerOperation:
    """The operation that sets every variable to its initial value, and forgets optimizer state.

    It is never required: a program's variables are created when it first runs.
    """
    return InitializerOperation()
