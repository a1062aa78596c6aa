"""TensorFlow-1-style pipelining for IPUs, on JAX: `import ipu_pipeline as ipu`.

Modules are imported when they are first used, so that importing the package takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipu_pipeline.graphcore import sdk_names
from ipu_pipeline.ground import lazy_initialization
from ipu_pipeline.ground.lazy_initialization import import_later

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
    from ipu_pipeline.processes.device_selection import set_num_devices
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
    from ipu_pipeline.tf1.graph import get_global_step, global_variables_initializer, placeholder
    from ipu_pipeline.tf1.layers.base import mixed_precision
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
    from ipu_pipeline.tf1.program.program import global_variables, trainable_variables
    from ipu_pipeline.tf1.session.exported_programs import load_program
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

_find, _names = import_later(
    __name__,
    {
        "engine.tracing.stage_markers": "next_rng_key",
        "engine.tracing.side_outputs": "metric",
        "engine.tracing.variables": (
            "AUTO_REUSE assign assign_add assign_sub get_variable get_variable_scope variable_scope"
        ),
        "processes.device_selection": "set_num_devices",
        "tf1.estimator.programs": "ModeKeys",
        "tf1.estimator.summaries": "SummaryWriter",
        "tf1.estimator.train_and_evaluate": "EvalSpec TrainSpec train_and_evaluate",
        "tf1.graph": "get_global_step global_variables_initializer placeholder",
        "tf1.layers.base": "mixed_precision",
        "tf1.ops.functional_ops": "outlined_function",
        "tf1.program.program": "global_variables trainable_variables",
        "tf1.session.exported_programs": "load_program",
        "tf1.session.saver": "Saver latest_checkpoint",
        "tf1.session.session": "Session",
    },
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        return sdk_names.find_attribute(__name__, name)
    return _find(name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _follow_environment() -> None:
    """Does what environment variables ask for, however a program calls the package."""
    from ipu_pipeline.processes.executable_cache import enable_executable_cache_of_environment
    from ipu_pipeline.reports.trace_capture import start_automatic_report

    enable_executable_cache_of_environment()
    start_automatic_report()


sdk_names.install()
lazy_initialization.before_first_run(_follow_environment)
