"""The results of `Program.placement()` and `Program.summary()`, which print as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.inspect import (
    PipelineDetails,
    PipelineFacts,
    PipelineSummary,
    StageFacts,
    count_costs,
    select_fields,
)
from ipu_pipeline.engine.schedules import Scenario, named_schedules
from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.ground.tables import align, describe_bytes
from ipu_pipeline.reports.predictions import predict_scenario, scenario_of

_MAX_ACTIONS = 4_000  # of a step that is simulated: that takes a few tenths of a second
_NOTHING = "The program has no pipelines and no loops."


@dataclass(frozen=True)
class Placement:
    """The placement of a program's parts; `str` makes a table of it.

    Attributes:
      calls: its pipelines and loops, in order.
      devices: the JAX device of each IPU; empty as long as none are selected.
      replicas: for each of `calls`, the JAX devices of each replica, by IPU; empty for one replica.
    """

    calls: tuple[PipelineDetails, ...]
    devices: tuple[str, ...]
    replicas: tuple[tuple[tuple[str, ...], ...], ...]

    def __str__(self) -> str:
        """The tables, one after another."""
        if not self.calls:
            return _NOTHING
        return "\n\n".join(map(self._describe, self.calls, self.replicas))

    def _describe(self, call: PipelineDetails, replicas: Sequence[Sequence[str]]) -> str:
        rows = [("stage", "IPU", "device", "operations", "bytes of variables", "variables")]
        for part in call.parts:
            first, *later_names = part.variables or ("none",)
            groups = replicas or (self.devices,)
            size = call.num_devices_per_ipu
            devices = [name for names in groups for name in names[part.ipu * size : (part.ipu + 1) * size]]
            device = ", ".join(devices) or "not selected yet"
            numbers = (str(part.num_operations), f"{part.num_variable_bytes:,}")
            rows.append((str(part.index), str(part.ipu), device, *numbers, first))
            rows += [("", "", "", "", "", name) for name in later_names]
        edges = [("from", "to", "bytes forwards", "bytes backwards")]
        edges += [
            (
                "feed" if edge.source is None else f"IPU {edge.source}",
                f"IPU {edge.target}",
                f"{edge.num_forward_bytes:,}",
                f"{edge.num_backward_bytes:,}",
            )
            for edge in call.edges
        ]
        crossing = align(edges) if call.edges else ["  nothing crosses"]
        name = f"{call.name}, in {len(replicas)} replicas" if replicas else call.name
        lines = [name, *align(rows), f"per {call.unit}:", *crossing]
        if call.sent:
            sent = [("from", "to", "bytes", "what", "read by")]
            sent += [
                (f"IPU {s.source}", f"IPU {s.target}", f"{s.num_bytes:,}", s.what, s.primitive)
                for s in call.sent
            ]
            lines += ["per weight update:", *align(sent)]
        if call.divided:
            lines += [
                f"each of the {call.num_devices_per_ipu} devices of an IPU has a part of:",
                *(f"  {name}" for name in call.divided),
            ]
        if call.cuts:
            lines.append(call.cuts)
        if call.dispatch:
            lines.append(f"dispatch: {call.dispatch}")
        if advice := self._advise(call):
            lines.append(advice)
        return "\n".join(lines)

    def _advise(self, call: PipelineDetails) -> str:
        """The advice of report pages, by measured or else counted costs; "" if it cannot be simulated."""
        scenario = _make_scenario(call)
        if scenario is None:
            return ""
        is_measured = call.costs is not None
        is_shared = bool(self.devices) and all("CPU" in device.upper() for device in self.devices)
        cores = count_cores() if is_measured and is_shared else None
        step = "a step on devices of their own"
        sentence = predict_scenario(scenario, cores, is_measured=is_measured, step=step).advice.sentence
        return f"advice ({'measured' if is_measured else 'by counted operations'}): {sentence}"


def _make_scenario(details: PipelineDetails) -> Scenario | None:
    """Makes a scenario of a pipeline that may not have run; costs are in seconds.

    They are what was measured of the pipeline, or counted from its operations.

    Returns:
      The scenario; None for a loop, for all stages on one IPU, for a schedule that is the user's own or
      searched, and if the number of micro-batches is known at run time only.
    """
    count = details.num_micro_batches
    if details.kind == "loop" or details.schedule not in named_schedules() or count is None:
        return None
    if details.num_ipus == 1:
        return None
    costs = count_costs(details) if details.costs is None else details.costs
    facts = select_fields(
        PipelineFacts,
        details,
        stages=tuple(
            select_fields(StageFacts, stage, layers=stage.whole_layers) for stage in details.stages
        ),
    )
    scenario = scenario_of(facts, costs, count * details.num_serialized)
    return None if scenario.num_actions > _MAX_ACTIONS else scenario


@dataclass(frozen=True)
class ProgramSummary:
    """The needs and work of a program's pipelines and loops; `str` makes a table of each.

    Attributes:
      calls: its pipelines and loops, in order.
      num_checkpoint_bytes: the bytes of its state in an in-memory checkpoint: the variables, and the
        optimizers' state; None if it trains nothing, or no launcher has given a directory for them.
    """

    calls: tuple[PipelineSummary, ...]
    num_checkpoint_bytes: int | None = None

    def __str__(self) -> str:
        """The tables, one after another."""
        tables = list(map(str, self.calls)) or [_NOTHING]
        if self.num_checkpoint_bytes is not None:
            tables.append(
                f"in-memory checkpoints: {describe_bytes(2 * self.num_checkpoint_bytes)} of host memory, "
                "shared out among the nodes; with several nodes, as much again"
            )
        return "\n\n".join(tables)
