"""`IPUEstimator`: training, evaluation and prediction of a model on one IPU, or on a replica per IPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import find_frame
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_function, is_int, require
from ipu_pipeline.ground.pytrees import as_loss
from ipu_pipeline.queues.outfeed import Operation
from ipu_pipeline.tf1.estimator.base import Estimator
from ipu_pipeline.tf1.estimator.programs import (
    EstimatorProgram,
    IPUPipelineEstimatorSpec,
    ModeKeys,
    apply_to,
    argument_names,
    call_with,
    check_known,
    compile_spec,
    make_infeed,
    parse_mode,
)
from ipu_pipeline.tf1.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.tf1.ipu_run_config import RunConfig
from ipu_pipeline.tf1.ipu_session_run_hooks import (
    IPULoggingTensorHook,
    SessionRunHook,
    check_hooks,
    collecting_logs,
    dropping_logs,
)
from ipu_pipeline.tf1.metrics import Update, mean
from ipu_pipeline.tf1.ops.pipelining_ops import OptimizerFunctionOutput
from ipu_pipeline.tf1.optimizers.wrappers import (
    Accumulation,
    MinimizeCall,
    Optimizer,
    OptimizerEffect,
    collecting_minimized,
    unwrap,
)

__all__ = [
    "IPUEstimator",
    "IPUEstimatorSpec",
]


_ARGUMENTS = ("features", "labels", "mode", "params", "config")


class IPUEstimatorSpec:
    """The result of the `model_fn` of an `IPUEstimator`.

    Attributes are the arguments, with hooks as tuples.
    """

    def __init__(
        self,
        mode: ModeKeys | str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        eval_metrics: tuple[Callable[..., Mapping[str, Any]], Any] | None = None,
        host_call: None = None,
        training_hooks: Sequence[SessionRunHook] | None = None,
        evaluation_hooks: Sequence[SessionRunHook] | None = None,
        prediction_hooks: Sequence[SessionRunHook] | None = None,
    ) -> None:
        """Checks the arguments. A mode needs its own; those of other modes may be given, and are not used.

        All other arguments are those of `IPUPipelineEstimatorSpec`.

        Args:
          predictions: to predict: an array [examples, ...], or a dict of such arrays.
          loss: to train and evaluate: a scalar. Its means are logged.
          train_op: to train: the result of an optimizer's `minimize`, of `ipu.optimizers` or its `tf1`.
            With a `GradientAccumulationOptimizerV2` a weight update takes its `num_mini_batches`
            micro-batches, by which `iterations_per_loop` must be divisible.
          eval_metric_ops: to evaluate: results of functions of `ipu.metrics` for traced arrays, by name.
            Their sums are computed on the IPU.
          eval_metrics: to evaluate, instead: a function and its arguments, arrays in a list or a dict. It
            is called on the host, with NumPy arrays stacked over micro-batches on a new first axis. It
            returns the same as an `eval_metrics_fn` (see `IPUPipelineEstimatorSpec`), without "loss".
          host_call: only None.

        Raises:
          NotImplementedError: there is a `host_call`.
          TypeError, ValueError: an argument is not usable.
        """
        self.mode = parse_mode("IPUEstimatorSpec", mode)
        if host_call is not None:
            raise NotImplementedError(
                "IPUEstimatorSpec: host_call is not there, since the weight update is part of the program. "
                "An optimizer of ipu.optimizers changes gradients, a CrossReplicaOptimizer averages them, "
                "and IPULoggingTensorHook or ipu.metric gives values to the host. Leave it out."
            )
        if eval_metrics is not None:
            is_pair = isinstance(eval_metrics, tuple) and len(eval_metrics) == 2
            is_call = is_pair and callable(eval_metrics[0]) and isinstance(eval_metrics[1], (list, dict))
            kind = "a tuple of a function and a list or dict of arrays"
            require(is_call, f"IPUEstimatorSpec: `eval_metrics` must be {kind}", eval_metrics, TypeError)
        if eval_metric_ops is not None and not isinstance(eval_metric_ops, dict):
            raise TypeError(
                "IPUEstimatorSpec: `eval_metric_ops` must be a dict of what functions of ipu.metrics "
                f"return; got {eval_metric_ops!r}."
            )
        for name, pair in (eval_metric_ops or {}).items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Update)):
                raise TypeError(
                    f"IPUEstimatorSpec: `eval_metric_ops` must have pairs (value, update) of ipu.metrics; "
                    f"{name!r} is {pair!r}. Other metrics are computed by the function of `eval_metrics`."
                )
        self.predictions = predictions
        self.loss = loss
        self.train_op = train_op
        self.eval_metric_ops = eval_metric_ops
        self.eval_metrics = eval_metrics
        self.training_hooks = check_hooks(training_hooks, "training_hooks")
        self.evaluation_hooks = check_hooks(evaluation_hooks, "evaluation_hooks")
        self.prediction_hooks = check_hooks(prediction_hooks, "prediction_hooks")

    @property
    def hooks(self) -> dict[str, tuple[SessionRunHook, ...]]:
        """The hooks, by argument."""
        names = ("training_hooks", "evaluation_hooks", "prediction_hooks")
        return {name: getattr(self, name) for name in names}


def check_model_function(model_fn: Any) -> None:
    """Raises if a function cannot be the `model_fn` of an `IPUEstimator`."""
    check_function("IPUEstimator: model_fn", model_fn)
    if "features" not in argument_names(model_fn):
        raise ValueError(
            f"model_fn ({getattr(model_fn, '__name__', model_fn)!r}) must include features argument. An "
            "IPUPipelineEstimator takes functions without it, which return stages."
        )
    check_known(model_fn, "model_fn", _ARGUMENTS)


class _AccumulationError(Exception):
    """The optimizer accumulates in another way than the pipeline that is being traced."""

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__(accumulation)
        self.accumulation = accumulation


class _WithoutAccumulation(Optimizer):
    """An optimizer whose accumulation is the pipeline's."""

    def __init__(self, opt: Optimizer) -> None:
        super().__init__(opt, opt.name)

    def wrap(self, inner: OptimizerEffect) -> OptimizerEffect:
        """Applies everything of it but the accumulation."""
        return dataclasses.replace(inner, accumulation=None)


