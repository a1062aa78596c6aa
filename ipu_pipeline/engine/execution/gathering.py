"""What replicas collect: joined, and of several processes brought to that of the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ipu_pipeline.engine.devices.crossing import move
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import stack_replicas
from ipu_pipeline.engine.execution.outputs import Accumulated
from ipu_pipeline.engine.state import Collected, Handed

__all__ = ["gather_outputs", "join_collected", "join_handed"]


def gather_outputs(residence: Residence, parts: Sequence[Accumulated]) -> list[Accumulated]:
    """What replicas collected and enqueued, each leaf in one process: that of the first replica's.

    Leaves whose replicas are in one process stay where they are.
    """
    if not residence.has_peers:
        return list(parts)
    first, tree = _flatten(parts[0])
    found: list[Accumulated] = [parts[0]]
    for replica, part in enumerate(parts[1:], 1):
        leaves, _tree = _flatten(part)
        groups: dict[Any, list[int]] = {}  # by where from and where to
        for place, (leaf, target) in enumerate(zip(leaves, first, strict=True)):
            groups.setdefault((leaf.sharding, target.sharding), []).append(place)
        for number, ((source, target), places) in enumerate(groups.items()):
            if _process(source) == _process(target):
                continue
            tag = residence.tag(f"outputs of replica {replica} ({number})")
            moved = move([leaves[place] for place in places], source, target, tag, is_kept=True)
            for place, leaf in zip(places, moved, strict=True):
                leaves[place] = leaf
        collected, enqueued = _unflatten(part, tree, leaves)
        found.append(dataclasses.replace(part, collected=collected, enqueued=enqueued))
    return found


def _process(sharding: Any) -> int:
    """That of the devices of a replica's row, which are in one process."""
    return int(next(iter(sharding.device_set)).process_index)


def _flatten(part: Accumulated) -> tuple[list[Any], Any]:
    handed = [(one.outputs, one.loss) for one in part.collected], [one.leaves for one in part.enqueued]
    return jax.tree.flatten(handed)


def _unflatten(part: Accumulated, tree: Any, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    collected, enqueued = jax.tree.unflatten(tree, leaves)
    return (
        [
            dataclasses.replace(one, outputs=outputs, loss=loss)
            for one, (outputs, loss) in zip(part.collected, collected, strict=True)
        ],
        [dataclasses.replace(one, leaves=own) for one, own in zip(part.enqueued, enqueued, strict=True)],
    )


def join_collected(parts: Sequence[Collected]) -> Collected:
    """What several replicas collected at once, with an axis for them in front; of one, as it is."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    outputs = [
        stack_replicas(leaves, axis) for leaves in zip(*(part.outputs for part in parts), strict=True)
    ]
    losses = [part.loss for part in parts]
    loss = None if losses[0] is None else stack_replicas(losses, axis)
    return dataclasses.replace(parts[0], outputs=outputs, loss=loss)


def join_handed(parts: Sequence[Handed]) -> Handed:
    """What several replicas enqueued at once, likewise."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    leaves = [stack_replicas(leaves, axis) for leaves in zip(*(part.leaves for part in parts), strict=True)]
    return dataclasses.replace(parts[0], leaves=leaves)
