"""Sections of a page about a pipeline, as HTML: figures, words and tables; users' text is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.engine.inspect import PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules import Variant, named_schedules
from ipu_pipeline.ground.tables import (
    describe_bytes,
    describe_flop,
    describe_share,
    describe_speed,
    describe_time,
    say_device,
)
from ipu_pipeline.reports.analysis import PipelineAnalysis
from ipu_pipeline.reports.memory_over_time import MemoryOverTime, Peak, profile_memory_over_time
from ipu_pipeline.reports.predictions import Predictions, Study
from ipu_pipeline.reports.profile import Profile

# Escaping: the only way of users' text, such as names of stages, into markup and scripts.

# In a script element `</script>` ends it and `<!--` changes how it ends; the last two end lines in older
# JavaScript.
_IN_SCRIPTS = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_html(value: object) -> str:
    """A value as text of an element or of a quoted attribute."""
    return html.escape(str(value), quote=True)


def as_script(value: Any) -> str:
    """A value as JSON that can be put in a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.translate(_IN_SCRIPTS)


# Tables.

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
    pairs = list(zip(facts.stages, analysis.stages, strict=True))
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
            for stage, use in pairs
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
        held_bytes = [_number(describe_bytes(stage.num_held_bytes)) for stage in facts.stages]
        columns.append((_number("held per micro-batch"), held_bytes))
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
    folded = f"<details><summary>{len(named) - _MOST_LAYERS} more</summary>" + "<br>".join(
        named[_MOST_LAYERS:]
    )
    return _Cell("<br>".join(named[:_MOST_LAYERS]) + folded + "</details>", is_text=True)


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


