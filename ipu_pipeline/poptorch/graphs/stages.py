"""Stage functions of a captured model, for `engine.Pipeline`, and the inner values that they show.

Parameters and buffers are variables with torch's names. A write to a buffer in forward is an `assign`.

A backward's only results are gradients of variables, summed over micro-batches. For gradients of inner
values ("Gradient___name" in `Options.anchorTensor`) it passes them to the host while it runs. The host
keeps them by micro-batch until the call ends.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from ipu_pipeline import engine
from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.ground.tables import shorten
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs.capture import WRITES, Captured
from ipu_pipeline.poptorch.graphs.example_values import Expected
from ipu_pipeline.poptorch.graphs.losses import find_marked_loss, ways_of_gradients
from ipu_pipeline.poptorch.graphs.modules import (
    find_modules,
    find_spread,
    modules_of_nodes,
    name_parts,
)
from ipu_pipeline.poptorch.graphs.partitions import Section, is_check
from ipu_pipeline.poptorch.lowering.interpreter import (
    IndexChecks,
    describe_unsupported,
    find_unsupported,
    run_node,
)
from ipu_pipeline.poptorch.replica_groups import GroupRows

# Inner values, and their gradients.


def name_values(
    graph: torch.fx.Graph, variables: Mapping[torch.fx.Node, str], has_module_names: bool
) -> dict[str, torch.fx.Node]:
    """Names the values that can be looked at.

    Parameters and buffers have torch's names, inputs their names in the graph. An operation's result is
    named after its module and the operation: "layers.0/relu", "layers.0/relu_1". The `NameScope`s around
    it come first: "scope/layers.0/relu".
    """
    names: dict[str, torch.fx.Node] = {}
    scopes: list[str] = []
    for node in graph.nodes:
        if scope := markers.read_scope(node):
            (opened,) = scope
            if opened is not None:
                scopes.append(opened)
            elif scopes:
                scopes.pop()
        if not isinstance(node.meta.get("val"), torch.Tensor) or markers.is_marker(node):
            continue
        name = base = _name(node, variables, has_module_names)
        if scopes and node.op == "call_function":
            name = base = "/".join([*scopes, base])
        number = 0
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names[name] = node
    return names


def _name(node: torch.fx.Node, variables: Mapping[torch.fx.Node, str], has_module_names: bool) -> str:
    if node.op != "call_function":
        return variables.get(node, node.name)
    schema = getattr(node.target, "_schema", None)
    name = node.name if schema is None else schema.name.split("::")[-1]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{stack[-1][0]}/{name}" if has_module_names and stack and stack[-1][0] else name


def find_values(names: Mapping[str, torch.fx.Node], anchors: Sequence[str]) -> list[torch.fx.Node]:
    """Finds values by name."""
    for name in anchors:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            raise Error(
                f"Options.anchorTensor names {name!r}, which is not a value of the model. Similar names "
                f"are {near}; getTensorNames() of the compiled model has all names."
            )
    return [names[name] for name in anchors]


PREFIX = "Gradient___"


def is_gradient(name: str) -> bool:
    """Whether a value's name is the name of a gradient."""
    return name.startswith(PREFIX)


def name_gradients(
    names: Mapping[str, torch.fx.Node], reaching: Collection[torch.fx.Node]
) -> dict[str, torch.fx.Node]:
    """Returns the values whose gradients can be looked at, by the gradients' names."""
    return {f"{PREFIX}{name}": node for name, node in names.items() if node in reaching}


