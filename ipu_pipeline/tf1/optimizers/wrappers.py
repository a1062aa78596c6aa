"""Optimizers around an Optax transformation: `minimize`, Graphcore's wrappers, nested ones."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine import Reduction
from ipu_pipeline.engine.fronts import (
    GradientMap,
    LossScaled,
    current_body,
    describe_other_optimizer,
    join_gradient_maps,
    record_training_step,
    scale_loss,
)
from ipu_pipeline.ground.checks import MAX_INT32, check_function, check_integer, check_member, is_number
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.ground.pytrees import as_loss, check_float_dtype
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue, Operation
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.graph import GlobalStep, is_internal


@dataclass(frozen=True, eq=False)
class GradientOutfeed:
    """A queue for gradients of micro-batches, and the variables whose gradients it takes; None: all."""

    queue: IPUOutfeedQueue
    variable_names: tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class Accumulation:
    """The accumulation of an optimizer.

    Attributes:
      num_mini_batches: iterations per weight update.
      dtype: of the accumulators, as given.
      reduction_method: of the gradients.
      offloads_state: whether the optimizer's state lies in host memory between updates.
      shards_state: whether the replicas share out the optimizer's state.
    """

    num_mini_batches: int = 1
    dtype: Any = None
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    offloads_state: bool = False
    shards_state: bool = False


@dataclass(frozen=True, eq=False)
class OptimizerEffect:
    """The combined effect of nested optimizers.

    Attributes:
      innermost: the Optax transformation inside.
      scaled: makes of it one for gradients with the scale of the loss; None without loss scaling.
      gradient_maps: in the order in which they are applied.
      accumulation: None: it does not accumulate.
      watched: what the gradients of micro-batches are enqueued to.
      has_outfeeds: whether gradients are enqueued at all.
      averages_replicas: whether gradients are averaged over replicas.
    """

    innermost: optax.GradientTransformation
    scaled: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None
    gradient_maps: tuple[GradientMap, ...] = ()
    accumulation: Accumulation | None = None
    watched: tuple[GradientOutfeed, ...] = ()
    has_outfeeds: bool = False
    averages_replicas: bool = False

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The Optax transformation, for gradients as they are accumulated."""
        return self.innermost if self.scaled is None else self.scaled(self.innermost)

    @property
    def gradient_map(self) -> GradientMap | None:
        """All gradient maps as one; None if there are none."""
        return join_gradient_maps(self.gradient_maps)


@dataclass(frozen=True, eq=False)
class MinimizeCall:
    """A call of `minimize` in an estimator's `model_fn`.

    Attributes:
      optimizer: the optimizer.
      loss: a traced scalar.
      var_list: as given.
      operation: its result.
    """

    optimizer: Optimizer
    loss: jax.Array
    var_list: Sequence[str] | None
    operation: Operation


_minimized: contextvars.ContextVar[list[MinimizeCall] | None] = contextvars.ContextVar(
    "minimized", default=None
)


@contextlib.contextmanager
def collecting_minimized() -> Iterator[list[MinimizeCall]]:
    """Collects the calls of `minimize` in a `with` block, in which a `model_fn` is called."""
    calls: list[MinimizeCall] = []
    with bound(_minimized, calls):
        yield calls


