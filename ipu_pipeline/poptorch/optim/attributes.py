"""The hyperparameters of an optimizer that may change once a model is compiled."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["VariableAttributes"]


class VariableAttributes:
    """Knows which attributes are constant and which variable. An optimizer has one, as `variable_attrs`.

    Arguments given to the optimizer are variable, and so is the learning rate. Other attributes are
    constant at their defaults. `setOptimizer` changes variable attributes and compiles nothing.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        """Takes names.

        Args:
          variable_attributes: the names of the variable attributes.
          allowed_attributes: the names of all attributes.
        """
        self._allowed = tuple(allowed_attributes)
        self._variable = frozenset(variable_attributes)

    @property
    def variable(self) -> list[str]:
        """The names of the variable attributes, sorted."""
        return sorted(self._variable)

    def isConstant(self, attr: str) -> bool:
        """Whether an attribute is constant.

        Raises:
          AssertionError: there is no such attribute. The other methods raise this, too.
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
