"""Weights on the host and on the devices, kept as PopTorch keeps them.

After training, the weights on the devices are newer than those of the user's model. They are copied to the
host when the user reads a parameter or buffer: while their model is wrapped, these have a class that
notices.

Changes on the host while a compiled model has its own values are warned of. Changed weights are found by
torch's counters of writes to a tensor's memory. `Tensor.data` returns a tensor with its own counter, so it
is kept and watched, too. Writes by NumPy are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ipu_pipeline.poptorch.enums import CommGroupType, VariableRetrievalMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import logger, warn_once

# Changes on the host.

_MOST_ALIASES = 8  # watched per tensor; older ones were written to long ago, or never
_MOST_NAMES = 5
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_CLIPPING = "torch.nn.utils.clip_grad"
_plainly = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001  # documented with torch's subclasses
_version_of = operator.attrgetter("_version")


@dataclass
class _Writes:
    """The writes to a tensor besides those in its own counter."""

    tensor: weakref.ref[torch.Tensor]  # the tensor
    offset: int = 0  # to add to the counter: minus our own writes, plus those by aliases dropped since
    aliases: list[torch.Tensor] = field(default_factory=list)  # tensors that `Tensor.data` returned


_writes: dict[int, _Writes] = {}  # by the tensor's id, for as long as it lives


def _writes_of(tensor: torch.Tensor) -> _Writes:
    key = id(tensor)
    writes = _writes.get(key)
    if writes is None or writes.tensor() is not tensor:
        writes = _writes[key] = _Writes(weakref.ref(tensor, lambda gone: _forget(key, gone)))
    return writes


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    """Forgets a tensor that is gone, unless another one has the same id by now."""
    if (writes := _writes.get(key)) is not None and writes.tensor is gone:
        del _writes[key]


@contextmanager
def writing(tensor: torch.Tensor) -> Iterator[None]:
    """Marks writes to a tensor in the `with` block as the library's own, not the user's."""
    before = _version(tensor)
    yield
    _writes_of(tensor).offset -= _version(tensor) - before


def note_data(tensor: torch.Tensor, alias: Any) -> None:
    """Notes a tensor that `Tensor.data` returned, through which the original may be written to."""
    if not alias.is_inference():
        writes = _writes_of(tensor)
        writes.aliases.append(alias)
        if len(writes.aliases) > _MOST_ALIASES:
            writes.offset += _version_of(writes.aliases.pop(0))


def warn_of_clipping(gradient: Any) -> None:
    """Warns if torch's functions that clip gradients ask a parameter for its gradient, and it has none."""
    frame: Any = sys._getframe(1)  # noqa: SLF001  # as `inspect.currentframe`
    for _number in range(8):
        if gradient is not None or frame is None:
            return
        if frame.f_globals.get("__name__") == _CLIPPING:
            warn_once(
                "torch.nn.utils.clip_grad_norm_ and similar functions find no gradients, and clip nothing: "
                "a wrapped model's gradients are on the devices, where they are used within the call. Clip "
                "them there, for example by poptorch.optim.SGD(..., max_grad_norm=1.0), Adam or AdamW."
            )
            return
        frame = frame.f_back


class _ModuleAttributes(NamedTuple):
    """The attributes of a module that are plain values or tensors."""

    path: str  # the module's path, with a dot behind it; empty for the model
    attributes: Mapping[str, Any]  # all its attributes
    names: tuple[str, ...]  # the names of the plain ones
    reader: Callable[[Any], Any]  # reads them
    values: Any  # their earlier values
    versions: tuple[tuple[torch.Tensor, int], ...]  # the tensors among them, and their counts of writes


