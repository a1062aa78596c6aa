"""Cuts a stage's joint jaxpr of forward and backward into the programs that run.

Equations that depend on a cotangent are the backward. What crosses is a residual, with two exceptions: the
runner holds the inputs of the stage anyway, and what depends only on variables and constants is computed
again in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex_core

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.programs import accumulation, stage_programs
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.stage_programs import StagePrograms, Value, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedStage

__all__ = ["Joint", "fuse", "is_literal", "split"]


@dataclass(frozen=True, eq=False)
class Joint:
    """A stage's forward and backward in one jaxpr."""

    index: int  # the stage's number
    stage: TracedStage  # the stage
    flat: jaxprs.FlatJaxpr  # the jaxpr
    labels: dict[Any, Value]  # what its inputs are
    results: list[tuple[Value, Any]]  # what the forward returns, with the atoms
    pulled: list[tuple[Value, Any]]  # the gradients that are not always zero, with the atoms
    backward_vars: set[Any]  # the variables that depend on a cotangent
    trained: tuple[int, ...]  # positions in the stage's variables

    def is_backward(self, equation: Any) -> bool:
        """Whether an equation belongs to the backward."""
        atoms = (*equation.outvars, *equation.invars)
        return any(not is_literal(atom) and atom in self.backward_vars for atom in atoms)


def is_literal(atom: Any) -> bool:
    """Whether an atom is a literal."""
    return isinstance(atom, jex_core.Literal)


def fuse(joint: Joint, reduction: Reduction, is_scaled: bool) -> StagePrograms:
    """Makes forward and backward one program that starts from the loss."""
    fused, residuals = stage_programs.cut(
        f"stage{joint.index}_forward_backward",
        joint.flat,
        [*joint.results, *joint.pulled],
        joint.labels,
        (),
        jaxprs.any_equation,
    )
    assert not residuals
    fused = stage_programs.seed(fused, joint.stage.output_avals[-1].dtype, is_scaled)
    return StagePrograms(accumulation.accumulate(fused, reduction), None, (), joint.trained)


def split(joint: Joint, reduction: Reduction) -> StagePrograms:
    """Makes forward and backward two programs."""
    # An assigned variable's value in the forward is gone by the backward, so it counts as data: it is
    # stored if the backward needs it.
    assigned = {joint.stage.variables.index(spec) for spec in joint.stage.assigned}
    constant = {
        var
        for var, value in joint.labels.items()
        if value.kind is ValueKind.VARIABLE and value.index not in assigned
    }
    data_vars = jaxprs.dependents(joint.flat, [v for v in joint.flat.inputs if v not in constant])
    stored = {
        var
        for equation in joint.flat.equations
        if not joint.is_backward(equation)
        for var in equation.outvars
        if var in data_vars or equation.effects  # printing is not repeated
    }
    backward_labels = {
        var: value
        for var, value in joint.labels.items()
        if value.kind is not ValueKind.VARIABLE or var in constant
    }
    backward, residual_vars = stage_programs.cut(
        f"stage{joint.index}_backward",
        joint.flat,
        joint.pulled,
        backward_labels,
        stored,
        joint.is_backward,
    )
    residuals = [(Value(ValueKind.RESIDUAL, n), var) for n, var in enumerate(residual_vars)]
    forward, missing = stage_programs.cut(
        f"stage{joint.index}_forward",
        joint.flat,
        [*joint.results, *residuals],
        joint.labels,
        (),
        lambda equation: not joint.is_backward(equation),
    )
    assert not missing
    return StagePrograms(
        forward,
        accumulation.accumulate(backward, reduction) if joint.pulled else None,
        tuple(jaxprs.aval_struct(var.aval) for var in residual_vars),
        joint.trained,
    )
