"""Objects that stand for a value before it exists: symbols, placeholders, operations."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from ipu_pipeline.engine import VariableSpec, update_count
from ipu_pipeline.engine.fronts import find_frame, is_loss_weight
from ipu_pipeline.ground.checks import require
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.ground.pytrees import as_own, as_plain, as_shape, cast_exactly, is_of_numbers

# The global step and values computed from it.


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


def counting_steps(count: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Sets what the global step is, of the weight updates, in programs compiled inside a `with` block."""
    return bound(_counting, count)


def at_run_begin(num_updates: Any) -> contextlib.AbstractContextManager[None]:
    """Gives the global step the value of a run's beginning, after so many updates, in a `with` block."""
    return bound(_run_begin, num_updates)


def has_step() -> bool:
    """Whether the global step has a value in the function being traced."""
    frame = find_frame()
    return frame is not None and frame.has_update_count


def waits_for_step(function: _Function) -> _Function:
    """Decorates a function of arrays, so that it also takes the global step where that has no value yet."""

    @functools.wraps(function)
    def waiting(*arguments: Any, **options: Any) -> Any:
        values = (*arguments, *options.values())
        if has_step() or not any(isinstance(value, StepSymbol) for value in values):
            return function(*arguments, **options)
        return ComputedStep(lambda: function(*arguments, **options))

    return waiting  # type: ignore[return-value]  # it takes and returns the same types, or symbols for them


def _flatten_symbol(symbol: StepSymbol) -> tuple[tuple[Any], None]:
    return (symbol.traced(),), None


def _unflatten_symbol(_nothing: None, values: Any) -> Any:
    (value,) = values
    return value


# So functions that JAX traces can take symbols as arguments, and stages can return them.
for _kind in (GlobalStep, ComputedStep):
    jax.tree_util.register_pytree_node(_kind, _flatten_symbol, _unflatten_symbol)


class SplitInputs(NamedTuple):
    """The `inputs` of a function, without symbols of the global step.

    Attributes:
      inputs: the inputs, with a number of weight updates, 0, for the first symbol, and None for others.
      number: how many arguments they are.
      position: of the number of weight updates among the leaves of `inputs`.
      put_back: splits the arguments for `inputs` into the number of weight updates and the inputs with
        their symbols.
    """

    inputs: list[Any]
    number: int
    position: int
    put_back: Callable[[Sequence[Any]], tuple[Any, list[Any]]]


