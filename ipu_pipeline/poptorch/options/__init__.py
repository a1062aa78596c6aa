"""The settings of a model besides its layers: options and strategies."""

from ipu_pipeline.poptorch.options.inner_groups import TensorLocationSettings
from ipu_pipeline.poptorch.options.option_texts import ConfigFileError
from ipu_pipeline.poptorch.options.options import Options

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings"]
