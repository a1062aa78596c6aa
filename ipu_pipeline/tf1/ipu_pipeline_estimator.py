"""`IPUPipelineEstimator`: training, evaluation and prediction of a pipeline, with checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.tf1.estimator.base import Estimator
from ipu_pipeline.tf1.estimator.programs import (
    EstimatorProgram,
    IPUPipelineEstimatorSpec,
    ModeKeys,
    build_estimator_program,
    check_model_fn,
)
from ipu_pipeline.tf1.ipu_run_config import RunConfig

__all__ = ["IPUPipelineEstimator", "IPUPipelineEstimatorSpec", "ModeKeys"]


class IPUPipelineEstimator(Estimator):
    """Trains, evaluates and predicts with a pipeline.

    A step is a micro-batch of each replica, and `global_step` counts them. Messages go to the logger
    "ipu_pipeline.estimator"; `train` describes the output on a terminal.

    Example:
      >>> def model_fn(mode, params):
      ...     def stage1(x, targets):
      ...         return layers.Dense(16, activation="relu")(x), targets
      ...     def stage2(x, targets):
      ...         return jnp.mean((layers.Dense(2)(x) - targets) ** 2)
      ...     def optimizer_function(loss):
      ...         return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(params["rate"]), loss)
      ...     return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
      ...         mode,
      ...         computational_stages=[stage1, stage2],
      ...         gradient_accumulation_count=4,
      ...         optimizer_function=optimizer_function,
      ...         eval_metrics_fn=lambda loss: {"loss": loss},
      ...     )
      >>> def input_fn():
      ...     return [(np.ones([4, 8], np.float32), np.zeros([4, 2], np.float32))] * 8
      >>> options = ipu.config.IPUConfig()
      >>> options.auto_select_ipus = 2
      >>> ipus = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=8, ipu_options=options, num_shards=2)
      >>> config = ipu.ipu_run_config.RunConfig(ipu_run_config=ipus)
      >>> estimator = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(
      ...     model_fn, "model", config, params={"rate": 0.1}
      ... )
      >>> _ = estimator.train(input_fn, steps=8)  # micro-batches: two weight updates
      >>> sorted(estimator.evaluate(input_fn, steps=8))
      ['global_step', 'loss']
    """

    def __init__(
        self,
        model_fn: Callable[..., IPUPipelineEstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Checks the arguments. It calls no function, and creates no folder except a temporary `model_dir`.

        Args:
          model_fn: a function of any of `mode`, `params` and `config` that returns an
            `IPUPipelineEstimatorSpec`. All modes share variables of the same name, through checkpoints.
          model_dir: the folder of checkpoints and scalars. None: the `model_dir` of `config`; if that is
            None, too, a temporary folder.
          config: a `RunConfig`; required.
          params: parameters for `model_fn` and the `input_fn`s.
          warm_start_from: a checkpoint, or another estimator's `model_dir`, with the initial variables of
            training if `model_dir` has no checkpoint. It must have all variables of the model. Its
            optimizer state, steps and data position are not used.

        Raises:
          TypeError: `model_fn` is not a function.
          ValueError: an argument has a wrong value.
        """
        check_model_fn(model_fn)
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def _build(self, mode: ModeKeys, dataset: Any, is_exported: bool = False) -> EstimatorProgram:
        params = self._params_of(mode)
        return build_estimator_program(self._model_fn, mode, params, self._config, dataset, is_exported)


explain_missing(__name__)
