"""The costs of layers, as parts of their stages' measured costs. Imports no JAX.

A stage's time is divided in proportion to its layers' estimated operations; its update and constant memory
are divided in proportion to their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.engine.inspect.facts import LayerFacts
from ipu_pipeline.engine.planning.memory_plans import IpuMemory
from ipu_pipeline.engine.schedules.costs import Costs
from ipu_pipeline.engine.schedules.scenarios import Layer

__all__ = ["find_layer_costs"]


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
    if any(layer.operations is None for own in layers for layer in own) or not any(layers):
        return ()
    plans = {plan.ipu: plan for plan in memory}
    found = []
    for stage, own in enumerate(layers):
        total = sum(layer.operations or 0.0 for layer in own)
        num_bytes = sum(layer.num_bytes for layer in own)
        plan, per_byte = plans.get(device_mapping[stage]), 1.0
        if plan is not None and plan.num_variable_bytes:
            with_state = plan.num_variable_bytes + plan.num_optimizer_bytes + plan.num_accumulator_bytes
            per_byte = with_state / plan.num_variable_bytes
        found.append(
            tuple(
                Layer(
                    layer.name or "variables outside of scopes",
                    share * costs.forward[stage],
                    share * costs.backward[stage],
                    round(per_byte * layer.num_bytes),
                    round(share * held_bytes[stage]),
                    layer.num_bytes / num_bytes * costs.update[stage] if num_bytes else 0.0,
                )
                for layer in own
                for share in [(layer.operations or 0.0) / total if total else 0.0]
            )
        )
    return tuple(found)
