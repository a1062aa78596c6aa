"""Converts pytrees of parameters to variables and back: their names and their leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.state import MOVES
from ipu_pipeline.ground.checks import check_name, join
from ipu_pipeline.ground.errors import drop_traceback_note
from ipu_pipeline.ground.jax_compat import is_traced
from ipu_pipeline.ground.pytrees import as_shape, describe, describe_structures, is_of_numbers


# Sharing needs a name. The identity of arrays would not do: two biases that were made from the same zeros
# would be tied in silence.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["name"])
@dataclass(frozen=True, eq=False)
class Shared:
    """Parameters with a name that several stages share: one variable for all of them.

    Use it only in the parameters: stage functions get the value. The gradients of all stages that have it
    are added. The names of its variables contain no stage, so it also gives a layer of a single stage a
    name that stays the same in every split.

    Example:
      >>> table = engine.Shared("table", np.ones([100, 16], np.float32))
      >>> def embed(table, tokens):
      ...     return table[tokens]
      >>> def predict(table, x):
      ...     return x @ table.T
      >>> pipeline = engine.Pipeline([embed, predict], parameters=[table, table], num_micro_batches=1)
      >>> pipeline.trace(np.zeros([2, 8], np.int32))
      >>> pipeline.variables  # one variable, which both stages use
      {'table': table: float32[100, 16]}

    Attributes:
      name: the full name of its variable; all `Shared` with the same name are one variable. If the value is
        a pytree, the leaves' paths follow the name: `layer0/w`.
      value: an array or a pytree of arrays, the same wherever the name occurs; or its shapes, or a function
        from a random key to it, as for a stage's parameters. If there are several functions, the first
        stage's makes the value.
    """

    name: str
    value: Any

    def __post_init__(self) -> None:
        """Checks the name."""
        check_name("Shared: name", self.name)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf of a stage's parameters."""

    name: str  # the full name of its variable
    path: str  # where it stands, for errors: `['w'][0]`
    shape: jax.ShapeDtypeStruct  # its shape and dtype
    shared: str | None  # the name of the `Shared` that it is in; None outside of these
    place: tuple[int, int]  # the number of its value among the `parts`, and of the leaf in that


@dataclass(frozen=True, eq=False)
class Layout:
    """The parameters of a stage without their values."""

    leaves: Sequence[Leaf]  # in the order of the pytree
    tree: Any  # its structure, with the value in place of a `Shared`
    label: str  # what errors call it


def is_maker(value: Any) -> bool:
    """Whether parameters are a function of a random key; there are pytrees that can be called, too."""
    return callable(value) and jax.tree_util.all_leaves([value])


def find_shapes(parameters: Any, label: str) -> Any:
    """Replaces functions of a random key in parameters by the shapes of what they make."""
    if is_maker(parameters):
        parameters = _shapes_of(parameters, label)

    def find(node: Any) -> Any:
        if not isinstance(node, Shared) or not is_maker(node.value):
            return node
        return Shared(node.name, _shapes_of(node.value, f"{node.name} in the {label}"))

    return jax.tree.map(find, parameters, is_leaf=_is_shared)


def _shapes_of(make: Callable[[Any], Any], label: str) -> Any:
    try:
        return jax.eval_shape(make, jax.eval_shape(jax.random.key, 0))
    except Exception as error:
        drop_traceback_note(error)
        error.add_note(
            f"This happened while finding the shapes of the {label}, which a function makes of a key"
        )
        raise


def parts(parameters: Any) -> list[Any]:
    """The values of a pytree of parameters: leaves, and what is in each `Shared`."""
    nodes = jax.tree.leaves(parameters, is_leaf=_is_shared)
    return [node.value if isinstance(node, Shared) else node for node in nodes]


