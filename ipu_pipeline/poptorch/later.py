"""PopTorch's names that are not here yet: each says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["NAMES", "Later"]

NAMES = {
    "AnchorMode": "it was renamed OutputMode",
    "Attribute": "leave it out: it gave hints to PopTorch's compiler",
    "HalfFloatCastingBehavior": "types are those of torch",
    "autocasting": "torch.autocast does it",
    "fps": "torch_cluster has it; its operation needs poptorch.register_lowering",
    "ops": "the operations that there are, are in poptorch itself",
    "ReplicaGrouping": "parameters of a wrapped model have a method replicaGrouping",
    "SerializedLinear": "torch.nn.Linear does it, in one piece",
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
