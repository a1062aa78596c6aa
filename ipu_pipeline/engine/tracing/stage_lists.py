"""The stages as a user gives them: functions, `Stage`s, lists of parallel ones; and the IPU of each."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.jaxprs.shapes import as_shape
from ipu_pipeline.engine.tracing.stages import StageFunction
from ipu_pipeline.engine.tracing.variable_scopes import variable_scope
from ipu_pipeline.engine.tracing.variables import get_variable

__all__ = ["Mapping", "Stage", "StageEntry", "as_level", "flatten_stages"]

_MAX_IPU = 2**16 - 1  # more than any system has; every one has a row in the schedule

StageEntry: TypeAlias = "StageFunction | Stage"
Mapping: TypeAlias = "Sequence[int | Sequence[int]]"


class Stage:
    """A stage that is a plain function of parameters and inputs, without named variables.

    Example:
      Stage(lambda parameters, x: x @ parameters["w"], {"w": numpy.ones((4, 2), "float32")})
    """

    def __init__(self, function: Callable[..., Any], parameters: Any, name: str | None = None) -> None:
        """Wraps the function.

        Args:
          function: `function(parameters, *inputs) -> outputs`.
          parameters: a pytree of arrays, the values at the start; or a function from a random key to one.
          name: the scope of its variables, one per leaf, named by the leaf's path. None: `stage<index>`.
        """
        self.function = function
        self.parameters = parameters
        self.name = name
        self.__name__ = name or getattr(function, "__name__", "stage")

    def with_variables(self, index: int) -> StageFunction:
        """The stage as a function whose parameters are variables."""
        parameters = self.parameters
        if callable(parameters):
            shapes = jax.eval_shape(parameters, jax.eval_shape(jax.random.key, 0))
        else:
            shapes = jax.tree.map(as_shape, parameters)
        paths_and_shapes, tree = jax.tree_util.tree_flatten_with_path(shapes)
        scope = self.name or f"stage{index}"

        # JAX's caches keep an initializer for long; they should not keep a model's weights with it.
        reference = weakref.ref(self)

        def initializer(place: int) -> Any:
            def initialize(key: Any, shape: Any, dtype: Any) -> Any:
                del shape, dtype  # they are those of the leaf
                stage = reference()
                assert stage is not None
                made = stage.parameters(key) if callable(stage.parameters) else stage.parameters
                return jax.tree.leaves(made)[place]

            initialize.needs_key = callable(parameters)  # type: ignore[attr-defined]  # see initial_value
            return initialize

        def call(*args: Any, **kwargs: Any) -> Any:
            with variable_scope(scope):
                leaves = [
                    get_variable(
                        jax.tree_util.keystr(path, simple=True, separator="/") or "parameter",
                        leaf.shape,
                        leaf.dtype,
                        initializer(place),
                    )
                    for place, (path, leaf) in enumerate(paths_and_shapes)
                ]
            return self.function(jax.tree.unflatten(tree, leaves), *args, **kwargs)

        call.__name__ = str(self.__name__)
        return call


def flatten_stages(
    stages: Sequence[StageEntry | Sequence[StageEntry]], device_mapping: Mapping | None
) -> tuple[list[list[StageFunction]], tuple[int, ...]]:
    """The stage functions level by level, and the IPU of each of all stages.

    Parallel stages at the end are followed by one that only joins what they return, on the first one's IPU.

    Args:
      stages: functions or `Stage`s, or lists of parallel ones.
      device_mapping: the IPU of each, likewise; None gives each its own.

    Raises:
      ValueError: there are no stages, or the mapping does not fit them.
    """
    grouped = [as_level(entry) for entry in stages]
    if not grouped or not all(grouped):
        what = "a list of parallel stages" if grouped else "stages"
        raise ValueError(f"stages: {what} must have at least one function; got none.")
    num_stages = sum(map(len, grouped))
    numbers = itertools.count()
    if device_mapping is None:
        device_mapping = [[next(numbers) for _stage in parallel] for parallel in grouped]
    per_level = [as_level(entry) for entry in device_mapping]
    is_like = [len(level) for level in per_level] == [len(level) for level in grouped]
    if not is_like or any(ipu < 0 for level in per_level for ipu in level):
        raise ValueError(
            f"device_mapping must have one number from 0 for each of the {num_stages} stages, and a list "
            f"of them for parallel stages; got {list(device_mapping)}."
        )
    highest = max(ipu for level in per_level for ipu in level)
    if highest > _MAX_IPU:
        raise ValueError(f"device_mapping: IPUs have numbers up to {_MAX_IPU}; got {highest}.")
    num_ipus = len({ipu for level in per_level for ipu in level})
    for level in per_level:
        if num_ipus > 1 and len(set(level)) < len(level):
            raise ValueError(
                "device_mapping: parallel stages run at the same time, so each needs an IPU of its own "
                f"(or all stages of the pipeline are on one); got {level}."
            )
    if len(grouped[-1]) > 1:
        grouped.append([_join])
        per_level.append(per_level[-1][:1])
    numbers = itertools.count()
    functions = [
        [entry.with_variables(number) if isinstance(entry, Stage) else entry for entry, number in numbered]
        for numbered in ([(entry, next(numbers)) for entry in parallel] for parallel in grouped)
    ]
    return functions, tuple(ipu for level in per_level for ipu in level)


def as_level(entry: Any) -> list[Any]:
    """An entry of a list of stages as a list of parallel ones."""
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _join(*args: Any, **kwargs: Any) -> Any:
    """What parallel stages at the end of a pipeline return."""
    return kwargs or args