class AnchoredGradients:
    """The gradients that are kept from a call: of each micro-batch's loss, before averaging.

    Attributes:
      nodes: the values that they are gradients of.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Starts without any kept gradient."""
        self.nodes = nodes
        self._lock = threading.Lock()  # devices pass theirs from several threads
        self._gradients: dict[tuple[torch.fx.Node, int, bytes], np.ndarray[Any, Any]] = {}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The gradients' dtypes, in the order of `nodes`."""
        return [node.meta["val"].dtype for node in self.nodes]

    def pass_on(self, node: torch.fx.Node, value: Any) -> Any:
        """Returns the same value. Its gradient also goes to the host, if it is wanted."""
        if node not in self.nodes:
            return value
        note = functools.partial(self._note, node)

        @jax.custom_vjp
        def give(value: Any, replica: Any, tag: Any) -> Any:
            del replica, tag
            return value

        def forward(value: Any, replica: Any, tag: Any) -> tuple[Any, Any]:
            return give(value, replica, tag), (replica, tag)

        def backward(place: Any, gradient: Any) -> tuple[Any, None, None]:
            jax.debug.callback(note, *place, gradient)
            return gradient, None, None

        give.defvjp(forward, backward)
        return give(value, engine.replica_index(), engine.micro_batch_tag())

    def _note(self, node: torch.fx.Node, replica: Any, tag: Any, gradient: Any) -> None:
        key = (node, int(replica), np.asarray(tag).tobytes())
        copied = np.array(gradient)
        with self._lock:  # a variable in several stages has a gradient in each
            self._gradients[key] = self._gradients[key] + copied if key in self._gradients else copied

    def forget(self) -> None:
        """Forgets what an interrupted call left."""
        jax.effects_barrier()
        self._gradients.clear()

    def join(self, collected: Sequence[Collected], has_replicas: bool) -> list[Collected]:
        """Waits for gradients, and puts them in place of the last leaf of the last stage's results."""
        jax.effects_barrier()
        joined = []
        for part in collected:
            *leaves, tags = part.outputs
            tags = np.asarray(tags)
            gradients = [self._stack(node, tags, has_replicas) for node in self.nodes]
            joined.append(replace(part, outputs=[*leaves, *gradients]))
        self._gradients.clear()
        return joined

    def _stack(self, node: torch.fx.Node, tags: Any, has_replicas: bool) -> np.ndarray[Any, Any]:
        """Stacks the gradients of a value, one for each micro-batch and replica in `tags`."""
        value = node.meta["val"]
        # The gradient where the loss does not depend on the value.
        zeros = np.zeros(tuple(value.shape), jax_dtype(value.dtype))
        stacked = np.empty((*tags.shape[:-1], *zeros.shape), zeros.dtype)
        for place in np.ndindex(*tags.shape[:-1]):
            replica = place[-1] if has_replicas else 0
            stacked[place] = self._gradients.get((node, replica, tags[place].tobytes()), zeros)
        return stacked


# Stages.

_MAX_NAME = 60  # characters of a stage's name
SCOPE = "model"  # of all variables: a scope can be opened with reuse=True, as tied weights need


