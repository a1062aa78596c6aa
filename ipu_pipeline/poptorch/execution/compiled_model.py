"""Compiled models: programs, one for each set of shapes; the state; and the errors of running them.

JAX has one class for these errors, `jax.errors.JaxRuntimeError`. Its text begins with a status code of
XLA, with gRPC's meanings (https://grpc.github.io/grpc/core/md_doc_statuscodes.html). An error that another
one led to often has the code INTERNAL and the first one's text. CUDA's errors are named in the text. Where
NumPy reads the result of a failed program, the same text comes in a `ValueError`. docs/poptorch.md has the
table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
import torch

from ipu_pipeline import engine
from ipu_pipeline.engine import PipelineState, processes
from ipu_pipeline.engine.fronts import Collected, Progress
from ipu_pipeline.engine.inspect import introduce
from ipu_pipeline.engine.processes import naming_peers
from ipu_pipeline.poptorch.dtypes import to_torch
from ipu_pipeline.poptorch.errors import Error, RecoverableError, UnrecoverableError
from ipu_pipeline.poptorch.execution.call_values import Arguments, describe_shapes, shapes_of, stack_outputs
from ipu_pipeline.poptorch.execution.host_weights import (
    HostChanges,
    host_weights_of,
    on_host,
    plain_values,
    writing,
)
from ipu_pipeline.poptorch.execution.process_groups import ALONE, Processes, compare_arrays
from ipu_pipeline.poptorch.graphs.capture import Captured
from ipu_pipeline.poptorch.graphs.stages import ModelStages
from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.processes import announcements, interrupts
from ipu_pipeline.queues.synthetic_data import make_synthetic
from ipu_pipeline.reports.trace_capture import start_automatic_report


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
    def num_per_update(self) -> int:
        """The number of micro-batches in a weight update, for all replicas together."""
        assert self.pipeline.options.num_micro_batches is not None
        return self.pipeline.options.num_micro_batches * self.pipeline.num_replicas

    @functools.cached_property
    def synthetic(self) -> list[Any]:
        """The values kept on the devices instead of a weight update's micro-batches: zeros by default."""
        leaves = self.pipeline.traced.element
        return list(make_synthetic(self.pipeline, leaves, self.num_per_update)(self.num_per_update))

    @functools.cached_property
    def stand_ins(self) -> tuple[Any, ...]:
        """The stand-ins for micro-batches of other processes: JAX arrays, which are never copied."""
        element = self.pipeline.traced.element
        return tuple(jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in element)

    def check_trained(self, other: Program) -> None:
        """Checks that this program trains what another one of the model does, on as many IPUs."""
        trained, before = self.stages.trained, other.stages.trained
        if trained != before:
            changes = {"no longer ": before - trained, "": trained - before}
            texts = [f"{when}on {_name(names)}" for when, names in changes.items() if names]
            raise Error(
                f"With these shapes ({self.describe()}) the loss depends {' and '.join(texts)}, unlike "
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
        homes, other_homes = self.find_homes(), other.find_homes()
        moved = [name for name in homes.keys() & other_homes.keys() if homes[name] != other_homes[name]]
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


class OriginalMembers:
    """The modules, parameters and buffers that a model held when it was compiled."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes what the model holds."""
        self._model, self._tensors = model, dict(tensors)
        self._names = {id(tensor): full for full, tensor in tensors.items()}
        self._places = _find_members(model, tensors.values())
        self._modules = {
            path: (module, type(module), plain_values(module)) for path, module in _named_modules(model)
        }
        self._paths = {
            path: self._names[id(tensor)]
            for path, tensor in _named_tensors(model).items()
            if id(tensor) in self._names
        }
        for full in tensors.keys() - set(self._paths.values()):
            raise Error(
                f"{full.partition('/')[2]} of the model was replaced in another thread while the model "
                "was compiled. Change tensors in place (copy_, load_state_dict without assign), or "
                "call again."
            )

    def find_replaced(self, takes_values: bool) -> dict[str, torch.Tensor] | None:
        """Returns tensors in the places of others, by the variables' names. None: everything is as it was.

        A replacement must be like the original: modules of the same class with the same plain attributes,
        tensors of the same shape and dtype. Unless `takes_values`, tensors must also have the same values.
        """
        place = next((place for place in self._places if place[0].get(place[1]) is not place[2]), None)
        if place is None:
            return None
        modules, tensors = dict(_named_modules(self._model)), _named_tensors(self._model)
        is_like = modules.keys() == self._modules.keys() and all(
            modules[path] is module or (type(modules[path]), plain_values(modules[path])) == (kind, values)
            for path, (module, kind, values) in self._modules.items()
        )
        current = {full: tensors[path] for path, full in self._paths.items() if path in tensors}
        is_like &= all(path in tensors and tensors[path] is current[f] for path, f in self._paths.items())
        with on_host():
            replaced = {full: new for full, new in current.items() if new is not self._tensors[full]}
            if is_like and all(
                _is_like(new, self._tensors[full], takes_values) for full, new in replaced.items()
            ):
                return replaced
        _holder, name, value = place
        kind = "module" if isinstance(value, torch.nn.Module) else "tensor"
        full = self._names.get(id(value), f"model/{name}").partition("/")[2]
        raise Error(
            f"{full} of the model is another {kind} than when the model was compiled. Change tensors in "
            "place (copy_, load_state_dict without assign), or call destroy() on the model and wrap it "
            "again."
        )


def _is_like(new: torch.Tensor, old: torch.Tensor, takes_values: bool) -> bool:
    facts = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (new, old)]
    return facts[0] == facts[1] and (takes_values or torch.equal(new, old))


