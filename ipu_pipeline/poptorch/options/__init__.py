"""The settings of a model besides its layers: options and strategies."""

from ipu_pipeline.poptorch.options.config_file import ConfigFileError
from ipu_pipeline.poptorch.options.options import Options
from ipu_pipeline.poptorch.options.tensor_locations import TensorLocationSettings

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings"]
