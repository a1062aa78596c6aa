"""Infeeds: `IPUInfeedQueue`."""

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.queues.infeed import InfeedOperation, IPUInfeedQueue

__all__ = ["IPUInfeedQueue", "InfeedOperation"]

explain_missing(__name__)