class HostChanges:
    """A model's weights, and values that are compiled in, at the time when the devices got them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Notes the attributes of a user's model that are compiled in."""
        self._weights: dict[str, tuple[int, int]] = {}
        self._warned_kinds: set[str] = set()
        self.read_attributes(model)

    def read_attributes(self, model: torch.nn.Module) -> None:
        """Notes the attributes of a user's model."""
        self._attributes = [
            attributes
            for path, module in model.named_modules()
            if (attributes := _read_attributes(path, module)) is not None
        ]

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes that the devices have the current values of these tensors, by names of variables."""
        with _plainly():
            self._weights |= {name: _state(tensor) for name, tensor in tensors.items()}

    def warn(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Warns of changes since then, once of weights and once of attributes."""
        with _plainly():
            states = {name: _state(tensor) for name, tensor in tensors.items()}
        if weights := [n for n, state in states.items() if self._weights.get(n, state) != state]:
            _warn(
                self._warned_kinds,
                "weights",
                f"{_join([n.partition('/')[2] for n in weights])} of the model changed on the host (by "
                "load_state_dict, by hand, or by a run of the plain model). The model continues with the "
                "devices' values. To use the host's, call copyWeightsToDevice() of the wrapped model after "
                "each change; load_state_dict of the wrapped model does that itself.",
            )
        self._weights |= states
        if changed := [name for part in self._attributes for name in _find_changed(part)]:
            _warn(
                self._warned_kinds,
                "attributes",
                f"{_join(changed)} of the model changed since it was compiled. If forward reads this, it "
                "still gets the old value. Call destroy() on the model and wrap it again; or make it an "
                "input, or a buffer (register_buffer), which copyWeightsToDevice() copies.",
            )


