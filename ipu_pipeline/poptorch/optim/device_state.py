"""The state that an optimizer has on the devices, as the optimizer on the host knows it.

While a model is wrapped with the optimizer, the executor has the state and is asked for it. Before and
after that, the optimizer keeps the state: from one executor to the next, or from `load_state_dict`. As in
torch, the state belongs to parameters. Names only matter in the dicts that are saved and loaded: models may
have different names for a parameter, or the same name for different ones. Then the saved name is followed
by "#" and the parameter's number in the optimizer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ipu_pipeline.poptorch import logs

_SEPARATOR = "___"


class SavedState(NamedTuple):
    """An optimizer's state on the host.

    Attributes:
      ipu_state: what the formulas keep. "exp_avg___model/fc.weight" is the state of that variable which
        torch calls exp_avg.
      ipu_param: the values of the hyperparameters in use. "lr___0" is the learning rate of group 0.
    """

    ipu_state: Mapping[str, torch.Tensor]
    ipu_param: Mapping[str, torch.Tensor]


def key_of(slot: str, name: str) -> str:
    """Returns the key of `SavedState.ipu_state` for a variable's slot."""
    return f"{slot}{_SEPARATOR}{name}"


def split_key(key: str) -> tuple[str, str]:
    """Returns the slot and the variable of a key of `SavedState.ipu_state`; "" for no variable."""
    slot, _separator, name = key.partition(_SEPARATOR)
    return slot, name


