"""Outfeeds: `IPUOutfeedQueue` and its modes."""

from ipu_pipeline.queues.outfeed import IPUOutfeedMode, IPUOutfeedQueue, OutfeedOperation

__all__ = ["IPUOutfeedMode", "IPUOutfeedQueue", "OutfeedOperation"]
