"""Models exported to predict without their Python code, by Graphcore's names; see `Session.export`."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_function, check_integer
from ipu_pipeline.processes import device_selection
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.tf1 import ipu_compiler, scopes
from ipu_pipeline.tf1.ops import pipelining_ops
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.exported_programs import LoadedProgram, load_program, make_example
from ipu_pipeline.tf1.session.saver import latest_checkpoint, take_weights
from ipu_pipeline.tf1.session.session import Session

__all__ = ["LoadedProgram", "export_pipeline", "export_single_step"]


def export_single_step(
    predict_step: Callable[..., Any],
    export_dir: str | os.PathLike[str],
    iterations: int,
    predict_step_signature: Sequence[Any] | None = None,
    input_dataset: Any = None,
    variable_initializer: Callable[[Session], Any] | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Callable[..., Any] | None = None,
    preprocessing_step_signature: Sequence[Any] | None = None,
    purge_export_dir: bool = False,
    checkpoint_restore_dir: str | os.PathLike[str] | None = None,
) -> LoadedProgram:
    """Exports a function that predicts, as a program for one IPU.

    Takes the same arguments as `export_pipeline`, with `predict_step` as the only stage.

    Returns:
      The exported program, loaded.

    Raises:
      TypeError, ValueError: an argument is not usable.
      Others: the errors of `export_pipeline`.
    """
    check_function("export_single_step: predict_step", predict_step)
    return _export(
        "export_single_step",
        [predict_step],
        export_dir,
        iterations,
        predict_step_signature=predict_step_signature,
        input_dataset=input_dataset,
        variable_initializer=variable_initializer,
        output_names=output_names,
        preprocessing_step=preprocessing_step,
        preprocessing_step_signature=preprocessing_step_signature,
        purge_export_dir=purge_export_dir,
        checkpoint_restore_dir=checkpoint_restore_dir,
    )


def export_pipeline(
    computational_stages: Sequence[Any],
    export_dir: str | os.PathLike[str],
    iterations: int,
    inputs: Any = None,
    device_mapping: Sequence[Any] | None = None,
    pipeline_schedule: Any = None,
    poplar_options: Any = None,
    name: str | None = None,
    predict_step_signature: Sequence[Any] | None = None,
    input_dataset: Any = None,
    variable_initializer: Callable[[Session], Any] | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Callable[..., Any] | None = None,
    preprocessing_step_signature: Sequence[Any] | None = None,
    purge_export_dir: bool = False,
    checkpoint_restore_dir: str | os.PathLike[str] | None = None,
) -> LoadedProgram:
    """Exports stages as a pipeline that predicts, with the values of its variables.

    Example:
      >>> def first(x):
      ...     return layers.Dense(16)(x)
      >>> def second(x):
      ...     return layers.Dense(2)(x)
      >>> program = ipu.serving.export_pipeline(
      ...     [first, second],
      ...     "exported_pipeline",
      ...     iterations=4,
      ...     predict_step_signature=[jax.ShapeDtypeStruct([4, 8], np.float32)],
      ...     variable_initializer=lambda session: session.run(ipu.global_variables_initializer()),
      ... )
      >>> program(np.ones([16, 8], np.float32)).shape
      (16, 2)

    All other arguments are those of `pipelining_ops.pipeline`. The loaded program takes values of
    placeholders among `inputs` in `feed`, by their names.

    Args:
      export_dir: the folder to write; it must not exist, or be empty.
      iterations: micro-batches that the pipeline takes in an execution. The loaded program takes any
        number.
      poplar_options: `PipelineStageOptions` for each stage.
      predict_step_signature: the arguments of the first stage for a micro-batch, besides `inputs`: a list
        of `jax.ShapeDtypeStruct`s, placeholders or arrays.
      input_dataset: a data set whose first element is an example of them instead.
      variable_initializer: takes a `Session` and sets the values of its variables: it restores a
        checkpoint, or calls `session.load`.
      output_names: names for what the last stage returns, in order: then the program gives a dict.
      preprocessing_step: a function of arrays before the first stage, on the same IPU. The program takes
        its arguments, and the first stage what it returns.
      preprocessing_step_signature: its arguments, described like `predict_step_signature`, which is then
        compared with what it returns; or `input_dataset` has an example of them.
      purge_export_dir: whether the contents of `export_dir` are removed when everything else is ready.
      checkpoint_restore_dir: a checkpoint with the values of the variables, or a folder whose newest one
        is taken.

    Returns:
      The exported program, as `ipu.load_program` returns it. It can be called with arrays whose number of
      rows is any multiple of a micro-batch's.

    Raises:
      CheckpointError: the checkpoint cannot be read, or is of another model.
      OSError: nothing can be written.
      TypeError, ValueError: an argument is not usable, or `export_dir` is not empty.
      Others: the errors of `pipelining_ops.pipeline`.
    """
    return _export(
        "export_pipeline",
        computational_stages,
        export_dir,
        iterations,
        predict_step_signature=predict_step_signature,
        input_dataset=input_dataset,
        variable_initializer=variable_initializer,
        output_names=output_names,
        preprocessing_step=preprocessing_step,
        preprocessing_step_signature=preprocessing_step_signature,
        purge_export_dir=purge_export_dir,
        checkpoint_restore_dir=checkpoint_restore_dir,
        inputs=inputs,
        device_mapping=device_mapping,
        pipeline_schedule=pipeline_schedule,
        forward_propagation_stages_poplar_options=poplar_options,
        name=name,
    )


def _export(
    caller: str,
    stages: Sequence[Any],
    export_dir: str | os.PathLike[str],
    iterations: int,
    *,
    predict_step_signature: Any,
    input_dataset: Any,
    variable_initializer: Any,
    output_names: Any,
    preprocessing_step: Any,
    preprocessing_step_signature: Any,
    purge_export_dir: bool,
    checkpoint_restore_dir: Any,
    inputs: Any = None,
    **options: Any,
) -> LoadedProgram:
    # Checks.
    target = Path(export_dir)
    if target.is_dir() and any(target.iterdir()) and not purge_export_dir:
        raise ValueError(
            f'{caller}: Directory "{target}" is not empty. Please specify an empty directory, or '
            "purge_export_dir=True, which removes what is in it."
        )
    check_integer(f"{caller}: iterations", iterations)
    if not isinstance(stages, (list, tuple)) or not stages:
        raise TypeError(f"{caller}: computational_stages must be a list of functions; got {stages!r}.")
    if variable_initializer is not None and checkpoint_restore_dir is not None:
        raise ValueError(
            f"{caller}: variable_initializer and checkpoint_restore_dir both give the variables their "
            "values. Give one of them."
        )
    if variable_initializer is not None and not callable(variable_initializer):
        raise TypeError(
            f"{caller}: variable_initializer must be a function that takes a session; got "
            f"{variable_initializer!r}."
        )
    # Stages and signature.
    num_inputs = 0 if inputs is None else len(inputs) if isinstance(inputs, (list, tuple)) else 1
    first = stages[0]
    if preprocessing_step is None:
        if preprocessing_step_signature is not None:
            raise ValueError(f"{caller}: preprocessing_step_signature is given without preprocessing_step.")
        signature = _choose(caller, "predict_step_signature", predict_step_signature, input_dataset)
        _check_arguments(caller, "predict_step_signature", first, signature, num_inputs)
    else:
        signature = _choose(
            caller, "preprocessing_step_signature", preprocessing_step_signature, input_dataset
        )
        _check_arguments(caller, "preprocessing_step_signature", preprocessing_step, signature, 0)
        _check_preprocessing(caller, preprocessing_step, signature, predict_step_signature)
        stages = [_precede(first, preprocessing_step, num_inputs), *stages[1:]]
    if output_names is not None:
        names = [output_names] if isinstance(output_names, str) else output_names
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{caller}: output_names must be a string or a list of them; got {names!r}.")
        stages = [*stages[:-1], _name_outputs(caller, stages[-1], names)]
    # Compilation and export.
    infeed = IPUInfeedQueue([signature])

    def model() -> Any:
        return pipelining_ops.pipeline(
            stages,
            gradient_accumulation_count=iterations,
            inputs=inputs,
            infeed_queue=infeed,
            outfeed_queue=IPUOutfeedQueue(),
            **options,
        )

    with scopes.ipu_scope("/device:IPU:0"):
        program = ipu_compiler.compile(model)
    with Session() as session:
        _give_values(caller, session, program, variable_initializer, checkpoint_restore_dir)
        _make_room(target)
        session.export(target, program)
    return load_program(target)


def _choose(caller: str, name: str, signature: Any, dataset: Any) -> tuple[Any, ...] | dict[str, Any]:
    """An example of the arguments for a micro-batch, from one of two arguments."""
    if (signature is None) is (dataset is None):
        how = "Neither is" if signature is None else "Both are"
        raise ValueError(
            f"{caller}: one of `{name}` and `input_dataset` must say what a micro-batch is like. {how} "
            "given."
        )
    if signature is None:
        element = IPUInfeedQueue(dataset).element
        example_inputs = element if isinstance(element, (tuple, list, dict)) else (element,)
        example: Any = make_example(example_inputs, f"{caller}: input_dataset's element")
        return example if isinstance(example, dict) else tuple(example)
    if not isinstance(signature, (list, tuple)):
        raise TypeError(f"{caller}: `{name}` must be a list or tuple; got {type(signature).__name__}.")
    if not signature:
        raise ValueError(f"{caller}: `{name}` cannot be empty.")
    return tuple(make_example(list(signature), f"{caller}: {name}"))


def _check_arguments(caller: str, name: str, function: Any, signature: Any, num_inputs: int) -> None:
    functions = function if isinstance(function, (list, tuple)) else [function]
    for stage in functions:
        check_function(f"{caller}: a stage", stage)
        parameters = inspect.signature(stage).parameters.values()
        if isinstance(signature, dict) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            continue
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        least = sum(p.default is p.empty for p in positional)
        if not least <= len(signature) + num_inputs <= len(positional):
            raise ValueError(
                f"{caller}: the length of {name} ({len(signature)}) does not match the number of arguments "
                f"of {getattr(stage, '__name__', stage)!r} that it is for ({len(positional) - num_inputs})."
            )


def _call_with(function: Callable[..., Any], element: Any) -> Any:
    return function(**element) if isinstance(element, dict) else function(*element)


def _check_preprocessing(caller: str, step: Any, example: Any, signature: Any) -> None:
    """Compares the results of a preprocessing step with the signature of the first stage."""
    if signature is None:
        return
    if not isinstance(signature, (list, tuple)):
        raise TypeError(
            f"{caller}: `predict_step_signature` must be a list or tuple; got {type(signature).__name__}."
        )
    returned = jax.eval_shape(lambda element: _call_with(step, element), example)
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    expected = make_example(list(signature), f"{caller}: predict_step_signature")

    def describe(tree: Any) -> list[str]:
        return [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]

    if describe(results) != describe(expected):
        raise ValueError(
            f"{caller}: preprocessing_step must return what predict_step_signature says, "
            f"{', '.join(describe(expected))}; it returns {', '.join(describe(results)) or 'nothing'}."
        )


def _precede(first: Any, step: Callable[..., Any], num_inputs: int) -> Any:
    """Puts a preprocessing step before the first stage, or before its parallel ones."""
    if isinstance(first, (list, tuple)):
        return [_precede(function, step, num_inputs) for function in first]

    def stage(*arguments: Any, **named: Any) -> Any:
        returned = step(*arguments[num_inputs:], **named)
        if isinstance(returned, dict):
            return first(*arguments[:num_inputs], **returned)
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        return first(*arguments[:num_inputs], *results)

    stage.__name__ = getattr(first, "__name__", "stage")
    return stage


def _name_outputs(caller: str, last: Any, names: Sequence[str]) -> Any:
    """Makes the last stage return a dict."""
    if isinstance(last, (list, tuple)):
        raise ValueError(
            f"{caller}: output_names cannot be used if the last stage is a list of parallel stages."
        )

    @functools.wraps(last)
    def stage(*arguments: Any, **named: Any) -> dict[str, Any]:
        returned = last(*arguments, **named)
        if isinstance(returned, dict):
            returned = list(returned.values())
        outputs = returned if isinstance(returned, (tuple, list)) else [returned]
        if len(outputs) != len(names):
            raise ValueError(
                f"{caller}: output_names must have a name for each output of the last stage, which returns "
                f"{len(outputs)}; got {len(names)}."
            )
        return dict(zip(names, outputs, strict=True))

    return stage


def _give_values(
    caller: str, session: Session, program: Program, initializer: Any, checkpoint_restore_dir: Any
) -> None:
    """Sets the exported variables of a session."""
    if initializer is not None:
        initializer(session)
    elif checkpoint_restore_dir is not None:
        path = Path(latest_checkpoint(checkpoint_restore_dir) or checkpoint_restore_dir)
        device_selection.select_automatically([(program.ipu_device, program.num_ipus)])  # Orbax starts JAX
        take_weights(session, path, checkpoint_directories.read_checkpoint(path), program)
    missing = program.variables.keys() - session.variables.keys()
    if missing:
        warnings.warn(
            f"{caller}: the initial values of {', '.join(sorted(missing))} are exported. Give others with "
            "variable_initializer or checkpoint_restore_dir.",
            stacklevel=4,
        )
        session.create_variables(program)


def _make_room(target: Path) -> None:
    """Removes what is in the folder; an exported program is replaced when the new one is complete."""
    if target.is_dir() and not (target / checkpoint_directories.DOCUMENT).exists():
        shutil.rmtree(target)


explain_missing(__name__)
