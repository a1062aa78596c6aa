"""A model compiled for arguments of certain shapes: the parts that depend on the shapes.

The other parts, such as the weights, belong to the `CompiledModel`, which has one program or several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import torch

from ipu_pipeline import engine
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import Arguments, describe_shapes, shapes_of
from ipu_pipeline.poptorch.graphs.capture import Captured
from ipu_pipeline.poptorch.graphs.stages import ModelStages
from ipu_pipeline.queues.synthetic import make_synthetic

__all__ = ["Holding", "Program"]


class Program:
    """A model for some shapes, as the engine runs it.

    Attributes:
      arguments: the arguments that it was made for. Their tensors have a dtype, and no elements.
      shapes: the shapes of these tensors, for all micro-batches together.
      captured: the model as a graph.
      stages: the graph as stages.
      pipeline: the stages as a pipeline.
      micro_batch: an example of a micro-batch.
    """

    def __init__(
        self,
        arguments: Arguments,
        captured: Captured,
        stages: ModelStages,
        pipeline: engine.Pipeline,
        micro_batch: tuple[Any, ...],
    ) -> None:
        """Takes its parts, and forgets the values of the arguments' tensors."""
        tensors = [torch.empty(0, dtype=tensor.dtype) for tensor in arguments.tensors]
        self.arguments = Arguments(tensors, arguments.structure, arguments.names)
        self.shapes = shapes_of(arguments)
        self.captured = captured
        self.stages = stages
        self.pipeline = pipeline
        self.micro_batch = micro_batch

    @property
    def num_taken(self) -> int:
        """The number of micro-batches in a weight update, for all replicas together."""
        assert self.pipeline.options.num_micro_batches is not None
        return self.pipeline.options.num_micro_batches * self.pipeline.num_replicas

    @functools.cached_property
    def synthetic(self) -> list[Any]:
        """The values kept on the devices instead of a weight update's micro-batches: zeros by default."""
        leaves = self.pipeline.traced.element
        return list(make_synthetic(self.pipeline, leaves, self.num_taken)(self.num_taken))

    @functools.cached_property
    def elsewhere(self) -> tuple[Any, ...]:
        """The stand-ins for micro-batches of other processes: JAX arrays, which are never copied."""
        element = self.pipeline.traced.element
        return tuple(jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in element)

    def check_trained(self, other: Program) -> None:
        """Checks that this program trains what another one of the model does, on as many IPUs."""
        trained, before = self.stages.trained, other.stages.trained
        if trained != before:
            changes = {"no longer ": before - trained, "": trained - before}
            told = [f"{when}on {_name(names)}" for when, names in changes.items() if names]
            raise Error(
                f"With these shapes ({self.describe()}) the loss depends {' and '.join(told)}, unlike "
                f"with {other.describe()}, so they cannot be trained by one optimizer. Let forward "
                "use the same parameters for all shapes; or wrap another model for these."
            )
        if self.pipeline.num_devices != other.pipeline.num_devices:
            raise Error(
                f"With these shapes ({self.describe()}) the model is on {self.pipeline.num_devices} IPUs, "
                f"and with {other.describe()} on {other.pipeline.num_devices}. Give it the same blocks "
                "for all."
            )

    def check_homes(self, other: Program) -> None:
        """Checks that variables are on the IPUs that another program of the model has them on."""
        home, known = self.find_homes(), other.find_homes()
        moved = [name for name in home.keys() & known.keys() if home[name] != known[name]]
        if moved:
            raise Error(
                f"With these shapes ({self.describe()}) {_name(moved)} would be on another IPU than with "
                f"{other.describe()}. Give each block one IPU for all shapes."
            )

    def find_homes(self) -> dict[str, int]:
        """Returns the IPU of each variable."""
        owners = self.pipeline.traced.owners
        return {name: self.pipeline.device_mapping[stage] for name, stage in owners.items()}

    def describe(self) -> str:
        """Describes its shapes, by the names of the arguments."""
        return describe_shapes(self.arguments.names, self.shapes)


def _name(variables: Iterable[str]) -> str:
    return ", ".join(sorted(name.partition("/")[2] for name in variables))


class Holding:
    """The modules, parameters and buffers that a model held when it was compiled."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes what the model holds."""
        self._names = {id(tensor): full for full, tensor in tensors.items()}
        self._held = _find_held(model, tensors.values())
        held = {id(value) for _where, _name, value in self._held}
        for full, tensor in tensors.items():
            if id(tensor) not in held:
                raise Error(
                    f"{full.partition('/')[2]} of the model was replaced in another thread while the model "
                    "was compiled. Change tensors in place (copy_, load_state_dict without assign), or "
                    "call again."
                )

    def check(self) -> None:
        """Checks that nothing has been replaced since then."""
        for held, name, value in self._held:
            if held.get(name) is not value:
                kind = "module" if isinstance(value, torch.nn.Module) else "tensor"
                full = self._names.get(id(value), f"model/{name}").partition("/")[2]
                raise Error(
                    f"{full} of the model is another {kind} than when the model was compiled. Change "
                    "tensors in place (copy_, load_state_dict without assign), or call destroy() on the "
                    "model and wrap it again."
                )


def _find_held(
    model: torch.nn.Module, tensors: Iterable[torch.Tensor]
) -> Sequence[tuple[Mapping[str, Any], str, Any]]:
    """Finds where modules hold each other and some tensors: the dict, its key, and the value."""
    wanted = set(map(id, tensors))
    return [
        (vars(module)[kind], name, value)
        for module in model.modules()
        for kind in ("_modules", "_parameters", "_buffers")
        for name, value in vars(module)[kind].items()
        if kind == "_modules" or id(value) in wanted
    ]
