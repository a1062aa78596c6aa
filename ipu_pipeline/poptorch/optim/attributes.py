"""Which hyperparameters of an optimizer may change once a model is compiled."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["VariableAttributes"]


class VariableAttributes:
    """Which attributes are constant and which variable. An optimizer has one, as `variable_attrs`.

    What was given to the optimizer is variable, and so is the learning rate; other attributes are constant,
    with their defaults. `setOptimizer` changes variable ones and compiles nothing.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        """Takes names.

        Args:
          variable_attributes: the variable ones.
          allowed_attributes: all.
        """
        self._allowed = tuple(allowed_attributes)
        self._variable = frozenset(variable_attributes)

    @property
    def variable(self) -> list[str]:
        """The variable ones, sorted."""
        return sorted(self._variable)

    def isConstant(self, attr: str) -> bool:
        """Whether an attribute is constant.

        Raises:
          AssertionError: there is no such attribute, as for the other methods.
        """
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Makes an attribute constant."""
        self._check(attr)
        self._variable -= {attr}

    def markAsVariable(self, attr: str) -> None:
        """Makes an attribute variable."""
        self._check(attr)
        self._variable |= {attr}

    def _check(self, attr: str) -> None:
        if attr not in self._allowed:
            raise AssertionError(f"Unknown attribute {attr}, allowed values: {list(self._allowed)}")
