"""The engine's public call: a pipeline of stage functions, with the state going in and coming out.

Over 400 lines, half of which describe arguments.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import differentiation, names, optimizer_tracing, placement, schedules, updates
from ipu_pipeline.engine import stages as stage_tracing
from ipu_pipeline.engine.blocks import BlockExecutor, PendingBlock, Take, take_nothing
from ipu_pipeline.engine.errors import OutOfRangeError
from ipu_pipeline.engine.executor import Accumulated, Executor
from ipu_pipeline.engine.plain_stages import Stage
from ipu_pipeline.engine.programs import Reduction, StagePrograms
from ipu_pipeline.engine.residence import Residence
from ipu_pipeline.engine.shapes import as_shape, check_like
from ipu_pipeline.engine.state import Collected, PipelineState, StepOutputs
from ipu_pipeline.engine.variables import VariableSpec, initial_value

__all__ = ["Pipeline"]


class Pipeline:
    """A model cut into stages, each on a device of its own, with gradient accumulation.

    Example:
      pipeline = Pipeline([first, second], num_micro_batches=4, loss=lambda loss: loss,
                          optimizer=optax.sgd(0.1))
      state = pipeline.init(jax.random.key(0), (images, labels))
      state, outputs = pipeline.step(state, micro_batches)
    """

    def __init__(
        self,
        stages: Sequence[stage_tracing.StageFunction | Stage],
        *,
        num_micro_batches: int,
        loss: Callable[..., Any] | None = None,
        optimizer: optimizer_tracing.Optimizer | None = None,
        schedule: str | schedules.ScheduleFunction = "grouped",
        device_mapping: Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        reduction: str | Reduction = "sum",
        donate: bool = False,
        trained: Collection[str] | Callable[[], Collection[str] | None] | None = None,
        program_names: names.ProgramNames | None = None,
        describe_capture: Callable[[Any], str | None] | None = None,
        gradient_map: Callable[[], differentiation.GradientMap | None] | None = None,
        collect_outputs: bool = True,
        block_bytes: int = 64 * 2**20,
    ) -> None:
        """Checks the arguments; nothing is traced or compiled yet.

        Args:
          stages: functions that take what the one before returns (a tuple or list as positional
            arguments, a dict as keyword arguments), with variables by `get_variable`; or `Stage`s. The
            first one takes the inputs of `step` and then the micro-batch.
          num_micro_batches: micro-batches per step, at least 1.
          loss: takes what the last stage returns, returns a scalar; goes with `optimizer`. Without both
            the pipeline only runs forwards.
          optimizer: an Optax transformation; or a function of what the last stage returned for the last
            micro-batch (for the state at the start: the first) which returns one, or a pair of one and
            a dict of extra arguments for its `update`.
          schedule: "grouped", "interleaved", "sequential" or a function like `schedules.grouped`.
          device_mapping: the IPU of each stage, a number from 0; by default each has its own.
          devices: the JAX device of each IPU; by default the first of `jax.devices()`.
          reduction: "sum", "mean" or "running_mean" of the gradients over the micro-batches.
          donate: whether `step` may destroy the state that it is given. False makes it a pure function.
          trained: full names of the variables to train, or a function that returns them once the
            stages have been traced; None: all trainable ones.
          program_names: the names of the program that the pipeline is part of; by default its own.
          describe_capture: the name of a value from outside the stages, for the error about it.
          gradient_map: returns, once the stages have been traced, None or a function of a gradient and its
            variable; it is applied to each micro-batch's gradients, before accumulation.
          collect_outputs: False leaves what the last stage returns out of `StepOutputs`, which saves memory
            where only losses are wanted.
          block_bytes: with all stages on one device, how much of it the micro-batches that are handled by
            one call, and their outputs, may take.

        Raises:
          ValueError: an argument is not usable.
        """
        if not stages:
            raise ValueError("stages must have at least one function; got none.")
        is_integer = isinstance(num_micro_batches, (int, np.integer)) and num_micro_batches is not True
        if not is_integer or num_micro_batches < 1:
            raise ValueError(
                f"num_micro_batches must be an integer of at least 1; got {num_micro_batches}."
            )
        if isinstance(trained, str):
            raise ValueError(f"trained must be a collection of full names; got the string {trained!r}.")
        if (loss is None) != (optimizer is None):
            raise ValueError("loss and optimizer go together: give both to train, none for forwards only.")
        mapping = tuple(range(len(stages)) if device_mapping is None else device_mapping)
        if len(mapping) != len(stages) or any(ipu < 0 for ipu in mapping):
            raise ValueError(
                f"device_mapping must have one number from 0 for each of the {len(stages)} stages; got "
                f"{list(mapping)}."
            )
        self._functions = [
            stage.with_variables(index) if isinstance(stage, Stage) else stage
            for index, stage in enumerate(stages)
        ]
        self._num_micro_batches = num_micro_batches
        self._loss = loss
        self._optimizer = optimizer
        self._schedule = schedule
        self._mapping = mapping
        self._devices = devices
        self._reduction = Reduction(reduction)
        self._donate = donate
        self._trained = trained
        self._program_names = program_names or names.ProgramNames()
        self._describe_capture = describe_capture
        self._gradient_map = gradient_map
        self._collect_outputs = collect_outputs
        self._block_bytes = block_bytes
        self._traced: stage_tracing.TracedPipeline | None = None
        self._programs: tuple[StagePrograms, ...] = ()
        self._updates: updates.Updates | None = None
        self._executor: Executor | BlockExecutor | None = None
        self._accumulators: dict[str, Any] | None = None  # the zeros that the last update left
        self._placed: weakref.ref[PipelineState] | None = None  # the last state that is known to be placed
        self.timetable = schedules.timetable(
            schedule, len(stages), num_micro_batches, mapping, loss is not None
        )

    # What is known about the pipeline.

    @property
    def num_ipus(self) -> int:
        """How many devices it needs."""
        return max(self._mapping) + 1

    @property
    def device_mapping(self) -> tuple[int, ...]:
        """The IPU of each stage."""
        return self._mapping

    @property
    def traced(self) -> stage_tracing.TracedPipeline:
        """The stages as jaxprs."""
        if self._traced is None:
            raise RuntimeError("The pipeline has not been traced; call trace, init or step first.")
        return self._traced

    @property
    def programs(self) -> tuple[StagePrograms, ...]:
        """The programs of each stage, as they were before XLA."""
        assert self.traced is not None
        return self._programs

    @property
    def updates(self) -> updates.Updates | None:
        """The optimizer's programs; None without training."""
        assert self.traced is not None
        return self._updates

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return self.traced.variables

    # Building.

    def trace(self, micro_batch: Any, *inputs: Any) -> None:
        """Traces the stages and the optimizer and checks them. It does not start a JAX backend.

        Args:
          micro_batch: a micro-batch, or the same pytree of `jax.ShapeDtypeStruct`s; None for no feed.
          *inputs: the inputs that are constant during a step, likewise.

        Raises:
          ValueError: the pipeline was traced before, with other shapes or dtypes.
          Others: see `stages.trace`, `optimizer_tracing.trace_optimizer` and `updates.cut_updates`.
        """
        element = jax.tree.map(as_shape, micro_batch)
        input_shapes = tuple(jax.tree.map(as_shape, value) for value in inputs)
        if self._traced is not None:
            known = (self._traced.element, self._traced.inputs)
            if known != (element, input_shapes):
                raise ValueError(
                    "The pipeline was traced for the micro-batch and inputs "
                    f"{known}, and now got {(element, input_shapes)}."
                )
            return
        with names.unchanged_on_error(self._program_names):
            traced = stage_tracing.trace(
                self._functions,
                element,
                input_shapes,
                self._loss,
                self._program_names,
                self._describe_capture,
            )
            trained: dict[str, VariableSpec] = {}
            traced_updates = None
            if self._optimizer is not None:
                trained = self._find_trained(traced)
                traced_optimizer = optimizer_tracing.trace_optimizer(
                    self._optimizer,
                    trained,
                    traced.output_tree,
                    traced.output_avals,
                    self._reduction,
                    {name: spec.dtype for name, spec in trained.items()},
                )
                optimizer_tracing.check_optimizer_captures(traced_optimizer, self._describe_capture)
                # What is on one IPU is updated together, by its first stage.
                homes = {name: self._mapping.index(self._mapping[s]) for name, s in traced.owners.items()}
                traced_updates = updates.cut_updates(traced_optimizer, homes)
            gradient_map = None if self._gradient_map is None else self._gradient_map()
            self._programs = differentiation.build(traced, trained, self._reduction, gradient_map)
        self._updates, self._traced = traced_updates, traced

    def prepare(self, devices: Sequence[Any] | None = None) -> Executor | BlockExecutor:
        """What runs the pipeline; made at the first call, which starts JAX's backend.

        Args:
          devices: the JAX device of each IPU; by default those of the call before, or those given to the
            pipeline. With other devices than before everything is compiled again, for them.

        Returns:
          An `Executor`; with all stages on one device a `BlockExecutor`.
        """
        if self._executor is not None and (devices is None or self._has_devices(devices)):
            return self._executor
        if devices is None:
            devices = jax.devices() if self._devices is None else self._devices
        if len(devices) < self.num_ipus:
            raise ValueError(
                f"The pipeline needs {self.num_ipus} devices, one per IPU of device_mapping, but there are "
                f"{len(devices)}. On a CPU, before the first use of JAX, "
                f'jax.config.update("jax_num_cpu_devices", {self.num_ipus}) makes more.'
            )
        self._devices = list(devices)
        self._placed = self._accumulators = None
        rows = placement.make_rows(devices, self._mapping)
        residence = Residence(self.traced, self._updates, rows)
        count, donate, collect = self._num_micro_batches, self._donate, self._collect_outputs
        if len(set(self._mapping)) == 1:
            self._executor = BlockExecutor(
                residence, self._programs, count, donate, collect, self._block_bytes
            )
        else:
            self._executor = Executor(
                residence, self._programs, self.timetable, count, count, donate, collect
            )
        return self._executor

    def _has_devices(self, devices: Sequence[Any]) -> bool:
        known = self._devices
        assert known is not None
        return all(ipu < len(devices) and devices[ipu] == known[ipu] for ipu in self._mapping)

    def init(self, key: Any, micro_batch: Any, *inputs: Any) -> PipelineState:
        """The state at the start of training.

        Args:
          key: a scalar random key, from `jax.random.key`.
          micro_batch: an example, or its shapes and dtypes.
          *inputs: likewise, the inputs that are constant during a step.

        Returns:
          The state, its leaves on the devices of their stages.
        """
        if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
            raise ValueError(
                f"init: key must be a random key from jax.random.key; got {type(key).__name__}. "
                "jax.random.wrap_key_data makes one of a raw key."
            )
        self.trace(micro_batch, *inputs)
        executor = self.prepare()
        variables: dict[str, Any] = {}
        for name, spec in self.variables.items():  # one at a time: together they may not fit one device
            variables |= executor.residence.place_variables({name: initial_value(spec, key)})
        return PipelineState(
            variables=variables,
            optimizer_state=self.init_optimizer_state(variables),
            update_count=np.int32(0),
            execution_count=np.int32(0),
            key=key,
        )

    def init_optimizer_state(
        self, variables: Mapping[str, Any], outputs: Sequence[Any] | None = None
    ) -> Any:
        """The optimizer's state at the start.

        Args:
          variables: by full name.
          outputs: the leaves of what the last stage returned for the first micro-batch.

        Returns:
          The state; None without training, and if it depends on outputs that are not given.
        """
        updates = self._updates
        if updates is None or (updates.init_needs_outputs and outputs is None):
            return None
        residence = self.prepare().residence
        placed = residence.place_variables(variables)
        return updates.state_tree.unflatten(residence.init_optimizer_state(placed, outputs))

    # Running.

    def step(
        self, state: PipelineState, micro_batches: Iterable[Any], *inputs: Any
    ) -> tuple[PipelineState, StepOutputs]:
        """Runs all micro-batches and, in training, one weight update.

        Args:
          state: from `init` or the step before; with `donate` it must not be used afterwards.
          micro_batches: yields at least `num_micro_batches` pytrees of arrays; what is left stays there.
          *inputs: pytrees of arrays that are constant during the step.

        Returns:
          The new state and the outputs, still being computed.

        Raises:
          OutOfRangeError: there are too few micro-batches.
          ValueError: a micro-batch or an input has another shape, dtype or structure than the first.
        """
        iterator = iter(micro_batches)
        if self._traced is None:
            try:
                first = next(iterator)
            except StopIteration:
                raise OutOfRangeError(self._describe_shortage(0)) from None
            self.trace(first, *inputs)
            iterator = _chain(first, iterator)
        executor = self.prepare()
        state = self.place(state)
        input_leaves = self.check_inputs(inputs)
        numbers = iter(range(self._num_micro_batches))

        def take(wanted: int) -> list[Any]:
            del wanted
            number = next(numbers)
            try:
                element = next(iterator)
            except StopIteration:
                raise OutOfRangeError(self._describe_shortage(number)) from None
            return [executor.place_element(self.check_element(element, number))]

        has_feed = bool(jax.tree.leaves(self.traced.element))
        pending = self.accumulate(state, take if has_feed else take_nothing, input_leaves)
        new_state, collected = self.update(state, pending)
        outputs, losses = [], []
        for part in collected:
            found, loss = _unstack(part)
            if self._collect_outputs:
                outputs += [self.traced.output_tree.unflatten(leaves) for leaves in found]
            losses += loss
        return new_state, StepOutputs(outputs, losses)

    def num_fetched(self, num_updates: int) -> int:
        """How many micro-batches `accumulate` takes at once, if so many weight updates are to be done."""
        executor = self.prepare()
        return executor.sizes(num_updates).capacity if isinstance(executor, BlockExecutor) else 1

    def accumulate(
        self,
        state: PipelineState,
        take: Take,
        input_leaves: Sequence[Any],
        num_updates: int = 1,
        num_total: int = 1,
    ) -> Accumulated | PendingBlock:
        """The first part of `step`: all that leaves the state as it is.

        Args:
          state: placed, see `place`.
          take: returns the leaves of up to so many micro-batches, and of one at least, as `place_element`
            of what `prepare` returns left them.
          input_leaves: the leaves of the inputs.
          num_updates: how many weight updates may be done together.
          num_total: how many there are in the run, which the sizes of blocks depend on.

        Returns:
          What `update` takes.
        """
        executor = self.prepare()
        accumulators, self._accumulators = self._accumulators, None
        if accumulators is None:
            trained = {} if self._updates is None else self._trained_dtypes()
            accumulators = executor.residence.make_accumulators(trained)
        known = (state.variables, state.key, int(state.execution_count), input_leaves)
        if isinstance(executor, Executor):
            return executor.accumulate(*known, lambda: take(1)[0], accumulators)
        needs_outputs = (
            self._updates is not None and state.optimizer_state is None and self._updates.init_needs_outputs
        )
        sizes = executor.sizes(num_total)
        return executor.fetch(*known, take, accumulators, num_updates, sizes, needs_outputs)

    def update(
        self, state: PipelineState, pending: Accumulated | PendingBlock
    ) -> tuple[PipelineState, list[Collected]]:
        """The second part of `step`: the new state. With `donate` it destroys the old one.

        Returns:
          The new state, and what the last stage gave.
        """
        executor = self.prepare()
        leaves: list[Any] = []
        if self._updates is not None:
            optimizer_state = state.optimizer_state
            if optimizer_state is None:
                first = pending.outputs[0] if isinstance(pending, Accumulated) else pending.first_outputs
                optimizer_state = self.init_optimizer_state(state.variables, first)
            leaves = self._state_leaves(optimizer_state)
        if isinstance(pending, Accumulated):
            assert isinstance(executor, Executor)
            updated, num_updates = executor.update(state.variables, leaves, pending), 1
        else:
            assert isinstance(executor, BlockExecutor)
            updated, num_updates = executor.update(leaves, pending), pending.num_updates
        self._accumulators = updated.accumulators
        new_state = dataclasses.replace(
            state,
            variables=updated.variables,
            execution_count=np.int32(state.execution_count + num_updates),
        )
        if self._updates is not None:
            new_state = dataclasses.replace(
                new_state,
                optimizer_state=self._updates.state_tree.unflatten(updated.state_leaves),
                update_count=np.int32(state.update_count + num_updates),
            )
        self._placed = weakref.ref(new_state)
        return new_state, updated.collected

    def _trained_dtypes(self) -> dict[str, Any]:
        return {
            stage.variables[place].name: stage.variables[place].dtype
            for stage, programs in zip(self.traced.stages, self._programs, strict=True)
            for place in programs.trained
        }

    def place(self, state: PipelineState) -> PipelineState:
        """The state with its leaves on the devices of their stages.

        Raises:
          ValueError: a variable is missing, or has another shape or dtype.
        """
        if self._placed is not None and state is self._placed():
            return state
        for name, spec in self.variables.items():
            value = state.variables.get(name)
            if value is None:
                raise ValueError(f"The state has no variable {name}; the pipeline needs {spec}.")
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise ValueError(
                    f"Variable {name} must be {spec.dtype.name}{list(spec.shape)}; the state has "
                    f"{value.dtype.name}{list(value.shape)}."
                )
        residence = self.prepare().residence
        optimizer_state = state.optimizer_state
        if self._updates is not None and optimizer_state is not None:
            leaves = residence.place_optimizer_state(self._state_leaves(optimizer_state))
            optimizer_state = self._updates.state_tree.unflatten(leaves)
        return dataclasses.replace(
            state,
            variables=residence.place_variables(state.variables),
            optimizer_state=optimizer_state,
        )

    def check_element(self, element: Any, number: int) -> list[Any]:
        """The leaves of a micro-batch, checked against the first one.

        Raises:
          ValueError: structure, shape or dtype differ.
        """
        return check_like(element, self.traced.element, f"Micro-batch {number}")

    def check_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """The leaves of the inputs, checked likewise."""
        return check_like(tuple(inputs), self.traced.inputs, "The inputs")

    def _find_trained(self, traced: stage_tracing.TracedPipeline) -> dict[str, VariableSpec]:
        wanted = self._trained() if callable(self._trained) else self._trained
        known = traced.variables
        if wanted is not None:
            for name in wanted:
                if name not in known or not known[name].trainable:
                    fault = "is not trainable" if name in known else "does not exist"
                    raise ValueError(
                        f"The variable {name!r} to train {fault}. Trainable are: "
                        f"{', '.join(n for n, spec in known.items() if spec.trainable) or 'none'}."
                    )
        trained = {
            name: spec
            for name, spec in known.items()
            if spec.trainable and (wanted is None or name in wanted)
        }
        if not trained:
            raise ValueError("No variables to optimize: no stage has a trainable variable.")
        return trained

    def _state_leaves(self, optimizer_state: Any) -> list[Any]:
        assert self._updates is not None
        leaves, tree = jax.tree.flatten(optimizer_state)
        if tree != self._updates.state_tree:
            raise ValueError(
                "The state's optimizer_state is of another optimizer or of other variables: it has the "
                f"structure {tree}, and the pipeline's optimizer makes {self._updates.state_tree}."
            )
        return leaves

    def _describe_shortage(self, number: int) -> str:
        return f"The data ended after {number} of the {self._num_micro_batches} micro-batches of a step."


def _unstack(part: Collected) -> tuple[list[list[Any]], list[Any]]:
    """The outputs and the losses of each micro-batch; no losses without training."""
    if part.size is None:
        return [part.outputs], [] if part.loss is None else [part.loss]
    outputs = [list(leaf[: part.size]) for leaf in part.outputs]
    losses = [] if part.loss is None else list(part.loss[: part.size])
    return [[leaf[number] for leaf in outputs] for number in range(part.size)], losses


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