class _Model:
    """A `model_fn` as the functions that a pipeline takes, and its results from when it was traced.

    It is the pipeline's only stage, and not a loop's body as Graphcore's: runs of loops do not end after
    any update, and hooks do not see single iterations. In training it is traced once more, in the weight
    update, where a rate that was computed in the stage has no value; all but its optimizer is dropped.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        mode: ModeKeys,
        params: Mapping[str, Any],
        config: RunConfig,
        accumulation: Accumulation,
    ) -> None:
        self._model_fn = model_fn
        self._mode = mode
        self._params = params
        self._config = config
        self._accumulation = accumulation
        self._step: MinimizeCall | None = None
        self._updates: dict[str, Update] = {}  # the updates of eval_metric_ops, without their sums
        self._metrics_function: Callable[..., Any] | None = None
        self.hooks: tuple[SessionRunHook, ...] = ()
        self.logged: list[int] = []  # the `id`s of the hooks

    def stage(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The only stage."""
        features, labels = _unpack(arguments, named)
        with collecting_logs(None) as logs:
            spec, self._step = self._call(features, labels)
        self.hooks = spec.hooks[_HOOKS[self._mode]]
        self.logged = self._check_logs(logs)
        returned: dict[str, Any] = {"logs": logs}
        if self._mode is ModeKeys.PREDICT:
            return {**returned, "outputs": spec.predictions}
        loss = _as_scalar(spec.loss)
        if self._mode is ModeKeys.EVAL:
            return {**returned, "outputs": {"loss": loss, "values": self._find_values(spec)}}
        assert self._step is not None
        values = {"features": features, "labels": labels, "minimized": self._step.loss}
        return {**returned, **values, "loss": loss}

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """The only stage of an exported program."""
        spec, _step = self._call(*_unpack(arguments, named))
        return spec.predictions

    def optimizer_function(
        self, features: Any, labels: Any, minimized: Any, **_unused: Any
    ) -> OptimizerFunctionOutput:
        """Returns the optimizer; in the weight update, with the values that its rate depends on there."""
        step = self._step
        frame = find_frame()
        if frame is not None and frame.is_traced_again:
            with dropping_logs():
                _spec, step = self._call(features, labels)
        assert step is not None
        by_name = None if step.var_list is None else {"var_list": step.var_list}
        return OptimizerFunctionOutput(
            _WithoutAccumulation(step.optimizer), minimized, compute_gradients_kwargs=by_name
        )

    def metrics(self, loss: Any, values: Any) -> dict[str, Any]:
        """Computes the metrics, as an `eval_metrics_fn` does, from what the stage enqueued."""
        results: dict[str, Any] = {"loss": mean(loss)}
        if self._metrics_function is None:
            for name, unsummed in self._updates.items():
                sums = {key: stack.sum(0, dtype=np.float64) for key, stack in values[name].items()}
                update = dataclasses.replace(unsummed, sums=sums)
                results[name] = (update.result(), update)
            return results
        metrics = apply_to(self._metrics_function, values)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"The function of `eval_metrics` must return a dict, but got {type(metrics)}.")
        if "loss" in metrics:
            raise ValueError(
                "The function of `eval_metrics` must not return 'loss': that is the mean of the "
                "specification's loss. Give the metric another name."
            )
        return {**results, **metrics}

    def _call(self, features: Any, labels: Any) -> tuple[IPUEstimatorSpec, MinimizeCall | None]:
        arguments = {"features": features, "mode": self._mode, "config": self._config}
        takes_labels = "labels" in argument_names(self._model_fn)
        if labels is not None and not takes_labels and self._mode is not ModeKeys.PREDICT:
            raise ValueError("model_fn does not take labels, but input_fn returns labels.")
        arguments["labels"] = None if self._mode is ModeKeys.PREDICT else labels
        with collecting_minimized() as steps:
            spec = call_with(self._model_fn, **arguments, params=dict(self._params))
        if not isinstance(spec, IPUEstimatorSpec):
            raise TypeError(f"`model_fn` must return IPUEstimatorSpec; got {type(spec).__name__}.")
        if spec.mode is not self._mode:
            raise ValueError(
                f"The `model_fn` was called with mode {self._mode}, and returned a specification for "
                f"{spec.mode}."
            )
        if self._mode is ModeKeys.PREDICT:
            if spec.predictions is None:
                _lacks("predictions", "predicting")
            return spec, None
        if spec.loss is None:
            _lacks("loss", "training" if self._mode is ModeKeys.TRAIN else "evaluating")
        if self._mode is ModeKeys.EVAL:
            self._check_metrics(spec)
            return spec, None
        return spec, self._find_step(spec, steps)

    def _find_step(self, spec: IPUEstimatorSpec, steps: Sequence[MinimizeCall]) -> MinimizeCall:
        if spec.train_op is None:
            _lacks("train_op", "training")
        matching = [step for step in steps if step.operation is spec.train_op]
        if not matching:
            kind = "another operation" if isinstance(spec.train_op, Operation) else repr(spec.train_op)
            raise TypeError(
                "IPUEstimatorSpec: train_op must be what the `minimize` of an optimizer of ipu.optimizers "
                f"returned in this call of the model_fn; got {kind}."
            )
        if len(steps) > 1:
            raise NotImplementedError(
                f"The `model_fn` called `minimize` {len(steps)} times; it may train with one optimizer, of "
                "one loss. optax.multi_transform makes one optimizer of several. With several losses, "
                "train in a Session: the body of ipu.loops.repeat may call minimize for each loss."
            )
        accumulation = unwrap(matching[0].optimizer).accumulation or Accumulation()
        present, required = dataclasses.astuple(self._accumulation), dataclasses.astuple(accumulation)
        # A dtype that is a function may be another one in each call.
        if [value for value in present if not callable(value)] != [v for v in required if not callable(v)]:
            raise _AccumulationError(accumulation)
        return matching[0]

    def _check_metrics(self, spec: IPUEstimatorSpec) -> None:
        if not spec.eval_metric_ops and spec.eval_metrics is None:
            raise ValueError(
                "IPUEstimatorSpec must contain either eval_metric_ops or eval_metrics when evaluating."
            )
        if spec.eval_metric_ops and spec.eval_metrics is not None:
            raise ValueError("IPUEstimatorSpec cannot contain both eval_metric_ops and eval_metrics.")
        if "loss" in (spec.eval_metric_ops or {}):
            raise ValueError(
                "IPUEstimatorSpec: eval_metric_ops must not have 'loss': that is the mean of the "
                "specification's loss. Give the metric another name."
            )

    def _find_values(self, spec: IPUEstimatorSpec) -> Any:
        """Returns the values that evaluation needs on the host, and notes what it computes from them."""
        if spec.eval_metrics is not None:
            self._metrics_function, values = spec.eval_metrics
            return values
        updates = {name: update for name, (_value, update) in (spec.eval_metric_ops or {}).items()}
        self._updates = {name: dataclasses.replace(update, sums={}) for name, update in updates.items()}
        return {name: dict(update.sums) for name, update in updates.items()}

    def _check_logs(self, logs: Mapping[int, Any]) -> list[int]:
        if logs.keys() - {id(hook) for hook in self.hooks}:
            raise RuntimeError(
                "IPULoggingTensorHook.log was called, but the hook is not among the specification's "
                f"{_HOOKS[self._mode]}."
            )
        return list(logs)


