"""The program that serves JAX's coordination of several processes, beside process 0.

JAX would serve it in process 0. If that died, JAX would end all others in the same moment, in the middle of
the checkpoints that they write, and none could say what had happened: a Python callback for that ends in
`std::bad_cast` (jax 0.10.2). With this program, process 0 is like the others. It needs jaxlib only, and
starts in a quarter of a second.

Process 0 starts the program with a JSON object: the `address` to listen at, the `count` of processes, the
seconds after which JAX gives up a silent process (`heartbeat_timeout`), and the `service` of jaxlib, as
"module:name". It answers with a line, a JSON object with the port or an error. When process 0 has ended,
and no process is connected any more, it ends. Signals that ask for an end go to the processes, which it
serves meanwhile.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

_ESTABLISHED = "01"  # in /proc/net/tcp
_LOOK_EVERY = 0.5  # seconds
_MOST_SECONDS = 900.0  # after the end of process 0; a machine that is gone leaves its connections open


def main(text: str) -> None:
    """Serves; see above. Never returns."""
    settings = json.loads(text)
    host, _, port = settings["address"].rpartition(":")
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        # gRPC would share a port with a program that listens there already, and each would get some of
        # the processes.
        with socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            pass
    except OSError as error:
        _answer({"error": str(error)})
        os._exit(1)
    module, _, name = settings["service"].partition(":")
    serve = getattr(importlib.import_module(module), name)
    service = serve(
        settings["address"],
        settings["count"],
        heartbeat_timeout=settings["heartbeat_timeout"],
        shutdown_timeout=settings["heartbeat_timeout"],
        recoverable=True,
    )
    _answer({"port": int(port)})
    sys.stdin.buffer.read()  # until process 0 has ended, for any reason
    begin = time.monotonic()
    num_alone = 0
    while num_alone < 2 and time.monotonic() < begin + _MOST_SECONDS:
        time.sleep(_LOOK_EVERY)
        connections = _count_connections(int(port))
        if connections is None:  # no /proc: processes that are left notice within the time of silence
            time.sleep(settings["heartbeat_timeout"])
            break
        num_alone = 0 if connections else num_alone + 1
    del service
    os._exit(0)  # the service would wait for processes that are gone


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()
    os.dup2(2, 1)  # the reader of the output may go on


def _count_connections(port: int) -> int | None:
    """The number of connections to a port of this machine; None if not known."""
    count = 0
    try:
        for name in ("tcp", "tcp6"):
            path = Path("/proc/self/net") / name
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                _number, local, _remote, state = line.split()[:4]
                count += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    except (OSError, ValueError):
        return None
    return count if Path("/proc/self/net/tcp").exists() else None


if __name__ == "__main__":
    if os.fork():  # an orphan serves: Ray kills the children of process 0 before the other processes
        os._exit(0)
    main(sys.argv[1])
