"""Programs of an estimator: what a `model_fn` returns, compiled and run with a session and hooks."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.processes import share_stacks
from ipu_pipeline.ground.checks import check_function, require
from ipu_pipeline.ground.errors import OutOfRangeError
from ipu_pipeline.ground.pytrees import as_objects
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.tf1 import ipu_compiler, scopes
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.graph import GlobalStep, Placeholder, counting_steps, placeholder
from ipu_pipeline.tf1.ipu_run_config import RunConfig
from ipu_pipeline.tf1.ipu_session_run_hooks import (
    IPULoggingTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_hooks,
    collecting_logs,
    dropping_logs,
)
from ipu_pipeline.tf1.ops import pipelining_ops
from ipu_pipeline.tf1.program.calls import PipelineCall, asking_for
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.session import Session


class ModeKeys(enum.StrEnum):
    """The modes that a `model_fn` is called with.

    Example:
      >>> list(ipu.ipu_pipeline_estimator.ModeKeys)
      [<ModeKeys.TRAIN: 'train'>, <ModeKeys.EVAL: 'eval'>, <ModeKeys.PREDICT: 'infer'>]
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


def parse_mode(caller: str, mode: Any) -> ModeKeys:
    """The mode that a member or its value stands for."""
    try:
        return ModeKeys(mode)
    except ValueError:
        modes = ", ".join(ModeKeys)
        raise ValueError(f"{caller}: mode must be one of {modes}; got {mode!r}.") from None


_NAMES = {  # the names of the pipelines
    ModeKeys.TRAIN: "ipu_pipeline_estimator_train",
    ModeKeys.EVAL: "ipu_pipeline_estimator_eval",
    ModeKeys.PREDICT: "ipu_pipeline_estimator_predict",
}
# Arguments of `pipeline` that the estimator passes itself, or that the specification has by other names.
_OWN_ARGUMENTS = (
    "accumulate_outfeed",
    "accumulate_outfeed_dtype",
    "infeed_queue",
    "name",
    "outfeed_loss",
    "outfeed_mask",
    "outfeed_queue",
    "repeat_count",
)


