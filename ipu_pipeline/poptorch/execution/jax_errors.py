"""Translates JAX's errors of running programs to PopTorch's: whether running again may help, and how.

JAX has one class for them, `jax.errors.JaxRuntimeError`. Its text begins with a status code of XLA, with
gRPC's meanings (https://grpc.github.io/grpc/core/md_doc_statuscodes.html). An error that another one led
to often has the code INTERNAL and the first one's text. CUDA's errors are named in the text. Where NumPy
reads the result of a failed program, the same text comes in a `ValueError`.
docs/poptorch.md has the table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax

from ipu_pipeline.engine.processes import naming_peers
from ipu_pipeline.poptorch.errors import Error, RecoverableError, UnrecoverableError
from ipu_pipeline.poptorch.execution.compiled import CompiledModel

__all__ = ["translate", "translating"]

P = ParamSpec("P")
T = TypeVar("T")

_RECOVERY_ACTIONS = {
    "UNAVAILABLE": "IPU_RESET",
    "ABORTED": "PARTITION_RESET",
    "CANCELLED": "PARTITION_RESET",
    "DEADLINE_EXCEEDED": "PARTITION_RESET",
}
_MENDS = {
    "IPU_RESET": "Call the model again.",
    "PARTITION_RESET": "Call destroy() on all wrapped models, wrap them again, and go on.",
    "FULL_RESET": "The process can no longer use its devices: go on in a new one, from saved weights.",
}
_CODES = (*_RECOVERY_ACTIONS, "DATA_LOSS", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNKNOWN")
_DEFECTS = ("CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE")
_NO_MEMORY = (
    "The devices do not have enough memory. Make micro-batches smaller (with gradientAccumulation there "
    "are more of them), spread the model over more IPUs, or keep less on the devices: "
    "Options.TensorLocations."
)


def translate(error: jax.errors.JaxRuntimeError | ValueError, location: str) -> Error:
    """Returns PopTorch's error for one of JAX's."""
    text = str(error)
    coded = re.match(r"([A-Z_]+): ", text)
    code = coded[1] if coded else "UNKNOWN"
    cuda = re.search(r"CUDA_ERROR_\w+", text)
    kind = (cuda[0] if cuda else code).lower()
    if code == "RESOURCE_EXHAUSTED" or "out of memory" in text.lower() or kind.endswith("out_of_memory"):
        return Error(f"{text} {_NO_MEMORY}", "out_of_memory", location)
    if code == "DATA_LOSS" or any(defect in text for defect in _DEFECTS):
        mend = "Running again does not help: the devices, or their connections, have a defect."
        return UnrecoverableError(f"{text} {mend}", kind, location)
    action = "FULL_RESET" if cuda else _RECOVERY_ACTIONS.get(code)
    if action is None:
        return Error(text, kind, location)
    return RecoverableError(f"{text} {_MENDS[action]}", kind, location, action)


class _HasCompiled(Protocol):
    """A wrapped model."""

    _compiled: CompiledModel | None


ModelT = TypeVar("ModelT", bound=_HasCompiled)


def translating(
    method: Callable[Concatenate[ModelT, P], T],
) -> Callable[Concatenate[ModelT, P], T]:
    """Makes a method of a wrapped model raise PopTorch's errors in place of JAX's.

    If another process is the cause, it is a ProcessError that names that process. If the failed program
    lost the weights on the devices, the error says so, and the model knows it.
    """

    @functools.wraps(method)
    def wrapped(self: ModelT, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with naming_peers():
                return method(self, *args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and not str(error).startswith(tuple(f"{c}: " for c in _CODES)):
                raise
            found: Any = translate(error, f"PoplarExecutor.{method.__name__}")
            compiled = self._compiled
            if compiled is not None and compiled.note_loss():
                found.message += f" {compiled.LOST}"
                found.args = (found.message,)
            raise found from error

    return wrapped
