"""Names that programs import from PopTorch's private module of this name."""

from ipu_pipeline.poptorch.execution.executor import PoplarExecutor
from ipu_pipeline.poptorch.graphs.capture import Substitutions as _OverwriteContextManager

__all__ = ["PoplarExecutor", "_OverwriteContextManager"]
