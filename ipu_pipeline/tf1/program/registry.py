"""The compiled programs that are still in use."""

from __future__ import annotations

import itertools
import weakref

from ipu_pipeline.checkpointing.session_state import KeptOptimizer
from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.processes import selection
from ipu_pipeline.tf1.graph.internal_variables import is_internal
from ipu_pipeline.tf1.program.calls import current_builder
from ipu_pipeline.tf1.program.program import Program

__all__ = [
    "compiled_programs",
    "find_trained",
    "global_variables",
    "register",
    "reserve_ipus",
    "trainable_variables",
]

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(program: Program) -> None:
    """Adds a program, for as long as it is referred to elsewhere."""
    _programs[next(_numbers)] = program


def compiled_programs() -> list[Program]:
    """The programs that are still in use, in the order in which they were compiled."""
    return [program for _number, program in sorted(_programs.items())]


def find_trained(name: str, optimizer: KeptOptimizer) -> set[str] | None:
    """The full names of the variables that an optimizer's state is for; None if no such program is used."""
    for program in compiled_programs():
        for call in program.calls:
            is_its = call.trains and not optimizer.find_differences(call.optimizer_shapes)
            if call.name == name and is_its:
                return call.trained
    return None


def global_variables() -> list[VariableSpec]:
    """Returns specifications of all variables: `name` (the full one), `shape`, `dtype`, `trainable`.

    In a function that is being compiled, these are the variables that it has asked for so far; elsewhere,
    the variables of all compiled programs that are still in use. They are in the order in which they were
    first asked for.

    Example:
      >>> def model(x):
      ...     return layers.BatchNormalization()(layers.Dense(4)(x))
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
      >>> [spec.name for spec in ipu.global_variables()]
      ['dense/kernel', 'dense/bias', 'batch_normalization/moving_mean', ...]
    """
    builder = current_builder()
    if builder is not None:
        names = builder.names
        own = [spec for spec in names.variables.values() if not is_internal(spec.name)]
        return own + [table.spec for table in names.host_tables.values()]
    found: dict[str, VariableSpec] = {}
    for program in compiled_programs():
        for name, spec in program.variables.items():
            found.setdefault(name, spec)
    return list(found.values())


def trainable_variables() -> list[VariableSpec]:
    """Returns the variables of `global_variables` that pipelines with an optimizer train.

    Example:
      >>> names = [spec.name for spec in ipu.trainable_variables()]
    """
    return [spec for spec in global_variables() if spec.trainable]


def reserve_ipus(ipu_device: int, number: int) -> None:
    """Reserves IPUs for a program that is being compiled, in addition to those of other programs."""
    known = [(program.ipu_device, program.num_ipus) for program in compiled_programs()]
    selection.reserve([*known, (ipu_device, number)])
