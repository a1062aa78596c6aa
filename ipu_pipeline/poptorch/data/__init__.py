"""Loading of data, in this process or in another one."""

from ipu_pipeline.poptorch.data.accessor import AsynchronousDataAccessor
from ipu_pipeline.poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