class OptimizerChanges:
    """An optimizer's values at the time when the devices got them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the optimizer's values."""
        self._warned_kinds: set[str] = set()
        self.note(optimizer)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the devices have an optimizer's current values."""
        self._values, self._state = _read_optimizer(optimizer), optimizer.state

    def warn(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns of changes since then, once of values and once of a loaded state."""
        now = _read_optimizer(optimizer)
        names = [
            name
            for part, was in zip(now, self._values, strict=False)
            for name, value in part.items()
            if was.get(name, value) != value
        ]
        if len(now) != len(self._values):
            names = [f"The number of groups, {len(now) - 1},"]
        if names:
            _warn(
                self._warned_kinds,
                "values",
                f"{_join(names)} of the optimizer changed since the devices got it. They continue with the "
                "old value. After each change, including a scheduler's, call setOptimizer(optimizer) of "
                "the wrapped model.",
            )
        if optimizer.state is not self._state and not hasattr(optimizer, "device_state"):
            _warn(
                self._warned_kinds,
                "state",
                "The optimizer has loaded a state since the model was compiled. The devices continue with "
                "their own. Call destroy() on the model, load the state, and wrap it again.",
            )
        self._values, self._state = now, optimizer.state


def _warn(warned_kinds: set[str], kind: str, message: str) -> None:
    if kind not in warned_kinds:
        warned_kinds.add(kind)
        logger.warning(message)


def _version(tensor: torch.Tensor) -> int:
    """Returns the count of writes to a tensor. Tensors made in inference mode have none."""
    with _plainly():
        return 0 if tensor.is_inference() else int(_version_of(tensor))


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a value that changes with each write that is not ours, and with other memory."""
    count = 0 if tensor.is_inference() else int(_version_of(tensor))
    if (writes := _writes.get(id(tensor))) is not None and writes.tensor() is tensor:
        count += writes.offset + sum(map(_version_of, writes.aliases))
    return count, tensor.data_ptr()


def _read_attributes(path: str, module: torch.nn.Module) -> _ModuleAttributes | None:
    attributes = vars(module)
    names = tuple(name for name, value in attributes.items() if name != "training" and _is_plain(value))
    if not names:
        return None
    reader = operator.itemgetter(*names)
    values = reader(attributes)
    tensors = [attributes[name] for name in names if isinstance(attributes[name], torch.Tensor)]
    versions = tuple((tensor, _version(tensor)) for tensor in tensors)
    return _ModuleAttributes(f"{path}." if path else "", attributes, names, reader, values, versions)


def plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are plain values, without its mode."""
    return {
        name: value
        for name, value in vars(module).items()
        if name != "training" and not isinstance(value, torch.Tensor) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, _PLAIN) for part in value)
    return isinstance(value, (*_PLAIN, torch.Tensor))


def _find_changed(part: _ModuleAttributes) -> list[str]:
    """Returns the full names of attributes that have changed."""
    try:
        now = part.reader(part.attributes)
    except KeyError:  # one was removed
        now = tuple(part.attributes.get(name) for name in part.names)
        now = now if len(now) > 1 else now[0]
    single = len(part.names) == 1
    pairs = zip(
        (now,) if single else now, (part.values,) if single else part.values, part.names, strict=True
    )
    changed = [name for value, was, name in pairs if value is not was and not _is_same(value, was)]
    written = {id(tensor) for tensor, version in part.versions if _version(tensor) != version}
    changed += [name for name in part.names if id(part.attributes.get(name)) in written]
    return [f"{part.path}{name}" for name in dict.fromkeys(changed)]


def _is_same(value: Any, was: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(was, torch.Tensor) or type(value) is not type(was):
        return False
    return bool(value == was) or (isinstance(was, float) and math.isnan(value) and math.isnan(was))


def _read_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Reads the values of each group, and last those of the whole optimizer, by their names in warnings."""
    groups: list[dict[str, Any]] = [
        {f"{name} of group {number}": _as_value(value) for name, value in group.items()}
        for number, group in enumerate(optimizer.param_groups)
    ]
    optimizer_values = {
        name: getattr(optimizer, name)
        for name in ("loss_scaling", "max_grad_norm")
        if hasattr(optimizer, name)
    }
    return [*groups, optimizer_values]


def _as_value(value: Any) -> Any:
    """Returns a value that can be compared: for the list of parameters, its length."""
    if isinstance(value, list):
        return len(value)
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _join(names: Sequence[str]) -> str:
    parts = list(names[:_MOST_NAMES])
    if more := len(names) - len(parts):
        parts.append(f"{more} more")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# Newer weights on the devices.

_inside = threading.local()  # whether this thread copies weights itself
_owners: Any = WeakIdKeyDictionary()  # tensor -> weak reference to its HostWeights
_readers: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the executor it was read from
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
_WATCHED_READS = {_DATA, _GRADIENT}


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    if _stale and not getattr(_inside, "copies", False) and function not in _WITHOUT_VALUES:
        for tensor in _find_tensors((args, kwargs)):
            reference = _owners.get(tensor)
            owner = None if reference is None else reference()
            if owner is not None:
                owner.refresh()
    with _plainly():
        result = function(*args, **kwargs)
        if function in _WATCHED_READS and not getattr(_inside, "copies", False):
            if function == _DATA:
                note_data(args[0], result)
            elif args[0].requires_grad:
                warn_of_clipping(result)
    return result


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _find_tensors(part)
    elif isinstance(value, dict):
        yield from _find_tensors(tuple(value.values()))


class _Watched:
    """A mixin for the class of a wrapped model's tensors. Results that torch makes do not have it.

    Only the class changes, not the tensor, so that optimizers and modules keep the objects that they hold.
    """

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
        reference = _readers.get(self)
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
            parameter = torch.nn.Parameter(values, tensor.requires_grad)
            parameter.__class__ = plain
            return parameter
        return values


@functools.cache
def _watched_class(plain: type) -> type | None:
    """Returns the class that replaces another one while its tensors are watched.

    Returns None if the other class has its own `__torch_function__`.
    """
    standard_functions = (torch.Tensor.__torch_function__, torch.nn.Parameter.__torch_function__)
    if not any(plain.__torch_function__ == standard for standard in standard_functions):  # type: ignore[attr-defined]
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
        with torch.no_grad(), _plainly():
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
        self.watch_tensors(model)

    def watch_tensors(self, model: torch.nn.Module) -> None:
        """Watches for reads of the tensors that a model has now."""
        for tensor in _tensors_of(model):
            if hasattr(type(tensor), "plain"):
                continue
            kind: Any = type(tensor)
            watched_class = _watched_class(kind)
            if watched_class is not None:
                _owners[tensor] = weakref.ref(self)
                tensor.__class__ = watched_class
                self._watched.append(weakref.ref(tensor))

    def ask(self, executor: Any, model: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Notes the executor that a parameter was read from, for the parameter's `replicaGrouping`."""
        self.watch(executor, model)
        _readers[parameter] = weakref.ref(executor)

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
        """Merges another `HostWeights` into this one, because their models share tensors from now on."""
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
        hosts: dict[int, HostWeights] = {}
        holder = vars(model).get(_HOLDER)
        if isinstance(holder, _Destroy) and holder.host is not None:
            hosts[id(holder.host)] = holder.host
        for tensor in tensors:
            reference = _owners.get(tensor)
            host = None if reference is None else reference()
            if host is not None:
                hosts[id(host)] = host
        chosen, *other_hosts = [*hosts.values()] or [HostWeights()]
        for other in other_hosts:
            chosen.take_over(other)
        for tensor in tensors:
            _owners[tensor] = weakref.ref(chosen)
        if other_hosts:
            for owned, reference in list(_owners.items()):
                if reference() in other_hosts:
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
