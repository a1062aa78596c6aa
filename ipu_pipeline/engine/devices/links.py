"""Links between processes: transfers from device to device, and short texts that hosts wait for."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ipu_pipeline.engine import peers
from ipu_pipeline.ground import jax_processes
from ipu_pipeline.ground.errors import ProcessError

# A control channel carries short texts, which hosts wait for before a step begins.
#
# As an array (see `Links`) a text takes 0.6 ms, of which 0.3 ms are work of the host; through the
# coordinator's store, 0.8 ms. Here it takes 0.02 ms (two processes on two busy cores). A step cannot hide
# this time, since it begins after the text has come. Two processes share one connection, on which texts
# keep their order. The process of the greater number connects, and proves that it has read what the other
# has left in the store.

Address = tuple[str, int, str]  # host, port, and a secret in hexadecimal digits

_CHANNEL_SLICE = 0.5  # seconds of waiting between checks that the others live
_SILENCE = 5.0  # seconds until a connection is given up that does not say whose it is
_NUM_DIGITS = 8  # of the number of a process or of bytes
_NUM_SECRET = 32  # characters


class ControlChannel:
    """The connections of this process. One thread at a time sends and receives."""

    def __init__(self, process: int, host: str, check: Callable[[], None]) -> None:
        """Begins to listen, at a free port of an address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=128)
        self._server.settimeout(_CHANNEL_SLICE)
        self._process, self._check = process, check
        self._secret = secrets.token_hex(_NUM_SECRET // 2)
        self._sockets: dict[int, socket.socket] = {}  # process -> connection
        self.address: Address = (host, int(self._server.getsockname()[1]), self._secret)

    def send(self, peer: int, find: Callable[[int], Address], text: str) -> None:
        """Sends a text to a process, whose address `find` gives."""
        self._write(self._connect(peer, find), _frame(text))

    def receive(self, peer: int, find: Callable[[int], Address]) -> str:
        """Waits for the next text of a process, whose address `find` gives."""
        connection = self._connect(peer, find)
        return self._read(connection, int(self._read(connection, _NUM_DIGITS))).decode()

    def _connect(self, peer: int, find: Callable[[int], Address]) -> socket.socket:
        while peer not in self._sockets:
            if peer < self._process:
                host, port, secret = find(peer)
                connection = socket.create_connection((host, port))
                self._write(connection, f"{secret}{self._process:{_NUM_DIGITS}}".encode())
                self._keep(peer, connection)
                break
            try:
                connection, _address = self._server.accept()
            except TimeoutError:
                self._check()
                continue
            try:
                greeting = self._read(connection, _NUM_SECRET + _NUM_DIGITS, time.monotonic() + _SILENCE)
                if not hmac.compare_digest(greeting[:_NUM_SECRET], self._secret.encode()):
                    raise ConnectionError("Another program has connected.")
            except OSError:
                connection.close()
                continue
            self._keep(int(greeting[_NUM_SECRET:]), connection)
        return self._sockets[peer]

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection

    def _write(self, connection: socket.socket, content: bytes) -> None:
        connection.settimeout(_CHANNEL_SLICE)
        remaining = memoryview(content)
        while remaining:
            try:
                remaining = remaining[connection.send(remaining) :]
            except TimeoutError:
                self._check()

    def _read(self, connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
        connection.settimeout(_CHANNEL_SLICE)
        content = b""
        while len(content) < size:
            try:
                part = connection.recv(size - len(content))
            except TimeoutError:
                self._check()
                if deadline is not None and time.monotonic() > deadline:
                    raise
                continue
            if not part:
                raise ConnectionError("The other process has closed its connection.")
            content += part
        return content


def _frame(text: str) -> bytes:
    content = text.encode()
    return f"{len(content):{_NUM_DIGITS}}".encode() + content


# Transfers between processes, from a device of one to a device of another.
#
# Each process has a server (`jax.experimental.transfer`) from which others pull arrays. A transfer has a
# tag, which both sides derive from its edge, its step, and its number within the step. What arrives is
# therefore what was meant, in whatever order the two sides come to it. If they disagree, the receiver waits
# for something that never comes, instead of taking something else. (`ppermute` and JAX's own cross-host
# `device_put` match by order.)
#
# An array that is to be pulled must be neither donated nor deleted before that (though it may go out of
# scope). If a program is to take an array's memory, a copy is sent.

_LOOPBACK = "127.0.0.1"
_KEY = "ipu_pipeline/links"
_PATIENCE = 300.0  # seconds until a process must have come as far as this one, at the beginning
_AFTER_ERROR = 4.0  # seconds until another process's transfer has failed, if that is the cause
_SLICE = 0.5  # seconds of waiting between checks that the others live


class Tag(NamedTuple):
    """Identifies a transfer."""

    edge: str  # its two ends, unique among the edges of the process's pipelines
    step: int  # the number of the step, counted by both sides
    number: int = 0  # within the edge and step


@functools.cache
def links() -> Links:
    """The links of this process. The first call starts its server."""
    job = peers.current()
    if job is not None:
        return Links(job.store, job.address)
    return Links(jax_processes.key_value_store(), _LOOPBACK)


def check_peers() -> None:
    """Raises a ProcessError if something that another process was to send has failed."""
    if links.cache_info().currsize:
        links().check()


@contextlib.contextmanager
def naming_peers() -> Iterator[None]:
    """While arrays are waited for: an error that comes from another process then names that process."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not peers.may_come_from(error):
            raise
        job, deadline = peers.current(), time.monotonic() + _AFTER_ERROR
        while time.monotonic() < deadline and (peers.is_of_collective(error) or _awaits()):
            check_peers()
            if job is not None:
                job.check()
            time.sleep(0.01)
        raise


def _awaits() -> bool:
    """Whether something is on its way from another process."""
    return bool(links.cache_info().currsize) and links().awaits


class Links:
    """The transfers of one process to and from others. Safe to use from several threads.

    Attributes:
      process: this one's number.
    """

    def __init__(self, store: Any, host: str) -> None:
        """Starts the server, and tells the others where it is."""
        device = jax.local_devices()[0]
        self.process = int(device.process_index)
        self._store = store
        if store is None:
            raise RuntimeError(
                "A pipeline over several processes needs ipu_pipeline.distributed.initialize first."
            )
        self._server = jax_processes.start_transfers(device.client, host)
        if self._server is None:
            raise RuntimeError(
                "This JAX has no jax.experimental.transfer, so a pipeline cannot be in several processes."
            )
        self._lock = threading.Lock()
        self._connections: dict[int, Any] = {}  # process -> connection
        # Of each message an array, until it has come: an error in its place names the process.
        self._received: collections.deque[tuple[int, Tag, Any]] = collections.deque()
        self._failure: ProcessError | None = None
        self._channel = ControlChannel(self.process, host, _check_others)
        self._contacts: dict[int, dict[str, Any]] = {}  # process -> where it listens, see below
        contact = {
            "address": self._server.address(),
            "machine": socket.gethostname(),
            "control": self._channel.address,
        }
        self._store.key_value_set(f"{_KEY}/{self.process}", json.dumps(contact))

    def send(self, arrays: Sequence[Any], tag: Tag, source: Any, target: Any) -> None:
        """Lets another process pull arrays, as soon as they have been computed. Does not wait."""
        self._server.await_pull(_number(tag, source, target), list(arrays))

    def receive(self, structs: Sequence[Any], tag: Tag, source: Any, target: Any) -> list[Any]:
        """Pulls arrays from another process. Does not wait for them."""
        peer = int(source.process_index)
        connection = self._connect(peer)
        try:
            arrays: list[Any] = connection.pull(_number(tag, source, target), list(structs))
        except jax.errors.JaxRuntimeError as error:
            raise self._fail(peer, tag, error) from error
        if arrays:
            with self._lock:
                self._received.append((peer, tag, min(arrays, key=lambda array: array.nbytes)))
        self.check()
        return arrays

    @property
    def awaits(self) -> bool:
        """Whether something has failed, or has not come yet, as far as `check` has seen."""
        return self._failure is not None or bool(self._received)

    def check(self) -> None:
        """Looks at what has arrived since the last time. Raises a ProcessError if something never will."""
        _check_others()
        if self._failure is not None:
            raise self._failure
        while True:
            with self._lock:
                if not self._received or not _is_ready(self._received[0][2]):
                    return
                peer, tag, array = self._received.popleft()
            try:
                array.block_until_ready()
            except RuntimeError as error:
                if not array.is_deleted():  # else it had arrived, and was then donated
                    raise self._fail(peer, tag, error) from error

    def _fail(self, peer: int, tag: Tag, error: Exception) -> ProcessError:
        _check_others()  # the watcher of the processes may know more
        self._failure = ProcessError(
            f"Process {peer} did not send what {tag.edge} needs in step {tag.step}: it has ended, or had "
            f"an error of its own ({error})."
        )
        return self._failure

    def warm(self, peers: Collection[int]) -> None:
        """Connects with other processes, each of which must do the same. Known connections are kept."""
        device = jax.local_devices()[0]
        new = [peer for peer in sorted(peers) if peer != self.process and peer not in self._connections]
        zero = jax.device_put(np.int32(self.process), device)
        struct = jax.ShapeDtypeStruct((), np.int32, sharding=SingleDeviceSharding(device))
        for peer in new:
            self._server.await_pull(_greeting(self.process, peer), [zero])
        waiting = {
            peer: self._connect(peer).pull(_greeting(peer, self.process), [struct])[0] for peer in new
        }
        deadline = time.monotonic() + _PATIENCE
        for peer, array in waiting.items():
            while not array.is_ready():
                _check_others()
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"Process {peer} has not begun to run pipelines within {_PATIENCE:g} s."
                    )
                time.sleep(0.001)
            try:
                assert int(array) == peer
            except jax.errors.JaxRuntimeError as error:
                raise self._fail(peer, Tag("the first pipeline", 0), error) from error

    def share(self, key: str, text: str) -> None:
        """Leaves a text for other processes, under a key that is used once."""
        self._store.key_value_set(f"{_KEY}/{key}", text)

    def read(self, key: str) -> str:
        """Returns the text that another process has left, or will leave soon."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            _check_others()
            try:
                return str(self._store.blocking_key_value_get(f"{_KEY}/{key}", round(1000 * _SLICE)))
            except jax.errors.JaxRuntimeError as error:
                if time.monotonic() > deadline or not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise ProcessError(
                        f"No process has published {key} within {_PATIENCE:g} s: {error}"
                    ) from error

    def tell(self, peer: int, text: str) -> None:
        """Sends a text to another process. Waits until it has connected, the first time."""
        with self._naming(peer):
            self._channel.send(peer, self._control_address, text)

    def hear(self, peer: int) -> str:
        """Waits for the next text that another process tells this one."""
        with self._naming(peer):
            return self._channel.receive(peer, self._control_address)

    def _control_address(self, peer: int) -> Address:
        address: Address = tuple(self._read_contact(peer)["control"])
        return address

    @contextlib.contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """Turns an error of the channel into one that names the process, once the watcher knows of it."""
        try:
            yield
        except OSError as error:
            deadline = time.monotonic() + _AFTER_ERROR
            while time.monotonic() < deadline:
                _check_others()
                time.sleep(0.01)
            raise ProcessError(f"Process {peer} has ended: {error}") from error

    def _read_contact(self, peer: int) -> dict[str, Any]:
        if peer not in self._contacts:
            self._contacts[peer] = json.loads(self.read(str(peer)))
        return self._contacts[peer]

    def _connect(self, peer: int) -> Any:
        if peer in self._connections:
            return self._connections[peer]
        contact = self._read_contact(peer)
        address = contact["address"]
        host = address.rpartition(":")[0]
        if host == _LOOPBACK and contact["machine"] != socket.gethostname():
            raise ProcessError(
                f"Process {peer} is on another machine ({contact['machine']}) and listens on {host} only. "
                "Give each process the address by which the others reach it."
            )
        try:
            connection = self._server.connect(address)
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(f"Process {peer} does not answer at {address} ({error}).") from error
        with self._lock:
            return self._connections.setdefault(peer, connection)


def _check_others() -> None:
    job = peers.current()
    if job is not None:
        job.check()


def _is_ready(array: Any) -> bool:
    try:
        return bool(array.is_ready())
    except RuntimeError:  # it was deleted after it had arrived
        return True


def _number(tag: Tag, source: Any, target: Any) -> int:
    return _hash(f"{tag.edge}|{tag.step}|{tag.number}|{source.id}>{target.id}")


def _greeting(source: int, target: int) -> int:
    return _hash(f"greeting|{source}>{target}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
