"""Writes the tables of docs/scale.md: the best layouts of a GPT on 8 to 4,096 devices, simulated.

    python scripts/write_scale_page.py                              # writes them; about a minute
    python scripts/write_scale_page.py --blocks 48 --devices 256    # prints those of another GPT

What stands before the tables is written by hand, and stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scaling.gpt import H100, Gpt
from scaling.layouts import Found, Layout, search, shares

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scale.md"
HEADING = "## The tables\n"
NUM_BLOCKS = (24, 96)
NUM_DEVICES = (8, 64, 512, 4096)
_HEADINGS = {
    "best": "blocks | devices | step | tokens per second | stages x replicas | micro-batches | schedule | "
    "recomputes | optimizer state | side by side | holds at most | computes | bubble | links | host | "
    "no stage | bound by",
    "memory": "blocks | devices | layouts | fit | faster, but does not fit | step | would hold",
}


def make_rows(model: Gpt, num_devices: int) -> dict[str, str]:
    """The rows of a GPT on so many devices, by table."""
    found = search(model, H100, num_devices)
    start = [str(model.num_blocks), f"{num_devices:,}"]
    return {"best": _row(start + describe_best(found, num_devices)), "memory": _row(start + _memory(found))}


def describe_best(found: Found, num_devices: int) -> list[str]:
    """The cells of the best layout."""
    layout = found.best
    if layout is None:
        return ["none fits", *[""] * 14]
    parts = shares(layout, num_devices)
    largest = max(vars(parts), key=vars(parts).__getitem__)
    tokens = layout.model.num_sequences * layout.model.length / layout.step_time
    return [
        _seconds(layout.step_time),
        f"{tokens:,.0f}",
        f"{layout.num_stages} x {layout.num_replicas}",
        f"{layout.num_micro_batches} of {layout.micro_batch_size}",
        layout.schedule if layout.num_stages > 1 else "",
        "yes" if layout.recompute and layout.num_stages > 1 else "no",
        "shared" if layout.sharded else "all of it",
        "replicas" if layout.by_stage else "stages",
        _gigabytes(layout),
        *(f"{share:.1%}" for share in vars(parts).values()),
        {"compute": "computing", "unused": "devices without a stage"}.get(largest, largest),
    ]


def _memory(found: Found) -> list[str]:
    layout = found.too_large
    counts = [str(found.num_layouts), str(found.num_fitting)]
    if layout is None:
        return [*counts, "none", "", ""]
    name = f"{layout.num_stages} x {layout.num_replicas}, micro-batches of {layout.micro_batch_size}"
    if layout.num_stages > 1:
        name += f", {layout.schedule}, {'with' if layout.recompute else 'without'} recomputation"
    return [*counts, name, _seconds(layout.step_time), _gigabytes(layout)]


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.0f} ms"


def _gigabytes(layout: Layout) -> str:
    return f"{layout.num_bytes / 1e9:.1f} GB"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def make_tables(models: Sequence[Gpt], numbers: Sequence[int]) -> str:
    """Both tables of all models on all numbers of devices."""
    rows = [make_rows(model, number) for model in models for number in numbers]
    tables = []
    for name, headings in _HEADINGS.items():
        rule = _row(["---"] * len(headings.split(" | ")))
        tables.append("\n".join([f"| {headings} |", rule, *(row[name] for row in rows)]) + "\n")
    return "\n".join(tables)


def make_page() -> str:
    """The whole page, with the text that it has."""
    tables = make_tables([Gpt(number) for number in NUM_BLOCKS], NUM_DEVICES)
    return PAGE.read_text().partition(HEADING)[0] + HEADING + "\n" + tables


def main(arguments: Sequence[str]) -> None:
    """Writes the page, or prints the tables of another GPT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", metavar="N", help="print tables for so many")
    for name, what in (
        ("blocks", "how many there are"),
        ("width", "of a token's vector"),
        ("heads", "of attention"),
        ("length", "of a sequence"),
        ("words", "of the vocabulary"),
        ("sequences", "of a weight update"),
    ):
        default = 24 if name == "blocks" else getattr(Gpt, _FIELDS[name])
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}; {default} unless said")
    parsed = parser.parse_args(arguments)
    given = {name: getattr(parsed, name) for name in _FIELDS if getattr(parsed, name) is not None}
    for name, value in [*given.items(), *(("devices", number) for number in parsed.devices or ())]:
        if value < 1:
            parser.error(f"argument --{name}: must be at least 1; got {value}")
    if not parsed.devices:
        if given:
            parser.error(f"argument --{next(iter(given))}: the page has its own; give --devices as well.")
        PAGE.write_text(make_page())
        return
    model = Gpt(**{"num_blocks": 24} | {_FIELDS[name]: value for name, value in given.items()})
    sys.stdout.write(make_tables([model], parsed.devices))


_FIELDS = {
    "blocks": "num_blocks",
    "width": "width",
    "heads": "num_heads",
    "length": "length",
    "words": "num_words",
    "sequences": "num_sequences",
}

if __name__ == "__main__":
    main(sys.argv[1:])
