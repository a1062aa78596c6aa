"""The argument `fetch` of `Session.run`: what it runs, and the structure of its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.queues.infeed import InfeedOperation, IPUInfeedQueue
from ipu_pipeline.queues.outfeed import OutfeedOperation
from ipu_pipeline.tf1.graph.operations import HostVariable, InitializerOperation
from ipu_pipeline.tf1.graph.symbols import GlobalStep
from ipu_pipeline.tf1.program.outputs import Computed, Fetched, Output
from ipu_pipeline.tf1.program.program import Program

__all__ = ["concerns_devices", "find_infeeds", "find_runs", "give_results"]

_OF_THE_HOST = (InfeedOperation, OutfeedOperation, GlobalStep)


def find_runs(fetch: Any) -> list[Any]:
    """Finds the programs and operations to run, in order; each once, however often it occurs."""
    runs: list[Any] = []
    for one in _leaves(fetch):
        run = one.program if isinstance(one, Output) else one
        if not isinstance(run, (Program, InitializerOperation, HostVariable, *_OF_THE_HOST)):
            advice = ""
            if isinstance(run, (str, VariableSpec)):
                advice = " Session.variables has the values of variables, by name."
            elif jax_compat.is_traced(run):
                advice = (
                    " A variable, or what is computed from one, has a value while a program runs: the "
                    "function that is compiled returns it, an outfeed takes it, and Session.variables has "
                    "the values of variables, by name."
                )
            raise TypeError(
                "Session.run: fetch must be a compiled program or one of its values, an infeed's "
                "initializer, what an outfeed's dequeue() returned, global_variables_initializer(), "
                "get_global_step(), a host embedding's get_embedding_tensor(), "
                f"or a list or dict of them; got {type(run).__name__}.{advice}"
            )
        if not any(run is known for known in runs):
            runs.append(run)
    return runs


def give_results(fetch: Any, values: dict[int, Any]) -> Any:
    """Makes the result of `Session.run`: the results in the places of what was run."""
    if isinstance(fetch, dict):
        return {key: give_results(one, values) for key, one in fetch.items()}
    if isinstance(fetch, (list, tuple)):
        given = [give_results(one, values) for one in fetch]
        if isinstance(fetch, list):
            return given
        return type(fetch)(*given) if hasattr(fetch, "_fields") else tuple(given)
    if isinstance(fetch, Output):
        return values[id(fetch.program)][fetch.number]
    if isinstance(fetch, Computed):
        if id(fetch) not in values:
            parts = [give_results(one, values) if isinstance(one, Fetched) else one for one in fetch.parts]
            values[id(fetch)] = fetch.function(*parts)
        return values[id(fetch)]
    if isinstance(fetch, Program):
        return fetch.result_tree.unflatten(values[id(fetch)]) if fetch.function.outputs else None
    return values[id(fetch)]


def find_infeeds(fetch: Any) -> list[IPUInfeedQueue]:
    """The infeeds of all programs in a fetch."""
    programs = [one.program if isinstance(one, Output) else one for one in _leaves(fetch)]
    return [infeed for one in programs if isinstance(one, Program) for infeed in one.infeeds]


def concerns_devices(fetch: Any) -> bool:
    """Whether a part of a fetch runs on devices; queues and the global step do not."""
    return not all(isinstance(one, _OF_THE_HOST) for one in _leaves(fetch))


def _leaves(fetch: Any) -> list[Any]:
    return list(_find_leaves(fetch, set()))


def _find_leaves(fetch: Any, known: set[int]) -> Iterator[Any]:
    """The leaves; for computed values, the values that they are computed from, each computed value once."""
    if isinstance(fetch, dict):
        fetch = list(fetch.values())
    if isinstance(fetch, Computed):
        parts = [] if id(fetch) in known else [one for one in fetch.parts if isinstance(one, Fetched)]
        known.add(id(fetch))
        fetch = parts
    if isinstance(fetch, (list, tuple)):
        for one in fetch:
            yield from _find_leaves(one, known)
    else:
        yield fetch
