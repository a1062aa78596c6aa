"""Schedules without bubbles, on emulated devices: a step over the ideal of its schedule.

    python -m benchmarks.schedules.run [--cases 4x10 8x2] [--rounds 7] [--json FILE]

A case is a number of IPUs and the milliseconds that a forward, the gradients of a stage's input and those
of its weights take, each. A step has four micro-batches per IPU. With two stages on each IPU, they take
half the time each. The devices are those of `benchmarks.emulation`, and so is the ideal: what the schedule
takes if there is nothing but its programs, each as long as it takes alone.

torch.distributed.pipelining trains the same stages beside it, by its schedules of the same kinds.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, torch_ranks
from benchmarks.emulation import values
from benchmarks.emulation.run import NUM_BYTES, NUM_CALLS, Ideal
from benchmarks.harness import Row
from benchmarks.torch_ranks import Training
from ipu_pipeline.engine.schedules import ActionKind

MODULE = "benchmarks.schedules.run"
TARGETS = {10.0: 1.03, 2.0: 1.08}  # milliseconds of a forward -> the most, in ideals


WIDTH = 2048  # of a stage's variable: with fewer the host would wait for each IPU's weight update
NUM_UPDATES = 8  # one after another in one run, where a schedule has no bubble across steps


class Ours(NamedTuple):
    """A schedule of ours."""

    name: str  # the engine's
    num_turns: int = 1  # stages on each IPU
    torch: str | None = None  # torch's of the same kind
    is_v: bool = False  # whether the second stages of the IPUs go back
    num_updates: int = 1
    norm: float | None = None  # what gradients are clipped to

    def find_mapping(self, num_ipus: int) -> list[int]:
        """The IPU of each stage."""
        once = list(range(num_ipus))
        return once + once[::-1] if self.is_v else once * self.num_turns


OURS = {
    "1F1B": Ours("interleaved", torch="torch 1f1b"),
    "ZeroBubble": Ours("zero_bubble"),
    "Looped": Ours("looped", 2, "torch interleaved_1f1b"),
    "ZeroBubbleV": Ours("zero_bubble_v", 2, "torch zbv", is_v=True),
    "ZeroBubbleH2": Ours("zero_bubble_h2", num_updates=NUM_UPDATES),
    "ZeroBubbleH2, clipped": Ours("zero_bubble_h2", num_updates=NUM_UPDATES, norm=1e9),
}
TORCH = [own.torch for own in OURS.values() if own.torch is not None]
ACROSS = [side for side, own in OURS.items() if own.num_updates > 1]


class Case(NamedTuple):
    """So many IPUs, and the milliseconds of a forward and of either half of a backward."""

    num_ipus: int
    milliseconds: float

    @property
    def num_micro_batches(self) -> int:
        """Of a step."""
        return 4 * self.num_ipus

    def name(self, side: str) -> str:
        """For tables."""
        devices = f"{self.num_ipus} devices, {self.num_micro_batches} micro-batches"
        return f"{devices}, F = I = W = {self.milliseconds:g} ms: {side}"


CASES = {f"{number}x{time:g}": Case(number, time) for number in (4, 8) for time in TARGETS}


def serve(case: Case, side: str) -> None:
    """Trains a pipeline."""
    import jax
    import optax

    from benchmarks.emulation import stages, timing
    from ipu_pipeline import engine

    jax.config.update("jax_num_cpu_devices", case.num_ipus)
    own = OURS[side]
    mapping = own.find_mapping(case.num_ipus)
    each = case.milliseconds / own.num_turns
    optimizer = optax.sgd(values.RATE)
    if own.norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(own.norm), optimizer)
    pipeline, state, micro_batches = stages.make_pipeline(
        [each] * len(mapping),
        [(each, each)] * len(mapping),
        case.num_micro_batches,
        num_bytes=NUM_BYTES,
        width=WIDTH,
        optimizer=optimizer,
        collect_outputs=False,
        schedule=own.name,
        device_mapping=mapping,
        dispatch_plan=engine.Chunking(1),
    )
    runner = pipeline.prepare()
    placed = [runner.place_element([x]) for x in micro_batches]
    losses: list[Any] = []

    def keep(progress: Any, _count: int) -> None:
        losses[:] = [part.loss for part in progress.collected]

    def step() -> None:
        nonlocal state
        elements = itertools.cycle(placed)
        state = pipeline.run(
            pipeline.place(state), lambda _wanted: [next(elements)], [], keep, own.num_updates
        )

    step()
    told = np.asarray(losses).tolist()
    timer = timing.ProgramTimer(pipeline, state, micro_batches)

    def find_ideal() -> float:
        times = timer.run(NUM_CALLS)
        if own.num_updates == 1:
            return timing.ideal_seconds(pipeline, times)
        work = [0.0] * case.num_ipus
        for (_kind, stage), seconds in times.programs.items():
            work[mapping[stage]] += seconds
        ramp = sum(times.programs[ActionKind.FORWARD, stage] for stage in range(case.num_ipus - 1))
        return case.num_micro_batches * max(work) + ramp / own.num_updates

    def run(num_steps: int) -> float | None:
        if num_steps == 0:
            return find_ideal()
        for _ in range(num_steps):
            step()
            jax.block_until_ready((losses, state))  # each ends first, as the ideal has it
        return None

    harness.serve_rounds(run, {"losses": told})


def make_training(name: str, side: str) -> Training:
    """The same stages for torch."""
    case, num_turns = CASES[name], 1 if side == "torch 1f1b" else 2
    micro_batches = values.make_micro_batches(case.num_micro_batches, NUM_BYTES, WIDTH)
    number = case.num_ipus * num_turns
    return Training(
        number,
        functools.partial(make_torch_stage, case.milliseconds / num_turns, number),
        [(x, np.zeros_like(x)) for x in micro_batches],
        values.RATE,
        num_ranks=case.num_ipus,
    )


def make_torch_stage(milliseconds: float, number: int, index: int) -> Any:
    """A stage as a torch module, whose two gradients are computed apart, as torch cuts backwards."""
    import torch

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            time.sleep(milliseconds / 1e3)
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Any) -> Any:
            return value.view_as(value)

        @staticmethod
        def backward(_ctx: Any, g: Any) -> Any:
            time.sleep(milliseconds / 1e3)
            return g

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(values.make_parameters(number, WIDTH)[index]))

        def forward(self, x: Any) -> Any:
            x = Sleep.apply(x) if x.requires_grad else x
            return Multiply.apply(x, Sleep.apply(self.w))

    return Stage()


def measure(name: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares each schedule with its ideal and with torch's; steps and programs take turns."""
    case = CASES[name]
    with harness.start_sides(MODULE, [*OURS, *TORCH], "--cases", name) as sides:
        check_losses({side: found.facts["losses"] for side, found in sides.items()})
        turns = {**sides, **{f"{side}, ideal": Ideal(sides[side]) for side in OURS}}
        taken = harness.take_turns(turns, num_rounds, seconds)
    for side in ACROSS:  # of a run
        taken[side] = [length / OURS[side].num_updates for length in taken[side]]
    rows = []
    for side, own in OURS.items():
        target = TARGETS[case.milliseconds] if own.norm is None else None
        label = case.name(f"{side}, against the ideal")
        rows.append(harness.compare("schedules", label, taken[side], taken[f"{side}, ideal"], target))
        if own.torch is not None:
            label = case.name(f"{side} against {own.torch}")
            rows.append(harness.compare("schedules", label, taken[side], taken[own.torch], is_speed=True))
    label = case.name("1F1B against ZeroBubble")
    rows.append(harness.compare("schedules", label, taken["1F1B"], taken["ZeroBubble"]))
    return rows


def check_losses(losses: dict[str, Any]) -> None:
    """Raises unless all sides with the same stages begin with the same losses."""
    for side, found in losses.items():
        own = OURS.get(side)
        if own is not None and own.num_updates > 1:  # the last step's
            wanted = losses[ACROSS[0]]
        else:
            is_whole = side == "torch 1f1b" or (own is not None and own.num_turns == 1)
            wanted = losses["1F1B" if is_whole else "Looped"]
        first = found if own is not None else found[0]
        np.testing.assert_allclose(first, wanted, rtol=1e-4, err_msg=side)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.side in TORCH:
        make = functools.partial(make_training, side=args.side)
        torch_ranks.serve(make, args.cases, args.side.removeprefix("torch "))
        return
    if args.side is not None:
        serve(CASES[args.cases[0]], args.side)
        return
    num_rounds, seconds = (3, 0.3) if args.short else (args.rounds, 1.0)
    harness.report([row for name in args.cases for row in measure(name, num_rounds, seconds)], args.json)


if __name__ == "__main__":
    main()
