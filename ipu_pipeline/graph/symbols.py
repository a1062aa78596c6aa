"""Symbols: objects that stand for an array of a program, and can do what arrays can."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.counting import update_count

__all__ = ["GlobalStep", "Symbol", "get_global_step"]


class Symbol(abc.ABC):
    """Whatever an array can do, what stands for a symbol's value does."""

    @abc.abstractmethod
    def traced(self) -> Any:
        """What stands for its value in the function that is being traced."""

    def __jax_array__(self) -> Any:
        """JAX calls it when the symbol itself is used as an array."""
        return self.traced()

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        """NumPy calls it likewise; JAX then says that a traced value is no NumPy array."""
        return np.asarray(self.traced(), *arguments, **options)

    __array_priority__ = 100  # NumPy's arrays and scalars leave operators to it, as to JAX's arrays

    def __getattr__(self, name: str) -> Any:
        """What an array has, such as `astype`."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return getattr(self.traced(), name)


def _forward(name: str) -> Callable[..., Any]:
    def operator(self: Symbol, *arguments: Any) -> Any:
        return getattr(self.traced(), name)(*arguments)

    return operator


_OPERATORS = """
    add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift
    radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rand ror rxor rlshift rrshift
    neg pos abs invert lt le gt ge eq ne bool int float complex index len iter getitem
"""
for _operator in _OPERATORS.split():
    setattr(Symbol, f"__{_operator}__", _forward(f"__{_operator}__"))


class GlobalStep(Symbol):
    """The number of weight updates before the one in which it is used, an int32 scalar."""

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "the global step"

    def traced(self) -> Any:
        """The number, in a stage or an optimizer.

        Raises:
          RuntimeError: it is used elsewhere.
        """
        return update_count()


class _Unused:
    """Stands for the global step among the leaves of a tree, outside of what has its value."""


def _flatten(step: GlobalStep) -> tuple[tuple[Any], None]:
    frame = frames.find_frame()
    has_value = frame is not None and (frame.has_metrics or frame.is_traced_again)
    return (step.traced() if has_value else _Unused(),), None


def _unflatten(_nothing: None, values: Any) -> Any:
    (value,) = values
    return GlobalStep() if isinstance(value, _Unused) else value


# So functions that JAX traces take it as an argument, and stages may return it.
jax.tree_util.register_pytree_node(GlobalStep, _flatten, _unflatten)


def get_global_step() -> GlobalStep:
    """The number of weight updates so far, for learning rates and the like that depend on it.

    It may be asked for anywhere, in a `model_fn` for example, and used as an array in a stage of a
    pipeline, in its optimizer_function, and in the `update` of its optimizer: there it has another value
    for every weight update. Elsewhere, where it would be computed with once for many updates, it raises
    RuntimeError. It is that of the pipeline's name (`Session.update_count`), and goes on where a checkpoint
    is restored. Optax's own schedules count by themselves and do not need it.

    Returns:
      What stands for an int32 scalar.

    Example:
      step = ipu.get_global_step()

      def optimizer_function(loss):
          return OptimizerFunctionOutput(optax.sgd(0.1 * 0.99**step), loss)
    """
    return GlobalStep()
