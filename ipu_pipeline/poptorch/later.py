"""PopTorch's names that are not here yet: each says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["NAMES", "Later"]

NAMES = {
    "AnchorMode": "it was renamed OutputMode",
    "Attribute": "leave it out: it gave hints to PopTorch's compiler",
    "CPU": "what runs on the host in the middle of a model: split the model there, into two wrapped ones",
    "HalfFloatCastingBehavior": "types are those of torch",
    "MultiConv": "convolutions side by side: XLA computes them as they come, so leave it out",
    "autocasting": "torch.autocast does it",
    "cond": "torch.cond does it",
    "ctc_beam_search_decoder": "decode on the host, from the outputs",
    "custom_op": "define an operation with torch.library, and poptorch.register_lowering says it in JAX",
    "dynamic_slice": "torch.narrow, or torch.gather where the place is a tensor, does it",
    "dynamic_update": "torch.scatter, or torch.where, does it",
    "for_loop": "a Python loop, which is unrolled, or torch._higher_order_ops.while_loop does it",
    "fps": "torch_cluster has it; its operation needs poptorch.register_lowering",
    "ipu_print_tensor": "return the value, or keep it by Options.anchorTensor",
    "load": "compiled models are not written to files",
    "ops": "the operations that there are, are in poptorch itself",
    "register_custom_op": "poptorch.register_lowering says an operation in JAX",
    "ReplicaGrouping": "parameters of a wrapped model have a method replicaGrouping",
    "SerializedLinear": "torch.nn.Linear does it, in one piece",
    "serializedMatMul": "torch.matmul does it, in one piece",
}


class Later:
    """Stands for one of the names: to call it, or to read an attribute, raises a NotImplementedError."""

    def __init__(self, name: str) -> None:
        """Takes the name."""
        self._name = name

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"poptorch.{self._name} does not exist here yet: {NAMES[self._name]}.")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a NotImplementedError."""
        del args, kwargs
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        """Raises a NotImplementedError, but for names that Python asks for by itself."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()
