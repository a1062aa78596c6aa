"""What a process of a job finds in its environment, whoever starts it."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from ipu_pipeline.processes.launched import (
    BIND_VARIABLE,
    CACHE_DIR_VARIABLE,
    COORDINATOR_VARIABLE,
    COUNT_VARIABLE,
    DEATH_VARIABLE,
    INDEX_VARIABLE,
    MEMORY_EVERY_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_VARIABLE,
    SECRET_VARIABLE,
)

__all__ = ["Start", "hold_port"]


@dataclass(frozen=True)
class Start:
    """One of the starts of a job.

    Attributes:
      restart: how often the job has been started again.
      count: how many processes there are.
      coordinator: "host:port" where process 0 starts the coordinator.
      death_timeout: in how many seconds a death is noticed.
      memory_every: how many runs of a training there are from one in-memory checkpoint to the next.
      secret: by which the processes know each other.
    """

    restart: int
    count: int
    coordinator: str
    death_timeout: float
    memory_every: int
    secret: str = field(repr=False)

    def describe_to(self, environment: MutableMapping[str, str], index: int, memory: str | None) -> None:
        """Sets the variables of a process, with the directory in memory of its machine, if there is one."""
        environment.update(
            {
                COORDINATOR_VARIABLE: self.coordinator,
                BIND_VARIABLE: self.coordinator,
                COUNT_VARIABLE: str(self.count),
                INDEX_VARIABLE: str(index),
                DEATH_VARIABLE: f"{self.death_timeout:g}",
                RESTART_VARIABLE: str(self.restart),
                SECRET_VARIABLE: self.secret,
                MEMORY_EVERY_VARIABLE: str(self.memory_every),
            }
        )
        environment.pop(MEMORY_VARIABLE, None)  # another launcher's
        if memory is not None:
            environment[MEMORY_VARIABLE] = memory
            if "JAX_COMPILATION_CACHE_DIR" not in environment:
                environment.setdefault(CACHE_DIR_VARIABLE, f"{memory}/programs")


def hold_port(address: str = "127.0.0.1") -> socket.socket:
    """Holds a free port: the coordinator can listen there, and no other program gets it before that."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind((address, 0))
    return held
