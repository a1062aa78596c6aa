"""Optimizers that change or report the gradients of micro-batches."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import optax

from ipu_pipeline.engine.fronts import GradientMap
from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.tf1.graph.internal_variables import is_internal
from ipu_pipeline.tf1.optimizers.base import Optimizer, Unwrapped, Watched

__all__ = ["MapGradientOptimizer", "OutfeedOptimizer", "OutfeedOptimizerMode", "choose_trained"]


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
        if not callable(gradient_mapping_function):
            raise TypeError(
                f"gradient_mapping_function must be a function; got {gradient_mapping_function!r}."
            )
        self.gradient_mapping_function = gradient_mapping_function

    def wrap(self, inner: Unwrapped) -> Unwrapped:
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
        if not isinstance(outfeed_optimizer_mode, OutfeedOptimizerMode):
            raise TypeError(
                f"outfeed_optimizer_mode must be one of {list_members(OutfeedOptimizerMode)}; got "
                f"{outfeed_optimizer_mode!r}."
            )
        if variable_names is not None:
            is_list = isinstance(variable_names, (list, tuple)) and all(
                isinstance(one, str) for one in variable_names
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

    def wrap(self, inner: Unwrapped) -> Unwrapped:
        """Adds the outfeed."""
        if self.mode is OutfeedOptimizerMode.AFTER_COMPUTE:
            own = Watched(self.outfeed_queue, self.variable_names)
            return dataclasses.replace(inner, watched=(*inner.watched, own), has_outfeeds=True)
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
    known = sorted(name for name in trained if not is_internal(name))
    for name in names or ():
        if name not in known:
            raise ValueError(
                f"OutfeedOptimizer: variable_names has {name!r}, which is not trained. Trained are: "
                f"{', '.join(known)}."
            )
    return known if names is None else list(names)


explain_missing(__name__)
