"""Leaves out caches of keys and values, which decoders of transformers return besides their results."""

from __future__ import annotations

import sys
from typing import Any

from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["leave_out_caches"]


def leave_out_caches(result: Any, trains: bool) -> Any:
    """Returns a model's results as transformers' models return them with `use_cache=False`."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or not isinstance(result, (dict, tuple)) or hasattr(result, "_fields"):
        return result
    kind = library.Cache
    parts = result.values() if isinstance(result, dict) else result
    if not any(isinstance(part, kind) for part in parts):
        return result
    if not trains:
        warn_once(
            "The model returns a cache of keys and values, which is left out, since what is "
            "compiled has one length. `model.config.use_cache = False` makes none."
        )
    if isinstance(result, dict):
        return type(result)(**{name: part for name, part in result.items() if not isinstance(part, kind)})
    return type(result)(part for part in result if not isinstance(part, kind))