class IPUPipelineEstimatorSpec:
    """The result of a `model_fn`: a pipeline, and what is needed around it.

    Attributes are the arguments, with hooks as tuples.
    """

    def __init__(
        self,
        mode: ModeKeys | str,
        computational_stages: Sequence[Any],
        gradient_accumulation_count: int | None = None,
        eval_metrics_fn: Callable[..., Mapping[str, Any]] | None = None,
        optimizer_function: Any = None,
        device_mapping: Sequence[Any] | None = None,
        loss_accumulator_dtype: Any = None,
        training_hooks: Sequence[SessionRunHook] | None = None,
        evaluation_hooks: Sequence[SessionRunHook] | None = None,
        prediction_hooks: Sequence[SessionRunHook] | None = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        **pipeline_op_kwargs: Any,
    ) -> None:
        """Checks the arguments. `pipelining_ops.pipeline` checks those of the pipeline itself.

        Args:
          mode: the mode that the `model_fn` was called with.
          computational_stages: the stages. The first one takes `inputs`, then an element of the data set.
            In training the last one's outputs go to `optimizer_function`, in evaluation to
            `eval_metrics_fn`; in prediction they are one array [examples, ...], or a dict of such arrays.
          gradient_accumulation_count: micro-batches per weight update; in evaluation and prediction, how
            many overlap.
          eval_metrics_fn: takes the last stage's outputs as NumPy arrays, stacked over micro-batches (of
            all replicas, in the order of the data) on a new first axis, and returns a dict with "loss". It
            is called for each run. Pairs (value, update) of `ipu.metrics` are added up over the whole
            evaluation; for numbers and arrays, the mean over runs is taken, weighted by micro-batches.
          optimizer_function: see `pipelining_ops.pipeline`. With an `IPULoggingTensorHook` it is traced
            once more.
          device_mapping: see `pipelining_ops.pipeline`.
          loss_accumulator_dtype: the dtype of a weight update's sum of losses; None for the loss's own.
          training_hooks: called when training.
          evaluation_hooks: called when evaluating.
          prediction_hooks: called when predicting.
          reduction_method: see `pipelining_ops.pipeline`. It has an effect in training only.
          **pipeline_op_kwargs: other arguments of `pipelining_ops.pipeline`. `inputs` may have
            `get_global_step()` and what is computed from it.

        Raises:
          TypeError: a hook is not one, or `pipeline` does not have an argument.
          ValueError: what the mode needs is missing, or an argument is the estimator's own.
        """
        self.mode = parse_mode("IPUPipelineEstimatorSpec", mode)
        if self.mode is ModeKeys.TRAIN and not optimizer_function:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `optimizer_function` when training")
        if self.mode is ModeKeys.EVAL and not eval_metrics_fn:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `eval_metrics_fn` when evaluating")
        if not gradient_accumulation_count:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `gradient_accumulation_count`")
        is_count = isinstance(gradient_accumulation_count, int) and gradient_accumulation_count >= 1
        rule = "IPUPipelineEstimatorSpec: gradient_accumulation_count must be an integer of at least 1"
        require(is_count, rule, gradient_accumulation_count)
        parameters = inspect.signature(pipelining_ops.pipeline).parameters
        for name in pipeline_op_kwargs:
            if name in _OWN_ARGUMENTS:
                raise ValueError(
                    f"The `{name}` pipeline keyword argument cannot be passed to the "
                    "`IPUPipelineEstimatorSpec`: the estimator uses it itself."
                )
            if name not in parameters:
                raise TypeError(
                    f"IPUPipelineEstimatorSpec: pipelining_ops.pipeline has no argument {name!r}."
                )
        self.computational_stages = computational_stages
        self.gradient_accumulation_count = gradient_accumulation_count
        self.eval_metrics_fn = eval_metrics_fn
        self.optimizer_function = optimizer_function
        self.device_mapping = device_mapping
        self.loss_accumulator_dtype = loss_accumulator_dtype
        self.training_hooks = check_hooks(training_hooks, "training_hooks")
        self.evaluation_hooks = check_hooks(evaluation_hooks, "evaluation_hooks")
        self.prediction_hooks = check_hooks(prediction_hooks, "prediction_hooks")
        self.reduction_method = reduction_method
        self.pipeline_op_kwargs = pipeline_op_kwargs

    @property
    def micro_batches_per_update(self) -> int:
        """The number of elements that a replica takes in a weight update, or in an execution."""
        serialized: int = self.pipeline_op_kwargs.get("batch_serialization_iterations", 1)
        return self.gradient_accumulation_count * serialized

    @property
    def hooks(self) -> tuple[SessionRunHook, ...]:
        """The hooks of its mode."""
        return {
            ModeKeys.TRAIN: self.training_hooks,
            ModeKeys.EVAL: self.evaluation_hooks,
            ModeKeys.PREDICT: self.prediction_hooks,
        }[self.mode]


@dataclass(frozen=True, eq=False)
class EstimatorProgram:
    """A compiled program of an estimator.

    Attributes:
      mode: its mode.
      program: the program.
      spec: the specification that it was made of.
      infeed: its infeed.
      outfeed: its outfeed: in training, with sums of losses per weight update; in evaluation and
        prediction, with what the last stage returns.
      hooks_that_log: the hooks that get values from its stages.
      has_logs: whether the outfeed's elements are dicts of "logs", by the `id` of the hook, and of
        "outputs"; in training, of the "loss" of each micro-batch.
      num_replicas: how many replicas of the pipeline run.
      step_offset: what is added to the micro-batches of the weight updates to give the global step; in
        evaluation and prediction the global step itself.
    """

    mode: ModeKeys
    program: Program
    spec: IPUPipelineEstimatorSpec
    infeed: IPUInfeedQueue
    outfeed: IPUOutfeedQueue
    hooks_that_log: tuple[IPULoggingTensorHook, ...]
    has_logs: bool
    num_replicas: int
    step_offset: Placeholder

    def feed_steps(self, offset: int) -> dict[Any, Any]:
        """The feed for an offset of the global step; empty if the model does not use the global step."""
        if self.step_offset not in self.program.placeholders:
            return {}
        return {self.step_offset: np.array(offset % 2**32, np.uint32).astype(np.int32)}

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return _NAMES[self.mode]

    @property
    def num_examples(self) -> int:
        """The number of examples in a micro-batch: the first axis of the first array that has one."""
        leaves = jax.tree.leaves(self.infeed.element)
        return self.num_replicas * next((leaf.shape[0] for leaf in leaves if leaf.ndim > 0), 1)


