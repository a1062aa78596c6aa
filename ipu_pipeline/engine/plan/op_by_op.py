"""Computes a plan op by op: for a debugger, or to find the operation that made a nan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.placement import put
from ipu_pipeline.engine.jaxprs import FlatJaxpr, flatten
from ipu_pipeline.engine.jaxprs.op_by_op import Evaluated, evaluate, find_nan, has_nan
from ipu_pipeline.engine.plan.lowering import Layout, source_at
from ipu_pipeline.engine.plan.plan import Instruction, Numbered, Plan, Program
from ipu_pipeline.engine.plan.run import Linked
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.engine.state import Progress
from ipu_pipeline.engine.tracing.faults import find_line
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.ground.jax_compat import scope_names


@dataclass(frozen=True, eq=False)
class Visit:
    """A micro-batch whose turn has come."""

    number: int  # its number among those that the step was given
    replica: int  # the replica that it is for
    leaves: Sequence[Any]  # its leaves
    key: Any  # the random key that its own are folded from
    variables: Mapping[str, Any]  # full name -> value, in the replica


@dataclass(frozen=True, eq=False)
class _Maker:
    """The program that made a value, evaluated, and the place among its results."""

    program: Program
    evaluated: Evaluated
    place: int

    @property
    def has_nan(self) -> bool:
        return has_nan(self.evaluated.results[self.place])


_Makers: TypeAlias = "dict[Any, _Maker]"  # by `Binding` or `UpdateValue`


class OpByOp:
    """Evaluates the programs of a plan, an operation at a time."""

    def __init__(self, layout: Layout, collected: Sequence[Source], has_nan_checks: bool) -> None:
        """Computes nothing yet."""
        self._layout, self._has_nan_checks = layout, has_nan_checks
        loss, group = layout.whole.traced.loss, layout.whole.groups[-1]
        self._results = [
            source_at(source, group, 0).what for source in (*([] if loss is None else [loss]), *collected)
        ]
        self._flat: dict[Program, FlatJaxpr] = {}
        self._of_replicas: list[_Makers] = [{} for _replica in range(layout.num_replicas)]
        self._of_update: _Makers = {}
        self._num_done = self._num_each = self._num_all = 0  # programs

    def link(self, plan: Plan, linked: Sequence[list[Linked]]) -> list[list[Linked]]:
        """Returns the same blocks, with programs that are evaluated."""
        numbers = [number for instruction, number in plan.instructions() if _is_evaluated(instruction)]
        self._num_each, self._num_all = numbers.count(0), len(numbers)
        blocks: dict[Numbered, list[Linked]] = {}
        for numbered, block in zip(plan.blocks, linked, strict=True):
            if numbered not in blocks:
                blocks[numbered] = [
                    (functools.partial(self._run, instruction), *entry[1:])
                    if _is_evaluated(instruction)
                    else entry
                    for instruction, entry in zip(numbered.instructions, block, strict=True)
                ]
        return [blocks[numbered] for numbered in plan.blocks]

    def _run(self, instruction: Instruction, *arguments: Any) -> list[Any]:
        program = instruction.program
        assert program is not None
        if program not in self._flat:
            self._flat[program] = flatten(jax.make_jaxpr(program.source)(*arguments))
        evaluated = evaluate(self._flat[program], arguments)
        results = _place(program, evaluated.results)
        if self._has_nan_checks:
            self._note(program, instruction.replica, evaluated)
        return results

    # Nans.

    def _note(self, program: Program, replica: int, evaluated: Evaluated) -> None:
        """Notes who made a program's results. Checks behind the last one of a micro-batch or update."""
        makers = self._of_update if program.kind is None else self._of_replicas[replica]
        for place, bound in enumerate(program.results):
            for name in [bound] if program.kind is None else bound:
                makers[name] = _Maker(program, evaluated, place)
        self._num_done += 1
        number, num_left = divmod(self._num_done, self._num_each)
        if program.kind is not None and num_left == 0:
            self._check_micro_batch(number - 1)
        elif self._num_done == self._num_all:
            self._check_update()

    def _check_micro_batch(self, number: int) -> None:
        """Raises if what a micro-batch of a replica leaves has a nan."""
        num_replicas = self._layout.num_replicas
        for replica, makers in enumerate(self._of_replicas):
            enqueued = sorted(name for name in makers if name.kind is BindingKind.ENQUEUED)
            state = [n for n in makers if n.kind in (BindingKind.ACCUMULATOR, BindingKind.ASSIGNED)]
            for name in (*self._results, *enqueued, *state):
                if name in makers and makers[name].has_nan:
                    where = f"micro-batch {number * num_replicas + replica}"
                    raise self._explain(
                        name, makers, where + (f" (of replica {replica})" if num_replicas > 1 else "")
                    )
            makers.clear()

    def _explain(self, name: Binding, makers: _Makers, where: str) -> FloatingPointError:
        maker, cause = _follow(name, makers, lambda name: name.kind is BindingKind.ACCUMULATOR)
        if maker is None:
            return FloatingPointError(
                f"A nan came with {_describe(cause)}; found in {where}, before any operation made one."
            )
        stage = self._layout.whole.traced.stages[maker.program.stage]
        # The last stage does its backward with its forward.
        is_backward = maker.program.kind is not ActionKind.FORWARD or _is_of_backward(cause)
        return _make_error(cause, f"{stage.place}, {'backward' if is_backward else 'forward'}, {where}")

    def _check_update(self) -> None:
        """Raises if what a weight update leaves has a nan."""
        kinds = (UpdateKind.PARAMETER, UpdateKind.STATE, UpdateKind.ENQUEUED)
        for value, maker in self._of_update.items():
            if value.kind in kinds and maker.has_nan:
                raise self._explain_update(value)

    def _explain_update(self, value: UpdateValue) -> FloatingPointError:
        of = self._describe_update(value)
        maker, cause = _follow(value, self._of_update, lambda value: value.kind != UpdateKind.SENT)
        if maker is not None:
            return _make_error(cause, f"the weight update of {of}")
        return FloatingPointError(
            f"A nan came with {self._describe_update(cause)} to the weight update of {of}."
        )

    def _describe_update(self, value: UpdateValue) -> str:
        updates = self._layout.whole.updates
        assert updates is not None
        if value.kind == UpdateKind.PARAMETER:
            return f"variable {value.key}"
        if value.kind == UpdateKind.GRADIENT:
            return f"the gradient of {value.key}"
        if value.kind == UpdateKind.STATE:
            return f"the optimizer's state {updates.state_leaves[value.key].path}"
        return "a value of the last stage" if value.kind == UpdateKind.OUTPUT else "a value"