class Optimizer(abc.ABC):
    """The base of the optimizers here."""

    def __init__(self, opt: Any, name: str) -> None:
        """Takes the optimizer to wrap, and the name under which its state is kept."""
        if not isinstance(opt, (Optimizer, optax.GradientTransformation)):
            raise TypeError(
                f"{type(self).__name__}: the optimizer to wrap must be an optax.GradientTransformation, "
                "for example optax.sgd(0.01), or one of ipu.optimizers; got "
                f"{describe_other_optimizer(opt)}."
            )
        self.wrapped = opt
        self.name = name

    def __getattr__(self, name: str) -> Any:
        """Says what to do for those who take it for a transformation of Optax."""
        if name in ("init", "update"):
            kind = type(self).__name__
            raise AttributeError(
                f"{kind} is no transformation of Optax, and cannot be a part of one. Put it around the "
                f"whole: ipu.optimizers.{kind}(optax.chain(...))."
            )
        if name in ("apply_gradients", "compute_gradients", "get_gradients"):
            raise AttributeError(
                f"{type(self).__name__} has no {name}: a training step is `minimize(loss)`, or the "
                "optimizer_function of a pipeline. What was done between gradients and update is part of "
                "the optimizer: MapGradientOptimizer changes each micro-batch's gradients, "
                "optax.chain(...) those of an update, and OutfeedOptimizer shows them."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def minimize(
        self,
        loss: jax.Array,
        global_step: GlobalStep | None = None,
        var_list: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Operation:
        """Records a training step, which runs whether or not its operation is returned.

        Call it in the body of a loop, or in a compiled function without loops and pipelines.

        A body may have several training steps, each with its own variables in `var_list`, as in adversarial
        training. Each loss then only affects its own variables. All gradients are taken at the values
        before the iteration, and the state and the count have the first step's name.

        In the `model_fn` of an `IPUEstimator` the operation is the specification's `train_op`.

        Args:
          loss: a traced floating-point scalar.
          global_step: None or `get_global_step()`, which mean the same in a loop: the session counts weight
            updates. In the `model_fn` of an estimator, which counts steps itself, only None.
          var_list: full names of the variables to train; None: all trainable variables that the body has
            used so far.
          name: the name of the optimizer's state; by default the optimizer's name. A second training step
            with this name in a program gets the suffix `_1`.

        Returns:
          The operation.

        Raises:
          RuntimeError: it is called elsewhere.
          TypeError: the loss is a tuple or another structure.
          ValueError: the loss is not a scalar, there is nothing to train, or `var_list` names a variable
            that cannot be trained.
          NotImplementedError: the body has another training step that cannot be combined with it.
        """
        subject = f"{type(self).__name__}.minimize"
        collected = _minimized.get()
        if collected is None:  # raises elsewhere than in a loop
            body = current_body(subject, "A pipeline gets its optimizer by `optimizer_function`.")
        if collected is not None and global_step is not None:
            raise ValueError(
                "minimize: global_step must be None in the model_fn of an estimator, which counts the "
                f"global step by itself; got {global_step!r}."
            )
        if global_step is not None and not isinstance(global_step, GlobalStep):
            raise ValueError(
                "minimize: global_step must be None or get_global_step(), since the session counts weight "
                f"updates (Session.update_count); got {global_step!r}."
            )
        loss = as_loss(loss, "minimize: loss", "Enqueue other values on an outfeed queue.")
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"minimize: loss must be a floating-point scalar; got {loss.dtype.name}{list(loss.shape)}. "
                "Reduce it, for example with jnp.mean."
            )
        if collected is not None:
            operation = Operation(name or self.name)
            collected.append(MinimizeCall(self, loss, var_list, operation))
            return operation
        unwrapped = unwrap(self)
        accumulation = unwrapped.accumulation or Accumulation()
        if unwrapped.has_outfeeds:
            raise ValueError(
                "minimize: an OutfeedOptimizer is for pipelines. In the body of a loop, enqueue what "
                "jax.grad gives, or the change of a variable."
            )
        step_name = record_training_step(
            body,
            loss,
            unwrapped.transformation,
            var_list,
            name=name or self.name,
            num_mini_batches=accumulation.num_mini_batches,
            reduction=Reduction[accumulation.reduction_method.name],
            accumulator_dtype=accumulation.dtype,
            gradient_maps=unwrapped.gradient_maps,
            offloads_state=accumulation.offloads_state,
            shards_state=accumulation.shards_state,
            averages_replicas=unwrapped.averages_replicas,
        )
        return Operation(step_name)

    @abc.abstractmethod
    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Returns the combined effect of this optimizer around one whose effect is `inner`.

        Raises:
          ValueError: they do not go together.
        """


def unwrap(opt: Any) -> OptimizerEffect:
    """Looks through a nest of optimizers."""
    return opt.wrap(unwrap(opt.wrapped)) if isinstance(opt, Optimizer) else OptimizerEffect(opt)


class CrossReplicaOptimizer(Optimizer):
    """An optimizer that averages gradients over replicas, and so makes a program run in replicas.

    A pipeline or loop of S IPUs with this optimizer has one replica per S IPUs that `IPUConfig` selects.
    The gradients of a weight update are accumulated in each replica and averaged over the replicas once.
    The wrapped optimizer gets the means, so variables stay equal in all replicas. Nested optimizers may
    have it at any level.

    Example:
      >>> def optimizer_function(loss):
      ...     optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.01))
      ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)
    """

    def __init__(self, opt: Any, name: str = "CrossReplicaOptimizer") -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          name: the name of the optimizer's state.

        Raises:
          TypeError: `opt` is not an optimizer.
        """
        super().__init__(opt, name)

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the mean over replicas."""
        return averaged(inner)


def averaged(inner: OptimizerEffect) -> OptimizerEffect:
    """Adds the mean over replicas to the effect of nested optimizers."""
    if inner.averages_replicas:
        raise ValueError("An optimizer can average gradients over replicas only once; two are nested.")
    return dataclasses.replace(inner, averages_replicas=True)


class GradientAccumulationOptimizerV2(Optimizer):
    """Accumulates gradients over several iterations, and then updates the weights.

    The session counts the iterations: a later run can complete an accumulation that a run has started.

    Example:
      >>> def body(x):
      ...     loss = jnp.mean(layers.Dense(1)(x) ** 2)
      ...     optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.01), 4)
      ...     return x, optimizer.minimize(loss)
      >>> def model(x):
      ...     return ipu.loops.repeat(8, body, [x])  # two weight updates
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([4, 8], np.float32)])
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str | None = None,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: an Optax transformation, or another of these optimizers.
          num_mini_batches: iterations per weight update, at least 1.
          offload_weight_update_variables: whether the optimizer's state is in host memory between weight
            updates; None is False.
          replicated_optimizer_state_sharding: whether each replica keeps a part of the optimizer's state
            and updates its part of the weights. With one replica, the run warns that it has no effect.
          dtype: the dtype of the accumulators: None for the variable's dtype, a dtype, or a function from a
            variable (with `name`, `shape` and `dtype`) to a dtype. The optimizer, with its state, uses the
            wider of this dtype and the variable's: with float32, a float16 model has a float32 Adam.
          reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients, or its name.
          name: the name of the optimizer's state; by default the name of the class.

        Raises:
          TypeError, ValueError: an argument has a wrong value.
        """
        super().__init__(opt, name or type(self).__name__)
        num_mini_batches = check_integer("num_mini_batches", num_mini_batches, most=MAX_INT32 - 1)
        if offload_weight_update_variables not in (None, False, True):
            raise TypeError(
                "offload_weight_update_variables must be True, False or None; got "
                f"{offload_weight_update_variables!r}."
            )
        if replicated_optimizer_state_sharding not in (False, True):
            raise TypeError(
                "replicated_optimizer_state_sharding must be True or False; got "
                f"{replicated_optimizer_state_sharding!r}."
            )
        if dtype is not None and not callable(dtype):
            check_float_dtype(dtype, "dtype")
        self._accumulation = Accumulation(
            num_mini_batches=num_mini_batches,
            dtype=dtype,
            reduction_method=GradientAccumulationReductionMethod.parse(reduction_method),
            offloads_state=bool(offload_weight_update_variables),
            shards_state=bool(replicated_optimizer_state_sharding),
        )

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the accumulation."""
        if inner.accumulation is not None:
            raise ValueError("An optimizer can accumulate gradients only once; two are nested.")
        return dataclasses.replace(inner, accumulation=self._accumulation)


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """A `GradientAccumulationOptimizerV2` that is also a `CrossReplicaOptimizer`.

    Use it in the bodies of loops. Pipelines accumulate gradients anyway, and take a
    `CrossReplicaOptimizer`.

    Example:
      >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(
      ...     optax.sgd(0.01), num_mini_batches=16
      ... )
    """

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the accumulation, and the mean over replicas."""
        return averaged(super().wrap(inner))


class MapGradientOptimizer(Optimizer):
    """Applies a function to each gradient, before gradients are accumulated.

    Example:
      >>> def add_weight_decay(gradient, variable):
      ...     return gradient + 1e-4 * variable
      >>> optimizer = ipu.optimizers.MapGradientOptimizer(optax.sgd(0.01), add_weight_decay)
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
          name: the name of the optimizer's state.

        Raises:
          TypeError: an argument has a wrong type.
        """
        super().__init__(wrapped_optimizer, name)
        check_function("gradient_mapping_function", gradient_mapping_function)
        self.gradient_mapping_function = gradient_mapping_function

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the function, behind those of inner optimizers."""
        maps = (*inner.gradient_maps, self.gradient_mapping_function)
        return dataclasses.replace(inner, gradient_maps=maps)


