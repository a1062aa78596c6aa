"""Loops, conditionals, and slices at a place that a tensor gives: what a model decides while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import scan

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_dim, check_int, check_tensor

# Loops and conditionals are torch's own in a captured model, compiled once and not unrolled; in plain torch
# they are Python's.


def for_loop(count: int, body: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Applies a function to tensors `count` times. On the devices it is compiled once.

    Args:
      count: the number of times; a Python number.
      body: takes the tensors as separate arguments, and returns the same number of tensors, of the same
        shapes and dtypes, in a list or a tuple, or a single one.
      inputs: the list of tensors for the first time.

    Returns:
      What `body` returned the last time; for a count of 0 copies of `inputs`.

    Raises:
      ValueError: `inputs` is not a list of tensors or is empty, `count` is not a number, or the body
        returns something else.

    Example:
      (x,) = poptorch.for_loop(10, lambda x: [torch.tanh(self.layer(x))], [x])
    """
    _check_tensors(inputs, "poptorch.for_loop expects input tensors (inputs) to be a list of tensors.")
    if not inputs:
        raise ValueError("poptorch.for_loop expects at least one tensor in inputs; the list is empty.")
    if not is_int(count) or count < 0:
        raise ValueError(
            f"poptorch.for_loop: count is how often the body runs, an integer from 0; got {count!r}."
        )
    if not markers.is_traced():
        carried = [tensor.clone() for tensor in inputs]
        for _time in range(count):
            carried = _check_body(_as_list(body(*carried), "for_loop"), carried)
        return carried

    def step(
        carried: list[torch.Tensor], row: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        del row
        # torch does not allow a result that is an input, or the same result twice.
        results = _as_list(body(*_copied(carried)), "for_loop")
        return _copied(_check_body(results, carried)), []

    # A scan over dummy rows, because JAX's scan has a gradient and its while loop has none.
    rows = torch.zeros(count, dtype=torch.bool)
    last, _rows = scan(step, _copied(inputs), rows) if count else (inputs, None)
    return _copied(last)


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Calls one of two functions of tensors, chosen by a tensor.

    Args:
      condition: a boolean scalar.
      then_body: takes the tensors of `then_inps`, and returns tensors in a list or a tuple, or a single
        one.
      then_inps: a list of tensors.
      else_body: the same for `else_inps`. Its results have the shapes and dtypes of the other one's.
      else_inps: a list of tensors.

    Returns:
      What the function returned.

    Raises:
      ValueError: the inputs are not lists of tensors, the condition is not a boolean scalar, or a body
        returns something else; on the devices also if the two bodies' results differ in their shapes.
    """
    for name, inputs in (("then_inps", then_inps), ("else_inps", else_inps)):
        _check_tensors(inputs, f"poptorch.cond expects {name} to be a list of tensors.")
    if not isinstance(condition, torch.Tensor) or condition.numel() != 1 or condition.dtype != torch.bool:
        raise ValueError("poptorch.cond expects the condition to be a tensor of one boolean.")
    if not markers.is_traced():
        body, inputs = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        return _as_list(body(*[tensor.clone() for tensor in inputs]), "cond")
    number = len(then_inps)
    results = torch.cond(
        condition.reshape(()),
        lambda *operands: tuple(_copied(_as_list(then_body(*operands[:number]), "cond"))),
        lambda *operands: tuple(_copied(_as_list(else_body(*operands[number:]), "cond"))),
        tuple(_copied([*then_inps, *else_inps])),
    )
    # Where the bodies' shapes differ, torch makes them depend on values.
    is_inner = torch.compiler.is_dynamo_compiling()  # then shapes need not be numbers
    if not is_inner and any(isinstance(size, torch.SymInt) for tensor in results for size in tensor.shape):
        raise ValueError(
            "poptorch.cond: then_body and else_body must return tensors of the same shapes, because the "
            "model is compiled once for both."
        )
    return list(results)


def _check_tensors(values: Any, message: str) -> None:
    if not isinstance(values, list):
        raise ValueError(f"{message} (Object is not list)")
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{message} (Object contained in list at index {index} is not torch.tensor)")


def _as_list(result: Any, name: str) -> list[torch.Tensor]:
    """Returns a body's result as a list."""
    tensors = list(result) if isinstance(result, (list, tuple)) else [result]
    for value in tensors:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"poptorch.{name}: a body must return tensors in a list or a tuple, or a single one; it "
                f"returned a {type(value).__name__}."
            )
    return tensors


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns contiguous copies, which torch requires in each iteration and branch."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _check_body(results: list[torch.Tensor], carried: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (results, carried)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "poptorch.for_loop: the body must return tensors of the shapes and dtypes that it takes, "
            f"{kinds[1]}; it returned {kinds[0]}."
        )
    return results


