"""Takes the numbers of random keys out of programs, so that those of equal stages are equal.

A stage's keys are folded from its micro-batch's key with two numbers each, that of the scope and that of
the call (`tracing/keys`). These differ from stage to stage. As constants they would make the programs of
stages differ that are otherwise equal, and XLA would compile each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.programs.stage_programs import Value, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedStage
from ipu_pipeline.ground import jax_core

__all__ = ["find_alike", "take_out_key_numbers"]

_NUM_BEFORE, _NUM_FOLDS = 2, 4  # the first ones are with counts: of executions, and of micro-batches


def find_alike(stages: Sequence[TracedStage]) -> frozenset[int]:
    """The stages that draw random keys and may be equal but for the numbers of these."""
    signatures = [
        (
            tuple(equation.primitive.name for equation in stage.flat.equations),
            tuple(str(var.aval) for var in stage.flat.inputs),
        )
        for stage in stages
    ]
    counts = Counter(signatures)
    return frozenset(
        index
        for index, (stage, signature) in enumerate(zip(stages, signatures, strict=True))
        if stage.uses_key and counts[signature] > 1
    )


def take_out_key_numbers(
    flat: jaxprs.FlatJaxpr, labels: dict[Any, Value]
) -> tuple[jaxprs.FlatJaxpr, dict[Any, Value]]:
    """Makes the numbers of a stage's random keys further inputs.

    Returns:
      The jaxpr, and the labels of all its inputs. Keys that are drawn within loops, conditionals and
      segments that are computed again keep their numbers.
    """
    folds = {var: 0 for var, value in labels.items() if value.kind is ValueKind.KEY}
    numbers: dict[Any, Value] = {}
    equations = []
    for equation in flat.equations:
        if equation.primitive.name == "random_fold_in":
            key, number = equation.invars
            done = folds.get(key, _NUM_FOLDS)
            is_literal = isinstance(number, jax_core.Literal)
            if done < _NUM_FOLDS and is_literal == (done >= _NUM_BEFORE):
                (folded,) = equation.outvars
                folds[folded] = done + 1
                if is_literal:
                    var = jax_core.Var(number.aval)
                    numbers[var] = Value(ValueKind.KEY_NUMBER, int(np.asarray(number.val)))
                    equation = equation.replace(invars=[key, var])
        equations.append(equation)
    inputs = [*flat.inputs, *numbers]
    return jaxprs.FlatJaxpr(inputs, equations, flat.outputs, flat.constants), {**labels, **numbers}
