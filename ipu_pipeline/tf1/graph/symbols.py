"""Symbols: objects that stand for an array of a program, and can do what arrays can."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from ipu_pipeline.engine import update_count
from ipu_pipeline.engine.fronts import find_frame

__all__ = [
    "ComputedStep",
    "GlobalStep",
    "SplitInputs",
    "StepSymbol",
    "Symbol",
    "at_run_begin",
    "counting_steps",
    "get_global_step",
    "has_step",
    "split_steps",
    "waits_for_step",
]


class Symbol(abc.ABC):
    """An object that stands for an array: its traced value does everything that an array can do."""

    @abc.abstractmethod
    def traced(self) -> Any:
        """Returns its traced value in the function that is being traced."""

    def __jax_array__(self) -> Any:
        """Called by JAX when the symbol itself is used as an array."""
        return self.traced()

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        """Called by NumPy in the same case; JAX then says that a traced value is no NumPy array."""
        return np.asarray(self.traced(), *arguments, **options)

    __array_priority__ = 100  # NumPy's arrays and scalars leave operators to it, as to JAX's arrays

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of arrays, such as `astype`."""
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


class StepSymbol(Symbol):
    """The global step, or a value computed from it, which differs from weight update to weight update.

    It has a value in stages, optimizer functions and the `update` of optimizers. Elsewhere, for example in
    a `model_fn`, Python's operators, the methods of arrays and functions that `waits_for_step` decorates
    return another such symbol, which is computed where it is used.
    """

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of arrays; a method waits for the value."""
        if has_step() or name.startswith("_") or not callable(getattr(jax.Array, name, None)):
            return super().__getattr__(name)
        return lambda *arguments, **options: ComputedStep(
            lambda: getattr(self.traced(), name)(*arguments, **options)
        )


def _waiting(name: str) -> Callable[..., Any]:
    def operator(self: StepSymbol, *arguments: Any) -> Any:
        def compute() -> Any:
            return getattr(self.traced(), name)(*arguments)

        return compute() if has_step() else ComputedStep(compute)

    return operator


_AT_ONCE = ("bool", "int", "float", "complex", "index", "len", "iter")  # Python needs the value itself
for _operator in _OPERATORS.split():
    if _operator not in _AT_ONCE:
        setattr(StepSymbol, f"__{_operator}__", _waiting(f"__{_operator}__"))


class GlobalStep(StepSymbol):
    """The symbol that `get_global_step` returns, an int32 scalar."""

    def __repr__(self) -> str:
        return "the global step"

    def traced(self) -> Any:
        """Returns the number, in a stage or an optimizer.

        Raises:
          RuntimeError: it is used elsewhere.
        """
        if find_frame() is None:
            raise RuntimeError(
                "The global step (get_global_step) was used as an array outside of a program, where it "
                "has no value. Use it in a stage, in an optimizer_function or in the update of an "
                "optimizer. Elsewhere, Python's operators and the decays of ipu.optimizers.tf1 take it; "
                "their results may be used in these places, or passed in `inputs`."
            )
        begin, counts = _run_begin.get(), _counting.get()
        updates = update_count() if begin is None else begin
        return updates if counts is None else counts(updates)


class ComputedStep(StepSymbol):
    """A value computed from the global step, at the place where it is used."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        """Takes the function that computes it; computes nothing yet."""
        self._compute = compute

    def __repr__(self) -> str:
        return "a value computed from the global step"

    def traced(self) -> Any:
        """Returns the value, in a stage or an optimizer."""
        value = self._compute()
        if value is NotImplemented:
            raise TypeError("An operator of Python does not take the global step with its other operand.")
        return value


_counting: contextvars.ContextVar[Callable[[Any], Any] | None] = contextvars.ContextVar(
    "counting", default=None
)
_run_begin: contextvars.ContextVar[Any] = contextvars.ContextVar("run_begin", default=None)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextlib.contextmanager
def counting_steps(count: Callable[[Any], Any]) -> Iterator[None]:
    """Sets what the global step is, of the weight updates, in programs compiled inside a `with` block."""
    token = _counting.set(count)
    try:
        yield
    finally:
        _counting.reset(token)


@contextlib.contextmanager
def at_run_begin(num_updates: Any) -> Iterator[None]:
    """Gives the global step the value of a run's beginning, after so many updates, in a `with` block."""
    token = _run_begin.set(num_updates)
    try:
        yield
    finally:
        _run_begin.reset(token)


