"""The stages as a user gives them: functions, `Stage`s, lists of parallel stages; and their devices."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine.tracing import scopes
from ipu_pipeline.engine.tracing.model_stages import ModelStage
from ipu_pipeline.engine.tracing.stage_parameters import (
    Layout,
    Leaf,
    ModelParameters,
    StageParameters,
    check_length,
    check_names,
    find_shapes,
    is_maker,
    make_layout,
    parts,
)
from ipu_pipeline.engine.tracing.stages import StageFunction, as_arguments
from ipu_pipeline.engine.tracing.variables import get_variable
from ipu_pipeline.ground.checks import is_integer, name_of

_MAX_IPU = 2**16 - 1  # more than any system has; every device has a row in the schedule

Mapping: TypeAlias = "Sequence[int | Sequence[int]]"


class Stage:
    """A stage as a plain function of parameters and inputs, without `get_variable`.

    Example:
      >>> stage = engine.Stage(lambda w, x: x @ w, np.ones([4, 2], np.float32), name="project")
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 4], np.float32))
      >>> pipeline.variables
      {'project/parameter': project/parameter: float32[4, 2]}
    """

    def __init__(self, function: Callable[..., Any], parameters: Any, name: str | None = None) -> None:
        """Wraps the function.

        Args:
          function: `function(parameters, *inputs) -> outputs`.
          parameters: a pytree of arrays, the initial values; parts or all of it may be `Shared` with other
            stages. Or a function from a random key to such a pytree; or its shapes
            (`jax.ShapeDtypeStruct`), with which `Pipeline.init` is not possible. Integers and booleans are
            not trained.
          name: the scope of its variables, one per leaf, named by the leaf's path. None: `stage<index>`.
        """
        self.function = function
        self.parameters = parameters
        self.name = name
        self.__name__ = name or name_of(function)

    @property
    def makes_parameters(self) -> bool:
        """Whether its parameters are a function of a random key."""
        return is_maker(self.parameters)

    def layout(self, index: int) -> Layout:
        """The variables that its parameters become.

        Raises:
          ValueError: see `make_layout`.
        """
        label = f"parameters of stage {index} ({self.__name__})"
        return make_layout(find_shapes(self.parameters, label), self.name or f"stage{index}", label)

    def with_variables(self, layout: Layout, shared: set[str]) -> StageFunction:
        """Makes the stage a function whose parameters are variables.

        Args:
          layout: the layout of the parameters.
          shared: names of shared variables that earlier stages have; the stage's own are added.
        """
        # JAX's caches keep an initializer for long; they should not keep a model's weights with it.
        reference = weakref.ref(self)
        makers = list(map(is_maker, parts(self.parameters)))

        def initializer(leaf: Leaf) -> Any:
            number, inner_number = leaf.place

            def initialize(key: Any, shape: Any, dtype: Any) -> Any:
                del shape, dtype  # they are the leaf's
                stage = reference()
                assert stage is not None
                part = parts(stage.parameters(key) if stage.makes_parameters else stage.parameters)[number]
                value = jax.tree.leaves(part(key) if is_maker(part) else part)[inner_number]
                if isinstance(value, jax.ShapeDtypeStruct):
                    raise ValueError(
                        f"{layout.label}{leaf.path} must be an array to start from; got a "
                        "ShapeDtypeStruct. Give arrays, or use a state that another pipeline made."
                    )
                return value

            needs_key = self.makes_parameters or makers[number]
            initialize.needs_key = needs_key  # type: ignore[attr-defined]  # see initial_value
            return initialize

        is_reused = []
        for leaf in layout.leaves:
            is_reused.append(leaf.shared is not None and leaf.name in shared)
            if leaf.shared is not None:
                shared.add(leaf.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = []
            for leaf, own_reuse in zip(layout.leaves, is_reused, strict=True):
                with scopes.absolute_scope("", reuse=own_reuse):
                    shape = leaf.shape
                    leaves.append(get_variable(leaf.name, shape.shape, shape.dtype, initializer(leaf)))
            return self.function(jax.tree.unflatten(layout.tree, leaves), *args, **kwargs)

        call.__name__ = str(self.__name__)
        call_after_parameters(call, self.function)
        return call


StageEntry: TypeAlias = StageFunction | Stage


def call_after_parameters(call: Any, function: Callable[..., Any]) -> None:
    """Sets the signature of `call`, for errors: that of `function` without its parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a Python signature
        return
    names = list(signature.parameters.values())
    if names and names[0].kind in (names[0].POSITIONAL_ONLY, names[0].POSITIONAL_OR_KEYWORD):
        call.__signature__ = signature.replace(parameters=names[1:])
        call.takes_parameters = True