def find_nans(progress: Progress) -> str:
    """Describes a part of a step's results that has a nan; "" if none has one. Waits for them."""
    state = progress.state
    named = [("the loss", part.loss) for part in progress.collected]
    named += [
        ("what the last stage returned", leaf) for part in progress.collected for leaf in part.outputs
    ]
    handed = [*progress.enqueued, *progress.updated]
    named += [("what was enqueued", leaf) for part in handed for leaf in part.leaves]
    named += [(f"variable {name}", value) for name, value in state.variables.items()]
    named += [("the optimizer's state", leaf) for leaf in jax.tree.leaves(state.optimizer_state)]
    is_nan = [
        (name, jnp.isnan(value).any())
        for name, value in named
        if value is not None and jnp.issubdtype(value.dtype, jnp.inexact)
    ]  # all are started before the first one is waited for
    return next((name for name, answer in is_nan if answer), "")


def _is_evaluated(instruction: Instruction) -> bool:
    """Whether an instruction runs a program of a stage or update, not one that passes put between."""
    return instruction.program is not None and bool(instruction.program.results)


def _place(program: Program, results: Sequence[Any]) -> list[Any]:
    """Puts results where the program would; copies, as programs that follow may take their memory."""
    shardings, group = program.shardings, program.group
    if not isinstance(shardings, (list, tuple)):
        shardings = [shardings] * len(results)
    return [
        put([result], group)[0] if sharding is None else jax.device_put(result, sharding, may_alias=False)
        for result, sharding in zip(results, shardings, strict=True)
    ]


def _follow(name: Any, makers: _Makers, is_given: Callable[[Any], bool]) -> tuple[_Maker | None, Any]:
    """Goes back from a nan to who made it, and the equation; None for that of a constant.

    If it was there before, returns None and its name.
    """
    while name in makers:
        maker = makers[name]
        origin = find_nan(maker.evaluated, maker.evaluated.flat.outputs[maker.place])
        if origin.equation is not None or origin.argument < 0:
            return maker, origin.equation
        name = maker.program.binds[origin.argument]
        if is_given(name):
            break
    return None, name


def _is_of_backward(equation: Any) -> bool:
    return equation is not None and any(name.startswith("transpose") for name in scope_names(equation))


def _make_error(equation: Any, place: str) -> FloatingPointError:
    if equation is None:
        return FloatingPointError(f"invalid value (nan) in a constant of {place}.")
    line = find_line(equation)
    at = f"\n  at {line}" if line else ""
    return FloatingPointError(f"invalid value (nan) encountered in {equation.primitive.name}: {place}{at}")


def _describe(binding: Binding) -> str:
    """Describes the value that brought a nan into a step."""
    if binding.kind is BindingKind.VARIABLE:
        return f"variable {binding.key}"
    if binding.kind is BindingKind.VALUE:
        return f"leaf {binding.key.index} of the micro-batch"
    if binding.kind is BindingKind.INPUT:
        return f"leaf {binding.key} of the inputs"
    return "the accumulated gradients" if binding.kind is BindingKind.ACCUMULATOR else "a count or scale"