class OutfeedOptimizerMode(enum.Enum):
    """AFTER_COMPUTE: each micro-batch's gradients. BEFORE_APPLY: the gradients that the optimizer gets."""

    AFTER_COMPUTE = "after_compute"
    BEFORE_APPLY = "before_apply"


class OutfeedOptimizer(Optimizer):
    """Enqueues the gradients of a pipeline to an outfeed, as a dict by full name.

    In mode AFTER_COMPUTE these are each micro-batch's gradients as they are accumulated: mapped by a
    `MapGradientOptimizer`, and without the loss scale. In mode BEFORE_APPLY they are the accumulated
    gradients that the wrapped Optax transformation gets. They are copied to the host, which takes time and
    memory.

    Example:
      >>> gradients_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
      >>> optimizer = ipu.optimizers.OutfeedOptimizer(
      ...     optax.sgd(0.01), gradients_queue, ipu.optimizers.OutfeedOptimizerMode.AFTER_COMPUTE
      ... )
    """

    def __init__(
        self,
        wrapped_optimizer: Any,
        outfeed_queue: IPUOutfeedQueue,
        outfeed_optimizer_mode: OutfeedOptimizerMode = OutfeedOptimizerMode.BEFORE_APPLY,
        variable_names: Sequence[str] | None = None,
        name: str = "OutfeedOptimizer",
    ) -> None:
        """Wraps an optimizer.

        Args:
          wrapped_optimizer: an Optax transformation, or another of these optimizers.
          outfeed_queue: the queue for gradients, used for nothing else.
          outfeed_optimizer_mode: the mode; by default BEFORE_APPLY.
          variable_names: full names of the variables whose gradients are enqueued; None: all trained ones.
          name: the name of the optimizer's state.

        Raises:
          TypeError, ValueError: an argument has a wrong value. A name that is not trained raises ValueError
            when the pipeline is compiled.
        """
        super().__init__(wrapped_optimizer, name)
        if not isinstance(outfeed_queue, IPUOutfeedQueue):
            raise TypeError(
                f"outfeed_queue must be an IPUOutfeedQueue; got {type(outfeed_queue).__name__}. Of an "
                "object that filters what goes to a queue, pass the queue, and variable_names."
            )
        check_member("outfeed_optimizer_mode", outfeed_optimizer_mode, OutfeedOptimizerMode)
        if variable_names is not None:
            is_list = isinstance(variable_names, (list, tuple)) and all(
                isinstance(variable, str) for variable in variable_names
            )
            if not is_list or not variable_names:
                raise ValueError(
                    f"variable_names must be a list of full names, or None; got {variable_names!r}."
                )
        is_own = getattr(outfeed_queue.enqueue, "__func__", None) is IPUOutfeedQueue.enqueue
        if outfeed_optimizer_mode is OutfeedOptimizerMode.AFTER_COMPUTE and not is_own:
            raise TypeError(
                "OutfeedOptimizer: with AFTER_COMPUTE outfeed_queue must have IPUOutfeedQueue's own "
                f"`enqueue`; that of {type(outfeed_queue).__name__} would not be called. Choose variables "
                "by variable_names."
            )
        self.outfeed_queue = outfeed_queue
        self.mode = outfeed_optimizer_mode
        self.variable_names = None if variable_names is None else tuple(dict.fromkeys(variable_names))

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the outfeed."""
        if self.mode is OutfeedOptimizerMode.AFTER_COMPUTE:
            watched = GradientOutfeed(self.outfeed_queue, self.variable_names)
            return dataclasses.replace(inner, watched=(*inner.watched, watched), has_outfeeds=True)
        innermost = _enqueue_gradients(inner.innermost, self.outfeed_queue, self.variable_names)
        return dataclasses.replace(inner, innermost=innermost, has_outfeeds=True)


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
    """Full names of the variables whose gradients an `OutfeedOptimizer` takes."""
    trained_names = sorted(name for name in trained if not is_internal(name))
    for name in names or ():
        if name not in trained_names:
            raise ValueError(
                f"OutfeedOptimizer: variable_names has {name!r}, which is not trained. Trained are: "
                f"{', '.join(trained_names)}."
            )
    return trained_names if names is None else list(names)


class LossScalingOptimizer(Optimizer):
    """Multiplies the loss by a scale, so that small float16 gradients do not become zero.

    The update divides gradients by the scale again, in at least 32 bits, in which the wrapped optimizer
    runs. If a gradient of any stage is not finite, the update is skipped in all stages: variables and the
    wrapped optimizer's state do not change. The scale is part of the optimizer's state. Reported losses,
    and gradients that a `MapGradientOptimizer` gets, are not scaled; the map cannot hide infinite or NaN
    gradients. The backward starts in the loss's dtype: in float16, scales are at most 65504.

    Example:
      >>> optimizer = ipu.optimizers.LossScalingOptimizer(optax.adam(1e-3), initial_scale=2.0**12)
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
        """Wraps an optimizer. All other arguments are those of `CrossReplicaOptimizer`.

        Args:
          initial_scale: the first scale, a finite number above 0. Powers of two cause no rounding.
          dynamic: whether the scale changes. False: it is constant, but updates are still skipped.
          growth_interval: the number of updates with finite gradients, at least 1, after which the scale is
            multiplied by `factor`.
          factor: a number above 1. Gradients that are not finite divide the scale by it, down to 1.

        Raises:
          TypeError, ValueError: an argument has a wrong value.
        """
        super().__init__(opt, name)
        for argument, value, above in (("initial_scale", initial_scale, 0), ("factor", factor, 1)):
            if not is_number(value):
                raise TypeError(f"{argument} must be a number; got {value!r}.")
            if not above < value < np.finfo(np.float32).max:
                raise ValueError(f"{argument} must be finite in float32 and above {above}; got {value}.")
        if not isinstance(dynamic, bool):
            raise TypeError(f"dynamic must be True or False; got {dynamic!r}.")
        growth_interval = check_integer("growth_interval", growth_interval)
        self._settings = (float(initial_scale), dynamic, growth_interval, float(factor))

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Adds the scale, around the transformation."""
        if inner.scaled is not None:
            raise ValueError("An optimizer can scale the loss only once; two are nested.")

        def scaled(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
            return scale_loss(transformation, *self._settings)

        return dataclasses.replace(inner, scaled=scaled)


class AveragedWeightsState(NamedTuple):
    """The wrapped optimizer's state, and the averages, like the variables in at least float32."""

    inner: Any
    average: Any


