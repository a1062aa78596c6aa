"""What a step costs besides its programs: feeding, reading losses, `Session.run`, and many variables.

    python -m benchmarks.step_parts.run [--cases fed read session variables alone] [--rounds 7]
        [--json FILE]

The other side is plain JAX on one device that is given the same: one jitted step, into which the stacked
arrays of NumPy go, and whose losses are read at once. Both sides have the same model and first losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.step_parts.run"


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
      name: for tables.
      shape: of an MLP: width, examples of a micro-batch, layers and stages.
      num_micro_batches: of a step.
      has_adam: whether the optimizer is AdamW, not SGD.
      is_fed: whether micro-batches are arrays of NumPy, not on the devices already.
      is_read: whether each step's losses are read.
      is_session: whether `Session.run` runs the step.
      target: the most that a step may take, in steps of plain JAX.
    """

    name: str
    shape: tuple[int, int, int, int]
    num_micro_batches: int = 16
    has_adam: bool = False
    is_fed: bool = True
    is_read: bool = False
    is_session: bool = False
    target: float | None = None


SMALL = (64, 32, 4, 2)
CASES = {
    "fed": Case("MLP 64 wide, fed from NumPy", SMALL),
    "read": Case("and losses read", SMALL, is_read=True),
    "session": Case("by Session.run, dequeued", SMALL, is_read=True, is_session=True),
    "variables": Case("400 variables, AdamW", (16, 8, 200, 2), 8, has_adam=True, is_fed=False, target=2.0),
    "alone": Case(
        "one device, one micro-batch, AdamW, 1024 wide", (1024, 8, 6, 1), 1, True, False, target=1.2
    ),
}


def make_optimizer(case: Case) -> Any:
    """AdamW or SGD."""
    import optax

    from benchmarks import models

    return optax.adamw(models.RATE) if case.has_adam else optax.sgd(models.RATE)


def serve_plain(case: Case) -> None:
    """The side of plain JAX."""
    import jax
    import numpy as np

    from benchmarks import models

    model = models.make_mlp(*case.shape)
    micro_batches = model.micro_batches(case.num_micro_batches)
    step, state, placed = models.make_plain_step(
        model, case.num_micro_batches, optimizer=make_optimizer(case)
    )

    def run() -> Any:
        nonlocal state
        stacks = tuple(map(np.stack, zip(*micro_batches, strict=True))) if case.is_fed else placed
        state, losses = step(state, stacks)
        return np.asarray(losses).tolist() if case.is_read else losses

    losses = np.asarray(run()).tolist()
    harness.serve(run, lambda _losses: jax.block_until_ready(state), {"losses": losses})


def serve_pipeline(case: Case) -> None:
    """The side of `engine.Pipeline`."""
    import jax

    from benchmarks import models, training

    jax.config.update("jax_num_cpu_devices", case.shape[-1])
    from ipu_pipeline import engine

    model = models.make_mlp(*case.shape)
    micro_batches: Any = model.micro_batches(case.num_micro_batches)
    pipeline = engine.Pipeline(
        [engine.Stage(f, own) for f, own in zip(model.stages, model.parameters, strict=True)],
        num_micro_batches=case.num_micro_batches,
        optimizer=make_optimizer(case),
        donate=True,
        collect_outputs=False,
    )
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    if not case.is_fed:
        micro_batches = pipeline.place_micro_batches(micro_batches)

    def run() -> Any:
        nonlocal state
        state, outputs = pipeline.step(state, micro_batches)
        return [float(loss) for loss in outputs.losses] if case.is_read else outputs.collected

    first = run()
    losses = first if case.is_read else training.read_losses(first)
    harness.serve(run, lambda _losses: jax.block_until_ready(state), {"losses": losses})


def serve_session(case: Case) -> None:
    """The side of TensorFlow 1's interface."""
    import itertools

    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import models

    jax.config.update("jax_num_cpu_devices", case.shape[-1])
    import ipu_pipeline as ipu
    from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline

    model = models.make_mlp(*case.shape)
    micro_batches = model.micro_batches(case.num_micro_batches)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: itertools.cycle(micro_batches))
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def layers(number: int, x: Any) -> Any:
        for layer, (kernel, bias) in enumerate(model.parameters[number]):
            name = f"stage{number}_{layer}"
            weight = ipu.get_variable(f"{name}_kernel", initializer=kernel)
            x = jax.nn.relu(x @ weight + ipu.get_variable(f"{name}_bias", initializer=bias))
        return x

    def first(x: Any, target: Any) -> Any:
        return layers(0, x), target

    def last(x: Any, target: Any) -> Any:
        return jnp.mean((layers(1, x) - target) ** 2)

    def train() -> Any:
        return pipeline(
            [first, last],
            case.num_micro_batches,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: OptimizerFunctionOutput(make_optimizer(case), loss),
            reduction_method="mean",
        )

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = case.shape[-1]
    config.configure_ipu_system()
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        program = ipu.ipu_compiler.compile(train)
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        session.run(infeed.initializer)
        dequeue = outfeed.dequeue()

        def run() -> Any:
            session.run(program)
            return np.ravel(session.run(dequeue)).tolist()

        harness.serve(run, lambda losses: losses, {"losses": run()})


def measure(name: str, num_rounds: int, seconds: float) -> Row:
    """Compares the sides of a case."""
    case = CASES[name]
    ours = "session" if case.is_session else "pipeline"
    taken = harness.run_agreeing_sides(MODULE, [ours, "plain"], name, num_rounds, seconds)
    return harness.compare("step_parts", case.name, taken[ours], taken["plain"], case.target)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.side:
        sides: dict[str, Callable[[Case], None]]
        sides = {"plain": serve_plain, "pipeline": serve_pipeline, "session": serve_session}
        sides[args.side](CASES[args.cases[0]])
        return
    rounds = (5, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
    harness.report([measure(name, *rounds) for name in args.cases], args.json)


if __name__ == "__main__":
    main()
