"""Captures a module of torch as a graph of core ATen operations, by `torch.export`.

This module handles what export leaves out: regions without gradients, the loss, the train and eval flags
at the time of wrapping, tensors that are plain attributes, and functions with their own backward, which
export would lose.

While a model is captured, a function of `torch.utils.checkpoint` is called like any other. A marker before
it records its inputs. In the graph, each of these values then goes through `recomputationCheckpoint`.

torchax is not used: its newest release cannot be imported with torch 2.13, and it leaves the statistics of
batch normalization behind.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import re
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs import refusals
from ipu_pipeline.poptorch.graphs.example_values import (
    Answer,
    Assumptions,
    Replaying,
    ValueAskedError,
    record,
    take_assumptions,
)
from ipu_pipeline.poptorch.graphs.losses import choose_loss, mark_losses
from ipu_pipeline.poptorch.graphs.refusals import Shortened
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering.decompositions import decompose
from ipu_pipeline.poptorch.lowering.interpreter import describe_place
from ipu_pipeline.poptorch.lowering.substitutes import WithoutValues, exportable
from ipu_pipeline.poptorch.operations import own_backwards
from ipu_pipeline.poptorch.structures import Structure, flatten
from ipu_pipeline.poptorch.thread_views import changed_for_this_thread_alone

# Backwards of the user's `torch.autograd.Function`s.


@contextlib.contextmanager
def keeping_own_backwards() -> Iterator[None]:
    """Makes applied functions keep their backward in the graph while a model is captured.

    Functions of torch itself are not changed.
    """
    plain: Any = vars(torch.autograd.Function)["apply"]  # a classmethod; written in C since torch 2.14

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if markers.current_capture() is None or function.__module__.split(".")[0] == "torch":
            return plain.__get__(None, function)(*args, **kwargs)
        return own_backwards.apply(function, args, kwargs)

    def refuse(traced: Any, *args: Any) -> Any:
        del args
        raise Error(
            f"{traced.fn_cls.__name__} is a torch.autograd.Function within a branch or body of torch's "
            "control flow, where its backward would be lost. Apply it to what goes in or comes out."
        )

    from torch._dynamo.variables.misc import AutogradFunctionVariable  # which takes seconds to load

    with (
        unittest.mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", refuse),
    ):
        yield


def capture_own_backwards(model: torch.nn.Module, capturing: markers.Capturing) -> None:
    """Captures the backwards of the functions that a model's forward applied."""
    storages = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())} - {
        0
    }
    for backward in [item for item in capturing.held if isinstance(item, own_backwards.OwnBackward)]:
        with refusals.explained(model), refusals.refusing_backward(backward.name), torch.no_grad():
            program = torch.export.export(backward, tuple(backward.examples), strict=False)
            program = decompose(program)
        constants = [value for value in program.constants.values() if isinstance(value, torch.Tensor)]
        if any(value.untyped_storage().data_ptr() in storages for value in constants):
            raise Error(
                f"The backward of {backward.name} uses a parameter, or a buffer, of the model. Give it to "
                "the function as an argument, and keep it by save_for_backward."
            )
        backward.program = program


# `torch.utils.checkpoint`.

