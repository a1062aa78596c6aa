"""Checks of convolutions side by side (`MultiConv`)."""

from __future__ import annotations

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.lowering.unsupported import describe_place

__all__ = ["check_multi_convs"]


def check_multi_convs(graph: torch.fx.Graph) -> None:
    """Counts the convolutions in each `MultiConv`.

    Raises:
      Error: one has none, or was given a list with another number of values.
    """
    opened: list[list[torch.fx.Node]] = []
    for node in graph.nodes:
        part = markers.read_multi_conv(node)
        if node.target is torch.ops.aten.convolution.default:
            for inside in opened:
                inside.append(node)
        elif part is not None and part.counts is None:
            opened.append([])
        elif part is not None and part.counts is not None:
            found = opened.pop()
            if not found:
                raise Error(f"The MultiConv in {describe_place(node)} has no convolution in it.")
            for name, number in part.counts.items():
                if number != len(found):
                    raise Error(
                        f"MultiConv.{name} was given {number} values, but there are {len(found)} "
                        f"convolutions in it: in {'; '.join(map(describe_place, found))}. Give one for "
                        "each, or a single one for all."
                    )
