"""Chooses the program that a call runs, by the shapes of its arguments: `Options.allowNewShapes`."""

from __future__ import annotations

from ipu_pipeline.ground.tables import shorten
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import (
    OTHER_THAN_SHAPES,
    Arguments,
    Signature,
    check_batches,
    check_like_first,
    check_shapes,
    check_written,
    describe_shapes,
    shapes_of,
)
from ipu_pipeline.poptorch.execution.building import batching_of
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.together import agree
from ipu_pipeline.poptorch.options import Options

__all__ = ["tell_shapes", "use_program"]

_MAX_TOLD = 60  # characters


def use_program(
    compiled: CompiledModel, signature: Signature, arguments: Arguments, options: Options
) -> bool:
    """Uses the program that is for a call's arguments. Returns whether there is one."""
    known, shapes = compiled.program, shapes_of(arguments)
    if not options.allow_new_shapes:
        check_like_first(signature, known.arguments, arguments)
        check_shapes(arguments, known.shapes)
        check_written(arguments, known.stages.written_inputs)
        compiled.check_same_tensors()
        return True
    check_like_first(signature, known.arguments, arguments, OTHER_THAN_SHAPES)
    compiled.check_same_tensors()
    if compiled.pipeline.built.updates is not None:  # several processes train, and compile, together
        agree("a call of a PopTorch model", {"the shapes": describe_shapes(arguments.names, shapes)})
    if compiled.use(shapes):
        check_written(arguments, compiled.stages.written_inputs)
        return True
    check_batches(arguments, batching_of(options))
    if len(compiled.programs) >= options.max_shapes:
        raise Error(
            f"The model is compiled for {len(compiled.programs)} shapes, which is the limit of "
            f"Options.allowNewShapes(True, max_shapes={options.max_shapes}), and these are new ones: "
            f"{describe_shapes(arguments.names, shapes)}. Raise max_shapes, or give inputs fewer shapes, "
            "for example by padding to a few lengths. It was compiled for: "
            f"{'; '.join(program.describe() for program in compiled.programs.values())}."
        )
    compiled.check_not_lost()
    if compiled.state is None:
        raise Error("Device is not attached. Call attachToDevice() first, to compile for other shapes.")
    return False


def tell_shapes(compiled: CompiledModel | None, arguments: Arguments, options: Options) -> str:
    """Describes what is compiled next, for the progress bar; empty if no other shapes are allowed."""
    if not options.allow_new_shapes:
        return ""
    described = describe_shapes(arguments.names, shapes_of(arguments))
    number = 1 + (0 if compiled is None else len(compiled.programs))
    return f" for {shorten(described, _MAX_TOLD)} ({number} of at most {options.max_shapes} shapes)"
