"""`ipu-pipeline simulate`: how long a step of a pipeline takes, and why its devices wait."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipu_pipeline.command_line.main import format_table, show
from ipu_pipeline.command_line.schedule_command import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_STAGES,
    OF_PIPELINE,
    Options,
    add_options,
    at_least_one,
    check_size,
    find_mapping,
    number,
    numbers,
    spread,
    tell_example,
)
from ipu_pipeline.engine.schedules import (
    Advice,
    Cluster,
    Costs,
    Scenario,
    SearchedSchedule,
    Simulation,
    Timeline,
    Variant,
    format_staircase,
    schedule_name,
    simulate,
)
from ipu_pipeline.reports.page import write_simulation
from ipu_pipeline.reports.predictions import (
    MeasuredRun,
    find_measured,
    predict_scenario,
    say_advice,
    say_seconds,
)
from ipu_pipeline.reports.profile import FORMAT, read_profile
from ipu_pipeline.reports.report_files import write_file

_OF_SEARCH = ("step_time", "bound", "reason", "gap", "name", "num_peak_bytes")
_MOST_ACTIONS = 2**15  # up to which what-ifs are simulated without --what-if: some seconds


def _cores(text: str) -> float:
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be greater than 0; got {text!r}")
    return value


def _bandwidths(text: str) -> list[float]:
    values = numbers(text)
    if not all(values):
        raise argparse.ArgumentTypeError(f"must be greater than 0; got {text!r}")
    return values


_PAIR = "pair of neighbours"
# The option of a cost -> (the argument of `Costs.of`, what a list has one number per, help).
_COSTS = {
    "forward-cost": ("forward", "stage", "forward pass of a micro-batch; 1 by default"),
    "backward-cost": ("backward", "stage", "backward pass of a micro-batch; 2 by default"),
    "weight-gradients-cost": (
        "weight_gradients",
        "stage",
        "the part of the backward pass that computes weight gradients, which some schedules run "
        "separately; half of it by default",
    ),
    "update-cost": ("update", "stage", "weight update of a stage; 0 by default"),
    "transfer-cost": (
        "transfer",
        _PAIR,
        "transfer of a micro-batch to the next stage; a list has one number per pair of neighbouring "
        "stages; 0 by default",
    ),
    "host-cost": ("host", "", "dispatch of a program by the host; 0 by default"),
    "sent-bytes": (
        "num_sent_bytes",
        _PAIR,
        "bytes that a micro-batch sends, like --transfer-cost; links give its time; 0 by default",
    ),
    "gradient-bytes": (
        "num_gradient_bytes",
        "stage",
        "bytes of a stage's gradients, which replicas average once per step; 0 by default",
    ),
}
_OPTIONS: Options = {
    **OF_PIPELINE,
    **{
        f"--{name} {'LIST' if per else 'T'}": (numbers if per else number, text)
        for name, (_, per, text) in _COSTS.items()
    },
    # Replicas, processes and links.
    "--replicas N": (at_least_one, "replicas of the pipeline; 1 by default"),
    "--processes N": (
        at_least_one,
        "processes, which have equal shares of all replicas' devices, in order; 1 by default",
    ),
    "--latency LIST": (
        numbers,
        "latency of links: one number, or two (within a process, between processes); 0 by default",
    ),
    "--bandwidth LIST": (
        _bandwidths,
        "bandwidth of links in bytes per unit of time, like --latency; infinite by default",
    ),
    "--share-optimizer-state": (
        None,
        "each replica holds and updates only its share of the optimizer state",
    ),
    # Devices and programs.
    "--cores N": (_cores, "cores that all devices share; none by default"),
    "--chunk-size N": (at_least_one, "micro-batches per program; 1 by default"),
    # Files, and what is searched.
    "--costs-from FILE": (
        Path,
        "read whatever is not given from a profile.json, or from a file of Scenario.as_dict",
    ),
    "--html FILE": (Path, "also write a page, which opens without a network"),
    "--bytes-per-ipu N": (
        at_least_one,
        "with --schedule searched: the memory limit of a device, for the sizes in --costs-from; none "
        "by default",
    ),
    "--what-if": (
        None,
        f"try other schedules, counts and splits also for more than {_MOST_ACTIONS:,} actions",
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Simulate a step of a pipeline from the costs of its parts, in any unit of time. Two modes are "
        "compared: devices that wait only for data, as in this library, and devices in lock-step. A cost "
        "is one number, or a list with one number per stage, such as 1,2,1."
    )
    add_options(parser, _OPTIONS)
    parser.set_defaults(call=lambda parsed: _run(parser, parsed))


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    measured = None if parsed.costs_from is None else _read(parser, parsed.costs_from)
    scenario = _make_scenario(parser, parsed, None if measured is None else measured.scenario)
    cores = None if measured is None or scenario.cores is not None else measured.shared_cores
    if parsed.html is not None:
        _write_page(parser, scenario, parsed.html)
    variants: Sequence[Variant] = []
    advice, sentences = None, ""
    if parsed.what_if or scenario.num_actions <= _MOST_ACTIONS:
        is_measured = measured is not None and measured.is_measured
        # Only of a profile the costs are known to be in seconds.
        describe = say_seconds if measured is not None and measured.is_profile else "{:.4g}".format
        predictions = predict_scenario(
            scenario, cores, is_measured=is_measured, is_whole=True, describe=describe
        )
        simulation, variants, advice = predictions.simulation, predictions.variants, predictions.advice
        sentences = " ".join(say_advice(advice, None if measured is None else measured.host))
    else:
        simulation = simulate(scenario)
    if parsed.json:
        show(json.dumps(_as_json(simulation, variants, advice, sentences)))
        return 0
    parts = [_title(scenario), _timeline_table(simulation), _ipu_table(simulation)]
    if advice is None:
        parts.append(f"More than {_MOST_ACTIONS:,} actions: --what-if simulates other schedules as well.")
    else:
        parts += [_what_if_table(variants), sentences]
    example = tell_example(parser, parsed)
    if example:
        parts.insert(1, format_staircase(scenario.timetable(), scenario.device_mapping))
    show("\n\n".join(parts) + example)
    return 0


def _write_page(parser: argparse.ArgumentParser, scenario: Scenario, file: Path) -> None:
    """Writes the page of a simulation; ends the program if that cannot be done."""
    try:
        write_file(file, write_simulation(scenario, _title(scenario)))
    except (RuntimeError, OSError) as error:
        parser.error(f"argument --html: {error}")


def _make_scenario(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, base: Scenario | None
) -> Scenario:
    """Makes the scenario of the file, changed by the options; ends the program if they do not fit."""
    if base is None:
        num_stages = parsed.stages or DEFAULT_STAGES
        costs = Costs.of(num_stages, forward=1.0, backward=2.0)
        base = Scenario(costs, num_micro_batches=DEFAULT_MICRO_BATCHES)
    else:
        num_stages = base.costs.num_stages
        if parsed.stages not in (None, num_stages):
            parser.error(
                f"argument --stages: the file of --costs-from has {num_stages} stages; got "
                f"{parsed.stages}. Leave it out."
            )
    if any(getattr(parsed, f"{name}_cost") is not None for name in ("forward", "backward", "update")):
        base = dataclasses.replace(base, layers=())  # they are parts of what these took
    base = dataclasses.replace(base, costs=_make_costs(parser, parsed, base.costs))
    count: int = parsed.micro_batches or base.num_micro_batches
    training = base.training and not parsed.inference
    for name in ("backward", "weight-gradients", "update"):
        if not training and getattr(parsed, f"{name.replace('-', '_')}_cost") is not None:
            parser.error(f"argument --{name}-cost: there is none in inference. Leave it out.")
    chunk_size = parsed.chunk_size or base.chunk_size
    if count % chunk_size:
        parser.error(
            f"argument --chunk-size: must divide the number of micro-batches, {count}; got {chunk_size}. "
            "Give a divisor of it."
        )
    check_size(parser, num_stages, count // chunk_size, training)
    mapping = base.device_mapping
    if parsed.device_mapping is not None or parsed.costs_from is None:
        mapping = find_mapping(parser, parsed.device_mapping, num_stages, parsed.schedule)
    schedule = parsed.schedule or base.schedule
    if schedule_name(schedule) == "searched" and parsed.bytes_per_ipu is not None:
        schedule = SearchedSchedule(parsed.bytes_per_ipu)
    elif parsed.bytes_per_ipu is not None:
        parser.error(
            "argument --bytes-per-ipu: only the schedule searched has a limit; got "
            f"{schedule_name(schedule)}. Leave it out, or give --schedule searched."
        )
    try:
        scenario = dataclasses.replace(
            base,
            schedule=schedule,
            num_micro_batches=count,
            device_mapping=mapping,
            training=training,
            chunk_size=chunk_size,
            cores=base.cores if parsed.cores is None else parsed.cores,
            memory=base.memory if mapping == base.device_mapping else None,  # by device
            cluster=_make_cluster(parser, parsed, base.cluster, max(mapping) + 1),
        )
        scenario.timetable()
        return scenario
    except ValueError as error:
        parser.error(str(error))


def _make_cluster(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, base: Cluster, num_ipus: int
) -> Cluster:
    """Replaces parts of a cluster by the options that are given."""
    num_replicas: int = parsed.replicas or base.num_replicas
    num_processes: int = parsed.processes or base.num_processes
    if num_replicas * num_ipus % num_processes:
        parser.error(
            f"argument --processes: must divide the number of devices, {num_replicas * num_ipus} "
            f"({num_replicas} replicas of {num_ipus} devices); got {num_processes}. Give a divisor of it."
        )
    sharing = parsed.share_optimizer_state or base.shards_optimizer_state
    if sharing and num_replicas == 1:
        parser.error(
            "argument --share-optimizer-state: one replica shares it with no other. Give --replicas, or "
            "leave it out."
        )
    speeds = {}
    for place, name in enumerate(("within", "between")):
        speed = getattr(base, name)
        for figure in ("latency", "bandwidth"):
            values = getattr(parsed, figure)
            if values is not None and len(values) > 2:
                parser.error(
                    f"argument --{figure}: must be one number, or two (within a process, between "
                    f"processes); got {len(values)}."
                )
            if values is not None:
                speed = dataclasses.replace(speed, **{figure: values[min(place, len(values) - 1)]})
        speeds[name] = speed
    if parsed.replicas or parsed.processes or num_replicas * num_ipus != len(base.processes):
        processes = Cluster.of(num_replicas, num_ipus, num_processes).processes
    else:
        processes = base.processes
    return Cluster(num_replicas, processes, **speeds, shards_optimizer_state=sharing)


def _make_costs(parser: argparse.ArgumentParser, parsed: argparse.Namespace, base: Costs) -> Costs:
    """Replaces costs by the options that are given."""
    costs: dict[str, Any] = {}
    for option, (name, per, _) in _COSTS.items():
        value = getattr(parsed, option.replace("-", "_"))
        if value is not None:
            count = base.num_stages - (per == _PAIR)
            costs[name] = spread(parser, f"--{option}", value, count, per) if per else value
    try:
        changed = Costs.of(base.num_stages, **{"forward": base.forward, "backward": base.backward, **costs})
    except ValueError as error:
        parser.error(f"argument --weight-gradients-cost: {error}")
    names = ["transfers" if name == "transfer" else name for name in costs]
    if "backward" in costs and "weight_gradients" not in costs:
        names.append("weight_gradients")
    return dataclasses.replace(base, **{name: getattr(changed, name) for name in names})


def _read(parser: argparse.ArgumentParser, file: Path) -> MeasuredRun:
    """Reads the pipeline of a file; ends the program if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
        entries = json.loads(text)
    except OSError as error:
        parser.error(f"argument --costs-from: cannot read {str(file)!r}: {error.strerror}.")
    except ValueError as error:
        parser.error(f"argument --costs-from: must be a JSON file; {str(file)!r} is not: {error}.")
    if isinstance(entries, dict) and entries.get("format") == FORMAT:
        try:
            return find_measured(read_profile(text))
        except ValueError as error:
            parser.error(f"argument --costs-from: {str(file)!r}: {error}")
    entry = entries.get("scenario", entries) if isinstance(entries, dict) else None
    if not isinstance(entry, dict) or "costs" not in entry:
        parser.error(
            f'argument --costs-from: {str(file)!r} must have "costs", by itself or under "scenario", as '
            "Scenario.as_dict has them, or be a profile.json."
        )
    try:
        return MeasuredRun(Scenario.from_dict(entry))
    except ValueError as error:
        parser.error(f"argument --costs-from: {str(file)!r}: {error}")


