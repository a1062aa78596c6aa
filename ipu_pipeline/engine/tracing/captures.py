"""Traced values from around a program that its functions capture, and errors about those they may not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import jax

from ipu_pipeline.engine.tracing.faults import find_computing_line
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.shapes import describe

__all__ = ["Captures"]

Result = TypeVar("Result")
Rebind: TypeAlias = "Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]"


class Captures:
    """What the functions of one pipeline captured.

    Attributes:
      values: the captured traced values, each once. The pipeline takes them as inputs, after those that it
        was given.
    """

    def __init__(
        self,
        may_capture: Callable[[Any], bool] | None = None,
        find_name: Callable[[Any], str | None] | None = None,
    ) -> None:
        """Begins without any.

        Args:
          may_capture: says whether a traced value is a placeholder's, and may be captured; None: none may.
          find_name: returns the name of a value that may not be captured, for the error about it.
        """
        self._may_capture = may_capture
        self._find_name = find_name
        self.values: list[Any] = []
        self._rebind: Rebind | None = None  # set by `release`

    def release(self, rebind: Rebind) -> None:
        """Lets go of the values. `rebind` has functions capture others in their place within a block."""
        self.values.clear()
        self._rebind = rebind

    def trace_again(
        self, avals: Sequence[jax.ShapeDtypeStruct], trace: Callable[[Captures], Result]
    ) -> Result:
        """Has the functions traced once more, where captured values keep their positions.

        Args:
          avals: shapes and dtypes of the captured values.
          trace: traces the functions, with the captures that it is given.

        Returns:
          What `trace` returns.
        """
        again, rebind = Captures(self._may_capture, self._find_name), self._rebind
        if rebind is None or not avals:  # they are still there, or there are none
            again.values += self.values
            return trace(again)
        results: list[Result] = []

        def trace_rebound(*values: Any) -> tuple[()]:
            again.values += values
            with rebind(values):
                results.append(trace(again))
            return ()

        jax.make_jaxpr(trace_rebound)(*avals)
        return results[0]

    def find_number(self, value: Any) -> int | None:
        """The position of a traced function's constant among `values`; None if it is not a traced value."""
        if not jax_compat.is_traced(value):
            return None
        for number, known in enumerate(self.values):
            if known is value:
                return number
        self.values.append(value)
        return len(self.values) - 1

    def check(
        self,
        constants: Iterable[Any],
        place: str,
        reads: Mapping[int, tuple[object, VariableSpec]] = MappingProxyType({}),
    ) -> None:
        """Raises if a traced function captured a value that it may not capture.

        Args:
          constants: the constants of the function's jaxpr.
          place: what errors call it.
          reads: the values of variables that functions of the same program got, see `frames.ProgramNames`.

        Raises:
          ValueError: it did.
        """
        allowed = self._may_capture
        traced = [value for value in constants if jax_compat.is_traced(value)]
        wrong = [value for value in traced if allowed is None or not allowed(value)]
        for value in wrong:
            if id(value) in reads:
                raise ValueError(_describe_variable(reads[id(value)][1], place))
        if wrong:
            described = ", ".join(map(self._describe, wrong))
            raise ValueError(
                f"Trying to capture the tensor {described} in {place}, which may only use its arguments"
                f"{'' if allowed is None else ' and placeholders'}: pass the value through `inputs` or the "
                "infeed, and on through the stages in between."
            )

    def _describe(self, value: Any) -> str:
        name, shape = self._find_name(value) if self._find_name else None, describe(value)
        if name:
            return f"{name} ({shape})"
        line = find_computing_line(value)
        return f"{shape} (computed at {line})" if line else f"{shape} (a computed value)"


def _describe_variable(spec: VariableSpec, place: str) -> str:
    scope, _separator, name = spec.name.rpartition("/")
    return (
        f"{place} uses the value of variable {spec.name} that another function got. Each stage asks for "
        f"the variables that it uses: `with variable_scope({scope!r}, reuse=True): "
        f"get_variable({name!r})`. The gradients of stages that share a variable are added. Or return the "
        "value from the other stage, and pass it on."
    )