def make_layout(parameters: Any, scope: str, label: str) -> Layout:
    """Finds the variables that a pytree of parameters becomes, without functions in it."""
    leaves: list[Leaf] = []
    nodes = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=_is_shared)[0]
    for number, (path, node) in enumerate(nodes):
        shared = node.name if isinstance(node, Shared) else None
        place, inner = (path, node.value) if isinstance(node, Shared) else (path, node)
        inner_leaves = jax.tree_util.tree_flatten_with_path(inner, is_leaf=_is_shared)[0]
        for inner_number, (inner_path, leaf) in enumerate(inner_leaves):
            where = jax.tree_util.keystr((*place, *inner_path))
            if isinstance(leaf, Shared):
                raise ValueError(f"{label}{where}: a Shared cannot stand within another one, {shared}.")
            _check_leaf(leaf, f"{label}{where}")
            if shared is None:
                name = join(scope, _words(path) or "parameter")
            else:
                name = "/".join([shared, *([_words(inner_path)] if inner_path else [])])
            leaves.append(Leaf(name, where, as_shape(leaf), shared, (number, inner_number)))
    return Layout(leaves, jax.tree.structure(_without_shared(parameters)), label)


def check_names(stages: Iterable[tuple[Layout, Any]]) -> None:
    """Checks that leaves of the same name are one `Shared`, the same wherever it occurs."""
    leaves_by_name: dict[str, tuple[Leaf, str, Any]] = {}
    for layout, parameters in stages:
        values: Sequence[Any] = [None] * len(layout.leaves)
        if parameters is not None:
            values = jax.tree.leaves(_without_shared(parameters))
        for leaf, value in zip(layout.leaves, values, strict=True):
            place = layout.label + leaf.path
            other, other_place, other_value = leaves_by_name.setdefault(leaf.name, (leaf, place, value))
            if other is leaf:
                continue
            if leaf.shared is None or other.shared is None:
                raise ValueError(
                    f"{other_place} and {place} would both be the variable {leaf.name}. Rename one, or put "
                    "the same engine.Shared into both places."
                )
            if other.shape != leaf.shape:
                raise ValueError(
                    f"{leaf.name} is shared, so it must have the same shape and dtype everywhere; "
                    f"{other_place} is {describe(other.shape)}, {place} {describe(leaf.shape)}."
                )
            _check_same(leaf.name, (other_place, other_value), (place, value))


class ModelParameters:
    """The parameters of a model that was split: how one pytree becomes variables, and the way back."""

    def __init__(self, layout: Layout, parts: Mapping[str, Sequence[str]]) -> None:
        """Takes the model's layout, and the variables of layers' parts of a stacked leaf, by its name."""
        self._layout, self._parts = layout, parts

    def read(self, variables: Mapping[str, Any]) -> Any:
        """Makes the pytree; layers' parts of stacked parameters are stacked on the first one's device."""

        def value(name: str) -> Any:
            names = self._parts.get(name, [name])
            missing = next((part for part in names if part not in variables), None)
            if missing is not None:
                raise ValueError(
                    f"The state has no variable {missing}, which is one of the model's. A state of another "
                    "split of the same layers is moved by engine.resplit(state, pipeline)."
                )
            if names == [name]:
                return variables[name]
            values = [variables[part] for part in names]
            if isinstance(values[0], jax.Array) and not is_traced(values[0]):
                values = jax.device_put(values, next(iter(values[0].devices())))
            return jnp.stack(values)

        return jax.tree.unflatten(self._layout.tree, [value(leaf.name) for leaf in self._layout.leaves])

    def write(self, parameters: Any) -> dict[str, Any]:
        """Makes the variables, by full name; the inverse of `read`."""
        values: dict[str, tuple[str, Any]] = {}
        _write_stage(self._layout, parameters, "parameters", values)
        variables = {}
        for name, (_place, value) in values.items():
            names = self._parts.get(name, [name])
            variables.update(
                {name: value} if names == [name] else {part: value[n, ...] for n, part in enumerate(names)}
            )
        return variables


