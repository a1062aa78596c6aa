"""How the launchers of several nodes talk with the leader: TCP connections on which only they are heard.

Whoever connects gets a random number, answers with one, and proves with its first report that it knows the
job's secret; the leader proves the same with its answer. Reports and orders are JSON texts of limited
length. Each has a code that depends on the secret, both random numbers, the direction, and how many there
were before it (HMAC with SHA-256, RFC 2104), so that none can be made, changed or sent again by others.
They can be read by others: they hold no secrets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import hmac
import json
import math
import secrets
import socket
import threading
import time
import types
import typing
from collections.abc import Mapping
from typing import Any

from ipu_pipeline.launching.causes import Cause
from ipu_pipeline.launching.group import Start
from ipu_pipeline.launching.leader import Leader, Orders, Report
from ipu_pipeline.launching.shown import say

__all__ = ["Meeting", "RefusedError", "RemoteLeader"]

_HELLO = b"ipu-pipeline launch 1\n"
_NONCE, _CODE, _LENGTH = 32, 32, 4  # bytes
_MOST_BYTES = 2**16
_MOST_STRANGERS = 64  # connections that have not proved anything; a new one ends the oldest
_TO_PROVE = 5.0  # seconds
_INTERVAL = 0.25  # seconds, the most between two reports
_AGAIN_AFTER = 0.5  # seconds, until the next attempt to connect
_LEAVING = 2.0  # seconds for the last report
_SAID_AFTER = 2.0  # seconds for which node 0 cannot be reached


class RefusedError(Exception):
    """What was received is not of this job."""


class _Codes:
    """Makes and checks the messages of one connection."""

    def __init__(self, secret: str, nonces: bytes, is_leader: bool) -> None:
        self._key = hmac.digest(secret.encode(), _HELLO + nonces, hashlib.sha256)
        self._own, self._others = (b"leader", b"node") if is_leader else (b"node", b"leader")
        self._sent = self._received = 0

    def _code(self, sender: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, sender + number.to_bytes(8) + text, hashlib.sha256)

    def wrap(self, value: Any) -> bytes:
        """A message: its length, its code, and a dataclass as JSON."""
        text = json.dumps(dataclasses.asdict(value)).encode()
        if len(text) > _MOST_BYTES:
            raise ValueError(f"a message of {len(text)} bytes is longer than {_MOST_BYTES}")
        self._sent += 1
        return len(text).to_bytes(_LENGTH) + self._code(self._own, self._sent, text) + text

    def unwrap(self, code: bytes, text: bytes) -> Any:
        """The JSON value of a message."""
        self._received += 1
        if not hmac.compare_digest(code, self._code(self._others, self._received, text)):
            raise RefusedError("it does not know the job's secret")
        try:
            return json.loads(text)
        except ValueError as error:
            raise RefusedError(f"its message is no JSON ({error})") from None


def _read_length(given: bytes) -> int:
    length = int.from_bytes(given)
    if length > _MOST_BYTES:
        raise RefusedError(f"a message of {length} bytes is longer than {_MOST_BYTES}")
    return length


def _make(kind: type[Any], value: Any, **made: Any) -> Any:
    """A dataclass from its JSON.

    Args:
      kind: the dataclass.
      value: the JSON value.
      **made: fields that have been made of it already.

    Raises:
      RefusedError: it is of another version, or is not what it should be.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise RefusedError(f"its message is not a {kind.__name__.lower()} of this version")
    for name, hint in hints.items():
        if name not in made and not _is(value[name], hint):
            raise RefusedError(f"{name} in its message is {value[name]!r}")
    return kind(**{**value, **made})


def _is(value: Any, hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_is(value, one) for one in arguments)
    if typing.get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(_is(one, arguments[1]) for one in value.values())
    return type(value) is hint


def _report(value: Any) -> Report:
    told = value.get("cause") if isinstance(value, dict) else None
    found: Report = _make(Report, value, cause=None if told is None else _make(Cause, told))
    if found.num_processes < 1:
        raise RefusedError(f"num_processes in its message is {found.num_processes}")
    return found


def _orders(value: Any) -> Orders:
    told, failed = (value.get("start"), value.get("failed")) if isinstance(value, dict) else (None, None)
    if not isinstance(failed, list) or not all(type(number) is int for number in failed):
        raise RefusedError(f"failed in its message is {failed!r}")
    start = None if told is None else _make(Start, told)
    found: Orders = _make(Orders, value, start=start, failed=tuple(failed))
    return found