def has_step() -> bool:
    """Whether the global step has a value in the function being traced."""
    frame = find_frame()
    return frame is not None and frame.has_update_count


def waits_for_step(function: _Function) -> _Function:
    """Decorates a function of arrays, so that it also takes the global step where that has no value yet."""

    @functools.wraps(function)
    def waiting(*arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        if has_step() or not any(isinstance(value, StepSymbol) for value in given):
            return function(*arguments, **options)
        return ComputedStep(lambda: function(*arguments, **options))

    return waiting  # type: ignore[return-value]  # it takes and returns the same types, or symbols for them


def _flatten(symbol: StepSymbol) -> tuple[tuple[Any], None]:
    return (symbol.traced(),), None


def _unflatten(_nothing: None, values: Any) -> Any:
    (value,) = values
    return value


# This lets functions that JAX traces take symbols as arguments, and stages return them.
for _kind in (GlobalStep, ComputedStep):
    jax.tree_util.register_pytree_node(_kind, _flatten, _unflatten)


class SplitInputs(NamedTuple):
    """The `inputs` of a function, without symbols of the global step.

    Attributes:
      rest: the inputs, with a number of weight updates, 0, in place of the first symbol, and None in place
        of others.
      number: how many arguments they are.
      position: of the number of weight updates among the leaves of `rest`.
      put_back: splits the arguments for `rest` into the number of weight updates and the inputs, with their
        symbols put back.
    """

    rest: list[Any]
    number: int
    position: int
    put_back: Callable[[Sequence[Any]], tuple[Any, list[Any]]]


def split_steps(inputs: Any) -> SplitInputs | None:
    """Takes symbols of the global step out of the `inputs` of a function; None if there are none."""
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    tree: Any
    leaves, tree = jax.tree.flatten(given, is_leaf=lambda leaf: isinstance(leaf, StepSymbol))
    is_step = [isinstance(leaf, StepSymbol) for leaf in leaves]
    if not any(is_step):
        return None
    position = is_step.index(True)
    others = [None if known else leaf for known, leaf in zip(is_step, leaves, strict=True)]
    rest = tree.unflatten([*others[:position], np.int32(0), *others[position + 1 :]])

    def put_back(arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        values = jax.tree.leaves(list(arguments))
        num_updates, others = values.pop(position), iter(values)
        filled = [leaf if known else next(others) for known, leaf in zip(is_step, leaves, strict=True)]
        return num_updates, tree.unflatten(filled)

    return SplitInputs(rest, len(given), position, put_back)


def get_global_step() -> GlobalStep:
    """Returns the global step, for learning rates and the like that depend on it.

    It counts weight updates: it is the number of weight updates before the one that is being computed. In
    an estimator it counts the micro-batches of a replica, as the estimator's checkpoints and hooks do: it
    goes up by `gradient_accumulation_count` with each weight update. After a checkpoint is restored, it
    goes on from there; in evaluation and prediction it is the step of the weights.

    This function may be called anywhere, for example in a `model_fn`. The step is an array in a stage of a
    pipeline, in its optimizer_function, and in the `update` of its optimizer: there it has another value
    for every weight update. Elsewhere Python's operators and the decays of `optimizers.tf1` take it, and
    return symbols that are computed where they are used. The step and such symbols may be among the
    `inputs` of a pipeline, which stay the same during a run: there it is the step before the run. If
    several pipelines train, each has a count under its name (`Session.update_count`). Optax's own schedules
    count weight updates by themselves and do not need it.

    Example:
      >>> rate = ipu.optimizers.tf1.exponential_decay(0.1, ipu.get_global_step(), 1000, 0.96)
      >>> def optimizer_function(loss):
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(rate), loss)

    Returns:
      A symbol for an int32 scalar.
    """
    return GlobalStep()
