"""The figures and words about a pipeline on the page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable

from ipu_pipeline.engine.inspect import PipelineFacts
from ipu_pipeline.engine.schedules import named_schedules
from ipu_pipeline.reports.memory_over_time import profile_memory_over_time
from ipu_pipeline.reports.page.escaping import as_html
from ipu_pipeline.reports.page.tables import (
    table_of_best,
    table_of_bubble,
    table_of_figures,
    table_of_ipus,
    table_of_memory,
    table_of_predictions,
    table_of_stages,
)
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.studies import Study
from ipu_pipeline.reports.wording import describe_share, describe_speed, describe_time, say_device

__all__ = ["make_tables", "summarise"]

_MANY_SHARED = 0.05


def summarise(one: Study) -> str:
    """The figures of a pipeline, and the advice."""
    facts, analysis = one.facts, one.analysis
    if not analysis.steps:
        return f"<h2>{as_html(facts.name)}</h2>\n<p>No step of it was recorded.</p>\n"
    cards = "".join(
        f"<div><dt>{title}</dt><dd>{as_html(figure)}</dd></div>\n" for title, figure, _more in _figures(one)
    )
    words = f'<h2>{as_html(_title(one))}</h2>\n<dl class="cards">\n{cards}</dl>\n'
    return words + "".join(f'<p class="advice">{as_html(sentence)}</p>\n' for sentence in one.advice)


def make_tables(profile: Profile, one: Study) -> str:
    """The tables of figures, stages, IPUs and simulations."""
    facts, predicted = one.facts, one.predictions
    tables = ""
    if one.analysis.steps:
        tables += "<h2>Details</h2>\n" + table_of_figures(facts, _figures(one)) + _notes(_remarks(one))
    tables += f"<h2>{say_device('Stages and IPUs', facts.device_word)}</h2>\n"
    tables += table_of_stages(facts, one.analysis)
    if facts.cuts:
        tables += f"<h3>Where it is cut</h3>\n<pre>{as_html(facts.cuts)}</pre>\n"
    tables += table_of_ipus(profile, facts, one.analysis)
    index = next(number for number, other in enumerate(profile.pipelines) if other is facts)
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


def _title(one: Study) -> str:
    facts, number = one.facts, one.analysis.num_micro_batches
    what = {"training": "Training", "inference": "Inference", "loop": "Loop"}.get(facts.kind, facts.kind)
    size = "" if facts.micro_batch_size is None else f" of {facts.micro_batch_size}"
    chunks = f", programs of {facts.chunk_size} micro-batches" if facts.chunk_size > 1 else ""
    parts = facts.schedule.split("_") if facts.schedule in named_schedules() else [facts.schedule]
    schedule = "".join(part.capitalize() if part.islower() else part for part in parts)
    ran = "" if facts.kind == "loop" else f"{schedule}, "
    return f"{what}: {facts.name}, {ran}{number} micro-batch{'es' * (number != 1)}{size} per step{chunks}"


def _figures(one: Study) -> list[tuple[str, str, list[str]]]:
    """The most important figures: title, figure, and details."""
    facts, analysis, predicted = one.facts, one.analysis, one.predictions
    balanced = analysis.balanced_utilisation
    used = [] if balanced is None else [f"{describe_share(balanced)} if all stages took equally long"]
    if predicted is not None:
        free, lock = predicted.simulation.free_running, predicted.simulation.lock_step
        used.append(
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
    whole = sum(step.is_whole for step in analysis.steps)
    steps = [f"median of {whole}"] if whole > 1 else []
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
    if one.is_held_back_by_host and one.host is not None:
        share, stage = describe_share(one.host.share), analysis.limiting_stage
        waiting = f"no {facts.device_word} had work for {share} of the time"
        limit = ("the host", [waiting, f"longest stage: {stage}", *lines])
    elif analysis.is_even and len(analysis.ipus) > 1:
        limit = ("none", [f"all {facts.device_word}s are about equally busy"])
    return [
        (f"Utilisation of the {facts.device_word}s", describe_share(analysis.utilisation), used),
        ("Bubble", describe_share(analysis.bubble), idle),
        ("Speed", f"{describe_speed(speed)} {unit}", ["while steps run"]),
        ("Step", describe_time(analysis.step_time), steps),
        ("Held back by" if one.is_held_back_by_host else "Limiting stage", *limit),
    ]


def _remarks(one: Study) -> list[str]:
    facts, analysis = one.facts, one.analysis
    found = []
    if analysis.num_shared > _MANY_SHARED * analysis.num_actions:
        found.append(
            f"{analysis.num_shared:,} of {analysis.num_actions:,} actions shared a program with others. "
            "Where one ends and the next one begins within a program is estimated from their operations."
        )
    partial = sum(not step.is_whole for step in analysis.steps)
    if partial:
        found.append(
            f"{partial} of {len(analysis.steps)} steps are not whole here. Figures are of the rest."
        )
    if facts.is_one_program:
        found.append("All stages are on one device, in one program, which has no bubble.")
    return found


def _why_not(facts: PipelineFacts) -> str:
    if facts.kind == "loop":
        return "A loop is not simulated: it has no schedule."
    return (
        "This pipeline is not simulated: its schedule is the program's own, it has too many actions in a "
        "step, or this trace lacks the times of a stage."
    )
