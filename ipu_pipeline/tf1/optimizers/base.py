"""Optimizers around an Optax transformation: the combined effect of nested ones, and `minimize`."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ipu_pipeline.engine import Reduction
from ipu_pipeline.engine.fronts import (
    GradientMap,
    current_body,
    describe_other_optimizer,
    join_gradient_maps,
    record_training_step,
)
from ipu_pipeline.ground.shapes import as_loss
from ipu_pipeline.queues.operations import Operation
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.graph.symbols import GlobalStep

__all__ = [
    "Accumulation",
    "Minimized",
    "Optimizer",
    "Unwrapped",
    "Watched",
    "collecting_minimized",
    "unwrap",
]


@dataclass(frozen=True, eq=False)
class Watched:
    """Where gradients of micro-batches go, and of which variables; None: of all."""

    queue: IPUOutfeedQueue
    variable_names: tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class Accumulation:
    """How an optimizer accumulates.

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
class Unwrapped:
    """What a nest of optimizers amounts to.

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
    watched: tuple[Watched, ...] = ()
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
class Minimized:
    """A call of `minimize` in an estimator's `model_fn`.

    Attributes:
      optimizer: whose.
      loss: a traced scalar.
      var_list: as given.
      operation: what it returned.
    """

    optimizer: Optimizer
    loss: jax.Array
    var_list: Sequence[str] | None
    operation: Operation


_minimized: contextvars.ContextVar[list[Minimized] | None] = contextvars.ContextVar(
    "minimized", default=None
)


@contextlib.contextmanager
def collecting_minimized() -> Iterator[list[Minimized]]:
    """Collects the calls of `minimize` in a `with` block, in which a `model_fn` is called."""
    found: list[Minimized] = []
    token = _minimized.set(found)
    try:
        yield found
    finally:
        _minimized.reset(token)


class Optimizer(abc.ABC):
    """What the optimizers here share."""

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
        what = f"{type(self).__name__}.minimize"
        collected = _minimized.get()
        if collected is None:  # raises elsewhere than in a loop
            body = current_body(what, "A pipeline gets its optimizer by `optimizer_function`.")
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
            collected.append(Minimized(self, loss, var_list, operation))
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
    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """What the optimizer amounts to, around one that amounts to `inner`.

        Raises:
          ValueError: they do not go together.
        """


def unwrap(opt: Any) -> Unwrapped:
    """Looks through a nest of optimizers."""
    return opt.wrap(unwrap(opt.wrapped)) if isinstance(opt, Optimizer) else Unwrapped(opt)
