"""What a step leaves: brought together from the replicas, and from processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine.devices.crossing import move
from ipu_pipeline.engine.devices.device_groups import stack_replicas
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.state import Collected, Handed

__all__ = ["Left", "gather_outputs", "join_collected", "join_handed"]


class Left(NamedTuple):
    """What a replica collected and enqueued, per micro-batch or chunk."""

    collected: list[Collected]
    enqueued: list[Handed]


def gather_outputs(placement: StatePlacement, parts: Sequence[Left]) -> list[Left]:
    """Brings what replicas collected and enqueued to the process that has the first replica's leaf.

    Leaves whose replicas are in one process stay where they are.
    """
    first, tree = _flatten(parts[0])
    found = [parts[0]]
    for replica, part in enumerate(parts[1:], 1):
        leaves, _tree = _flatten(part)
        by_transfer: dict[Any, list[int]] = {}  # (source, target) -> numbers
        for place, (leaf, target) in enumerate(zip(leaves, first, strict=True)):
            by_transfer.setdefault((leaf.sharding, target.sharding), []).append(place)
        for number, ((source, target), places) in enumerate(by_transfer.items()):
            if _process(source) == _process(target):
                continue
            tag = placement.tag(f"outputs of replica {replica} ({number})")
            moved = move([leaves[place] for place in places], source, target, tag, is_kept=True)
            for place, leaf in zip(places, moved, strict=True):
                leaves[place] = leaf
        found.append(_unflatten(part, tree, leaves))
    return found


def _process(sharding: Any) -> int:
    """The process of a replica's group, whose devices are all in one."""
    return int(next(iter(sharding.device_set)).process_index)


def _flatten(part: Left) -> tuple[list[Any], Any]:
    handed = [(one.outputs, one.loss) for one in part.collected], [one.leaves for one in part.enqueued]
    return jax.tree.flatten(handed)


def _unflatten(part: Left, tree: Any, leaves: list[Any]) -> Left:
    collected, enqueued = jax.tree.unflatten(tree, leaves)
    return Left(
        [
            dataclasses.replace(one, outputs=outputs, loss=loss)
            for one, (outputs, loss) in zip(part.collected, collected, strict=True)
        ],
        [dataclasses.replace(one, leaves=own) for one, own in zip(part.enqueued, enqueued, strict=True)],
    )


def join_collected(parts: Sequence[Collected]) -> Collected:
    """Stacks what replicas collected together, with a leading axis for replicas if there are several."""
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
    """Stacks what replicas enqueued together, with a leading axis for replicas if there are several."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    leaves = [stack_replicas(leaves, axis) for leaves in zip(*(part.leaves for part in parts), strict=True)]
    return dataclasses.replace(parts[0], leaves=leaves)
