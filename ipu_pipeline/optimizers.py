"""Optimizers with a `minimize`, for the bodies of loops. Each wraps an Optax transformation."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine.jaxprs.shapes import check_float_dtype
from ipu_pipeline.engine.loops.recording import TrainingStep, current_recorder, record_training_step
from ipu_pipeline.engine.programs.accumulation import Reduction, find_accumulator_dtype
from ipu_pipeline.engine.programs.gradient_maps import GradientMap, check_gradient_map
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates import optimizer_tracing
from ipu_pipeline.engine.updates.loss_scaling import scale_loss
from ipu_pipeline.engine.updates.optimizer_tracing import describe_other_optimizer
from ipu_pipeline.engine.updates.reporting import with_metrics
from ipu_pipeline.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.graph.operations import Operation
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue

__all__ = [
    "GradientAccumulationOptimizerV2",
    "LossScalingOptimizer",
    "MapGradientOptimizer",
    "OutfeedOptimizer",
    "OutfeedOptimizerMode",
    "Unwrapped",
    "Watched",
    "choose_trained",
    "unwrap",
    "with_metrics",
]

_MAX_INT32 = 2**31 - 1


class _Optimizer:
    """What the optimizers here share."""

    def __init__(self, opt: Any, name: str) -> None:
        if not isinstance(opt, (_Optimizer, optax.GradientTransformation)):
            raise TypeError(
                f"{type(self).__name__}: the optimizer to wrap must be an optax.GradientTransformation, "
                "for example optax.sgd(0.01), or one of ipu.optimizers; got "
                f"{describe_other_optimizer(opt)}."
            )
        self.wrapped = opt
        self.name = name

    def minimize(
        self,
        loss: jax.Array,
        global_step: None = None,
        var_list: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Operation:
        """Records a training step in the body of a loop; it runs whether its operation is returned or not.

        Args:
          loss: a traced floating-point scalar.
          global_step: only None: the session counts weight updates, see `Session.update_count`.
          var_list: full names of the variables to train; None: all trainable ones that the body has asked
            for so far.
          name: the optimizer's state is kept under it; by default the optimizer's name. A second training
            step of that name in a program gets the name with `_1`.

        Returns:
          The operation.

        Raises:
          RuntimeError: not called in the body of a loop.
          ValueError: the loss is no scalar, there is nothing to train, or `var_list` names a variable that
            cannot be trained.
          NotImplementedError: the body has a training step already.
        """
        what = f"{type(self).__name__}.minimize"
        frame, recorder = current_recorder(what, "A pipeline gets its optimizer by `optimizer_function`.")
        if global_step is not None:
            raise ValueError(
                "minimize: global_step must be None, since the session counts weight updates "
                f"(Session.update_count); got {global_step!r}."
            )
        loss = jnp.asarray(loss)
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"minimize: loss must be a floating-point scalar; got {loss.dtype.name}{list(loss.shape)}. "
                "Reduce it, for example with jnp.mean."
            )
        unwrapped = unwrap(self)
        if unwrapped.watched:
            raise ValueError(
                "minimize: an OutfeedOptimizer is for pipelines. In the body of a loop, enqueue what "
                "jax.grad gives, or the change of a variable."
            )
        trained = _find_trained(recorder.variables, var_list)
        for gradient_map in unwrapped.gradient_maps:
            check_gradient_map(gradient_map, trained.values())
        dtypes = {
            name: find_accumulator_dtype(spec, unwrapped.dtype, "dtype") for name, spec in trained.items()
        }
        reduction = Reduction[unwrapped.reduction_method.name]
        traced = optimizer_tracing.trace_optimizer(
            unwrapped.transformation, trained, None, (), reduction, dtypes
        )
        captures = Captures()
        traced = optimizer_tracing.lift_captures(traced, captures.find_number)
        step_name = frame.names.layer_name("", name or self.name)
        step = TrainingStep(
            name=step_name,
            optimizer=traced,
            num_mini_batches=unwrapped.num_mini_batches,
            reduction=reduction,
            gradient_map=unwrapped.gradient_map,
            accumulator_dtypes=dtypes,
            offloads_state=unwrapped.offloads_state,
        )
        record_training_step(recorder, step, loss, captures.values)
        return Operation(step_name)


class GradientAccumulationOptimizerV2(_Optimizer):
    """Updates the weights once every so many iterations, by the gradients accumulated over them.

    The count of iterations belongs to the session: one that a run begins, a later run completes.

    Example:
      optimizer = GradientAccumulationOptimizerV2(optax.sgd(0.01), num_mini_batches=16)
      train_op = optimizer.minimize(loss)
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          num_mini_batches: iterations per weight update, from 1.
          offload_weight_update_variables: whether the optimizer's state lies in host memory between weight
            updates; None is False.
          replicated_optimizer_state_sharding: True warns: there is one replica, and nothing is sharded.
          dtype: of the accumulators: None for that of the variable, a dtype, or a function from a variable
            (with `name`, `shape` and `dtype`) to a dtype. The optimizer gets them, and the variable, in the
            wider of this dtype and the variable's, which its state has too: with float32, a float16 model
            gets a float32 Adam.
          reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients, or its name.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError, ValueError: an argument is not usable.
        """
        super().__init__(opt, name)
        if not isinstance(num_mini_batches, (int, np.integer)) or isinstance(num_mini_batches, bool):
            raise TypeError(f"num_mini_batches must be an integer; got {num_mini_batches!r}.")
        if not 1 <= num_mini_batches < _MAX_INT32:
            raise ValueError(
                f"num_mini_batches must be from 1 to {_MAX_INT32 - 1}; got {num_mini_batches}."
            )
        if offload_weight_update_variables not in (None, False, True):
            raise TypeError(
                "offload_weight_update_variables must be True, False or None; got "
                f"{offload_weight_update_variables!r}."
            )
        if replicated_optimizer_state_sharding:
            warnings.warn(
                "replicated_optimizer_state_sharding will have no effect since there is one replica: "
                "nothing is sharded.",
                stacklevel=2,
            )
        if dtype is not None and not callable(dtype):
            check_float_dtype(dtype, "dtype")
        self.num_mini_batches = int(num_mini_batches)
        self.offloads_state = bool(offload_weight_update_variables)
        self.dtype = dtype
        self.reduction_method = GradientAccumulationReductionMethod.parse(reduction_method)


class MapGradientOptimizer(_Optimizer):
    """Applies a function to each gradient, before gradients are accumulated.

    Example:
      MapGradientOptimizer(optax.sgd(0.01), lambda gradient, variable: gradient + 1e-4 * variable)
    """

    def __init__(
        self,
        wrapped_optimizer: Any,
        gradient_mapping_function: GradientMap,
        name: str = "MapGradientOptimizer",
    ) -> None:
        """Wraps an optimizer.

        Args:
          wrapped_optimizer: an Optax transformation, or another of these optimizers.
          gradient_mapping_function: `f(gradient, variable) -> gradient`, on arrays of one shape and dtype.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError: an argument is not usable.
        """
        super().__init__(wrapped_optimizer, name)
        if not callable(gradient_mapping_function):
            raise TypeError(
                f"gradient_mapping_function must be a function; got {gradient_mapping_function!r}."
            )
        self.gradient_mapping_function = gradient_mapping_function


class LossScalingOptimizer(_Optimizer):
    """Starts the backward from a scale in place of 1, so that small float16 gradients do not become zero.

    An update divides the gradients by the scale again, in 32 bits at least, and the wrapped optimizer runs
    in these. If a gradient of any stage is not finite, the update is skipped in all stages: variables and
    the wrapped optimizer's state stay. The scale is in the optimizer's state. Losses that are reported, and
    gradients that a `MapGradientOptimizer` gets, are without it; a map that gets an infinite or NaN
    gradient cannot hide it. The backward starts in the loss's dtype, which in float16 holds scales up to
    65504.

    Example:
      LossScalingOptimizer(optax.adam(1e-3), initial_scale=2.0**12)
    """

    def __init__(
        self,
        opt: Any,
        initial_scale: float = 2.0**15,
        dynamic: bool = True,
        growth_interval: int = 2000,
        factor: float = 2.0,
        name: str = "LossScalingOptimizer",
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          initial_scale: the first scale, a finite number above 0. Powers of two round no gradient.
          dynamic: whether the scale changes; False keeps it, and skips updates too.
          growth_interval: after so many updates with finite gradients, from 1, the scale is multiplied by
            `factor`.
          factor: above 1. Gradients that are not finite divide the scale by it, down to 1 at least.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError, ValueError: an argument is not usable.
        """
        super().__init__(opt, name)
        for argument, value, above in (("initial_scale", initial_scale, 0), ("factor", factor, 1)):
            if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
                raise TypeError(f"{argument} must be a number; got {value!r}.")
            if not above < value < np.finfo(np.float32).max:
                raise ValueError(f"{argument} must be finite in float32 and above {above}; got {value}.")
        if not isinstance(dynamic, bool):
            raise TypeError(f"dynamic must be True or False; got {dynamic!r}.")
        if not isinstance(growth_interval, (int, np.integer)) or isinstance(growth_interval, bool):
            raise TypeError(f"growth_interval must be an integer; got {growth_interval!r}.")
        if not 1 <= growth_interval <= _MAX_INT32:
            raise ValueError(f"growth_interval must be from 1 to {_MAX_INT32}; got {growth_interval}.")
        self._settings = (float(initial_scale), dynamic, int(growth_interval), float(factor))

    def scaled(self, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
        """A transformation for gradients without the scale as one for gradients with it."""
        return scale_loss(transformation, *self._settings)


class OutfeedOptimizerMode(enum.Enum):
    """AFTER_COMPUTE: each micro-batch's gradients. BEFORE_APPLY: those that the optimizer gets."""

    AFTER_COMPUTE = "after_compute"
    BEFORE_APPLY = "before_apply"


class OutfeedOptimizer(_Optimizer):
    """Enqueues the gradients of a pipeline to an outfeed, to look at them: a dict by full name.

    After computing they are each micro-batch's, as they are accumulated: mapped by a
    `MapGradientOptimizer`, and without the scale of the loss. Before applying they are what the wrapped
    Optax transformation gets, after accumulation. They are copied to the host, which takes time and memory.

    Example:
      OutfeedOptimizer(optax.sgd(0.01), gradients_queue, OutfeedOptimizerMode.BEFORE_APPLY)
    """

    def __init__(
        self,
        wrapped_optimizer: Any,
        outfeed_queue: IPUOutfeedQueue,
        outfeed_optimizer_mode: OutfeedOptimizerMode = OutfeedOptimizerMode.AFTER_COMPUTE,
        variable_names: Sequence[str] | None = None,
        name: str = "OutfeedOptimizer",
    ) -> None:
        """Wraps an optimizer.

        Args:
          wrapped_optimizer: an Optax transformation, or another of these optimizers.
          outfeed_queue: what they are enqueued to, and nothing else.
          outfeed_optimizer_mode: which gradients.
          variable_names: full names of the variables whose gradients are enqueued; None: of all that are
            trained.
          name: the optimizer's state is kept under it.

        Raises:
          TypeError, ValueError: an argument is not usable. A name that is not trained raises ValueError
          when
            the pipeline is compiled.
        """
        super().__init__(wrapped_optimizer, name)
        if not isinstance(outfeed_queue, IPUOutfeedQueue):
            raise TypeError(f"outfeed_queue must be an IPUOutfeedQueue; got {outfeed_queue!r}.")
        if not isinstance(outfeed_optimizer_mode, OutfeedOptimizerMode):
            raise TypeError(
                f"outfeed_optimizer_mode must be an OutfeedOptimizerMode; got {outfeed_optimizer_mode!r}."
            )
        if variable_names is not None:
            is_list = isinstance(variable_names, (list, tuple)) and all(
                isinstance(one, str) for one in variable_names
            )
            if not is_list or not variable_names:
                raise ValueError(
                    f"variable_names must be a list of full names, or None; got {variable_names!r}."
                )
        self.outfeed_queue = outfeed_queue
        self.mode = outfeed_optimizer_mode
        self.variable_names = None if variable_names is None else tuple(dict.fromkeys(variable_names))


@dataclass(frozen=True, eq=False)
class Watched:
    """Where gradients of micro-batches go, and of which variables; None: of all."""

    queue: IPUOutfeedQueue
    variable_names: tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class Unwrapped:
    """What a nest of optimizers amounts to.

    Attributes:
      transformation: the Optax transformation inside, with loss scaling if there is an optimizer for that.
      gradient_maps: in the order in which they are applied.
      num_mini_batches: iterations per weight update; 1 without accumulation.
      dtype: of the accumulators, as given.
      reduction_method: of the gradients.
      accumulates: whether there is an accumulating optimizer.
      offloads_state: whether it keeps its state in host memory.
      watched: what the gradients of micro-batches are enqueued to.
    """

    transformation: optax.GradientTransformation
    gradient_maps: tuple[GradientMap, ...] = ()
    num_mini_batches: int = 1
    dtype: Any = None
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    accumulates: bool = False
    offloads_state: bool = False
    watched: tuple[Watched, ...] = ()

    @property
    def gradient_map(self) -> GradientMap | None:
        """All gradient maps as one; None if there are none."""
        if not self.gradient_maps:
            return None

        def mapped(gradient: jax.Array, variable: jax.Array) -> jax.Array:
            for gradient_map in self.gradient_maps:
                gradient = gradient_map(gradient, variable)
            return gradient

        return mapped


def unwrap(opt: Any) -> Unwrapped:
    """Looks through a nest of optimizers.

    Raises:
      ValueError: two of them accumulate, or scale the loss.
    """
    maps: list[GradientMap] = []
    accumulating: GradientAccumulationOptimizerV2 | None = None
    scaling: LossScalingOptimizer | None = None
    watching: list[OutfeedOptimizer] = []
    while isinstance(opt, _Optimizer):
        if isinstance(opt, MapGradientOptimizer):
            maps.insert(0, opt.gradient_mapping_function)  # the inner ones come first
        elif isinstance(opt, GradientAccumulationOptimizerV2):
            if accumulating is not None:
                raise ValueError("An optimizer can accumulate gradients only once; two are nested.")
            accumulating = opt
        elif isinstance(opt, LossScalingOptimizer):
            if scaling is not None:
                raise ValueError("An optimizer can scale the loss only once; two are nested.")
            scaling = opt
        elif isinstance(opt, OutfeedOptimizer):
            watching.append(opt)
        opt = opt.wrapped
    watched = []
    for own in watching:
        if own.mode is OutfeedOptimizerMode.AFTER_COMPUTE:
            watched.append(Watched(own.outfeed_queue, own.variable_names))
        elif isinstance(opt, optax.GradientTransformation):
            opt = _enqueue_gradients(opt, own.outfeed_queue, own.variable_names)
    if scaling is not None and isinstance(opt, optax.GradientTransformation):
        opt = scaling.scaled(opt)
    if accumulating is None:
        return Unwrapped(opt, tuple(maps), watched=tuple(watched))
    return Unwrapped(
        opt,
        tuple(maps),
        accumulating.num_mini_batches,
        accumulating.dtype,
        accumulating.reduction_method,
        True,
        accumulating.offloads_state,
        tuple(watched),
    )


def _enqueue_gradients(
    inner: optax.GradientTransformation, queue: IPUOutfeedQueue, names: Sequence[str] | None
) -> optax.GradientTransformation:
    """A transformation that first enqueues the gradients that it gets."""
    wrapped = optax.with_extra_args_support(inner)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        queue.enqueue({name: gradients[name] for name in choose_trained(names, gradients)})
        return wrapped.update(gradients, state, params, **extra)

    return optax.GradientTransformationExtraArgs(wrapped.init, update)


def choose_trained(names: Sequence[str] | None, trained: Iterable[str]) -> list[str]:
    """Full names of the variables whose gradients an `OutfeedOptimizer` takes.

    Args:
      names: its `variable_names`.
      trained: the names that there are.

    Raises:
      ValueError: one is not trained.
    """
    known = sorted(trained)
    for name in names or ():
        if name not in known:
            raise ValueError(
                f"OutfeedOptimizer: variable_names has {name!r}, which is not trained. Trained are: "
                f"{', '.join(known)}."
            )
    return known if names is None else list(names)


def _find_trained(
    known: Mapping[str, VariableSpec], var_list: Sequence[str] | None
) -> dict[str, VariableSpec]:
    trainable = {name: spec for name, spec in known.items() if spec.trainable}
    if isinstance(var_list, str):
        raise ValueError(f"minimize: var_list must be a list of full names; got the string {var_list!r}.")
    if var_list is not None and not var_list:
        raise ValueError("No variables to optimize: var_list is empty; None trains all.")
    for name in var_list or ():
        if name not in trainable:
            fault = "is not trainable" if name in known else "does not exist"
            raise ValueError(
                f"minimize: the variable {name!r} of var_list {fault}. Trainable are: "
                f"{', '.join(trainable) or 'none'}."
            )
    trained = {name: spec for name, spec in trainable.items() if var_list is None or name in var_list}
    if not trained:
        raise ValueError("No variables to optimize: the loop's body has asked for no trainable variable.")
    return trained