def check_model_fn(model_fn: Any) -> None:
    """Raises if a function cannot be a `model_fn`."""
    check_function("IPUPipelineEstimator: model_fn", model_fn)
    arguments = argument_names(model_fn)
    if {"features", "labels"} & set(arguments):
        raise ValueError(
            "The `model_fn` used with `IPUPipelineEstimator` must not have `features` or `labels` "
            "arguments. "
            "They are instead passed to the first pipeline stage function."
        )
    check_known(model_fn, "model_fn")


def check_input_fn(argument: str, input_fn: Any) -> None:
    """Raises if a function cannot be an `input_fn`."""
    if not callable(input_fn):
        raise TypeError(f"{argument} must be a function that returns a data set; got {input_fn!r}.")
    check_known(input_fn, argument)


def call_input_fn(input_fn: Any, mode: ModeKeys, params: Mapping[str, Any], config: RunConfig) -> Any:
    """Returns the data set of an `input_fn`."""
    check_input_fn("input_fn", input_fn)
    dataset = call_with(input_fn, mode=mode, params=dict(params), config=config)
    try:
        IPUInfeedQueue(dataset)
    except TypeError as error:
        raise ValueError(f"input_fn must return Dataset: {error}") from error
    return dataset


def build_estimator_program(
    model_fn: Any,
    mode: ModeKeys,
    params: Mapping[str, Any],
    config: RunConfig,
    dataset: Any,
    is_exported: bool = False,
) -> EstimatorProgram:
    """Calls the `model_fn` of an `IPUPipelineEstimator` and compiles its pipeline."""
    spec = call_with(model_fn, mode=mode, params=dict(params), config=config)
    if not isinstance(spec, IPUPipelineEstimatorSpec):
        raise TypeError(
            "The `model_fn` used with `IPUPipelineEstimator` must return `IPUPipelineEstimatorSpec`; got "
            f"{type(spec).__name__}."
        )
    if spec.mode is not mode:
        raise ValueError(
            f"The `model_fn` was called with mode {mode}, and returned a specification for {spec.mode}."
        )
    _check_num_shards(spec, config.ipu_run_config.num_shards)
    hooks: tuple[IPULoggingTensorHook, ...] = ()
    if not is_exported:
        hooks = tuple(hook for hook in spec.hooks if isinstance(hook, IPULoggingTensorHook))
    for hook in hooks:
        hook.forget_record()
    options: dict[str, Any] = {
        **spec.pipeline_op_kwargs,
        "computational_stages": spec.computational_stages,
        "optimizer_function": spec.optimizer_function if mode is ModeKeys.TRAIN else None,
    }
    if mode is ModeKeys.TRAIN:
        options["reduction_method"] = spec.reduction_method
    if hooks:
        options.update(with_logs(options["computational_stages"], options["optimizer_function"], hooks))
    elif mode is ModeKeys.TRAIN:
        options["outfeed_loss"] = options["accumulate_outfeed"] = True
        options["accumulate_outfeed_dtype"] = spec.loss_accumulator_dtype
    program = compile_spec(spec, config, make_infeed(dataset, config), options, is_exported)
    return replace(program, hooks_that_log=hooks, has_logs=bool(hooks))


