"""The user's operations: functions of JAX, or functions of a shared library that XLA calls."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch.errors import Error

__all__ = ["CustomOperation", "find_custom_op", "register_custom_op"]

Array = Any
Attributes = Mapping[str, Any]
Compute = Callable[..., Any]


@dataclass(frozen=True)
class CustomOperation:
    """A registered operation.

    Attributes:
      domain: the domain of its name.
      name: the name of the operation.
      version: the version of the domain.
      compute: takes inputs, the results' shapes and dtypes, and attributes; returns one array or several.
      vjp: its gradient, see `register_custom_op`; None for the gradient of `compute`.
      writes: the numbers of the inputs that it writes its first results to.
      is_foreign: whether JAX cannot differentiate `compute`.
    """

    domain: str
    name: str
    version: int
    compute: Callable[[Sequence[Array], Sequence[jax.ShapeDtypeStruct], Attributes], Any]
    vjp: Compute | None
    writes: tuple[int, ...]
    is_foreign: bool

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.name!r} of domain {self.domain!r}, version {self.version}"


_registered: dict[tuple[str, str, int], CustomOperation] = {}
_libraries: list[ctypes.CDLL] = []  # loaded for as long as the process lives
_targets = itertools.count()


def register_custom_op(
    domain: str,
    name: str,
    version: int,
    function: Compute | None = None,
    *,
    vjp: Compute | None = None,
    writes: Sequence[int] = (),
    library: str | Path | None = None,
    symbol: str | None = None,
    platform: str = "cpu",
) -> Any:
    """Sets what `custom_op` computes for a name: a function of JAX, or one of a shared library.

    It applies to models that are compiled afterwards. The same name again replaces it.

    Args:
      domain: the domain, as in `custom_op`.
      name: the operation's name, as in `custom_op`.
      version: the version of the domain, `domain_version` in `custom_op`.
      function: takes the inputs as JAX arrays, one after another, and the attributes as keywords; returns
        an array or several in a tuple or list, of the shapes of `example_outputs`. They are cast to its
        dtypes. If None without a library, `register_custom_op(domain, name, version)` is a decorator.
      vjp: its gradient: takes a tuple of the inputs, a tuple of the results, a tuple of the gradients by
        the results, and the attributes as keywords; returns a tuple of the gradients by the inputs, None
        for inputs without one. If None, JAX differentiates the function; a library's has no gradient.
      writes: the numbers of the inputs that the operation writes to, as PopART's may: the first result
        becomes the value of the first of these inputs, and so on. They are buffers, inputs of the model,
        parameters that need no gradient, or what forward computed.
      library: a shared library, in place of `function`, with a handler of XLA's foreign function
        interface. Attributes arrive as float, std::int64_t, xla::ffi::Span of these, std::string_view,
        and lists of strings as dictionaries with the keys "0", "1", ...
      symbol: the name of the handler in the library; None for `name`.
      platform: the JAX platform that the handler is for.

    Returns:
      The function, None for a library's, or the decorator.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: arguments for both a function and a library are given, or the library has no such symbol.
      OSError: there is no such library.

    Example:
      poptorch.register_custom_op("com.acme", "Cube", 1, lambda x, bias: (x**3, x**3 + bias))
    """
    for what, value in (("domain", domain), ("name", name)):
        if not isinstance(value, str):
            raise TypeError(f"register_custom_op: {what} must be a string; got {value!r}.")
    if not is_int(version):
        raise TypeError(f"register_custom_op: version must be an integer; got {version!r}.")
    for what, given in (("function", function), ("vjp", vjp)):
        if given is not None and not callable(given):
            raise TypeError(f"register_custom_op: {what} must be callable; got {type(given).__name__}.")
    if not isinstance(writes, Sequence) or not all(is_int(number, 0) for number in writes):
        raise TypeError(f"register_custom_op: writes must be a list of numbers of inputs; got {writes!r}.")
    key = domain, name, version
    if library is not None:
        if function is not None:
            raise ValueError("register_custom_op: give a function or a library, not both.")
        target = _load(domain, name, Path(library), symbol or name, platform)
        _registered[key] = CustomOperation(*key, _foreign(target), vjp, tuple(writes), is_foreign=True)
        return None
    if symbol is not None:
        raise ValueError("register_custom_op: symbol is a name in a library, and there is no library.")
    if function is None:
        return lambda given: register_custom_op(domain, name, version, given, vjp=vjp, writes=writes)
    _registered[key] = CustomOperation(*key, _python(function), vjp, tuple(writes), is_foreign=False)
    return function


def find_custom_op(domain: str, name: str, version: int) -> CustomOperation:
    """Finds the operation of a name."""
    found = _registered.get((domain, name, version))
    if found is None:
        known = "; ".join(sorted(f"{n!r} of {d!r}, version {v}" for d, n, v in _registered)) or "none"
        raise Error(
            f"There is no custom operation {name!r} of domain {domain!r}, version {version}. Registered by "
            f"poptorch.register_custom_op are: {known}."
        )
    return found


def _load(domain: str, name: str, library: Path, symbol: str, platform: str) -> str:
    """Makes an XLA target that calls a function of a library, and returns its name."""
    loaded = ctypes.CDLL(str(library))
    try:
        handler = getattr(loaded, symbol)
    except AttributeError:
        raise ValueError(
            f"register_custom_op: {library} has no symbol {symbol!r}. It must be defined by "
            "XLA_FFI_DEFINE_HANDLER_SYMBOL, and visible."
        ) from None
    _libraries.append(loaded)
    target = f"ipu_pipeline.{domain}.{name}.{next(_targets)}"  # XLA does not allow a target to be replaced
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=platform)
    return target


def _python(function: Compute) -> Any:
    def compute(
        inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], attributes: Attributes
    ) -> Any:
        del shapes
        return function(*inputs, **attributes)

    return compute


def _foreign(target: str) -> Any:
    def compute(
        inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], attributes: Attributes
    ) -> Any:
        encoded = {name: _encode(name, value) for name, value in attributes.items()}
        return jax.ffi.ffi_call(target, list(shapes))(*inputs, **encoded)

    return compute


def _encode(name: str, value: Any) -> Any:
    """Encodes an attribute for XLA's interface. PopTorch's numbers are float32 and int64."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return np.float32(value) if isinstance(value, float) else np.int64(value)
    if not value:
        raise Error(f"Attribute {name!r} is an empty list, whose type a library cannot know.")
    if isinstance(value[0], str):
        return {str(number): text for number, text in enumerate(value)}
    return np.array(value, np.float32 if isinstance(value[0], float) else np.int64)
