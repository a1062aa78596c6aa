"""Symbolic inputs of a program, fed at `Session.run`."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ipu_pipeline.ground.shapes import as_shape
from ipu_pipeline.ground.values import as_own, as_plain, cast_exactly, is_of_numbers
from ipu_pipeline.tf1.graph.symbols import Symbol

__all__ = [
    "Placeholder",
    "as_traced_inputs",
    "input_shapes",
    "live_placeholders",
    "placeholder",
    "standing",
]


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
        known = _standing.get()
        if known is None:
            raise ValueError(
                f"Trying to capture the tensor {self.name} ({self!r}) outside of a program. A placeholder "
                "has a value only in a function that ipu_compiler.compile traces."
            )
        return known(self)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of arrays, such as `astype`."""
        if name in ("dtype", "shape", "name"):  # while it is being made
            raise AttributeError(name)
        return super().__getattr__(name)

    def __eq__(self, other: object) -> Any:
        """Compares values while something is compiled; otherwise, and with placeholders, identities."""
        if isinstance(other, Placeholder) or other is None or _standing.get() is None:
            return self is other
        return self.traced() == other

    def __ne__(self, other: object) -> Any:
        """The inverse of `__eq__`."""
        if isinstance(other, Placeholder) or other is None or _standing.get() is None:
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
        what = f"The value fed to {self!r}"
        return cast_exactly(as_plain(array, what), self.aval.dtype, what)


class _Unfed:
    """Stands for a placeholder among the leaves of a tree while nothing is being compiled."""

    def __init__(self, placeholder: Placeholder) -> None:
        self.placeholder = placeholder

    def __repr__(self) -> str:
        return repr(self.placeholder)


def _flatten(known: Placeholder) -> tuple[tuple[Any], None]:
    return (_Unfed(known) if _standing.get() is None else known.traced(),), None


def _unflatten(_nothing: None, values: Any) -> Any:
    (value,) = values
    return value.placeholder if isinstance(value, _Unfed) else value


# This lets functions that JAX traces take placeholders as arguments, and stages return them.
jax.tree_util.register_pytree_node(Placeholder, _flatten, _unflatten)


def as_traced_inputs(inputs: Any, what: str = "inputs") -> tuple[list[Any], Any]:
    """Flattens the `inputs` argument of a pipeline or loop."""
    if inputs is None:
        inputs = []
    elif not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    leaves, tree = jax.tree.flatten(list(inputs))
    return [_as_array(f"{what}: leaf {index}", leaf) for index, leaf in enumerate(leaves)], tree


def input_shapes(inputs: Any) -> list[Any]:
    """Shapes and dtypes of the `inputs` of a pipeline, where placeholders have no value."""

    def find(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.aval if isinstance(leaf, Placeholder) else as_shape(leaf)

    given = [] if inputs is None else list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    found: list[Any] = jax.tree.map(find, given, is_leaf=lambda leaf: isinstance(leaf, Placeholder))
    return found


def _as_array(what: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # traced values included
        return leaf
    array = as_plain(leaf, what)
    if array.dtype.kind in "OUSMm":
        raise TypeError(f"{what} must be an array; got {type(leaf).__name__}.")
    return as_own(array, what)


_count = 0
_live: weakref.WeakValueDictionary[int, Placeholder] = weakref.WeakValueDictionary()  # by order of creation
_numbers = itertools.count()
_standing: contextvars.ContextVar[Callable[[Placeholder], Any] | None] = contextvars.ContextVar(
    "standing", default=None
)


def live_placeholders() -> list[Placeholder]:
    """All existing placeholders, in the order in which they were made."""
    found = [reference() for reference in _live.valuerefs()]
    return [known for known in found if known is not None]


@contextlib.contextmanager
def standing(find: Callable[[Placeholder], Any]) -> Iterator[None]:
    """Sets, for a `with` block, how the traced value of a placeholder is found."""
    token = _standing.set(find)
    try:
        yield
    finally:
        _standing.reset(token)


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
    if dtype is None or not is_of_numbers(np.dtype(dtype)):
        raise TypeError(
            f"placeholder: dtype must be one of numbers or booleans, for example np.float32; got {dtype!r}."
        )
    shape = () if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise ValueError(f"placeholder: shape must be static, non-negative integers; got {shape}.")
    if name is None:
        name = "Placeholder" if _count == 0 else f"Placeholder_{_count}"
        _count += 1
    made = Placeholder(np.dtype(dtype), tuple(int(size) for size in shape), name)
    _live[next(_numbers)] = made
    return made
