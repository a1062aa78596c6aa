"""The page docs/benchmarks.md: the newest figure of each case that has a target, by question.

`write` makes the page from the rows of docs/data/benchmarks.csv, and everything else on it is here. A test
checks that the committed page is what the committed rows give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.history import Measured

__all__ = ["QUESTIONS", "newest", "write"]

QUESTIONS = {
    "against_plain_jax": "A training step over several virtual devices, in multiples of plain JAX's time.",
    "single_program": "The same with all stages on one device.",
    "step_parts": "A step with what is around its programs, in multiples of plain JAX's time.",
    "against_torch_pipelining": "How many times faster a step is than torch.distributed.pipelining's.",
    "against_torch_models": "Models written in torch, in multiples of plain torch's time.",
    "zoo": "The share of transformers' types of models that equal plain torch; first calls.",
    "poptorch": "A torch module, in multiples of the same model's time in `ipu.layers`.",
    "tutorial": "How many times faster a step of the tutorial is.",
    "dispatch": "Microseconds of the host per forward or backward; seconds to make a schedule.",
    "chunking": "A step with the chosen chunk size, in multiples of the best size's time.",
    "emulation": "A step over the ideal of its schedule, on emulated devices.",
    "schedules": "The same for schedules with a small bubble.",
    "halves": "A split backward, in multiples of a whole backward's time.",
    "splits": "Automatic partitioning: time of a step as a ratio, and seconds to find the split.",
    "several_processes": "A step in several processes, against the ideal; with replicas, against without.",
    "compile": "Time to the end of the first step, in multiples of the unsplit model's.",
    "first_step": "The same for a GPT of eight blocks.",
    "feeds": "Examples per second.",
    "metrics": "A step with metrics, in multiples of a step without.",
    "tracing": "A step with the check for a recording, in multiples of a step without.",
    "report_page": "Size of a report, and seconds until its trace is visible.",
    "memory": "How far the held bytes are from the formula, as a share.",
    "recomputation_memory": "Bytes that are held with recomputation, as a share.",
    "phases": "Device memory with execution phases, as a share.",
    "lengths": "A step with micro-batches of several lengths, in multiples of one length's time.",
    "generation": "Tokens per second, against the simulated ideal or one request at a time.",
    "checkpoints": "Milliseconds of the call that starts saving.",
    "in_memory": "In-memory checkpoints: their cost, and the time from a kill to the next run.",
    "goodput": "The share of its time that a job trains.",
    "features": "How many features work without more code.",
}
_INTRODUCTION = """\
# Benchmarks

`make bench` runs all benchmarks in about a quarter of an hour and writes this page. Use an idle machine. To
run a few:

    python -m benchmarks.run_all --short --only dispatch feeds --write docs/benchmarks.md

Do not edit this page: `benchmarks/page.py` has its text. [benchmarks.csv](data/benchmarks.csv) has every
figure of every run, also those without a target. Each heading links to how its figures are measured.

* **Figure**: the median of ratios that are taken round by round, both sides in turn. The csv has the times.
* **From..to**: the smallest and the largest ratio of a round.
* **Target**: a bound that was set before measuring. {met} of {all} cases meet theirs;
  [speed.md](speed.md#missed-targets) explains those that do not.
* **"and 5 more"**: so many other cases of this kind and target meet it, by at least as much.

Compare ratios, not times: on a shared virtual machine, times vary by a factor of two from hour to hour.
"""
_HEAD = "|case|figure|from..to|target|met|\n|---|---|---|---|---|"
_MOST_ALIKE = 3  # cases of a kind that meet their target and have rows of their own


def newest(rows: Iterable[Measured]) -> dict[tuple[str, str], Measured]:
    """The rows of each question's newest run, by question and case; without benchmarks that are gone."""
    rows = [row for row in rows if row.question in QUESTIONS]
    runs = {row.question: row.run for row in rows}
    return {(row.question, row.case): row for row in rows if row.run == runs[row.question]}


def write(rows: Iterable[Measured]) -> str:
    """The text of the page, from all rows that were measured, the oldest first."""
    current = [row for row in newest(rows).values() if row.bound]
    is_met = [row.row.is_met for row in current]
    parts = [_INTRODUCTION.format(met=sum(map(bool, is_met)), all=len(is_met))]
    for question, text in QUESTIONS.items():
        if found := [row for row in current if row.question == question]:
            parts += [f"## [{question}](../benchmarks/README.md#{question})\n", _write_run(text, found)]
    return "\n".join(parts)


def _write_run(text: str, rows: Sequence[Measured]) -> str:
    """A question's table."""
    lines = [f"{text} {'; '.join(reversed(rows[0].run))}.\n", _HEAD]
    for row, num_more in _shorten([row.row for row in rows]):
        more = f", and {num_more} more" if num_more else ""
        lines.append(f"|{'|'.join((row.case + more, *harness.format_figure(row)))}|")
    return "\n".join(lines) + "\n"


def _shorten(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """The rows, and how many of the same kind each stands for besides itself.

    Of many cases of a kind that meet the same target, the one that is nearest to it stands for all.
    """
    alike: dict[object, list[Row]] = {}
    for row in rows:
        kind = (row.case,) if not row.is_met else (_kind(row.case), row.target, row.at_most)
        alike.setdefault(kind, []).append(row)
    found = []
    for group in alike.values():
        if len(group) > _MOST_ALIKE:
            sign = 1 if group[0].at_most else -1
            found.append((max(group, key=lambda row: sign * row.value), len(group) - 1))
        else:
            found += [(row, 0) for row in group]
    order = {row.case: place for place, row in enumerate(rows)}
    return sorted(found, key=lambda pair: order[pair[0].case])


def _kind(case: str) -> str:
    """What is measured: the end of a case's name, which begins with the model."""
    return re.sub(r"^.*?(?=\bagainst\b)|^.*[:,] (?=.)", "", case, count=1)
