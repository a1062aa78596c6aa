"""What `Session.run` can be given to run."""

from __future__ import annotations

from typing import Any

import jax

from ipu_pipeline.graph.operations import InitializerOperation
from ipu_pipeline.program.program import Program
from ipu_pipeline.queues.infeed import InfeedOperation, IPUInfeedQueue
from ipu_pipeline.queues.outfeed import OutfeedOperation

__all__ = ["concerns_devices", "find_infeeds", "flatten_fetches"]


def flatten_fetches(fetch: Any) -> tuple[list[Any], Any]:
    """What is to be run, one after another, and its structure.

    Raises:
      TypeError: something there is nothing that can be run.
    """
    fetches, tree = jax.tree.flatten(fetch, is_leaf=lambda node: not isinstance(node, (list, tuple)))
    for one in fetches:
        if not isinstance(one, (Program, InfeedOperation, OutfeedOperation, InitializerOperation)):
            raise TypeError(
                "Session.run: fetch must be a compiled program, an infeed's initializer, what an "
                "outfeed's dequeue() returned, global_variables_initializer(), or a list or dict of "
                f"them; got {type(one).__name__}."
            )
    return fetches, tree


def find_infeeds(fetch: Any) -> list[IPUInfeedQueue]:
    """The infeeds of all programs of it."""
    if isinstance(fetch, dict):
        fetch = list(fetch.values())
    if isinstance(fetch, (list, tuple)):
        return [infeed for one in fetch for infeed in find_infeeds(one)]
    return list(fetch.infeeds) if isinstance(fetch, Program) else []


def concerns_devices(fetch: Any) -> bool:
    """Whether something of it runs on devices; queues alone do not."""
    if isinstance(fetch, dict):
        return any(map(concerns_devices, fetch.values()))
    if isinstance(fetch, (list, tuple)):
        return any(map(concerns_devices, fetch))
    return not isinstance(fetch, (InfeedOperation, OutfeedOperation))