def make_infeed(dataset: Any, config: RunConfig) -> IPUInfeedQueue:
    """The infeed of an estimator's data set."""
    depth = config.ipu_run_config.prefetch_depth
    return IPUInfeedQueue(dataset) if depth is None else IPUInfeedQueue(dataset, prefetch_depth=depth)


def compile_spec(
    spec: IPUPipelineEstimatorSpec,
    config: RunConfig,
    infeed: IPUInfeedQueue,
    options: Mapping[str, Any],
    is_exported: bool,
) -> EstimatorProgram:
    """Compiles the pipeline of a specification. It does not start JAX's backend.

    Returns:
      The program, without hooks that log.
    """
    mode, run_config = spec.mode, config.ipu_run_config
    repeat_count = _repeat_count(run_config.iterations_per_loop, spec)
    outfeed = IPUOutfeedQueue()
    step_offset = placeholder(np.int32, [], name="global_step")

    def count_steps(updates: Any) -> Any:
        offset = step_offset.traced()
        is_training = mode is ModeKeys.TRAIN
        return updates * np.int32(spec.micro_batches_per_update) + offset if is_training else offset

    def model() -> Any:
        return pipelining_ops.pipeline(
            gradient_accumulation_count=spec.gradient_accumulation_count,
            repeat_count=repeat_count,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            device_mapping=spec.device_mapping,
            name=_NAMES[mode],
            **options,
        )

    num_replicas = 1 if is_exported else run_config.num_replicas
    with (
        dropping_logs() if is_exported else contextlib.nullcontext(),
        scopes.ipu_scope(f"/device:IPU:{run_config.ordinal}"),
        asking_for(num_replicas, run_config.num_shards),
        counting_steps(count_steps),
    ):
        program = ipu_compiler.compile(model)
    return EstimatorProgram(mode, program, spec, infeed, outfeed, (), False, num_replicas, step_offset)


def with_logs(
    stages: Sequence[Any], optimizer_function: Any, hooks: Sequence[SessionRunHook]
) -> dict[str, Any]:
    """Returns arguments of a pipeline whose stages also pass on what hooks log.

    The last stage returns a dict of `outputs`, its own results; `logs`, by the `id` of the hook; and in
    training the `loss`. Passing values on costs nothing.
    """
    last = len(stages) - 1

    def wrap(index: int, stage: Any) -> Any:
        if isinstance(stage, (list, tuple)):
            raise NotImplementedError(
                "IPULoggingTensorHook does not support parallel stages; "
                f"computational_stages[{index}] is a list "
                "of them. Leave the hook out."
            )

        def wrapped(*arguments: Any, **named: Any) -> Any:
            logs: dict[Any, Any] = {}
            if index > 0:
                (outputs, logs), named = (named["outputs"], named["logs"]), {}
                arguments = tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
                if isinstance(outputs, dict):
                    arguments, named = (), outputs
            with collecting_logs(hooks) as new_logs:
                outputs = stage(*arguments, **named)
            passed_on = {"outputs": outputs, "logs": {**logs, **new_logs}}
            if index == last and optimizer_function is not None:
                passed_on["loss"] = jnp.asarray(apply_to(optimizer_function, outputs).loss)
            return passed_on

        wrapped.__name__ = getattr(stage, "__name__", f"stage{index}")
        return wrapped

    options: dict[str, Any] = {
        "computational_stages": [wrap(index, stage) for index, stage in enumerate(stages)]
    }
    if optimizer_function is not None:

        def without_logs(outputs: Any, logs: Any, loss: Any) -> Any:
            del logs, loss
            return apply_to(optimizer_function, outputs)

        options["optimizer_function"] = without_logs
        options["outfeed_mask"] = {"outputs": True, "logs": False, "loss": False}
    return options