@dataclass(frozen=True, eq=False)
class ModelStages:
    """A model as stages.

    Attributes:
      functions: the stages' functions, level by level; the stages of a level are parallel. The first level
        takes the tensors of the inputs. The last is one stage, which returns the tensors of the outputs,
        then the inputs that forward writes to, then the expected values, then the anchored values, then the
        micro-batch's tag if gradients are anchored, and then, if the model trains, the loss.
      levels: the sections that the stages are made of, level by level.
      tensors: the user's parameters and buffers by the variables' full names.
      trained: the variables that the loss depends on and that require gradients.
      assigned: the variables that forward writes to: buffers, and parameters that need no gradient.
      written_inputs: the numbers of the inputs that forward writes to.
      expected: the values that a run is compared with.
      output_dtypes: torch's dtypes of what the last stage returns before tag and loss, and of the anchored
        gradients.
      value_names: the names of all values, see `name_values`, and of their gradients.
      has_checkpoints: whether the model chooses what its backward keeps, by `recomputationCheckpoint`.
      prints: whether the model prints tensors.
      group_rows: by full name, the rows of the variables that differ between groups of replicas.
      index_checks: where a run notes indices that are out of range, if they are checked.
      gradients: where a run leaves the anchored gradients; None without any.
    """

    functions: tuple[tuple[Callable[..., tuple[Any, ...]], ...], ...]
    levels: tuple[tuple[Section, ...], ...]
    tensors: Mapping[str, torch.Tensor]
    trained: frozenset[str]
    assigned: frozenset[str]
    written_inputs: tuple[int, ...]
    expected: tuple[Expected, ...]
    output_dtypes: tuple[torch.dtype, ...]
    value_names: tuple[str, ...]
    has_checkpoints: bool
    prints: bool
    group_rows: Mapping[str, GroupRows]
    index_checks: IndexChecks | None
    gradients: AnchoredGradients | None

    @property
    def sections(self) -> list[Section]:
        """The section that each stage is made of."""
        return [section for level in self.levels for section in level]

    @property
    def ipus(self) -> list[int]:
        """The IPU of each stage."""
        return [section.ipu for section in self.sections]

    def read_tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a variable's value on the host, as devices take it; it may share the tensor's memory."""
        return _read_tensor(name, self.tensors[name], self.group_rows.get(name))


@dataclass(frozen=True, eq=False)
class _Parts:
    """The nodes of a graph by their roles.

    Attributes:
      inputs: the placeholders of the user's inputs.
      variables: placeholder -> name within `SCOPE`.
      constants: placeholder -> tensor.
      tensors: name within `SCOPE` -> the user's tensor.
      group_rows: name within `SCOPE` -> its rows, if groups of replicas have their own values.
      assigned: node -> names of the variables that get its value.
      written: the number of an input that is written to -> the node that it gets the value of.
      results: the nodes that are returned, with the loss at the end if there is one.
      references: `Captured.references` of the model.
      gradients: the anchored gradients; None without any.
    """

    inputs: list[torch.fx.Node]
    variables: dict[torch.fx.Node, str]
    constants: dict[torch.fx.Node, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    group_rows: dict[str, GroupRows]
    assigned: dict[torch.fx.Node, list[str]]
    written: dict[int, torch.fx.Node]
    results: list[torch.fx.Node]
    references: Sequence[Any]
    gradients: AnchoredGradients | None = None


def make_stages(
    captured: Captured,
    model: torch.nn.Module,
    cut: Callable[[torch.fx.Graph], Sequence[Sequence[Section]]],
    trains: bool,
    anchors: Sequence[str] = (),
    has_module_names: bool = True,
    group_rows: Mapping[int, GroupRows] | None = None,
    checks: IndexChecks | None = None,
    has_scopes: bool = False,
) -> ModelStages:
    """Cuts a captured model into stages."""
    graph = captured.program.graph
    dropped = {node for node in graph.nodes if markers.is_marker(node) or is_check(node)}
    if unsupported := [node for node in find_unsupported(graph) if node not in dropped]:
        raise Error(describe_unsupported(unsupported))
    parts = _find_parts(captured, model, group_rows or {})
    names = name_values(graph, parts.variables, has_module_names)
    loss = find_marked_loss(graph) if trains else None
    reaching = set() if loss is None else ways_of_gradients(loss)
    # torch gives other parameters no gradient, so they do not even decay; the engine would give zeros.
    trained = {
        node: f"{SCOPE}/{name}"
        for node, name in parts.variables.items()
        if node in reaching and parts.tensors[name].requires_grad
    }
    computed = {node for node in reaching if node.op == "call_function"}
    names |= name_gradients(names, computed | trained.keys())
    anchored = list(zip(anchors, find_values(names, anchors), strict=True))
    parts.results.extend(expected.node for expected in captured.assumptions.expected)
    parts.results.extend(node for name, node in anchored if not is_gradient(name))
    if gradient_nodes := [node for name, node in anchored if is_gradient(name)]:
        parts = replace(parts, gradients=AnchoredGradients(gradient_nodes))
    if loss is not None:
        parts.results.append(loss)
    levels = cut(graph)
    writers = _find_writers(levels, parts)
    results = parts.results if loss is None else parts.results[:-1]
    dtypes = [node.meta["val"].dtype for node in results]
    return ModelStages(
        functions=tuple(_make_functions(levels, parts, writers, checks, has_scopes)),
        levels=tuple(map(tuple, levels)),
        tensors={f"{SCOPE}/{name}": tensor for name, tensor in parts.tensors.items()},
        trained=frozenset(trained.values()),
        assigned=frozenset(f"{SCOPE}/{name}" for names in parts.assigned.values() for name in names),
        written_inputs=tuple(parts.written),
        expected=captured.assumptions.expected,
        output_dtypes=(*dtypes, *(() if parts.gradients is None else parts.gradients.dtypes)),
        value_names=tuple(names),
        has_checkpoints=any(map(markers.is_checkpoint, graph.nodes)),
        prints=any(
            node.target is torch.ops.ipu_poptorch.print_tensor.default
            for part in captured.program.graph_module.modules()
            for node in getattr(part, "graph", graph).nodes
        ),
        group_rows={f"{SCOPE}/{name}": rows for name, rows in parts.group_rows.items()},
        index_checks=checks,
        gradients=parts.gradients,
    )


def _find_parts(captured: Captured, model: torch.nn.Module, group_rows: Mapping[int, GroupRows]) -> _Parts:
    program = captured.program
    names: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), name)
    parts = _Parts([], {}, {}, {}, {}, {}, {}, [], captured.references)
    output = next(node for node in program.graph.nodes if node.op == "output")
    outputs = list(zip(program.graph_signature.output_specs, output.args[0], strict=True))
    written = {spec.target for spec, _node in outputs if spec.kind in WRITES}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            parts.inputs.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = captured.tensors[str(spec.target)]
            if node.users or spec.target in written:  # others are not variables
                # This name is used only if another thread has replaced the tensor, which is an error later.
                name = names.setdefault(id(tensor), str(spec.target).removeprefix("model."))
                parts.variables[node] = name
                parts.tensors[name] = tensor
                if id(tensor) in group_rows:
                    parts.group_rows[name] = group_rows[id(tensor)]
        else:
            parts.constants[node] = captured.tensors[str(spec.target)]
    inputs = [node.name for node in parts.inputs]
    for result, node in outputs:
        if result.kind in WRITES:
            name = names[id(captured.tensors[str(result.target)])]
            parts.assigned.setdefault(node, []).append(name)
        elif result.kind is OutputKind.USER_INPUT_MUTATION:
            parts.written[inputs.index(str(result.target))] = node
        elif result.kind is OutputKind.USER_OUTPUT:
            assert not isinstance(result.arg, ConstantArgument)
            parts.results.append(node)
    parts.results.extend(parts.written.values())
    return parts


def _make_functions(
    levels: Sequence[Sequence[Section]],
    parts: _Parts,
    writers: Mapping[str, Section],
    checks: IndexChecks | None,
    has_scopes: bool,
) -> list[tuple[Callable[..., tuple[Any, ...]], ...]]:
    number_of = _number(levels)
    titles = _name_stages(list(number_of))
    # The stage that writes a buffer also passes on the value before the write.
    old = {node: writers[name] for node, name in parts.variables.items() if name in writers}
    owners = {**{node: section for section in number_of for node in section.nodes}, **old}
    level_of = {node: number_of[section] for node, section in owners.items()}
    fixed = (parts.variables.keys() - old.keys()) | parts.constants.keys()
    passed = [*parts.inputs, *level_of]  # what may go from stage to stage, in a fixed order
    last_read: dict[torch.fx.Node, int] = {}
    for node, number in level_of.items():
        for operand in node.all_input_nodes:
            last_read[operand] = max(number, last_read.get(operand, 0))
    last = len(levels) - 1
    for node, names in parts.assigned.items():
        last_read[node] = max(last_read.get(node, 0), *(number_of[writers[name]] for name in names))
    for node in parts.results:
        last_read[node] = last
    functions = []
    outputs = list(parts.inputs)
    for number, level in enumerate(levels):
        inputs, outputs = outputs, []
        nodes_here = [{node for node, owner in owners.items() if owner is section} for section in level]
        outgoing = [
            node
            for node in passed
            if level_of.get(node, -1) <= number < last_read.get(node, -1) and node not in fixed
        ]
        stages = []
        for place, section in enumerate(level):
            # The first of parallel stages also returns the values of earlier levels.
            siblings = set().union(*nodes_here[:place], *nodes_here[place + 1 :]) if place == 0 else None
            section_outputs = [
                n for n in outgoing if (n in nodes_here[place] if siblings is None else n not in siblings)
            ]
            returned = parts.results if number == last else section_outputs
            has_tag = number == last and parts.gradients is not None
            stage = _make_function(
                section, parts, writers, inputs, list(returned), has_tag, checks, has_scopes
            )
            stage.__name__ = stage.__qualname__ = titles[section]
            stages.append(stage)
            outputs += returned
        functions.append(tuple(stages))
    return functions


def _make_function(
    section: Section,
    parts: _Parts,
    writers: Mapping[str, Section],
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    has_tag: bool,
    checks: IndexChecks | None,
    has_scopes: bool,
) -> Callable[..., tuple[Any, ...]]:
    read_here = {node for inner in section.nodes for node in inner.all_input_nodes} | set(outputs)
    written = [
        (node, name) for node, names in parts.assigned.items() for name in names if writers[name] is section
    ]
    read_here |= {node for node, _name in written}
    names = {parts.variables[node] for node in read_here - set(inputs) if node in parts.variables}
    names |= {name for _node, name in written}

    def stage(*values: Any) -> tuple[Any, ...]:
        node_values = dict(zip(inputs, values, strict=True))
        variables = {}
        with engine.variable_scope(SCOPE, reuse=True):  # stages may share a variable
            for name in parts.tensors:
                if name in names:
                    variables[name] = _get_variable(name, parts.tensors[name], parts.group_rows.get(name))

        def pass_on(node: torch.fx.Node, value: Any) -> Any:
            return value if parts.gradients is None else parts.gradients.pass_on(node, value)

        def read(node: torch.fx.Node) -> Any:
            if node not in node_values:
                if node in parts.variables:
                    node_values[node] = pass_on(node, variables[parts.variables[node]])
                else:
                    node_values[node] = jnp.asarray(to_numpy(parts.constants[node]))
            return node_values[node]

        with contextlib.nullcontext() if checks is None else checks.made():
            for node in section.nodes:
                is_marker = markers.is_marker(node)
                with jax.named_scope(node.name) if has_scopes else contextlib.nullcontext():
                    value = _marker_value(node, read) if is_marker else run_node(node, read)
                node_values[node] = value if is_marker else pass_on(node, value)
        for node, name in written:
            engine.assign(f"{SCOPE}/{name}", read(node))
        results = [read(node) for node in outputs]
        if has_tag:
            results.insert(-1, engine.micro_batch_tag())  # the loss is the last
        return tuple(results)

    return stage


def split_stages(
    model: ModelStages, parts: Sequence[tuple[Callable[..., Any], Collection[str]]]
) -> ModelStages:
    """Makes stages of a model that was one, and that the engine has cut."""
    ((section,),) = model.levels
    nodes: list[list[torch.fx.Node]] = [[] for _part in parts]
    stage_of: dict[torch.fx.Node, int] = {}
    for node in reversed(section.nodes):
        stages = [stage for stage, (_function, scopes) in enumerate(parts) if node.name in scopes]
        # What needs no micro-batch is in no scope's stage, but computed where it is read.
        stages = stages or sorted(stage_of[user] for user in node.users if user in stage_of)
        stage_of[node] = stages[0] if stages else 0
    for node in section.nodes:
        nodes[stage_of[node]].append(node)
    sections = [Section(f"stage {stage}", stage, tuple(inside)) for stage, inside in enumerate(nodes)]
    titles = _name_stages(sections)

    def rename(function: Callable[..., Any], title: str) -> Callable[..., Any]:
        def stage(*values: Any) -> Any:
            return function(*values)

        stage.__name__ = stage.__qualname__ = title
        return stage

    functions = [
        (rename(function, titles[section]),)
        for (function, _scopes), section in zip(parts, sections, strict=True)
    ]
    named = [(replace(section, name=titles[section]),) for section in sections]
    return replace(model, functions=tuple(functions), levels=tuple(named))


def _name_stages(sections: Sequence[Section]) -> dict[Section, str]:
    """Names stages for errors and reports, after their modules or else their blocks."""
    operations = [modules_of_nodes(section.nodes) for section in sections]
    spread = find_spread(operations)
    names = {}
    for section, section_operations in zip(sections, operations, strict=True):
        modules = [
            m for m in find_modules(section_operations, (), "", spread, limit=1) if m.name and not m.is_rest
        ]
        names[section] = shorten(name_parts(modules) or section.name, _MAX_NAME)
    return names


def _get_variable(name: str, tensor: torch.Tensor, rows: GroupRows | None) -> Any:
    def initial(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        del key, shape, dtype
        return _read_tensor(name, tensor, rows).copy()

    vars(initial)["needs_key"] = False
    trains = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    shape = tuple(tensor.shape) if rows is None else (rows.num_groups, *tensor.shape[1:])
    value = engine.get_variable(name, shape, jax_dtype(tensor.dtype), initial, trains)
    if rows is None:
        return value
    # Each device has all groups' rows: with only its own, variables would have other shapes than the state.
    # The mean over all replicas is then a row's sum over its group, divided by the replication factor.
    group = jnp.asarray(rows.group_of, jnp.int32)[engine.replica_index()]
    return jax.lax.dynamic_index_in_dim(value, group, keepdims=False)


def _read_tensor(name: str, tensor: torch.Tensor, rows: GroupRows | None) -> np.ndarray[Any, Any]:
    value = to_numpy(tensor, f"Tensor {name}")
    return value if rows is None else rows.to_device(name, value)


def _marker_value(node: torch.fx.Node, read: Callable[[torch.fx.Node], Any]) -> Any:
    """Returns the value of a marker: the value that it marks, or None for a block's marker."""
    return read(node.all_input_nodes[0]) if node.all_input_nodes else None


