"""PopTorch's names that are not here yet: each says so when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["NAMES", "make"]

NAMES = {
    "CPU": "what runs on the host in the middle of a model: split the model there, into two wrapped ones",
    "MultiConv": "convolutions side by side: XLA computes them as they come, so leave it out",
    "NameScope": "names for values: modules have theirs, see getTensorNames()",
    "cond": "torch.cond does it",
    "ctc_beam_search_decoder": "decode on the host, from the outputs",
    "custom_op": "define an operation with torch.library, and poptorch.register_lowering says it in JAX",
    "dynamic_slice": "torch.narrow, or torch.gather where the place is a tensor, does it",
    "dynamic_update": "torch.scatter, or torch.where, does it",
    "for_loop": "a Python loop, which is unrolled, or torch._higher_order_ops.while_loop does it",
    "ipu_print_tensor": "return the value, or keep it by Options.anchorTensor",
    "load": "compiled models are not written to files",
    "recomputationCheckpoint": "torch.utils.checkpoint recomputes parts of a model",
    "register_custom_op": "poptorch.register_lowering says an operation in JAX",
    "serializedMatMul": "torch.matmul does it, in one piece",
    "set_available_memory": "devices have no such limit: leave it out",
    "set_overlap_for_input": "inputs are always fetched ahead: leave it out",
    "set_overlap_for_output": "outputs never wait: leave it out",
}


def make(name: str) -> Callable[..., Any]:
    """The function of one of the names, which raises a NotImplementedError."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise NotImplementedError(f"poptorch.{name} does not exist here yet: {NAMES[name]}.")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raises a NotImplementedError: {NAMES[name]}."
    return function