def split_steps(inputs: Any) -> SplitInputs | None:
    """Takes symbols of the global step out of the `inputs` of a function; None if there are none."""
    argument_list = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    tree: Any
    leaves, tree = jax.tree.flatten(argument_list, is_leaf=lambda leaf: isinstance(leaf, StepSymbol))
    is_step = [isinstance(leaf, StepSymbol) for leaf in leaves]
    if not any(is_step):
        return None
    position = is_step.index(True)
    constants = [None if is_symbol else leaf for is_symbol, leaf in zip(is_step, leaves, strict=True)]
    new_inputs = tree.unflatten([*constants[:position], np.int32(0), *constants[position + 1 :]])

    def put_back(arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        values = jax.tree.leaves(list(arguments))
        num_updates, constants = values.pop(position), iter(values)
        filled = [
            leaf if is_symbol else next(constants) for is_symbol, leaf in zip(is_step, leaves, strict=True)
        ]
        return num_updates, tree.unflatten(filled)

    return SplitInputs(new_inputs, len(argument_list), position, put_back)


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


# Placeholders, fed at `Session.run`.


class Placeholder(Symbol):
    """A symbolic input; see `placeholder`."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], name: str) -> None:
        """Made by `placeholder`."""
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.name = name

    def __repr__(self) -> str:
        return f"placeholder {self.name!r} ({self.dtype.name}{list(self.shape)})"

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype that it has in JAX."""
        return jax.ShapeDtypeStruct(self.shape, jax.dtypes.canonicalize_dtype(self.dtype))

    def traced(self) -> Any:
        """Returns its traced value in the function that is being compiled, and makes it an input of that.

        Raises:
          ValueError: nothing is being compiled, or the placeholder was made by the function itself.
        """
        find = _value_finder.get()
        if find is None:
            raise ValueError(
                f"Trying to capture the tensor {self.name} ({self!r}) outside of a program. A placeholder "
                "has a value only in a function that ipu_compiler.compile traces."
            )
        return find(self)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of arrays, such as `astype`."""
        if name in ("dtype", "shape", "name"):  # while it is being made
            raise AttributeError(name)
        return super().__getattr__(name)

    def __eq__(self, other: object) -> Any:
        """Compares values while something is compiled; otherwise, and with placeholders, identities."""
        if isinstance(other, Placeholder) or other is None or _value_finder.get() is None:
            return self is other
        return self.traced() == other

    def __ne__(self, other: object) -> Any:
        """The inverse of `__eq__`."""
        if isinstance(other, Placeholder) or other is None or _value_finder.get() is None:
            return self is not other
        return self.traced() != other

    __hash__ = object.__hash__

    def __copy__(self) -> Placeholder:
        return self  # it is known by its identity: a copy could not be fed

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self

    def check_value(self, value: Any) -> np.ndarray[Any, Any]:
        """Returns a fed value as an array of the placeholder's dtype.

        Raises:
          ValueError: it has another shape, its kind of number does not fit the dtype, or some of its
            elements are masked.
        """
        try:
            array = np.asanyarray(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"The value fed to {self!r} is not an array: {error}.") from error
        if array.shape != self.shape:
            raise ValueError(
                f"Cannot feed value of shape {array.shape} for {self!r}, which has shape {self.shape}."
            )
        subject = f"The value fed to {self!r}"
        return cast_exactly(as_plain(array, subject), self.aval.dtype, subject)


class _Unfed:
    """Stands for a placeholder among the leaves of a tree while nothing is being compiled."""

    def __init__(self, placeholder: Placeholder) -> None:
        self.placeholder = placeholder

    def __repr__(self) -> str:
        return repr(self.placeholder)


def _flatten_placeholder(symbol: Placeholder) -> tuple[tuple[Any], None]:
    return (_Unfed(symbol) if _value_finder.get() is None else symbol.traced(),), None


def _unflatten_placeholder(_nothing: None, values: Any) -> Any:
    (value,) = values
    return value.placeholder if isinstance(value, _Unfed) else value


jax.tree_util.register_pytree_node(Placeholder, _flatten_placeholder, _unflatten_placeholder)


def as_traced_inputs(inputs: Any, subject: str = "inputs") -> tuple[list[Any], Any]:
    """Flattens the `inputs` argument of a pipeline or loop."""
    if inputs is None:
        inputs = []
    elif not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    leaves, tree = jax.tree.flatten(list(inputs))
    return [_as_array(f"{subject}: leaf {index}", leaf) for index, leaf in enumerate(leaves)], tree


def input_shapes(inputs: Any) -> list[Any]:
    """Shapes and dtypes of the `inputs` of a pipeline, where placeholders have no value."""

    def find(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.aval if isinstance(leaf, Placeholder) else as_shape(leaf)

    inputs_list = [] if inputs is None else list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    shapes: list[Any] = jax.tree.map(find, inputs_list, is_leaf=lambda leaf: isinstance(leaf, Placeholder))
    return shapes


def _as_array(subject: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # traced values included
        return leaf
    array = as_plain(leaf, subject)
    if array.dtype.kind in "OUSMm":
        raise TypeError(f"{subject} must be an array; got {type(leaf).__name__}.")
    return as_own(array, subject)


_count = 0
_live: weakref.WeakValueDictionary[int, Placeholder] = weakref.WeakValueDictionary()  # by order of creation
_numbers = itertools.count()
_value_finder: contextvars.ContextVar[Callable[[Placeholder], Any] | None] = contextvars.ContextVar(
    "value_finder", default=None
)


def live_placeholders() -> list[Placeholder]:
    """All existing placeholders, in the order in which they were made."""
    references = [reference() for reference in _live.valuerefs()]
    return [symbol for symbol in references if symbol is not None]


def finding_placeholders(find: Callable[[Placeholder], Any]) -> contextlib.AbstractContextManager[None]:
    """Sets, for a `with` block, how the traced value of a placeholder is found."""
    return bound(_value_finder, find)


def placeholder(dtype: Any, shape: Any = None, name: str | None = None) -> Placeholder:
    """Makes a symbolic input of a program.

    Example:
      >>> x = ipu.placeholder(np.float32, [])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(lambda x: 2 * x, [x])
      >>> with ipu.Session() as session:
      ...     session.run(program, {x: 21})
      [array(42., dtype=float32)]

    Args:
      dtype: its dtype.
      shape: its static shape. None: a scalar.
      name: its name in errors. None: Placeholder, Placeholder_1, ...

    Returns:
      The placeholder. It is a key of `feed_dict`, and `ipu_compiler.compile(fn, inputs=[...])` takes it as
      an input. Compiled functions, including stages and optimizer functions, may also use it as an array,
      which makes it an input, too.

    Raises:
      TypeError: the dtype is not a dtype, or not one of numbers or booleans.
      ValueError: the shape is not static.
    """
    global _count
    rule = "placeholder: dtype must be one of numbers or booleans, for example np.float32"
    require(dtype is not None and is_of_numbers(np.dtype(dtype)), rule, dtype, TypeError)
    shape = () if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise ValueError(f"placeholder: shape must be static, non-negative integers; got {shape}.")
    if name is None:
        name = "Placeholder" if _count == 0 else f"Placeholder_{_count}"
        _count += 1
    symbol = Placeholder(np.dtype(dtype), tuple(int(size) for size in shape), name)
    _live[next(_numbers)] = symbol
    return symbol


# Operations for `Session.run` that belong to no program.


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


# Internal variables: always 0, trained for the sake of their gradients, neither shown nor saved.

HOST_TABLES = "_host_table"  # the scope of variables that make programs compute gradients of a table's rows


def is_internal(name: str) -> bool:
    """Whether a full name belongs to such a variable."""
    return is_loss_weight(name) or name.startswith(f"{HOST_TABLES}/")
