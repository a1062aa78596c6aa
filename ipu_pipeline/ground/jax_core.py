"""The types that jaxprs are made of, from where this version of JAX has them.

`jax.extend.core` has all of them since JAX 0.10; before, some are in `jax.core`.
"""

from __future__ import annotations

from typing import Any

import jax.core
import jax.extend.core

__all__ = [
    "ClosedJaxpr",
    "DebugInfo",
    "DropVar",
    "Jaxpr",
    "Literal",
    "Primitive",
    "Var",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "primitives",
]


def _find(name: str) -> Any:
    return getattr(jax.extend.core, name, None) or getattr(jax.core, name)


ClosedJaxpr = _find("ClosedJaxpr")
DebugInfo = _find("DebugInfo")
DropVar = _find("DropVar")
Jaxpr = _find("Jaxpr")
Literal = _find("Literal")
Primitive = _find("Primitive")
Var = _find("Var")
jaxpr_as_fun = _find("jaxpr_as_fun")
jaxprs_in_params = _find("jaxprs_in_params")
primitives = _find("primitives")
