"""Options of several processes that train one model: their number, and which one this is."""

from __future__ import annotations

import os
from typing import Self

from ipu_pipeline.engine import processes
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable
from ipu_pipeline.processes.addresses import is_in_environment
from ipu_pipeline.processes.launched import COUNT_VARIABLE, INDEX_VARIABLE

__all__ = ["DistributedOptions"]


class DistributedOptions(OptionGroup):
    """`Options.Distributed`.

    At first they describe the run that this process has joined (`ipu_pipeline.distributed`), or the run in
    the environment variables IPU_PIPELINE_NUM_PROCESSES and IPU_PIPELINE_PROCESS_ID, or else in Open MPI's
    variables. Without any of these there is one process.
    """

    path = "poptorch.Options().Distributed"

    num_distributed_processes = Option(checks.integer(1), 1, doc="How many processes there are.")
    distributed_process_id = Option(checks.integer(0), 0, doc="Which process this is, from 0.")

    def __init__(self) -> None:
        """Determines which process this is.

        Raises:
          ValueError: the environment variables are not numbers that fit each other.
        """
        super().__init__()
        others = processes.current()
        if others is not None:
            self.configureProcessId(others.index, others.count)
        elif is_in_environment():
            self.setEnvVarNames(COUNT_VARIABLE, INDEX_VARIABLE)
        else:
            self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        self._explicit.clear()

    @property
    def processId(self) -> int:
        """Returns the number of this process, from 0."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """Returns the number of processes."""
        return self.num_distributed_processes

    @configurable
    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Sets the number of processes, and which one this is.

        Args:
          process_id: the number of this process, from 0.
          num_processes: the number of processes.

        Raises:
          AssertionError: one is not an integer.
          ValueError: one is out of range.
        """
        number = checks.integer(1)(f"{self.path}.configureProcessId: num_processes", num_processes)
        this = checks.integer(0)(f"{self.path}.configureProcessId: process_id", process_id)
        if this >= number:
            raise ValueError(
                f"{self.path}.configureProcessId: process_id must be below num_processes, {number}; "
                f"got {this}."
            )
        return self.set(num_distributed_processes=number, distributed_process_id=this)

    @configurable
    def disable(self) -> Self:
        """Sets a single process, whatever the environment says."""
        return self.configureProcessId(0, 1)

    @configurable
    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Reads from environment variables which process this is. Without them it is the only one.

        Args:
          var_num_processes: the variable with the number of processes.
          var_process_id: the variable with the number of this process.

        Raises:
          AssertionError: a name is not a string.
          ValueError: they are not numbers that fit each other.
        """
        numbers = []
        for name, missing in ((var_num_processes, "1"), (var_process_id, "0")):
            checks.string(f"{self.path}.setEnvVarNames: a variable's name", name)
            text = os.environ.get(name, missing)
            if not text.strip().isdecimal():
                raise ValueError(f"The environment variable {name} must be a number; it is {text!r}.")
            numbers.append(int(text))
        number, this = numbers
        if this >= number:
            raise ValueError(
                f"The environment variable {var_process_id} must be below {var_num_processes}, {number}; "
                f"it is {this}."
            )
        return self.configureProcessId(this, number)
