"""What generation comes to: tokens a second over the ideal, and over one request at a time.

    python -m benchmarks.generation.run [--rounds 5] [--json FILE]

Four stages that sleep, each on a virtual device of its own, so that they overlap as real devices do: 1 to
16 requests of one token each, which is continued by as many as `NUM_NEW`. The ideal is what the simulator
says of nothing but the programs of the stages, each as long as it takes alone. A small GPT computes on the
CPU, whose cores its four stages share. All is timed in turns, in one process.

It compiles C++ with the headers that jaxlib has; without g++ it says so and measures only the GPT.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

NUM_STAGES, NUM_NEW, MILLISECONDS = 4, 48, 10.0
IN_FLIGHT = (1, 2, 4, 8, 16)
NUM_CALLS = 20  # of a program in a row, when it is timed
LEAST = 0.9  # tokens a second, of the ideal
PROMPT, GPT = 16, {"width": 256, "num_layers": 8, "length": 96, "num_words": 2048}


class Side:
    """A generator, and prompts for it."""

    def __init__(self, model: Any, prompts: Sequence[Any], **options: Any) -> None:
        """Compiles its programs."""
        from ipu_pipeline import engine

        functions, parameters, self.variables = model
        self.generator = engine.Generator(functions, parameters=parameters, **options)
        self.prompts = prompts
        self.answers = self.generate(NUM_NEW)

    def generate(self, number: int) -> list[list[int]]:
        """So many new tokens for each prompt."""
        answers = self.generator.generate(self.variables, self.prompts, max_new_tokens=number)
        return [answer.tolist() for answer in answers]

    def time(self) -> float:
        """The seconds that all prompts take."""
        begin = time.perf_counter()
        self.generate(NUM_NEW)
        return time.perf_counter() - begin

    def time_programs(self) -> list[float]:
        """The seconds of each stage's program for one token of each slot, alone."""
        import jax

        from ipu_pipeline.engine.generation.bound_stages import SlotGroup
        from ipu_pipeline.engine.generation.programs import SlotNumbers

        slots = self.generator.num_slots // self.generator.num_groups
        stages = vars(self.generator)["_builder"].bind(self.variables)
        group = vars(SlotGroup(stages, slots))
        zeros = np.zeros(slots, np.int32)
        numbers = SlotNumbers(zeros, zeros.astype(np.uint32), zeros.astype(np.uint32))
        taken = []
        for index, (program, devices) in enumerate(zip(stages.programs, stages.devices, strict=True)):
            structs = program.input_avals(0, slots)
            inputs = [jax.device_put(np.zeros(x.shape, x.dtype), devices.replicated) for x in structs]
            caches = group["_caches"][index]
            jax.block_until_ready((caches, inputs))
            begin = time.perf_counter()
            for _call in range(NUM_CALLS):
                made, caches = program.decode(False)(
                    caches, stages.weights[index], inputs, numbers, stages.update_count, None
                )
            jax.block_until_ready((made, caches))
            taken.append((time.perf_counter() - begin) / NUM_CALLS)
        return taken


def find_ideal(side: Side, seconds: Sequence[float]) -> float:
    """The seconds of all prompts if there were nothing but programs, by the simulator.

    With fewer requests than stages, which the simulator does not know, a token begins when the one before
    has gone through all stages.
    """
    from ipu_pipeline.engine.schedules import Costs, Scenario, predict_step_time

    number = len(side.prompts)
    if number < NUM_STAGES:
        return NUM_NEW * sum(seconds) + (number - 1) * max(seconds)
    pipeline = side.generator.pipeline
    num_programs = number + (NUM_NEW - 1) * side.generator.num_groups  # prompts are one chunk each
    costs = Costs.of(NUM_STAGES, forward=list(seconds), backward=[0.0] * NUM_STAGES)
    return predict_step_time(
        Scenario(
            costs,
            pipeline.timetable(num_programs),
            num_programs,
            tuple(pipeline.device_mapping),
            tuple(pipeline.traced.levels),
            False,
        )
    )


def compare(case: str, values: Sequence[float], ours: str, other: str, target: float | None) -> Row:
    spread = min(values), max(values)
    return Row("generation", case, ours, other, statistics.median(values), spread, target, at_most=False)


def speed(seconds: Sequence[float], number: int) -> str:
    return f"{number * NUM_NEW / statistics.median(seconds):,.0f} tokens/s"


def measure_emulated(num_rounds: int) -> list[Row]:
    """Emulated stages against the ideal, and against one request at a time."""
    from benchmarks.generation import model

    made = model.make_emulated(NUM_STAGES, MILLISECONDS)
    prompts = [np.array([number], np.int32) for number in range(max(IN_FLIGHT))]
    sides = [Side(made, prompts[:number], max_length=128, num_slots=16) for number in IN_FLIGHT]
    alone = Side(made, prompts[:1], max_length=128, num_slots=1)
    assert alone.answers[0] == sides[-1].answers[0]
    taken: list[list[float]] = [[] for _side in sides]
    ideals: list[list[float]] = [[] for _side in sides]
    one_by_one = []
    for number in range(num_rounds + 1):
        order = range(len(sides)) if number % 2 else reversed(range(len(sides)))
        for place in order:
            programs = sides[place].time_programs()
            seconds, ideal = sides[place].time(), find_ideal(sides[place], programs)
            if number:  # the first round is dropped
                taken[place].append(seconds)
                ideals[place].append(ideal)
        if number:
            one_by_one.append(alone.time())
    rows = []
    for count, own, ideal in zip(IN_FLIGHT, taken, ideals, strict=True):
        parts = [best / seconds for seconds, best in zip(own, ideal, strict=True)]
        name = f"4 stages of {MILLISECONDS:g} ms, {count} in flight, of the ideal"
        rows.append(compare(name, parts, speed(own, count), speed(ideal, count), LEAST))
    for count, own in zip(IN_FLIGHT[2:], taken[2:], strict=True):
        factors = [count * other / seconds for seconds, other in zip(own, one_by_one, strict=True)]
        name = f"4 stages of {MILLISECONDS:g} ms, {count} in flight, against one at a time"
        rows.append(compare(name, factors, speed(own, count), speed(one_by_one, 1), LEAST * count))
    return rows


def measure_gpt(num_rounds: int) -> Row:
    """A GPT whose stages share the cores, 16 requests in flight and one at a time."""
    from benchmarks.generation import model

    made = model.make_gpt(NUM_STAGES, **GPT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, GPT["num_words"], PROMPT).astype(np.int32) for _prompt in range(16)]
    together = Side(made, prompts, max_length=GPT["length"], num_slots=16)
    alone = Side(made, prompts[:2], max_length=GPT["length"], num_slots=1)
    assert alone.answers == together.answers[:2]
    taken = [(together.time(), alone.time()) for _round in range(num_rounds)]
    ours, other = zip(*taken, strict=True)
    factors = [8 * one / both for both, one in taken]
    name = (
        "a GPT of 8 layers, width 256, on 4 virtual devices of a CPU, 16 in flight, against one at a time"
    )
    return compare(name, factors, speed(ours, 16), speed(other, 2), None)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    num_rounds = 3 if args.short else args.rounds
    from ipu_pipeline import set_num_devices

    set_num_devices(NUM_STAGES)
    harness.report([*measure_emulated(num_rounds), measure_gpt(num_rounds)], args.json)


if __name__ == "__main__":
    main()
