"""Models that go on from a file, without the code of their forward, or from memory, after a restart."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export.graph_signature import InputKind, OutputKind

from ipu_pipeline.checkpointing.in_memory import InMemorySeries, name_next
from ipu_pipeline.checkpointing.states import State
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.inspect import find_separate_variables
from ipu_pipeline.poptorch.dtypes import to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.call_values import (
    OF_FILE,
    Arguments,
    Batching,
    Signature,
    check_like_first,
    check_shapes,
    shapes_of,
)
from ipu_pipeline.poptorch.execution.compiled_model import CompiledModel
from ipu_pipeline.poptorch.execution.host_weights import on_host, writing
from ipu_pipeline.poptorch.execution.model_optimizer import ModelOptimizer
from ipu_pipeline.poptorch.files.model_files import SavedGraph, SavedModel
from ipu_pipeline.poptorch.graphs.capture import WRITES, Captured, FunctionalProgram
from ipu_pipeline.poptorch.graphs.example_values import Assumptions
from ipu_pipeline.poptorch.structures import Structure
from ipu_pipeline.saved_states import first_rows, place_state, take_parts

# From a file.

_PREFIX = "model."  # of the targets: the captured program is a module that calls the model
_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER)
_FIXED = "fixed "  # before the names of tensors among a file's constants that must be as they were

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
    if expected := captured.assumptions.expected:
        raise Error(
            f"{expected[0].place} asks for a value of a tensor, which a run is compared with "
            "(Options.allowValueBranches). A file cannot hold that. Use torch.where or torch.cond there."
        )
    constants = {
        str(spec.target): captured.tensors[str(spec.target)]
        for _node, spec in _inputs(captured.program)
        if spec.kind not in (*_TENSORS, InputKind.USER_INPUT)
    }
    constants |= {f"{_FIXED}{name}": value for name, value in captured.assumptions.fixed.items()}
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
    signature, expected = signature_of(model), graph.signature
    if [(p.name, p.kind) for p in signature.parameters.values()] != [
        (p.name, p.kind) for p in expected.parameters.values()
    ]:
        raise Error(f"The file is of a model with forward{expected}; this model has forward{signature}.")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model_tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    tensors: dict[str, torch.Tensor] = dict(graph.constants)
    for node, spec in _inputs(graph.program):
        target = str(spec.target)
        if spec.kind not in _TENSORS:
            continue
        name = target.removeprefix(_PREFIX)
        is_parameter = spec.kind is InputKind.PARAMETER
        if name not in model_tensors or (name in parameters) is not is_parameter:
            kind = "parameter" if is_parameter else "buffer"
            raise Error(f"The file is of a model with a {kind} {name}, which this one does not have.")
        tensor, value = model_tensors[name], node.meta["val"]
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise Error(
                f"The file is of a model whose {name} is {value.dtype} of shape {tuple(value.shape)}; "
                f"this model's is {tensor.dtype} of shape {tuple(tensor.shape)}."
            )
        tensors[target] = tensor
    fixed = {n.removeprefix(_FIXED): t for n, t in graph.constants.items() if n.startswith(_FIXED)}
    assumptions = Assumptions(fixed=fixed)
    assumptions.check_fixed(model_tensors)
    return Captured(graph.program, graph.outputs, tensors, assumptions=assumptions)


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
        for saved_tensor in saved.tensors:
            *path, name = saved_tensor.name.split(".")
            part: torch.nn.Module = self
            try:
                for inner in path:
                    if inner not in dict(part.named_children()):
                        part.add_module(inner, torch.nn.Module())
                    part = part.get_submodule(inner)
                if isinstance(saved_tensor.tensor, torch.nn.Parameter):
                    part.register_parameter(name, saved_tensor.tensor)
                else:
                    part.register_buffer(name, saved_tensor.tensor, saved_tensor.is_persistent)
            except (KeyError, TypeError) as error:
                raise Error(f"The file has a tensor of the name {saved_tensor.name!r}: {error}.") from error
        self.train(saved.is_training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the user's forward returned for arguments like these."""
        signature = Signature(self.saved_graph.signature)
        arguments = signature.bind(args, kwargs, self.saved_graph.arguments)
        first = make_arguments(self.saved_graph, signature, Batching(1, 1))
        check_like_first(signature, first, arguments, OF_FILE)
        check_shapes(arguments, shapes_of(first), OF_FILE)
        captured = bind(self.saved_graph, self, self.saved_graph.trains)
        program = captured.program
        names = [node.name for node, spec in _inputs(program) if spec.kind is InputKind.USER_INPUT]
        inputs = dict(zip(names, arguments.tensors, strict=True))
        values = [
            inputs[node.name] if node.name in inputs else captured.tensors[str(spec.target)]
            for node, spec in _inputs(program)
        ]
        with torch.no_grad():
            outputs = torch.fx.Interpreter(program.graph_module).run(*values)
            results = []
            for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
                if spec.kind in WRITES:
                    captured.tensors[str(spec.target)].copy_(value)
                elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                    inputs[str(spec.target)].copy_(value)
                elif spec.kind is OutputKind.USER_OUTPUT:
                    results.append(value)
        return captured.outputs.unflatten(results)

    def _get_name(self) -> str:
        return self.class_name


