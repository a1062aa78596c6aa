"""The configuration of an estimator: `IPURunConfig` for the IPUs, `RunConfig` for the rest."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_int, is_int, is_real, require
from ipu_pipeline.tf1.config import IPUConfig

__all__ = ["IPURunConfig", "RunConfig"]

_SECONDS_BETWEEN_CHECKPOINTS = 600


@dataclass(frozen=True)
class IPURunConfig:
    """The IPU options of an estimator.

    Attributes:
      iterations_per_loop: micro-batches that each replica takes in one `Session.run`, a multiple of the
        pipeline's `gradient_accumulation_count`. `global_step` goes up by this number.
      ipu_options: an `IPUConfig`, which the estimator configures; needed for more than one IPU. It selects
        `num_replicas` times `num_shards` IPUs.
      num_replicas: the number of replicas that train, evaluate and predict, each with its own
        micro-batches. To train, several replicas need an `optimizers.CrossReplicaOptimizer`.
      num_shards: the number of IPUs of a replica; less than twice the number that its stages use.
      ordinal: the n of `/device:IPU:<n>`.
      prefetch_depth: the infeed's `prefetch_depth`; None for its default.
    """

    iterations_per_loop: int = 1
    ipu_options: IPUConfig | None = None
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("iterations_per_loop", "num_replicas", "num_shards", "ordinal"):
            check_int(f"IPURunConfig: {name}", getattr(self, name), 0 if name == "ordinal" else 1)
        num_devices = self.num_replicas * self.num_shards
        if num_devices > 1 and self.ipu_options is None:
            raise ValueError(
                "IPU configuration requires more than one device, but `ipu_options` is None: give it an "
                f"IPUConfig with auto_select_ipus = {num_devices}."
            )
        if self.ipu_options is None:
            return
        if not isinstance(self.ipu_options, IPUConfig):
            raise TypeError(f"ipu_options must be an IPUConfig instance; got {self.ipu_options!r}.")
        numbers = self.ipu_options.group_sizes
        if self.ordinal >= len(numbers):
            raise ValueError(
                f"Only {len(numbers)} device(s) available to choose from. You tried to pick a device at "
                f"ordinal {self.ordinal}"
            )
        if numbers[self.ordinal] != num_devices:
            raise ValueError(
                f"`IPURunConfig` configured with {num_devices} devices "
                f"({self.num_replicas} replicas times {self.num_shards} shards), but `ipu_options` "
                "configured "
                f"with {numbers[self.ordinal]} devices"
            )


@dataclass(frozen=True)
class RunConfig:
    """The configuration of an estimator. Counts of micro-batches are per replica.

    Attributes:
      ipu_run_config: an `IPURunConfig`.
      model_dir: the folder of checkpoints and scalars.
      tf_random_seed: the seed of initial values and random keys; None is 0.
      save_checkpoints_steps: micro-batches between checkpoints, which are saved after the weight update
        that reaches them. If this and `save_checkpoints_secs` are None, there is a checkpoint every ten
        minutes.
      save_checkpoints_secs: in place of steps, seconds between checkpoints.
      keep_checkpoint_max: the number of checkpoints to keep; None or 0: all.
      log_step_count_steps: micro-batches between log lines with the loss and the speed, which are also
        logged at the first run and at the end; None: none are logged.
      save_summary_steps: micro-batches between the scalars that training writes (the loss, the speed, and
        the means of metrics from `ipu.metric`), which are also written at the first run and at the end;
        None: none are written.
    """

    ipu_run_config: IPURunConfig = field(default_factory=IPURunConfig)
    _: KW_ONLY
    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100
    save_summary_steps: int | None = 100

    def __post_init__(self) -> None:
        """Checks the fields."""
        rule = "RunConfig: ipu_run_config must be an IPURunConfig"
        require(isinstance(self.ipu_run_config, IPURunConfig), rule, self.ipu_run_config, TypeError)
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError("Can not provide both save_checkpoints_steps and save_checkpoints_secs.")
        for name in ("save_checkpoints_steps", "log_step_count_steps", "save_summary_steps"):
            if getattr(self, name) is not None:
                check_int(f"RunConfig: {name}", getattr(self, name), 1)
        if self.keep_checkpoint_max is not None:
            check_int("RunConfig: keep_checkpoint_max", self.keep_checkpoint_max, 0)
        seconds = self.save_checkpoints_secs
        if seconds is not None and not (is_real(seconds) and seconds > 0):
            raise ValueError(f"RunConfig: save_checkpoints_secs must be a number above 0; got {seconds!r}.")
        if self.tf_random_seed is not None and not is_int(self.tf_random_seed):
            raise ValueError(f"RunConfig: tf_random_seed must be an integer; got {self.tf_random_seed!r}.")

    @property
    def seconds_between_checkpoints(self) -> float | None:
        """The seconds between checkpoints; None if steps decide."""
        if self.save_checkpoints_steps is not None:
            return None
        return self.save_checkpoints_secs or _SECONDS_BETWEEN_CHECKPOINTS


explain_missing(__name__)
