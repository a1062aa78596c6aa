"""Internal variables: always 0, trained for the sake of their gradients, neither shown nor saved."""

from __future__ import annotations

from ipu_pipeline.engine.fronts import is_loss_weight

__all__ = ["HOST_TABLES", "is_internal"]

HOST_TABLES = "_host_table"  # the scope of variables that make programs compute gradients of a table's rows


def is_internal(name: str) -> bool:
    """Whether a full name belongs to such a variable."""
    return is_loss_weight(name) or name.startswith(f"{HOST_TABLES}/")
