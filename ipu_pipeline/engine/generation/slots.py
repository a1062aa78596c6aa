"""Slots, in groups: what requests in flight keep on the devices, and how tokens go through the stages.

A group's slots go through a stage in one program, so while one stage handles a group, the others handle
other groups. All is started in order and not waited for; tokens are read later, in the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placing import copy_to, put
from ipu_pipeline.engine.generation.programs import SlotNumbers, StagePrograms
from ipu_pipeline.engine.generation.requests import Request
from ipu_pipeline.engine.generation.sampling import SamplingArrays
from ipu_pipeline.engine.generation.stage_runs import TOKENS
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.traced import Source

__all__ = ["BoundStages", "SlotGroup"]


@dataclass(frozen=True, eq=False)
class BoundStages:
    """The stages with the weights of a state.

    Attributes:
      programs: of each stage.
      devices: of each stage.
      caches: of each stage, the variables of which each request has its own.
      initial: of each stage, the values that these start from, on its devices.
      weights: of each stage, what it reads of the state, on its devices.
      update_count: of the state.
    """

    programs: Sequence[StagePrograms]
    devices: Sequence[DeviceGroup]
    caches: Sequence[Sequence[VariableSpec]]
    initial: Sequence[Sequence[Any]]
    weights: Sequence[Sequence[Any]]
    update_count: np.int32


class _Values:
    """Values between stages, and their copies on other devices."""

    def __init__(self, values: Mapping[Source, Any], devices: DeviceGroup | None) -> None:
        """Takes values that are on some devices; None: on the host."""
        self._home = dict.fromkeys(values, devices)
        self._found = {(source, devices): value for source, value in values.items()}

    def add(self, sources: Sequence[Source], values: Sequence[Any], devices: DeviceGroup) -> None:
        """Takes what a stage has made."""
        for source, value in zip(sources, values, strict=True):
            self._home[source], self._found[source, devices] = devices, value

    def on(self, sources: Sequence[Source], devices: DeviceGroup) -> list[Any]:
        """Values on a stage's devices; those that are elsewhere are sent there."""
        away: dict[DeviceGroup | None, list[Source]] = {}
        for source in sources:
            if (source, devices) not in self._found:
                away.setdefault(self._home[source], []).append(source)
        for home, missing in away.items():
            values = [self._found[source, home] for source in missing]
            moved = put(values, devices) if home is None else copy_to(values, devices)
            self._found.update(zip([(source, devices) for source in missing], moved, strict=True))
        return [self._found[source, devices] for source in sources]


class SlotGroup:
    """Some slots that go through the stages together, each free or with a request."""

    def __init__(self, stages: BoundStages, num_slots: int) -> None:
        """Makes caches; what they hold is not defined before a request comes."""
        self._stages = stages
        self._requests: list[Request | None] = [None] * num_slots
        self._positions = np.zeros(num_slots, np.int32)  # of each slot's newest token
        self._last = stages.devices[-1]
        self._caches = [
            [jnp.zeros((num_slots, *spec.shape), spec.dtype, device=devices.replicated) for spec in own]
            for own, devices in zip(stages.caches, stages.devices, strict=True)
        ]
        (self._tokens,) = put([np.zeros(num_slots, np.int32)], self._last)
        # the newest tokens of all slots, and those that are some request's
        self._unread: collections.deque[tuple[Any, list[tuple[int, Request]]]] = collections.deque()

    @property
    def num_taken(self) -> int:
        """The number of slots with a request."""
        return sum(request is not None for request in self._requests)

    @property
    def num_unread(self) -> int:
        """How often tokens have been started that are not read yet."""
        return len(self._unread)

    def join(self, request: Request, lengths: Sequence[int]) -> None:
        """Starts a request in a free slot: its prompt, chunk by chunk, and its first token."""
        slot, stages, position = self._requests.index(None), self._stages, 0
        is_sampled = request.sampling.temperature > 0
        for length in lengths:
            numbers = SlotNumbers(np.int32(position), np.uint32(request.seed), np.uint32(request.number))
            sampling = None
            if is_sampled and position + length == len(request.prompt):
                sampling = SamplingArrays(*(x[0] for x in SamplingArrays.of([request.sampling])))
            of_last = [*[(None, None)] * (len(stages.programs) - 1), (self._tokens, sampling)]
            more = [
                (np.int32(slot), first, *own) for first, own in zip(stages.initial, of_last, strict=True)
            ]
            values = _Values({TOKENS: request.prompt[position : position + length]}, None)
            self._start([program.chunk(length) for program in stages.programs], values, numbers, more)
            position += length
        self._requests[slot], self._positions[slot] = request, position
        self._note([slot])

    def decode(self) -> None:
        """Starts one more token of each request."""
        stages, taken = self._stages, [n for n, request in enumerate(self._requests) if request is not None]
        samplings = [None if request is None else request.sampling for request in self._requests]
        is_sampled = any(sampling is not None and sampling.temperature > 0 for sampling in samplings)
        numbers = SlotNumbers(  # copies, as devices may read them later
            self._positions.copy(),
            np.array([request.seed if request else 0 for request in self._requests], np.uint32),
            np.array([request.number if request else 0 for request in self._requests], np.uint32),
        )
        sampling = SamplingArrays.of(samplings) if is_sampled else None
        more = [*[(None,)] * (len(stages.programs) - 1), (sampling,)]
        values = _Values({TOKENS: self._tokens}, self._last)
        self._start([program.decode(is_sampled) for program in stages.programs], values, numbers, more)
        self._positions[taken] += 1
        self._note(taken)

    def _start(
        self,
        functions: Sequence[Callable[..., Any]],
        values: _Values,
        numbers: SlotNumbers,
        more: Sequence[tuple[Any, ...]],
    ) -> None:
        """Starts the stages' programs one after another, each with what earlier ones made."""
        stages = self._stages
        for index, (function, devices) in enumerate(zip(functions, stages.devices, strict=True)):
            run = stages.programs[index].run
            inputs = values.on(run.inputs, devices)
            made, self._caches[index] = function(
                self._caches[index],
                stages.weights[index],
                inputs,
                numbers,
                stages.update_count,
                *more[index],
            )
            if index == len(functions) - 1:
                self._tokens = made
            else:
                values.add(run.outputs, made, devices)

    def _note(self, slots: Sequence[int]) -> None:
        """Notes that tokens are on their way, and frees slots whose requests need no more."""
        entry = []
        for slot in slots:
            request = self._requests[slot]
            assert request is not None
            entry.append((slot, request))
            if self._positions[slot] + 1 == len(request.prompt) + request.max_new_tokens:
                self._requests[slot] = None
        self._unread.append((self._tokens, entry))

    def read(self, num_left: int = 0) -> None:
        """Waits for tokens, hands them to their requests, and frees slots whose requests are done."""
        while len(self._unread) > num_left:
            tokens, entry = self._unread[0]
            found = np.asarray(tokens)
            self._unread.popleft()
            for slot, request in entry:
                request.add(int(found[slot]))
        self._requests = [None if one is None or one.is_done else one for one in self._requests]
