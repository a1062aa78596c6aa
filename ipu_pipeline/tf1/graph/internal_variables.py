"""Internal variables: always 0, trained for the sake of their gradients, neither shown nor saved."""

from __future__ import annotations

__all__ = ["HOST_TABLES", "LOSS_WEIGHTS", "is_internal"]

LOSS_WEIGHTS = "_loss_weight"  # the scope of variables whose gradients are the weights of losses
HOST_TABLES = "_host_table"  # the scope of variables that make programs compute gradients of a table's rows


def is_internal(name: str) -> bool:
    """Whether a full name belongs to such a variable."""
    return name.startswith((f"{LOSS_WEIGHTS}/", f"{HOST_TABLES}/"))
