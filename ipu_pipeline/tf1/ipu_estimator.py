"""`IPUEstimator`: training, evaluation and prediction of a model on one IPU, or on a replica per IPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.tf1.estimator.base import Estimator
from ipu_pipeline.tf1.estimator.models import IPUEstimatorSpec, build_model_program, check_model_function
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, ModeKeys
from ipu_pipeline.tf1.ipu_run_config import RunConfig

__all__ = ["IPUEstimator", "IPUEstimatorSpec"]

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

        Args:
          model_fn: a function of `features` and any of `labels`, `mode`, `params` and `config` that returns
            an `IPUEstimatorSpec`. Elements of the data set are tuples of features and labels, or only
            features; labels are then None, as always in prediction. A dict of features is passed as a dict.
            All modes share variables of the same name, through checkpoints.
          model_dir: the folder of checkpoints and scalars. None: the `model_dir` of `config`; if that is
            None, too, a temporary folder.
          config: a `RunConfig` with `num_shards` 1; required.
          params: parameters for `model_fn` and the `input_fn`s.
          warm_start_from: same as for `IPUPipelineEstimator`.
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
            if not is_int(size, 1) or size % num_replicas:
                raise ValueError(
                    f"IPUEstimator: {name} must be a multiple of num_replicas ({num_replicas}) above 0; "
                    f"got {size!r}."
                )
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