# From memory.

# In `State.extra`: the names of the tensors that variables are of, and what is known of the optimizer.
_NAMES, _OPTIMIZER = "poptorch_names", "poptorch_optimizer"


class Resumption:
    """The in-memory checkpoints of a model that trains, one before each call.

    Attributes:
      num_calls: how many calls are done, with those before this process was started.
      has_new_values: whether the optimizer's values were set by the program since, before the first call.
    """

    @processes.one_thread("resuming a PopTorch model")
    def __init__(self, model: torch.nn.Module, num_done: int) -> None:
        """Looks for a checkpoint, and puts its weights into the model on the host."""
        self._model = model
        self.has_new_values = False
        self.num_calls = num_done
        self._names: dict[str, str] = {}  # variable -> tensor
        self._snapshot: State | None = None
        self._series = series = InMemorySeries.of_environment(name_next("poptorch"))
        if series is None:
            return
        snapshot = series.find()
        if snapshot is None or series.runs < num_done:
            series.runs = num_done
            return
        _write_to_host(snapshot, model)
        self._snapshot, self._names, self.num_calls = snapshot, snapshot.extra[_NAMES], series.runs

    @property
    def is_pending(self) -> bool:
        """Whether there is a checkpoint that no model has taken over."""
        return self._snapshot is not None

    def take_over(self, compiled: CompiledModel, training: ModelOptimizer) -> None:
        """Puts what was found into a model that has just been compiled."""
        snapshot = self._snapshot
        assert snapshot is not None
        # With several shapes, variables that only other programs use are not the pipeline's.
        names, variables = compiled.pipeline.variables, snapshot.variables
        pipeline_variables = {name: value for name, value in variables.items() if name in names}
        of_pipeline = dataclasses.replace(snapshot, variables=pipeline_variables)
        state = place_state(of_pipeline, "What is in memory", compiled.pipeline)
        if not self.has_new_values:
            training.restore_values(snapshot.extra[_OPTIMIZER])
        compiled.replace(
            **{
                **vars(state),
                "variables": {**first_rows(snapshot), **state.variables},
                "optimizer_state": training.put_values(state.optimizer_state),
            }
        )
        _write_to_host(snapshot, self._model)  # once more: the program may have loaded older weights
        assert self._series is not None
        self._series.say_resumed()
        self._snapshot = None

    @processes.one_thread("a call of a PopTorch model")
    def keep(self, compiled: CompiledModel, training: ModelOptimizer) -> None:
        """Keeps the state of a model that is about to run."""
        compiled.check_not_lost()
        if self._series is None:
            return
        assert compiled.state is not None
        if not compiled.tensors.keys() <= self._names.keys():
            names = {id(tensor): name for name, tensor in named_tensors(self._model).items()}
            new_names = {n: names[id(t)] for n, t in compiled.tensors.items() if id(t) in names}
            self._names = {**self._names, **new_names}
        state = dataclasses.replace(compiled.state, variables=compiled.variables)
        extra = {_NAMES: self._names, _OPTIMIZER: training.describe()}
        self._series.meet()
        self._series.take(lambda: take_parts(state, find_separate_variables(compiled.pipeline), extra))

    def note_call(self, compiled: CompiledModel) -> None:
        """Counts a call that is done."""
        if self._series is not None:
            assert compiled.state is not None
            self._series.note_run(compiled.state.update_count)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and buffers by all their names."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def _write_to_host(snapshot: State, model: torch.nn.Module) -> None:
    """Writes a snapshot's variables into the user's model."""
    named, values = named_tensors(model), first_rows(snapshot)
    names: Mapping[str, str] = snapshot.extra[_NAMES]
    if missing := sorted({name for name in names.values() if name not in named}):
        raise ValueError(
            f"What is in memory is of another model: this one has no {', '.join(missing)}. A program that "
            "is started again must make the model that it made before."
        )
    with on_host(*named.values()):
        for variable, name in names.items():
            tensor, value = named[name], np.asarray(values[variable])
            if tuple(tensor.shape) == value.shape:  # not rows of groups of replicas, which come later
                with writing(tensor):
                    tensor.copy_(to_torch(value, tensor.dtype))
