"""Cuts a stage's joint jaxpr of forward and backward into the programs that run.

Equations that depend on a cotangent are the backward. What crosses is a residual, with two exceptions: the
runner holds the inputs of the stage anyway, and what depends only on variables and constants is computed
again in the backward.

The backward may be cut in halves: gradients of inputs first, and those of weights in a program of their
own. That repeats nothing of the first half, but takes what it needs as further residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.programs import accumulation, stage_programs
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedStage
from ipu_pipeline.ground import jax_core

__all__ = ["Joint", "fuse", "halve", "is_literal", "split"]

Results: TypeAlias = "Sequence[tuple[Value, Any]]"  # what a program returns, with the atoms


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

    def is_forward(self, equation: Any) -> bool:
        """Whether an equation belongs to the forward."""
        return not self.is_backward(equation)


def is_literal(atom: Any) -> bool:
    """Whether an atom is a literal."""
    return isinstance(atom, jax_core.Literal)


def fuse(joint: Joint, reduction: Reduction, is_scaled: bool) -> StagePrograms:
    """Makes forward and backward one program that starts from the loss."""
    forward = _Cutter(joint).cut(
        "forward_backward", [*joint.results, *joint.pulled], keep_effects_of=jaxprs.any_equation
    )
    forward = stage_programs.seed(forward, joint.stage.output_avals[-1].dtype, is_scaled)
    return StagePrograms(accumulation.accumulate(forward, reduction), None, (), joint.trained)


def split(joint: Joint, reduction: Reduction) -> StagePrograms:
    """Makes forward and backward two programs."""
    cutter = _Cutter(joint)
    backward = cutter.cut_later("backward", joint.pulled, cutter.stored, joint.is_backward)
    results = [*joint.results, *cutter.returned(cutter.numbers)]
    return StagePrograms(
        cutter.cut("forward", results, keep_effects_of=joint.is_forward),
        None if backward is None else accumulation.accumulate(backward, reduction),
        cutter.residuals,
        joint.trained,
    )


def halve(joint: Joint, reduction: Reduction, is_last: bool, is_scaled: bool) -> StagePrograms:
    """Makes forward and both halves of the backward programs.

    On the last stage, the forward does the first half, too, and starts it from the loss.
    """
    cutter, flat = _Cutter(joint), joint.flat
    first: list[tuple[Value, Any]] = []
    second: list[tuple[Value, Any]] = []
    for value, atom in joint.pulled:
        (first if value.kind is ValueKind.INPUT_COTANGENT else second).append((value, atom))
    if is_last:
        computed = jaxprs.find_computed(flat, [atom for _value, atom in (*joint.results, *first)])
    else:
        computed = jaxprs.find_computed(flat, [atom for _value, atom in first], cutter.stored)
    known = set(map(id, computed))

    def is_second(equation: Any) -> bool:
        return joint.is_backward(equation) and id(equation) not in known

    kept = jaxprs.find_kept(computed, cutter.data_vars)
    weights = cutter.cut_later("weight_gradients", second, cutter.stored | kept, is_second)
    is_rest = jaxprs.any_equation if weights is None else lambda equation: not is_second(equation)
    if is_last:
        results = [*joint.results, *first, *cutter.returned(cutter.numbers)]
        forward = cutter.cut("forward_input_gradients", results, keep_effects_of=is_rest)
        backward = None
        dtype = joint.stage.output_avals[-1].dtype
        forward = stage_programs.seed(forward, dtype, is_scaled)
        weights = None if weights is None else stage_programs.seed(weights, dtype, is_scaled)
    else:
        made = cutter.returned(var for var in cutter.numbers if var in kept and var not in cutter.stored)
        backward = cutter.cut_later(
            "input_gradients",
            [*first, *made],
            cutter.stored,
            lambda equation: joint.is_backward(equation) and is_rest(equation),
        )
        own = {var for _value, var in made}
        results = [*joint.results, *cutter.returned(var for var in cutter.numbers if var not in own)]
        forward = cutter.cut("forward", results, keep_effects_of=joint.is_forward)
    return StagePrograms(
        forward,
        backward,
        cutter.residuals,
        joint.trained,
        is_halved=True,
        weights=None if weights is None else accumulation.accumulate(weights, reduction),
    )


class _Cutter:
    """Cuts the programs of a stage.

    Attributes:
      numbers: the numbers of the residuals, by variable.
      data_vars: the variables that depend on more than variables of the stage and constants.
      stored: the variables of the forward that later programs take instead of computing them again.
    """

    def __init__(self, joint: Joint) -> None:
        self.numbers: dict[Any, int] = {}
        self._joint = joint
        # An assigned variable's value in the forward is gone by the backward, so it counts as data: it is
        # stored if the backward needs it.
        assigned = {joint.stage.variables.index(spec) for spec in joint.stage.assigned}
        constant = {
            var
            for var, value in joint.labels.items()
            if value.kind is ValueKind.VARIABLE and value.index not in assigned
        }
        self.data_vars = jaxprs.dependents(joint.flat, [v for v in joint.flat.inputs if v not in constant])
        self.stored = {
            var
            for equation in joint.flat.equations
            if joint.is_forward(equation)
            for var in equation.outvars
            if var in self.data_vars or equation.effects  # printing is not repeated
        }
        self._later_labels = {
            var: value
            for var, value in joint.labels.items()
            if value.kind is not ValueKind.VARIABLE or var in constant
        }

    @property
    def residuals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the residuals, by number."""
        return tuple(jaxprs.aval_struct(var.aval) for var in self.numbers)

    def returned(self, variables: Iterable[Any]) -> list[tuple[Value, Any]]:
        """Some residuals, as results of a program."""
        return [(Value(ValueKind.RESIDUAL, self.numbers[var]), var) for var in variables]

    def cut(self, name: str, results: Results, keep_effects_of: Callable[[Any], bool]) -> StageProgram:
        """Cuts a program that begins with a micro-batch."""
        joint = self._joint
        full_name = f"stage{joint.index}_{name}"
        return stage_programs.cut(full_name, joint.flat, results, joint.labels, (), keep_effects_of)

    def cut_later(
        self,
        name: str,
        results: Results,
        stored: Collection[Any],
        keep_effects_of: Callable[[Any], bool],
    ) -> StageProgram | None:
        """Cuts a program that takes residuals. Returns None if it has no results."""
        if not results:
            return None
        return stage_programs.cut(
            f"stage{self._joint.index}_{name}",
            self._joint.flat,
            results,
            self._later_labels,
            stored,
            keep_effects_of,
            self.numbers,
        )
