"""TensorFlow-1-style pipelining for IPUs, on JAX: `import ipu_pipeline as ipu`."""

from ipu_pipeline import (
    config,
    errors,
    gradient_accumulation,
    ipu_compiler,
    ipu_infeed_queue,
    ipu_outfeed_queue,
    layers,
    loops,
    optimizers,
    pipelining_ops,
    scopes,
    utils,
)
from ipu_pipeline.engine.keys import next_rng_key
from ipu_pipeline.engine.names import variable_scope
from ipu_pipeline.engine.variables import assign, get_variable
from ipu_pipeline.operations import global_variables_initializer
from ipu_pipeline.placeholders import placeholder
from ipu_pipeline.session import Session

__version__ = "0.1.0"

__all__ = [
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
    "layers",
    "loops",
    "next_rng_key",
    "optimizers",
    "pipelining_ops",
    "placeholder",
    "scopes",
    "utils",
    "variable_scope",
]
