"""TensorFlow-1-style pipelining for IPUs, on JAX: `import ipu_pipeline as ipu`.

Modules are imported when they are first used, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipu_pipeline import (
        config,
        errors,
        gradient_accumulation,
        ipu_compiler,
        ipu_infeed_queue,
        ipu_outfeed_queue,
        ipu_pipeline_estimator,
        ipu_run_config,
        ipu_session_run_hooks,
        layers,
        loops,
        optimizers,
        pipelining_ops,
        scopes,
        utils,
    )
    from ipu_pipeline.config import set_num_devices
    from ipu_pipeline.engine.tracing.keys import next_rng_key
    from ipu_pipeline.engine.tracing.scopes import variable_scope
    from ipu_pipeline.engine.tracing.variables import assign, get_variable
    from ipu_pipeline.estimator.programs import ModeKeys
    from ipu_pipeline.graph.operations import global_variables_initializer
    from ipu_pipeline.graph.placeholders import placeholder
    from ipu_pipeline.session.loaded_program import load_program
    from ipu_pipeline.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "ModeKeys",
    "Session",
    "__version__",
    "assign",
    "config",
    "errors",
    "get_variable",
    "global_variables_initializer",
    "gradient_accumulation",
    "ipu_compiler",
    "ipu_infeed_queue",
    "ipu_outfeed_queue",
    "ipu_pipeline_estimator",
    "ipu_run_config",
    "ipu_session_run_hooks",
    "layers",
    "load_program",
    "loops",
    "next_rng_key",
    "optimizers",
    "pipelining_ops",
    "placeholder",
    "scopes",
    "set_num_devices",
    "utils",
    "variable_scope",
]

_HOMES = {  # of what is not a module itself
    "ModeKeys": "estimator.programs",
    "Session": "session.session",
    "assign": "engine.tracing.variables",
    "get_variable": "engine.tracing.variables",
    "global_variables_initializer": "graph.operations",
    "load_program": "session.loaded_program",
    "next_rng_key": "engine.tracing.keys",
    "placeholder": "graph.placeholders",
    "set_num_devices": "config",
    "variable_scope": "engine.tracing.scopes",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    return importlib.import_module(f"{__name__}.{name}")  # which enters it here


def __dir__() -> list[str]:
    return sorted(__all__)