def apply_to(function: Any, outputs: Any) -> Any:
    """Calls a function with what a stage returned, as the next stage would be called."""
    if isinstance(outputs, dict):
        return function(**outputs)
    return function(*outputs) if isinstance(outputs, (list, tuple)) else function(outputs)


def _check_num_shards(spec: IPUPipelineEstimatorSpec, num_shards: int) -> None:
    def flatten(entries: Any) -> list[Any]:
        return [
            leaf for entry in entries for leaf in (entry if isinstance(entry, (list, tuple)) else [entry])
        ]

    stages, mapping = spec.computational_stages, spec.device_mapping
    if not isinstance(stages, (list, tuple)) or not isinstance(mapping, (list, tuple, type(None))):
        return  # `pipeline` refuses them
    num_devices = len(flatten(stages)) if mapping is None else len(set(flatten(mapping)))
    parallel = spec.pipeline_op_kwargs.get("tensor_parallel")
    if isinstance(parallel, pipelining_ops.TensorParallel):
        num_devices *= parallel.size
    if not num_shards / 2 < num_devices <= num_shards:
        raise ValueError(
            f"This pipeline requires {num_devices} devices, but `IPURunConfig.num_shards` was set to "
            f"{num_shards} "
            "(num_shards/2 < pipeline_devices <= num_shards)."
        )


def _repeat_count(iterations_per_loop: int, spec: IPUPipelineEstimatorSpec) -> int:
    count = spec.micro_batches_per_update
    if iterations_per_loop < count:
        raise ValueError(
            f"`IPURunConfig.iterations_per_loop` (got {iterations_per_loop}) cannot be less than "
            f"`gradient_accumulation_count` (got {count})"
        )
    if iterations_per_loop % count != 0:
        raise ValueError(
            f"`IPURunConfig.iterations_per_loop` (got {iterations_per_loop}) must be divisible by "
            f"`gradient_accumulation_count` (got {count})"
        )
    return iterations_per_loop // count


_GIVEN = ("mode", "params", "config")


def call_with(function: Any, **arguments: Any) -> Any:
    """Calls a function with the given arguments that it takes."""
    names = argument_names(function)
    return function(**{name: value for name, value in arguments.items() if name in names})


def argument_names(function: Any) -> list[str]:
    """The names of the arguments that a function takes."""
    return list(inspect.signature(function).parameters)


def check_known(function: Any, subject: str, names: Sequence[str] = _GIVEN) -> None:
    """Raises if a function needs arguments that are not passed."""
    unknown = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in names
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if unknown:
        raise ValueError(
            f"{subject} ({getattr(function, '__name__', function)!r}) has following not expected args: "
            f"{unknown}. It may take {', '.join(names)}."
        )


# Running it.


@dataclass(frozen=True, eq=False)
class Run:
    """One `Session.run` of an estimator's program.

    Attributes:
      outputs: the outfeed's elements, without logs, stacked over micro-batches in the order of the data, or
        over weight updates and, within each, the replicas. Where shapes of elements differ, arrays of
        objects.
      num_updates: weight updates, or executions, that it did.
      context: the context, as hooks left it.
      data_end: the error with which the data ended in the run, if they did.
    """

    outputs: Any
    num_updates: int
    context: SessionRunContext
    data_end: OutOfRangeError | None = None