class Meeting:
    """Lets the launchers of other nodes talk with the leader, in a thread."""

    def __init__(self, leader: Leader, address: tuple[str, int], secret: str, silence: float) -> None:
        """Begins to listen.

        Args:
          leader: of this process.
          address: where to listen.
          secret: the job's.
          silence: as of `Leader`.

        Raises:
          OSError: it cannot listen there.
        """
        self._leader = leader
        self._secret = secret
        self._silence = silence
        self._strangers: list[asyncio.StreamWriter] = []
        self._has_refused = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=256)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._serve, args=[listening], name="ipu-meeting", daemon=True
        )
        self._thread.start()

    def _serve(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._answer, sock=listening, limit=2 * _MOST_BYTES)
        )
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def close(self) -> None:
        """Ends all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers.append(writer)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.pop(0).close()
        agent = ""
        try:
            codes, report = await asyncio.wait_for(self._meet(reader, writer), _TO_PROVE)
            if writer in self._strangers:
                self._strangers.remove(writer)
            while True:
                agent = report.agent
                writer.write(codes.wrap(self._leader.exchange(report)))
                await writer.drain()
                report = await asyncio.wait_for(self._read(reader, codes), self._silence)
        except RefusedError as error:
            self._refuse(writer, str(error))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the connection has ended, was silent, or this server ends
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)
            writer.close()
            if agent:
                self._leader.note_loss(agent)

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[_Codes, Report]:
        nonce = secrets.token_bytes(_NONCE)
        writer.write(_HELLO + nonce)
        await writer.drain()
        if await reader.readexactly(len(_HELLO)) != _HELLO:
            raise RefusedError("it is not a launcher of this version")
        codes = _Codes(self._secret, nonce + await reader.readexactly(_NONCE), is_leader=True)
        return codes, await self._read(reader, codes)

    async def _read(self, reader: asyncio.StreamReader, codes: _Codes) -> Report:
        length = _read_length(await reader.readexactly(_LENGTH))
        code = await reader.readexactly(_CODE)
        return _report(codes.unwrap(code, await reader.readexactly(length)))

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        if not self._has_refused:
            self._has_refused = True
            peer = writer.get_extra_info("peername") or ("an unknown address",)
            self._leader.say(
                f"a connection from {peer[0]} was refused: {why}. Others will not be reported."
            )


class RemoteLeader:
    """The leader of another node, to which a thread keeps a connection."""

    def __init__(self, address: tuple[str, int], secret: str, silence: float) -> None:
        """Begins to connect.

        Args:
          address: where the leader listens.
          secret: the job's.
          silence: as of `Leader`.
        """
        self._address = address
        self._secret = secret
        self._silence = silence
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._orders: Orders | None = None
        self._given = 0.0  # when the launcher gave its report
        self._deadline = math.inf  # for the last report
        self._has_given_last = False
        self._has_said = False  # that the leader cannot be reached
        self._heard = time.monotonic()  # when it last answered
        self.accepted = time.monotonic()  # when the leader last took a report
        self._thread = threading.Thread(target=self._talk, name="ipu-node", daemon=True)
        self._thread.start()

    def exchange(self, report: Report) -> Orders | None:
        """Gives the newest report, and returns the last orders without waiting; None before the first."""
        with self._changed:
            self._given = time.monotonic()
            if report != self._report:
                self._report = report
            self._changed.notify_all()
            return self._orders

    def close(self, report: Report) -> None:
        """Gives the last report, if the leader is there, and ends the connection."""
        with self._changed:
            is_known = self._orders is not None and self._orders.status is not None
            self._report, self._deadline = report, time.monotonic() + (0.0 if is_known else _LEAVING)
            self._changed.notify_all()
        self._thread.join(_LEAVING)

    def _is_over(self) -> bool:
        return self._has_given_last or time.monotonic() > self._deadline

    def _is_ending(self) -> bool:
        return self._deadline < math.inf

    def _talk(self) -> None:
        while not self._is_over():
            try:
                with socket.create_connection(self._address, timeout=self._silence) as connection:
                    self._talk_over(connection)
            except (OSError, EOFError, RefusedError) as error:
                late = time.monotonic() > self._heard + _SAID_AFTER
                if late and not self._has_said and not self._is_ending():
                    self._has_said = True
                    host, port = self._address
                    say(f"node 0 cannot be reached at {host}:{port}: {error}. This is tried again.")
            with self._changed:
                if not self._is_over():
                    self._changed.wait(_INTERVAL if self._is_ending() else _AGAIN_AFTER)

    def _talk_over(self, connection: socket.socket) -> None:
        has_heard = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection.makefile("rb") as stream:

            def read(count: int) -> bytes:
                found = stream.read(count)
                if len(found) < count:
                    has_cause = "" if has_heard else ". Is IPU_PIPELINE_SECRET the same there?"
                    raise EOFError(f"it has ended the connection{has_cause}")
                return found

            if read(len(_HELLO)) != _HELLO:
                raise RefusedError("what listens there is not a launcher of this version")
            nonce = secrets.token_bytes(_NONCE)
            codes = _Codes(self._secret, read(_NONCE) + nonce, is_leader=False)
            connection.sendall(_HELLO + nonce)
            while True:
                with self._changed:
                    # One that cannot write to its terminal counts as silent.
                    self._changed.wait_for(self._has_report)
                    report, is_last = self._report, self._is_ending()
                connection.sendall(codes.wrap(report))
                length = _read_length(read(_LENGTH))
                code = read(_CODE)
                orders = _orders(codes.unwrap(code, read(length)))
                with self._changed:
                    self._orders = orders
                    if not orders.refusal:
                        self.accepted = time.monotonic()
                    self._heard, self._has_said, has_heard = time.monotonic(), False, True
                    if is_last:
                        self._has_given_last = True
                        return
                    self._changed.wait_for(functools.partial(self._is_other_than, report), _INTERVAL)

    def _is_other_than(self, report: Report | None) -> bool:
        return self._report is not report

    def _has_report(self) -> bool:
        return self._is_ending() or time.monotonic() < self._given + self._silence
