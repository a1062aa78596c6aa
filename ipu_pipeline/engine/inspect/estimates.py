"""Estimates before anything is compiled: costs of layers, and how long devices wait. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect.facts import LayerFacts, StageDetails
from ipu_pipeline.engine.planning.memory_records import IpuMemory
from ipu_pipeline.engine.schedules.scenarios import Costs, Layer, Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.timetables import ActionKind, Timetable

# Costs of layers: a stage's time is divided by its layers' operations, its update and memory by their
# bytes.


def find_layer_costs(
    layers: Sequence[Sequence[LayerFacts]],
    costs: Costs,
    held_bytes: Sequence[int],
    device_mapping: Sequence[int],
    memory: Sequence[IpuMemory] = (),
) -> tuple[tuple[Layer, ...], ...]:
    """Finds the costs of each stage's layers, for `Scenario.layers`.

    Args:
      layers: the layers of each stage, in order.
      costs: the costs of the stages.
      held_bytes: the bytes that each stage holds per micro-batch.
      device_mapping: the device of each stage.
      memory: the planned memory of the devices. Optimizer state and accumulators count with their
        variables.

    Returns:
      The layers of each stage; empty if the operations of a layer are not known, as in older profiles, or
      if no stage has layers.
    """
    all_layers = [layer for stage_layers in layers for layer in stage_layers]
    if not all_layers or any(layer.operations is None for layer in all_layers):
        return ()
    plans = {plan.ipu: plan for plan in memory}
    layer_costs = []
    for stage, stage_layers in enumerate(layers):
        total = sum(layer.operations or 0.0 for layer in stage_layers)
        num_bytes = sum(layer.num_bytes for layer in stage_layers)
        plan, per_byte = plans.get(device_mapping[stage]), 1.0
        if plan is not None and plan.num_variable_bytes:
            with_state = plan.num_variable_bytes + plan.num_optimizer_bytes + plan.num_accumulator_bytes
            per_byte = with_state / plan.num_variable_bytes
        layer_costs.append(
            tuple(
                Layer(
                    layer.name or "variables outside of scopes",
                    share * costs.forward[stage],
                    share * costs.backward[stage],
                    round(per_byte * layer.num_bytes),
                    round(share * held_bytes[stage]),
                    layer.num_bytes / num_bytes * costs.update[stage] if num_bytes else 0.0,
                )
                for layer in stage_layers
                for share in [(layer.operations or 0.0) / total if total else 0.0]
            )
        )
    return tuple(layer_costs)


# The bubble: simulated as if every action took as long as its operations suggest, on a device of its own,
# and counted in time-steps of the schedule. For N stages on N devices and G micro-batches the latter
# gives (N-1)/(G+N-1) for Grouped and Interleaved.

_MAX_SIMULATED = 2**15  # actions; with more, those in the middle are taken to be equally long


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which devices wait for each other.

    Attributes:
      share: the share, simulated from the stages' operations, if each device has its own cores; None if
        there are no operations.
      lock_step_share: the share of the schedule's time-steps, as if all forwards and backwards took equally
        long.
      longest_ipu: the busiest device.
      longest_share: its share of all operations; None if there are no operations.
    """

    share: float | None
    lock_step_share: float
    longest_ipu: int
    longest_share: float | None


def estimate_bubble(
    stages: Sequence[StageDetails],
    make_timetable: Callable[[int], Timetable],
    count: int,
    repeats: bool,
) -> Bubble | None:
    """Estimates how much of a step devices wait; None if all stages are on one device.

    The step has `count` micro-batches, or chunks of them. If the schedule `repeats` itself in a long step,
    the length is found from a shorter one.
    """
    ipus = sorted({stage.ipu for stage in stages})
    if len(ipus) == 1:
        return None
    timetable = make_timetable(count)
    num_slots = len(ipus) * timetable.num_time_steps
    of_ipu = {ipu: sum(stage.num_flop for stage in stages if stage.ipu == ipu) for ipu in ipus}
    total = sum(of_ipu.values())
    length = _estimate_length(stages, make_timetable, count, repeats) if total else None
    longest = max(ipus, key=lambda ipu: of_ipu[ipu])
    return Bubble(
        share=None if not length else max(0.0, 1 - count * total / (len(ipus) * length)),
        lock_step_share=1 - len(timetable.order) / num_slots,
        longest_ipu=longest,
        longest_share=of_ipu[longest] / total if total else None,
    )


def _estimate_length(
    stages: Sequence[StageDetails], make_timetable: Callable[[int], Timetable], count: int, repeats: bool
) -> float | None:
    """Estimates how long a step takes, in operations; None if it is too long to be simulated."""

    def simulated(number: int) -> float:
        timetable = make_timetable(number)
        # Backwards may all take nothing: if only the last stage is trained, its forward has them.
        trains = any(action.kind is not ActionKind.FORWARD for action in timetable.order)
        return predict_step_time(Scenario(costs, timetable, number, ipus, levels, training=trains))

    backward = [stage.num_backward_flop for stage in stages]
    costs = Costs.of(
        len(stages),
        forward=[stage.num_forward_flop for stage in stages],
        backward=backward,
        weight_gradients=[
            min(stage.weight_operations, total) if stage.is_halved else total / 2
            for stage, total in zip(stages, backward, strict=True)
        ],
    )
    ipus, levels = tuple(stage.ipu for stage in stages), tuple(stage.level for stage in stages)
    enough = max(4 * len(stages), _MAX_SIMULATED // (2 * len(stages)))
    if count <= enough:
        return simulated(count)
    if not repeats:
        return None
    half = enough // 2
    pace = (simulated(enough) - simulated(half)) / (enough - half)
    return simulated(enough) + (count - enough) * pace