class Runs:
    """Runs a program and calls the hooks."""

    def __init__(
        self,
        program: EstimatorProgram,
        session: Session,
        hooks: Sequence[SessionRunHook],
        global_step: int,
        first_step: int | None = None,
    ) -> None:
        """Takes a session that has the program's variables."""
        self.program = program
        self.session = session
        self.hooks = hooks
        # Training counts on from where it begins; earlier updates may have had other counts per update.
        per_update = program.spec.micro_batches_per_update if program.mode is ModeKeys.TRAIN else 0
        offset = global_step - per_update * session.update_count(program.name)
        first = global_step if first_step is None else first_step
        self._first_update = (first - offset) // per_update if per_update else 0
        session.count_steps(per_update, offset)
        self._feeds = program.feed_steps(offset)
        self._fetched: dict[str, Any] = {}

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Calls the hooks' `after_create_session`, and `end` if there was no error."""
        self.session.create_variables(self.program.program)  # for the hooks to see
        for hook in self.hooks:
            hook.after_create_session(self.session, None)
        yield
        for hook in self.hooks:
            hook.end(self.session)

    def run(
        self,
        global_step: int,
        max_updates: int,
        loss_of: Callable[[Any], float],
        should_stop: Callable[[], bool] = lambda: False,
        num_real: Callable[[int], int] = lambda count: count,
    ) -> Run:
        """Runs the program once; if the data end, as far as they go.

        Saves, signals and the last steps fall between updates, so a run may do fewer than the pipeline's
        `repeat_count`: one program is enough.
        """
        program = self.program
        context = SessionRunContext(self.session, global_step)
        requests = [hook.before_run(context) for hook in self.hooks]
        before = self.session.execution_count(program.name)
        data_end, num_done = None, 0
        (call,) = program.program.calls
        # Values that stay the same during a run do so wherever training was interrupted or saved.
        if isinstance(call, PipelineCall) and call.begin_input is not None:
            num_done = (self.session.update_count(program.name) - self._first_update) % call.repeat_count
            max_updates = min(max_updates, call.repeat_count - num_done)
        try:
            self.session.run_part(
                program.program,
                self._feeds,
                num_done=num_done,
                max_updates=max_updates,
                should_stop=should_stop,
            )
        except OutOfRangeError as error:  # updates before the data's end were done
            data_end = error
        num_updates = self.session.execution_count(program.name) - before
        if data_end is not None and num_updates == 0:
            raise data_end
        if program.mode is ModeKeys.TRAIN:
            context.global_step += num_updates * program.spec.micro_batches_per_update
        outputs = jax.tree.map(self._join_replicas, self.session.run(program.outfeed.dequeue()))
        if program.mode is not ModeKeys.TRAIN:  # all processes see the results
            leaves, tree = jax.tree.flatten(outputs)
            outputs = jax.tree.unflatten(tree, share_stacks(leaves))
        count = num_real(len(jax.tree.leaves(outputs)[0]))
        outputs = jax.tree.map(lambda stack: stack[:count], outputs)
        if program.has_logs:
            for logging_hook in program.hooks_that_log:
                logging_hook.receive(outputs["logs"][id(logging_hook)])
            outputs = outputs["outputs" if program.mode is not ModeKeys.TRAIN else "loss"]
        loss = loss_of(outputs)
        for hook, request in zip(self.hooks, requests, strict=True):
            results = None if request is None else self._fetch(request, loss, context.global_step)
            hook.after_run(context, SessionRunValues(results))
        return Run(outputs, num_updates, context, data_end)

    def _join_replicas(self, stack: Any) -> Any:
        """Joins an outfeed's axes of micro-batches and replicas, in the order of the data."""
        if self.program.num_replicas == 1:
            return stack
        if stack.dtype == object:  # elements of different shapes
            return as_objects([value for element in stack for value in element])
        return stack.reshape(stack.shape[0] * stack.shape[1], *stack.shape[2:])

    def _fetch(self, request: Any, loss: float, global_step: int) -> Any:
        if not isinstance(request, SessionRunArgs):
            raise TypeError(f"before_run must return SessionRunArgs or None; got {request!r}.")

        def find(name: Any) -> Any:
            if isinstance(name, GlobalStep) or name == "global_step":
                return global_step
            if name == "loss":
                return loss
            try:
                return np.array(self.session.variable_value(name))
            except KeyError:
                raise ValueError(
                    'SessionRunArgs: fetches must be "loss", "global_step" or names of variables; got '
                    f"{name!r}. The variables are {', '.join(sorted(self.program.program.variables))}."
                ) from None

        return jax.tree.map(find, request.fetches, is_leaf=lambda name: isinstance(name, GlobalStep))
