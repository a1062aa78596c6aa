"""Draws the tutorials' figures into their folders `figures`, and those of docs into docs/figures.

    python scripts/draw_figures.py            # writes them
    python scripts/draw_figures.py --check    # exits with 1 and names those that are out of date

Everything in them comes from the library: the order of actions from the timetables of its schedules,
layers, parameters and bytes from tracing the model of tutorial step 4, counts from that program's default
arguments.

Each IPU has one stage in the timetables, and a column is a lock-step time-step: all actions take equally
long. The weight update comes after the last time-step and is in no share. The figures of docs/schedules.md
are simulated steps instead (`figures.steps`).

The phases, for any schedule: main lasts from the time-step in which the last IPU begins its first action
to the one in which the first IPU to finish does its last action, both included. What comes before is ramp
up (some IPU has not begun), what comes after is ramp down (some IPU has finished).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the benchmarks

from figures import curves, facts, measured, parts, rooms, steps  # noqa: E402
from figures.parts import MARGIN, Grid  # noqa: E402
from figures.svg import Figure  # noqa: E402

from benchmarks import history  # noqa: E402

NUM_STAGES = 4
NUM_MICRO_BATCHES = 8
SCHEDULES = ["grouped", "interleaved", "sequential"]  # those of the tutorials
BUBBLE_COUNTS = [1, 2, 4, 8, 16, 32, 64]
SHARD_SPLITS = ["dense32"]
SPLITS = [["dense32"], ["dense128"], ["dense256", "dense128", "dense64"]]
TRACED_BLOCKS, TRACED_MICRO_BATCHES, FOLLOWED = 4, 10, 4
STEPS = {  # the figures of docs/schedules.md: titles and panels
    "schedules_whole": (
        "A step with one stage on each device",
        ("grouped", "interleaved", "sequential", "all_forwards"),
    ),
    "schedules_split": ("A step with a split backward", ("interleaved", "zero_bubble", "zero_bubble_h2")),
    "schedules_looped": ("A step with stages that go around the devices", ("looped", "looped_zero_bubble")),
    "schedules_v": (
        "A step with two stages on each device, down and up",
        ("zero_bubble_v", "v_half", "v_min", "dual_pipe_v"),
    ),
}
CEL = "cel: the cross entropy of the softmax (softmax_ce) and its mean over the examples (mean)."
INFEED = "Below: what the infeed brings for each micro-batch."


def draw_single_ipu() -> Figure:
    layers = facts.model_layers()
    figure = Figure("The tutorial's model on one IPU", parts.frame_width(layers) + 2 * MARGIN, 288)
    y = MARGIN + parts.FRAME_TOP
    feeds = parts.draw_frame(figure, MARGIN, y, "IPU 0", layers)
    parts.draw_feeds(figure, y + parts.FRAME_HEIGHT, feeds)
    parts.draw_legend(figure, 242, CEL, INFEED)
    return figure


def draw_sharding() -> Figure:
    stages, gap = facts.layers_of_stages(SHARD_SPLITS), 124
    width = sum(parts.frame_width(layers) + gap for layers in stages) - gap + 2 * MARGIN
    figure = Figure("The tutorial's model in two shards on two IPUs", width, 288)
    x, y = MARGIN, MARGIN + parts.FRAME_TOP
    feeds: dict[int, int] = {}
    for index, layers in enumerate(stages):
        feeds |= parts.draw_frame(figure, x, y, f"shard {index} on IPU {index}", layers)
        x += parts.frame_width(layers) + gap
    forwards, backwards = facts.bytes_across(facts.trace(SHARD_SPLITS), 0, 1)
    left = MARGIN + parts.frame_width(stages[0])
    middle, right = left + gap // 2, left + gap
    figure.text(middle, y + 16, "forwards", "strong")
    figure.text(middle, y + 30, f"{forwards:,} bytes", "small")
    figure.arrow((left, y + 38), (right, y + 38))
    figure.arrow((right, y + 54), (left, y + 54))
    figure.text(middle, y + 70, "backwards", "strong")
    figure.text(middle, y + 84, f"{backwards:,} bytes", "small")
    parts.draw_feeds(figure, y + parts.FRAME_HEIGHT, feeds)
    parts.draw_legend(figure, 242, CEL, f"{INFEED} Between the IPUs: what crosses for each micro-batch.")
    return figure


def draw_sharding_timeline() -> Figure:
    table = facts.timetable("sequential", len(SHARD_SPLITS) + 1, 3)
    grid = Grid(table, MARGIN, 52, "waits")
    figure = Figure(
        "Two shards, three micro-batches: one IPU waits while the other works", grid.width, grid.height
    )
    grid.draw(figure)
    return figure


def draw_schedule(name: str) -> Figure:
    grid = Grid(facts.timetable(name, NUM_STAGES, NUM_MICRO_BATCHES), MARGIN)
    title = f"{name.capitalize()} schedule: {NUM_STAGES} stages, {NUM_MICRO_BATCHES} micro-batches"
    figure = Figure(title, grid.width, grid.height)
    grid.draw(figure)
    return figure


def draw_phases() -> Figure:
    table = facts.timetable("grouped", NUM_STAGES, NUM_MICRO_BATCHES)
    grid = Grid(table, MARGIN + 56)
    figure = Figure("The phases of the Grouped schedule", grid.width, grid.height)
    brackets = [
        (name, f"{first} to {last}", grid.x(first), grid.x(last) + grid.cell_width)
        for name, first, last in facts.find_ramps(table)
    ]
    for name, below, left, right in [*brackets, ("update", "of weights", *grid.update_edges)]:
        figure.line("line", (left + 2, MARGIN + 50), (left + 2, MARGIN + 42), (right - 2, MARGIN + 42))
        figure.line("line", (right - 2, MARGIN + 42), (right - 2, MARGIN + 50))
        figure.text((left + right) // 2, MARGIN + 16, name, "strong")
        figure.text((left + right) // 2, MARGIN + 33, below, "small")
    grid.draw(figure)
    return figure


def draw_in_flight() -> Figure:
    square, row, column = 24, 28, 270
    title = f"Micro-batches held per stage: {NUM_STAGES} stages, {NUM_MICRO_BATCHES} micro-batches"
    figure = Figure(title, 2 * MARGIN + column * len(SCHEDULES), 2 * MARGIN + row * (NUM_STAGES + 1) + 40)
    for place, name in enumerate(SCHEDULES):
        x = MARGIN + place * column
        figure.text(x, MARGIN + 14, name.capitalize(), "start strong")
        table = facts.timetable(name, NUM_STAGES, NUM_MICRO_BATCHES)
        for stage, count in enumerate(table.in_flight):
            y = MARGIN + row * (stage + 1)
            figure.text(x, y + 17, f"stage {stage}", "start")
            for number in range(count):
                figure.rect("forward", x + 56 + number * square, y + 2, square, row - 4)
            figure.text(x + 56 + count * square + 14, y + 17, str(count), "strong")
    legend = [
        "A square is a micro-batch that has gone forward through the stage and has not come back yet.",
        f"Shown is the largest number of them at any time, of {NUM_MICRO_BATCHES} per weight update.",
    ]
    for number, line in enumerate(legend):
        figure.text(MARGIN, MARGIN + row * (NUM_STAGES + 1) + 28 + 16 * number, line, "start small")
    return figure


def draw_bubble() -> Figure:
    left, top, pitch, scale = MARGIN + 52, MARGIN + 32, 84, 2  # scale: pixels per percent
    bottom, right = top + 100 * scale, left + pitch * len(BUBBLE_COUNTS) - pitch // 2 + 8
    title = f"Share of waiting against the number of micro-batches, {NUM_STAGES} stages"
    figure = Figure(title, right + 210, bottom + 62)
    heading = f"Share of time-steps in which an IPU waits, {NUM_STAGES} stages on {NUM_STAGES} IPUs"
    figure.text(MARGIN, MARGIN + 8, heading, "start strong")
    for percent in range(0, 101, 25):
        y = bottom - percent * scale
        figure.line("thin", (left, y), (right, y))
        figure.text(left - 22, y + 4, f"{percent}%", "small")
    columns = [left + pitch // 2 + place * pitch for place in range(len(BUBBLE_COUNTS))]
    curves: dict[tuple[int, ...], list[str]] = {}  # schedules that wait equally long share a line
    for name in SCHEDULES:
        shares = [facts.percent_idle(facts.timetable(name, NUM_STAGES, count)) for count in BUBBLE_COUNTS]
        curves.setdefault(tuple(shares), []).append(name.capitalize())
    labelled = set()
    for number, (curve, names) in enumerate(curves.items()):
        points = [(x, bottom - share * scale) for x, share in zip(columns, curve, strict=True)]
        figure.line("dashed" if number else "line", *points)
        for (x, y), share in zip(points, curve, strict=True):
            figure.rect("backward" if number else "forward", x - 5, y - 5, 10, 10)
            if (x, y) not in labelled:
                figure.text(x, y - 11, f"{share}%", "small halo")
            labelled.add((x, y))
        figure.text(points[-1][0] + 16, points[-1][1] + 4, " and ".join(names), "start")
    for x, count in zip(columns, BUBBLE_COUNTS, strict=True):
        figure.text(x, bottom + 22, str(count))
    figure.text((left + right) // 2, bottom + 46, "micro-batches per weight update")
    return figure


def draw_splits() -> Figure:
    gap, row = 30, 172
    choices = {" ".join(splits): facts.layers_of_stages(splits) for splits in SPLITS}
    widths = [sum(parts.frame_width(layers) + gap for layers in stages) for stages in choices.values()]
    title = f"The tutorial's model under {len(choices)} choices of --splits"
    figure = Figure(title, max(widths) - gap + 2 * MARGIN, row * len(choices) + 48)
    for place, (splits, stages) in enumerate(choices.items()):
        x, y = MARGIN, row * place + 74
        figure.text(x, y - 48, f"--splits {splits}", "start strong")
        for index, layers in enumerate(stages):
            if index:
                middle = y + parts.FRAME_HEIGHT // 2
                figure.arrow((x - gap, middle), (x, middle))
            parts.draw_frame(figure, x, y, f"stage {index} on IPU {index}", layers)
            x += parts.frame_width(layers) + gap
    parts.draw_legend(figure, row * len(choices) + 16, CEL)
    return figure


def draw_accumulation() -> Figure:
    args = facts.defaults()
    size, count, repeats = args.batch_size, args.batches_to_accumulate, args.repeat_count
    cell, gap, update = 40, 24, 104
    left, end = MARGIN, MARGIN + count * cell
    right = end + gap + update
    figure = Figure("Gradient accumulation, and repeats in one run", right + MARGIN, 330)
    figure.text(left, 26, f"One weight update: {count} micro-batches of {size} examples", "start strong")
    for number in range(count):
        figure.box("forward", left + number * cell, 42, cell, 28, f"F{number}")
        figure.box("backward", left + number * cell, 70, cell, 28, f"B{number}")
    figure.arrow((end, 70), (end + gap, 70))
    figure.box("update", end + gap, 42, update, 56, "weight update")
    figure.line("line", (left, 106), (left, 114), (end, 114), (end, 106))
    product = f"{count} x {size} = {count * size:,} examples"
    figure.text((left + end) // 2, 134, f"{product}: the effective batch size")
    run_cell = (right - left) // repeats
    figure.line("thin", (left, 206), (left, 150))
    figure.line("thin", (left + run_cell, 206), (right, 150))
    figure.text(left + 8, 182, f"One run: repeated {repeats} times", "start strong")
    for number in range(repeats):
        x = left + number * run_cell
        figure.box("box", x, 206, run_cell - 24, 36, f"{count * size:,}")
        figure.box("update", x + run_cell - 24, 206, 24, 36, "u")
    run_end = left + repeats * run_cell
    figure.line("line", (left, 250), (left, 258), (run_end, 258), (run_end, 250))
    product = f"{repeats} x {count * size:,} = {repeats * count * size:,} examples"
    rest = f"{repeats * count:,} losses, {repeats} weight updates (u)"
    figure.text((left + run_end) // 2, 278, f"{product}, {rest}")
    legend = "Each backward (B) adds its gradients to the accumulators; the weights stay until the update."
    figure.text(left, 310, legend, "start small")
    return figure


def draw_execution_trace() -> Figure:
    """What the model of tutorial/poptorch does in a weight update, and where one micro-batch is in it."""
    table = facts.timetable("grouped", TRACED_BLOCKS, TRACED_MICRO_BATCHES)
    grid = Grid(table, MARGIN, columns_per_line=table.num_time_steps, followed=FOLLOWED)
    title = f"{TRACED_MICRO_BATCHES} micro-batches on {TRACED_BLOCKS} IPUs, number {FOLLOWED} followed"
    figure = Figure(title, grid.width, grid.height)
    grid.draw(figure)
    return figure


def draw_rooms() -> Figure:
    """The rooms, and which imports which: what a row imports has a dot in its column."""
    numbers: dict[int, set[int]] = {}
    for module, imported in rooms.read_all_imports().items():
        room = rooms.room_of(module)
        numbers.setdefault(room, set()).update(rooms.room_of(other) for other in imported)
    cell, named, top = 20, 680, 44
    count = len(rooms.FLOORS)
    left = MARGIN + named
    figure = Figure("The rooms of the package", left + count * cell + MARGIN, top + count * cell + 70)
    figure.text(MARGIN, 26, "A room imports only rooms below it", "start strong")
    for number, room in enumerate(rooms.FLOORS):
        y = top + (count - 1 - number) * cell
        style = "forward" if room.members[0].startswith("engine") else "update"
        figure.rect(style, MARGIN, y, 132, cell)
        figure.text(MARGIN + 8, y + 14, room.name, "start small")
        figure.text(MARGIN + 144, y + 14, room.purpose, "start small")
        for other in range(number):
            figure.rect("idle", left + other * cell, y, cell, cell)
            if other in numbers[number]:
                figure.rect("head", left + other * cell + 6, y + 6, 8, 8)
        figure.text(left + number * cell + cell // 2, y + 14, str(number), "small")
    bottom = top + count * cell
    legend = "A square: the room of the row imports the room that has the number of the column."
    figure.text(MARGIN, bottom + 28, legend, "start small")
    figure.text(
        MARGIN,
        bottom + 46,
        "Blue is the engine; modules that are in no folder share a row.",
        "start small",
    )
    return figure


def draw_gpt() -> Figure:
    """The learning curve of a run of examples/gpt.py; docs/engine.md has its command."""
    log = ROOT / "docs" / "data" / "gpt.jsonl"
    return curves.draw_losses(log, "Loss of examples/gpt.py in training and on held-out text")


def draw_all() -> dict[str, dict[str, str]]:
    """The text of every figure by folder and file name."""
    figures = {
        "single_ipu": draw_single_ipu(),
        "sharding": draw_sharding(),
        "sharding_timeline": draw_sharding_timeline(),
        **{name: draw_schedule(name) for name in SCHEDULES},
        "phases": draw_phases(),
        "in_flight": draw_in_flight(),
        "bubble": draw_bubble(),
        "splits": draw_splits(),
        "accumulation": draw_accumulation(),
    }
    drawn = {f"{name}.svg": figure.render() for name, figure in figures.items()}
    return {
        "tutorial/figures": drawn,
        "tutorial/poptorch/figures": {"execution_trace.svg": draw_execution_trace().render()},
        "docs/figures": {
            "rooms.svg": draw_rooms().render(),
            "benchmarks.svg": measured.draw_against_targets(history.read()).render(),
            "gpt.svg": draw_gpt().render(),
            **{f"{name}.svg": steps.draw_steps(*panels).render() for name, panels in STEPS.items()},
        },
    }


def find_faults(folder: Path, figures: dict[str, str]) -> list[str]:
    """What is wrong with the files in a folder, a line for each."""
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    faults = [f"{name}: missing" for name in figures if name not in present]
    for name in sorted(present):
        if name not in figures:
            faults.append(f"{name}: not a figure that this script draws")
        elif (folder / name).read_bytes() != figures[name].encode():
            faults.append(f"{name}: out of date")
    return faults


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Draws the figures of the tutorial and of the design.")
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if any is stale.")
    args = parser.parse_args(arguments)
    figures = draw_all()
    if args.check:
        faults = [fault for name, drawn in figures.items() for fault in find_faults(root / name, drawn)]
        print("\n".join(faults) or "All figures are up to date.")
        return 1 if faults else 0
    for name, drawn in figures.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in drawn.items():
            (folder / file).write_bytes(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
