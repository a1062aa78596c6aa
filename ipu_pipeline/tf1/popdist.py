"""The numbers of processes and replicas, by the names of Graphcore's `popdist`.

An instance is a process that runs the program together with others (`ipu.distributed`). Replicas belong to
the last compiled pipeline that has a cross-replica optimizer or is an estimator's, on the configured IPUs.
"""

from __future__ import annotations

import jax

from ipu_pipeline.engine import processes
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.processes import device_selection
from ipu_pipeline.processes.rendezvous import join_by_environment
from ipu_pipeline.tf1.program.calls import Call
from ipu_pipeline.tf1.program.program import compiled_programs

__all__ = [
    "checkNumIpusPerReplica",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "isPopdistEnvSet",
]


def isPopdistEnvSet() -> bool:  # noqa: N802  # Graphcore's name, as are the ones below
    """Whether this process runs the program together with others; see `ipu.distributed`.

    Example:
      >>> ipu.popdist.isPopdistEnvSet()
      False
    """
    join_by_environment()
    return bool(jax.distributed.is_initialized())


def getNumInstances() -> int:  # noqa: N802
    """The number of processes.

    Example:
      >>> ipu.popdist.getNumInstances(), ipu.popdist.getInstanceIndex()
      (1, 0)
    """
    return _process_numbers()[1]


def getInstanceIndex() -> int:  # noqa: N802
    """The number of this process, from 0."""
    return _process_numbers()[0]


def getNumIpusPerReplica() -> int:  # noqa: N802
    """The number of IPUs of a replica.

    Raises:
      RuntimeError: no such pipeline is compiled.
    """
    return _find_call().replication.num_ipus


def checkNumIpusPerReplica(numIpusPerReplica: int) -> bool:  # noqa: N802, N803
    """Whether a replica has this number of IPUs.

    Args:
      numIpusPerReplica: the number.

    Raises:
      RuntimeError: same as for `getNumIpusPerReplica`.
    """
    return getNumIpusPerReplica() == numIpusPerReplica


def getNumTotalReplicas() -> int:  # noqa: N802
    """The number of replicas in all processes.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.auto_select_ipus = 2
      >>> config.configure_ipu_system()
      >>> def body(x):
      ...     loss = jnp.mean(layers.Dense(1)(x) ** 2)
      ...     return x, ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.1)).minimize(loss)
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(
      ...         lambda x: ipu.loops.repeat(4, body, [x]), [np.ones([2, 8], np.float32)]
      ...     )
      >>> ipu.popdist.getNumTotalReplicas(), ipu.popdist.getNumLocalReplicas()
      (2, 2)
      >>> ipu.popdist.getNumIpusPerReplica(), ipu.popdist.getReplicaIndexOffset()
      (1, 0)
      >>> ipu.popdist.checkNumIpusPerReplica(1)
      True

    Raises:
      RuntimeError: same as for `getNumIpusPerReplica`; or no IPUs are configured.
      ValueError: the number of IPUs is not a multiple of a replica's.
    """
    return _find_call().replication.count()


def getNumLocalReplicas() -> int:  # noqa: N802
    """The number of replicas that have IPUs of this process.

    Raises:
      RuntimeError, ValueError: as `getNumTotalReplicas`.
    """
    return len(_local_replicas())


def getReplicaIndexOffset() -> int:  # noqa: N802
    """The number of the first replica that has IPUs of this process.

    Raises:
      RuntimeError, ValueError: as `getNumTotalReplicas`.
    """
    return min(_local_replicas(), default=0)


def _process_numbers() -> tuple[int, int]:
    """The number of this process, and the number of processes."""
    if not isPopdistEnvSet():
        return 0, 1
    peers = processes.current()
    return (jax.process_index(), jax.process_count()) if peers is None else (peers.index, peers.count)


def _find_call() -> Call:
    """The last compiled pipeline or loop that may have replicas."""
    calls = [call for program in compiled_programs() for call in program.calls if call.replication.is_given]
    if not calls:
        raise RuntimeError(
            "popdist: the number of replicas comes from compiled pipelines and loops that have a "
            "cross-replica optimizer, or are an estimator's; there is none. Compile the program first."
        )
    return calls[-1]


def _local_replicas() -> list[int]:
    replication = _find_call().replication
    number = replication.count()
    devices = device_selection.selected_devices(replication.ipu_device)
    if not devices:
        raise RuntimeError(
            "popdist: which replicas are in this process is known once IPUs are selected: call "
            "IPUConfig.configure_ipu_system() first."
        )
    index = getInstanceIndex()
    return [
        replica
        for replica, replica_devices in enumerate(replication.deal_devices(devices, number))
        if any(device.process_index == index for device in replica_devices)
    ]


explain_missing(__name__)
