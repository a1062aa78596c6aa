"""`compile`: makes a program from a Python function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ipu_pipeline.engine.fronts import InsideOfBodyError, OutsideOfBodyError
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_function
from ipu_pipeline.ground.pytrees import as_own
from ipu_pipeline.tf1.graph import Placeholder
from ipu_pipeline.tf1.loops import run_once
from ipu_pipeline.tf1.program.program import Program, build_program, register, reserve_ipus
from ipu_pipeline.tf1.scopes import current_ipu_device

__all__ = ["Program", "compile"]


def compile(computation: Callable[..., Any], inputs: Sequence[Any] | None = None) -> Program:
    """Traces a function into a program, and checks all that can be checked without running it.

    It does not start JAX's backend; XLA compiles when the program first runs. On a CPU, the backend then
    gets as many devices as the programs compiled before its start need.

    Example:
      >>> def model(x, y):
      ...     return x + y, x * y
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.float32(3), np.float32(4)])
      >>> with ipu.Session() as session:
      ...     session.run(program)
      [array(7., dtype=float32), array(12., dtype=float32)]

    Args:
      computation: a function that takes one array per input. It calls `pipelining_ops.pipeline` or
        `loops.repeat`, may compute before, between and after them, and returns the result of `Session.run`.
        A function without pipelines and loops may do the same as the body of a loop: train with `minimize`,
        enqueue, use `ipu_shard`, draw random keys. It then becomes the body of a loop that runs once.
      inputs: placeholders, or values that are the same in every run. A single input need not be in a list.
        Placeholders that the function, a stage or an optimizer function uses as arrays need not be listed.

    Returns:
      The program. `Session.run(program)` returns the function's values as a list, even for a single value
      or a namedtuple; for a dict or a nested structure, the same structure. If the function returns only
      operations, or nothing, the result is None. Operations that follow values are left out of the list.
      The program is also the sequence of these values. Each can be run: `(loss,) = compile(...)`,
      `compiled[0]`. Results of Python's operators on them can be run, too, and are computed on the host:
      `session.run([total / 100 for total in compiled])`.

    Raises:
      RuntimeError: it is called outside of `scopes.ipu_scope`, or JAX's CPU backend is already running
        with fewer devices than the programs need (see `set_num_devices`).
      TypeError: `computation` is not callable, or an input is neither a placeholder nor an array.
      ValueError: the function returns an operation before a value.
      Others: errors of the function; see `pipelining_ops.pipeline`.
    """
    check_function("ipu_compiler.compile: computation", computation)
    device = current_ipu_device()
    if device is None:
        name = getattr(computation, "__name__", computation)
        raise RuntimeError(
            f"The function {name!r} is not placed on an IPU device. Compile it "
            'within `with ipu.scopes.ipu_scope("/device:IPU:0"):`.'
        )
    if inputs is None:
        inputs = []
    elif not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    program = _build(
        computation, [_check_input(index, value) for index, value in enumerate(inputs)], device
    )
    reserve_ipus(device, program.num_ipus)
    register(program)
    return program


def _build(computation: Callable[..., Any], inputs: Sequence[Any], device: int) -> Program:
    """Builds the program; if the function does what only a loop's body may do, one that loops once.

    Only tracing shows it, so such a function is traced twice.
    """
    with contextlib.suppress(OutsideOfBodyError):
        return build_program(computation, inputs, device)
    with contextlib.suppress(InsideOfBodyError):
        return build_program(partial(run_once, computation), inputs, device)
    return build_program(computation, inputs, device)  # raises the first error again


def _check_input(index: int, value: Any) -> Placeholder | np.ndarray[Any, Any]:
    if isinstance(value, Placeholder):
        return value
    try:
        array = np.asanyarray(value)  # keeps a masked array as it is
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind in "OUSMm":
        raise TypeError(
            f"ipu_compiler.compile: inputs[{index}] must be a placeholder or an array; got "
            f"{type(value).__name__}."
        )
    checked: np.ndarray[Any, Any] = as_own(array, f"inputs[{index}]")
    return checked


explain_missing(__name__)