def _named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return model.named_modules(remove_duplicate=False)


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _find_members(
    model: torch.nn.Module, tensors: Iterable[torch.Tensor]
) -> Sequence[tuple[Mapping[str, Any], str, Any]]:
    """Finds where modules hold each other and some tensors: the dict, its key, and the value."""
    tensor_ids = set(map(id, tensors))
    return [
        (vars(module)[kind], name, value)
        for module in model.modules()
        for kind in ("_modules", "_parameters", "_buffers")
        for name, value in vars(module)[kind].items()
        if kind == "_modules" or id(value) in tensor_ids
    ]


class CompiledModel:
    """A model's state, on the devices unless detached, and the programs that run with it.

    Attributes:
      program: the program in use.
      programs: all programs, by the shapes that they are for.
      tensors: the user's parameters and buffers that they use, by the variables' full names.
      state: the state on the devices, for the program in use; None while detached.
      is_lost: whether the state was lost by an error.
    """

    LOST = (
        "The weights and the optimizer's state on the devices were lost with it. The host has those "
        "that were last read: call destroy(), which keeps them, and wrap the model again."
    )

    def __init__(
        self,
        model: torch.nn.Module,
        program: Program,
        devices: Sequence[Any],
        key: Any,
        checks_numbers: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        """Traces a program's pipeline, and puts the host's weights on the devices."""
        self.program = program
        self.programs = {program.shapes: program}
        self.tensors = dict(program.stages.tensors)
        self._model = model
        self._changes = HostChanges(model)
        self._members = OriginalMembers(model, self.tensors)
        self._name, self._devices = type(model).__name__, list(devices)
        self._checks_numbers, self._processes = checks_numbers, processes
        # The ids of the tensors that are the same in all processes.
        self._shared_ids = set() if processes.keep_buffers else {id(buffer) for buffer in model.buffers()}
        self._shared_ids |= {id(parameter) for parameter in model.parameters()}
        self._unused: dict[str, Any] = {}  # variables of other programs than the one in use
        self.is_lost = False
        start_automatic_report()
        program.pipeline.trace(program.micro_batch)
        program.pipeline.prepare(devices)
        with on_host(*self.tensors.values()), interrupts.deferred():
            self.state: PipelineState | None = program.pipeline.init(key, program.micro_batch)

    @property
    def stages(self) -> ModelStages:
        """The stages of the program in use."""
        return self.program.stages

    @property
    def pipeline(self) -> engine.Pipeline:
        """The pipeline of the program in use."""
        return self.program.pipeline

    @property
    def variables(self) -> dict[str, Any]:
        """All variables on the devices, by full name."""
        assert self.state is not None
        return {**self._unused, **self.state.variables}

    def add(self, program: Program, num_updates: int) -> None:
        """Compiles a program for other shapes, and uses it from now on with the same state.

        An error leaves everything as it was.
        """
        self.check_not_lost()
        program.check_trained(self.program)
        pipeline = program.pipeline
        pipeline.trace(program.micro_batch)
        program.check_homes(self.program)
        pipeline.prepare(self._devices)
        tensors = {**self.tensors, **program.stages.tensors}
        members = OriginalMembers(self._model, tensors)
        new = {name: value for name, value in tensors.items() if name not in self.tensors}
        variables = {**self.variables, **self._read_host(program, new)}
        assert self.state is not None
        # Accumulators, zeros between two calls, go over to the new pipeline, so that they are there once.
        pipeline.take_accumulators(self.pipeline)
        try:
            pipeline.compile(dataclasses.replace(self.state, variables=variables), num_updates)
            with interrupts.deferred():
                self._use(program, variables)
                self.tensors, self._members = tensors, members
                self.programs[program.shapes] = program
        finally:
            if self.program is not program:
                self.pipeline.take_accumulators(pipeline)

    def use(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Uses the program for these shapes from now on, if there is one. Returns whether there is."""
        program = self.programs.get(shapes)
        if program is None:
            return False
        if program is not self.program:
            with interrupts.deferred():
                if self.state is None:
                    self.program = program
                else:
                    program.pipeline.take_accumulators(self.pipeline)
                    self._use(program, self.variables)
        return True

    def _use(self, program: Program, variables: Mapping[str, Any]) -> None:
        """Uses a program. Copies nothing, because each variable is on the same devices for all programs."""
        assert self.state is not None
        state = program.pipeline.place(dataclasses.replace(self.state, variables=dict(variables)))
        self.program, self.state = program, state
        self._note_unused(variables)

    def _note_unused(self, variables: Mapping[str, Any]) -> None:
        pipeline_variables = self.pipeline.variables
        self._unused = {name: value for name, value in variables.items() if name not in pipeline_variables}

    @processes.one_thread("a call of a PopTorch model")
    def run(
        self,
        micro_batches: Sequence[tuple[Any, ...]],
        is_synthetic: bool = False,
        note_placed: Callable[[], None] = lambda: None,
    ) -> list[Collected]:
        """Runs micro-batches, with weight updates if the model trains.

        An interrupt, or a number that is not finite where this is checked, leaves the state after the last
        completed update.
        """
        pipeline = self.pipeline
        num_per_update = self.program.num_per_update
        self.check_not_lost()
        assert self.state is not None
        self.warn_of_changes()
        # What a call that was interrupted left.
        checks = self.stages.index_checks
        if checks is not None:
            checks.take()
        gradients = self.stages.gradients
        if gradients is not None:
            gradients.forget()
        # The feed.
        total = len(micro_batches) * self._processes.count // num_per_update
        runner, place = pipeline.prepare(), pipeline.place_element
        queue = self._deal(micro_batches)
        has_feed = bool(micro_batches[0])
        synthetic = self.program.synthetic if is_synthetic and has_feed else None

        def take(number: int) -> list[Any]:
            if synthetic is not None:
                return synthetic[:number]
            if not has_feed:
                return [()] * number
            placed = []
            for leaves in itertools.islice(queue, number):
                placed.append(place(leaves))
                if self._processes.count == 1 or leaves is not self.program.stand_ins:
                    note_placed()
            return placed

        # The steps.
        collected: list[Collected] = []
        introduce(pipeline, self._name)
        with announcements.running(
            self, self._name, pipeline, runner, self._devices, num_per_update
        ) as announcement:

            def keep(progress: Progress, num_done: int) -> None:
                after = progress.state
                if self._checks_numbers:
                    _check_numbers(after, progress.collected)
                first = self.program.captured.outputs.num_tensors + len(self.stages.written_inputs)
                for place, expected in enumerate(self.stages.expected if synthetic is None else (), first):
                    expected.check(stack_outputs(progress.collected, place))
                if checks is not None and (wrong := checks.take()) is not None:
                    raise Error(f"{wrong} The weights and buffers are as before this step.")
                self.state = after
                announcement.done(num_done * num_per_update, after.update_count or after.execution_count)
                collected.extend(progress.collected)

            # Synthetic data are the inputs of one update, already on the devices.
            state = pipeline.run(
                pipeline.place(self.state),
                take,
                (),
                keep,
                total,
                one_by_one=synthetic is not None,
                replacing=self._replacing,
            )
        if self._processes.count > 1:  # an error of another process belongs to this call
            with self._waiting():
                jax.block_until_ready((state.variables, state.optimizer_state))
        if self.stages.prints:
            jax.effects_barrier()  # everything that a call prints is out when it returns
        return collected if gradients is None else gradients.join(collected, pipeline.num_replicas > 1)

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Defers interrupts while the old state may be gone and the new one not yet in its place."""
        with interrupts.deferred(), self._waiting():
            yield

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for waiting for other processes' gradients, if the model trains."""
        return (
            contextlib.nullcontext()
            if self.pipeline.built.updates is None
            else processes.waiting("a weight update")
        )

    def _deal(self, micro_batches: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yields the micro-batches of all replicas in turn, with stand-ins for those of other processes."""
        processes = self._processes
        if processes.count == 1:
            yield from micro_batches
            return
        stand_ins = self.program.stand_ins
        number = self.pipeline.num_replicas // processes.count
        before = processes.index * number
        after = self.pipeline.num_replicas - number - before
        for first in range(0, len(micro_batches), number):
            yield from itertools.repeat(stand_ins, before)
            yield from micro_batches[first : first + number]
            yield from itertools.repeat(stand_ins, after)

    def detect_lost_state(self) -> bool:
        """Determines whether an error of JAX lost the state, as one in a weight update does."""
        try:
            jax.block_until_ready(self.state)
        except RuntimeError:
            self.is_lost = True
        return self.is_lost

    def check_not_lost(self) -> None:
        """Raises an Error if the state was lost."""
        if self.is_lost:
            raise Error(f"An error came before this call. {self.LOST}")

    def compile(self, num_updates: int) -> None:
        """Compiles all programs of a run, and runs nothing."""
        assert self.state is not None
        self.pipeline.compile(self.state, num_updates)

    def write_to_host(self) -> None:
        """Copies the variables that runs change to the user's parameters and buffers, if there are any."""
        if self.is_lost:
            logger.warning("The weights on the devices were lost by an error: the host's stay as they are.")
            return
        variables = self.variables
        changing: set[str] = set().union(
            *(p.stages.trained | p.stages.assigned for p in self.programs.values())
        )
        values = jax.device_get({name: variables[name] for name in changing})
        with on_host():
            for name, value in values.items():
                rows = self.stages.group_rows.get(name)  # of trained variables, which all programs have
                tensor = self.tensors[name]
                with writing(tensor):
                    tensor.copy_(to_torch(value if rows is None else rows.to_host(value)))

    def current_values(self) -> dict[int, torch.Tensor]:
        """Returns copies of the parameters and buffers on the devices, by the `id` of the user's tensor."""
        values = jax.device_get(self.variables)
        return {id(tensor): to_torch(values[name], tensor.dtype) for name, tensor in self.tensors.items()}

    def read_from_host(self) -> None:
        """Copies the user's parameters and buffers to the devices."""
        self.check_same_tensors(takes_values=True)
        self._check_fixed()
        self.replace(variables=self._host_values(self.tensors))
        self._changes.note(self.tensors)

    def check_same_tensors(self, takes_values: bool = False) -> None:
        """Checks that the user's model has what it had when it was compiled, or the like.

        Copies of modules and tensors in their places are used from now on. `takes_values`: the devices get
        the host's values after this, so that tensors may have others.
        """
        replaced = self._members.find_replaced(takes_values)
        if replaced is None:
            return
        self._shared_ids |= {id(n) for f, n in replaced.items() if id(self.tensors[f]) in self._shared_ids}
        self.tensors |= replaced
        for program in self.programs.values():
            tensors = {full: self.tensors[full] for full in program.stages.tensors}
            program.stages = dataclasses.replace(program.stages, tensors=tensors)
        self._members = OriginalMembers(self._model, self.tensors)
        self._changes.read_attributes(self._model)
        self._changes.note(replaced)
        host_weights_of(self._model).watch_tensors(self._model)

    def warn_of_changes(self) -> None:
        """Warns of changes on the host that are not on the devices."""
        self._changes.warn(self.tensors)

    def read_buffers_from_host(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Copies some of the user's buffers to the devices."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        if unknown := [name for name in names if name not in buffers]:
            raise Error(
                f"Options.updatableNamedBuffers names {unknown}, which the model does not have. Its "
                f"buffers are {sorted(buffers)}."
            )
        self._check_fixed()
        buffer_ids = {id(buffers[name]) for name in names}
        tensors = {name: t for name, t in self.tensors.items() if id(t) in buffer_ids}
        self.replace(variables={**self.variables, **self._host_values(tensors)})
        self._changes.note(tensors)

    def _check_fixed(self) -> None:
        assumptions = [program.captured.assumptions for program in self.programs.values()]
        if any(each.fixed for each in assumptions):
            model = self._model
            tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
            tensors |= dict(model.named_buffers(remove_duplicate=False))
            for each in assumptions:
                each.check_fixed(tensors)

    def _host_values(self, names: Iterable[str]) -> dict[str, Any]:
        missing, values = dict.fromkeys(names), dict[str, Any]()
        for program in self.programs.values():
            program_names = [name for name in missing if name in program.stages.tensors]
            values |= self._read_host(program, program_names)
            missing = {name: None for name in missing if name not in values}
        return values

    def _read_host(self, program: Program, names: Iterable[str]) -> dict[str, Any]:
        """Returns the host's values of some of a program's variables."""
        tensors = {name: program.stages.tensors[name] for name in names}
        if not tensors:
            return {}
        with on_host(*tensors.values()):
            values = {name: program.stages.read_tensor(name).copy() for name in tensors}
        compared = {name: value for name, value in values.items() if id(tensors[name]) in self._shared_ids}
        compare_arrays("The weights", compared)
        variables = program.pipeline.variables
        return {name: jax.numpy.asarray(value, variables[name].dtype) for name, value in values.items()}

    def replace(self, **changes: Any) -> None:
        """Puts other values into the state."""
        self.check_not_lost()
        assert self.state is not None
        changed = dataclasses.replace(self.state, **changes)
        with interrupts.deferred():
            self.state = self.pipeline.place(changed)
            if "variables" in changes:
                self._note_unused(changes["variables"])

    def detach(self) -> PipelineState:
        """Removes the state from the devices. Returns it without variables."""
        self.check_not_lost()
        assert self.state is not None
        optimizer_state = jax.device_get(self.state.optimizer_state)
        saved = dataclasses.replace(self.state, variables={}, optimizer_state=optimizer_state)
        self.state = None
        self._unused = {}
        return saved

    def attach(self, saved: PipelineState) -> None:
        """Puts the host's weights and what `detach` returned on the devices."""
        variables = self._host_values(self.tensors)
        with interrupts.deferred():
            self.state = self.pipeline.place(dataclasses.replace(saved, variables=variables))
            self._note_unused(variables)
        self._changes.note(self.tensors)


def _check_numbers(state: PipelineState, collected: Sequence[Collected]) -> None:
    """Checks that all values are finite."""
    values: list[tuple[str, Any]] = [(f"variable {name}", value) for name, value in state.variables.items()]
    for part in collected:
        leaves = [leaf if part.size is None else leaf[: part.size] for leaf in part.outputs]
        values += [(f"output {place}", leaf) for place, leaf in enumerate(leaves)]
    for name, value in values:
        if jax.numpy.issubdtype(value.dtype, jax.numpy.floating) and not jax.numpy.isfinite(value).all():
            raise Error(
                f"A floating-point exception: {name} has a value that is not finite. The weights are "
                "as before the weight update. Precision.enableFloatingPointExceptions(False) lets "
                "the model compute on."
            )


# Errors.

P = ParamSpec("P")
T = TypeVar("T")

_RECOVERY_ACTIONS = {
    "UNAVAILABLE": "IPU_RESET",
    "ABORTED": "PARTITION_RESET",
    "CANCELLED": "PARTITION_RESET",
    "DEADLINE_EXCEEDED": "PARTITION_RESET",
}
_MENDS = {
    "IPU_RESET": "Call the model again.",
    "PARTITION_RESET": "Call destroy() on all wrapped models, wrap them again, and go on.",
    "FULL_RESET": "The process can no longer use its devices: go on in a new one, from saved weights.",
}
_CODES = (*_RECOVERY_ACTIONS, "DATA_LOSS", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNKNOWN")
_DEFECTS = ("CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE")
_NO_MEMORY = (
    "The devices do not have enough memory. Make micro-batches smaller (with gradientAccumulation there "
    "are more of them), spread the model over more IPUs, or keep less on the devices: "
    "Options.TensorLocations."
)


def translate(error: jax.errors.JaxRuntimeError | ValueError, location: str) -> Error:
    """Returns PopTorch's error for one of JAX's."""
    text = str(error)
    coded = re.match(r"([A-Z_]+): ", text)
    code = coded[1] if coded else "UNKNOWN"
    cuda = re.search(r"CUDA_ERROR_\w+", text)
    kind = (cuda[0] if cuda else code).lower()
    if code == "RESOURCE_EXHAUSTED" or "out of memory" in text.lower() or kind.endswith("out_of_memory"):
        return Error(f"{text} {_NO_MEMORY}", "out_of_memory", location)
    if code == "DATA_LOSS" or any(defect in text for defect in _DEFECTS):
        mend = "Running again does not help: the devices, or their connections, have a defect."
        return UnrecoverableError(f"{text} {mend}", kind, location)
    action = "FULL_RESET" if cuda else _RECOVERY_ACTIONS.get(code)
    if action is None:
        return Error(text, kind, location)
    return RecoverableError(f"{text} {_MENDS[action]}", kind, location, action)


class _HasCompiled(Protocol):
    """A wrapped model."""

    _compiled: CompiledModel | None


ModelT = TypeVar("ModelT", bound=_HasCompiled)


def translating(
    method: Callable[Concatenate[ModelT, P], T],
) -> Callable[Concatenate[ModelT, P], T]:
    """Makes a method of a wrapped model raise PopTorch's errors in place of JAX's.

    If another process is the cause, it is a ProcessError that names that process. If the failed program
    lost the weights on the devices, the error says so, and the model knows it.
    """

    @functools.wraps(method)
    def wrapped(self: ModelT, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with naming_peers():
                return method(self, *args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and not str(error).startswith(tuple(f"{c}: " for c in _CODES)):
                raise
            translated: Any = translate(error, f"PoplarExecutor.{method.__name__}")
            compiled = self._compiled
            if compiled is not None and compiled.detect_lost_state():
                translated.message += f" {compiled.LOST}"
                translated.args = (translated.message,)
            raise translated from error

    return wrapped
