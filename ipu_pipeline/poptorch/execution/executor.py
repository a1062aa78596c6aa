"""A wrapped model, which takes all micro-batches of a call together and runs on its devices."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import jax
import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ipu_pipeline.engine import PipelineState
from ipu_pipeline.engine.inspect import summarize
from ipu_pipeline.poptorch._args_parser import ArgsParser
from ipu_pipeline.poptorch.annotations import module_repr
from ipu_pipeline.poptorch.enums import CommGroupType, ConnectionType, VariableRetrievalMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.call_values import (
    OF_FILE,
    AnchoredValues,
    Arguments,
    Signature,
    check_like_first,
    check_shapes,
    join_outputs,
    shapes_of,
    split,
    write_inputs,
)
from ipu_pipeline.poptorch.execution.compilation import (
    Wrapped,
    batching_of,
    compile_model,
    compile_shapes,
    describe_next_shapes,
    num_compiled,
    use_program,
)
from ipu_pipeline.poptorch.execution.compiled_model import CompiledModel, translating
from ipu_pipeline.poptorch.execution.generation import (
    Generation,
    check_generates,
    generates_on_devices,
    read_request,
)
from ipu_pipeline.poptorch.execution.host_weights import HostWeights, host_weights_of, on_host, register
from ipu_pipeline.poptorch.execution.instrumentation import (
    CallTimes,
    CompileProgress,
    Latency,
    Profile,
    after_compiling,
    before_compiling,
)
from ipu_pipeline.poptorch.execution.model_optimizer import ModelOptimizer, call_before_saving
from ipu_pipeline.poptorch.execution.process_groups import check_alone, compare_state
from ipu_pipeline.poptorch.execution.restoration import (
    RestoredModel,
    Resumption,
    bind,
    make_arguments,
    named_tensors,
    signature_of,
    to_graph,
)
from ipu_pipeline.poptorch.files import model_files
from ipu_pipeline.poptorch.files.model_files import Contents, PathLike, SavedModel, SavedTensor, find_target
from ipu_pipeline.poptorch.graphs.model_summary import ModelSummary, summarize_module, summarize_stages
from ipu_pipeline.poptorch.logs import logger, warn_once
from ipu_pipeline.poptorch.optim import Optimizer
from ipu_pipeline.poptorch.optim.device_state import SavedState
from ipu_pipeline.poptorch.optim.specs import describe
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.replica_groups import ReplicaGrouping
from ipu_pipeline.processes import interrupts
from ipu_pipeline.queues.synthetic_data import uses_synthetic_data

NOT_COMPILED = (
    "Model has not been compiled or has been destroyed. Call it with its inputs first, or "
    "compile(*inputs), which runs nothing."
)


class PoplarExecutor:
    """A wrapped model, the result of `trainingModel` and `inferenceModel`.

    Other attributes and methods are the user's model's.

    Several threads may use it; one call runs at a time, also of all wrappers of the same model.

    Attributes:
      per_replica_params: for parameters by name, the grouping of replicas, the size of a group, and whether
        the parameter has a row (along a new first dimension) for each group or for each replica.
        `executor.weight.replicaGrouping(kind, size, mode)` sets the entry of "weight". Forward sees the row
        of its own replica. A row's gradients are summed over its group and divided by the number of all
        replicas. With `AllReplicas` a group's rows are equal; `CommGroupType.All` changes nothing.
        `max_grad_norm` counts the rows of all groups. Entries are read when the model is compiled.
    """

    def __init__(self, wrapped: Wrapped, optimizer: torch.optim.Optimizer | None) -> None:
        """Wraps a model; nothing is compiled yet.

        Args:
          wrapped: the model and its options.
          optimizer: the optimizer of a model that trains; None for inference.
        """
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._signature = Signature(signature_of(wrapped.model))
        self._host = host_weights_of(wrapped.model)
        self._graph = wrapped.model.saved_graph if isinstance(wrapped.model, RestoredModel) else None
        self._compiled: CompiledModel | None = None
        self._training: ModelOptimizer | None = None
        self._detached: PipelineState | None = None
        self._has_run = False
        self._is_connected = False  # whether the devices have the newest state of the optimizer
        self._hook: RemovableHandle | None = None  # of an optimizer of torch's
        self._groupings: Mapping[str, Any] = {}  # those that it was compiled with
        self._seen_version = 0
        self._anchored = AnchoredValues(wrapped.options)
        self.per_replica_params: dict[str, tuple[CommGroupType, int, VariableRetrievalMode]] = {}
        self._profile = Profile(wrapped.options, wrapped.trains)
        self._progress: CompileProgress | None = None
        self._times = CallTimes()
        self._call_ns: int | None = None
        self._generation: Generation | None = None
        self._resumption: Resumption | None = None

    # Calls.

    @translating
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on all micro-batches of a call. A model that trains updates its weights.

        Args:
          *args: the arguments of the model's forward. A tensor has all micro-batches along its first
            dimension, ordered by device iteration, then by gradient accumulation, then by replica.
          **kwargs: its keyword arguments, with the same layout.

        Returns:
          The results of forward, for the micro-batches that the output mode selects.

        Raises:
          AssertionError: there are too many arguments, or one is unknown, given twice, or cannot be cut
            into micro-batches; or the devices are offline (`ConnectionType.Never`).
          Error: an argument is missing, or does not match the arguments that the model was compiled for
            (another shape is accepted with `Options.allowNewShapes`); or the model cannot be compiled.
          ValueError: an integer is outside the range of its dtype on the devices.
        """
        with self._host.lock, interrupts.sent_again_if_ignored():
            assert self.options.connection_type is not ConnectionType.Never, (
                "Trying to run a model on an offline device (ConnectionType.Never, as of "
                "useOfflineIpuTarget). Write it to a file with compileAndExport(file, *inputs), and run "
                "what poptorch.load(file) gives; or wrap the model with another connectionType."
            )
            arguments = self._bind(args, kwargs)
            if self._detached is not None:
                self.attachToDevice()
            # The newest weights and optimizer's state.
            compiled = self._compile(arguments)
            self._bring_newer()
            self._has_run = True
            begin = time.perf_counter_ns()
            times = self._times = CallTimes()
            micro_batches, number = split(arguments, batching_of(self.options))
            times.begin(begin / 1e9, number)
            if self._training is not None:
                self._training.warn_of_changes(self._optimizer)
                # For torch's schedulers of rates, which warn of an optimizer that has not been used.
                vars(self._optimizer)["_opt_called"] = True
                self._host.mark_stale(self, self._read_back)  # before the run, which an interrupt may end
            # The run.
            is_synthetic = self.options.synthetic_data or uses_synthetic_data()
            if self._resumption is not None:
                assert self._training is not None
                self._resumption.keep(compiled, self._training)
            with self._profile.of_first_call():
                collected = compiled.run(micro_batches, is_synthetic, times.note_placed)
            times.wait_for(collected)
            if self._resumption is not None:
                self._resumption.note_call(compiled)
            # The results.
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
            written = compiled.stages.written_inputs
            if written and not is_synthetic:
                write_inputs(arguments, written, collected, first, batching_of(self.options))
            first += len(written) + len(compiled.stages.expected)
            self._anchored.keep(collected, dtypes, first, mode)
            self._call_ns = time.perf_counter_ns() - begin
            return outputs.unflatten(joined)

    @translating
    def resume(self, num_done: int = 0) -> int:
        """Continues training from memory after `ipu-pipeline launch --restarts` has restarted processes.

        PopTorch does not have this. After this call, the state is kept in the machines' memory before each
        call of the model: weights, buffers, the optimizer's state and values, and random numbers. After a
        restart, weights and buffers are copied to the user's model at once, and the whole state to the
        devices when the model is compiled, so that training continues exactly as if nothing had failed. The
        program must set its own state, such as a data loader or a learning rate scheduler, to the same
        position. Without that launcher, nothing is kept.

        Call it before the first call, in all processes, and for several models in the same order.

        Args:
          num_done: the number of finished calls in a state that the program has loaded from disk. A state
            in memory with fewer calls is not used.

        Returns:
          The number of finished calls: `num_done`, or more if memory has a newer state.

        Raises:
          RuntimeError: the model does not train.
          Error: the model has been compiled, or this was called before.
          ValueError: the state in memory belongs to another model.
          OSError: the launcher's directory cannot be made, or another user may write to it.
          TypeError: `num_done` is not a number of calls.

        Example:
          >>> for step in range(training_model.resume(), 1000):
          ...     output, loss = training_model(*batch(step))
        """
        if not self._wrapped.trains:
            raise RuntimeError("resume is for training models: the weights of this one do not change.")
        if isinstance(num_done, bool) or not isinstance(num_done, int) or num_done < 0:
            raise TypeError(f"resume: num_done must be a whole number from 0; got {num_done!r}.")
        with self._host.lock:
            if self._resumption is not None:
                raise Error("resume was called before; calls go on from one state.")
            if self._compiled is not None:
                raise Error(
                    "resume must be called before the model is compiled, by a call or by compile()."
                )
            self._resumption = Resumption(self._wrapped.model, num_done)
            if self._resumption.is_pending:
                self._host.version += 1
            if self._resumption.num_calls:  # so that torch's schedulers can be brought to where they were
                vars(self._optimizer)["_opt_called"] = True
            return self._resumption.num_calls

    @property
    def generate(self) -> Callable[..., Any]:
        """Generates tokens on the devices, with a decoder of transformers that is wrapped for inference.

        `executor.generate(input_ids, attention_mask=mask, max_new_tokens=32)` has the arguments and the
        result of transformers' `generate`: int64 [rows, length] with prompts, new tokens and padding. Keys
        and values stay on the devices of their layers. docs/poptorch.md lists the supported arguments;
        others raise an `Error` that names them. Samples depend on `Options.randomSeed`, or else on
        `torch.manual_seed`. For other models, this is the model's own `generate`, which runs on the host,
        like `executor.model.generate`.

        The model is captured for chunks of 1, 8 and 64 tokens, the last one when the first prompt of this
        length comes. It is compiled again for more rows, and for requests longer than the caches, whose
        lengths are powers of two from 32. A model that is also called has its weights on the devices twice.
        """
        if generates_on_devices(self._wrapped):
            return self._generate
        method: Callable[..., Any] = self.__getattr__("generate")
        if isinstance(method, types.MethodType) and method.__self__ is self._wrapped.model:
            warn_once(f"generate of {type(self._wrapped.model).__name__} is its own, and runs on the host.")
        return method

    @translating
    def _generate(
        self, inputs: Any = None, generation_config: Any = None, **arguments: Any
    ) -> torch.Tensor:
        check_generates(self._wrapped)
        with self._host.lock, interrupts.sent_again_if_ignored():
            request = read_request(self._wrapped.model, inputs, generation_config, arguments)
            if self._generation is None:
                register(self, self._wrapped.model, self._wrapped.trains)
                self._host.watch(self, self._wrapped.model)
                self._generation = Generation(self._wrapped, self._host)
            return self._generation.generate(request)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        first = None if self._graph is None else self._graph.arguments
        if self._compiled is not None:
            first = self._compiled.program.arguments.structure
        return self._signature.bind(args, kwargs, first)

    def _compile(self, arguments: Arguments) -> CompiledModel:
        """Compiles the model for these arguments, if it is not. After an error it is as it was before."""
        self._check_like_graph(arguments)
        wrapped, previous = self._wrapped, self._compiled
        if previous is not None and use_program(previous, self._signature, arguments, self.options):
            return previous
        before_compiling.call()
        register(self, wrapped.model, wrapped.trains)
        self._host.watch(self, wrapped.model)
        self._host.refresh()
        shapes = describe_next_shapes(previous, arguments, self.options)
        with CompileProgress(self.options.show_compilation_progress_bar, shapes) as progress:
            if previous is None:
                compiled = self._compile_first(arguments, progress)
            else:
                compile_shapes(wrapped, arguments, previous, self._training, progress, self._groupings)
                compiled = previous
            progress.end()
        self._progress = progress
        if previous is None and self.options.connection_type is ConnectionType.Never:
            self._detached = compiled.detach()
        logger.info("Compiled%s in %s", shapes, progress.time)
        after_compiling.call()
        return compiled

    def _compile_first(self, arguments: Arguments, progress: CompileProgress) -> CompiledModel:
        groupings = dict(self.per_replica_params)
        compiled, training = compile_model(
            self._wrapped, arguments, self._optimizer, progress, groupings, self._graph
        )
        if training is not None:
            assert compiled.state is not None
            self._put_optimizer_state(compiled, training, compiled.state.optimizer_state)
        compiled.compile(num_compiled(self._wrapped))
        is_resumed = self._resumption is not None and self._resumption.is_pending
        if self._resumption is not None and is_resumed:
            assert training is not None
            self._resumption.take_over(compiled, training)
            self._host.version += 1  # for other models of these weights
        self._compiled, self._training, self._groupings = compiled, training, groupings
        self._detached = None
        self._seen_version, self._has_run = self._host.version, False
        self._connect()
        if is_resumed:  # the devices have more than the host: the values of each replica
            self._host.mark_stale(self, self._read_back)
        return compiled

    def _bring_newer(self) -> None:
        """Copies to the devices what has changed on the host or in other models since the last call."""
        assert self._compiled is not None
        if not self._host.is_newest(self):  # or another model that shares weights may be
            self._host.refresh()
            # Before the first call weights may have changed since the model was compiled.
            if self._seen_version != self._host.version or not self._has_run:
                self._compiled.read_from_host()
                self._seen_version = self._host.version
        has_state = self._is_connected and not _is_loaded(self._optimizer)
        if self._training is not None and not has_state:  # another model had it since, or it was loaded
            assert self._compiled.state is not None
            # What is not known of a parameter starts from nothing, as in torch.
            initial = self._compiled.pipeline.init_optimizer_state(self._compiled.state.variables)
            self._put_optimizer_state(self._compiled, self._training, initial)
            self._connect()

    # The optimizer.

    @translating
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the optimizer, or takes over changed values of the current one. Nothing is compiled.

        Args:
          optimizer: an optimizer of the same class, with the same constants as the current one.

        Raises:
          RuntimeError: the model does not train.
          TypeError: the optimizer is not supported.
          Error: the optimizer differs in a value that is compiled into the model.
        """
        if not self._wrapped.trains:
            raise RuntimeError("Optimizers can only be updated for training models.")
        with self._host.lock:
            describe(optimizer, self.options.Training.automatic_loss_scaling)
            if self._training is None and self._resumption is not None:
                self._resumption.has_new_values = True
            if self._training is not None:
                assert self._compiled is not None
                self._training.change(optimizer)
                if self._compiled.state is not None:
                    state = self._compiled.state.optimizer_state
                    self._compiled.replace(optimizer_state=self._training.put_values(state))
                elif self._detached is not None:
                    state = self._training.put_values(self._detached.optimizer_state)
                    self._detached = dataclasses.replace(self._detached, optimizer_state=state)
            if optimizer is not self._optimizer:
                self._replace_optimizer(optimizer)

    def _replace_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Goes on with another optimizer, and the state that this one has."""
        has_state = self._is_connected and not self._users_of(optimizer) and not _is_loaded(optimizer)
        if self._training is None or has_state:
            self._disconnect()
            self._optimizer = optimizer
            if has_state:
                self._connect()
            return
        # The next call puts the state on the devices: another model has the newest, of this optimizer or of
        # that one, or that one has a loaded state.
        saved = self._take_optimizer_state(self._training)
        self._disconnect()
        self._optimizer = optimizer
        if saved is not None:
            self._training.keep_state(optimizer, saved)

    def _put_optimizer_state(self, compiled: CompiledModel, training: ModelOptimizer, initial: Any) -> None:
        """Puts the optimizer's state on the devices, from another model that has it, or from the host."""
        saved = self._take_optimizer_state(training)
        compare_state(saved)
        compiled.replace(optimizer_state=training.put_state(initial, saved))

    def _take_optimizer_state(self, training: ModelOptimizer) -> SavedState | None:
        """Returns the optimizer's state, which the model that has it leaves."""
        assert self._optimizer is not None
        for user in self._users_of(self._optimizer):
            user.leave_optimizer()
        return training.take_state(self._optimizer)

    def _users_of(self, optimizer: torch.optim.Optimizer) -> set[PoplarExecutor]:
        """Returns the model that has an optimizer's state, or those that may have parts of it."""
        if isinstance(optimizer, Optimizer):
            return {optimizer.device_state.user} - {None}
        return {user for user in self._host.trainers if user.has_state_of(optimizer)}

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this model has the newest state of an optimizer."""
        return self._is_connected and optimizer is self._optimizer

    def leave_optimizer(self) -> None:
        """Leaves the optimizer's state to another model that trains with it."""
        with self._host.lock:
            self._disconnect()

    def _connect(self) -> None:
        if self._training is None or self._optimizer is None:
            return
        self._is_connected = True
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.device_state.connect(self._fetch_optimizer_state, self._training.parameters)
        else:
            self._hook = call_before_saving(self._optimizer, self._leave_optimizer_state)

    def _disconnect(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.device_state.disconnect()
        if self._hook is not None:
            self._leave_optimizer_state()
            self._hook.remove()
            self._hook = None

    def _leave_optimizer_state(self) -> None:
        with self._host.lock:
            state = self._find_state()
            if self._training is not None and self._optimizer is not None and state is not None:
                self._training.leave_state(self._optimizer, state)

    def _fetch_optimizer_state(self) -> SavedState | None:
        with self._host.lock:
            state = self._find_state()
            return None if self._training is None or state is None else self._training.save(state)

    def _find_state(self) -> PipelineState | None:
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
        """Copies weights to the host if the devices' are newer; returns whether they were."""
        return self._host.refresh()

    @translating
    def copyWeightsToDevice(self) -> None:
        """Copies parameters and buffers of the user's model to the devices.

        Inference models of the same user's model get the weights of the training model at their next calls.

        Raises:
          Error: the model has not been compiled, or is detached.
        """
        with self._host.lock:
            self._host.refresh()
            if self._generation is not None:
                self._generation.read_from_host()
            if self._generation is None or self._compiled is not None:
                self._attached().read_from_host()
            if self._wrapped.trains:
                self._host.version += 1
            self._seen_version = self._host.version

    @translating
    def copyNamedBuffersToDevice(self) -> None:
        """Copies the buffers that `Options.updatableNamedBuffers` names to the devices.

        Raises:
          Error: the option names no buffer, or one that the model does not have; or the model has not been
            compiled, or is detached.
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
          strict: as for `torch.nn.Module.load_state_dict`.
        """
        with self._host.lock:
            loaded = self._wrapped.model.load_state_dict(state_dict, strict)
            if self.isAttachedToDevice() or (self._compiled is None and self._generation is not None):
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
        """Shares a `HostWeights` with other models from now on."""
        self._host = host
        if self._generation is not None:
            self._generation.share_weights(host)
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
        """Copies the weights of the user's model, and the optimizer's state, to the devices again.

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
            self._compiled.check_same_tensors(takes_values=True)
            with interrupts.deferred():
                self._compiled.attach(self._detached)
                self._detached = None
            self._seen_version = self._host.version

    @translating
    def detachFromDevice(self) -> None:
        """Copies the weights to the host if they are newer, and frees the devices' memory.

        Raises:
          Error: the model has not been compiled, or is detached.
        """
        with self._host.lock:
            has_generated, self._generation = self._generation is not None, None
            if has_generated and self._compiled is None:
                return
            compiled = self._attached()
            if self._wrapped.trains:
                self._host.refresh()
            with interrupts.deferred():
                self._detached = compiled.detach()

    @translating
    def destroy(self) -> None:
        """Copies newer weights to the host, and discards all compiled programs.

        The user's model can be wrapped again, and the next call compiles again.

        Raises:
          Error: the weights on the devices are lost. Programs are still discarded, and the host's weights
            stay.
        """
        with self._host.lock:
            try:
                if self._wrapped.trains:
                    self._host.refresh()
            finally:
                if self._wrapped.trains:
                    self._disconnect()
                self._compiled = self._training = self._detached = self._generation = None
                self._host.release(self)
                self._host.unregister(self, self._wrapped.model)

    # Files.

    @translating
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model for arguments like these, and runs nothing.

        Args:
          *args: as for a call.
          **kwargs: as for a call.

        Raises:
          Error: as for a call.
        """
        with self._host.lock:
            self._compile(self._bind(args, kwargs))

    def compileAndExport(
        self, filename: PathLike, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compiles the model for arguments like these, and writes it to a file, for `poptorch.load`.

        Args:
          filename: the path of the file; see `save`.
          *args: as for a call.
          export_model: see `save`.
          **kwargs: as for a call.

        Raises:
          Error: as for a call; or see `save`.
          NotImplementedError: there are several processes (`Options.Distributed`).
        """
        _check_flag("export_model", export_model)
        check_alone(self._wrapped.options, "compileAndExport")
        find_target(filename)  # before the work whose result it is to hold
        with self._host.lock:
            self.compile(*args, **kwargs)
            self.save(filename, export_model)

    def save(self, filename: PathLike, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Writes the compiled model to a file.

        The file has the model as torch.export captured it: its graph, and tensors; no code of its classes,
        and no machine code, which XLA makes when the file is loaded (or takes from
        `Options.enableExecutableCaching`). With `Options.allowNewShapes` it has the graph for the shapes
        that were called or compiled last. Its format is safetensors': tensors are named by numbers, and the
        metadata has JSON ("ipu_pipeline.poptorch") and a checksum ("crc32").

        Args:
          filename: the path of the file. Its directory is made if it is missing, and an existing file is
            replaced once the new one is complete. A killed process may leave a directory `*.part`.
          export_model: whether the file also has parameters, buffers, the options, and the optimizer with
            its state, so that `poptorch.load` can make the model from it. Without them, wrap the model in
            the same way and call `loadExecutable`.
          save_rng_state: whether random numbers continue from their present state. Otherwise they start
            from `Options.randomSeed`, or torch's seed, when the file is loaded.

        Raises:
          Error: the model has not been compiled; parameters have `replicaGrouping`; the file cannot be
            written; or arguments, results, options or the optimizer contain values that no file can hold.
          NotImplementedError: there are several processes (`Options.Distributed`).
          TypeError: `filename` is not a path, or a flag is not a boolean.
        """
        _check_flag("export_model", export_model)
        _check_flag("save_rng_state", save_rng_state)
        check_alone(self._wrapped.options, "save")
        with self._host.lock:
            compiled, wrapped = self._compiled, self._wrapped
            if compiled is None:
                raise Error(NOT_COMPILED)
            if compiled.stages.group_rows:
                raise Error(
                    f"{', '.join(compiled.stages.group_rows)} have values for each group of replicas "
                    "(replicaGrouping), and a file has one of each. Save the weights with torch.save."
                )
            compiled.check_same_tensors()
            if compiled.state is None:
                self._host.refresh()
            else:
                self._bring_newer()
            program = compiled.program
            graph = to_graph(program.captured, program.arguments.structure, wrapped.model, wrapped.trains)
            rng_state = self._read_rng_state() if save_rng_state else None
            model = self._save_model() if export_model else None
            model_files.write(filename, Contents(graph, model, rng_state))

    def loadExecutable(self, filename: PathLike) -> None:
        """Loads the graph of a model from a file, and compiles it.

        This wrapper keeps its weights, options and optimizer. The file supplies the graph, the arguments
        that it was compiled for, constant tensors, and the state of the random numbers. The model's own
        forward is no longer used.

        Args:
          filename: a file that `compileAndExport` or `save` wrote for a model like this one.

        Raises:
          Error: the model is already compiled; or the file is missing, damaged, or belongs to another
            model.
          NotImplementedError: there are several processes (`Options.Distributed`).
          TypeError: `filename` is not a path.
        """
        check_alone(self._wrapped.options, "loadExecutable")
        with self._host.lock:
            if self._compiled is not None:
                raise Error(
                    "The model has been compiled already. Call destroy() first, or loadExecutable before "
                    "the first call."
                )
            with torch.inference_mode(False):
                loaded = model_files.read(filename)
            bind(loaded.graph, self._wrapped.model, self._wrapped.trains)
            before, self._graph = self._graph, loaded.graph
            try:
                self.go_on_from(loaded)
            except BaseException:
                if self.isCompiled():
                    self.destroy()
                self._graph = before
                raise

    def go_on_from(self, loaded: Contents) -> None:
        """Compiles the graph of a file, and continues from its random numbers; `poptorch.load` calls it."""
        assert self._graph is not None
        self._compile(make_arguments(self._graph, self._signature, batching_of(self.options)))
        if loaded.rng_state is not None:
            if len(loaded.rng_state) != len(self._read_rng_state()):
                raise Error(
                    "The file has the state of another kind of random numbers than JAX makes here: set "
                    "jax_default_prng_impl as it was when the model was exported, or export it with "
                    "save_rng_state=False."
                )
            self._write_rng_state(loaded.rng_state)

    def _check_like_graph(self, arguments: Arguments) -> None:
        """Raises an `Error` if a call's arguments differ from those of the file's graph."""
        if self._graph is not None:
            first = make_arguments(self._graph, self._signature, batching_of(self.options))
            check_like_first(self._signature, first, arguments, OF_FILE)
            check_shapes(arguments, shapes_of(first), OF_FILE)

    def _save_model(self) -> SavedModel:
        assert self._compiled is not None
        model, state = self._wrapped.model, self._compiled.state
        values = {} if state is None else self._compiled.current_values()
        persistent = model.state_dict(keep_vars=True).keys()
        named = named_tensors(model)
        with on_host(*named.values()):
            for tensor in named.values():
                if id(tensor) not in values:
                    values[id(tensor)] = tensor.detach().clone()
        return SavedModel(
            class_name=type(model).__name__ if not isinstance(model, RestoredModel) else model.class_name,
            is_training=self._wrapped.modes[model],
            tensors=[
                SavedTensor(name, tensor, values[id(tensor)], name in persistent)
                for name, tensor in named.items()
            ],
            options=self.options,
            optimizer=self._optimizer,
        )

    @property
    def rng_state(self) -> list[int]:
        """The state of the model's random numbers: the words of the key, and the number of runs so far."""
        self._attached()
        return self._read_rng_state()

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        if len(state) != len(self.rng_state):
            raise ValueError(f"rng_state must have the numbers that it was read with; got {state!r}.")
        with self._host.lock:
            self._attached()
            self._write_rng_state(state)

    def _read_rng_state(self) -> list[int]:
        assert self._compiled is not None
        state = self._compiled.state or self._detached
        assert state is not None
        return [*map(int, jax.random.key_data(state.key).ravel()), state.execution_count]

    def _write_rng_state(self, state: list[int]) -> None:
        assert self._compiled is not None
        words: Any = np.asarray(state[:-1], np.uint32)  # NumPy's, as making JAX's compiles a program
        key = jax.random.wrap_key_data(words)
        changes = {"key": key, "execution_count": int(state[-1])}
        if self._compiled.state is not None:
            self._compiled.replace(**changes)
        else:
            assert self._detached is not None
            self._detached = dataclasses.replace(self._detached, **changes)

    # Groups of replicas.

    def group_replicas(
        self, parameter: torch.Tensor, values: tuple[CommGroupType, int, VariableRetrievalMode]
    ) -> None:
        """Sets an entry of `per_replica_params`.

        Args:
          parameter: a parameter of the model.
          values: the entry.

        Raises:
          AssertionError: a value is of a wrong type.
          Error: the model is compiled.
          ValueError: the replicas cannot be divided into such groups.
        """
        (name, *_aliases) = [
            name
            for name, candidate in self.model.named_parameters(remove_duplicate=False)
            if candidate is parameter
        ]
        if self.isCompiled():
            raise Error(
                f"replicaGrouping of {name} must be called before the model is compiled. Call destroy() on "
                "the wrapped model first."
            )
        ReplicaGrouping.check(f"replicaGrouping of {name}", values, self.options.replication_factor)
        self.per_replica_params[name] = values

    # Inner values.

    def getTensorNames(self) -> list[str]:
        """The names of the model's values, for `Options.anchorTensor`.

        Raises:
          AssertionError: the model has not been compiled.
        """
        assert self._compiled is not None, (
            "Model has not been compiled or has been destroyed. Call it first, or compile(*inputs)."
        )
        return list(self._compiled.stages.value_names)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Returns the value that `Options.anchorTensor` kept of the last call.

        Args:
          short_name: the first argument of `anchorTensor`.

        Raises:
          AssertionError: no tensor is anchored by that name, or the model has not been called.
        """
        return self._anchored.find(short_name)

    # Times.

    def compilationTime(self) -> timedelta:
        """Returns the time that compiling took.

        Raises:
          Error: the model has not been compiled; or `Options.showCompilationProgressBar` is off.
        """
        if not self.options.show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar option to obtain compilation time.")
        if self._progress is None or self._progress.time is None:
            raise Error("Please compile the model before obtaining compilation time.")
        return self._progress.time

    def getLatency(self) -> Latency:
        """The shortest, longest, mean time from input to output of the last call's micro-batches, in s."""
        return self._times.latency("input", "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """As `getLatency`, from the call until a micro-batch was on its way to the devices."""
        return self._times.latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """As `getLatency`, from a micro-batch's way to the devices until its outputs were asked for."""
        return self._times.latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """As `getLatency`, from the request for a micro-batch's outputs until they were on the host."""
        return self._times.latency("output", "output_complete")

    def getPerfCounters(self) -> dict[str, list[float]]:
        """The times, in s, at which the last call's micro-batches passed the four points of `CallTimes`."""
        return {name: list(times) for name, times in vars(self._times).items()}

    def cycleCount(self) -> int:
        """Returns the nanoseconds of the last call, as JAX devices count no cycles.

        Raises:
          Error: `Options.logCycleCount` is off, or there was no call.
        """
        if not self.options.log_cycle_count:
            raise Error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        if self._call_ns is None:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return self._call_ns

    # Summaries.

    def summary(self, lines: bool = False) -> ModelSummary:
        """Describes the model: its stages with their modules, parameters, bytes and operations.

        Before the model is compiled, the summary has the modules and counts per call. With several shapes
        it describes the shapes that were called or compiled last. "Net itself" stands for operations in the
        forward of Net outside other modules. Operations are floating-point operations, estimated for a
        micro-batch. The attribute `pipeline` is the engine's summary. A method `summary` of the user's
        model is `executor.model.summary`.

        Args:
          lines: whether the summary also lists the lines of the user's code with their operations in torch,
            the number of primitives in JAX, and the stage. This traces all operations.

        Returns:
          The summary, which `str` and `print` show as tables 100 columns wide.

        Raises:
          TypeError: `lines` is not a boolean.
        """
        if not isinstance(lines, bool):
            raise TypeError(f"lines must be True or False; got {lines!r}.")
        compiled, wrapped = self._compiled, self._wrapped  # another thread may destroy the model
        facts = self._describe_options()
        if compiled is None:
            name = type(wrapped.model).__name__
            use = "training" if wrapped.trains else "inference"
            text = (
                f"{name}, wrapped for {use}: stages are known once it is compiled, by a call or compile()"
            )
            with on_host():
                return summarize_module(wrapped.model, [text, *facts])
        program = compiled.program
        if len(compiled.programs) > 1:
            facts.append(f"for {program.describe()}, one of {len(compiled.programs)} shapes")
        name = type(wrapped.model).__name__
        return summarize_stages(program.stages, summarize(program.pipeline), name, facts, lines)

    def _describe_options(self) -> list[str]:
        wrapped = self._wrapped
        options, batching = wrapped.options, batching_of(wrapped.options)
        text = f"a call has {batching.num_micro_batches} micro-batches"
        if wrapped.trains:
            num_updates, size = batching.device_iterations, batching.gradient_accumulation
            text += f": {num_updates} weight {'update' if num_updates == 1 else 'updates'} of {size}"
        if options.replication_factor > 1:
            text += f", on {options.replication_factor} replicas"
        return [text]

    def __repr__(self) -> str:
        """Shows the model with its blocks, as PopTorch does, and its stages once it is compiled."""
        with on_host():
            text = f"{type(self).__name__}({module_repr(self._wrapped.model)})"
        return text if self._compiled is None else f"{text}\n{self.summary()}"

    # Unsupported calls.

    def train(self, mode: bool = True) -> torch.nn.Module:
        """Sets the mode of the user's model. The compiled model keeps its modes from wrapping."""
        if any(was != mode for was in self._wrapped.modes.values()):
            warn_once(
                "train() and eval() of a wrapped model change the user's model. On the devices its modules "
                "keep the modes that they had when it was wrapped: wrap it again for others."
            )
        return self.model.train(mode)

    def eval(self) -> torch.nn.Module:
        """See `train`."""
        return self.train(False)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy`, `pickle` and `torch.save`: programs and arrays on devices cannot be copied so."""
        raise TypeError(
            "A wrapped model cannot be copied, pickled or given to torch.save. That works with the user's "
            "model, which is its attribute `model`, and with its state_dict(); its method "
            "save(filename) writes what poptorch.load(filename) wraps again."
        )

    # Attributes.

    @property
    def model(self) -> torch.nn.Module:
        """The user's model."""
        return self._wrapped.model

    @property
    def options(self) -> Options:
        """The model's options, frozen."""
        return self._wrapped.options

    # Programs read these names of PopTorch's.

    @property
    def _user_model(self) -> torch.nn.Module:
        return self.model

    @property
    def _options(self) -> Options:
        return self.options

    @property
    def _executable_inputs(self) -> ArgsParser.Args | None:
        """Tensors without values, like the arguments that the model was compiled for."""
        if self._compiled is None:
            return None
        program = self._compiled.program
        given = zip(program.shapes, program.arguments.tensors, strict=True)
        tensors = [torch.empty(shape, dtype=tensor.dtype, device="meta") for shape, tensor in given]
        return ArgsParser(self.model)(*program.arguments.structure.unflatten(tensors))

    @property
    def _executable(self) -> CompiledModel | None:
        """None until the model is compiled."""
        return self._compiled

    def __getattr__(self, name: str) -> Any:
        """Looks up an attribute of the user's model."""
        if name == "_wrapped":  # while it is being made
            raise AttributeError(name)
        value = getattr(self._wrapped.model, name)
        within = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        for parameter in within:
            if isinstance(parameter, torch.nn.Parameter):
                self._host.ask(self, self._wrapped.model, parameter)
        return value


def _is_loaded(optimizer: torch.optim.Optimizer | None) -> bool:
    return isinstance(optimizer, Optimizer) and optimizer.device_state.is_loaded


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}.")
