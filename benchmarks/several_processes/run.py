"""A pipeline in 2 and 4 processes of this machine: against one process, and against the ideal.

    python -m benchmarks.several_processes.run [--cases mlp512 4x10] [--rounds 9] [--json FILE]

The first cases compute. Their stages are shared out among 2 processes, and the other side has all of them
in one. Both have the cores that there are: each of several processes has one thread to compute with
(PJRT_NPROC=1), since processes that know nothing of each other would otherwise want every core.

In the others stages sleep, as in benchmarks/emulation, so that each has a device of its own: what is left
is what several hosts and the transfers between them cost. The ideal is measured as there, in one process.
The first of these cases also runs with two replicas, on twice as many devices, against the same without.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, models
from benchmarks.emulation.run import Case
from benchmarks.harness import Row

MODULE = "benchmarks.several_processes.run"
WORKLOADS = ("mlp64", "mlp512", "mlp1024", "mlp512-4", "transformer")
EMULATED = {"4x10": Case(4, 10.0), "4x2": Case(4, 2.0)}
CASES = (*WORKLOADS, *EMULATED)
SHORT_CASES = ("mlp512", "transformer", *EMULATED)
TARGETS = {"4x10": 1.06}
REPLICATED = ("4x10",)  # that also run with two replicas
MOST_SECONDS = 300.0  # that a process waits for another one
NUM_CALLS = 3  # of a program in a row, when it is timed
NUM_TOLD = 2  # steps whose losses are told


class Layout(NamedTuple):
    """What a side runs in.

    Attributes:
      count: how many processes there are.
      num_replicas: how many replicas they have together.
    """

    count: int
    num_replicas: int = 1

    @classmethod
    def of(cls, side: str) -> Layout:
        """Of a side's name, such as "2", or "2x2" with two replicas."""
        return cls(*map(int, side.split("x")))

    @property
    def side(self) -> str:
        """The side's name."""
        return f"{self.count}" if self.num_replicas == 1 else f"{self.count}x{self.num_replicas}"

    @property
    def words(self) -> str:
        """How many processes."""
        return f"{self.count} process{'es' * (self.count > 1)}"


class Training(NamedTuple):
    """What is trained.

    Attributes:
      step: starts a step, and returns what it gives.
      wait: waits for the steps that were started.
      ideal: measures what a step would take if there were only its programs; None where nobody asks.
    """

    step: Callable[[], Any]
    wait: Callable[[], None]
    ideal: Callable[[], float] | None


def make_training(name: str, layout: Layout) -> Training:
    """A pipeline that trains, in one of its processes.

    Args:
      name: of the case.
      layout: its processes and replicas; all replicas get the same micro-batches.
    """
    import jax
    import optax

    from ipu_pipeline import engine

    if name in EMULATED:
        from benchmarks.emulation import stages

        case = EMULATED[name]
        pipeline, state, micro_batches = stages.make_pipeline(
            [case.forward_ms] * case.num_stages,
            [case.backward_ms] * case.num_stages,
            case.num_micro_batches("grouped"),
            collect_outputs=False,
            num_replicas=layout.num_replicas,
        )
        micro_batches = [one for one in micro_batches for _replica in range(layout.num_replicas)]
    else:
        workload = models.WORKLOADS[name]
        model = workload.make()
        pipeline = engine.Pipeline(
            [engine.Stage(f, p) for f, p in zip(model.stages, model.parameters, strict=True)],
            num_micro_batches=workload.num_micro_batches,
            optimizer=optax.sgd(models.RATE),
            donate=True,
            collect_outputs=False,
        )
        micro_batches = model.micro_batches(workload.num_micro_batches)
        state = pipeline.init(jax.random.key(0), micro_batches[0])
    placed = pipeline.place_micro_batches(micro_batches)
    collected: Any = None

    def step() -> Any:
        nonlocal state, collected
        state, outputs = pipeline.step(state, placed)
        collected = outputs.collected
        return outputs

    def wait() -> None:
        jax.block_until_ready((state, [part.loss for part in collected]))

    if not (layout == Layout(1) and name in EMULATED):
        return Training(step, wait, None)
    from benchmarks.emulation import timing

    timer = timing.ProgramTimer(pipeline, state, placed)
    return Training(step, wait, lambda: timing.ideal_seconds(pipeline, timer.run(NUM_CALLS)))


