"""What the layers of stages take of their stages: a part of what was measured of these. Imports no JAX.

A stage's time is divided in proportion to its layers' estimated operations, its update and what it always
holds in proportion to their bytes.
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
    """Finds what the layers of each stage take, for `Scenario.layers`.

    Args:
      layers: the layers of each stage, in order.
      costs: what stages take.
      held_bytes: what each stage holds of a micro-batch.
      device_mapping: the device of each stage.
      memory: what devices take by the plan: a variable has its optimizer's state and accumulators with it.

    Returns:
      The layers of each stage; nothing if the operations of a layer are not known, as in older profiles, or
      no stage has layers.
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
