"""Programs on a pseudo terminal, as a person starts them."""

import contextlib
import fcntl
import io
import os
import pty
import select
import signal
import struct
import sys
import termios
import time

from tests.support.programs import ROOT, Started, environment


class Screen(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self):
        return True


class Terminal:
    """A program whose standard streams are a terminal of 24 lines and 100 columns."""

    def __init__(self, *arguments, **variables):
        """Starts Python in the repository's root, with more variables in its environment."""
        self.output = ""
        self._descriptor, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._process = Started(
            [sys.executable, *map(str, arguments)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=ROOT,
            env={**environment(as_tests=True), **variables},
            start_new_session=True,
        )
        os.close(inner)

    def read_until(self, text, seconds=120):
        """Reads until the program has written something; with None until it has ended."""
        deadline = time.monotonic() + seconds
        while text is None or text not in self.output:
            ready, _, _ = select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))
            read = b""
            with contextlib.suppress(OSError):  # it has ended
                read = os.read(self._descriptor, 4096) if ready else b""
            self.output += read.decode(errors="replace")
            if not read:
                if text is not None:
                    self._end()
                    raise AssertionError(self.output)
                break

    def interrupt(self):
        """What Ctrl-C does, where the program is the terminal's own."""
        self._process.send_signal(signal.SIGINT)

    def finish(self):
        """Waits for the program's end.

        Returns:
          Its exit code, and the lines that stand on the terminal then.
        """
        try:
            self.read_until(None)
            return self._process.wait(timeout=60), shown(self.output)
        finally:
            self._end()

    def _end(self):
        self._process.kill()
        self._process.wait()
        os.close(self._descriptor)


def shown(output):
    """What is left of some output: the last of what was written over each line."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        left = ""
        for piece in line.split("\r"):
            left = piece + left[len(piece) :]
        lines.append(left.rstrip())
    return lines
