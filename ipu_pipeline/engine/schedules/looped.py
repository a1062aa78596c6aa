"""The Looped schedule: each device has several stages; micro-batches go around the devices several times.

With p devices, stage i is on device i mod p. Groups of micro-batches go once around the devices, then
again, up to the last stages, and back in the same way. Device r does its first 2(p-r-1) + (v-1)g forwards
and then alternates forwards and backwards, where v is the number of its stages and g the size of a group.
If each stage takes 1/v of F and B, the bubble per step is (p-1)(F+B)/v, 1/v of Interleaved's, and a device
holds up to 2(p-r-1) + (v-1)g + 1 stage activations.

There are as many groups of at least p micro-batches as possible, whose sizes differ by at most one: g is p
if p divides the number of micro-batches. With m < p micro-batches, the bubble is (v-1)(p-m)(F+B)/v longer.

Source: the interleaved schedule of Megatron (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters", 2021, arXiv 2104.04473), which needs a multiple of p.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ipu_pipeline.engine.schedules.actions import Action, ActionKind, Rows, ScheduleError

__all__ = ["check_looped", "looped", "make_groups", "take_in_groups"]


def looped(
    num_stages: int,
    num_micro_batches: int,
    device_mapping: Sequence[int],
    training: bool = True,
    levels: Sequence[int] | None = None,
) -> Rows:
    """Returns the rows of the Looped schedule. Arguments and result are those of `grouped`.

    Example:
      >>> print(schedules.format_rows(schedules.looped(4, 2, device_mapping=[0, 1, 0, 1])))
      device 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
      device 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1

    Raises:
      ScheduleError: device_mapping does not go around, such as [0, 1, 0, 1], or some stages are parallel.
    """
    check_looped("Looped", num_stages, device_mapping, levels)
    num_ipus = max(device_mapping) + 1
    num_turns, groups = num_stages // num_ipus, make_groups(num_micro_batches, num_ipus)
    rows = []
    for ipu in range(num_ipus):
        own = range(ipu, num_stages, num_ipus)
        forwards = take_in_groups(ActionKind.FORWARD, own, groups)
        if not training:
            rows.append(tuple(forwards))
            continue
        backwards = take_in_groups(ActionKind.BACKWARD, own[::-1], groups)
        num_first = 2 * (num_ipus - ipu - 1) + (num_turns - 1) * len(groups[0])
        first, then = forwards[:num_first], forwards[num_first:]
        in_turn = itertools.chain.from_iterable(zip(then, backwards, strict=False))
        rows.append((*first, *in_turn, *backwards[len(then) :]))
    if training:
        rows[-1] = _beside_each_other(rows[-1], num_stages - 1)
    return tuple(rows)


def _beside_each_other(row: Sequence[Action], stage: int) -> tuple[Action, ...]:
    """Moves forwards of the last stage right before its backwards, as the engine does both at once."""
    found: list[Action] = []
    for action in row:
        if action.stage != stage:
            found.append(action)
        elif action.kind is ActionKind.BACKWARD:
            found += [action._replace(kind=ActionKind.FORWARD), action]
    return tuple(found)


def check_looped(
    name: str, num_stages: int, device_mapping: Sequence[int], levels: Sequence[int] | None
) -> None:
    """Raises a ScheduleError if the mapping does not go around the devices, or some stages are parallel."""
    num_ipus = max(device_mapping) + 1
    around = [stage % num_ipus for stage in range(num_stages)]
    if list(device_mapping) != around or num_stages % num_ipus or num_stages == num_ipus:
        raise ScheduleError(
            f"Schedule: {name} needs a device_mapping that goes around the devices several times, such as "
            f"[0, 1, 0, 1] for four stages on two devices; got {list(device_mapping)}. With one stage per "
            "device, take Interleaved or ZeroBubble."
        )
    if levels is not None and len(set(levels)) < num_stages:
        raise ScheduleError(
            f"Schedule: {name} has no parallel stages; got levels {list(levels)}. Take Grouped, "
            "Interleaved or ZeroBubble."
        )


def make_groups(count: int, size: int) -> list[range]:
    """Groups of at least `size` micro-batches, as equal as possible; the larger ones first."""
    number = max(1, count // size)
    ends = [0, *itertools.accumulate(count // number + (n < count % number) for n in range(number))]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def take_in_groups(kind: ActionKind, stages: Iterable[int], groups: Sequence[range]) -> list[Action]:
    """The actions of one kind in the order in which a device takes them: group by group, stage by stage."""
    return [Action(kind, stage, number) for group in groups for stage in stages for number in group]
