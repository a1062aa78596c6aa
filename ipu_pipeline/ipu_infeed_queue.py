"""Infeeds: `IPUInfeedQueue`."""

from ipu_pipeline.queues.infeed import InfeedOperation, IPUInfeedQueue

__all__ = ["IPUInfeedQueue", "InfeedOperation"]
