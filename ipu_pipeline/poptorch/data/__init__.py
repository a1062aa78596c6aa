"""Loading data: batches for all of a call's micro-batches, made here or in another process."""

from ipu_pipeline.poptorch.data.accessor import AsynchronousDataAccessor
from ipu_pipeline.poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
