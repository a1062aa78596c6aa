"""The dispatch plan: the number of micro-batches that a program handles."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.ground.checks import is_int

__all__ = ["ONE_BY_ONE", "Chunking", "check_dispatch_plan"]


@dataclass(frozen=True)
class Chunking:
    """A dispatch plan. `dataclasses.asdict` and `Chunking(**...)` store and restore it.

    Example:
      >>> plan = engine.Chunking(2)
      >>> pipeline = engine.Pipeline([jnp.sin, jnp.tanh], num_micro_batches=4, dispatch_plan=plan)
      >>> print(plan)
      2 micro-batches per program: given

    Attributes:
      chunk_size: the number of micro-batches that a program handles, one after another; a divisor of a
        step's number. A stage then has `chunk_size` times as many in flight.
      reason: the reason for this size, for people.
    """

    chunk_size: int = 1
    reason: str = "given"

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not is_int(self.chunk_size, 1):
            raise ValueError(
                f"Chunking: chunk_size must be an integer of at least 1; got {self.chunk_size!r}."
            )

    def __str__(self) -> str:
        """Describes the plan in words."""
        chunk = "one micro-batch" if self.chunk_size == 1 else f"{self.chunk_size} micro-batches"
        return f"{chunk} per program: {self.reason}"


ONE_BY_ONE = Chunking(reason="every action is a program of its own")


def check_dispatch_plan(plan: Chunking, num_micro_batches: int | None, is_one_program: bool) -> None:
    """Raises if a given plan does not fit the pipeline."""
    if not isinstance(plan, Chunking):
        raise TypeError(f"dispatch_plan must be a Chunking, or None to have it chosen; got {plan!r}.")
    if is_one_program:
        raise ValueError(
            "dispatch_plan: all stages are on one device, where everything is one program. Leave it out."
        )
    if plan.chunk_size > 1 and (num_micro_batches is None or num_micro_batches % plan.chunk_size):
        known = "is only known at run time" if num_micro_batches is None else f"is {num_micro_batches}"
        raise ValueError(
            f"dispatch_plan: chunk_size must divide the number of micro-batches per weight update, which "
            f"{known}; got {plan.chunk_size}."
        )
