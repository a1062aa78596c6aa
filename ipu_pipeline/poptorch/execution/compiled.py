"""A model compiled for its devices: the engine's pipeline, its state, and its runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ipu_pipeline import engine
from ipu_pipeline.engine import peers
from ipu_pipeline.engine.state import Collected, PipelineState
from ipu_pipeline.poptorch.dtypes import to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.host_changes import HostChanges, writing
from ipu_pipeline.poptorch.execution.together import ALONE, Processes, compare_arrays
from ipu_pipeline.poptorch.execution.weights import on_host
from ipu_pipeline.poptorch.graphs.capture import Captured
from ipu_pipeline.poptorch.graphs.stages import ModelStages
from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.processes import announcing, interrupts
from ipu_pipeline.reports.capturing import start_automatic_report

__all__ = ["CompiledModel"]


class CompiledModel:
    """A pipeline of a model's stages, with its state on the devices or, while detached, nowhere.

    Attributes:
      stages: the model's.
      captured: the model as a graph.
      pipeline: the engine's.
      outputs: structure of what the model returns.
      state: on the devices; None while detached.
      is_lost: whether an error took the state with it.
    """

    LOST = (
        "The weights and the optimizer's state on the devices were lost with it. Those of the host are "
        "from when they were last read: call destroy(), which keeps them, and wrap the model again."
    )

    def __init__(
        self,
        model: torch.nn.Module,
        stages: ModelStages,
        captured: Captured,
        pipeline: engine.Pipeline,
        devices: Sequence[Any],
        micro_batch: tuple[Any, ...],
        key: Any,
        checks_numbers: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        """Traces the pipeline, and puts the host's weights on the devices.

        Args:
          model: the user's.
          stages: the model's.
          captured: the model as a graph.
          pipeline: made of the stages.
          devices: of the IPUs.
          micro_batch: an example.
          key: a random key.
          checks_numbers: whether a result or a weight that is not finite is an error. The pipeline then
            does not donate its state.
          processes: that run it, each with an equal part of the pipeline's replicas.

        Raises:
          Error: another thread has replaced a tensor of the model since it was captured.
        """
        self.stages = stages
        self.captured = captured
        self.outputs = captured.outputs
        self.pipeline = pipeline
        self._changes = HostChanges(model)
        self._held = _find_held(model, stages.tensors.values())
        held = {id(value) for _where, _name, value in self._held}
        for full, tensor in stages.tensors.items():
            if id(tensor) not in held:
                raise Error(
                    f"{full.partition('/')[2]} of the model was replaced in another thread while the model "
                    "was compiled. Change tensors in place (copy_, load_state_dict without assign), or "
                    "call again."
                )
        self._name, self._devices = type(model).__name__, list(devices)
        self._checks_numbers, self._processes = checks_numbers, processes
        own = set() if processes.keep_buffers else {id(buffer) for buffer in model.buffers()}
        own |= {id(parameter) for parameter in model.parameters()}
        self._compared = {name for name, tensor in stages.tensors.items() if id(tensor) in own}
        self.is_lost = False
        start_automatic_report()
        self._synthetic: list[Any] | None = None
        self._elsewhere: tuple[Any, ...] | None = None
        pipeline.trace(micro_batch)
        pipeline.prepare(devices)
        with on_host(*stages.tensors.values()), interrupts.deferred():
            self.state: PipelineState | None = pipeline.init(key, micro_batch)

    @peers.one_thread("a call of a PopTorch model")
    def run(
        self,
        micro_batches: Sequence[tuple[Any, ...]],
        is_synthetic: bool = False,
        note_placed: Callable[[], None] = lambda: None,
    ) -> list[Collected]:
        """Runs micro-batches, and a weight update after every so many if the model trains.

        An interrupt, or a number that is not finite where that is checked, leaves the state of the last
        update that was done.

        Args:
          micro_batches: the leaves of each, of the replicas of this process; a multiple of those of an
            update.
          is_synthetic: whether zeros that stay on the devices take their place.
          note_placed: called when the next one is on its way to the devices; not for synthetic ones.

        Returns:
          What the last stage gave, in their order.

        Raises:
          Error: an error took the state with it before; or an index is out of range, where that is checked.
        """
        pipeline = self.pipeline
        every = self._num_taken
        self.check_not_lost()
        assert self.state is not None
        self._changes.tell(self.stages.tensors)
        checks = self.stages.index_checks
        if checks is not None:
            checks.take()  # of a call that was interrupted
        total = len(micro_batches) * self._processes.count // every
        runner = pipeline.prepare()
        left = self._deal(micro_batches)
        has_feed = bool(micro_batches[0])
        synthetic = self._make_synthetic() if is_synthetic and has_feed else None

        def take(wanted: int) -> list[Any]:
            if synthetic is not None:
                return synthetic[:wanted]
            if not has_feed:
                return [()] * wanted
            placed = []
            for leaves in itertools.islice(left, wanted):
                placed.append(runner.place_element(leaves))
                if leaves is not self._elsewhere:
                    note_placed()
            return placed

        state = pipeline.place(self.state)
        collected: list[Collected] = []
        done = 0
        with announcing.running(self, self._name, pipeline, runner, self._devices, every) as told:
            while done < total:
                num_updates = total - done if synthetic is None else 1
                pending = pipeline.accumulate(state, take, (), num_updates, total)
                # From here the old state may be gone before the new one is in its place.
                with interrupts.deferred():
                    with self._waiting():
                        progress = pipeline.update(state, pending)
                    state, made = progress.state.pipeline, progress.collected
                    if self._checks_numbers:
                        _check_numbers(state, made)
                    if checks is not None and (wrong := checks.take()) is not None:
                        raise Error(f"{wrong} The weights and buffers are those of before this step.")
                    num_done = state.execution_count - self.state.execution_count
                    done += num_done
                    self.state = state
                    told.done(num_done * every, state.update_count or state.execution_count)
                collected += made
        if self._processes.count > 1:  # an error of another process is one of this call
            with self._waiting():
                jax.block_until_ready((state.variables, state.optimizer_state))
        if self.stages.prints:
            jax.effects_barrier()  # what a call prints stands there when it returns
        return collected

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """For where gradients of other processes are waited for, if the model trains."""
        return (
            contextlib.nullcontext() if self.pipeline.updates is None else peers.waiting("a weight update")
        )

    def _deal(self, micro_batches: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """The micro-batches of all replicas in turn; something in place of those of other processes."""
        processes = self._processes
        if processes.count == 1:
            yield from micro_batches
            return
        if self._elsewhere is None:  # arrays of JAX, which nobody copies
            element = self.pipeline.traced.element
            self._elsewhere = tuple(jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in element)
        number = self.pipeline.num_replicas // processes.count
        before = processes.index * number
        after = self.pipeline.num_replicas - number - before
        for first in range(0, len(micro_batches), number):
            yield from itertools.repeat(self._elsewhere, before)
            yield from micro_batches[first : first + number]
            yield from itertools.repeat(self._elsewhere, after)

    def note_loss(self) -> bool:
        """After an error of JAX: finds out whether it took the state with it. A weight update does."""
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
        """Compiles all programs of a run, and runs nothing.

        Args:
          num_updates: weight updates of a run; without training, 1.
        """
        assert self.state is not None
        self.pipeline.compile(self.state, num_updates)

    @property
    def _num_taken(self) -> int:
        """How many micro-batches a weight update takes, those of all replicas."""
        assert self.pipeline.num_micro_batches is not None
        return self.pipeline.num_micro_batches * self.pipeline.num_replicas

    def _make_synthetic(self) -> list[Any]:
        if self._synthetic is None:
            every = self._num_taken
            runner, element = self.pipeline.prepare(), self.pipeline.traced.element
            zeros = tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in element)
            self._synthetic = runner.place_ahead([runner.place_element(zeros) for _number in range(every)])
        return self._synthetic

    def write_to_host(self) -> None:
        """Copies the variables that runs change to the user's parameters and buffers, if there are any."""
        if self.is_lost:
            logger.warning("The weights on the devices were lost by an error: the host's stay as they are.")
            return
        assert self.state is not None
        changing = self.stages.trained | self.stages.assigned
        values = jax.device_get({name: self.state.variables[name] for name in changing})
        with on_host():
            for name, value in values.items():
                rows = self.stages.group_rows.get(name)
                tensor = self.stages.tensors[name]
                with writing(tensor):
                    tensor.copy_(to_torch(value if rows is None else rows.to_host(value)))

    def current_values(self) -> dict[int, torch.Tensor]:
        """Copies of the parameters and buffers on the devices, by the `id` of the user's tensor."""
        assert self.state is not None
        values = jax.device_get(self.state.variables)
        return {
            id(tensor): to_torch(values[name], tensor.dtype) for name, tensor in self.stages.tensors.items()
        }

    def read_from_host(self) -> None:
        """Copies the user's parameters and buffers to the devices.

        Raises:
          Error: one of its tensors is another object than when it was compiled.
        """
        self.check_same_tensors()
        self.replace(variables=self._host_values(self.stages.tensors))
        self._changes.note(self.stages.tensors)

    def check_same_tensors(self) -> None:
        """Looks for what the user's model held when it was compiled, and has been replaced since then.

        Raises:
          Error: a parameter, buffer or module is another one now.
        """
        for held, name, value in self._held:
            if held.get(name) is not value:
                kind = "module" if isinstance(value, torch.nn.Module) else "tensor"
                known = {id(tensor): full for full, tensor in self.stages.tensors.items()}
                full = known.get(id(value), f"model/{name}").partition("/")[2]
                raise Error(
                    f"{full} of the model is another {kind} than when the model was compiled. Change "
                    "tensors in place (copy_, load_state_dict without assign), or call destroy() on the "
                    "model and wrap it again."
                )

    def read_buffers_from_host(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Copies some of the user's buffers to the devices.

        Args:
          model: the user's.
          names: of buffers of the model.

        Raises:
          Error: it has no such buffer.
        """
        assert self.state is not None
        buffers = dict(model.named_buffers(remove_duplicate=False))
        if unknown := [name for name in names if name not in buffers]:
            raise Error(
                f"Options.updatableNamedBuffers names {unknown}, which the model does not have. Its "
                f"buffers are {sorted(buffers)}."
            )
        wanted = {id(buffers[name]) for name in names}
        tensors = {name: t for name, t in self.stages.tensors.items() if id(t) in wanted}
        self.replace(variables={**self.state.variables, **self._host_values(tensors)})
        self._changes.note(tensors)

    def _host_values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        with on_host(*tensors.values()):
            found = {name: self.stages.read_tensor(name).copy() for name in tensors}
        compare_arrays("The weights", {n: value for n, value in found.items() if n in self._compared})
        variables = self.pipeline.variables
        return {name: jax.numpy.asarray(value, variables[name].dtype) for name, value in found.items()}

    def replace(self, **changes: Any) -> None:
        """Puts other values into the state.

        Args:
          **changes: fields of `PipelineState`.
        """
        self.check_not_lost()
        assert self.state is not None
        changed = dataclasses.replace(self.state, **changes)
        with interrupts.deferred():
            self.state = self.pipeline.place(changed)

    def detach(self) -> Mapping[str, Any]:
        """Takes the state from the devices.

        Returns:
          What `attach` needs besides the host's weights, on the host.
        """
        self.check_not_lost()
        assert self.state is not None
        kept = {
            "optimizer_state": jax.device_get(self.state.optimizer_state),
            "update_count": self.state.update_count,
            "execution_count": self.state.execution_count,
            "key": self.state.key,
        }
        self.state = None
        return kept

    def attach(self, kept: Mapping[str, Any]) -> None:
        """Puts the host's weights and what `detach` returned on the devices."""
        variables = self._host_values(self.stages.tensors)
        with interrupts.deferred():
            self.state = self.pipeline.place(PipelineState(variables=variables, **kept))
        self._changes.note(self.stages.tensors)


def _find_held(
    model: torch.nn.Module, tensors: Iterable[torch.Tensor]
) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Where modules hold each other and some tensors: the dict, the key there, and what it has."""
    wanted = set(map(id, tensors))
    return [
        (vars(module)[kind], name, value)
        for module in model.modules()
        for kind in ("_modules", "_parameters", "_buffers")
        for name, value in vars(module)[kind].items()
        if kind == "_modules" or id(value) in wanted
    ]


def _check_numbers(state: PipelineState, collected: Sequence[Collected]) -> None:
    """Looks for values that are not finite.

    Raises:
      Error: there is one.
    """
    values: list[tuple[str, Any]] = [(f"variable {name}", value) for name, value in state.variables.items()]
    for part in collected:
        leaves = [leaf if part.size is None else leaf[: part.size] for leaf in part.outputs]
        values += [(f"output {place}", leaf) for place, leaf in enumerate(leaves)]
    for name, value in values:
        if jax.numpy.issubdtype(value.dtype, jax.numpy.floating) and not jax.numpy.isfinite(value).all():
            raise Error(
                f"A floating-point exception: {name} has a value that is not finite. The weights are "
                "those of before the weight update. Precision.enableFloatingPointExceptions(False) lets "
                "the model compute on."
            )
