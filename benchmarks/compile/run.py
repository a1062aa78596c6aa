"""What comes before the first step: its time and its compilations, against the unsplit model; and imports.

    python -m benchmarks.compile.run [--rounds 5] [--json FILE]

From the stages to the end of the first training step, each time in a new process, with nothing cached on
disk: the pipeline, also with a program for each micro-batch's forward and backward instead of the plan that
is chosen, and the same model as one jitted scan on one device. The clock starts when JAX's backend
is up and a random key exists. Compilations are those that JAX reports of XLA. Afterwards both do three more
steps, in which nothing may be compiled.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks import harness, models, training
from benchmarks.harness import Row

MODULE = "benchmarks.compile.run"
CASES = ["mlp64", "mlp512-4", "convolutional", "transformer", "gpt"]
SHORT_CASES = ["mlp64", "mlp512-4", "transformer", "gpt"]
CPU_CASES = ["gpt"]  # whose processor time counts, too
MOST_RATIO, MOST_CPU_RATIO, MOST_IMPORT_SECONDS = 1.5, 1.3, 0.1
IMPORTS = {
    "ipu_pipeline": "import jax, optax, ipu_pipeline",
    "jax": "import jax, optax",
}


def measure_side(side: str, case: str) -> dict[str, Any]:
    """Time to the end of the first step, also of all threads; its losses; and how often XLA compiled."""
    import jax
    import optax

    from ipu_pipeline import engine

    workload = models.WORKLOADS[case]
    model = workload.make()
    micro_batches = model.micro_batches(workload.num_micro_batches)
    compiled: list[str] = []

    def count(event: str, _seconds: float, **_rest: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    if side != "plain":
        jax.config.update("jax_num_cpu_devices", workload.num_stages)
    jax.devices()
    key = jax.block_until_ready(jax.random.key(0))
    jax.monitoring.register_event_duration_secs_listener(count)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    if side != "plain":
        pipeline = engine.Pipeline(
            [engine.Stage(f, p) for f, p in zip(model.stages, model.parameters, strict=True)],
            num_micro_batches=workload.num_micro_batches,
            optimizer=(workload.make_optimizer or functools.partial(optax.sgd, models.RATE))(),
            donate=True,
            collect_outputs=False,
            dispatch_plan=engine.Chunking() if side == "one by one" else None,
        )
        state = pipeline.init(key, micro_batches[0])

        def step() -> Any:
            nonlocal state
            state, outputs = pipeline.step(state, micro_batches)
            jax.block_until_ready((state, [part.loss for part in outputs.collected]))
            return training.read_losses(outputs.collected)

    else:
        optimizer = None if workload.make_optimizer is None else workload.make_optimizer()
        train, parameters, stacked = models.make_plain_step(
            model, workload.num_micro_batches, optimizer=optimizer
        )

        def step() -> Any:
            nonlocal parameters
            parameters, losses = train(parameters, stacked)
            jax.block_until_ready((parameters, losses))
            return np.asarray(losses).tolist()

    losses = step()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    number = len(compiled)
    for _ in range(3):
        step()
    later = len(compiled) - number
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "losses": losses,
        "compilations": number,
        "later": later,
    }


def run_code(code: str) -> str:
    """What a process that runs this code prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT)
    return done.stdout


def measure_imports(num_rounds: int) -> Row:
    """How much longer it takes to import the library too; fails if that starts a backend."""
    check = "import jax._src.xla_bridge as bridge; assert not bridge.backends_are_initialized()"
    run_code(f"{IMPORTS['ipu_pipeline']}; {check}")
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(num_rounds):
        for name, code in IMPORTS.items():
            clock = "import time; begin = time.perf_counter()"
            taken[name].append(float(run_code(f"{clock}; {code}; print(time.perf_counter() - begin)")))
    more = [ours - other for ours, other in zip(taken["ipu_pipeline"], taken["jax"], strict=True)]
    medians = {name: f"{statistics.median(found):.2f} s" for name, found in taken.items()}
    case = "import ipu_pipeline beyond jax and optax, seconds"
    spread = (min(more), max(more))
    return Row(
        "compile",
        case,
        medians["ipu_pipeline"],
        medians["jax"],
        statistics.median(more),
        spread,
        MOST_IMPORT_SECONDS,
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=list(models.WORKLOADS))
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure_side(args.side, args.cases[0])))
        return
    num_rounds = 2 if args.short else args.rounds
    rows = []
    for case in args.cases or (SHORT_CASES if args.short else CASES):
        found: dict[str, list[Any]] = {"pipeline": [], "one by one": [], "plain": []}
        for _ in range(num_rounds):
            for side, facts in found.items():
                facts.append(harness.run_module(MODULE, "--side", side, "--cases", case))
        for side in ("pipeline", "one by one"):
            np.testing.assert_allclose(found[side][0]["losses"], found["plain"][0]["losses"], rtol=1e-5)
        seconds = {side: [fact["seconds"] for fact in facts] for side, facts in found.items()}
        name = f"{case}, time to first step"
        rows.append(harness.compare("compile", name, seconds["pipeline"], seconds["plain"], MOST_RATIO))
        rows.append(
            harness.compare(
                "compile",
                f"{name}, with one micro-batch per program",
                seconds["one by one"],
                seconds["plain"],
            )
        )
        if case in CPU_CASES:
            own, other = ([f["cpu_seconds"] for f in found[side]] for side in ("pipeline", "plain"))
            cpu_name = f"{case}, processor time to first step"
            rows.append(harness.compare("compile", cpu_name, own, other, MOST_CPU_RATIO))
        counts = {side: facts[0]["compilations"] for side, facts in found.items()}
        later = max(fact["later"] for fact in found["pipeline"])
        rows.append(
            Row(
                "compile",
                f"{case}, compilations after the first step",
                f"{counts['pipeline']} before",
                f"{counts['plain']} before",
                later,
                None,
                0,
            )
        )
    rows.append(measure_imports(num_rounds + 2))
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
