"""Shortens tracebacks of errors that a model's forward raises while it is captured.

Between the user's lines, torch's export has some 80 of its own. They are removed, and a note names the
module of the model in which the error happened.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from torch.fx.experimental.proxy_tensor import _AttrProxy

from ipu_pipeline.poptorch.errors import Error

__all__ = ["Shortened", "innermost_user_line", "without_proxy"]

_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parent.parent
_LAYERS = f"{_TORCH / 'nn'}{os.sep}"
_CALLS = str(_TORCH / "nn" / "modules" / "module.py")  # each call of a module goes through this
_EXPORT = tuple(f"{folder}{os.sep}" for folder in (_TORCH, _OURS / "graphs", _OURS / "lowering"))
_MAX_REPR = 80  # characters of a module


def without_proxy(module: Any) -> torch.nn.Module:
    """Returns the original of a module that torch's tracing replaced, as it does if it has two names."""
    found: torch.nn.Module = getattr(module, "get_base")() if isinstance(module, _AttrProxy) else module  # noqa: B009
    return found


def innermost_user_line(error: BaseException) -> str:
    """Returns the last line of an error's traceback that is neither torch's nor ours."""
    place = "The model"
    for traceback in _each(error.__traceback__):
        code = traceback.tb_frame.f_code
        package = traceback.tb_frame.f_globals.get("__name__", "").split(".")[0]
        if package not in ("torch", "ipu_pipeline", "contextlib", "unittest"):
            place = f"{code.co_filename}:{traceback.tb_lineno} ({code.co_name})"
    return place


class Shortened:
    """Removes torch's export from the tracebacks of errors in the `with` block, and notes the module.

    With JAX's option `jax_traceback_filtering` set to "off", tracebacks stay whole. This is not a
    `contextmanager`, because that would restore an error's traceback.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the model whose forward is captured."""
        self._model = model

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Changes the error."""
        if not isinstance(error, Exception):
            return
        if not isinstance(error, Error):
            error.add_note(_describe(error, self._model))
        is_whole = getattr(jax.config, "jax_traceback_filtering") == "off"  # noqa: B009  # mypy does not know it
        linked: BaseException | None = error
        while linked is not None and not is_whole:
            linked.__traceback__ = _without_export(linked.__traceback__)
            linked = linked.__cause__ or linked.__context__


def _describe(error: BaseException, model: torch.nn.Module) -> str:
    names = {id(without_proxy(module)): name for name, module in model.named_modules()}
    place = ""
    for traceback in _each(error.__traceback__):
        own = traceback.tb_frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module) and (name := names.get(id(without_proxy(own)))):
            text = repr(without_proxy(own)).partition("\n")[0]
            place = f" in module {name}, {text if len(text) <= _MAX_REPR else type(own).__name__},"
    return f"This happened{place} while the model's forward was captured, at {innermost_user_line(error)}."


def _without_export(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback with only the frames of the user, of layers and of other libraries."""
    kept = None
    for one in reversed(list(_each(traceback))):
        name = one.tb_frame.f_code.co_filename
        is_export = name.startswith(_EXPORT) or name == "<string>"
        if not is_export or (name.startswith(_LAYERS) and name != _CALLS):
            kept = types.TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _each(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
