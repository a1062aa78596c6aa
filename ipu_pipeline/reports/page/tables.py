"""The tables of a page, as HTML. Names from users go through `as_html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect import PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules import Variant
from ipu_pipeline.ground.tables import describe_bytes, describe_flop
from ipu_pipeline.reports.analysis import PipelineAnalysis
from ipu_pipeline.reports.memory_over_time import MemoryOverTime, Peak
from ipu_pipeline.reports.page.escaping import as_html
from ipu_pipeline.reports.predictions import Predictions
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.wording import describe_share, describe_speed, describe_time, say_device

__all__ = [
    "describe_setting",
    "find_best",
    "table_of_best",
    "table_of_bubble",
    "table_of_figures",
    "table_of_ipus",
    "table_of_memory",
    "table_of_predictions",
    "table_of_stages",
]

_MOST_LAYERS = 3  # listed before the others are folded away
_NUM_BEST = 5


@dataclass(frozen=True)
class _Cell:
    """A cell: markup, and whether it is words rather than a number."""

    markup: str
    is_text: bool = False


def _text(value: object) -> _Cell:
    return _Cell(as_html(value), is_text=True)


def _number(value: object) -> _Cell:
    return _Cell(as_html(value))


def _table(
    facts: PipelineFacts,
    caption: str,
    headings: Sequence[_Cell],
    rows: Iterable[tuple[bool, Sequence[_Cell]]],
) -> str:
    """A table; the first cell of a row is its heading."""

    def put(tag: str, cell: _Cell, more: str = "") -> str:
        name = ' class="text"' if cell.is_text else ""
        return f"<{tag}{name}{more}>{cell.markup}</{tag}>"

    word = facts.device_word
    head = say_device("".join(put("th", cell, ' scope="col"') for cell in headings), word)
    caption = say_device(caption, word)
    body = "".join(
        f'<tr class="marked">{line}</tr>\n' if is_marked else f"<tr>{line}</tr>\n"
        for is_marked, cells in rows
        for line in [put("th", cells[0], ' scope="row"') + "".join(put("td", cell) for cell in cells[1:])]
    )
    return (
        f'<div class="scroll"><table><caption>{as_html(caption[0].upper() + caption[1:])}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def table_of_figures(facts: PipelineFacts, figures: Iterable[tuple[str, str, Sequence[str]]]) -> str:
    """The figures of the summary, with what there is no room for at the top."""
    rows = [
        (False, [_text(title), _text(figure), _text("; ".join(more))]) for title, figure, more in figures
    ]
    return _table(facts, "The figures at the top", [_text("what"), _text("figure"), _text("details")], rows)


def table_of_stages(facts: PipelineFacts, analysis: PipelineAnalysis) -> str:
    """The figures of each stage, without columns that none of them has. The limiting stage is marked."""
    both = list(zip(facts.stages, analysis.stages, strict=True))
    columns: list[tuple[_Cell, list[_Cell]]] = [
        (_number("stage"), [_number(stage.index) for stage in facts.stages]),
        (_text("name"), [_text(stage.name) for stage in facts.stages]),
        (_number("IPU"), [_number(stage.ipu) for stage in facts.stages]),
    ]
    if any(stage.layers for stage in facts.stages):
        sizes = [
            f"{stage.num_parameters:,} ({describe_bytes(stage.num_parameter_bytes)})"
            for stage in facts.stages
        ]
        columns.append((_text("layers"), [_layers(stage) for stage in facts.stages]))
        columns.append((_number("parameters"), [_number(size) for size in sizes]))
    if any(stage.forward_operations for stage in facts.stages):
        forward = [_number(describe_flop(stage.forward_operations)) for stage in facts.stages]
        columns.append((_number("forward operations"), forward))
    if any(stage.backward_operations for stage in facts.stages):
        backward = [
            _number(describe_flop(stage.backward_operations) if stage.backward_operations else "none")
            for stage in facts.stages
        ]
        columns.append((_number("backward operations"), backward))
    columns.append((_number("forward"), [_number(describe_time(use.forward)) for use in analysis.stages]))
    if facts.kind == "training":
        times = [
            _number(describe_time(use.backward) if use.backward or stage.backward_operations else "none")
            for stage, use in both
        ]
        columns.append((_number("backward"), times))
    if any(use.weight_gradients is not None for use in analysis.stages):
        halves = [
            _number("none" if not use.weight_gradients else describe_time(use.weight_gradients))
            for use in analysis.stages
        ]
        columns.append((_number("of it weight gradients"), halves))
    if any(use.num_sent_bytes for use in analysis.stages):
        sent = [_number(describe_bytes(use.num_sent_bytes)) for use in analysis.stages]
        columns.append((_number("sent per micro-batch"), sent))
    if any(stage.num_held_bytes for stage in facts.stages):
        held = [_number(describe_bytes(stage.num_held_bytes)) for stage in facts.stages]
        columns.append((_number("held per micro-batch"), held))
    columns.append((_number("in flight"), [_number(stage.in_flight) for stage in facts.stages]))
    rows = [
        (
            stage.index == analysis.limiting_stage and not analysis.is_even,
            [cells[at] for _, cells in columns],
        )
        for at, stage in enumerate(facts.stages)
    ]
    return _table(facts, "Stages, with times for a micro-batch", [heading for heading, _ in columns], rows)


def _layers(stage: StageFacts) -> _Cell:
    """The layers of a stage by name; all but a few of them folded away."""
    named = [
        f"{as_html(layer.name or 'outside of scopes')}: {layer.num_parameters:,}" for layer in stage.layers
    ]
    if not named:
        return _Cell("none", is_text=True)
    if len(named) <= _MOST_LAYERS + 1:
        return _Cell("<br>".join(named), is_text=True)
    rest = f"<details><summary>{len(named) - _MOST_LAYERS} more</summary>" + "<br>".join(
        named[_MOST_LAYERS:]
    )
    return _Cell("<br>".join(named[:_MOST_LAYERS]) + rest + "</details>", is_text=True)


def table_of_ipus(profile: Profile, facts: PipelineFacts, analysis: PipelineAnalysis) -> str:
    """The utilisation of each IPU. The busiest IPU is marked."""
    kinds = {device.ipu: f"{device.kind} {device.id}" for device in profile.devices}
    if any(device.process for device in profile.devices):
        kinds = {device.ipu: f"{kinds[device.ipu]}, process {device.process}" for device in profile.devices}
    headings = [_number("IPU")] + [_number("replica")] * (facts.num_replicas > 1)
    headings += [
        _text("stages"), _text("utilisation"), _number("busy in a step"), _number("weight update"),
    ]  # fmt: skip
    headings += [_text("JAX device")] if kinds else []
    rows = []
    for use in analysis.ipus:
        width = f"{100 * use.utilisation:.1f}%"
        bar = f'<span class="track"><span class="bar" style="width:{width}"></span></span>'
        cells = [_number(use.ipu)]
        cells += [_number(use.ipu // facts.num_ipus_each)] if facts.num_replicas > 1 else []
        cells += [
            _text(", ".join(map(str, facts.stages_on(use.ipu)))),
            _Cell(describe_share(use.utilisation) + bar, is_text=True),
            _number(describe_time(use.busy)),
            _number(describe_time(use.update) if use.update else "none"),
        ]
        cells += [_text(kinds.get(use.ipu, ""))] if kinds else []
        rows.append((use.ipu == analysis.limiting_ipu and not analysis.is_even, cells))
    return _table(facts, "IPUs", headings, rows)


def table_of_memory(facts: PipelineFacts, held: Sequence[MemoryOverTime]) -> str:
    """The memory of each IPU, by the plan and at its peak in the trace; empty without a plan."""
    if not facts.memory:
        return ""
    headings = [
        _number("IPU"), _number("variables"), _number("optimizer state"), _number("accumulators"),
        _number("activations"), _number("micro-batches"), _number("temporaries"), _number("together"),
        _number("in host memory"), _number("peak in the trace"), _number("first at"), _text("during"),
    ]  # fmt: skip
    peaks = {one.ipu: one.peak for one in held}
    rows = []
    for plan in facts.memory:
        sizes: list[int | None] = [
            *plan.num_state_bytes,
            plan.num_activation_bytes,
            plan.num_feed_bytes,
            plan.num_temporary_bytes,
        ]
        together = sum(size or 0 for size in sizes)
        cells = [_number("not known" if size is None else describe_bytes(size)) for size in sizes]
        cells += [_number(describe_bytes(together)), _number(describe_bytes(plan.num_host_bytes))]
        peak = peaks[plan.ipu]
        cells += [_number(describe_bytes(peak.num_bytes)), _number(describe_time(peak.time))]
        rows.append((False, [_number(plan.ipu), *cells, _text(_describe_peak(peak))]))
    return _table(facts, "Memory of the IPUs by the plan, at most, and over the trace", headings, rows)


def _describe_peak(peak: Peak) -> str:
    """Describes what an IPU is doing when it holds most."""
    words = peak.kind or "waiting"
    if peak.stage is not None:
        words += f" of stage {peak.stage}" if peak.kind else f", stage {peak.stage} holds most"
    return words if peak.micro_batch is None else f"{words}, micro-batch {peak.micro_batch}"


def table_of_predictions(facts: PipelineFacts, predictions: Predictions) -> str:
    """The results of other settings; the setting that was measured is marked."""
    what = "samples/s" if facts.micro_batch_size is not None else "micro-batches/s"
    headings = [
        _text("what changes"), _text("schedule"), _number("micro-batches per update"), _number("step"),
        _number(what), _number("gain"), _number("utilisation"),
    ]  # fmt: skip
    knows_memory = predictions.variants[0].num_peak_bytes is not None
    headings += [_number("most memory of an IPU")] if knows_memory else []
    rows = []
    present, even = predictions.variants[0], predictions.advice.even
    for row in (*predictions.variants, *([] if even is None else [even])):
        cells = [
            _text(describe_setting(row)),
            _text(row.schedule + (f", programs of {row.chunk_size}" if row.chunk_size > 1 else "")),
            _number(row.num_micro_batches),
            _number(describe_time(row.step_time * 1e6)),
            _number(describe_speed(row.samples_per_second)),
            _number("" if row is present else f"{100 * row.gain:+.1f}%"),
            _number(describe_share(row.utilisation)),
        ]
        if knows_memory:
            size = row.num_peak_bytes
            cells.append(_number("not known" if size is None else describe_bytes(size)))
        rows.append((row is present, cells))
    return _table(facts, f"All {len(rows)} settings, simulated", headings, rows)


def find_best(predictions: Predictions) -> list[Variant]:
    """The settings that gain most, the best first; none that gains nothing."""
    gaining = [row for row in predictions.variants[1:] if row.gain > 0]
    return sorted(gaining, key=lambda row: -row.gain)[:_NUM_BEST]


def describe_setting(row: Variant) -> str:
    """Describes what is different about a setting."""
    if row.split:
        return f"move {row.split}"
    if row.change == "even":
        return "split so that all stages take equally long"
    parts = [f"schedule {row.schedule}"] * ("schedule" in row.change)
    parts += [f"gradient accumulation count {row.num_micro_batches}"] * ("count" in row.change)
    parts += [f"{row.chunk_size} micro-batches per program"] * ("per program" in row.change)
    return " and ".join(parts) or row.cluster or "nothing"


def table_of_best(facts: PipelineFacts, predictions: Predictions) -> str:
    """The settings that gain most, below the present one, numbered as in the chart."""
    present = predictions.variants[0]
    knows_memory = present.num_peak_bytes is not None
    headings = [_number(""), _text("what changes"), _number("step"), _number("gain")]
    headings += [_number("most memory of an IPU")] if knows_memory else []
    rows = []
    for rank, row in enumerate([present, *find_best(predictions)]):
        cells = [
            _number(rank or "now"),
            _text(describe_setting(row)),
            _number(describe_time(row.step_time * 1e6)),
            _number(f"{100 * row.gain:+.1f}%" if rank else ""),
        ]
        if knows_memory:
            size = row.num_peak_bytes
            cells.append(_number("not known" if size is None else describe_bytes(size)))
        rows.append((not rank, cells))
    return _table(facts, "The settings that gain most, simulated", headings, rows)


def table_of_bubble(facts: PipelineFacts, predictions: Predictions) -> str:
    """Why IPUs are idle in the simulated steps, as shares of the IPUs' time."""
    simulation = predictions.simulation
    number = len(simulation.scenario.ipus_of_replicas)
    both = {"free-running": simulation.free_running, "lock-step": simulation.lock_step}
    causes = list(simulation.free_running.bubble.by_cause())
    headings = [_text("IPUs"), _number("step"), _number("busy")]
    headings += [
        _number(cause.replace("_", "-") if "ramp" in cause else cause.replace("_", " ")) for cause in causes
    ]
    rows = []
    for name, timeline in both.items():
        shares = timeline.bubble.by_cause()
        whole = number * timeline.step_time
        cells = [
            _text(name),
            _number(describe_time(timeline.step_time * 1e6)),
            _number(describe_share(timeline.utilisation)),
        ]
        cells += [_number(describe_share(shares[cause] / whole if whole else 0.0)) for cause in causes]
        rows.append((False, cells))
    return _table(facts, "Where the time of the IPUs goes, simulated", headings, rows)
