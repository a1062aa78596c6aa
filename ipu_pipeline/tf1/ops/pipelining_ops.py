"""`pipeline`: a model in stages, run on several IPUs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipu_pipeline.engine import (
    AutoStages,
    Chunking,
    Pipeline,
    Shard,
    TensorParallel,
    constrain,
    recomputation_checkpoint,
)
from ipu_pipeline.engine import auto_stages as engine_auto_stages
from ipu_pipeline.engine import split as engine_split
from ipu_pipeline.engine.fronts import Captures, Hooks, InsideOfBodyError, find_frame, join_layers
from ipu_pipeline.engine.schedules import Schedule
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_integer, is_integer
from ipu_pipeline.processes import device_selection
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue, Operation
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.graph import Placeholder, as_traced_inputs, input_shapes
from ipu_pipeline.tf1.program.calls import PipelineCall, current_builder, make_replication
from ipu_pipeline.tf1.program.pipeline_arguments import (
    OPTION_NAMES,
    PipelineSchedule,
    PipelineStageOptions,
    RecomputationMode,
    apply_mask,
    check_accumulator_dtype,
    check_arguments,
    check_batch_serialization,
    check_count,
    check_mapping,
    check_offloading,
    check_outfeed,
    check_outfeed_arguments,
    check_recomputation,
    check_recomputation_checkpoints,
    check_replication,
    check_sharding,
    compiler_options,
    find_pipeline_schedule,
)
from ipu_pipeline.tf1.program.pipeline_functions import (
    LossAndTransformation,
    OptimizerFunction,
    OptimizerFunctionOutput,
    give_steps,
    keep_steps,
)
from ipu_pipeline.tf1.program.program import reserve_ipus

__all__ = [
    "AutoStages",
    "Chunking",
    "OptimizerFunctionOutput",
    "PipelineSchedule",
    "PipelineStageOptions",
    "RecomputationMode",
    "TensorParallel",
    "auto_stages",
    "constrain",
    "pipeline",
    "recomputation_checkpoint",
    "split",
]

_SHARDED = {
    "replicated_optimizer_state_sharding": Shard.OPTIMIZER_STATE,
    "replicated_weight_sharding": Shard.WEIGHTS,
}


def pipeline(
    computational_stages: Sequence[Callable[..., Any] | Sequence[Callable[..., Any]]],
    gradient_accumulation_count: Any = None,
    gradient_accumulation_dtype: Any = None,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: OptimizerFunction | None = None,
    device_mapping: Sequence[int | Sequence[int]] | None = None,
    pipeline_schedule: PipelineSchedule | Schedule | None = None,
    recomputation_mode: RecomputationMode | None = None,
    forward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    backward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    weight_update_poplar_options: PipelineStageOptions | None = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    replicated_weight_sharding: bool | None = None,
    offload_weights: bool | None = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: Any = None,
    outfeed_mask: Any = None,
    reduction_method: Any = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
    dispatch_plan: Chunking | None = None,
    tensor_parallel: TensorParallel | None = None,
    max_shapes: int = 8,
    shapes: Sequence[Any] = (),
    *,
    pipeline_depth: Any = None,
) -> Operation:
    """Runs a model in stages, each on its IPU, and trains it if there is an optimizer.

    Example:
      >>> batches = [(np.ones([4, 8], np.float32), np.zeros([4, 2], np.float32))] * 8
      >>> infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(batches)
      >>> outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
      >>> def stage1(x, targets):
      ...     return layers.Dense(16, activation="relu")(x), targets
      >>> def stage2(x, targets):
      ...     return jnp.mean((layers.Dense(2)(x) - targets) ** 2)
      >>> def optimizer_function(loss):
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(0.1), loss)
      >>> def model():
      ...     return ipu.pipelining_ops.pipeline(
      ...         [stage1, stage2],
      ...         gradient_accumulation_count=4,
      ...         repeat_count=2,  # weight updates
      ...         infeed_queue=infeed_queue,
      ...         outfeed_queue=outfeed_queue,
      ...         outfeed_loss=True,
      ...         optimizer_function=optimizer_function,
      ...         pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Interleaved,
      ...     )
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model)
      >>> with ipu.Session(seed=1) as session:
      ...     session.run(infeed_queue.initializer)
      ...     session.run(program)
      ...     session.run(outfeed_queue.dequeue()).shape
      (8,)

    Args:
      computational_stages: the stages, Python functions. Each takes the previous stage's result (a tuple
        or list as positional arguments, a dict as keyword arguments). A list of functions in place of a
        function makes parallel stages, which run at the same time on the same values; their results are
        concatenated. Stages may share variables (`variable_scope(..., reuse=True)`), on one IPU or on
        several; their gradients are added once per weight update.
      gradient_accumulation_count: micro-batches per weight update, 1..2**31-1; required. An integer; or a
        traced integer scalar or a placeholder of the program: each run may then have another value, without
        another compilation, and raises ValueError for a wrong value. On several IPUs an update has up to
        2**22 forwards and backwards, which are all planned in advance.
      gradient_accumulation_dtype: the dtype of the sums or means of gradients: None for the variable's
        dtype, a floating-point dtype, or a function from a variable (with `name`, `shape` and `dtype`) to
        one of these. If it is wider than the variable's dtype, the optimizer computes in it, too.
      repeat_count: the number of times that the pipeline, with its weight update, runs in one
        `Session.run`.
      batch_serialization_iterations: the number of infeed elements that a stage handles, one after another,
        before the next stage starts. With k, an update takes k times `gradient_accumulation_count`
        elements, which are all accumulated and all enqueued. Above 1 it needs all stages on one IPU and the
        schedule Sequential, which are then the defaults, and the reduction SUM.
      inputs: the first arguments of the first stage: arrays, which stay the same during a run; or
        `get_global_step()` and values computed from it, with their values at the weight update.
      infeed_queue: supplies the first stage's other arguments, for each micro-batch. `Session.run` raises
        OutOfRangeError at the end of the data.
      outfeed_queue: receives the last stage's results, or the losses. Required if the last stage returns
        anything.
      optimizer_function: takes the last stage's results, and returns an `OptimizerFunctionOutput`. A dict
        is one argument, or its entries are keyword arguments if the function has their names. With an
        `optimizers.CrossReplicaOptimizer` there are as many replicas of the pipeline as fit on the selected
        IPUs. It is traced twice: for the loss in the last stage, and for the optimizer in the weight
        update, with the last stage's results for the last micro-batch. None: inference.
      device_mapping: the IPU of each stage, a list of IPUs for parallel stages; by default each has its
        own, in order. With all stages on one IPU the pipeline is one compiled program.
      pipeline_schedule: a member of `PipelineSchedule`, by default Grouped. It changes the number of
        micro-batches in flight, never the result. In addition to Graphcore's:
        `PipelineSchedule.searched()`, an order made for the costs of these stages; the name of a schedule
        in this or another library ("1f1b"); a function `schedule(num_stages, num_micro_batches,
        device_mapping, training)` that returns the actions of each IPU in order; or the path of a CSV file
        in PyTorch's format. See docs/schedules.md.
      recomputation_mode: a `RecomputationMode`, by default Auto. It applies if
        `IPUConfig.allow_recompute` is set when the program runs, and warns if it is not.
      forward_propagation_stages_poplar_options: XLA's options for the forward program of each stage. The
        last stage's forward and backward are one program, which gets the options of both; with all stages
        on one IPU everything is one program, which gets all options. Options must not contradict each
        other.
      backward_propagation_stages_poplar_options: XLA's options for the backward program of each stage.
      weight_update_poplar_options: XLA's options for the programs of the weight update.
      offload_weight_update_variables: whether the optimizer's state is in host memory between weight
        updates. None is False, here and below.
      replicated_optimizer_state_sharding: whether each replica keeps and updates a part of the optimizer's
        state (ZeRO-1), where the size of an axis is a multiple of the number of replicas. With one replica,
        True warns.
      offload_activations: whether the values that stages keep between a micro-batch's forward and backward
        are in host memory.
      offload_gradient_accumulation_buffers: whether accumulators are in host memory while no backward and
        no weight update uses them.
      replicated_weight_sharding: whether each replica also keeps only a part of the trainable variables,
        and gathers a stage's variables before each of its programs; in inference too. Variables of several
        stages stay whole. With one replica, True warns.
      offload_weights: whether variables, except those that stages assign, are in host memory while no
        program uses them; in inference too.
      continuous_weight_updates: only False.
      outfeed_loss: whether losses are enqueued, instead of the last stage's results.
      accumulate_outfeed: whether the outfeed gets one element per weight update (or execution): the sum
        over its micro-batches, whatever the `reduction_method`. The outfeed must be in mode ALL.
      accumulate_outfeed_dtype: the dtype of these sums: None for the value's dtype, a dtype, or a function
        from the `jax.ShapeDtypeStruct` of a micro-batch's value to one of these. Booleans need one;
        floating-point numbers cannot be summed as integers.
      outfeed_mask: booleans for the last stage's results, in a list, or in a dict if it returns a dict;
        True leaves a value out of the outfeed. It needs an `optimizer_function`, and cannot be combined
        with `outfeed_loss`.
      reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients over the micro-batches, or its name.
      name: the name under which the session keeps the optimizer's state and the count of updates; by
        default "Pipeline".
      dispatch_plan: on several IPUs, the number of micro-batches that a program handles. None: chosen for
        speed if the schedule is Grouped, and described in `Program.summary()`. `Program.dispatch_plans`
        returns it, so that it can be stored and passed again.
      tensor_parallel: the number of IPUs that compute each stage together, and how they divide its
        variables. With a size of T the pipeline needs T times as many IPUs: number i in `device_mapping`
        stands for IPUs T * i to T * i + T - 1. Values between stages are whole on each of them. None: one.
      max_shapes: the most different shapes of infeed elements, such as lengths of sequences or a last,
        smaller batch. The stages are traced and compiled for each shape when its first element comes. All
        elements have the structure and dtypes of the first one, and use the same variables. With several
        processes all elements have one shape.
      shapes: elements, or their shapes and dtypes, for which the stages are traced together with the first
        element's, and compiled in the first run, instead of when they come.
      pipeline_depth: the name of `gradient_accumulation_count` in Graphcore's first SDKs; give only one.

    Returns:
      An operation, to be returned from the compiled function.

    Raises:
      TypeError, ValueError: an argument has a wrong value, or the stages do not fit together.
      NotImplementedError: `continuous_weight_updates` is True; or batch serialization is combined with
        another schedule, or with several IPUs.
      RuntimeError: it is not called in a function that `ipu_compiler.compile` traces.
    """
    # Checks, and conversion for the engine.
    if not isinstance(continuous_weight_updates, bool):
        raise TypeError(f"continuous_weight_updates must be False; got {continuous_weight_updates!r}.")
    size = _num_devices(tensor_parallel)
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name must be a non-empty string, or None; got {name!r}.")
    if continuous_weight_updates:
        raise NotImplementedError("Continuous weight updates are currently not supported.")
    is_inference = optimizer_function is None
    if pipeline_depth is not None:
        if gradient_accumulation_count is not None:
            raise ValueError(
                "pipeline_depth is the older name of gradient_accumulation_count; both are given, "
                f"{pipeline_depth!r} and {gradient_accumulation_count!r}. Leave out pipeline_depth."
            )
        gradient_accumulation_count = pipeline_depth
    count = check_count(gradient_accumulation_count)
    has_reduction = reduction_method is not GradientAccumulationReductionMethod.SUM
    if has_reduction:
        reduction_method = GradientAccumulationReductionMethod.parse(reduction_method)
    check_integer("repeat_count", repeat_count)
    is_serialized = batch_serialization_iterations != 1
    if pipeline_schedule is None:
        pipeline_schedule = PipelineSchedule.Sequential if is_serialized else PipelineSchedule.Grouped
    check_arguments(computational_stages, infeed_queue, outfeed_queue, optimizer_function)
    schedule = find_pipeline_schedule(pipeline_schedule)
    if device_mapping is None and is_serialized:
        device_mapping = [
            [0] * len(entry) if isinstance(entry, (list, tuple)) else 0 for entry in computational_stages
        ]
    device_mapping = check_mapping(device_mapping, computational_stages)
    check_batch_serialization(
        batch_serialization_iterations, count, schedule, device_mapping, reduction_method
    )
    check_outfeed_arguments(
        outfeed_queue,
        not is_inference,
        outfeed_loss,
        outfeed_mask,
        accumulate_outfeed,
        accumulate_outfeed_dtype,
    )
    recompute = check_recomputation(recomputation_mode, is_inference)
    offload = check_offloading(
        is_inference,
        offload_weight_update_variables=offload_weight_update_variables,
        offload_activations=offload_activations,
        offload_gradient_accumulation_buffers=offload_gradient_accumulation_buffers,
        offload_weights=offload_weights,
    )
    sharded = check_replication(
        is_inference,
        replicated_optimizer_state_sharding=replicated_optimizer_state_sharding,
        replicated_weight_sharding=replicated_weight_sharding,
    )
    options = compiler_options(
        computational_stages,
        not is_inference,
        forward_propagation_stages_poplar_options,
        backward_propagation_stages_poplar_options,
        weight_update_poplar_options,
    )
    accumulator_dtype = check_accumulator_dtype(gradient_accumulation_dtype)
    if is_inference and gradient_accumulation_dtype is not None:
        warnings.warn(
            "gradient_accumulation_dtype will have no effect since this pipeline is in inference.",
            stacklevel=2,
        )
    if is_inference and has_reduction:
        warnings.warn(
            "reduction_method will have no effect since this pipeline is in inference.", stacklevel=2
        )
    # The program that the pipeline becomes a part of.
    builder = current_builder()
    if builder is None:
        raise RuntimeError(
            "pipelining_ops.pipeline must be called in a function that ipu_compiler.compile traces, "
            "within an ipu_scope; here it is not placed on an IPU device."
        )
    frame = find_frame()
    if frame is not None and frame.is_stage:
        raise InsideOfBodyError(
            "pipelining_ops.pipeline was called within a computational stage; pipelines do not nest. Call "
            "it in the compiled function, or make its stages stages of the outer pipeline."
        )
    # Stages may make arrays, which starts JAX: the program's CPU devices are asked for before.
    reserve_ipus(builder.ipu_device, size * (1 + max(jax.tree.leaves(device_mapping))))
    if isinstance(count, Placeholder):
        count = count.traced()
    has_count_operand = isinstance(count, jax.Array)
    stages = computational_stages
    inputs, computational_stages, begin_input = give_steps(inputs, stages, trains=not is_inference)
    if isinstance(stages, AutoStages):
        computational_stages = AutoStages(computational_stages, stages.groups, stages.table)
    input_leaves, input_tree = as_traced_inputs(inputs)

    outfeed_tree: Any = jax.tree.structure(0)  # the loss's

    def collect_outputs(outputs: Any) -> list[bool]:
        nonlocal outfeed_tree
        if outfeed_queue is None or outfeed_loss:
            return [False] * len(jax.tree.leaves(outputs))
        unmasked, is_chosen = apply_mask(outfeed_mask, outputs)
        outfeed_tree = jax.tree.structure(unmasked)
        return is_chosen

    # The engine's pipeline, traced.
    optimizer = None if optimizer_function is None else LossAndTransformation(optimizer_function)
    captures = Captures(builder.is_captured_placeholder, builder.describe_input)
    engine_pipeline = Pipeline(
        computational_stages,
        num_micro_batches=None if has_count_operand else count,
        loss=None if optimizer is None else optimizer.loss,
        optimizer=None if optimizer is None else optimizer.transformation,
        schedule=schedule,
        device_mapping=device_mapping,
        reduction="mean" if is_inference else reduction_method.name.lower(),
        donate=True,
        trained=None if optimizer is None else optimizer.trained,
        gradient_map=None if optimizer is None else optimizer.gradient_map,
        hooks=Hooks(
            option_names=OPTION_NAMES,
            program_names=builder.names,
            captures=captures,
            gradient_targets=None if optimizer is None else optimizer.gradient_targets,
            collect_losses=outfeed_loss or is_inference,
        ),
        accumulator_dtype=None if is_inference else accumulator_dtype,
        # The configuration of the run decides; if it is this one, the programs need not be built again.
        recompute=recompute if device_selection.allows_recomputation() and not is_inference else None,
        offload=offload,
        shard=[_SHARDED[argument] for argument in sharded],
        num_serialized=batch_serialization_iterations,
        collect_outputs=collect_outputs,
        sum_collected=accumulate_outfeed,
        sum_dtype=accumulate_outfeed_dtype if accumulate_outfeed else None,
        **options,
        dispatch_plan=dispatch_plan,
        tensor_parallel=tensor_parallel,
        max_shapes=max_shapes,
        shapes=shapes,
    )
    element = None if infeed_queue is None else infeed_queue.element
    input_avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in input_leaves]
    engine_pipeline.trace(element, *jax.tree.unflatten(input_tree, input_avals))
    # The call in the program.
    averages = optimizer is not None and optimizer.averages_replicas
    num_devices = engine_pipeline.num_devices
    replication = make_replication(
        builder.ipu_device,
        num_devices,
        engine_pipeline.uses_replicas,
        [infeed_queue, outfeed_queue, *(entry.target for entry in engine_pipeline.traced.enqueued)],
        trains=not is_inference,
        averages=averages,
        sharded=sharded,
    )
    call = PipelineCall(
        name=name or "Pipeline",
        pipeline=engine_pipeline,
        repeat_count=repeat_count,
        infeed_queue=infeed_queue,
        outfeed_queue=outfeed_queue,
        outfeeds_loss=outfeed_loss,
        outfeed_tree=outfeed_tree,
        has_count_operand=has_count_operand,
        begin_input=begin_input,
        recompute=recompute,
        asks_for_recomputation=recomputation_mode is not None and not is_inference,
        replication=replication,
    )
    check_outfeed(call)
    check_recomputation_checkpoints(call)
    check_sharding(call)
    builder.add(call, [*([count] if has_count_operand else []), *input_leaves, *captures.values])
    captures.release(functools.partial(builder.rebinding, builder.find_captured(captures.values)))
    return Operation(call.name)


def _num_devices(tensor_parallel: Any) -> int:
    """The number of IPUs that compute each stage."""
    if tensor_parallel is None:
        return 1
    if not isinstance(tensor_parallel, TensorParallel):
        raise TypeError(f"tensor_parallel must be a TensorParallel, or None; got {tensor_parallel!r}.")
    return tensor_parallel.size


def auto_stages(
    layers: Sequence[Callable[..., Any]],
    num_stages: int,
    inputs: Any = (),
    infeed_queue: IPUInfeedQueue | None = None,
    optimizer_function: OptimizerFunction | None = None,
    gradient_accumulation_count: Any = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | Schedule | None = None,
    bytes_per_ipu: int | None = None,
    gradient_accumulation_dtype: Any = None,
    recomputation_mode: RecomputationMode | None = None,
    offload_weight_update_variables: bool | None = None,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    offload_weights: bool | None = None,
    tensor_parallel: TensorParallel | None = None,
    measure: bool = True,
) -> AutoStages:
    """Groups layers into stages for `pipeline`, so that the predicted step time is shortest.

    Not in Graphcore's library. A step is simulated with the schedule, the device mapping, and the times and
    memory of the layers: their programs, their parts of the weight update, and the transfers between them.
    These are measured on the IPUs, once for equal layers, and stored, so that later runs make the same
    choice; see `engine.auto_stages`. It may be called in the function that `ipu_compiler.compile` traces,
    or outside of it. Outside, configure IPUs first, because it uses them.

    Args:
      layers: functions. Each takes the previous one's result, like stages.
      num_stages: the number of stages, at least 1 and at most the number of layers.
      inputs: as for `pipeline`; outside of a compiled function placeholders, or shapes and dtypes.
      gradient_accumulation_count: as for `pipeline`, but an integer: the best split depends on it.
      device_mapping: the IPU of each stage; by default each has its own, in order.
      bytes_per_ipu: the most bytes that an IPU may hold: variables, optimizer state, accumulators,
        micro-batches in flight and temporaries. None: no limit.
      recomputation_mode: as for `pipeline`; it counts if `IPUConfig.allow_recompute` was set.
      measure: False: times are estimated from counted operations, and nothing is run.

    The other arguments are those of `pipeline`. What is offloaded does not count in the memory of IPUs.

    Returns:
      The stages, a list with `groups` (the numbers of each stage's layers) and `table` (the reasons: costs
      of the layers, the chosen split, the split into equal numbers of layers, and the best other split).

    Raises:
      TypeError, ValueError: an argument has a wrong value, the layers do not fit together, or no split fits
        the memory.
    """
    check_arguments(layers, infeed_queue, None, optimizer_function)
    inputs, given_layers, _begin = give_steps(inputs, layers, trains=optimizer_function is not None)
    num_known = min(num_stages, len(layers)) if is_integer(num_stages, 1) else 1
    feed, options = _engine_arguments(
        num_known,
        inputs,
        infeed_queue,
        optimizer_function,
        gradient_accumulation_count,
        device_mapping,
        pipeline_schedule,
        gradient_accumulation_dtype,
        recomputation_mode,
        offload_weight_update_variables,
        offload_activations,
        offload_gradient_accumulation_buffers,
        offload_weights,
        tensor_parallel,
        measure,
    )
    result = engine_auto_stages(given_layers, num_stages, *feed, bytes_per_ipu=bytes_per_ipu, **options)
    stages = [join_layers([layers[number] for number in group]) for group in result.groups]
    return AutoStages(stages, result.groups, result.table)


def split(
    model: Callable[..., Any],
    num_stages: int,
    inputs: Any = (),
    infeed_queue: IPUInfeedQueue | None = None,
    optimizer_function: OptimizerFunction | None = None,
    gradient_accumulation_count: Any = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | Schedule | None = None,
    bytes_per_ipu: int | None = None,
    gradient_accumulation_dtype: Any = None,
    recomputation_mode: RecomputationMode | None = None,
    offload_weight_update_variables: bool | None = None,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    offload_weights: bool | None = None,
    measure: bool = True,
    cut_scans: bool = True,
) -> AutoStages:
    """Splits a model that is one function into stages for `pipeline`, with the shortest predicted step.

    Not in Graphcore's library. The model is traced and cut into parts where few values are live; parts are
    measured and grouped into stages like layers in `auto_stages`; see `engine.split`. Skip connections,
    shared variables and values with several readers need no special code. It may be called in the function
    that `ipu_compiler.compile` traces, or outside of it. Outside, configure IPUs first.

    Example:
      >>> def model(x, targets):
      ...     for width in (64, 64, 8):
      ...         x = layers.Dense(width, activation="tanh")(x)
      ...     return jnp.mean((x - targets) ** 2)
      >>> config = ipu.config.IPUConfig()
      >>> config.auto_select_ipus = 2
      >>> config.configure_ipu_system()
      >>> batches = [(np.ones([4, 8], np.float32), np.zeros([4, 8], np.float32))]
      >>> infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(batches)
      >>> stages = ipu.pipelining_ops.split(
      ...     model, 2, infeed_queue=infeed_queue, gradient_accumulation_count=8, measure=False
      ... )
      >>> len(stages)  # pass them to `pipeline`
      2

    Args:
      model: a function that takes `inputs`, then a micro-batch, and returns the arguments of the
        `optimizer_function`, like the only stage of a pipeline.
      num_stages: the number of stages, at least 1.
      cut_scans: False keeps each scan over layers in one stage, and its variables stacked.

    The other arguments are those of `auto_stages`.

    Returns:
      The stages, a list with `groups` (the numbers of each stage's parts) and `table`, for micro-batches of
      these shapes and dtypes. Names of variables, with the scopes around this call, and random numbers do
      not depend on the cuts. A stacked variable of a scan that is cut becomes a variable for each layer:
      `blocks/w/0` and so on.

    Raises:
      TypeError, ValueError: an argument has a wrong value, the model has too few parts, or no split fits
        the memory.
    """
    check_arguments([model], infeed_queue, None, optimizer_function)
    new_inputs, (given_model,), begin = give_steps(inputs, [model], trains=optimizer_function is not None)
    feed, options = _engine_arguments(
        num_stages if is_integer(num_stages, 1) else 1,
        new_inputs,
        infeed_queue,
        optimizer_function,
        gradient_accumulation_count,
        device_mapping,
        pipeline_schedule,
        gradient_accumulation_dtype,
        recomputation_mode,
        offload_weight_update_variables,
        offload_activations,
        offload_gradient_accumulation_buffers,
        offload_weights,
        None,
        measure,
    )
    parts = engine_split(
        given_model, num_stages, *feed, bytes_per_ipu=bytes_per_ipu, cut_scans=cut_scans, **options
    )
    return AutoStages([keep_steps(parts[0], begin), *parts[1:]], parts.groups, parts.table)


def _engine_arguments(
    num_stages: int,
    inputs: Any,
    infeed_queue: IPUInfeedQueue | None,
    optimizer_function: OptimizerFunction | None,
    gradient_accumulation_count: Any,
    device_mapping: Sequence[int] | None,
    pipeline_schedule: PipelineSchedule | Schedule | None,
    gradient_accumulation_dtype: Any,
    recomputation_mode: RecomputationMode | None,
    offload_weight_update_variables: bool | None,
    offload_activations: bool | None,
    offload_gradient_accumulation_buffers: bool | None,
    offload_weights: bool | None,
    tensor_parallel: TensorParallel | None,
    measure: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """Converts arguments of `auto_stages` to the engine's: the infeed's element and the inputs; options."""
    count = check_count(gradient_accumulation_count)
    if not isinstance(count, int):
        raise TypeError(
            "gradient_accumulation_count must be an integer here, as the best split depends on it; got "
            f"{count!r}."
        )
    size = _num_devices(tensor_parallel)
    schedule = PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule
    builder = current_builder()
    mapping = check_mapping(device_mapping, [None] * num_stages)
    num_ipus = size * (1 + max(jax.tree.leaves(mapping)))
    ipu_device = 0 if builder is None else builder.ipu_device
    optimizer = None if optimizer_function is None else LossAndTransformation(optimizer_function)
    targets = None if optimizer is None else optimizer.gradient_targets
    if builder is None:
        shapes, hooks = input_shapes(inputs), Hooks(option_names=OPTION_NAMES, gradient_targets=targets)
    else:
        leaves, tree = as_traced_inputs(inputs)
        shapes = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
        captures = Captures(builder.is_captured_placeholder, builder.describe_input)
        hooks = Hooks(
            option_names=OPTION_NAMES,
            program_names=builder.names,
            captures=captures,
            gradient_targets=targets,
        )
    recompute = check_recomputation(recomputation_mode, optimizer is None)
    options = {
        "devices": device_selection.devices_for(ipu_device, num_ipus) if measure else None,
        "num_micro_batches": count,
        "loss": None if optimizer is None else optimizer.loss,
        "optimizer": None if optimizer is None else optimizer.transformation,
        "schedule": find_pipeline_schedule(schedule),
        "device_mapping": mapping,
        "trained": None if optimizer is None else optimizer.trained,
        "hooks": hooks,
        "gradient_map": None if optimizer is None else optimizer.gradient_map,
        "accumulator_dtype": check_accumulator_dtype(gradient_accumulation_dtype),
        "recompute": recompute
        if device_selection.allows_recomputation() and optimizer is not None
        else None,
        "offload": check_offloading(
            optimizer is None,
            offload_weight_update_variables=offload_weight_update_variables,
            offload_activations=offload_activations,
            offload_gradient_accumulation_buffers=offload_gradient_accumulation_buffers,
            offload_weights=offload_weights,
        ),
        "tensor_parallel": tensor_parallel,
        "measure": measure,
    }
    return [None if infeed_queue is None else infeed_queue.element, *shapes], options


explain_missing(__name__)
