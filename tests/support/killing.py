"""A job of several processes, started by `ipu-pipeline launch`, some of which are killed."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

from tests.support.programs import begin


class Job:
    """A program in so many processes, such as `tests.support.resumer`."""

    def __init__(self, directory, layout, runs, *options, program="resumer", **environment):
        num_processes, num_stages, num_replicas = layout
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.num_processes = num_processes
        launch = ("-m", "ipu_pipeline", "launch", "-n", num_processes, "--death-timeout", 6, *options)
        module = ("-m", f"tests.support.{program}")
        given = (directory, runs, num_stages, num_replicas)
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = begin(*launch, *module, *given, output=log, error_output=log, **environment)

    def children(self):
        """The numbers of the processes of this moment, from the first one on."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def is_alive(self):
        return self.process.poll() is None

    def kill(self, victims):
        """Kills processes by their numbers at once; whether all were there."""
        children = self.children()
        if len(children) < self.num_processes:
            return False
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[victim], signal.SIGKILL)
        return True

    def await_end(self, timeout):
        try:
            assert self.process.wait(timeout) == 0, self.log.read_text()[-8000:]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log.read_text()[-8000:]) from None

    def num_runs(self):
        """How many runs have been reported."""
        path = self.directory / "losses"
        return path.read_text().count("\n") if path.exists() else 0

    def await_runs(self, count, timeout=60):
        """Waits for more runs."""
        begin, deadline = self.num_runs(), time.monotonic() + timeout
        while self.num_runs() < begin + count and self.is_alive():
            assert time.monotonic() < deadline, self.log.read_text()[-8000:]
            time.sleep(0.002)

    def losses(self):
        """run -> the losses; a run that was done again has the same ones."""
        found = {}
        for line in (self.directory / "losses").read_text().splitlines():
            number, text = re.fullmatch(r"(\d+) (.*)", line).groups()
            assert found.setdefault(int(number), text) == text, f"run {number}"
        return found

    def variables(self):
        with np.load(self.directory / "variables.npz") as found:
            return {name: found[name] for name in found.files}
