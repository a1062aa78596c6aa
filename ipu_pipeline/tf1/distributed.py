"""Several processes that run one program together, on one machine or many: see docs/distributed.md.

Every process runs the same program. `initialize`, at its top, joins them; from then on the IPUs that
`IPUConfig` selects are in all processes, one process after another.

Example:
  import ipu_pipeline as ipu

  ipu.distributed.initialize("10.0.0.1:1234", num_processes=2, process_id=0)
"""

from __future__ import annotations

from collections.abc import Sequence

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.processes import rendezvous

__all__ = ["initialize", "is_initialized"]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    listen_address: str | None = None,
    death_timeout: float | None = None,
    stall_timeout: float | None = None,
    initialization_timeout: float = 300,
) -> None:
    """Joins this process with the others of a run, by `jax.distributed.initialize`, and waits for them.

    Arguments that are not given are taken from the environment variables IPU_PIPELINE_COORDINATOR_ADDRESS,
    IPU_PIPELINE_NUM_PROCESSES and IPU_PIPELINE_PROCESS_ID; set all three or none. Without them, JAX
    recognises SLURM, Open MPI, Kubernetes and Cloud TPU. If the three variables are set, for example by
    `ipu-pipeline launch`, the first of these calls joins the processes, too: `set_num_devices`,
    `IPUConfig.configure_ipu_system`, and a session's first run. After that, this function returns at once
    if it is given no arguments.

    A process only listens at the address by which it reaches the coordinator: on one machine, the loopback
    address.

    Args:
      coordinator_address: "host:port" of process 0, the same in all processes.
      num_processes: the number of processes, the same in all of them.
      process_id: the number of this process, from 0.
      local_device_ids: the accelerators of its machine that this process uses; None: all, or the ones that
        the cluster assigns.
      coordinator_bind_address: "host:port" where the coordinator listens, in process 0, if not at
        `coordinator_address`. Or the environment variable JAX_COORDINATOR_BIND_ADDRESS.
      listen_address: the address of this machine, without a port, at which this process listens for data
        from others, if not the address by which it reaches the coordinator.
      death_timeout: the most seconds between the death of a process and the end of the others, with an
        error that names it. Checkpoints that are being written are finished first. At least 2; by default
        the environment variable IPU_PIPELINE_DEATH_TIMEOUT, or 60.
      stall_timeout: the most seconds that processes wait for a process that is alive but does nothing, at
        least 2; by default the environment variable IPU_PIPELINE_STALL_TIMEOUT, or `death_timeout`. Set it
        higher if a process does other work for longer between two runs, such as reading.
      initialization_timeout: the most seconds that this process waits for the others to join.

    Raises:
      TypeError, ValueError: an argument or variable is missing or wrong; or processes have other versions.
      RuntimeError: the process has already joined others, and there are arguments, or it used
        `jax.distributed.initialize`; JAX's backend is running; or the coordinator cannot listen.
      TimeoutError: the others did not join in time.
    """
    rendezvous.join(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        coordinator_bind_address,
        listen_address,
        death_timeout,
        stall_timeout,
        initialization_timeout,
    )


def is_initialized() -> bool:
    """Whether this process has joined others.

    Example:
      >>> ipu.distributed.is_initialized()
      False
    """
    return rendezvous.is_joined()


explain_missing(__name__)
