"""The placement of operations: `ipu_scope` and `ipu_shard`."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator

from ipu_pipeline.engine.fronts import ipu_shard
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.context_variables import bound

__all__ = ["current_ipu_device", "ipu_scope", "ipu_shard"]

_device: contextvars.ContextVar[int | None] = contextvars.ContextVar("ipu_device", default=None)


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[None]:
    """Places what is compiled within the `with` block on an IPU device.

    Example:
      >>> def model(x):
      ...     return x + 1
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.float32(1)])
      >>> with ipu.Session() as session:
      ...     session.run(program)
      [array(2., dtype=float32)]

    Args:
      device: "/device:IPU:0", or with another number where `IPUConfig.auto_select_ipus` is a list.

    Raises:
      ValueError: it is not of that form.
    """
    match = re.fullmatch(r"/device:IPU:(\d+)", device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f'ipu_scope: device must be like "/device:IPU:0"; got {device!r}.')
    with bound(_device, int(match.group(1))):
        yield


def current_ipu_device() -> int | None:
    """The device number of the innermost `ipu_scope`; None outside of all scopes.

    Example:
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     print(ipu.scopes.current_ipu_device())
      0
    """
    return _device.get()


explain_missing(__name__)
