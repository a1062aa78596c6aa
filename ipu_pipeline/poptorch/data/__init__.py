"""Loading data, here or in another process."""

from ipu_pipeline.poptorch.data.accessor import AsynchronousDataAccessor
from ipu_pipeline.poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