# Slices that begin at a place given by a tensor. One beyond the end of the tensor is an IndexError in plain
# torch, where it is a selection by indices. On the devices, which cannot raise, it begins earlier.

SLICE, UPDATE = f"{markers.NAMESPACE}::dynamic_slice", f"{markers.NAMESPACE}::dynamic_update"


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Returns every `step`-th element of a part of a tensor, along one dimension.

    Args:
      tensor: the tensor, which is not a scalar.
      dim: the dimension.
      start: where the part begins, from 0: one integer. On the devices, a part that extends past the end
        begins earlier, so that it fits.
      size: the size of the part.
      step: the step from one element to the next.

    Returns:
      A tensor of `tensor`'s shape, with ceil(size / step) along `dim`.

    Raises:
      Error: `start` is not a tensor of one integer, the part is larger than the tensor, or a number is
        not an integer.
      IndexError: in plain torch, where the part is not within the tensor.
    """
    check_tensor(tensor, "dynamic_slice must take a torch.tensor argument.")
    dim = check_dim(dim, tensor.dim(), "dynamic_slice")
    _check_start(start, "dynamic_slice")
    check_int(size, "Size must be an integer.")
    check_int(step, "Step must be an integer.")
    if size > tensor.shape[dim]:
        raise Error(
            f"dynamic_slice: size {size} is larger than dimension {dim} of the tensor, {tensor.shape[dim]}."
        )
    sliced: torch.Tensor = _OPERATIONS.dynamic_slice(tensor, dim, start, size, step)
    return sliced


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """Returns a copy of a tensor with a part of it replaced.

    Args:
      input: the tensor, which is not a scalar.
      src: the new part, of the shape of `input`, with `size` along `dim`.
      dim: the dimension.
      start: where the part begins, from 0: one integer. On the devices, a part that extends past the end
        begins earlier, so that it fits.
      size: the size of the part.

    Raises:
      Error: `start` is not a tensor of one integer, or the tensors do not fit each other.
      IndexError: in plain torch, where the part is not within the tensor.
    """
    check_tensor(input, "dynamic_update must take a torch.tensor argument.")
    check_tensor(src, "dynamic_update must take a torch.tensor argument.")
    if input.dim() != src.dim():
        raise Error(
            "input and src tensors must have same dimensionality. They have "
            f"{input.dim()} and {src.dim()} dimensions."
        )
    if input.dtype != src.dtype:
        raise Error(f"input and src tensor must have same dtype. They have {input.dtype} and {src.dtype}.")
    dim = check_dim(dim, input.dim(), "dynamic_update")
    _check_start(start, "dynamic_update")
    check_int(size, "Size must be an integer.")
    part_shape = [size if number == dim else length for number, length in enumerate(input.shape)]
    if list(src.shape) != part_shape or size > input.shape[dim]:
        raise Error(
            f"dynamic_update: src must have the shape of input, {tuple(input.shape)}, with size {size} "
            f"along dimension {dim}, at most {input.shape[dim]}; it has {tuple(src.shape)}."
        )
    updated: torch.Tensor = _OPERATIONS.dynamic_update(input, src, dim, start)
    return updated


def _check_start(start: Any, name: str) -> None:
    check_tensor(start, f"Slice start argument to {name} must be a torch.tensor.")
    if start.numel() != 1 or start.is_floating_point() or start.dtype is torch.bool:
        raise Error(
            f"{name}: start must have one integer; got a tensor of {start.dtype} with {start.numel()} "
            "elements."
        )


def _slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    return tensor.index_select(dim, start.reshape(()) + torch.arange(0, size, step, device=start.device))


def _update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor) -> torch.Tensor:
    places = start.reshape(()) + torch.arange(src.shape[dim], device=start.device)
    return input.index_copy(dim, places, src)


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("dynamic_slice(Tensor tensor, int dim, Tensor start, int size, int step) -> Tensor")
_library.impl("dynamic_slice", _slice, "CompositeImplicitAutograd")
_library.define("dynamic_update(Tensor input, Tensor src, int dim, Tensor start) -> Tensor")
_library.impl("dynamic_update", _update, "CompositeImplicitAutograd")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)
