"""Where programs announce what they run: a directory of the user's own, with a file for each process.

It is made with mode 0700, and used only if it belongs to the user, is not a link, and no other user can
write to it. Files are written under another name and renamed, so that a reader finds a whole file or none.
A file belongs to the process that has its pid and its start time, because pids are used again. Files of
processes that are gone are removed by the next reader. All of this needs Linux's /proc; elsewhere nothing
is announced.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipu_pipeline.ground.host import others_can_write

DIRECTORY_VARIABLE = "IPU_PIPELINE_ANNOUNCE_DIR"
_PROC = Path("/proc")
_MAX_BYTES = 2**20  # of a file
_MAX_SECONDS = 60  # of writing a file
_NUMBER = (int, float)
_OF_PROGRAM: dict[str, Any] = {
    "process": dict,
    "program": str,
    "started": _NUMBER,
    "written": _NUMBER,
    "runs": list,
}
_OF_PROCESS: dict[str, Any] = {"pid": int, "start": int, "boot": str, "namespace": str, "host": str}
_OF_JOB: dict[str, Any] = {
    "begun": _NUMBER,
    "restarts": int,
    "failures": list,
    "goodput": (*_NUMBER, type(None)),
}
_OF_FAILURE: dict[str, Any] = {
    "what": str,
    "at": _NUMBER,
    "run": int,
    "step": int,
    "num_redone": (int, type(None)),
    "seconds": _NUMBER,
}
_OF_RUN: dict[str, Any] = {
    "name": str,
    "state": str,
    "since": _NUMBER,
    "trains": bool,
    "unit": str,
    "count": int,
    "handled": int,
    "rate": (*_NUMBER, type(None)),
    "batch_size": (int, type(None)),
    "process": int,
    "num_processes": int,
    "ipus": list,
}
_OF_IPU: dict[str, Any] = {
    "ipu": int,
    "device": int,
    "platform": str,
    "kind": str,
    "planned_bytes": (int, type(None)),
}


@dataclass(frozen=True)
class Process:
    """A process, such that it can be told apart from any other."""

    pid: int  # its number, in its namespace
    start: int  # when it began, in ticks since the machine's start
    boot: str  # when the machine began, as an identifier
    namespace: str  # the namespace of its pid: a container has its own
    host: str  # the machine's name

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.pid}-{self.start}.json"


@dataclass(frozen=True)
class Announcements:
    """The contents of the directories."""

    announced: tuple[dict[str, Any], ...]  # what processes that are alive have announced, by pid
    refused: tuple[str, ...]  # directories that are not used, each with the reason


def this_process() -> Process | None:
    """The current process; None where there is no /proc."""
    return find_process(os.getpid())


def find_process(pid: int) -> Process | None:
    """The process of a pid, if there is one that has not ended."""
    try:
        # The name in parentheses may contain any characters.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        state, start = fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    if state in (b"Z", b"X", b"x"):  # it has ended, and its parent has not asked for its status
        return None
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink(_PROC / "self" / "ns" / "pid")
    return Process(pid, start, boot, namespace, socket.gethostname())


def resident_bytes(pid: int) -> int | None:
    """The bytes of the machine's memory that a process has."""
    try:
        return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def directories() -> list[Path]:
    """The directories to use, the best one first."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        return [Path(directory)]
    uid = os.geteuid()
    # Services and jobs often lack a login's variables, but a monitor in a login must find them, too.
    runtime = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"]
    temporary = ["/tmp", os.environ.get("TMPDIR")]  # noqa: S108  # `opened` checks it
    candidates = [Path(parent) / "ipu_pipeline" for parent in runtime if parent]
    candidates += [Path(parent) / f"ipu_pipeline-{uid}" for parent in temporary if parent]
    return list(dict.fromkeys(path for path in candidates if path.is_absolute()))


@contextlib.contextmanager
def opened(path: Path, is_made: bool = False) -> Iterator[int]:
    """Opens a directory for a `with` block."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    parent = os.open(path.parent, flags)
    try:
        status = os.fstat(parent)
        is_open = others_can_write(status) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or is_open:
            raise PermissionError(f"{path.parent} belongs to another user, or others can write to it")
        if is_made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
        status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{path} is no directory, or a link to one")
        directory = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        if others_can_write(status):
            raise PermissionError(f"others can write to {path}")
        yield directory
    finally:
        os.close(directory)


