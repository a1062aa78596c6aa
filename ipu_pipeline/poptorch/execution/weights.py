"""Weights on the host and on the devices, kept as PopTorch keeps them.

After training, the weights on the devices are newer than those of the user's model. They come to the host
when the user looks at a parameter or buffer: these get, while their model is wrapped, a class that notices.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["HostWeights", "host_weights_of", "on_host"]

_plain = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001  # torch's documentation of subclasses has it
_inside = threading.local()  # whether this thread copies weights itself
_owners: Any = WeakIdKeyDictionary()  # tensor -> weak reference to its HostWeights
_stale: weakref.WeakSet[HostWeights] = weakref.WeakSet()  # those whose tensors are older than a device's
_models: Any = WeakIdKeyDictionary()  # the user's model -> its HostWeights

# Asking for these needs no values.
_WITHOUT_VALUES = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "is_leaf", "layout", "ndim", "requires_grad", "shape")
} | {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel, torch.Tensor.size}


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    if _stale and not getattr(_inside, "copies", False) and function not in _WITHOUT_VALUES:
        for tensor in _find_tensors((args, kwargs)):
            reference = _owners.get(tensor)
            owner = None if reference is None else reference()
            if owner is not None:
                owner.refresh()
    with _plain():
        return function(*args, **kwargs)


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _find_tensors(part)
    elif isinstance(value, dict):
        yield from _find_tensors(tuple(value.values()))


class _WatchedParameter(torch.nn.Parameter):
    """A parameter of a wrapped model. What torch makes of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _call(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument that nobody gives
        return repr(torch.nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: Any) -> Any:
        with on_host(self):
            copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _WatchedBuffer(torch.Tensor):
    """A buffer of a wrapped model. What torch makes of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _call(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument that nobody gives
        return repr(self.detach())

    def __deepcopy__(self, memo: Any) -> Any:
        copied = self.detach().clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


_WATCHED: dict[type, type] = {torch.nn.Parameter: _WatchedParameter, torch.Tensor: _WatchedBuffer}
_PLAIN = {watched: plain for plain, watched in _WATCHED.items()}


@contextlib.contextmanager
def on_host(*tensors: torch.Tensor) -> Iterator[None]:
    """In the `with` block this thread reads and writes tensors of the host as they are.

    Args:
      *tensors: are brought up to date before.
    """
    for tensor in tensors:
        reference = _owners.get(tensor)
        owner = None if reference is None else reference()
        if owner is not None and not getattr(_inside, "copies", False):
            owner.refresh()
    before = getattr(_inside, "copies", False)
    _inside.copies = True
    try:
        with torch.no_grad(), _plain():
            yield
    finally:
        _inside.copies = before


class HostWeights:
    """The parameters and buffers of a user's model, and who has newer ones.

    Attributes:
      version: counts how often they were read back from a device.
      lock: held while weights are copied, or the newer ones are replaced.
    """

    def __init__(self) -> None:
        """Starts with the host's as the newest."""
        self.version = 0
        self.lock = threading.RLock()
        self._read_back: Callable[[], None] | None = None
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trainer: weakref.ref[Any] | None = None

    @property
    def has_trainer(self) -> bool:
        """Whether the model is wrapped for training. A wrapper that nobody has any more does not count."""
        self.refresh()  # which is what holds it
        return self._trainer is not None and self._trainer() is not None

    def register(self, executor: Any, model: torch.nn.Module, trains: bool) -> None:
        """Notes that a model is wrapped, and gives it a method `destroy`."""
        self._executors.add(executor)
        if trains:
            self._trainer = weakref.ref(executor)
        if not hasattr(type(model), "destroy"):
            vars(model)["destroy"] = _Destroy(self)

    def unregister(self, executor: Any, model: torch.nn.Module) -> None:
        """Takes that back."""
        self._executors.discard(executor)
        if self._trainer is not None and self._trainer() is executor:
            self._trainer = None
        if not self._executors and isinstance(vars(model).get("destroy"), _Destroy):
            del vars(model)["destroy"]

    def destroy(self) -> None:
        """Destroys all wrappers of the model."""
        for executor in list(self._executors):
            executor.destroy()

    def watch(self, executor: Any, model: torch.nn.Module) -> None:
        """Begins to notice who looks at the tensors, for as long as an executor needs it."""
        self._watchers.add(executor)
        self._change_classes(model, _WATCHED)

    def release(self, executor: Any, model: torch.nn.Module) -> None:
        """Ends it, when no executor needs it any more."""
        self._watchers.discard(executor)
        if not self._watchers:
            self._change_classes(model, _PLAIN)

    @contextlib.contextmanager
    def unwatched(self, model: torch.nn.Module) -> Iterator[None]:
        """In the `with` block the tensors are plain, for what looks into their classes. Needs the lock."""
        self.refresh()
        self._change_classes(model, _PLAIN)
        try:
            yield
        finally:
            if self._watchers:
                self._change_classes(model, _WATCHED)

    def _change_classes(self, model: torch.nn.Module, classes: dict[type, type]) -> None:
        for tensor in _tensors_of(model):
            other = classes.get(type(tensor))
            if other is None:
                continue
            tensor.__class__ = other
            if classes is _WATCHED:
                _owners[tensor] = weakref.ref(self)
            else:
                _owners.pop(tensor, None)

    def mark_stale(self, read_back: Callable[[], None]) -> None:
        """Notes that a device's weights are newer.

        Args:
          read_back: copies them to the host.
        """
        self._read_back = read_back
        _stale.add(self)

    def refresh(self) -> bool:
        """Copies newer weights to the host, if there are any; says whether there were."""
        if self not in _stale:
            return False
        with self.lock:
            read_back = self._read_back
            if read_back is None:  # another thread was first
                return False
            read_back()
            self.mark_fresh()
        return True

    def mark_fresh(self) -> None:
        """Notes that the host's weights are those of the device."""
        self.version += 1
        _stale.discard(self)
        self._read_back = None


class _Destroy:
    """The method `destroy` of a wrapped model. A copy of the model, or a saved one, is not wrapped."""

    def __init__(self, host: HostWeights | None = None) -> None:
        self._host = host

    def __call__(self) -> None:
        """Destroys all wrappers of the model, so that it can be wrapped again."""
        if self._host is not None:
            self._host.destroy()

    def __deepcopy__(self, memo: Any) -> _Destroy:
        return _Destroy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Destroy, ()


def host_weights_of(model: torch.nn.Module) -> HostWeights:
    """The one of a user's model."""
    known: HostWeights | None = _models.get(model)
    if known is None:
        known = _models[model] = HostWeights()
    return known


def _tensors_of(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
