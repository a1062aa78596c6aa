"""What a trace depends on beside the function and its arguments, kept so that more can be traced alike."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ipu_pipeline.engine.tracing.frames import ProgramNames

__all__ = ["Surroundings"]

Result = TypeVar("Result")

# JAX's settings that decide what is traced, each with what sets it within a block.
_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The surroundings of a trace.

    Attributes:
      context: the context variables, such as open scopes.
      names: the names of the program before the trace.
      settings: JAX's settings, which may hold for a `with` block and a thread only.
    """

    context: contextvars.Context
    names: ProgramNames
    settings: Mapping[str, Any]

    @staticmethod
    def now(names: ProgramNames) -> Surroundings:
        """The surroundings as they are now, with a copy of the program's names."""
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        return Surroundings(contextvars.copy_context(), names.copy(), settings)

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function in these surroundings, except for the names; what it changes of them is lost."""
        with contextlib.ExitStack() as changed:
            for name, value in self.settings.items():
                if getattr(jax.config, name) != value:
                    changed.enter_context(_SETTINGS[name](value))
            return self.context.copy().run(function, *arguments)
