"""Keeps the backwards of the user's `torch.autograd.Function`s, which export would lose."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs import refusals
from ipu_pipeline.poptorch.lowering.decompositions import decompose
from ipu_pipeline.poptorch.operations import own_backwards

__all__ = ["capture_own_backwards", "keeping_own_backwards"]


@contextlib.contextmanager
def keeping_own_backwards() -> Iterator[None]:
    """Makes applied functions keep their backward in the graph while a model is captured.

    Functions of torch itself are not changed.
    """
    plain: Any = vars(torch.autograd.Function)["apply"]  # a classmethod; written in C since torch 2.14

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if markers.current_capture() is None or function.__module__.split(".")[0] == "torch":
            return plain.__get__(None, function)(*args, **kwargs)
        return own_backwards.apply(function, args, kwargs)

    def refuse(traced: Any, *args: Any) -> Any:
        del args
        raise Error(
            f"{traced.fn_cls.__name__} is a torch.autograd.Function within a branch or body of torch's "
            "control flow, where its backward would be lost. Apply it to what goes in or comes out."
        )

    from torch._dynamo.variables.misc import AutogradFunctionVariable  # which takes seconds to load

    with (
        unittest.mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", refuse),
    ):
        yield


def capture_own_backwards(model: torch.nn.Module, capturing: markers.Capturing) -> None:
    """Captures the backwards of the functions that a model's forward applied."""
    held = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())} - {0}
    for backward in [one for one in capturing.held if isinstance(one, own_backwards.OwnBackward)]:
        with refusals.explained(model), torch.no_grad():
            program = torch.export.export(backward, tuple(backward.examples), strict=False)
            program = decompose(program)
        constants = [value for value in program.constants.values() if isinstance(value, torch.Tensor)]
        if any(value.untyped_storage().data_ptr() in held for value in constants):
            raise Error(
                f"The backward of {backward.name} uses a parameter, or a buffer, of the model. Give it to "
                "the function as an argument, and keep it by save_for_backward."
            )
        backward.program = program
