"""Writes the table of docs/speed.md: the best layouts of a GPT on 8 to 4,096 devices, simulated.

python scripts/write_scale_table.py                              # writes it; about a minute
python scripts/write_scale_table.py --blocks 48 --devices 256    # prints the row of another GPT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scaling.gpt import H100, Gpt
from scaling.layouts import search, shares

PAGE = Path(__file__).resolve().parent.parent / "docs" / "speed.md"
_COLUMNS = (
    "blocks",
    "devices",
    "step",
    "stages x replicas",
    "computing",
    "bubble",
    "links",
    "without stage",
)
HEAD = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"
NUM_BLOCKS = (24, 96)
NUM_DEVICES = (8, 512, 4096)


def make_row(model: Gpt, num_devices: int) -> str:
    """The row of a GPT on so many devices: its best layout, and where the devices' time goes."""
    layout = search(model, H100, num_devices).best
    start = f"| {model.num_blocks} | {num_devices:,} | "
    if layout is None:
        return f"{start}none fits | | | | | |"
    parts = shares(layout, num_devices)
    time = layout.step_time
    cells = (
        f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.0f} ms",
        f"{layout.num_stages} x {layout.num_replicas}",
        *(f"{share:.0%}" for share in (parts.compute, parts.bubble, parts.links, parts.unused)),
    )
    return f"{start}{' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> None:
    """Writes the table, or prints rows of another GPT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", metavar="N", help="print rows for so many")
    parser.add_argument(
        "--blocks", type=int, default=24, metavar="N", help="with --devices; 24 unless given"
    )
    parsed = parser.parse_args(arguments)
    if parsed.devices:
        rows = [make_row(Gpt(parsed.blocks), number) for number in parsed.devices]
        sys.stdout.write(HEAD + "\n".join(rows) + "\n")
        return
    rows = [make_row(Gpt(blocks), number) for blocks in NUM_BLOCKS for number in NUM_DEVICES]
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{HEAD}{chr(10).join(rows)}\n\n{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