def serve(name: str, layout: Layout, rank: int, address: str) -> None:
    """One of the processes of a side; the first answers for all.

    Args:
      name: of the case.
      layout: of the side.
      rank: the number of this one.
      address: where they meet.
    """
    import jax

    count = layout.count
    num_stages = EMULATED[name].num_stages if name in EMULATED else models.WORKLOADS[name].num_stages
    jax.config.update("jax_num_cpu_devices", num_stages * layout.num_replicas // count)
    if count > 1:
        jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    training = make_training(name, layout)
    assert len({device.process_index for device in jax.devices()}) == count
    losses = []
    for _ in range(NUM_TOLD):
        losses.append([float(np.mean(loss)) for loss in training.step().losses])

    def run(num_steps: int) -> float | None:
        if num_steps == 0:
            assert training.ideal is not None
            return training.ideal()
        for _ in range(num_steps):
            training.step()
            if name in EMULATED:
                training.wait()  # each ends first, as the ideal has it
        training.wait()
        return None

    if count == 1:
        harness.serve_rounds(run, {"losses": losses})
    else:
        _take_part(run, losses, count, rank)


def _take_part(run: Callable[[int], float | None], losses: Any, count: int, rank: int) -> None:
    """Runs rounds as the first process says, which serves, until its input ends."""
    import json

    import jax

    from ipu_pipeline.ground import jax_processes

    store, patience = jax_processes.key_value_store(), round(1000 * MOST_SECONDS)

    def run_round(number: int, num_steps: int) -> None:
        run(num_steps)
        store.key_value_set(f"benchmark/done/{number}/{rank}", "")

    if all(losses):  # the process has the last stage, of replicas that of the first one
        store.key_value_set("benchmark/losses", json.dumps(losses))
    if rank > 0:
        number = 0
        while num_steps := int(store.blocking_key_value_get(f"benchmark/round/{number}", patience)):
            run_round(number, num_steps)
            number += 1
    else:
        told = 0

        def run_told(num_steps: int) -> None:
            nonlocal told
            store.key_value_set(f"benchmark/round/{told}", str(num_steps))
            run_round(told, num_steps)
            for other in range(1, count):
                store.blocking_key_value_get(f"benchmark/done/{told}/{other}", patience)
            told += 1

        found = json.loads(store.blocking_key_value_get("benchmark/losses", patience))
        harness.serve_rounds(run_told, {"losses": found})
        store.key_value_set(f"benchmark/round/{told}", "0")
    jax.distributed.shutdown()


def serve_all(name: str, layout: Layout) -> None:
    """The first process of a side, which starts the others; whoever ends its group ends them, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    if layout.count > 1:
        # Before JAX makes its client; the others take it over. An emulated device sleeps in a thread.
        sleeping = 4 * layout.num_replicas if name in EMULATED else 0
        os.environ["PJRT_NPROC"] = f"{1 + sleeping}"
    others = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", MODULE, "--cases", name, "--side", layout.side),
                *("--rank", f"{rank}", "--address", address),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        for rank in range(1, layout.count)
    ]
    serve(name, layout, 0, address)
    for process in others:
        process.wait(timeout=MOST_SECONDS)


class Ideal:
    """What a step of a side would take if there were nothing but its programs, as a side of its own."""

    def __init__(self, side: harness.Side) -> None:
        self._side = side

    def run(self, num_steps: int) -> float:
        """Seconds per step, from what the programs took so far, and now once more."""
        del num_steps
        return self._side.ask_ideal()


def measure(name: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares the sides of a case, which must train the same."""
    layouts = [Layout(count) for count in ((1, 2, 4) if name in EMULATED else (1, 2))]
    replicated = [Layout(1, 2), Layout(2, 2)] if name in REPLICATED else []
    with harness.start_sides(
        MODULE, [layout.side for layout in (*layouts, *replicated)], "--cases", name
    ) as sides:
        for side in sides.values():
            np.testing.assert_allclose(side.facts["losses"], sides["1"].facts["losses"], rtol=1e-5)
        turns: dict[str, Any] = dict(sides)
        if name in EMULATED:
            turns["ideal"] = Ideal(sides["1"])
        taken = harness.take_turns(turns, num_rounds, seconds)
    if name not in EMULATED:
        case = f"{models.WORKLOADS[name].name}: 2 processes, against 1"
        return [harness.compare("several_processes", case, taken["2"], taken["1"])]
    case, target = EMULATED[name].name("grouped"), TARGETS.get(name)
    compared = [(layout.side, "ideal", f"{layout.words}, against the ideal") for layout in layouts]
    compared += [
        (layout.side, f"{layout.count}", f"{layout.words}, with 2 replicas against without")
        for layout in replicated
    ]
    return [
        harness.compare("several_processes", f"{case}: {words}", taken[ours], taken[other], target)
        for ours, other, words in compared
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--rank", type=int, default=0, help="Of a process that another one starts.")
    parser.add_argument("--address", help="Likewise.")
    args = parser.parse_args()
    if args.side is not None:
        if args.rank:
            serve(args.cases[0], Layout.of(args.side), args.rank, args.address)
        else:
            serve_all(args.cases[0], Layout.of(args.side))
        return
    cases = args.cases or (SHORT_CASES if args.short else CASES)
    num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
    harness.report([row for case in cases for row in measure(case, num_rounds, seconds)], args.json)


if __name__ == "__main__":
    main()
