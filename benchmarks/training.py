"""The two sides of most benchmarks: a workload trained by plain JAX, and by a pipeline.

Both have the micro-batches of a step on their devices beforehand and compute all losses. They wait for
their devices at the end of a round, not of a step. What they tell is the losses of the first two steps:
those of the second depend on all gradients of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import harness

__all__ = ["read_losses", "serve_pipeline", "serve_plain"]

NUM_TOLD = 2  # steps


def serve_plain(case: str, unroll: int | None = None) -> None:
    """One jitted scan on one device.

    Args:
      case: the workload.
      unroll: micro-batches that the scan is unrolled by; by default what the workload says.
    """
    import jax
    import numpy as np

    from benchmarks import models

    workload = models.WORKLOADS[case]
    model = workload.make()
    step, parameters, micro_batches = models.make_plain_step(
        model, workload.num_micro_batches, workload.unroll if unroll is None else unroll
    )
    assert jax.device_count() == 1
    told = []

    def run() -> Any:
        nonlocal parameters
        parameters, losses = step(parameters, micro_batches)
        return losses

    for _ in range(NUM_TOLD):
        told.append(np.asarray(run()).tolist())
    harness.serve(run, lambda losses: jax.block_until_ready((parameters, losses)), {"losses": told})


def serve_pipeline(case: str, is_single_program: bool = False) -> None:
    """A pipeline, each stage on a device of its own, or all of them on one."""
    import jax

    from benchmarks import models

    workload = models.WORKLOADS[case]
    num_stages = workload.num_stages
    num_devices = 1 if is_single_program else num_stages
    jax.config.update("jax_num_cpu_devices", num_devices)
    import optax

    from ipu_pipeline import engine

    model = workload.make()
    pipeline = engine.Pipeline(
        [engine.Stage(f, p) for f, p in zip(model.stages, model.parameters, strict=True)],
        num_micro_batches=workload.num_micro_batches,
        optimizer=optax.sgd(models.RATE),
        device_mapping=[0] * num_stages if is_single_program else None,
        donate=True,
        collect_outputs=False,
    )
    micro_batches = model.micro_batches(workload.num_micro_batches)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    placed = pipeline.place_micro_batches(micro_batches)

    def run() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, placed)
        return outputs.collected

    told = [read_losses(run()) for _ in range(NUM_TOLD)]
    devices = [
        {
            device.id
            for name, value in state.variables.items()
            if name.startswith(prefix)
            for device in value.devices()
        }
        for prefix in (f"stage{index}/" for index in range(num_stages))
    ]
    assert all(len(own) == 1 for own in devices), devices
    assert len(set.union(*devices)) == num_devices, devices
    for leaf in jax.tree.leaves(pipeline.traced.element):
        assert leaf.shape[0] == len(micro_batches[0][0]), "micro-batches were merged"

    def finish(collected: Any) -> None:
        jax.block_until_ready((state, [part.loss for part in collected]))

    harness.serve(run, finish, {"losses": told})


def read_losses(collected: Sequence[Any]) -> list[float]:
    """The loss of each micro-batch, without a computation on a device."""
    import numpy as np

    losses = [np.ravel(part.loss)[: part.size or 1] for part in collected]
    return np.concatenate(losses).tolist()