class _StageOfLayers(Stage):
    """A stage of layers of which each has its own parameters; the stage's are the list of them."""

    def __init__(self, layers: Sequence[StageEntry]) -> None:
        """Takes the layers: `Stage`s with names, and functions, whose parameters are None."""
        self._layers = layers
        super().__init__(self._call, None, "-".join(map(_name_of, layers)))
        self.parameters = self._make if self.makes_parameters else list(map(_own_parameters, layers))

    @property
    def makes_parameters(self) -> bool:
        """Whether a layer's parameters are a function of a random key."""
        return any(isinstance(layer, Stage) and layer.makes_parameters for layer in self._layers)

    def _make(self, key: Any) -> list[Any]:
        return [
            layer.parameters(key) if isinstance(layer, Stage) and layer.makes_parameters else parameters
            for layer, parameters in zip(self._layers, map(_own_parameters, self._layers), strict=True)
        ]

    def _call(self, parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        functions = [
            functools.partial(layer.function, layer_parameters) if isinstance(layer, Stage) else layer
            for layer, layer_parameters in zip(self._layers, parameters, strict=True)
        ]
        return _chain(functions, args, kwargs)

    def layout(self, index: int) -> Layout:
        """The variables of the layers, by names that do not depend on the stage."""
        leaves: list[Leaf] = []
        trees = []
        for number, layer in enumerate(self._layers):
            part = layer.layout(index) if isinstance(layer, Stage) else None
            if part is not None:
                leaves += [dataclasses.replace(leaf, path=f"[{number}]{leaf.path}") for leaf in part.leaves]
            trees.append(None if part is None else part.tree.unflatten([0] * part.tree.num_leaves))
        label = f"parameters of stage {index} ({self.__name__})"
        return Layout(leaves, jax.tree.structure(trees), label)

    def with_variables(self, layout: Layout, shared: set[str]) -> StageFunction:
        """Makes each layer a function whose parameters are variables, and calls these in order."""
        del layout  # each layer has its own
        functions = [
            layer.with_variables(layer.layout(0), shared) if isinstance(layer, Stage) else layer
            for layer in self._layers
        ]

        def call(*args: Any, **kwargs: Any) -> Any:
            return _chain(functions, args, kwargs)

        vars(call)["layers"] = self._layers  # whose initializers refer to them weakly
        call.__name__ = str(self.__name__)
        return call


def _name_of(layer: StageEntry) -> str:
    return str(layer.__name__) if isinstance(layer, Stage) else name_of(layer)


def _own_parameters(layer: StageEntry) -> Any:
    return layer.parameters if isinstance(layer, Stage) else None


def _chain(functions: Sequence[StageFunction], args: Any, kwargs: Any) -> Any:
    """Calls functions one after another, each with what the one before returns."""
    for function in functions:
        result = function(*args, **kwargs)
        args, kwargs = as_arguments(result)
    return result


def join_layers(layers: Sequence[StageEntry]) -> StageEntry:
    """Makes one stage of layers that come one after another. Its name has theirs."""
    if len(layers) == 1:
        return layers[0]
    if any(isinstance(layer, Stage) for layer in layers):
        return _StageOfLayers(layers)
    functions = [layer for layer in layers if not isinstance(layer, Stage)]

    def stage(*args: Any, **kwargs: Any) -> Any:
        return _chain(functions, args, kwargs)

    stage.__name__ = stage.__qualname__ = "-".join(map(name_of, functions))
    return stage


def flatten_stages(
    stages: Sequence[StageEntry | Sequence[StageEntry]],
    device_mapping: Mapping | None,
    parameters: Sequence[Any] | None = None,
) -> tuple[list[list[StageFunction]], tuple[int, ...], StageParameters | ModelParameters]:
    """Flattens stages into stage functions level by level, the device of each stage, and their parameters.

    Parallel stages at the end are followed by a stage on the first one's device that only joins their
    results, since the loss belongs to a single stage.
    """
    if parameters is not None and isinstance(stages, (list, tuple)):
        stages = with_parameters(stages, parameters, "stages", "parameters")
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"stages must be a list of functions or Stages; got {type(stages).__name__}.")
    grouped = [as_level(entry) for entry in stages]
    if not grouped or not all(grouped):
        kind = "a list of parallel stages" if grouped else "stages"
        raise ValueError(f"stages: {kind} must have at least one function; got none.")
    num_stages = sum(map(len, grouped))
    numbers = itertools.count()
    if device_mapping is None:
        device_mapping = [[next(numbers) for _stage in parallel] for parallel in grouped]
    per_level = [as_level(entry) for entry in device_mapping] if np.iterable(device_mapping) else []
    is_like = [len(level) for level in per_level] == [len(level) for level in grouped]
    if not is_like or not all(is_integer(ipu, 0) for level in per_level for ipu in level):
        mapping = list(device_mapping) if np.iterable(device_mapping) else device_mapping
        raise ValueError(
            f"device_mapping must have one number from 0 for each of the {num_stages} stages, and a list "
            f"of them for parallel stages; got {mapping}."
        )
    highest = max(ipu for level in per_level for ipu in level)
    if highest > _MAX_IPU:
        raise ValueError(f"device_mapping: devices have numbers up to {_MAX_IPU}; got {highest}.")
    num_ipus = len({ipu for level in per_level for ipu in level})
    for level in per_level:
        if num_ipus > 1 and len(set(level)) < len(level):
            raise ValueError(
                "device_mapping: parallel stages run at the same time, so each needs a device of its own "
                f"(or all stages of the pipeline are on one); got {level}."
            )
    numbers = itertools.count()
    layouts = [
        [
            entry.layout(number) if isinstance(entry, Stage) else None
            for entry, number in zip(level, numbers, strict=False)
        ]
        for level in grouped
    ]
    pairs = [pair for level in zip(layouts, grouped, strict=True) for pair in zip(*level, strict=True)]
    check_names((layout, _known_shapes(stage)) for layout, stage in pairs if layout is not None)
    of_stages = _find_parameters(stages, layouts)
    shared: set[str] = set()
    in_order = iter(
        stage if layout is None else stage.with_variables(layout, shared) for layout, stage in pairs
    )
    functions = [[next(in_order) for _stage in level] for level in grouped]
    if len(grouped[-1]) > 1:
        functions.append([_join])
        per_level.append(per_level[-1][:1])
    return functions, tuple(ipu for level in per_level for ipu in level), of_stages


