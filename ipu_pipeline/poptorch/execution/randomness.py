"""Where the random numbers of a wrapped model are."""

from __future__ import annotations

import abc

import jax

from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.weights import HostWeights

__all__ = ["Random"]


class Random(abc.ABC):
    """The part of a wrapped model that tells of its random numbers."""

    _host: HostWeights

    @abc.abstractmethod
    def _attached(self) -> CompiledModel:
        """The compiled model, which is on its devices."""

    @property
    def rng_state(self) -> list[int]:
        """Where the model's random numbers are: words of the key, and how often they were drawn from."""
        state = self._attached().state
        assert state is not None
        return [*map(int, jax.random.key_data(state.key).ravel()), state.execution_count]

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        if len(state) != len(self.rng_state):
            raise ValueError(f"rng_state must have the numbers that it was read with; got {state!r}.")
        with self._host.lock:
            key = jax.random.wrap_key_data(jax.numpy.asarray(state[:-1], jax.numpy.uint32))
            self._attached().replace(key=key, execution_count=int(state[-1]))
