"""Exported programs: inference pipelines as directories that run without their Python code.

The directory is a checkpoint of the variables, with one file per stage, which `jax.export` made, and a
description of the routes between them in the checkpoint's document. Nothing in it is unpickled.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers
import jax
import jax.export
import numpy as np

from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.checkpointing.states import State, describe_array, parse_array
from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.engine.fronts import StageRunner, export_stages
from ipu_pipeline.engine.processes import is_here
from ipu_pipeline.ground import pytrees
from ipu_pipeline.ground.errors import CheckpointError
from ipu_pipeline.ground.pytrees import cast_exactly, check_like
from ipu_pipeline.ground.user_warnings import warn_of_untested
from ipu_pipeline.processes import device_selection, executable_cache
from ipu_pipeline.tf1.graph import Placeholder
from ipu_pipeline.tf1.program.calls import PipelineCall
from ipu_pipeline.tf1.program.program import Program


def make_example(described: Any, subject: str) -> Any:
    """Makes arrays of zeros, with the described shapes and dtypes."""

    def make(path: Any, leaf: Any) -> np.ndarray[Any, Any]:
        where = f"{subject}{jax.tree_util.keystr(path)}"
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(
                f"{where} must be a jax.ShapeDtypeStruct, a placeholder or an array; got {leaf!r}."
            )
        sizes = tuple(shape)
        if not all(isinstance(size, (int, np.integer)) for size in sizes):
            raise ValueError(
                f"{where} must have a static shape; got {sizes}. A loaded program takes any multiple of "
                "the batch size that it is exported with."
            )
        return np.zeros(sizes, jax.dtypes.canonicalize_dtype(dtype))

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Placeholder)

    return jax.tree_util.tree_map_with_path(make, described, is_leaf=is_leaf)


def split_rows(arguments: Sequence[Any], named: Mapping[str, Any], element: Any) -> list[Any]:
    """Cuts the inputs of a loaded program into micro-batches, along the first axis."""
    inputs = _arrange(arguments, named, element)
    tree: Any
    shapes, tree = jax.tree_util.tree_flatten_with_path(element)
    leaves = tree.flatten_up_to(inputs)
    arrays, counts = [], {}
    for (path, shape), leaf in zip(shapes, leaves, strict=True):
        subject = f"LoadedProgram: input{jax.tree_util.keystr(path)}"
        array = cast_exactly(np.asarray(leaf), shape.dtype, subject)
        size = shape.shape[0] if shape.shape else None
        if size is None and array.shape:
            raise ValueError(f"{subject} must be a scalar; got the shape {array.shape}.")
        if size is not None:
            inner_axes_fit = array.shape[1:] == shape.shape[1:]
            if array.ndim != len(shape.shape) or not inner_axes_fit or size == 0 or len(array) % size:
                raise ValueError(
                    f"{subject} must have the shape {shape.shape} that was exported, or a multiple of its "
                    f"{size} rows; got {array.shape}. Predict the rest with copies of a row, or export "
                    "with a batch size that divides."
                )
            counts[subject] = len(array) // size
        arrays.append(array)
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{subject} has {count}" for subject, count in counts.items())
        raise ValueError(f"All inputs must have the same number of micro-batches: {described}.")
    count = next(iter(counts.values()), 1)

    def cut(number: int) -> Any:
        return tree.unflatten(
            [
                array.reshape(count, *shape.shape)[number] if shape.shape else array
                for array, (_path, shape) in zip(arrays, shapes, strict=True)
            ]
        )

    return [cut(number) for number in range(count)]


def _arrange(arguments: Sequence[Any], named: Mapping[str, Any], element: Any) -> Any:
    """Arranges the inputs in the structure of an element."""
    if isinstance(element, dict) and not arguments:
        if named.keys() != element.keys():
            raise TypeError(
                f"LoadedProgram: the inputs must be {', '.join(map(repr, element))}; got "
                f"{', '.join(map(repr, named)) or 'none'}."
            )
        return dict(named)
    if named:
        raise TypeError(
            f"LoadedProgram: inputs are given by position; got {', '.join(map(repr, named))} by name."
        )
    number = len(element) if isinstance(element, (tuple, list)) else 1
    if len(arguments) != number:
        raise TypeError(f"LoadedProgram: it takes {number} inputs; got {len(arguments)}.")
    return type(element)(arguments) if isinstance(element, (tuple, list)) else arguments[0]


def join_rows(stacks: Any, shapes: Any, rows: int | None) -> Any:
    """Joins the results of a loaded program: outputs with rows lose the axis of micro-batches."""

    def join(stack: Any, shape: Any) -> Any:
        has_rows = rows is not None and shape.shape[:1] == (rows,)
        return stack.reshape(-1, *shape.shape[1:]) if has_rows else stack

    return jax.tree.map(join, stacks, shapes)


# Exporting.

PROGRAM = "program"  # its key in the document's extra
FORMAT_VERSION = 2  # 1 encoded trees in another way, and is still read


@dataclass(frozen=True, eq=False)
class SessionParts:
    """The parts of a session that an export needs."""

    variable: Callable[[VariableSpec], Any]  # returns the value of a variable
    key: Callable[[], Any]  # returns the key that all random keys are folded from; starts JAX's backend
    seed: int  # the seed that the key was made from
    execution_count: Callable[[str], int]  # returns how often the pipelines of a name have run
    update_count: Callable[[str], int]  # returns the global step of their weights


def export(
    path: str | os.PathLike[str], program: Program, inputs: Mapping[Placeholder, Any], source: SessionParts
) -> None:
    """See `Session.export`."""
    # Checks.
    calls = program.calls
    if len(calls) != 1 or not isinstance(calls[0], PipelineCall) or calls[0].trains:
        raise NotImplementedError(
            "export: the program must be one inference pipeline; it has "
            f"{', '.join(_describe(call) for call in calls) or 'neither a pipeline nor a loop'}."
        )
    call = calls[0]
    if program.function.outputs:
        raise NotImplementedError(
            "export: the compiled function returns values of its own; an exported program has what the "
            "pipeline's last stage returns. Return only the pipeline's operation."
        )
    if program.host_tables:
        raise NotImplementedError(
            f"export: the program looks up rows of {program.host_tables[0].spec.name!r}, a host embedding, "
            "which a session has. Export one that takes the rows as its data, and look them up before."
        )
    if call.pipeline.options.num_devices_per_ipu > 1:
        raise NotImplementedError(
            "export: an exported program has one device for each stage, and this pipeline has "
            f"{call.pipeline.options.num_devices_per_ipu} (tensor_parallel). Compile it without that; its "
            "variables are the same."
        )
    for placeholder in inputs:
        if placeholder not in program.placeholders:
            raise ValueError(f"export: {placeholder!r} in `inputs` is not an input of this program.")
    # Operands and variables.
    platform = device_selection.devices_for(program.ipu_device, program.num_ipus)[0].platform
    operands = program.find_operands(call, inputs, source.variable)[call.has_count_operand :]
    pipeline = call.pipeline
    variables = {name: source.variable(spec) for name, spec in call.variables.items()}
    placeholders = list(dict.fromkeys(value for value in operands if isinstance(value, Placeholder)))
    names = [placeholder.name for placeholder in placeholders]
    if len(set(names)) < len(names):
        raise ValueError(
            "export: placeholders are known by their names afterwards, but there are "
            f"{', '.join(names)}. "
            "Give each another `name`."
        )
    # Stages, and the document.
    key = source.key()
    avals = [value.aval if isinstance(value, Placeholder) else value for value in operands]
    exported = export_stages(pipeline, avals, key, platform)
    collecting = pipeline.built.collecting
    snapshot = State(
        source.seed,
        str(jax.random.key_impl(key)),
        {**variables, **_as_variables(operands)},
        extra={
            PROGRAM: {
                "version": FORMAT_VERSION,
                "jax": jax.__version__,
                "platform": platform,
                "has_wide_dtypes": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
                "num_ipus": program.num_ipus,
                "element": _encode(call.infeed_queue.element) if call.infeed_queue else None,
                "num_micro_batches": pipeline.options.num_micro_batches or 1,
                "placeholders": {
                    placeholder.name: describe_array(placeholder.aval) for placeholder in placeholders
                },
                "inputs": [
                    {"placeholder": value.name} if isinstance(value, Placeholder) else {"value": number}
                    for number, value in enumerate(operands)
                ],
                "execution_count": source.execution_count(call.name),
                "update_count": source.update_count(call.name),
                "stages": exported.stages,
                "outputs": exported.outputs,
                "output_tree": _encode(call.outfeed_tree.unflatten(collecting.avals)),
            }
        },
    )
    checkpoint_directories.write_checkpoint(path, snapshot, exported.files)


def _encode(tree: Any) -> Any:
    """Encodes a pytree of shapes as JSON."""

    def encode_shape(leaf: Any) -> str:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return describe_array(leaf)
        raise NotImplementedError(
            f"export: a {type(leaf).__name__} needs its Python class; use a dict, list or tuple of arrays."
        )

    return pytrees.encode_tree(tree, encode_shape)


def _describe(call: Any) -> str:
    if not isinstance(call, PipelineCall):
        return "a loop"
    return f"a pipeline that trains ({call.name})" if call.trains else f"a pipeline ({call.name})"


def input_name(number: int) -> str:
    """The name of an input of the program among its variables."""
    return f"input {number} of the program"


def _as_variables(operands: Sequence[Any]) -> dict[str, Any]:
    """Inputs with a value, to be stored among the variables."""
    return {
        input_name(number): np.asarray(value)
        for number, value in enumerate(operands)
        if not isinstance(value, Placeholder)
    }


# Loading and running.

_IN_FLIGHT_PER_STAGE = 2  # micro-batches


def load_program(path: str | os.PathLike[str]) -> LoadedProgram:
    """Loads what `Session.export` wrote. It selects the devices that it needs, if none have been selected.

    Example:
      >>> x = jax.ShapeDtypeStruct([4, 8], np.float32)
      >>> exported = ipu.serving.export_single_step(
      ...     layers.Dense(2), "exported", iterations=1, predict_step_signature=[x],
      ...     variable_initializer=lambda session: session.run(ipu.global_variables_initializer())
      ... )
      >>> program = ipu.load_program("exported")
      >>> program(np.ones([8, 8], np.float32)).shape
      (8, 2)

    Args:
      path: the directory.

    Returns:
      The program.

    Raises:
      CheckpointError: it cannot be read, is damaged, is a checkpoint without a program, or has another
        version of this format or of JAX's export format.
    """
    executable_cache.enable_executable_cache_of_environment()
    directory = Path(path).absolute()
    program = checkpoint_directories.read_document(directory)["extra"].get(PROGRAM)
    if program is None:
        raise CheckpointError(
            f"{directory} is a checkpoint and no exported program: Session.restore reads it, and "
            "Session.export writes programs."
        )
    if program["version"] not in (1, FORMAT_VERSION):
        raise CheckpointError(
            f"The program in {directory} has version {program['version']} of the format; this library "
            "reads "
            f"versions 1 to {FORMAT_VERSION}."
        )
    if program["has_wide_dtypes"] is not bool(jax.config.jax_enable_x64):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"The program in {directory} was exported with jax_enable_x64 "
            f"{program['has_wide_dtypes']}; give "
            "JAX's option this value before loading it."
        )
    device_selection.select_automatically([(0, program["num_ipus"])])  # Orbax starts JAX's backend
    snapshot = checkpoint_directories.read_checkpoint(directory)
    warn_of_untested("flatbuffers", flatbuffers.__version__)
    functions = []
    for stage in program["stages"]:
        try:
            exported = jax.export.deserialize(bytearray((directory / stage["file"]).read_bytes()))
        except Exception as error:  # JAX may raise anything for another version's file
            raise CheckpointError(
                f"The file {directory / stage['file']}, exported by JAX {program['jax']}, cannot be "
                "read by JAX "
                f"{jax.__version__}: {error}. Export the program again."
            ) from error
        functions.append(jax.jit(exported.call))
    return LoadedProgram(program, functions, snapshot)


class LoadedProgram:
    """An inference pipeline without its Python code.

    Example:
      >>> def score(x):
      ...     return layers.Dense(2)(x)
      >>> program = ipu.serving.export_single_step(
      ...     score,
      ...     "exported_score",
      ...     iterations=1,
      ...     predict_step_signature=[jax.ShapeDtypeStruct([4, 8], np.float32)],
      ...     variable_initializer=lambda session: session.run(ipu.global_variables_initializer()),
      ... )
      >>> program(np.ones([8, 8], np.float32)).shape  # any multiple of the micro-batch's rows
      (8, 2)
      >>> x = np.ones([4, 8], np.float32)
      >>> [result.shape for result in program.run([(x,), (x,)])]
      [(4, 2), (4, 2)]
    """

    def __init__(self, program: Mapping[str, Any], functions: Sequence[Any], snapshot: State) -> None:
        """Made by `load_program`."""
        self._program = program
        self._functions = functions
        self._snapshot = snapshot
        self._execution_count = int(program["execution_count"])

    @property
    def num_ipus(self) -> int:
        """The number of devices that it needs."""
        return int(self._program["num_ipus"])

    @property
    def element(self) -> Any:
        """The shapes and dtypes of a micro-batch; None if it takes none."""
        described = self._program["element"]
        return pytrees.decode_tree(described, parse_array)

    @property
    def placeholders(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the placeholders that `run` also takes, by name."""
        return {name: parse_array(text) for name, text in self._program["placeholders"].items()}

    def __call__(self, *inputs: Any, feed: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Predicts for a batch, which may be several micro-batches.

        Args:
          *inputs: arrays, in the order of the first stage's arguments; or one pytree of all of them.
          feed: the placeholders' values by name.
          **named: arrays by name instead, if a micro-batch is a dict. Each has as many rows as a
            micro-batch, or a multiple of that: then it is cut along the first axis.

        Returns:
          The last stage's outputs, NumPy arrays, a list for a tuple. Outputs with a row for each row of a
          micro-batch have a row for each row of the inputs; others have a first axis over micro-batches.

        Raises:
          TypeError, ValueError: an input does not fit; or an error of `run`.
        """
        element = self.element
        if element is None and (inputs or named):
            raise TypeError("LoadedProgram: this program takes no inputs but placeholders, in feed.")
        batches = None if element is None else split_rows(inputs, named, element)
        stacks = self.run(batches, feed)
        sizes = [leaf.shape[0] for leaf in jax.tree.leaves(element) if leaf.shape]
        shapes = pytrees.decode_tree(self._program["output_tree"], parse_array)
        shapes = list(shapes) if isinstance(shapes, tuple) else shapes
        return join_rows(stacks, shapes, sizes[0] if sizes else None)

    def run(self, elements: Iterable[Any] | None = None, feed: Mapping[str, Any] | None = None) -> Any:
        """Runs micro-batches through the stages.

        Args:
          elements: pytrees of arrays, like the infeed's; any number of them. None if the program has
            no infeed: then it runs the same number of micro-batches as its pipeline did.
          feed: the placeholders' values by name.

        Returns:
          The same as the outfeed's `dequeue`: the last stage's outputs with a new first axis over
          micro-batches, NumPy arrays; a list for a tuple.

        Raises:
          NotImplementedError: not all devices belong to this process.
          RuntimeError, ValueError: there are too few devices, or they are of another kind than the program
            was exported for.
          ValueError: a micro-batch or a placeholder's value does not fit.
        """
        program = self._program
        values = self._check_feed(dict(feed or {}))
        element = self.element
        if (element is None) is not (elements is None):
            rule = "takes no elements" if element is None else "needs elements, as the infeed gave them"
            raise ValueError(f"LoadedProgram.run: this program {rule}.")
        devices = device_selection.devices_for(0, self.num_ipus)
        if devices[0].platform != program["platform"]:
            raise ValueError(
                f"The program was exported for devices of the kind {program['platform']!r}; those "
                "that are selected "
                f"are {devices[0].platform!r}. Export it there, or select others with IPUConfig."
            )
        chosen = [devices[stage["ipu"]] for stage in program["stages"]]
        if not all(map(is_here, chosen)):
            raise NotImplementedError(
                "LoadedProgram.run: a loaded program runs on the devices of one process, and some of those "
                f"that are selected are of another: {', '.join(map(str, chosen))}. Run it in a process "
                "that is not joined with others."
            )
        inputs = [
            values[entry["placeholder"]]
            if "placeholder" in entry
            else self._snapshot.variables[input_name(entry["value"])]
            for entry in program["inputs"]
        ]
        if elements is None:
            elements = [None] * program["num_micro_batches"]
        waiting: collections.deque[list[Any]] = collections.deque()
        results: list[list[np.ndarray[Any, Any]]] = []
        for number, micro_batch in enumerate(elements):
            leaves = []
            if element is not None:
                subject = f"LoadedProgram.run: element {number}"
                arrays = jax.tree.map(np.asarray, micro_batch)
                leaves = check_like(arrays, element, subject)
            waiting.append(self._run_one(leaves, inputs, devices, number))
            if len(waiting) > _IN_FLIGHT_PER_STAGE * len(chosen):
                results.append([np.asarray(value) for value in waiting.popleft()])
        results += [[np.asarray(value) for value in values] for values in waiting]
        self._execution_count += -(-len(results) // program["num_micro_batches"])
        outputs = pytrees.decode_tree(program["output_tree"], parse_array)
        shapes, tree = jax.tree.flatten(outputs)
        stacks = [
            np.stack([values[place] for values in results])
            if results
            else np.empty((0, *shape.shape), shape.dtype)
            for place, shape in enumerate(shapes)
        ]
        result = jax.tree.unflatten(tree, stacks)
        return list(result) if isinstance(result, tuple) else result

    def _run_one(
        self, leaves: Sequence[Any], inputs: Sequence[Any], devices: Sequence[Any], number: int
    ) -> list[Any]:
        """Starts all stages for one micro-batch; returns the outputs, which are still being computed.

        There is no schedule: nothing waits for a backward, so JAX overlaps the micro-batches.
        """
        execution, micro_batch = divmod(number, self._program["num_micro_batches"])
        return self._runner.run(leaves, inputs, devices, self._execution_count + execution, micro_batch)

    @functools.cached_property
    def _runner(self) -> StageRunner:
        snapshot, program = self._snapshot, self._program
        return StageRunner(
            program["stages"],
            program["outputs"],
            self._functions,
            snapshot.variables,
            jax.random.key(snapshot.seed, impl=snapshot.key_implementation),
            program.get("update_count", 0),  # which only later versions write, and ask for
        )

    def _check_feed(self, feed: dict[str, Any]) -> dict[str, Any]:
        placeholders = self.placeholders
        for name in feed:
            if name not in placeholders:
                raise ValueError(
                    f"LoadedProgram.run: there is no placeholder {name!r}; there are "
                    f"{', '.join(map(repr, placeholders)) or 'none'}."
                )
        values = {}
        for name, shape in placeholders.items():
            if name not in feed:
                raise ValueError(
                    f"LoadedProgram.run: a value for the placeholder {name!r} is missing in feed."
                )
            array = np.asarray(feed[name])
            if array.shape != shape.shape:
                raise ValueError(
                    f"LoadedProgram.run: the placeholder {name!r} has shape {shape.shape}; got "
                    f"{array.shape}."
                )
            values[name] = cast_exactly(array, shape.dtype, f"The value of the placeholder {name!r}")
        return values