def _find_parameters(
    stages: Sequence[Any], layouts: Sequence[Sequence[Layout | None]]
) -> StageParameters | ModelParameters:
    models = [entry.graph.parameters if isinstance(entry, ModelStage) else None for entry in stages]
    if models[0] is not None and len({id(getattr(entry, "graph", entry)) for entry in stages}) == 1:
        return models[0]
    return StageParameters(
        [
            level if isinstance(entry, (list, tuple)) else model or level[0]
            for entry, model, level in zip(stages, models, layouts, strict=True)
        ]
    )


def as_level(entry: Any) -> list[Any]:
    """Makes an entry of a list of stages a list of parallel stages."""
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def with_parameters(stages: Any, parameters: Any, argument: str, parameters_argument: str) -> list[Any]:
    """Makes `Stage`s of functions and their parameters."""
    check_length(parameters_argument, parameters, len(stages))
    entries: list[Any] = []
    for number, (entry, pytree) in enumerate(zip(stages, parameters, strict=True)):
        names = f"{argument}[{number}]", f"{parameters_argument}[{number}]"
        if isinstance(entry, (list, tuple)):
            entries.append(with_parameters(entry, pytree, *names))
        elif isinstance(entry, Stage):
            raise ValueError(
                f"{names[0]} is a Stage, which has parameters of its own, but parameters were given, too. "
                "Give the functions of all stages and parameters=, or Stages and no parameters."
            )
        else:
            entries.append(Stage(entry, pytree))
    return entries


def _known_shapes(stage: Stage) -> Any:
    return None if stage.makes_parameters else find_shapes(stage.parameters, "parameters")


def _join(*args: Any, **kwargs: Any) -> Any:
    """Joins the results of parallel stages at the end of a pipeline."""
    return kwargs or args