def shorten(names: Collection[str]) -> str:
    """Returns names for a message: the first three, and how many more."""
    text = ", ".join([*names][:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"


class _Kept(NamedTuple):
    """A parameter's entry: the names of its variable, the newest last, and its state by slots."""

    names: tuple[str, ...]
    slots: Mapping[str, torch.Tensor]


class DeviceState:
    """Finds an optimizer's state: the executor that uses it has it, or this object keeps it."""

    def __init__(self) -> None:
        """Starts without a state."""
        self._kept: dict[torch.Tensor, _Kept] = {}
        self._unclaimed: dict[str, dict[str, torch.Tensor]] = {}  # by the names in a loaded state
        self._whole: Mapping[str, torch.Tensor] = {}  # of no single parameter
        self._values: Mapping[str, torch.Tensor] | None = None  # `SavedState.ipu_param`
        self._is_loaded = False
        self._source: Callable[[], Callable[[], SavedState | None] | None] | None = None
        self._parameters: Mapping[str, torch.Tensor] = {}  # the source's

    def connect(
        self, fetch: Callable[[], SavedState | None], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Sets which executor has the state from now on.

        Args:
          fetch: returns it, or None if there is none yet. A method is held weakly, like a function: once
            its object is gone, the last known state is used.
          parameters: the parameters that the executor trains, by the names of their variables.
        """
        is_method = hasattr(fetch, "__self__")
        self._source = weakref.WeakMethod(fetch) if is_method else weakref.ref(fetch)
        self._parameters, self._is_loaded = parameters, False

    @property
    def is_loaded(self) -> bool:
        """Whether the user loaded it, and no model has begun with it yet."""
        return self._is_loaded

    @property
    def user(self) -> Any:
        """The object whose method returns the state now, or None."""
        fetch = None if self._source is None else self._source()
        return getattr(fetch, "__self__", None)

    def disconnect(self) -> None:
        """Fetches the state one last time and keeps it here."""
        self._update()
        self._source, self._parameters = None, {}

    def keep(self, saved: SavedState, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keeps the state that an executor has, or had. What is known of other parameters stays.

        Args:
          saved: the state.
          parameters: as for `connect`.
        """
        self._whole, by_name = _sort(saved.ipu_state)
        self._values = saved.ipu_param
        for name, parameter in parameters.items():
            self._note(parameter, name, by_name.get(name, {}))

    def read(self, of_optimizer: Sequence[torch.Tensor]) -> SavedState | None:
        """Returns the state of an optimizer's parameters, under the newest names; None if there is none."""
        self._update()
        if self._values is None:
            return None
        state = dict(self._whole)
        for name, unclaimed in self._unclaimed.items():
            state |= {key_of(slot, name): value for slot, value in unclaimed.items()}
        entries = {p: entry for p in of_optimizer if (entry := self._kept.get(p)) and entry.slots}
        counts = Counter(entry.names[-1] for entry in entries.values())
        for number, parameter in enumerate(of_optimizer):
            if parameter in entries:
                names, slots = entries[parameter]
                name = names[-1] if counts[names[-1]] == 1 else _numbered(names[-1], number)
                state |= {key_of(slot, name): value for slot, value in slots.items()}
        return SavedState(state, self._values)

    def load(self, saved: SavedState | None, of_optimizer: Sequence[torch.Tensor] = ()) -> None:
        """Replaces the state by one that the user loads, or by none, for the next call of a model.

        Args:
          saved: the state.
          of_optimizer: all the optimizer's parameters.
        """
        self._whole, self._unclaimed = _sort(saved.ipu_state if saved else {})
        self._values, self._is_loaded = (saved.ipu_param if saved else None), True
        counts = Counter(name for entry in self._kept.values() for name in entry.names)
        for number, parameter in enumerate(of_optimizer):
            if parameter in self._kept:
                names = self._kept[parameter].names
                candidates = [_numbered(name, number) for name in names]
                candidates += [name for name in names if counts[name] == 1]
                self._kept[parameter] = _Kept(names, self._claim(candidates))

    def _claim(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """Takes the loaded state that has the first of these names that there is."""
        return next((self._unclaimed.pop(name) for name in names if name in self._unclaimed), {})

    def take(
        self, parameters: Mapping[str, torch.Tensor], of_optimizer: Sequence[torch.Tensor]
    ) -> SavedState | None:
        """Returns the state that a model starts from, under its names; None if it starts from nothing.

        Of a loaded state, the model claims what has the names of its parameters. What is left may be for
        other models, as long as the optimizer has parameters that no model is known to have.

        Args:
          parameters: the model's parameters that the optimizer has, frozen ones too, by the names of their
            variables.
          of_optimizer: all the optimizer's parameters.

        Returns:
          The state of these parameters. If a loaded state has nothing for them, it is returned as it is.
        """
        self._update()
        if self._values is None:
            return None
        state = dict(self._whole)
        numbers = {parameter: number for number, parameter in enumerate(of_optimizer)}
        for name, parameter in parameters.items():
            entry = self._kept.get(parameter, _Kept((), {}))
            slots = entry.slots or self._claim([_numbered(name, numbers[parameter]), name])
            self._note(parameter, name, slots)
            state |= {key_of(slot, name): value for slot, value in slots.items()}
        extra = {key_of(slot, name): v for name, of in self._unclaimed.items() for slot, v in of.items()}
        if self._is_loaded and not any(self._kept[p].slots for p in parameters.values()):
            state |= extra
        elif extra and all(parameter in self._kept for parameter in of_optimizer):
            logs.warn_once(
                f"The optimizer's state has what is not needed, and is ignored: {shorten(sorted(extra))}."
            )
            self._unclaimed = {}
        return SavedState(state, self._values)

    def snapshot(self) -> DeviceState:
        """Returns the same state without an executor, for copies of the optimizer."""
        duplicate = DeviceState()
        vars(duplicate).update(self.__getstate__())
        return duplicate

    def _update(self) -> None:
        fetch = None if self._source is None else self._source()
        fetched = None if fetch is None or self._is_loaded else fetch()
        if fetched is not None:
            self.keep(fetched, self._parameters)

    def _note(self, parameter: torch.Tensor, name: str, slots: Mapping[str, torch.Tensor]) -> None:
        names = self._kept[parameter].names if parameter in self._kept else ()
        self._kept[parameter] = _Kept((*(other for other in names if other != name), name), slots)

    def __getstate__(self) -> dict[str, Any]:
        self._update()
        copies = {"_kept": dict(self._kept), "_unclaimed": dict(self._unclaimed)}
        return {**vars(self), **copies, "_source": None, "_parameters": {}}


def _numbered(name: str, number: int) -> str:
    return f"{name}#{number}"


def _sort(
    ipu_state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Returns what belongs to no variable, and what belongs to each: its name -> slot -> tensor."""
    common: dict[str, torch.Tensor] = {}
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in ipu_state.items():
        slot, name = split_key(key)
        if name:
            by_name.setdefault(name, {})[slot] = value
        else:
            common[key] = value
    return common, by_name
