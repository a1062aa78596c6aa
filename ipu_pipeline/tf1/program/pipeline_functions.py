"""Functions of a pipeline as the engine takes them: first stage with global step, `optimizer_function`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import optax

from ipu_pipeline.engine import update_count
from ipu_pipeline.engine.fronts import (
    GradientMap,
    GradientTarget,
    check_signature,
    current_frame,
    describe_other_optimizer,
    tracing_again,
    weigh,
)
from ipu_pipeline.tf1.graph import at_run_begin, is_internal, split_steps
from ipu_pipeline.tf1.optimizers.wrappers import choose_trained, unwrap

_HAS_STEPS = "_computes_global_steps"  # an attribute of stages; see `keep_steps`


def give_steps(inputs: Any, stages: Sequence[Any], trains: bool) -> tuple[Any, Sequence[Any], int | None]:
    """Makes the first stage compute the global step, and values computed from it, in `inputs`.

    Inputs stay the same during a run. So the stage is given the number of weight updates before the run,
    which the session fills in, in place of the first of these inputs.

    Returns:
      The inputs of the stages that are returned; the stages; and the position of the number of weight
      updates before the run among the leaves of the inputs, None if the global step is not among them.
    """
    split = split_steps(inputs)
    if split is None:
        return inputs, stages, None

    def wrap(stage: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(stage, _HAS_STEPS):
            return stage

        @functools.wraps(stage)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            begin, symbols = split.put_back(arguments[: split.number])
            with at_run_begin(begin if trains else update_count()):
                values = jax.tree.map(lambda leaf: leaf, symbols)  # their values are their leaves
            return stage(*values, *arguments[split.number :], **named)

        return wrapped

    first = stages[0]
    wrapped = [wrap(stage) for stage in first] if isinstance(first, (list, tuple)) else wrap(first)
    return split.inputs, [wrapped, *stages[1:]], split.position


def keep_steps(stage: Callable[..., Any], position: int | None) -> Callable[..., Any]:
    """Marks a first stage that was made of one of `give_steps`, with the same inputs: it computes them."""
    if position is None:
        return stage

    @functools.wraps(stage)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return stage(*arguments, **named)

    setattr(wrapped, _HAS_STEPS, True)
    return wrapped


# The optimizer function.

OptimizerFunction: TypeAlias = "Callable[..., OptimizerFunctionOutput]"


@dataclass
class OptimizerFunctionOutput:
    """The result of an `optimizer_function`.

    Attributes:
      opt: an `optax.GradientTransformation`, or a `CrossReplicaOptimizer`, `MapGradientOptimizer` or
        `LossScalingOptimizer` of `optimizers` around one.
      loss: a scalar.
      compute_gradients_args: [names] trains only those variables (full names).
      compute_gradients_kwargs: {"var_list": names} does the same.
      apply_gradients_args: only empty, because Optax takes extra arguments by keyword.
      apply_gradients_kwargs: extra arguments of the optimizer's `update`.
      loss_weight: None, or the number of items that the loss is a sum over, such as tokens. The gradients
        of all micro-batches of a weight update are then divided by the sum of their weights, whatever the
        reduction. So they equal the gradients of one large batch; if lengths differ, the mean of the
        micro-batches' means would not. If the sum is 0, gradients are 0.

    Raises:
      TypeError: a field does not have its type, or an argument that has no position is given by position.
      ValueError: the optimizer accumulates, or gets an argument that it does not have; or there
        is nothing to train.
    """

    opt: Any
    loss: Any
    compute_gradients_args: Sequence[Any] | None = None
    compute_gradients_kwargs: dict[str, Any] | None = None
    apply_gradients_args: Sequence[Any] | None = None
    apply_gradients_kwargs: dict[str, Any] | None = None
    loss_weight: Any = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("compute_gradients_args", "apply_gradients_args"):
            _check_type(name, getattr(self, name), (list, tuple), "a list or tuple")
        for name in ("compute_gradients_kwargs", "apply_gradients_kwargs"):
            _check_type(name, getattr(self, name), Mapping, "a dict")
        if self.apply_gradients_args:
            raise TypeError(
                "OptimizerFunctionOutput: apply_gradients_args must be empty, since an Optax update takes "
                "extra arguments by keyword; give apply_gradients_kwargs. Got "
                f"{list(self.apply_gradients_args)!r}."
            )
        num_args = len(self.compute_gradients_args or ())
        if num_args > 1 or (num_args and "var_list" in (self.compute_gradients_kwargs or {})):
            raise TypeError(
                "OptimizerFunctionOutput: compute_gradients_args and compute_gradients_kwargs may have one "
                f"argument, `var_list`, once; got {list(self.compute_gradients_args or ())!r} and "
                f"{self.compute_gradients_kwargs!r}."
            )
        unknown = set(self.compute_gradients_kwargs or ()) - {"var_list"}
        if unknown:
            raise ValueError(
                "OptimizerFunctionOutput: compute_gradients_kwargs may only have `var_list`; got "
                f"{', '.join(sorted(map(str, unknown)))}."
            )
        if isinstance(self.var_list, str):
            raise ValueError(
                "OptimizerFunctionOutput: var_list must be a list of full names; got the string "
                f"{self.var_list!r}."
            )
        _check_type("var_list", self.var_list, Collection, "a list of full names")
        if self.var_list is not None and len(self.var_list) == 0:
            raise ValueError("No variables to optimize: var_list is empty; None trains all.")
        unwrapped = unwrap(self.opt)
        if self.loss_weight is not None and unwrapped.gradient_map is not None:
            raise ValueError(
                "OptimizerFunctionOutput: loss_weight and a MapGradientOptimizer cannot be combined: "
                "gradients are mapped before they are accumulated, and divided by the weights afterwards."
            )
        if not isinstance(unwrapped.transformation, optax.GradientTransformation):
            raise TypeError(
                "OptimizerFunctionOutput: opt must be an optax.GradientTransformation, for example "
                f"optax.sgd(0.01); got {describe_other_optimizer(self.opt)}."
            )
        if unwrapped.accumulation is not None:
            raise ValueError(
                "OptimizerFunctionOutput: opt is a GradientAccumulationOptimizerV2, but a pipeline "
                "accumulates by itself. Give its inner optimizer, in a CrossReplicaOptimizer for several "
                "replicas, and set gradient_accumulation_count and reduction_method."
            )

    @property
    def var_list(self) -> Sequence[str] | None:
        """The full names of the variables to train; None: all."""
        if self.compute_gradients_args:
            names: Sequence[str] = self.compute_gradients_args[0]
            return names
        return (self.compute_gradients_kwargs or {}).get("var_list")


class LossAndTransformation:
    """An `optimizer_function`, split for the engine into a loss and a transformation."""

    def __init__(self, function: OptimizerFunction) -> None:
        """Takes the function; does not call it yet."""
        self._function = function
        self._var_list: Sequence[str] | None = None
        self._gradient_map: GradientMap | None = None
        self._gradient_targets: Sequence[GradientTarget] = ()
        self._averages_replicas = False

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss, computed from what the last stage returns."""
        output = self._call(*args, **kwargs)
        names = current_frame("the optimizer_function").names
        var_list = output.var_list
        self._var_list = None if var_list is None else [names.trained_name(name) for name in var_list]
        unwrapped = unwrap(output.opt)
        self._gradient_map = unwrapped.gradient_map
        self._averages_replicas = unwrapped.averages_replicas
        self._gradient_targets = [
            GradientTarget(watched.queue, functools.partial(_choose, watched.variable_names))
            for watched in unwrapped.watched
        ]
        if output.loss_weight is None:
            return output.loss
        return weigh(output.loss, output.loss_weight, "OptimizerFunctionOutput: loss_weight")

    def transformation(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the Optax transformation and extra arguments of its `update`, from the same values."""
        # The loss is traced again and dropped, so its variables may be asked for again.
        with tracing_again("the optimizer_function"):
            output = self._call(*args, **kwargs)
        return unwrap(output.opt).transformation, dict(output.apply_gradients_kwargs or {})

    def trained(self, variables: object) -> Sequence[str] | None:
        """The variables to train, once the loss has been traced; None: all."""
        del variables
        return self._var_list

    def gradient_map(self) -> GradientMap | None:
        """The function that maps each micro-batch's gradients, once the loss has been traced."""
        return self._gradient_map

    def gradient_targets(self) -> Sequence[GradientTarget]:
        """The queues that each micro-batch's gradients are enqueued to, once the loss has been traced."""
        return self._gradient_targets

    @property
    def averages_replicas(self) -> bool:
        """Whether gradients are averaged over replicas, once the loss has been traced."""
        return self._averages_replicas

    def _call(self, *args: Any, **kwargs: Any) -> OptimizerFunctionOutput:
        if kwargs and not _takes(self._function, **kwargs) and _takes(self._function, kwargs):
            args, kwargs = (kwargs,), {}  # the dict as it is, as Graphcore passes it
        check_signature(
            self._function, (args, kwargs), "what the last stage returns", "the optimizer_function"
        )
        output = self._function(*args, **kwargs)
        if not isinstance(output, OptimizerFunctionOutput):
            raise TypeError(
                "optimizer_function must return a pipelining_ops.OptimizerFunctionOutput; it returned "
                f"{type(output).__name__}."
            )
        return output


def _takes(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _choose(names: Sequence[str] | None, trained: Iterable[str]) -> list[str]:
    return choose_trained(names, (name for name in trained if not is_internal(name)))


def _check_type(name: str, value: Any, kinds: Any, described: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"OptimizerFunctionOutput: {name} must be {described}; got {value!r}.")
