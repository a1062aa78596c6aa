"""Hides what capturing does to a model's modules from other threads.

While a model is captured, tensors without values replace its parameters and buffers. Another thread may
save the model meanwhile, or give its parameters to an optimizer: it sees the real ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ipu_pipeline.processes import interrupts

_KINDS = ("_parameters", "_buffers", "_modules")
_lock = threading.RLock()  # models may have modules in common
_numbers = itertools.count(1)
_current: contextvars.ContextVar[int] = contextvars.ContextVar(
    "view", default=0
)  # a thread has none at first


def _is_current(number: int) -> bool:
    return _current.get() == number


class _Views(dict[str, Any]):
    """A dictionary that is a copy for the thread that makes it, and the given one for all other threads."""

    def __init__(self, for_others: dict[str, Any]) -> None:
        super().__init__()
        self._for_others = for_others
        self._own = dict(for_others)
        self._number = _current.get()

    def view(self) -> dict[str, Any]:
        return self._own if _is_current(self._number) else self._for_others

    def __ior__(self, other: Any) -> _Views:  # type: ignore[override, misc]
        self.view().update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(list(self.view().items()))


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: _Views, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.view(), name)(*args, **kwargs)

    return method


for _name in vars(dict).keys() - vars(_Views).keys() - {"__new__", "__getattribute__", "__class_getitem__"}:
    setattr(_Views, _name, _passed_on(_name))


@contextlib.contextmanager
def changed_for_this_thread_alone(model: torch.nn.Module) -> Iterator[None]:
    """Hides from other threads what this thread registers or replaces in a model's modules inside `with`.

    What other threads register stays. Other attributes, such as `training`, are the same for all threads.
    Only one thread at a time may be in such a block.
    """
    torch.compiler.assume_constant_result(_is_current)  # for Dynamo, which traces branches and bodies
    with _lock:
        dictionaries = [(vars(module), kind) for module in model.modules() for kind in _KINDS]
        before = [attributes[kind] for attributes, kind in dictionaries]
        token = _current.set(_current.get() or next(_numbers))
        try:
            for attributes, kind in dictionaries:
                attributes[kind] = _Views(attributes[kind])
            yield
        finally:
            with interrupts.deferred():
                for (attributes, kind), values in zip(dictionaries, before, strict=True):
                    attributes[kind] = values
                _current.reset(token)


def seeing_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it sees a model as this thread does, even in another thread."""
    number = _current.get()

    def call(*args: Any) -> Any:
        token = _current.set(number)
        try:
            return function(*args)
        finally:
            _current.reset(token)

    return call
