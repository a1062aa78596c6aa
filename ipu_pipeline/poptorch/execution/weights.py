"""Weights on the host and on the devices, kept as PopTorch keeps them.

After training, the weights on the devices are newer than those of the user's model. They are copied to the
host when the user reads a parameter or buffer: while their model is wrapped, these have a class that
notices.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ipu_pipeline.poptorch.enums import CommGroupType, VariableRetrievalMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.host_changes import note_data, tell_of_clipping
from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["HostWeights", "host_weights_of", "on_host", "register"]

_plain = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001  # documented with torch's subclasses
_inside = threading.local()  # whether this thread copies weights itself
_owners: Any = WeakIdKeyDictionary()  # tensor -> weak reference to its HostWeights
_asked: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the executor it was read from
_stale: weakref.WeakSet[HostWeights] = weakref.WeakSet()  # those with tensors older than a device's
_lock = threading.RLock()  # held while owners are found
_HOLDER = "_ipu_pipeline_weights"  # the attribute of a model that keeps its HostWeights alive

# Reading these needs no values.
_WITHOUT_VALUES = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "is_leaf", "layout", "ndim", "requires_grad", "shape")
} | {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel, torch.Tensor.size}

# Attributes that are watched for changes without effect.
_DATA, _GRADIENT = (getattr(torch.Tensor, name).__get__ for name in ("data", "grad"))
_TOLD = {_DATA, _GRADIENT}


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    if _stale and not getattr(_inside, "copies", False) and function not in _WITHOUT_VALUES:
        for tensor in _find_tensors((args, kwargs)):
            reference = _owners.get(tensor)
            owner = None if reference is None else reference()
            if owner is not None:
                owner.refresh()
    with _plain():
        made = function(*args, **kwargs)
        if function in _TOLD and not getattr(_inside, "copies", False):
            if function == _DATA:
                note_data(args[0], made)
            elif args[0].requires_grad:
                tell_of_clipping(made)
    return made


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _find_tensors(part)
    elif isinstance(value, dict):
        yield from _find_tensors(tuple(value.values()))


class _Watched:
    """A mixin for the class of a wrapped model's tensors. Results that torch makes do not have it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _call(func, args, kwargs)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        size_of_group: int,
        retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Gives groups of replicas their own values; see `PoplarExecutor.per_replica_params`."""
        reference = _asked.get(self)
        executor = None if reference is None else reference()
        if executor is None:
            raise Error(
                "replicaGrouping is for a parameter that is read from a wrapped model, as in "
                "executor.fc.weight.replicaGrouping(kind, size, mode). By its name it is set by "
                "executor.per_replica_params['fc.weight'] = (kind, size, mode)."
            )
        executor.group_replicas(self, (comm_group_type, size_of_group, retrieval_mode))

    def __repr__(self) -> str:
        return repr(_unwatched_copy(self, shares_memory=True))

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = _unwatched_copy(self, shares_memory=False)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unwatched_copy(self, shares_memory=True).__reduce_ex__(protocol)


def _unwatched_copy(tensor: Any, shares_memory: bool) -> Any:
    plain = type(tensor).plain
    with on_host(tensor):
        values = tensor.detach()
        values = values if shares_memory else values.clone()
        if issubclass(plain, torch.nn.Parameter):
            made = torch.nn.Parameter(values, tensor.requires_grad)
            made.__class__ = plain
            return made
        return values


@functools.cache
def _watched_class(plain: type) -> type | None:
    """Returns the class that replaces another one while its tensors are watched.

    Returns None if the other class has its own `__torch_function__`.
    """
    own = (torch.Tensor.__torch_function__, torch.nn.Parameter.__torch_function__)
    if not any(plain.__torch_function__ == known for known in own):  # type: ignore[attr-defined]
        warn_once(
            f"Tensors of class {plain.__name__} have a __torch_function__ of their own. They do not get "
            "newer weights automatically: call copyWeightsToHost() of the wrapped model."
        )
        return None
    return type(f"Watched{plain.__name__}", (_Watched, plain), {"plain": plain})


@contextlib.contextmanager
def on_host(*tensors: torch.Tensor) -> Iterator[None]:
    """Lets this thread read and write tensors of the host unwatched in the `with` block."""
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
    """The parameters and buffers of a user's model, and the executor that has newer ones.

    Models that share a tensor, such as a model and its submodule, share this.

    Attributes:
      version: the number of times they were read from a device, or given to one by a training model.
      lock: held while weights are copied, or the newer ones are replaced.
      trainers: the executors that train them.
    """

    def __init__(self) -> None:
        """Starts with the host's weights as the newest."""
        self.version = 0
        self.lock = threading.RLock()
        self._read_back: Callable[[], None] | None = None
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._newest: weakref.ref[Any] | None = None  # the executor with newer weights

    def find_trainer(self, model: torch.nn.Module) -> Any:
        """Returns the wrapper that trains a model, or None. Wrappers that are not in use do not count."""
        self.refresh()  # otherwise newer weights keep a wrapper alive
        return next((trainer for trainer in self.trainers if trainer.model is model), None)

    def register(self, executor: Any, model: torch.nn.Module, trains: bool) -> None:
        """Notes that a model is wrapped, and gives it a method `destroy`."""
        self._executors.add(executor)
        if trains:
            self.trainers.add(executor)
        if not hasattr(type(model), "destroy"):
            vars(model)["destroy"] = vars(model)[_HOLDER]

    def unregister(self, executor: Any, model: torch.nn.Module) -> None:
        """Undoes `register`."""
        self._executors.discard(executor)
        self.trainers.discard(executor)
        if not any(other.model is model for other in self._executors):
            if isinstance(vars(model).get("destroy"), _Destroy):
                del vars(model)["destroy"]
            vars(model).pop(_HOLDER, None)

    def destroy(self) -> None:
        """Destroys all wrappers of the model."""
        for executor in list(self._executors):
            executor.destroy()

    def watch(self, executor: Any, model: torch.nn.Module) -> None:
        """Watches for reads of the tensors, for as long as an executor needs it."""
        self._watchers.add(executor)
        for tensor in _tensors_of(model):
            if hasattr(type(tensor), "plain"):
                continue
            kind: Any = type(tensor)
            other = _watched_class(kind)
            if other is not None:
                _owners[tensor] = weakref.ref(self)
                tensor.__class__ = other
                self._watched.append(weakref.ref(tensor))

    def ask(self, executor: Any, model: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Notes the executor that a parameter was read from, for the parameter's `replicaGrouping`."""
        self.watch(executor, model)
        _asked[parameter] = weakref.ref(executor)

    def release(self, executor: Any) -> None:
        """Stops watching when no executor needs it any longer."""
        self._watchers.discard(executor)
        if not self._watchers:
            for tensor in self._find_watched():
                tensor.__class__ = type(tensor).plain
            self._watched = []

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Makes the tensors plain in the `with` block, for code that inspects classes. Needs the lock."""
        self.refresh()
        tensors: list[tuple[Any, Any]] = [(tensor, type(tensor)) for tensor in self._find_watched()]
        for tensor, kind in tensors:
            tensor.__class__ = kind.plain
        try:
            yield
        finally:
            for tensor, kind in tensors:
                tensor.__class__ = kind

    def _find_watched(self) -> list[Any]:
        tensors = [reference() for reference in self._watched]
        return [tensor for tensor in tensors if tensor is not None and hasattr(type(tensor), "plain")]

    def mark_stale(self, executor: Any, read_back: Callable[[], None]) -> None:
        """Notes that a device's weights are newer."""
        self._newest, self._read_back = weakref.ref(executor), read_back
        _stale.add(self)

    def is_newest(self, executor: Any) -> bool:
        """Whether an executor has weights that are newer than the host's."""
        return self._read_back is not None and self._newest is not None and self._newest() is executor

    def refresh(self) -> bool:
        """Copies newer weights to the host, if there are any. Returns whether there were."""
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
        """Notes that the host's weights are as new as the device's."""
        self.version += 1
        _stale.discard(self)
        self._read_back = None

    def take_over(self, other: HostWeights) -> None:
        """Merges another one into this one, because their models share tensors from now on."""
        with self.lock, other.lock:
            other.refresh()
            self.version += other.version + 1
            for executor in [*other._executors, *other._watchers]:
                executor.share_weights(self)
            self._executors |= other._executors
            self._watchers |= other._watchers
            self._watched += other._watched
            self.trainers |= other.trainers


class _Destroy:
    """The method `destroy` of a wrapped model. A copy of the model, or a saved one, is not wrapped."""

    def __init__(self, host: HostWeights | None = None) -> None:
        self.host = host

    def __call__(self) -> None:
        """Destroys all wrappers of the model, so that it can be wrapped again."""
        if self.host is not None:
            self.host.destroy()

    def __deepcopy__(self, memo: Any) -> _Destroy:
        return _Destroy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Destroy, ()


def host_weights_of(model: torch.nn.Module) -> HostWeights:
    """Returns the `HostWeights` of a user's model and of all models that share tensors with it."""
    with _lock:
        tensors = _tensors_of(model)
        found: dict[int, HostWeights] = {}
        holder = vars(model).get(_HOLDER)
        if isinstance(holder, _Destroy) and holder.host is not None:
            found[id(holder.host)] = holder.host
        for tensor in tensors:
            reference = _owners.get(tensor)
            host = None if reference is None else reference()
            if host is not None:
                found[id(host)] = host
        chosen, *others = [*found.values()] or [HostWeights()]
        for other in others:
            chosen.take_over(other)
        for tensor in tensors:
            _owners[tensor] = weakref.ref(chosen)
        if others:
            for owned, reference in list(_owners.items()):
                if reference() in others:
                    _owners[owned] = weakref.ref(chosen)
        vars(model)[_HOLDER] = _Destroy(chosen)
        return chosen


def register(executor: Any, model: torch.nn.Module, trains: bool) -> None:
    """Notes that a model is wrapped."""
    host = host_weights_of(model)
    with host.lock:
        trainer = host.find_trainer(model) if trains else None
        if trainer is not None and trainer is not executor:
            raise RuntimeError(
                "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the "
                "model to unwrap before wrapping again."
            )
        host.register(executor, model, trains)


def _tensors_of(model: torch.nn.Module) -> list[Any]:
    return [*model.parameters(), *model.buffers()]
