"""What processes that run a program together print, and which of it is shown."""

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["Output", "say"]

_MOST_HELD = 16 * 2**20  # bytes
_LONGEST = 200  # characters of a last error
_NOISE = re.compile(rb"\[Gloo\] Rank |.*connected peer ranks is")  # of a library, on the standard output


class Output:
    """What the processes print, and which of it is shown.

    What they write on the standard output is shown of the process that has the results, and held back until
    that is known; what they write on the standard error is shown at once, with the number of the process.

    Attributes:
      last_errors: the beginning of the last line that each process wrote on the standard error. Lines that
        are empty, or indented, as those that follow the first one of an error, do not count.
    """

    def __init__(self, num_processes: int, shows_all: bool) -> None:
        self.last_errors: dict[int, str] = {}
        self._num_processes = num_processes
        self._shown: int | None = None  # the process that has the results
        self._shows_all = shows_all
        self._held: list[tuple[int, bytes]] = []
        self._num_held = 0  # bytes
        self._started: dict[tuple[int, bool], bytes] = {}  # lines without an end as yet

    def take(self, process: int, is_error: bool, text: bytes) -> None:
        """Takes what a process has written; empty at the end."""
        key = (process, is_error)
        lines = (self._started.pop(key, b"") + text).splitlines(keepends=True)
        if text and lines and not lines[-1].endswith((b"\n", b"\r")):
            self._started[key] = lines.pop()
        for line in lines:
            if is_error:
                if line.strip() and not line[:1].isspace():
                    self.last_errors[process] = line.decode(errors="replace").strip()[:_LONGEST]
                _write(2, _number(process, line))
            elif not _NOISE.match(line):
                self._add(process, line)

    def _add(self, process: int, line: bytes) -> None:
        if self._shows_all:
            _write(1, _number(process, line))
        elif self._shown is None:
            self._held.append((process, line))
            self._num_held += len(line)
            if self._num_held > _MOST_HELD:
                self._shows_all = True
                self.end()
        elif self._shown == process:
            _write(1, line)

    def know_results(self, process: int) -> None:
        """Notes that a process has the results of a pipeline."""
        if self._shows_all or self._shown == process:
            return
        if self._shown is not None:
            say(f"process {process} has results too; what it prints is shown with --all only.")
            return
        self._shown = process
        for held, line in self._held:
            if held == process:
                _write(1, line)
        self._held = []

    def end(self) -> None:
        """Shows the lines that are still held back, since no process can be chosen any more."""
        alike = {
            b"".join(line for held, line in self._held if held == p) for p in range(self._num_processes)
        }
        if len(alike) == 1:
            _write(1, alike.pop())
        else:
            for process, line in self._held:
                _write(1, _number(process, line))
        self._held = []


def say(what: str) -> None:
    """Writes a line of the launcher's own on the standard error."""
    with contextlib.suppress(OSError):
        _write(2, f"ipu-pipeline launch: {what}\n".encode())


def _number(process: int, line: bytes) -> bytes:
    return b"[%d] %s" % (process, line if line.endswith((b"\n", b"\r")) else line + b"\n")


def _write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]
