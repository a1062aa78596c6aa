"""`import popdist` under `ipu-pipeline run`, for models of PopTorch.

An instance is a process that trains together with others. A process that was not launched with others is
the only instance. Each instance has one replica until `replicationFactor` says otherwise, and a model says
how many IPUs a replica has.
"""

from ipu_pipeline.tf1.popdist import getInstanceIndex, getNumInstances, isPopdistEnvSet

__all__ = [
    "getInstanceIndex",
    "getNumInstances",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
]


def init() -> None:
    """Joins the other processes, if this one was launched with them."""
    isPopdistEnvSet()


def getNumLocalReplicas() -> int:  # noqa: N802  # Graphcore's name, as are the ones below
    """The number of replicas of this process: 1."""
    return 1


def getNumTotalReplicas() -> int:  # noqa: N802
    """The number of replicas of all processes together."""
    return getNumInstances() * getNumLocalReplicas()


def getReplicaIndexOffset() -> int:  # noqa: N802
    """The number of this process's first replica."""
    return getInstanceIndex() * getNumLocalReplicas()