def write(process: Process, announced: Any) -> None:
    """Writes what a process announces, in the first directory that can be used."""
    text = json.dumps({"process": vars(process), **announced}).encode()
    temporary_name = f".{process.pid}-{process.start}.new"
    errors = []
    for path in directories():
        try:
            with opened(path, is_made=True) as directory:
                _put(directory, temporary_name, process.file_name, text)
            return
        except OSError as error:
            errors.append(error)
    raise OSError(f"nothing is announced: {'; '.join(map(str, errors))}")


def _put(directory: int, temporary_name: str, name: str, text: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(temporary_name, flags, 0o600, dir_fd=directory)
        with open(file, "wb") as opened_file:
            opened_file.write(text)
        os.replace(temporary_name, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary_name, dir_fd=directory)
        raise


def remove(process: Process) -> None:
    """Removes what a process announced, if anything."""
    for path in directories():
        with contextlib.suppress(OSError), opened(path) as directory:
            os.unlink(process.file_name, dir_fd=directory)


def read_all() -> Announcements:
    """Reads what all live processes of the user announce. Removes what others left."""
    reader = this_process()
    announced: dict[tuple[int, int], dict[str, Any]] = {}
    refused: list[str] = []
    for path in directories():
        try:
            with opened(path) as directory:
                for entry in _read(directory, reader):
                    key = (entry["process"]["pid"], entry["process"]["start"])
                    if key not in announced or announced[key]["written"] < entry["written"]:
                        announced[key] = entry  # a process may have had to change directories
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append(str(error))
    if reader is None:
        refused.append("this system has no /proc, so that no program announces what it does")
    return Announcements(tuple(announced[key] for key in sorted(announced)), tuple(refused))


def _read(directory: int, reader: Process | None) -> Iterator[dict[str, Any]]:
    for name in sorted(os.listdir(directory)):
        if name.endswith(".new"):  # left by a process that was killed while writing
            _forget_if_old(directory, name)
            continue
        entry = _load(directory, name)
        if entry is None or reader is None:
            continue
        process = entry["process"]
        if process["namespace"] == reader.namespace and process["boot"] == reader.boot:
            live_process = find_process(process["pid"])
            if live_process is not None and live_process.start == process["start"]:
                yield entry
            elif reader.namespace:
                _forget(directory, name)
        elif process["boot"] != reader.boot and process["host"] == reader.host:
            _forget(directory, name)  # from before this machine's last start
        # Others are in containers, or on machines that see the same directory. They are not visible here.


def _forget_if_old(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if time.time() - status.st_mtime > _MAX_SECONDS:
            os.unlink(name, dir_fd=directory)


def _forget(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _load(directory: int, name: str) -> dict[str, Any] | None:
    """The content of a file; None if it is not one of ours."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with open(file, "rb") as opened_file:
            if not stat.S_ISREG(os.fstat(opened_file.fileno()).st_mode):
                return None
            entry = json.loads(opened_file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not _has(entry, _OF_PROGRAM) or not _has(entry["process"], _OF_PROCESS):
        return None
    runs = entry["runs"]
    if not all(_has(run, _OF_RUN) and all(_has(ipu, _OF_IPU) for ipu in run["ipus"]) for run in runs):
        return None
    job = entry.setdefault("job", None)  # an earlier version's has none
    if job is not None and not (
        _has(job, _OF_JOB) and all(_has(failure, _OF_FAILURE) for failure in job["failures"])
    ):
        return None
    return entry if name == f"{entry['process']['pid']}-{entry['process']['start']}.json" else None


def _has(value: Any, fields: dict[str, Any]) -> bool:
    """Whether a dict has some entries of the right types."""
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in fields.items())
