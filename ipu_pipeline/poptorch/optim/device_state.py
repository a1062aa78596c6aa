"""The state that an optimizer has on the devices, as the optimizer on the host knows it.

While a model is wrapped with the optimizer, the executor has the state and is asked for it. Before and
after that, the optimizer keeps the state: from one executor to the next, or from `load_state_dict`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["DeviceState", "SavedState"]


class SavedState(NamedTuple):
    """An optimizer's state on the host.

    Attributes:
      ipu_state: what the formulas keep. "exp_avg___model/fc.weight" is the state of that variable which
        torch calls exp_avg.
      ipu_param: the values of the hyperparameters in use. "lr___0" is the learning rate of group 0.
    """

    ipu_state: Mapping[str, torch.Tensor]
    ipu_param: Mapping[str, torch.Tensor]


class DeviceState:
    """Finds an optimizer's state: the executor that uses it has it, or this object keeps it."""

    def __init__(self, saved: SavedState | None = None, is_loaded: bool = False) -> None:
        """Takes the state, if it is known.

        Args:
          saved: the state; None if there has been none yet.
          is_loaded: see `take_loaded`.
        """
        self._saved = saved
        self._is_loaded = is_loaded
        self._source: Callable[[], Callable[[], SavedState | None] | None] | None = None

    def connect(self, fetch: Callable[[], SavedState | None]) -> None:
        """Sets which executor has the state from now on.

        Args:
          fetch: returns it, or None if there is none yet. A method is held weakly, like a function: once
            its object is gone, the last known state is used.
        """
        is_method = hasattr(fetch, "__self__")
        self._source = weakref.WeakMethod(fetch) if is_method else weakref.ref(fetch)

    @property
    def is_loaded(self) -> bool:
        """Whether the user loaded it, and no model has taken it yet."""
        return self._is_loaded

    @property
    def user(self) -> Any:
        """The object whose method returns the state now, or None."""
        fetch = None if self._source is None else self._source()
        return getattr(fetch, "__self__", None)

    def disconnect(self) -> None:
        """Fetches the state one last time and keeps it here."""
        self.read()
        self._source = None

    def read(self) -> SavedState | None:
        """Returns the state: the loaded one if not yet taken, else the executor's, else the kept one."""
        fetch = None if self._source is None else self._source()
        if fetch is not None and not self._is_loaded:
            fetched = fetch()
            if fetched is not None:  # of variables that it does not train, the earlier state stays
                known = {} if self._saved is None else self._saved.ipu_state
                self._saved = SavedState({**known, **fetched.ipu_state}, fetched.ipu_param)
        return self._saved

    def load(self, saved: SavedState) -> None:
        """Keeps a state that the user loads, for the next call of a model."""
        self._saved, self._is_loaded = saved, True

    def take(self) -> SavedState | None:
        """Returns the state that a newly wrapped model starts from; None if it starts from nothing."""
        saved, self._is_loaded = self.read(), False
        return saved

    def take_loaded(self) -> SavedState | None:
        """For a running executor: returns the state loaded since the last call of this, or None."""
        return self.take() if self._is_loaded else None

    def snapshot(self) -> DeviceState:
        """The same state without an executor, for copies of the optimizer."""
        return DeviceState(self.read(), self._is_loaded)

    def __getstate__(self) -> dict[str, Any]:
        return {"_saved": self.read(), "_is_loaded": self._is_loaded, "_source": None}
