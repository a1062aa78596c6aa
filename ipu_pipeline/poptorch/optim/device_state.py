"""The state that an optimizer has on the devices, as the optimizer on the host knows it.

While a model is wrapped with the optimizer, the executor has the state, and is asked for it. Before and
afterwards the optimizer keeps it: from one executor for the next, or from `load_state_dict`.
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
      ipu_state: what the formulas keep. "exp_avg___model/fc.weight" is the state that torch calls exp_avg,
        of that variable.
      ipu_param: the values of the hyperparameters in use. "lr___0" is the learning rate of group 0.
    """

    ipu_state: Mapping[str, torch.Tensor]
    ipu_param: Mapping[str, torch.Tensor]


class DeviceState:
    """Where an optimizer's state is: with the executor that uses it, or here."""

    def __init__(self, saved: SavedState | None = None, is_loaded: bool = False) -> None:
        """Takes what is known.

        Args:
          saved: the state; None if there has been none yet.
          is_loaded: see `take_loaded`.
        """
        self._saved = saved
        self._is_loaded = is_loaded
        self._source: Callable[[], Callable[[], SavedState | None] | None] | None = None

    def connect(self, fetch: Callable[[], SavedState | None]) -> None:
        """Says who has the state from now on.

        Args:
          fetch: returns it, or None if there is none yet. A method is held weakly, like a function: with
            its object gone, what was last known counts.
        """
        is_method = hasattr(fetch, "__self__")
        self._source = weakref.WeakMethod(fetch) if is_method else weakref.ref(fetch)

    def disconnect(self) -> None:
        """Fetches the state a last time and keeps it here."""
        self.read()
        self._source = None

    def read(self) -> SavedState | None:
        """The state now: what was loaded and not taken yet, else the executor's, else what is kept."""
        fetch = None if self._source is None else self._source()
        if fetch is not None and not self._is_loaded:
            fetched = fetch()
            self._saved = self._saved if fetched is None else fetched
        return self._saved

    def load(self, saved: SavedState) -> None:
        """Keeps what the user loads, for the next call of a model."""
        self._saved, self._is_loaded = saved, True

    def take(self) -> SavedState | None:
        """What a model that is wrapped with the optimizer starts from; None: from nothing."""
        saved, self._is_loaded = self.read(), False
        return saved

    def take_loaded(self) -> SavedState | None:
        """What was loaded since it was last asked for, for an executor that runs already; else None."""
        return self.take() if self._is_loaded else None

    def snapshot(self) -> DeviceState:
        """The same state without an executor, for copies of the optimizer."""
        return DeviceState(self.read(), self._is_loaded)

    def __getstate__(self) -> dict[str, Any]:
        return {"_saved": self.read(), "_is_loaded": self._is_loaded, "_source": None}