def with_averaged_weights(
    inner: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the weights, in its state as `average`.

    The averages start as the weights. After each weight update they become `decay` times the old averages
    plus 1 - `decay` times the new weights, as in `tf.train.ExponentialMovingAverage`. The update itself is
    not changed. Use `Session.weights_of("average")` to evaluate with them.

    Example:
      >>> optimizer = ipu.optimizers.with_averaged_weights(optax.adamw(1e-3), decay=0.999)

    Args:
      inner: the optimizer.
      decay: at least 0, which keeps the last weights, and less than 1.

    Raises:
      TypeError: `inner` is not an `optax.GradientTransformation`.
      ValueError: `decay` is out of range.
    """
    if not isinstance(inner, optax.GradientTransformation) or isinstance(inner, LossScaled):
        raise TypeError(
            "with_averaged_weights: the optimizer must be an optax.GradientTransformation, for example "
            f"optax.sgd(0.01); got {describe_other_optimizer(inner)}. It goes inside of ipu.optimizers."
        )
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"with_averaged_weights: decay must be a number from 0 to below 1; got {decay!r}.")
    wrapped = optax.with_extra_args_support(inner)

    def init(params: Any) -> AveragedWeightsState:
        return AveragedWeightsState(wrapped.init(params), jax.tree.map(_widen, params))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, inner_state = wrapped.update(gradients, state.inner, params, **extra)
        new = jax.tree.map(_widen, optax.apply_updates(params, changes))
        share = 1 - float(decay)
        average = jax.tree.map(lambda old, now: old + share * (now - old), state.average, new)
        return changes, AveragedWeightsState(inner_state, average)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.promote_types(value.dtype, jnp.float32))
