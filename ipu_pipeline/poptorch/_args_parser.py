"""Names that programs import from PopTorch's private module of this name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ipu_pipeline.poptorch.structures import flatten


class ArgsParser:
    """Puts the arguments of a model in the order of its forward's parameters."""

    @dataclass(frozen=True)
    class Args:
        """Arguments with their defaults: by position, with their names, and those that go by name only."""

        args: list[Any] = field(default_factory=list)
        arg_names: list[str] = field(default_factory=list)
        kwargs: dict[str, Any] = field(default_factory=dict)

        def asPackedFlatTuple(self) -> tuple[torch.Tensor, ...]:
            """Returns the tensors in them."""
            return tuple(flatten((self.args, self.kwargs))[0])

    def __init__(self, model: torch.nn.Module | Callable[..., Any]) -> None:
        """Reads the parameters of a model's forward, or of a function.

        Raises:
          TypeError: it is neither.
        """
        if not callable(model):
            raise TypeError(f"ArgsParser: model must be a module or a function; got {model!r}.")
        self._signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Args:
        """Orders arguments.

        Raises:
          TypeError: they do not fit the parameters.
        """
        bound, parsed = self._signature.bind(*args, **kwargs), self.Args()
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            match self._signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    parsed.arg_names.extend(f"*{name}[{number}]" for number in range(len(value)))
                    parsed.args.extend(value)
                case inspect.Parameter.VAR_KEYWORD:
                    parsed.kwargs.update(value)
                case inspect.Parameter.KEYWORD_ONLY:
                    parsed.kwargs[name] = value
                case _:
                    parsed.arg_names.append(name)
                    parsed.args.append(value)
        return parsed
