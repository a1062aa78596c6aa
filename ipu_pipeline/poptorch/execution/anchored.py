"""The values within a model that `Options.anchorTensor` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.poptorch.enums import OutputMode
from ipu_pipeline.poptorch.execution.outputs import join_outputs
from ipu_pipeline.poptorch.graphs.anchored_gradients import is_gradient
from ipu_pipeline.poptorch.options import Options

__all__ = ["AnchoredValues"]


class AnchoredValues:
    """The anchored values of the last call, by the short names of the options."""

    def __init__(self, options: Options) -> None:
        """Starts without values."""
        self._options = options
        self._kept: dict[str, torch.Tensor] = {}

    def keep(
        self, collected: list[Collected], dtypes: Sequence[torch.dtype], first: int, mode: OutputMode
    ) -> None:
        """Keeps the values of a call."""
        anchored = self._options.anchored_tensors
        shorts = sorted(anchored, key=lambda short: is_gradient(anchored[short].long_name))
        for place, short in enumerate(shorts, first):
            anchor = anchored[short]
            wanted = mode if anchor.output_mode in (None, OutputMode.Default) else anchor.output_mode
            is_own = wanted is anchor.output_mode
            period = anchor.output_return_period if is_own else self._options.output_return_period
            has_replicas = self._options.replication_factor > 1
            (value,) = join_outputs(
                collected, dtypes[place : place + 1], wanted, period, place, has_replicas
            )
            self._kept[short] = value

    def find(self, short_name: str) -> torch.Tensor:
        """Returns a value of the last call; see `PoplarExecutor.getAnchoredTensor`."""
        known = list(self._options.anchored_tensors)
        assert short_name in known, f"No tensor is anchored as {short_name!r}. There are: {known}."
        assert short_name in self._kept, "Run the model before asking for an anchored tensor."
        return self._kept[short_name]
