"""What a plan does, in words: a line for each block."""

from __future__ import annotations

from ipu_pipeline.engine.plan.plan import ALL, Instruction, Op, Plan

__all__ = ["describe"]


def describe(plan: Plan) -> str:
    """The blocks of a plan, such as "F0.1: load 2, run stage0_forward, send 1 to 1, free 3".

    F, B, I and W are the kinds of programs, followed by the stage and the number of the micro-batch or
    chunk; other numbers are those of arrays, and of devices in the device mapping.
    """
    lines = []
    for numbered, micro_batch in zip(plan.blocks, plan.micro_batches, strict=True):
        name = numbered.block.name
        if isinstance(name, tuple):
            name = f"{name[0].letter}{name[1]}"
        number = "" if micro_batch == ALL else f"{'.' if len(name) == 2 else ' '}{micro_batch}"
        parts = [part for one in numbered.instructions for part in _parts(one)]
        lines.append(f"{name}{number}: {', '.join(parts) or 'nothing'}")
    return "\n".join(lines)


def _parts(one: Instruction) -> list[str]:
    freed = [f"free {len(one.frees)}"] if one.frees else []
    if one.op is Op.SAME and not one.reads:
        return freed
    if one.op is Op.RUN and one.program is not None:
        return [f"run {one.program.name}", *freed]
    number = len(one.writes) if one.writes else len(one.reads)
    target = f" to {one.group.ipu}" if one.op is Op.SEND else ""
    return [f"{one.op.name.lower()} {number}{target}", *freed]
