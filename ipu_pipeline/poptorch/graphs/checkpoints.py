"""Captures `torch.utils.checkpoint`: a region's inputs are kept, as by `recomputationCheckpoint`.

While a model is captured, a checkpointed function is called like any other. A marker before it records its
inputs. In the graph, each of these values then goes through `recomputationCheckpoint`.
"""

from __future__ import annotations

import contextlib
import inspect
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.logs import warn_once

__all__ = ["keep_inputs_of_checkpoints", "marking_checkpoints"]

_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def marking_checkpoints() -> Iterator[None]:
    """Makes `torch.utils.checkpoint.checkpoint` just call its function while a model is captured."""
    from torch._higher_order_ops.wrap import (
        TagActivationCheckpoint,
    )  # takes seconds to load, as export does

    utils: Any = torch.utils.checkpoint
    within_body: Any = TagActivationCheckpoint.__call__
    name = f"{_GENERATOR}_impl" if hasattr(utils, f"{_GENERATOR}_impl") else _GENERATOR  # since torch 2.14
    generator, apply = getattr(utils, name), utils.CheckpointFunction.apply

    def not_reentrant(*given: Any, **named: Any) -> Iterator[None]:
        if markers.current_capture() is None:
            return generator(*given, **named)
        bound = inspect.signature(generator).bind(*given, **named)
        bound.apply_defaults()
        if bound.arguments["context_fn"] is not utils.noop_context_fn:
            warn_once(
                "The context_fn of torch.utils.checkpoint has no effect: the backward keeps only those "
                "values of the region that go through poptorch.recomputationCheckpoint."
            )
        _mark((bound.arguments["args"], bound.arguments["kwargs"]))
        return _one_step()

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        if markers.current_capture() is None:
            return apply(function, preserve, *args)
        _mark(args)
        return function(*args)

    def call_within_body(self: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if markers.current_capture() is None:
            return within_body(self, graph, *args, **kwargs)
        return torch.fx.Interpreter(graph).run(*args)  # a loop keeps what its backward needs

    with (
        unittest.mock.patch.object(TagActivationCheckpoint, "__call__", call_within_body),
        unittest.mock.patch.object(utils, name, not_reentrant),
        unittest.mock.patch.object(utils.CheckpointFunction, "apply", reentrant),
    ):
        yield


def _one_step() -> Iterator[None]:
    """A context that does nothing, in place of the one that torch runs a function in."""
    yield


def _mark(given: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves(given)  # noqa: SLF001  # export takes arguments apart like this
    markers.keep_inputs([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def keep_inputs_of_checkpoints(module: torch.fx.GraphModule) -> None:
    """Puts `recomputationCheckpoint` behind the values that checkpointed functions were given."""
    for inner in module.modules():
        assert isinstance(inner, torch.fx.GraphModule)
        graph = inner.graph
        for marker in [node for node in graph.nodes if markers.is_keep_inputs(node)]:
            for value in list(marker.all_input_nodes):
                if markers.is_checkpoint(value):
                    continue
                with graph.inserting_before(marker):
                    kept = graph.call_function(markers.keep_operation(), (value,))
                kept.meta = dict(value.meta)
                value.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: kept < user)
            graph.erase_node(marker)
