"""Tells a watcher of a plan's programs and sends; see `engine.watching`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ipu_pipeline.engine.plan.plan import ALL, Instruction, Numbered, Op, Plan
from ipu_pipeline.engine.plan.readers.run import Cursor, Linked
from ipu_pipeline.engine.watching import Launch, LaunchKind, Watcher

__all__ = ["watched"]


def watched(
    plan: Plan, linked: Sequence[list[Linked]], watcher: Watcher, runner: Any, cursor: Cursor
) -> list[list[Linked]]:
    """The same blocks, of which the watcher hears."""
    telling = _Telling(watcher, runner, cursor)
    known = {
        numbered: telling.wrap(numbered, own) for numbered, own in zip(plan.blocks, linked, strict=True)
    }
    return [known[numbered] for numbered in plan.blocks]


class _Telling:
    def __init__(self, watcher: Watcher, runner: Any, cursor: Cursor) -> None:
        self._watcher, self._runner, self._cursor = watcher, runner, cursor
        self._last: dict[int, Launch] = {}  # by replica, the program that sends belong to
        self._known: dict[Numbered, list[Linked]] = {}

    def wrap(self, numbered: Numbered, linked: Sequence[Linked]) -> list[Linked]:
        """A block whose functions tell the watcher."""
        if numbered not in self._known:
            self._known[numbered] = [
                (self._wrap(one, own[0]), *own[1:])
                for one, own in zip(numbered.instructions, linked, strict=True)
            ]
        return self._known[numbered]

    def _wrap(self, one: Instruction, function: Callable[..., Any]) -> Callable[..., Any]:
        if one.op is Op.RUN:
            assert one.program is not None
            if one.program.binds and one.program.group.is_here:
                return functools.partial(self._start, one, function)
            return functools.partial(self._forget, one, function)
        if one.op is Op.SEND and one.micro_batch != ALL:
            return functools.partial(self._send, one, function)
        return functools.partial(self._feed, function) if one.op is Op.FEED else function

    def _start(self, one: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        program, cursor = one.program, self._cursor
        assert program is not None
        is_update = program.kind is None
        launch = Launch(
            self._runner,
            LaunchKind.UPDATE if is_update else program.kind.words,
            program.stage,
            cursor.step,
            cursor.micro_batch,
            cursor.count,
            program.group.first_devices,
            program.name,
            program.function is not program.jitted,
        )
        if one.replica == ALL:  # sends that follow belong to a program of all replicas
            self._last.clear()
        else:
            self._last[one.replica] = launch
        return self._watcher.run(launch, function, list(arguments))

    def _forget(self, one: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
        """Starts a program of another process, or one between stages, which has no sends."""
        if one.program is not None and one.program.binds:
            self._last.pop(one.replica, None)
        return function(*arguments)

    def _send(self, one: Instruction, function: Callable[..., Any], *values: Any) -> Any:
        copies = function(*values)
        if one.replica in self._last:
            self._watcher.moved(self._last[one.replica], one.group.first_devices, copies)
        return copies

    def _feed(self, function: Callable[..., Any], take: Any) -> Any:
        cursor = self._cursor
        with self._watcher.waiting(cursor.step, cursor.micro_batch, cursor.count):
            return function(take)
