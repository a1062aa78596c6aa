"""Compiled programs that outlive their pipeline, for the next one that has the same.

Code that builds a pipeline anew, as an estimator does at each call, cannot know that it is the same: its
functions may have closed over other values. So it is traced again, and the comparison is between what XLA
would compile: the program's text, constants included, its devices and its options.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.ground import jax_compat

__all__ = ["KeptPrograms", "Key", "current", "identify", "jit_zeros", "text_of"]

Key: TypeAlias = "tuple[Any, ...]"

_current: contextvars.ContextVar[KeptPrograms | None] = contextvars.ContextVar("kept", default=None)


class KeptPrograms:
    """The compiled programs of successive pipelines, without those that the last one did not use."""

    def __init__(self) -> None:
        """Begins without any programs."""
        self._used: dict[Key, Any] = {}
        self._earlier: dict[Key, Any] = {}

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Makes pipelines built inside the `with` block take programs from here, whenever they compile."""
        if self._used:  # else the last block ended without compiling anything
            self._earlier, self._used = self._used, {}
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def find(self, key: Key | None) -> Any:
        """The program, ready to be called; None if there is none."""
        if key is None:
            return None
        found = self._used.get(key, self._earlier.get(key))
        if found is not None:
            self._used[key] = found
        return found

    def keep(self, key: Key | None, compiled: Any) -> None:
        """Keeps a compiled program. Without a key it does nothing."""
        if key is not None:
            self._used[key] = compiled


def current() -> KeptPrograms | None:
    """The programs that a pipeline being built may take; None outside of `KeptPrograms.building`."""
    return _current.get()


def text_of(lowered: Any) -> str:
    """The text of a program before XLA, without the first line, which has its name."""
    _name, text = lowered.as_text().split("\n", 1)
    return str(text)


def identify(lowered: Any, text: str, devices: Sequence[Any], options: Options) -> Key | None:
    """The key of a program: equal programs have equal keys."""
    if "callback" in text:
        return None
    read = jax_compat.kept_arguments(lowered)
    if read is None:
        begin = text.find("@main(")
        read = tuple(range(text.count("%arg", begin, text.find("\n", begin))))  # its first line's
        if len(read) != len(jax.tree.leaves(lowered.in_avals)):
            return None
    digest = hashlib.sha256(text.encode()).digest()  # texts hold constants, which may be large
    place = tuple((device.platform, device.id) for device in devices)
    return digest, read, place, tuple(sorted(options.items())), lowered.in_tree, lowered.out_tree


def jit_zeros(avals: Sequence[Any], sharding: Any) -> Callable[[], list[jax.Array]]:
    """A function that makes zeros of these shapes and dtypes; all pipelines share it: it compiles once."""
    return _jit_zeros(tuple((aval.shape, aval.dtype) for aval in avals), sharding)


@functools.lru_cache(maxsize=256)
def _jit_zeros(avals: tuple[tuple[tuple[int, ...], Any], ...], sharding: Any) -> Callable[[], Any]:
    def make_zeros() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype in avals]

    return jax.jit(make_zeros, out_shardings=sharding)
