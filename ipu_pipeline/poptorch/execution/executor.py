"""A wrapped model: called with all micro-batches at once, it runs on its devices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ipu_pipeline.engine import PipelineState
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import Arguments, Signature, split
from ipu_pipeline.poptorch.execution.building import (
    Wrapped,
    batching_of,
    compile_model,
    compile_shapes,
    num_compiled,
)
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.exporting import NOT_COMPILED, Exported
from ipu_pipeline.poptorch.execution.grouped import Grouped
from ipu_pipeline.poptorch.execution.hooks import after_compiling, before_compiling
from ipu_pipeline.poptorch.execution.jax_errors import translating
from ipu_pipeline.poptorch.execution.outputs import join_outputs
from ipu_pipeline.poptorch.execution.parts.anchored import Anchored, AnchoredValues
from ipu_pipeline.poptorch.execution.parts.described import Described
from ipu_pipeline.poptorch.execution.parts.measured import CallTimes, Measured, Profile
from ipu_pipeline.poptorch.execution.parts.refused import Refused
from ipu_pipeline.poptorch.execution.progress import CompileProgress
from ipu_pipeline.poptorch.execution.recalled import RestoredModel, signature_of
from ipu_pipeline.poptorch.execution.shapes import tell_shapes, use_program
from ipu_pipeline.poptorch.execution.together import compare_state
from ipu_pipeline.poptorch.execution.training import ModelOptimizer, call_before_saving
from ipu_pipeline.poptorch.execution.weights import HostWeights, host_weights_of, register
from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.poptorch.optim import Optimizer
from ipu_pipeline.poptorch.optim.describing import describe
from ipu_pipeline.poptorch.optim.device_state import SavedState
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.processes import interrupts
from ipu_pipeline.queues.synthetic import uses_synthetic_data

__all__ = ["PoplarExecutor"]


class PoplarExecutor(Exported, Anchored, Described, Grouped, Refused, Measured):
    """What `trainingModel` and `inferenceModel` return.

    Attributes and methods that are not here are those of the user's model.

    It may be used from several threads, which take turns; models that share a user's model share the turns.
    """

    def __init__(self, wrapped: Wrapped, optimizer: torch.optim.Optimizer | None) -> None:
        """Made by the two functions.

        Args:
          wrapped: the model, and how it is to run.
          optimizer: of a model that trains.
        """
        super().__init__()
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._signature = Signature(signature_of(wrapped.model))
        self._host = host_weights_of(wrapped.model)
        self._graph = wrapped.model.saved_graph if isinstance(wrapped.model, RestoredModel) else None
        self._compiled: CompiledModel | None = None
        self._training: ModelOptimizer | None = None
        self._detached: Mapping[str, Any] | None = None
        self._has_run = False
        self._hook: RemovableHandle | None = None  # of an optimizer of torch's
        self._groupings: Mapping[str, Any] = {}  # those that it was compiled with
        self._seen_version = 0
        self._anchored = AnchoredValues(wrapped.options)
        self.per_replica_params = {}
        self._profile = Profile(wrapped.options, wrapped.trains)

    # Calls.

    @translating
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on all micro-batches that the options say, and if it trains, updates the weights.

        Args:
          *args: as for the model's forward. Tensors have micro-batches one after another along their first
            dimension: device iterations outermost, then those of gradient accumulation, then of replicas.
          **kwargs: likewise.

        Returns:
          What forward returns, of the micro-batches that the output mode says.

        Raises:
          AssertionError: arguments are too many, unknown, given twice, or cannot be cut into micro-batches;
            or the devices are offline (`ConnectionType.Never`).
          Error: an argument is missing, or differs from those that the model was compiled for, but in
            shape, which `Options.allowNewShapes` allows; or the model cannot be compiled.
          ValueError: an integer does not fit.
        """
        with self._host.lock, interrupts.sent_again_if_ignored():
            assert self.options.connection_type is not ConnectionType.Never, (
                "Trying to run a model on an offline device (ConnectionType.Never, as of "
                "useOfflineIpuTarget). Write it to a file with compileAndExport(file, *inputs), and run "
                "what poptorch.load(file) gives; or wrap the model with another connectionType."
            )
            arguments = self._signature.bind(args, kwargs)
            if self._detached is not None:
                self.attachToDevice()
            compiled = self._compile(arguments)
            self._bring_newer()
            self._has_run = True
            begin = time.perf_counter_ns()
            times = self._times = CallTimes()
            micro_batches, number = split(arguments, batching_of(self.options))
            times.begin(begin / 1e9, number)
            if self._training is not None:
                self._training.tell_of_changes(self._optimizer)
                # For torch's schedulers of rates, which warn of an optimizer that has not been used.
                vars(self._optimizer)["_opt_called"] = True
                self._host.mark_stale(self, self._read_back)  # before the run, which an interrupt may end
            is_synthetic = self.options.synthetic_data or uses_synthetic_data()
            with self._profile.of_first_call():
                collected = compiled.run(micro_batches, is_synthetic, times.note_placed)
            times.wait_for(collected)
            mode = self.options.output_mode
            outputs, dtypes = compiled.program.captured.outputs, compiled.stages.output_dtypes
            first = outputs.num_tensors
            joined = join_outputs(
                collected,
                dtypes[:first],
                mode,
                self.options.output_return_period,
                has_replicas=self.options.replication_factor > 1,
            )
            self._anchored.keep(collected, dtypes, first, mode)
            self._call_ns = time.perf_counter_ns() - begin
            return outputs.unflatten(joined)

    def _compile(self, arguments: Arguments) -> CompiledModel:
        """The model compiled for such arguments. What is raised leaves what was compiled as it was."""
        self._check_like_graph(arguments)
        wrapped, known = self._wrapped, self._compiled
        if known is not None and use_program(known, self._signature, arguments, self.options):
            return known
        before_compiling.call()
        register(self, wrapped.model, wrapped.trains)
        self._host.watch(self, wrapped.model)
        self._host.refresh()
        told = tell_shapes(known, arguments, self.options)
        with CompileProgress(self.options.show_compilation_progress_bar, told) as progress:
            if known is None:
                compiled = self._compile_first(arguments, progress)
            else:
                compile_shapes(wrapped, arguments, known, self._training, progress, self._groupings)
                compiled = known
            progress.end()
        self._progress = progress
        if known is None and self.options.connection_type is ConnectionType.Never:
            self._detached = compiled.detach()
        logger.info("Compiled%s in %s", told, progress.time)
        after_compiling.call()
        return compiled

    def _compile_first(self, arguments: Arguments, progress: CompileProgress) -> CompiledModel:
        groupings = dict(self.per_replica_params)
        compiled, training = compile_model(
            self._wrapped, arguments, self._optimizer, progress, groupings, self._graph
        )
        if training is not None:
            assert self._optimizer is not None
            saved = training.take_saved(self._optimizer)
            compare_state(saved)
            if saved is not None:
                _put_saved(compiled, training, saved)
        with progress.compiling():
            compiled.compile(num_compiled(self._wrapped))
        self._compiled, self._training, self._groupings = compiled, training, groupings
        self._detached = None
        self._seen_version, self._has_run = self._host.version, False
        self._connect()
        return compiled

    def _bring_newer(self) -> None:
        """Puts on the devices what has changed elsewhere since the last call."""
        assert self._compiled is not None
        if not self._host.is_newest(self):  # or another model that shares weights may be
            self._host.refresh()
            # Before the first call weights may have changed since the model was compiled.
            if self._seen_version != self._host.version or not self._has_run:
                self._compiled.read_from_host()
                self._seen_version = self._host.version
        if isinstance(self._optimizer, Optimizer):
            loaded = self._optimizer.device_state.take_loaded()
            if loaded is not None:
                compare_state(loaded)
                assert self._training is not None
                _put_saved(self._compiled, self._training, loaded)

    # The optimizer.

    @translating
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes another optimizer, or the values that have changed in the one in use. It compiles nothing.

        Args:
          optimizer: of the same class; what is constant in the one in use must be as there.

        Raises:
          RuntimeError: the model does not train.
          TypeError: the optimizer is not supported.
          Error: it differs in something that the model was compiled for.
        """
        if not self._wrapped.trains:
            raise RuntimeError("Optimizers can only be updated for training models.")
        with self._host.lock:
            describe(optimizer, self.options.Training.automatic_loss_scaling)
            if self._training is not None:
                assert self._compiled is not None
                self._training.change(optimizer)
                if self._compiled.state is not None:
                    state = self._compiled.state.optimizer_state
                    self._compiled.replace(optimizer_state=self._training.put_values(state))
                elif self._detached is not None:
                    state = self._training.put_values(self._detached["optimizer_state"])
                    self._detached = {**self._detached, "optimizer_state": state}
            if optimizer is not self._optimizer:
                self._disconnect()
                self._optimizer = optimizer
                self._connect()

    def _connect(self) -> None:
        if self._training is None or self._optimizer is None:
            return
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.device_state.connect(self._fetch_optimizer_state)
        else:
            self._hook = call_before_saving(self._optimizer, self._leave_optimizer_state)

    def _disconnect(self) -> None:
        if self._training is not None and isinstance(self._optimizer, Optimizer):
            self._optimizer.device_state.disconnect()
        if self._hook is not None:
            self._leave_optimizer_state()
            self._hook.remove()
            self._hook = None

    def _leave_optimizer_state(self) -> None:
        with self._host.lock:
            state = self._find_state()
            if self._training is not None and self._optimizer is not None and state is not None:
                self._training.leave_saved(self._optimizer, state)

    def _fetch_optimizer_state(self) -> SavedState | None:
        with self._host.lock:
            state = self._find_state()
            return None if self._training is None or state is None else self._training.save(state)

    def _find_state(self) -> PipelineState | Mapping[str, Any] | None:
        if self._compiled is None or self._compiled.is_lost:
            return None
        return self._compiled.state if self._detached is None else self._detached

    # Weights.

    @translating
    def copyWeightsToHost(self) -> None:
        """Copies parameters and buffers from the devices to the user's model.

        Raises:
          Error: the model has not been compiled, or is detached.
        """
        with self._host.lock:
            self._attached().check_same_tensors()
            self._bring_newer()
            self._write_to_host()
            if self._wrapped.trains:
                self._host.mark_fresh()
                self._seen_version = self._host.version

    @translating
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copies them if those on the devices are newer; says whether they were."""
        return self._host.refresh()

    @translating
    def copyWeightsToDevice(self) -> None:
        """Copies parameters and buffers of the user's model to the devices.

        Those of a model that trains go to the inference models of the same user's model, too, at their next
        calls.

        Raises:
          Error: the model has not been compiled, or is detached.
        """
        with self._host.lock:
            self._host.refresh()
            self._attached().read_from_host()
            if self._wrapped.trains:
                self._host.version += 1
            self._seen_version = self._host.version

    @translating
    def copyNamedBuffersToDevice(self) -> None:
        """Copies the buffers that `Options.updatableNamedBuffers` names to the devices.

        Raises:
          Error: it names none, or one that the model does not have; or the model has not been compiled, or
            is detached.
        """
        with self._host.lock:
            names = self.options.updatable_named_buffers
            if not names:
                raise Error("No named buffers marked as updatable via updatableNamedBuffers option")
            compiled = self._attached()
            compiled.read_buffers_from_host(self._wrapped.model, names)

    @translating
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads weights into the user's model, and copies them as `copyWeightsToDevice` does.

        Args:
          state_dict: as for `torch.nn.Module.load_state_dict`.
          strict: likewise.
        """
        with self._host.lock:
            loaded = self._wrapped.model.load_state_dict(state_dict, strict)
            if self.isAttachedToDevice():
                self.copyWeightsToDevice()
            elif self._wrapped.trains:  # which gets them when it is compiled or attached
                self._host.version += 1
            return loaded

    def _write_to_host(self) -> None:
        if self._compiled is not None and self._compiled.state is not None:
            self._compiled.write_to_host()

    @translating
    def _read_back(self) -> None:
        self._write_to_host()
        self._seen_version = self._host.version + 1  # of `mark_fresh`, which follows

    def share_weights(self, host: HostWeights) -> None:
        """Keeps weights in step with other models' from now on."""
        self._host = host
        self._seen_version = -1

    def _attached(self) -> CompiledModel:
        if self._compiled is None:
            raise Error(NOT_COMPILED)
        if self._compiled.state is None:
            raise Error("Device is not attached")
        return self._compiled

    # The devices.

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._compiled is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled, and its weights are on the devices."""
        return self._compiled is not None and self._compiled.state is not None

    @translating
    def attachToDevice(self) -> None:
        """Puts the weights of the user's model, and the optimizer's state, on the devices again.

        Raises:
          AssertionError: the devices are offline.
          Error: the model has not been compiled, or is attached.
        """
        with self._host.lock:
            assert self.options.connection_type is not ConnectionType.Never, (
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
            if self._compiled is None:
                raise Error(NOT_COMPILED)
            if self._detached is None:
                raise Error("Device is already attached")
            self._host.refresh()
            self._compiled.check_same_tensors()
            with interrupts.deferred():
                self._compiled.attach(self._detached)
                self._detached = None
            self._seen_version = self._host.version

    @translating
    def detachFromDevice(self) -> None:
        """Copies the weights to the host if they are newer, and lets go of the devices' memory.

        Raises:
          Error: the model has not been compiled, or is detached.
        """
        with self._host.lock:
            compiled = self._attached()
            if self._wrapped.trains:
                self._host.refresh()
            with interrupts.deferred():
                self._detached = compiled.detach()

    @translating
    def destroy(self) -> None:
        """Copies newer weights to the host, and forgets everything that was compiled.

        The user's model can be wrapped again. A call compiles anew.

        Raises:
          Error: the weights turn out to be lost; all else is done, and the host's stay as they are.
        """
        with self._host.lock:
            try:
                if self._wrapped.trains:
                    self._host.refresh()
            finally:
                if self._wrapped.trains:
                    self._disconnect()
                self._compiled = self._training = self._detached = None
                self._host.release(self)
                self._host.unregister(self, self._wrapped.model)

    # What is known.

    @property
    def model(self) -> torch.nn.Module:
        """The user's model."""
        return self._wrapped.model

    @property
    def options(self) -> Options:
        """The model's options, frozen."""
        return self._wrapped.options

    def __getattr__(self, name: str) -> Any:
        """What is no attribute here is one of the user's model."""
        if name == "_wrapped":  # while it is being made
            raise AttributeError(name)
        value = getattr(self._wrapped.model, name)
        within = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        for parameter in within:
            if isinstance(parameter, torch.nn.Parameter):
                self._host.ask(self, self._wrapped.model, parameter)
        return value


def _put_saved(compiled: CompiledModel, training: ModelOptimizer, saved: SavedState) -> None:
    assert compiled.state is not None
    compiled.replace(optimizer_state=training.put_saved(compiled.state.optimizer_state, saved))
