"""TensorFlow-1-style pipelining for IPUs, on JAX: `import ipu_pipeline as ipu`.

Modules are imported when they are first used, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ipu_pipeline.graphcore import importing
from ipu_pipeline.ground import first_run

if TYPE_CHECKING:
    from ipu_pipeline import ray, reports
    from ipu_pipeline.data import datasets as datasets
    from ipu_pipeline.engine import (
        AUTO_REUSE,
        assign,
        assign_add,
        assign_sub,
        get_variable,
        get_variable_scope,
        metric,
        next_rng_key,
        variable_scope,
    )
    from ipu_pipeline.ground import errors
    from ipu_pipeline.processes.selection import set_num_devices
    from ipu_pipeline.tf1 import (
        config,
        distributed,
        gradient_accumulation,
        ipu_compiler,
        ipu_estimator,
        ipu_infeed_queue,
        ipu_outfeed_queue,
        ipu_pipeline_estimator,
        ipu_run_config,
        ipu_session_run_hooks,
        layers,
        loops,
        metrics,
        ops,
        optimizers,
        popdist,
        scopes,
        serving,
        utils,
    )
    from ipu_pipeline.tf1.estimator.programs import ModeKeys
    from ipu_pipeline.tf1.estimator.summaries import SummaryWriter
    from ipu_pipeline.tf1.estimator.train_and_evaluate import EvalSpec, TrainSpec, train_and_evaluate
    from ipu_pipeline.tf1.graph.operations import global_variables_initializer
    from ipu_pipeline.tf1.graph.placeholders import placeholder
    from ipu_pipeline.tf1.graph.symbols import get_global_step
    from ipu_pipeline.tf1.layers.policies import mixed_precision
    from ipu_pipeline.tf1.ops import (
        cross_replica_ops,
        embedding_ops,
        functional_ops,
        nn_ops,
        normalization_ops,
        pipelining_ops,
        rand_ops,
        replication_ops,
        rnn_ops,
    )
    from ipu_pipeline.tf1.ops.functional_ops import outlined_function
    from ipu_pipeline.tf1.program.registry import global_variables, trainable_variables
    from ipu_pipeline.tf1.session.loaded_program import load_program
    from ipu_pipeline.tf1.session.saver import Saver, latest_checkpoint
    from ipu_pipeline.tf1.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "AUTO_REUSE",
    "EvalSpec",
    "ModeKeys",
    "Saver",
    "Session",
    "SummaryWriter",
    "TrainSpec",
    "__version__",
    "assign",
    "assign_add",
    "assign_sub",
    "config",
    "cross_replica_ops",
    "distributed",
    "embedding_ops",
    "errors",
    "functional_ops",
    "get_global_step",
    "get_variable",
    "get_variable_scope",
    "global_variables",
    "global_variables_initializer",
    "gradient_accumulation",
    "ipu_compiler",
    "ipu_estimator",
    "ipu_infeed_queue",
    "ipu_outfeed_queue",
    "ipu_pipeline_estimator",
    "ipu_run_config",
    "ipu_session_run_hooks",
    "latest_checkpoint",
    "layers",
    "load_program",
    "loops",
    "metric",
    "metrics",
    "mixed_precision",
    "next_rng_key",
    "nn_ops",
    "normalization_ops",
    "ops",
    "optimizers",
    "outlined_function",
    "pipelining_ops",
    "placeholder",
    "popdist",
    "rand_ops",
    "ray",
    "replication_ops",
    "reports",
    "rnn_ops",
    "scopes",
    "serving",
    "set_num_devices",
    "train_and_evaluate",
    "trainable_variables",
    "utils",
    "variable_scope",
]

_HOMES = {  # the modules of names that are not modules themselves
    "trainable_variables": "tf1.program.registry",
    "outlined_function": "tf1.ops.functional_ops",
    "latest_checkpoint": "tf1.session.saver",
    "global_variables": "tf1.program.registry",
    "Saver": "tf1.session.saver",
    "AUTO_REUSE": "engine.tracing.variable_scopes",
    "EvalSpec": "tf1.estimator.train_and_evaluate",
    "ModeKeys": "tf1.estimator.programs",
    "TrainSpec": "tf1.estimator.train_and_evaluate",
    "train_and_evaluate": "tf1.estimator.train_and_evaluate",
    "Session": "tf1.session.session",
    "SummaryWriter": "tf1.estimator.summaries",
    "assign": "engine.tracing.variables",
    "assign_add": "engine.tracing.variables",
    "assign_sub": "engine.tracing.variables",
    "get_global_step": "tf1.graph.symbols",
    "get_variable": "engine.tracing.variables",
    "get_variable_scope": "engine.tracing.variable_scopes",
    "global_variables_initializer": "tf1.graph.operations",
    "load_program": "tf1.session.loaded_program",
    "metric": "engine.tracing.metrics",
    "mixed_precision": "tf1.layers.policies",
    "next_rng_key": "engine.tracing.keys",
    "placeholder": "tf1.graph.placeholders",
    "set_num_devices": "processes.selection",
    "variable_scope": "engine.tracing.variable_scopes",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        return importing.find_attribute(__name__, name)
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    return importlib.import_module(f"{__name__}.{name}")  # the import sets the attribute


def __dir__() -> list[str]:
    return sorted(__all__)


def _follow_environment() -> None:
    """Does what environment variables ask for, however a program calls the package."""
    from ipu_pipeline.processes.executable_cache import enable_executable_cache_of_environment
    from ipu_pipeline.reports.capturing import start_automatic_report

    enable_executable_cache_of_environment()
    start_automatic_report()


importing.install()
first_run.before_first_run(_follow_environment)
