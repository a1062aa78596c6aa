"""Loading of data, in this process or in another one."""

from ipu_pipeline.poptorch.data.loader import DataLoader
from ipu_pipeline.poptorch.data.loading_process import AsynchronousDataAccessor

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
