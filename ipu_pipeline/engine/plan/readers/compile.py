"""Compiles what a plan runs before its first step, several programs at a time: values are shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipu_pipeline.engine.execution.compiling import Compiled, Compiler, Divided
from ipu_pipeline.engine.execution.kept import KeptPrograms
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.plan import Op, Plan, Program, Value
from ipu_pipeline.engine.plan.readers.shapes import find_shapes, trace
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.progress import compiling

__all__ = ["compile_ahead", "struct_of"]


def compile_ahead(
    plan: Plan,
    layout: Layout,
    given: Callable[[Value], Any],
    chunk_size: int,
    is_shared: bool,
    kept: KeptPrograms | None,
    note: str = "",
) -> tuple[Compiled, dict[Value, Any]]:
    """Compiles all programs of a plan; returns when all are compiled.

    Args:
      plan: the step.
      layout: where it runs.
      given: see `find_shapes`.
      chunk_size: micro-batches that a program handles.
      is_shared: whether programs that differ only in their device are compiled once.
      kept: has programs that earlier pipelines compiled; None if they are not kept.
      note: what is told meanwhile.

    Returns:
      What is known of the programs then, and the shapes of all values.
    """
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    programs = dict.fromkeys(one.program for block in blocks for one in block.code if one.op is Op.RUN)
    new = [program for program in programs if program.group.is_here and not program.is_compiled]
    started: dict[Program, Any] = {}
    with compiling(len(new), note) as told:
        compiler = Compiler(is_shared, told, kept)

        def launch(program: Program, arguments: Sequence[Any]) -> list[Any]:
            arguments = [value.wait() if isinstance(value, Divided) else value for value in arguments]
            results: list[Any] = trace(program, arguments)
            group = program.group
            if program not in started and not program.is_compiled and group.is_here:
                install = functools.partial(setattr, program, "function")
                is_joint = program.kind is not None and group.num_replicas > 1
                started[program] = compiler.start(
                    program.jitted, arguments, group, program.options, None if is_joint else install
                )
            is_chosen = program.kind is not None and isinstance(program.shardings, list)
            if is_chosen and (compiled := started.get(program)) is not None:
                residuals = [
                    Divided(results[place], compiled, place)
                    for place, bound in enumerate(program.results)
                    if any(binding.kind is BindingKind.RESIDUAL for binding in bound)
                ]
                for place, sharding in enumerate(program.shardings):
                    if sharding is None:
                        results[place] = Divided(results[place], compiled, place)
                if residuals:
                    compiler.divided[program.stage, program.kind.name] = residuals
            return results

        try:
            shapes = find_shapes(plan, layout, given, launch)
            compiled = compiler.finish(chunk_size)
            for program in started:
                program.is_compiled = True
            return compiled, shapes
        finally:  # after an error, compilations that have not begun are not waited for
            compiler.threads.shutdown(wait=False, cancel_futures=True)


def struct_of(value: Any) -> Any:
    """The shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
