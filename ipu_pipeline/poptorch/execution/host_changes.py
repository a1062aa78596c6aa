"""Warns of changes on the host while a compiled model has its own values on the devices.

Changed weights are found by torch's counters of writes to a tensor's memory. `Tensor.data` returns a tensor
with its own counter, so it is kept and watched, too. Writes by NumPy are not counted.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ipu_pipeline.poptorch.logs import logger, warn_once

__all__ = ["HostChanges", "OptimizerChanges", "note_data", "tell_of_clipping", "writing"]

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
    found = _writes.get(key)
    if found is None or found.tensor() is not tensor:
        found = _writes[key] = _Writes(weakref.ref(tensor, lambda gone: _forget(key, gone)))
    return found


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    """Forgets a tensor that is gone, unless another one has the same id by now."""
    if (known := _writes.get(key)) is not None and known.tensor is gone:
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
        known = _writes_of(tensor)
        known.aliases.append(alias)
        if len(known.aliases) > _MOST_ALIASES:
            known.offset += _version_of(known.aliases.pop(0))


def tell_of_clipping(gradient: Any) -> None:
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


class _OfModule(NamedTuple):
    """The attributes of a module that are plain values or tensors."""

    path: str  # the module's path, with a dot behind it; empty for the model
    of: Mapping[str, Any]  # all its attributes
    names: tuple[str, ...]  # the names of the plain ones
    read: Callable[[Any], Any]  # reads them
    values: Any  # their earlier values
    versions: tuple[tuple[torch.Tensor, int], ...]  # the tensors among them, and their counts of writes


class HostChanges:
    """A model's weights, and values that are compiled in, at the time when the devices got them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Notes the attributes of a user's model that are compiled in."""
        self._weights: dict[str, tuple[int, int]] = {}
        self._attributes = [
            found
            for path, module in model.named_modules()
            if (found := _read_attributes(path, module)) is not None
        ]
        self._told: set[str] = set()

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes that the devices have the current values of these tensors, by names of variables."""
        with _plainly():
            self._weights |= {name: _state(tensor) for name, tensor in tensors.items()}

    def tell(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Warns of changes since then, once of weights and once of attributes."""
        with _plainly():
            states = {name: _state(tensor) for name, tensor in tensors.items()}
        if weights := [n for n, state in states.items() if self._weights.get(n, state) != state]:
            _warn(
                self._told,
                "weights",
                f"{_join([n.partition('/')[2] for n in weights])} of the model changed on the host (by "
                "load_state_dict, by hand, or by a run of the plain model). The model continues with the "
                "devices' values. To use the host's, call copyWeightsToDevice() of the wrapped model after "
                "each change; load_state_dict of the wrapped model does that itself.",
            )
        self._weights |= states
        if changed := [name for part in self._attributes for name in _find_changed(part)]:
            _warn(
                self._told,
                "attributes",
                f"{_join(changed)} of the model changed since it was compiled. If forward reads this, it "
                "still gets the old value. Call destroy() on the model and wrap it again; or make it an "
                "input, or a buffer (register_buffer), which copyWeightsToDevice() copies.",
            )


class OptimizerChanges:
    """An optimizer's values at the time when the devices got them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the optimizer's values."""
        self._told: set[str] = set()
        self.note(optimizer)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the devices have an optimizer's current values."""
        self._values, self._state = _read_optimizer(optimizer), optimizer.state

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
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
                self._told,
                "values",
                f"{_join(names)} of the optimizer changed since the devices got it. They continue with the "
                "old value. After each change, including a scheduler's, call setOptimizer(optimizer) of "
                "the wrapped model.",
            )
        if optimizer.state is not self._state and not hasattr(optimizer, "device_state"):
            _warn(
                self._told,
                "state",
                "The optimizer has loaded a state since the model was compiled. The devices continue with "
                "their own. Call destroy() on the model, load the state, and wrap it again.",
            )
        self._values, self._state = now, optimizer.state


def _warn(told: set[str], kind: str, message: str) -> None:
    if kind not in told:
        told.add(kind)
        logger.warning(message)


def _version(tensor: torch.Tensor) -> int:
    """Returns the count of writes to a tensor. Tensors made in inference mode have none."""
    with _plainly():
        return 0 if tensor.is_inference() else int(_version_of(tensor))


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a value that changes with each write that is not ours, and with other memory."""
    count = 0 if tensor.is_inference() else int(_version_of(tensor))
    if (known := _writes.get(id(tensor))) is not None and known.tensor() is tensor:
        count += known.offset + sum(map(_version_of, known.aliases))
    return count, tensor.data_ptr()


def _read_attributes(path: str, module: torch.nn.Module) -> _OfModule | None:
    own = vars(module)
    names = tuple(name for name, value in own.items() if name != "training" and _is_plain(value))
    if not names:
        return None
    read = operator.itemgetter(*names)
    values = read(own)
    tensors = [own[name] for name in names if isinstance(own[name], torch.Tensor)]
    versions = tuple((tensor, _version(tensor)) for tensor in tensors)
    return _OfModule(f"{path}." if path else "", own, names, read, values, versions)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, _PLAIN) for part in value)
    return isinstance(value, (*_PLAIN, torch.Tensor))


def _find_changed(part: _OfModule) -> list[str]:
    """Returns the full names of attributes that have changed."""
    try:
        now = part.read(part.of)
    except KeyError:  # one was removed
        now = tuple(part.of.get(name) for name in part.names)
        now = now if len(now) > 1 else now[0]
    single = len(part.names) == 1
    pairs = zip(
        (now,) if single else now, (part.values,) if single else part.values, part.names, strict=True
    )
    changed = [name for value, was, name in pairs if value is not was and not _is_same(value, was)]
    written = {id(tensor) for tensor, version in part.versions if _version(tensor) != version}
    changed += [name for name in part.names if id(part.of.get(name)) in written]
    return [f"{part.path}{name}" for name in dict.fromkeys(changed)]


def _is_same(value: Any, was: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(was, torch.Tensor) or type(value) is not type(was):
        return False
    return bool(value == was) or (isinstance(was, float) and math.isnan(value) and math.isnan(was))


def _read_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Reads the values of each group, and last those of the whole optimizer, by their names in warnings."""
    found: list[dict[str, Any]] = [
        {f"{name} of group {number}": _as_value(value) for name, value in group.items()}
        for number, group in enumerate(optimizer.param_groups)
    ]
    whole = {
        name: getattr(optimizer, name)
        for name in ("loss_scaling", "max_grad_norm")
        if hasattr(optimizer, name)
    }
    return [*found, whole]


def _as_value(value: Any) -> Any:
    """Returns a value that can be compared: for the list of parameters, its length."""
    if isinstance(value, list):
        return len(value)
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _join(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_NAMES])
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