def _find_writers(levels: Sequence[Sequence[Section]], parts: _Parts) -> dict[str, Section]:
    """Finds the section that writes each written buffer, by the buffer's name.

    A value that is not computed, such as an input, is written where the buffer is read, else in the first
    section. If it is another buffer that is written itself, it is written where that one is.
    """
    sections = [section for level in levels for section in level]
    number_of = _number(levels)
    section_of = {node: section for section in sections for node in section.nodes}
    computed_first = sorted(parts.assigned, key=lambda node: node not in section_of)
    writers: dict[str, Section] = {}
    for node in computed_first:
        for name in parts.assigned[node]:
            old = [node for node, variable in parts.variables.items() if variable == name]
            readers = {
                section_of[user]: None for variable in old for user in variable.users if user in section_of
            }
            maker = section_of.get(node) or writers.get(parts.variables.get(node, ""))
            writer = writers[name] = maker or min(readers, default=sections[0], key=sections.index)
            early = [s for s in readers if s is not writer and number_of[s] <= number_of[writer]]
            if early:
                raise Error(
                    f"Buffer {name} is read in {early[0].name} and written in {writer.name}, which are on "
                    "different stages. Write it in the block that reads it first."
                )
    return writers


def _number(levels: Sequence[Sequence[Section]]) -> dict[Section, int]:
    return {section: number for number, level in enumerate(levels) for section in level}
