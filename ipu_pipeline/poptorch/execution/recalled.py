"""Models captured for a file, used on devices and the host without the code of their forward."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
from torch.export.graph_signature import InputKind, OutputKind

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import (
    OF_FILE,
    Arguments,
    Batching,
    Signature,
    check_like_first,
    check_shapes,
    shapes_of,
)
from ipu_pipeline.poptorch.files.contents import SavedGraph, SavedModel
from ipu_pipeline.poptorch.graphs.capture import WRITES, Captured, FunctionalProgram
from ipu_pipeline.poptorch.structures import Structure

__all__ = ["RestoredModel", "bind", "make_arguments", "signature_of", "to_graph"]

_PREFIX = "model."  # of the targets: the captured program is a module that calls the model
_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER)

Specs: TypeAlias = "list[tuple[torch.fx.Node, Any]]"


def signature_of(model: torch.nn.Module) -> inspect.Signature:
    """Returns the signature of a model's forward."""
    return (
        model.saved_graph.signature
        if isinstance(model, RestoredModel)
        else inspect.signature(model.forward)
    )


def to_graph(captured: Captured, arguments: Structure, model: torch.nn.Module, trains: bool) -> SavedGraph:
    """Turns a captured model into a graph for a file."""
    constants = {
        str(spec.target): captured.tensors[str(spec.target)]
        for _node, spec in _inputs(captured.program)
        if spec.kind not in (*_TENSORS, InputKind.USER_INPUT)
    }
    outputs, signature = captured.outputs, signature_of(model)
    return SavedGraph(trains, captured.program, constants, arguments, outputs, signature)


def bind(graph: SavedGraph, model: torch.nn.Module, trains: bool) -> Captured:
    """Puts a model's tensors into a graph of a file."""
    if graph.trains is not trains:
        have, want = ("inference", "training")[graph.trains], ("inference", "training")[trains]
        raise Error(
            f"The file has a model that was captured for {have}, which cannot be used for {want}. Load "
            f"one that was exported from a poptorch.{want}Model, by loadExecutable."
        )
    given, expected = signature_of(model), graph.signature
    if [(p.name, p.kind) for p in given.parameters.values()] != [
        (p.name, p.kind) for p in expected.parameters.values()
    ]:
        raise Error(f"The file is of a model with forward{expected}; this model has forward{given}.")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    tensors: dict[str, torch.Tensor] = dict(graph.constants)
    for node, spec in _inputs(graph.program):
        target = str(spec.target)
        if spec.kind not in _TENSORS:
            continue
        name = target.removeprefix(_PREFIX)
        is_parameter = spec.kind is InputKind.PARAMETER
        if name not in known or (name in parameters) is not is_parameter:
            kind = "parameter" if is_parameter else "buffer"
            raise Error(f"The file is of a model with a {kind} {name}, which this one does not have.")
        held, wanted = known[name], node.meta["val"]
        if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            raise Error(
                f"The file is of a model whose {name} is {wanted.dtype} of shape {tuple(wanted.shape)}; "
                f"this model's is {held.dtype} of shape {tuple(held.shape)}."
            )
        tensors[target] = held
    return Captured(graph.program, graph.outputs, tensors)


def make_arguments(graph: SavedGraph, signature: Signature, batching: Batching) -> Arguments:
    """Makes zeros like the arguments that a graph was captured for, for all micro-batches of a call."""
    number = batching.num_micro_batches
    names = signature.name_tensors(graph.arguments)
    tensors = []
    values = [
        node.meta["val"] for node, spec in _inputs(graph.program) if spec.kind is InputKind.USER_INPUT
    ]
    for name, value in zip(names, values, strict=True):
        if number > 1 and not value.dim():
            raise Error(
                f"Input {name} of the model in the file has no dimension, and cannot be cut into {number} "
                "micro-batches. Leave deviceIterations and gradientAccumulation at 1."
            )
        shape = (number * value.shape[0], *value.shape[1:]) if number > 1 else value.shape
        tensors.append(torch.zeros((), dtype=value.dtype).expand(shape))
    return Arguments(tensors, graph.arguments, names)


def _inputs(program: FunctionalProgram) -> Specs:
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return list(zip(nodes, program.graph_signature.input_specs, strict=True))


class RestoredModel(torch.nn.Module):
    """A model made by `poptorch.load`: parameters and buffers by their names, and forward's graph.

    Called on the host, it computes what was captured, in the train or eval mode and for the shapes of that
    time, for one micro-batch. Its results have no gradients.

    Attributes:
      saved_graph: the captured graph.
      class_name: the name of the user's class.
    """

    def __init__(self, graph: SavedGraph, saved: SavedModel) -> None:
        """Builds the model."""
        super().__init__()
        self.saved_graph = graph
        self.class_name = saved.class_name
        for one in saved.tensors:
            *path, name = one.name.split(".")
            part: torch.nn.Module = self
            try:
                for inner in path:
                    if inner not in dict(part.named_children()):
                        part.add_module(inner, torch.nn.Module())
                    part = part.get_submodule(inner)
                if isinstance(one.tensor, torch.nn.Parameter):
                    part.register_parameter(name, one.tensor)
                else:
                    part.register_buffer(name, one.tensor, one.is_persistent)
            except (KeyError, TypeError) as error:
                raise Error(f"The file has a tensor of the name {one.name!r}: {error}.") from error
        self.train(saved.is_training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the user's forward returned for arguments like these."""
        signature = Signature(self.saved_graph.signature)
        given = signature.bind(args, kwargs, self.saved_graph.arguments)
        first = make_arguments(self.saved_graph, signature, Batching(1, 1))
        check_like_first(signature, first, given, OF_FILE)
        check_shapes(given, shapes_of(first), OF_FILE)
        captured = bind(self.saved_graph, self, self.saved_graph.trains)
        program = captured.program
        names = [node.name for node, spec in _inputs(program) if spec.kind is InputKind.USER_INPUT]
        inputs = dict(zip(names, given.tensors, strict=True))
        values = [
            inputs[node.name] if node.name in inputs else captured.tensors[str(spec.target)]
            for node, spec in _inputs(program)
        ]
        with torch.no_grad():
            made = torch.fx.Interpreter(program.graph_module).run(*values)
            results = []
            for spec, value in zip(program.graph_signature.output_specs, made, strict=True):
                if spec.kind in WRITES:
                    captured.tensors[str(spec.target)].copy_(value)
                elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                    inputs[str(spec.target)].copy_(value)
                elif spec.kind is OutputKind.USER_OUTPUT:
                    results.append(value)
        return captured.outputs.unflatten(results)

    def _get_name(self) -> str:
        return self.class_name