def table_of_memory(facts: PipelineFacts, memories: Sequence[MemoryOverTime]) -> str:
    """The memory of each IPU, by the plan and at its peak in the trace; empty without a plan."""
    if not facts.memory:
        return ""
    headings = [
        _number("IPU"), _number("variables"), _number("optimizer state"), _number("accumulators"),
        _number("activations"), _number("micro-batches"), _number("temporaries"), _number("together"),
        _number("in host memory"), _number("peak in the trace"), _number("first at"), _text("during"),
    ]  # fmt: skip
    peaks = {memory.ipu: memory.peak for memory in memories}
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
    speed_unit = "samples/s" if facts.micro_batch_size is not None else "micro-batches/s"
    headings = [
        _text("what changes"), _text("schedule"), _number("micro-batches per update"), _number("step"),
        _number(speed_unit), _number("gain"), _number("utilisation"),
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
    """The reasons why IPUs are idle in the simulated steps, as shares of the IPUs' time."""
    simulation = predictions.simulation
    number = len(simulation.scenario.ipus_of_replicas)
    timelines = {"free-running": simulation.free_running, "lock-step": simulation.lock_step}
    causes = list(simulation.free_running.bubble.by_cause())
    headings = [_text("IPUs"), _number("step"), _number("busy")]
    headings += [
        _number(cause.replace("_", "-") if "ramp" in cause else cause.replace("_", " ")) for cause in causes
    ]
    rows = []
    for name, timeline in timelines.items():
        shares = timeline.bubble.by_cause()
        total = number * timeline.step_time
        cells = [
            _text(name),
            _number(describe_time(timeline.step_time * 1e6)),
            _number(describe_share(timeline.utilisation)),
        ]
        cells += [_number(describe_share(shares[cause] / total if total else 0.0)) for cause in causes]
        rows.append((False, cells))
    return _table(facts, "Where the time of the IPUs goes, simulated", headings, rows)


# Figures and words about a pipeline.

_MANY_SHARED = 0.05


def summarise(pipeline: Study) -> str:
    """The figures of a pipeline, and the advice."""
    facts, analysis = pipeline.facts, pipeline.analysis
    if not analysis.steps:
        return f"<h2>{as_html(facts.name)}</h2>\n<p>No step of it was recorded.</p>\n"
    cards = "".join(
        f"<div><dt>{title}</dt><dd>{as_html(figure)}</dd></div>\n"
        for title, figure, _more in _figures(pipeline)
    )
    words = f'<h2>{as_html(_title(pipeline))}</h2>\n<dl class="cards">\n{cards}</dl>\n'
    return words + "".join(f'<p class="advice">{as_html(sentence)}</p>\n' for sentence in pipeline.advice)


def make_tables(profile: Profile, pipeline: Study) -> str:
    """The tables of figures, stages, IPUs and simulations."""
    facts, predicted = pipeline.facts, pipeline.predictions
    tables = ""
    if pipeline.analysis.steps:
        tables += (
            "<h2>Details</h2>\n" + table_of_figures(facts, _figures(pipeline)) + _notes(_remarks(pipeline))
        )
    tables += f"<h2>{say_device('Stages and IPUs', facts.device_word)}</h2>\n"
    tables += table_of_stages(facts, pipeline.analysis)
    if facts.cuts:
        tables += f"<h3>Where it is cut</h3>\n<pre>{as_html(facts.cuts)}</pre>\n"
    tables += table_of_ipus(profile, facts, pipeline.analysis)
    index = next(number for number, candidate in enumerate(profile.pipelines) if candidate is facts)
    tables += table_of_memory(facts, profile_memory_over_time(profile, index))
    tables += "<h2>What if</h2>\n"
    if predicted is None:
        return tables + f"<p>{as_html(_why_not(facts))}</p>\n"
    chart = ""
    if predicted.variants[0].num_peak_bytes is not None:
        label = "Step time and memory of each setting; the table has the figures"
        chart = f'<div class="chart settings" role="img" aria-label="{label}"></div>\n'
    tables += f'<div class="beside">\n{chart}{table_of_best(facts, predicted)}</div>\n'
    tables += _notes(predicted.notes)
    tables += "<details><summary>All settings, in a table</summary>\n"
    tables += f"{table_of_predictions(facts, predicted)}</details>\n"
    return tables + table_of_bubble(facts, predicted)


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<p class="soft">{as_html(note)}</p>\n' for note in notes)


def _title(pipeline: Study) -> str:
    facts, number = pipeline.facts, pipeline.analysis.num_micro_batches
    kind = {"training": "Training", "inference": "Inference", "loop": "Loop"}.get(facts.kind, facts.kind)
    size = "" if facts.micro_batch_size is None else f" of {facts.micro_batch_size}"
    chunks = f", programs of {facts.chunk_size} micro-batches" if facts.chunk_size > 1 else ""
    parts = facts.schedule.split("_") if facts.schedule in named_schedules() else [facts.schedule]
    schedule = "".join(part.capitalize() if part.islower() else part for part in parts)
    ran = "" if facts.kind == "loop" else f"{schedule}, "
    return f"{kind}: {facts.name}, {ran}{number} micro-batch{'es' * (number != 1)}{size} per step{chunks}"


def _figures(pipeline: Study) -> list[tuple[str, str, list[str]]]:
    """The most important figures: title, figure, and details."""
    facts, analysis, predicted = pipeline.facts, pipeline.analysis, pipeline.predictions
    balanced = analysis.balanced_utilisation
    shares = [] if balanced is None else [f"{describe_share(balanced)} if all stages took equally long"]
    if predicted is not None:
        free, lock = predicted.simulation.free_running, predicted.simulation.lock_step
        shares.append(
            f"simulated {describe_share(free.utilisation)}, in lock-step {describe_share(lock.utilisation)}"
        )
    idle = []
    if predicted is not None:
        parts = predicted.simulation.free_running.bubble.by_cause()
        total = sum(parts.values())
        named = sorted(parts.items(), key=lambda part: -part[1])
        idle = [
            f"{name.replace('_', '-' if 'ramp' in name else ' ')} {describe_share(time / total)} of it"
            for name, time in named[:3]
            if total and time / total >= 0.005
        ]
    speed, unit = analysis.samples_per_second, "samples/s"
    if speed is None:
        speed, unit = analysis.micro_batches_per_second, "micro-batches/s"
    num_whole = sum(step.is_whole for step in analysis.steps)
    steps = [f"median of {num_whole}"] if num_whole > 1 else []
    if predicted is not None:
        steps.append(f"simulated {describe_time(predicted.simulation.free_running.step_time * 1e6)}")
        if predicted.shared_step_time is not None:
            steps.append(
                f"on {predicted.cores} shared cores {describe_time(predicted.shared_step_time * 1e6)}"
            )
    if analysis.time_between > 0.02 * analysis.step_time:
        steps.append(f"{describe_time(analysis.time_between)} between steps, when nothing runs")
    limiting = analysis.stages[analysis.limiting_stage]
    use = next(use for use in analysis.ipus if use.ipu == analysis.limiting_ipu)
    lines = [
        f"on {facts.device_word} {analysis.limiting_ipu}, busy {describe_share(use.utilisation)} of a step",
        f"{describe_time(limiting.length)} for a micro-batch",
    ]
    limit = (f"stage {analysis.limiting_stage}", [facts.stages[analysis.limiting_stage].name, *lines])
    if pipeline.is_held_back_by_host and pipeline.host is not None:
        share, stage = describe_share(pipeline.host.share), analysis.limiting_stage
        waiting = f"no {facts.device_word} had work for {share} of the time"
        limit = ("the host", [waiting, f"longest stage: {stage}", *lines])
    elif analysis.is_even and len(analysis.ipus) > 1:
        limit = ("none", [f"all {facts.device_word}s are about equally busy"])
    return [
        (f"Utilisation of the {facts.device_word}s", describe_share(analysis.utilisation), shares),
        ("Bubble", describe_share(analysis.bubble), idle),
        ("Speed", f"{describe_speed(speed)} {unit}", ["while steps run"]),
        ("Step", describe_time(analysis.step_time), steps),
        ("Held back by" if pipeline.is_held_back_by_host else "Limiting stage", *limit),
    ]


def _remarks(pipeline: Study) -> list[str]:
    facts, analysis = pipeline.facts, pipeline.analysis
    remarks = []
    if analysis.num_shared > _MANY_SHARED * analysis.num_actions:
        remarks.append(
            f"{analysis.num_shared:,} of {analysis.num_actions:,} actions shared a program with others. "
            "Where one ends and the next one begins within a program is estimated from their operations."
        )
    partial = sum(not step.is_whole for step in analysis.steps)
    if partial:
        remarks.append(
            f"{partial} of {len(analysis.steps)} steps are not whole here. Figures are of the rest."
        )
    if facts.is_one_program:
        remarks.append("All stages are on one device, in one program, which has no bubble.")
    return remarks


def _why_not(facts: PipelineFacts) -> str:
    if facts.kind == "loop":
        return "A loop is not simulated: it has no schedule."
    return (
        "This pipeline is not simulated: its schedule is the program's own, it has too many actions in a "
        "step, or this trace lacks the times of a stage."
    )
