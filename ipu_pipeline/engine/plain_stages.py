"""Stages that are plain functions of parameters and inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from ipu_pipeline.engine import names
from ipu_pipeline.engine.shapes import as_shape
from ipu_pipeline.engine.stages import StageFunction
from ipu_pipeline.engine.variables import get_variable

__all__ = ["Stage"]


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
            with names.variable_scope(scope):
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