_HOOKS = {
    ModeKeys.TRAIN: "training_hooks",
    ModeKeys.EVAL: "evaluation_hooks",
    ModeKeys.PREDICT: "prediction_hooks",
}


def _lacks(name: str, doing: str) -> NoReturn:
    raise ValueError(f"IPUEstimatorSpec must contain {name} when {doing}.")


def _unpack(arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Features and labels of an element of the data set."""
    if named:
        return dict(named), None
    if len(arguments) not in (1, 2):
        raise ValueError(
            "An element of the data set must be features, or a tuple of features and labels: expected 1 or "
            f"2 elements, got {len(arguments)}."
        )
    features, *labels = arguments
    return features, labels[0] if labels else None


def _as_scalar(loss: Any) -> jax.Array:
    loss = as_loss(loss, "IPUEstimatorSpec: loss", "Other values may be eval_metric_ops.")
    if loss.size != 1 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"IPUEstimatorSpec: loss must be a floating-point scalar; got {loss.dtype.name}"
            f"{list(loss.shape)}. Reduce it, for example with jnp.mean."
        )
    return loss.reshape(())


def build_model_program(
    model_fn: Callable[..., Any],
    mode: ModeKeys,
    params: Mapping[str, Any],
    config: RunConfig,
    dataset: Any,
    is_exported: bool = False,
) -> EstimatorProgram:
    """Traces the `model_fn` of an `IPUEstimator` and compiles it. It does not start JAX's backend."""
    if config.ipu_run_config.num_shards != 1:
        raise ValueError(
            "IPUEstimator: `IPURunConfig.num_shards` must be 1, since the model is one stage on one IPU; "
            f"got {config.ipu_run_config.num_shards}. An IPUPipelineEstimator spreads a model over several."
        )
    infeed = make_infeed(dataset, config)
    accumulation = Accumulation()
    if is_exported:
        model = _Model(model_fn, mode, params, config, accumulation)
        spec = _as_pipeline_spec(model, mode, accumulation, {})
        return compile_spec(spec, config, infeed, {"computational_stages": [model.predict]}, True)
    while True:
        model = _Model(model_fn, mode, params, config, accumulation)
        try:
            program = _compile(model, mode, accumulation, config, infeed)
        except _AccumulationError as error:  # only tracing shows the count: trace again with it
            accumulation = error.accumulation
            continue
        that_log = []
        for hook in model.hooks:
            if isinstance(hook, IPULoggingTensorHook):
                if id(hook) in model.logged:
                    that_log.append(hook)
                else:
                    hook.forget_record()
        spec = _as_pipeline_spec(model, mode, accumulation, {_HOOKS[mode]: model.hooks})
        return dataclasses.replace(program, spec=spec, hooks_that_log=tuple(that_log), has_logs=True)


def _as_pipeline_spec(
    model: _Model, mode: ModeKeys, accumulation: Accumulation, hooks: Mapping[str, Any]
) -> IPUPipelineEstimatorSpec:
    return IPUPipelineEstimatorSpec(
        mode,
        [model.stage],
        gradient_accumulation_count=accumulation.num_mini_batches,
        eval_metrics_fn=model.metrics,
        optimizer_function=model.optimizer_function,
        device_mapping=[0],
        **hooks,
    )


def _compile(
    model: _Model, mode: ModeKeys, accumulation: Accumulation, config: RunConfig, infeed: Any
) -> EstimatorProgram:
    options: dict[str, Any] = {"computational_stages": [model.stage]}
    if mode is ModeKeys.TRAIN:
        options["optimizer_function"] = model.optimizer_function
        masked = dict.fromkeys(("features", "labels", "minimized"), True)
        options["outfeed_mask"] = {**masked, "loss": False, "logs": False}
        options["gradient_accumulation_dtype"] = accumulation.dtype
        options["offload_weight_update_variables"] = accumulation.offloads_state or None
        if accumulation.reduction_method is not GradientAccumulationReductionMethod.SUM:
            options["reduction_method"] = accumulation.reduction_method
    return compile_spec(_as_pipeline_spec(model, mode, accumulation, {}), config, infeed, options, False)


_BATCH_SIZE = "batch_size"


class IPUEstimator(Estimator):
    """Trains, evaluates and predicts with a model that has no stages.

    The `model_fn` is traced, so it computes with `jax.numpy` and the layers of `ipu.layers`. A step is a
    micro-batch of each replica, and `global_step` counts them. Checkpoints, data sets, hooks and logs are
    the same as for `IPUPipelineEstimator`.

    Example:
      >>> def model_fn(features, labels, mode, params):
      ...     logits = layers.Dense(10)(features)
      ...     if mode == ipu.ModeKeys.PREDICT:
      ...         return ipu.ipu_estimator.IPUEstimatorSpec(mode, predictions=logits)
      ...     loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
      ...     optimizer = ipu.optimizers.tf1.GradientDescentOptimizer(params["rate"])
      ...     return ipu.ipu_estimator.IPUEstimatorSpec(
      ...         mode,
      ...         loss=loss,
      ...         train_op=optimizer.minimize(loss) if mode == ipu.ModeKeys.TRAIN else None,
      ...         eval_metric_ops={"accuracy": ipu.metrics.accuracy(labels, jnp.argmax(logits, -1))},
      ...     )
      >>> def input_fn():
      ...     return [(np.ones([4, 8], np.float32), np.zeros(4, np.int32))] * 8
      >>> estimator = ipu.ipu_estimator.IPUEstimator(
      ...     model_fn, "whole_model", ipu.ipu_run_config.RunConfig(), params={"rate": 0.1}
      ... )
      >>> _ = estimator.train(input_fn, steps=8)
      >>> estimator.evaluate(input_fn, steps=2)["accuracy"]
      1.0
    """

    def __init__(
        self,
        model_fn: Callable[..., IPUEstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        """Checks the arguments. It calls no function, and creates no folder except a temporary `model_dir`.

        All other arguments are those of `IPUPipelineEstimator`.

        Args:
          model_fn: a function of `features` and any of `labels`, `mode`, `params` and `config` that returns
            an `IPUEstimatorSpec`. Elements of the data set are tuples of features and labels, or only
            features; labels are then None, as always in prediction. A dict of features is passed as a dict.
            All modes share variables of the same name, through checkpoints.
          config: a `RunConfig` with `num_shards` 1; required.
          train_batch_size: examples in a training step, over all replicas. In training,
            `params["batch_size"]` is this number divided by `num_replicas`, for the `input_fn`, which makes
            the batches.
          eval_batch_size: the same for evaluation.
          predict_batch_size: the same for prediction.

        Raises:
          TypeError: `model_fn` is not a function.
          ValueError: an argument has a wrong value.
        """
        check_model_function(model_fn)
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        sizes = {
            ModeKeys.TRAIN: ("train_batch_size", train_batch_size),
            ModeKeys.EVAL: ("eval_batch_size", eval_batch_size),
            ModeKeys.PREDICT: ("predict_batch_size", predict_batch_size),
        }
        num_replicas = self._config.ipu_run_config.num_replicas
        self._batch_sizes: dict[ModeKeys, int] = {}
        for mode, (name, size) in sizes.items():
            if size is None:
                continue
            rule = f"IPUEstimator: {name} must be a multiple of num_replicas ({num_replicas}) above 0"
            require(is_int(size, 1) and size % num_replicas == 0, rule, size)
            if _BATCH_SIZE in self._params:
                raise ValueError(
                    f"IPUEstimator: {name} is given, and so is params[{_BATCH_SIZE!r}], which it sets. "
                    "Leave out one of them."
                )
            self._batch_sizes[mode] = size // num_replicas

    def _build(self, mode: ModeKeys, dataset: Any, is_exported: bool = False) -> EstimatorProgram:
        params = self._params_of(mode)
        return build_model_program(self._model_fn, mode, params, self._config, dataset, is_exported)

    def _params_of(self, mode: ModeKeys) -> dict[str, Any]:
        size = self._batch_sizes.get(mode)
        return self.params if size is None else {**self.params, _BATCH_SIZE: size}


explain_missing(__name__)