def _title(scenario: Scenario) -> str:
    purpose = "training" if scenario.training else "inference"
    text = (
        f"{scenario.costs.num_stages} stages on {len(scenario.ipus)} devices, {scenario.num_micro_batches} "
        f"micro-batches, schedule {scenario.searched or schedule_name(scenario.schedule)}, {purpose}"
    )
    if scenario.chunk_size > 1:
        text += f", {scenario.chunk_size} micro-batches per program"
    if scenario.cores is not None:
        text += f", {scenario.cores:g} cores for all"
    if scenario.cluster.num_replicas > 1:
        text += f", {scenario.cluster.num_replicas} replicas"
        text += " that share the optimizer state" * scenario.cluster.shards_optimizer_state
    if scenario.cluster.num_processes > 1:
        text += f", {scenario.cluster.num_processes} processes"
    return text


def _timeline_table(simulation: Simulation) -> str:
    modes = (simulation.free_running, simulation.lock_step)
    rows = [
        ["step time", *(f"{mode.step_time:.6g}" for mode in modes)],
        ["devices compute", *(f"{mode.utilisation:.1%}" for mode in modes)],
    ]
    for cause in modes[0].bubble.by_cause():
        parts = [mode.bubble.by_cause()[cause] / (len(mode.work) * mode.step_time or 1) for mode in modes]
        if cause != "shared_cores" or simulation.scenario.cores is not None:
            rows.append([f"idle, {cause.replace('_', ' ')}", *(f"{part:.1%}" for part in parts)])
    return format_table(["", "waiting for data only", "in lock-step"], rows)


