"""A pipeline against the same model on one device in plain JAX: time per training step.

    python -m benchmarks.against_plain_jax.run [--cases mlp64 mlp256] [--rounds 9] [--json FILE]

The plain side is one jitted `lax.scan` over the micro-batches, which accumulates gradients, and an update
by SGD, on one device. The pipeline has each stage on a device of its own. The micro-batches of a step lie
on the devices beforehand, on both sides; losses are computed on both. Both wait for their devices at the
end of a round, not of a step.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row, Side


def serve_plain(case: str) -> None:
    import jax
    import numpy as np

    from benchmarks import models

    workload = models.WORKLOADS[case]
    model = workload.make()
    step, parameters, micro_batches = models.make_plain_step(model, workload.num_micro_batches)
    assert jax.device_count() == 1
    parameters, losses = step(parameters, micro_batches)
    facts = {"losses": np.asarray(losses).tolist()}

    def run() -> Any:
        nonlocal parameters
        parameters, losses = step(parameters, micro_batches)
        return losses

    harness.serve(run, lambda losses: jax.block_until_ready((parameters, losses)), facts)


def serve_pipeline(case: str) -> None:
    import jax

    from benchmarks import models

    workload = models.WORKLOADS[case]
    jax.config.update("jax_num_cpu_devices", workload.num_stages)
    import numpy as np
    import optax

    from ipu_pipeline import engine

    model = workload.make()
    pipeline = engine.Pipeline(
        [engine.Stage(f, p) for f, p in zip(model.stages, model.parameters, strict=True)],
        num_micro_batches=workload.num_micro_batches,
        loss=lambda loss: loss,
        optimizer=optax.sgd(models.RATE),
        donate=True,
        collect_outputs=False,
    )
    micro_batches = model.micro_batches(workload.num_micro_batches)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    placed = pipeline.place_micro_batches(micro_batches)
    state, outputs = pipeline.step(state, placed)
    devices = [
        {
            next(iter(value.devices())).id
            for name, value in state.variables.items()
            if name.startswith(f"{s}/")
        }
        for s in (f"stage{index}" for index in range(workload.num_stages))
    ]
    assert all(len(own) == 1 for own in devices), devices
    assert len(set.union(*devices)) == workload.num_stages, devices
    for leaf in jax.tree.leaves(pipeline.traced.element):
        assert leaf.shape[0] == len(micro_batches[0][0]), "micro-batches were merged"
    facts = {"losses": [float(np.asarray(loss)) for loss in outputs.losses]}

    def run() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, placed)
        return outputs

    def finish(outputs: Any) -> None:
        jax.block_until_ready((state, outputs.collected))

    harness.serve(run, finish, facts)


def measure(case: str, num_rounds: int, seconds: float) -> Row:
    """Compares the two sides of one case."""
    import numpy as np

    from benchmarks import models

    workload = models.WORKLOADS[case]
    sides = {
        side: Side("benchmarks.against_plain_jax.run", ["--side", side, "--cases", case])
        for side in ("pipeline", "plain")
    }
    np.testing.assert_allclose(*(side.facts["losses"] for side in sides.values()), rtol=1e-5)
    taken = harness.take_turns(sides, num_rounds, seconds)
    for side in sides.values():
        side.close()
    return harness.compare(
        "against_plain_jax", workload.name, taken["pipeline"], taken["plain"], workload.target
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+")
    args: argparse.Namespace = parser.parse_args()
    if args.side == "plain":
        serve_plain(args.cases[0])
    elif args.side == "pipeline":
        serve_pipeline(args.cases[0])
    else:
        from benchmarks import models

        num_rounds, seconds = (3, 0.3) if args.short else (args.rounds, harness.ROUND_SECONDS)
        cases = args.cases or list(models.WORKLOADS)
        harness.report([measure(case, num_rounds, seconds) for case in cases], args.json)


if __name__ == "__main__":
    main()