class StageParameters:
    """The parameters of a pipeline's stages: how a list of pytrees becomes variables, and the way back."""

    def __init__(self, layouts: Sequence[Any]) -> None:
        """Takes the layout of each stage, a list of layouts for parallel stages, None for none.

        In place of a layout there is the `ModelParameters` of a model of which the stage is a part.
        """
        self._layouts = layouts

    def read(self, variables: Mapping[str, Any]) -> list[Any]:
        """Makes the pytrees, in a list like that of the stages; None for stages without parameters."""

        def read(entry: Any) -> Any:
            if isinstance(entry, ModelParameters):
                raise ValueError(_OF_A_MODEL)
            if not isinstance(entry, Layout):
                return None if entry is None else [read(parallel) for parallel in entry]
            for leaf in entry.leaves:
                if leaf.name not in variables:
                    raise ValueError(
                        f"The state has no variable {leaf.name}, which is one of the {entry.label}. {MOVES}"
                    )
            return jax.tree.unflatten(entry.tree, [variables[leaf.name] for leaf in entry.leaves])

        return [read(entry) for entry in self._layouts]

    def write(self, parameters: Any) -> dict[str, Any]:
        """Makes the variables, by full name; the inverse of `read`."""
        values: dict[str, tuple[str, Any]] = {}  # name -> the place where it was found, and the value

        def write(entry: Any, pytree: Any, label: str) -> None:
            if isinstance(entry, ModelParameters):
                raise ValueError(f"{label}: {_OF_A_MODEL}")
            if isinstance(entry, Layout):
                _write_stage(entry, pytree, label, values)
            elif entry is not None:
                check_length(label, pytree, len(entry))
                for number, (parallel, stage_pytree) in enumerate(zip(entry, pytree, strict=True)):
                    write(parallel, stage_pytree, f"{label}[{number}]")
            elif pytree is not None:
                raise ValueError(f"{label} must be None, since the stage has no pytree of parameters.")

        write(self._layouts, parameters, "parameters")
        if not values:
            raise ValueError(
                "No stage has a pytree of parameters: variables come from get_variable. Give them with "
                "dataclasses.replace(state, variables=other.variables)."
            )
        return {name: value for name, (_place, value) in values.items()}


_OF_A_MODEL = (
    "the pipeline has other stages besides those of engine.split, whose model has one pytree of "
    "parameters, and none for each stage: stages.parameters(state) reads it."
)


def check_length(label: str, value: Any, number: int) -> None:
    """Raises a ValueError if `value` is not a list of `number` pytrees, one for each stage."""
    if not isinstance(value, (list, tuple)) or len(value) != number:
        kind = f"a {type(value).__name__}" + (
            f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        )
        raise ValueError(f"{label} must be a list of {number} pytrees, one for each stage; got {kind}.")


def _write_stage(layout: Layout, parameters: Any, label: str, values: dict[str, tuple[str, Any]]) -> None:
    plain = _without_shared(parameters)
    tree = jax.tree.structure(plain)
    if tree != layout.tree:
        right, wrong = describe_structures(layout.tree, tree)
        raise ValueError(f"{label} must be {right}, as the stage's parameters; got {wrong}.")
    for leaf, value in zip(layout.leaves, jax.tree.leaves(plain), strict=True):
        place = label + leaf.path
        _check_leaf(value, place)
        shape = as_shape(value)
        if shape != leaf.shape:
            raise ValueError(f"{place} must be {describe(leaf.shape)}; got {describe(shape)}.")
        # JAX converts NumPy's float64 to float32 by itself, but a state must have the dtypes of its specs.
        array = value.astype(leaf.shape.dtype) if isinstance(value, np.ndarray) else value
        first_place, first_value = values.setdefault(leaf.name, (place, array))
        _check_same(leaf.name, (first_place, first_value), (place, array))


def _without_shared(parameters: Any) -> Any:
    """The parameters as the stage function gets them."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, Shared) else node, parameters, is_leaf=_is_shared
    )


def _is_shared(node: Any) -> bool:
    return isinstance(node, Shared)


def _words(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_leaf(leaf: Any, label: str) -> None:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise ValueError(
            f"{label} must be an array; got {type(leaf).__name__} {leaf!r}. Bind what is not an array "
            "to the function (functools.partial); make a number that is to be trained an array."
        )
    if not is_of_numbers(leaf.dtype):
        raise ValueError(
            f"{label} must be an array of numbers or booleans; got {describe(leaf)}. A stage gets random "
            "keys by next_rng_key()."
        )


def _check_same(name: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    """Raises if a shared variable has two values. No value yet (None, shapes) does not count as one."""
    (place, value), (other_place, other) = first, second
    if value is other or any(v is None or isinstance(v, jax.ShapeDtypeStruct) for v in (value, other)):
        return
    if np.asarray(value).tobytes() != np.asarray(other).tobytes():  # NaN counts as equal to itself
        raise ValueError(
            f"{name} is shared, so it must have one value; the values in {place} and {other_place} differ."
        )
