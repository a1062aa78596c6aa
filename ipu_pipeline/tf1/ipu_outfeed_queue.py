"""Outfeeds: `IPUOutfeedQueue` and its modes."""

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.queues.outfeed import IPUOutfeedMode, IPUOutfeedQueue, OutfeedOperation

__all__ = ["IPUOutfeedMode", "IPUOutfeedQueue", "OutfeedOperation"]

explain_missing(__name__)
