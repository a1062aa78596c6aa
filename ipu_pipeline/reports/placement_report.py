"""`Program.placement()`: a table of what went where."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.ground.tables import align
from ipu_pipeline.reports.summaries import Edge, Part, Sent

__all__ = ["CallPlacement", "Placement"]


@dataclass(frozen=True)
class CallPlacement:
    """What went where in one pipeline or loop.

    Attributes:
      name: its name.
      parts: its stages; of a loop, the runs of operations of one shard.
      edges: what crosses.
      unit: per what: "micro-batch", or of a loop "iteration".
      sent: what crosses per weight update.
      dispatch: over several IPUs, how many micro-batches a program handles, and why.
      replicas: the JAX devices of each replica, by IPU; empty for one replica.
      num_devices_per_ipu: how many of them compute a stage together.
      divided: variables of which each of these has a part.
    """

    name: str
    parts: tuple[Part, ...]
    edges: tuple[Edge, ...]
    unit: str
    sent: tuple[Sent, ...] = ()
    dispatch: str = ""
    replicas: tuple[tuple[str, ...], ...] = ()
    num_devices_per_ipu: int = 1
    divided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """What went where in a program; `str` makes a table of it.

    Attributes:
      calls: its pipelines and loops, in order.
      devices: the JAX device of each IPU; empty as long as none are selected.
    """

    calls: tuple[CallPlacement, ...]
    devices: tuple[str, ...]

    def __str__(self) -> str:
        """The tables, one after another."""
        if not self.calls:
            return "The program has no pipelines and no loops."
        return "\n\n".join(self._describe(call) for call in self.calls)

    def _describe(self, call: CallPlacement) -> str:
        rows = [("stage", "IPU", "device", "operations", "bytes of variables", "variables")]
        for part in call.parts:
            first, *others = part.variables or ("none",)
            known = call.replicas or (self.devices,)
            size = call.num_devices_per_ipu
            devices = [name for own in known for name in own[part.ipu * size : (part.ipu + 1) * size]]
            device = ", ".join(devices) or "not selected yet"
            numbers = (str(part.num_operations), f"{part.num_variable_bytes:,}")
            rows.append((str(part.index), str(part.ipu), device, *numbers, first))
            rows += [("", "", "", "", "", name) for name in others]
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
        name = f"{call.name}, in {len(call.replicas)} replicas" if call.replicas else call.name
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
        if call.dispatch:
            lines.append(f"dispatch: {call.dispatch}")
        return "\n".join(lines)