def _ipu_table(simulation: Simulation) -> str:
    timeline, scenario = simulation.free_running, simulation.scenario
    peaks = {peak.ipu: peak for peak in timeline.peaks}
    headings = ["device", "stages", "work", "computes"] + ["holds at most", "at"] * bool(peaks)
    rows = []
    for ipu, work in timeline.work.items():
        mapping = scenario.device_mapping
        stages = [str(stage) for stage, device in enumerate(mapping) if device == ipu % scenario.num_ipus]
        row = [str(ipu), " ".join(stages), f"{work:.6g}", f"{timeline.utilisation_of_ipus[ipu]:.1%}"]
        if peaks:
            row += [f"{peaks[ipu].num_bytes:,} bytes", f"{peaks[ipu].time:.6g}"]
        rows.append(row)
    return format_table(headings, rows, texts=2)


def _what_if_table(variants: Sequence[Variant]) -> str:
    has_chunks = any(row.chunk_size > 1 for row in variants)
    headings = ["what if", "micro-batches"] + ["per program"] * has_chunks
    headings += ["step time", "computes", "samples per time"]
    headings += [] if variants[0].num_peak_bytes is None else ["holds at most"]
    rows = []
    for row in variants:
        name = row.split or row.cluster or row.schedule
        cells = [name if row.change else f"{name}, as it is", str(row.num_micro_batches)]
        cells += [str(row.chunk_size)] * has_chunks
        cells += [f"{row.step_time:.6g}", f"{row.utilisation:.1%}", f"{row.gain:+.1%}"]
        cells += [] if row.num_peak_bytes is None else [f"{row.num_peak_bytes:,} bytes"]
        rows.append(cells)
    return format_table(headings, rows)


def _as_json(
    simulation: Simulation, variants: Sequence[Variant], advice: Advice | None, sentences: str
) -> dict[str, Any]:
    searched = simulation.scenario.searched
    return {
        "scenario": simulation.scenario.as_dict(),
        "free_running": _timeline_json(simulation.free_running),
        "lock_step": _timeline_json(simulation.lock_step),
        "searched": None if searched is None else {name: getattr(searched, name) for name in _OF_SEARCH},
        "what_if": [_variant_json(row) for row in variants],
        "advice": None
        if advice is None
        else {
            "sentence": sentences,
            "gain": advice.gain,
            "limiting_stage": advice.limiting_stage,
            "variant": None if advice.variant is None else _variant_json(advice.variant),
        },
    }


def _timeline_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_time": timeline.step_time,
        "utilisation": timeline.utilisation,
        "utilisation_of_ipus": timeline.utilisation_of_ipus,
        "idle": timeline.bubble.by_cause(),
        "peaks": [peak._asdict() for peak in timeline.peaks],
        "actions": [interval._asdict() for interval in timeline.intervals()],
        "transfers": [interval._asdict() for interval in timeline.transfers()],
    }


def _variant_json(row: Variant) -> dict[str, Any]:
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    del fields["scenario"]
    return fields