_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def marking_checkpoints() -> Iterator[None]:
    """Makes `torch.utils.checkpoint.checkpoint` just call its function while a model is captured."""
    # It takes seconds to load, as export does.
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    utils: Any = torch.utils.checkpoint
    within_body: Any = TagActivationCheckpoint.__call__
    name = f"{_GENERATOR}_impl" if hasattr(utils, f"{_GENERATOR}_impl") else _GENERATOR  # since torch 2.14
    generator, apply = getattr(utils, name), utils.CheckpointFunction.apply

    def not_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        if markers.current_capture() is None:
            return generator(*args, **kwargs)
        bound = inspect.signature(generator).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["context_fn"] is not utils.noop_context_fn:
            warn_once(
                "The context_fn of torch.utils.checkpoint has no effect: the backward keeps only those "
                "values of the region that go through poptorch.recomputationCheckpoint."
            )
        _mark((bound.arguments["args"], bound.arguments["kwargs"]))
        return _one_step()

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        if markers.current_capture() is None:
            return apply(function, preserve, *args)
        _mark(args)
        return function(*args)

    def call_within_body(self: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if markers.current_capture() is None:
            return within_body(self, graph, *args, **kwargs)
        return torch.fx.Interpreter(graph).run(*args)  # a loop keeps what its backward needs

    with (
        unittest.mock.patch.object(TagActivationCheckpoint, "__call__", call_within_body),
        unittest.mock.patch.object(utils, name, not_reentrant),
        unittest.mock.patch.object(utils.CheckpointFunction, "apply", reentrant),
    ):
        yield


def _one_step() -> Iterator[None]:
    """A context that does nothing, in place of the one that torch runs a function in."""
    yield


def _mark(arguments: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves(arguments)  # noqa: SLF001  # export takes arguments apart like this
    markers.keep_inputs([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def keep_inputs_of_checkpoints(module: torch.fx.GraphModule) -> None:
    """Puts `recomputationCheckpoint` behind the values that checkpointed functions were given."""
    for inner in module.modules():
        assert isinstance(inner, torch.fx.GraphModule)
        graph = inner.graph
        for marker in [node for node in graph.nodes if markers.is_keep_inputs(node)]:
            for value in list(marker.all_input_nodes):
                if markers.is_checkpoint(value):
                    continue
                with graph.inserting_before(marker):
                    checkpoint = graph.call_function(markers.keep_operation(), (value,))
                checkpoint.meta = dict(value.meta)
                value.replace_all_uses_with(
                    checkpoint, delete_user_cb=lambda user, checkpoint=checkpoint: checkpoint < user
                )
            graph.erase_node(marker)


# Capturing.

# The outputs that are new values of parameters and buffers.
WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


@dataclass(frozen=True, eq=False)
class FunctionalProgram:
    """A model's graph: functional, in core ATen, with the markers of blocks.

    Attributes:
      graph_module: the graph, and the graphs of branches and bodies.
      graph_signature: the meaning of its inputs and outputs.
    """

    graph_module: torch.fx.GraphModule
    graph_signature: ExportGraphSignature

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph of the whole model."""
        return self.graph_module.graph


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as a graph.

    Attributes:
      program: the graph.
      outputs: the structure of what the model returned.
      tensors: the graph's parameters, buffers and constants, by the targets of the program.
      references: objects that operations of the graph refer to, which must live as long as the graph.
      assumptions: values that forward asked for, which must be the same when it runs.
    """

    program: FunctionalProgram
    outputs: Structure
    tensors: Mapping[str, torch.Tensor]
    references: Sequence[Any] = ()
    assumptions: Assumptions = field(default_factory=Assumptions)


Modes = dict[torch.nn.Module, bool]


def modes_of(model: torch.nn.Module) -> Modes:
    """Returns the training mode of each module of a model."""
    return {module: module.training for module in model.modules()}


class _Flat(torch.nn.Module):
    """Calls a model with a flat sequence of tensors, and returns the tensors of its result flat, too."""

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Structure,
        trains: bool,
        note: Callable[[Structure], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.arguments, self.trains = arguments, trains
        self.begin = begin  # called before each run of forward
        self.note = note  # export undoes what forward assigns to attributes

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.begin()
        args, kwargs = self.arguments.unflatten(tensors)
        before = refusals.Members.of(self.model)
        with _members_as_before(self.model), _attributes_copied(self.model):
            layouts = [(tensor.shape, tensor.stride()) for tensor in tensors]
            result = self.model(*args, **kwargs)
            refusals.check_tensors(before, refusals.Members.of(self.model))
            refusals.check_shapes(self.arguments, layouts, tensors)
        results, outputs = flatten(_leave_out_caches(result, self.trains))
        self.note(outputs)
        return tuple(results)


class Substitutions:
    """Replaces names of other libraries while models are captured, as libraries for PopTorch ask for it.

    A registered class has methods `replace` and `restore`, for instance to put operations of fixed sizes in
    the places of those whose sizes depend on values.
    """

    _classes: ClassVar[list[type]] = []

    @classmethod
    def registerSubsitutionManager(cls, type: type) -> None:  # PopTorch's names
        """Adds a class, once. An instance is made for each capture.

        Raises:
          TypeError: it has no `replace` or no `restore`.
        """
        for name in ("replace", "restore"):
            if not callable(getattr(type, name, None)):
                raise TypeError(f"registerSubsitutionManager: {type!r} must have a method {name}.")
        if type not in cls._classes:
            cls._classes.append(type)

    @classmethod
    @contextlib.contextmanager
    def applied(cls) -> Iterator[None]:
        """Replaces in a `with` block; what an instance replaced last is restored first."""
        with contextlib.ExitStack() as stack:
            for manager in [each() for each in cls._classes]:
                stack.callback(manager.restore)
                manager.replace()
            yield


def capture(
    model: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    arguments: Structure,
    modes: Modes | None = None,
    trains: bool = False,
    excluded_files: Sequence[str] = (),
    allows_values: bool = False,
) -> Captured:
    """Runs a model's forward once, on tensors without values, and records what it computes.

    If it asks for values, it runs twice more, see `example_values`.
    """
    rest = (tensors, arguments, modes or {}, trains, excluded_files, allows_values)
    with contextlib.suppress(ValueAskedError):
        return _capture(None, model, *rest)
    return _capture(_record(model, tensors, arguments, modes or {}), model, *rest)


def _record(
    model: torch.nn.Module, tensors: Sequence[torch.Tensor], arguments: Structure, modes: Modes
) -> list[Answer]:
    flat = _Flat(model, arguments, False, lambda _outputs: None)
    with (
        changed_for_this_thread_alone(model),
        torch.inference_mode(False),
        markers.capturing(),
        Substitutions.applied(),
        in_modes(modes),
        exportable(),
        WithoutValues(),
        _quiet(),
    ):
        return record(flat, tensors)


def _capture(
    answers: Sequence[Answer] | None,
    model: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    arguments: Structure,
    modes: Modes,
    trains: bool,
    excluded_files: Sequence[str],
    allows_values: bool,
) -> Captured:
    noted: list[Structure] = []
    replaying = Replaying(answers)
    flat = _Flat(model, arguments, trains, noted.append, replaying.begin)
    with changed_for_this_thread_alone(model), contextlib.ExitStack() as stack:
        # One thread at a time runs this, because export changes torch's global state.
        # What the caller of the model has switched off is not part of forward.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        capturing = stack.enter_context(markers.capturing())
        stack.enter_context(Substitutions.applied())
        stack.enter_context(in_modes(modes))
        stack.enter_context(keeping_own_backwards())
        stack.enter_context(refusals.with_detached_data())
        if trains:
            refusals.check_hooks(model)
            stack.enter_context(refusals.refusing_gradient_hooks())
            stack.enter_context(refusals.refusing_no_grad_in_autocast())
        stack.enter_context(_inference_mode_without_gradients())
        stack.enter_context(marking_checkpoints())
        stack.enter_context(exportable())
        stack.enter_context(WithoutValues())
        stack.enter_context(_quiet())
        with Shortened(model), refusals.explained(model), _marking_regions_without_gradients(), replaying:
            program = torch.export.export(flat, tuple(tensors), strict=False)
        _exclude_files(program.graph_module, excluded_files)
        refusals.check_values(program)
        refusals.check_results(noted[-1])
        refusals.warn_of_generators(program)
        refusals.warn_of_unread_operations(program)
        keep_inputs_of_checkpoints(program.graph_module)
        if trains:
            if _has_autocast(program):
                # Its regions and casts become a part of the graph, and losses stay single operations.
                with refusals.explained(model):
                    program = program.run_decompositions({})
            mark_losses(program.graph_module.graph)
        with refusals.explained(model), _checks_without_effects():
            program = decompose(program)
        if trains:
            capture_own_backwards(model, capturing)
        refusals.check_functional(program)
        _check_multi_convs(program.graph)
    _name_modules(program)
    tensor_of = _find_tensors(flat, program)
    trainable = _find_trainable(program, tensor_of) if trains else set()
    assumptions = take_assumptions(program, tensor_of, trainable, allows_values)
    if trains:
        choose_loss(program, trainable)
    functional = FunctionalProgram(program.graph_module, program.graph_signature)
    return Captured(functional, noted[-1], tensor_of, tuple(capturing.held), assumptions)


@contextlib.contextmanager
def _marking_regions_without_gradients() -> Iterator[None]:
    """Makes export put a `detach` behind what `torch.no_grad` computed, in place of a graph of its own.

    Export keeps none of a region that has a loop or a branch in it, and decomposing would lose the others.
    """
    from torch._export.passes import replace_set_grad_with_hop_pass as regions

    inline = regions._remove_set_grad_and_inline  # noqa: SLF001  # torch gives it no other name

    def mark(node: torch.fx.Node) -> None:
        owner: Any = node.graph.owning_module
        region = getattr(owner, str(node.target))
        for switch in region.graph.nodes:
            if switch.target is torch._C._set_grad_enabled and switch.args[0] is False:  # noqa: SLF001
                _stop_gradients(region.graph)
        # Inlining deletes graphs of bodies within bodies, which it takes for unused.
        bodies = [(body, dict(vars(body)["_modules"])) for body in owner.modules() if body is not owner]
        inline(node)
        for body, graphs in bodies:
            vars(body)["_modules"].update(graphs)

    patch = unittest.mock.patch.object
    with (
        patch(regions, "_is_set_grad_enabled_sub_mod", lambda _node, **_options: False),
        patch(regions, "_remove_set_grad_and_inline", mark),
    ):
        yield


def _has_autocast(program: torch.export.ExportedProgram) -> bool:
    return any("wrap_with_autocast" in str(node.target) for node in program.graph.nodes)


def _stop_gradients(region: torch.fx.Graph) -> None:
    """Puts a `detach` behind the results of a region's graph."""
    output = region.output_node()
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    for result in {node for node in results if isinstance(node, torch.fx.Node)}:
        operand = _find_operand(result)
        if operand is not None:
            output.replace_input_with(result, operand)
            continue
        with region.inserting_before(output):
            stop = region.call_function(torch.ops.aten.detach.default, (result,))
        stop.meta = dict(result.meta)
        output.replace_input_with(result, stop)


def _find_operand(result: torch.fx.Node) -> torch.fx.Node | None:
    """Finds the operand that a region returns as one of its results, still with a way for gradients.

    Operations with nothing to do return their operand, such as `float` of a float32 tensor. Export treats
    their results as new tensors that were made without gradients.
    """
    node: Any = result
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        is_one_of_several = node.target is operator.getitem
        producer: Any = node.args[0] if is_one_of_several else node
        if not isinstance(producer.target, torch._ops.OpOverload) or producer.target._schema.is_mutable:  # noqa: SLF001
            return None
        args, kwargs = torch.fx.map_arg(
            (producer.args, producer.kwargs), lambda operand: operand.meta["val"]
        )
        value = producer.target(*args, **kwargs)
        value = value[node.args[1]] if is_one_of_several else value
        node = next((operand for operand in producer.all_input_nodes if operand.meta["val"] is value), None)
    return node if isinstance(node, torch.fx.Node) and node.op == "placeholder" else None


@contextlib.contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Gives modules other training modes in the `with` block."""
    now = {module: module.training for module in modes}
    for module, training in modes.items():
        module.training = training
    try:
        yield
    finally:
        for module, training in now.items():
            module.training = training


@contextlib.contextmanager
def _members_as_before(model: torch.nn.Module) -> Iterator[None]:
    """Undoes what forward registers or removes in the `with` block: what it made has no values."""
    names = ("_parameters", "_buffers", "_modules")
    dictionaries = [
        (vars(module)[name], dict(vars(module)[name])) for module in model.modules() for name in names
    ]
    attributes = [(module, set(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, before in dictionaries:
            now.clear()
            now.update(before)
        for module, attribute_names in attributes:
            for name in set(vars(module)) - attribute_names:
                if isinstance(vars(module)[name], torch.Tensor):
                    del vars(module)[name]


@contextlib.contextmanager
def _attributes_copied(model: torch.nn.Module) -> Iterator[None]:
    """Makes forward change copies of tensors that are attributes, and restores the attributes afterwards.

    In the graph such tensors are constants.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    copies: dict[int, torch.Tensor] = {}
    for module, attributes in before:
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = copies.setdefault(id(value), value.clone())
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    if name in attributes:
                        vars(module)[name] = attributes[name]
                    else:
                        del vars(module)[name]


@contextlib.contextmanager
def _inference_mode_without_gradients() -> Iterator[None]:
    """Makes `torch.inference_mode` leave the mark of `torch.no_grad`, because export has none for it."""
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    opened: list[torch.no_grad] = []

    def begin(self: torch.inference_mode) -> None:
        if markers.current_capture() is None:
            enter(self)
        elif self.mode:
            opened.append(torch.no_grad())
            opened[-1].__enter__()

    def end(self: torch.inference_mode, *exception: Any) -> None:
        if markers.current_capture() is None:
            leave(self, *exception)
        elif self.mode:
            opened.pop().__exit__(*exception)

    with (
        unittest.mock.patch.object(kind, "__enter__", begin),
        unittest.mock.patch.object(kind, "__exit__", end),
    ):
        yield


def _exclude_files(module: torch.fx.GraphModule, excluded: Sequence[str]) -> None:
    """Removes lines of the excluded files from the nodes' stack traces."""
    if not excluded:
        return
    for inner in module.modules():
        assert isinstance(inner, torch.fx.GraphModule)
        for node in inner.graph.nodes:
            frames = re.split(r'(?=^\s*File ")', node.meta.get("stack_trace") or "", flags=re.MULTILINE)
            remaining_frames = [
                f for f in frames if not any(part in f.partition('", line')[0] for part in excluded)
            ]
            node.meta["stack_trace"] = "".join(remaining_frames)


def _name_modules(program: torch.export.ExportedProgram) -> None:
    """Names modules in the nodes' metadata as in the user's model, without the module that calls it."""
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            named = list(stack.items())[1:]
            node.meta["nn_module_stack"] = {
                key: (path.removeprefix("model").removeprefix("."), kind) for key, (path, kind) in named
            }


@contextlib.contextmanager
def _checks_without_effects() -> Iterator[None]:
    """Makes checks of factorizations ordinary operations. torch keeps their order by tokens."""
    from torch._higher_order_ops import effects  # noqa: F401  # it says that they have effects
    from torch._library.simple_registry import singleton

    holder = singleton.find("aten::_linalg_check_errors").effect
    with unittest.mock.patch.object(holder, "_effect", None):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's own messages while it exports."""
    from torch.export import _trace  # loads torch.export's modules, which takes seconds

    names = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    loud = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(logging.CRITICAL)  # errors are raised as well
    try:
        # When it fails, export prints the graph so far to the standard error.
        silent = unittest.mock.patch.object(_trace, "print", create=True)
        with silent, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.|" + re.escape(WithoutValues.__module__))
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message="The tensor attribute")
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)


def _find_tensors(flat: _Flat, program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the tensors by the targets of the program."""
    tensors: dict[str, torch.Tensor] = dict(program.constants)
    tensors |= dict(flat.named_parameters(remove_duplicate=False))
    tensors |= dict(flat.named_buffers(remove_duplicate=False))
    return tensors


def _find_trainable(
    program: torch.export.ExportedProgram, tensors: Mapping[str, torch.Tensor]
) -> set[torch.fx.Node]:
    """Finds the placeholders of parameters that require gradients."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = zip(placeholders, program.graph_signature.input_specs, strict=True)
    return {
        node
        for node, spec in specs
        if spec.kind is InputKind.PARAMETER and tensors[str(spec.target)].requires_grad
    }


def _leave_out_caches(result: Any, trains: bool) -> Any:
    """Returns a model's results as transformers' models return them with `use_cache=False`."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or not isinstance(result, (dict, tuple)) or hasattr(result, "_fields"):
        return result
    kind = library.Cache
    parts = result.values() if isinstance(result, dict) else result
    if not any(isinstance(part, kind) for part in parts):
        return result
    if not trains:
        warn_once(
            "The model returns a cache of keys and values, which is left out, since what is "
            "compiled has one length. `model.config.use_cache = False` makes none."
        )
    if isinstance(result, dict):
        return type(result)(**{name: part for name, part in result.items() if not isinstance(part, kind)})
    return type(result)(part for part in result if not isinstance(part, kind))


def _check_multi_convs(graph: torch.fx.Graph) -> None:
    """Counts the convolutions in each `MultiConv`."""
    opened: list[list[torch.fx.Node]] = []
    for node in graph.nodes:
        part = markers.read_multi_conv(node)
        if node.target is torch.ops.aten.convolution.default:
            for inside in opened:
                inside.append(node)
        elif part is not None and part.counts is None:
            opened.append([])
        elif part is not None and part.counts is not None:
            convolutions = opened.pop()
            if not convolutions:
                raise Error(f"The MultiConv in {describe_place(node)} has no convolution in it.")
            for name, number in part.counts.items():
                if number != len(convolutions):
                    raise Error(
                        f"MultiConv.{name} was given {number} values, but there are {len(convolutions)} "
                        f"convolutions in it: in {'; '.join(map(describe_place, convolutions))}. Give one "
                        "for each, or a single one for all."
                    )
