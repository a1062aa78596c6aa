"""What has become of a job whose processes are started again: its failures, and its goodput."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ipu_pipeline.processes.launched import MEMORY_VARIABLE

__all__ = ["Failure", "JobHistory"]

_NAME = "job.json"
_MOST = 20  # failures that are kept


@dataclass(frozen=True)
class Failure:
    """A failure after which training has gone on.

    Attributes:
      what: what happened, such as "process 1 was ended by SIGKILL".
      at: when it was noticed, in seconds since the epoch.
      run: the number of the run of a training with which it has gone on.
      step: the global step after that run.
      num_redone: how many runs were done a second time; None if that is not known.
      seconds: from the failure to the end of that run.
    """

    what: str
    at: float
    run: int
    step: int
    num_redone: int | None
    seconds: float

    def __str__(self) -> str:
        runs = "run was" if self.num_redone == 1 else "runs were"
        again = "" if self.num_redone is None else f"; {self.num_redone} {runs} done again"
        return (
            f"training has gone on with run {self.run} (to step {self.step}), {self.seconds:.1f} s after "
            f"{self.what}{again}"
        )


@dataclass(frozen=True)
class JobHistory:
    """A job so far, which its launcher writes, and its processes read.

    Attributes:
      begun: when the launcher began, in seconds since the epoch.
      num_restarts: how often the processes have been started again.
      failures: the last ones after which training has gone on.
    """

    begun: float
    num_restarts: int = 0
    failures: tuple[Failure, ...] = ()

    def after(self, failure: Failure) -> JobHistory:
        """The history with another failure."""
        return dataclasses.replace(self, failures=(*self.failures, failure)[-_MOST:])

    def write(self, directory: Path) -> None:
        """Writes it to the directory of the job's memory, if that has room."""
        beside = directory / f".{_NAME}"
        with contextlib.suppress(OSError):
            beside.write_text(json.dumps(dataclasses.asdict(self)))
            beside.rename(directory / _NAME)

    @classmethod
    def of_environment(cls) -> JobHistory | None:
        """That of the job of this process; None without a launcher that starts it again."""
        try:
            found = json.loads((Path(os.environ[MEMORY_VARIABLE]) / _NAME).read_text())
            failures = tuple(Failure(**failure) for failure in found["failures"])
            return cls(float(found["begun"]), int(found["num_restarts"]), failures)
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def goodput(self, useful: float) -> float | None:
        """Which part of the job's time until now its runs took; None if none is known to have been done."""
        return min(1.0, useful / max(time.time() - self.begun, 1e-9)) if useful else None

    def describe_times(self) -> str:
        """How often it was started again, in words."""
        return "once" if self.num_restarts == 1 else f"{self.num_restarts} times"

    def describe_goodput(self, useful: float) -> str:
        """The goodput at the end of a job that was started again, in words; else empty."""
        goodput = self.goodput(useful)
        if goodput is None or not self.num_restarts:
            return ""
        return (
            f"goodput {goodput:.2f}: the runs took {useful:.1f} s of {time.time() - self.begun:.1f} s; the "
            f"job was started again {self.describe_times()}."
        )

    def describe(self) -> str:
        """Describes it in sentences; empty if nothing has failed."""
        if not self.num_restarts:
            return ""
        last = f" The last time, {self.failures[-1]}." if self.failures else ""
        return f"The job has been started again {self.describe_times()}.{last}"
