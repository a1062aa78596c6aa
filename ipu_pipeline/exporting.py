"""Inference pipelines that run without their Python code: exported as a directory, and loaded.

The directory is a checkpoint of the variables, with one file per stage, which `jax.export` made, and a
description of the routes between them in the checkpoint's document. Nothing in it is code of Python, and
nothing is unpickled.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np

from ipu_pipeline import checkpoints, config
from ipu_pipeline.calls import PipelineCall
from ipu_pipeline.engine import placement
from ipu_pipeline.engine.programs import Value, ValueKind
from ipu_pipeline.engine.shapes import check_like
from ipu_pipeline.engine.traced import Source, TracedStage
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.placeholders import Placeholder, cast_exactly
from ipu_pipeline.session_state import SessionState
from ipu_pipeline.snapshots import Snapshot, describe_array

if TYPE_CHECKING:
    from ipu_pipeline.program import Program
    from ipu_pipeline.session import Session

__all__ = ["LoadedProgram", "export", "load_program"]

_PROGRAM = "program"  # in the document's extra
_FORMAT_VERSION = 1
_IN_FLIGHT_PER_STAGE = 2  # micro-batches


def export(
    path: str | os.PathLike[str], program: Program, session: Session, inputs: Mapping[Placeholder, Any]
) -> None:
    """See `Session.export`."""
    calls = program.calls
    if len(calls) != 1 or not isinstance(calls[0], PipelineCall) or calls[0].trains:
        raise NotImplementedError(
            "export: the program must be one inference pipeline; it has "
            f"{', '.join(_describe(call) for call in calls) or 'neither a pipeline nor a loop'}."
        )
    call = calls[0]
    if program.has_results:
        raise NotImplementedError(
            "export: the compiled function returns values of its own; an exported program has what the "
            "pipeline's last stage returns. Return only the pipeline's operation."
        )
    for placeholder in inputs:
        if placeholder not in program.placeholders:
            raise ValueError(f"export: {placeholder!r} in `inputs` is not an input of this program.")
    platform = config.devices_for(program.ipu_device, program.num_ipus)[0].platform
    operands = program.find_operands(call, inputs, session.variable)[call.has_count_operand :]
    pipeline = call.pipeline
    traced = pipeline.traced
    variables = {name: session.variable(spec) for name, spec in call.variables.items()}
    given = list(dict.fromkeys(value for value in operands if isinstance(value, Placeholder)))
    given_names = [placeholder.name for placeholder in given]
    if len(set(given_names)) < len(given_names):
        raise ValueError(
            "export: placeholders are known by their names afterwards, but there are "
            f"{', '.join(given_names)}. "
            "Give each another `name`."
        )
    key = jax.random.key_data(session.key)
    implementation = str(jax.random.key_impl(session.key))
    files: dict[str, bytes] = {}
    stages = []
    for number, (stage, own) in enumerate(zip(traced.stages, pipeline.programs, strict=True)):
        arguments = [_argument(value, stage) for value in own.forward.arguments]
        takes_key = [value.kind is ValueKind.KEY for value in own.forward.arguments]
        avals = [
            _aval(value, stage, traced.element, operands, traced.stages, key)
            for value in own.forward.arguments
        ]
        name = f"stage{number}.jax_export"
        exported = jax.export.export(
            jax.jit(_with_key_data(own.forward.function, takes_key, implementation)), platforms=[platform]
        )(*avals)
        files[name] = bytes(exported.serialize())
        stages.append(
            {
                "file": name,
                "place": stage.place,
                "ipu": pipeline.device_mapping[number],
                "arguments": arguments,
                "results": [[_result(value, stage) for value in values] for values in own.forward.results],
            }
        )
    collecting = pipeline.collecting
    snapshot = Snapshot(
        SessionState({**variables, **_as_variables(operands)}),
        session.seed,
        implementation,
        extra={
            _PROGRAM: {
                "version": _FORMAT_VERSION,
                "jax": jax.__version__,
                "platform": platform,
                "has_wide_dtypes": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
                "num_ipus": program.num_ipus,
                "element": _describe_tree(call.infeed_queue.element) if call.infeed_queue else None,
                "num_micro_batches": pipeline.num_micro_batches or 1,
                "placeholders": {
                    placeholder.name: describe_array(placeholder.aval) for placeholder in given
                },
                "inputs": [
                    {"placeholder": value.name} if isinstance(value, Placeholder) else {"value": number}
                    for number, value in enumerate(operands)
                ],
                "execution_count": session.execution_count(call.name),
                "stages": stages,
                "outputs": [_source(source) for source in collecting.sources],
                "output_tree": _describe_tree(call.outfeed_tree.unflatten(collecting.avals)),
            }
        },
    )
    checkpoints.write_checkpoint(path, snapshot, files)


def load_program(path: str | os.PathLike[str]) -> LoadedProgram:
    """Loads what `Session.export` wrote. It selects the devices that it needs, if none have been.

    Args:
      path: the directory.

    Returns:
      The program.

    Raises:
      CheckpointError: it cannot be read, is damaged, is a checkpoint without a program, or has another
        version of the format or of what JAX exports.
    """
    config.enable_executable_cache_of_environment()
    directory = Path(path).absolute()
    program = checkpoints.read_document(directory)["extra"].get(_PROGRAM)
    if program is None:
        raise CheckpointError(
            f"{directory} is a checkpoint and no exported program: Session.restore reads it, and "
            "Session.export writes programs."
        )
    if program["version"] != _FORMAT_VERSION:
        raise CheckpointError(
            f"The program in {directory} has version {program['version']} of the format; this library "
            "reads "
            f"version {_FORMAT_VERSION}."
        )
    if program["has_wide_dtypes"] is not bool(jax.config.jax_enable_x64):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"The program in {directory} was exported with jax_enable_x64 "
            f"{program['has_wide_dtypes']}; set JAX's "
            "option so before it is loaded."
        )
    config.select_automatically([(0, program["num_ipus"])])  # Orbax starts JAX's backend
    snapshot = checkpoints.read_checkpoint(directory)
    functions = []
    for stage in program["stages"]:
        try:
            exported = jax.export.deserialize(bytearray((directory / stage["file"]).read_bytes()))
        except Exception as error:  # whatever JAX raises for another version's
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
      program = ipu.load_program("exported")
      predictions = program.run(batches)
    """

    def __init__(self, program: Mapping[str, Any], functions: Sequence[Any], snapshot: Snapshot) -> None:
        """Made by `load_program`."""
        self._program = program
        self._functions = functions
        self._snapshot = snapshot
        self._variables: dict[str, Any] | None = None  # by name and IPU, when they have been placed
        self._execution_count = int(program["execution_count"])

    @property
    def num_ipus(self) -> int:
        """How many devices it needs."""
        return int(self._program["num_ipus"])

    @property
    def element(self) -> Any:
        """Shapes and dtypes of a micro-batch; None if it takes none."""
        described = self._program["element"]
        return None if described is None else _make_tree(described)

    @property
    def placeholders(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `run` takes by name besides."""
        return {name: _parse(text) for name, text in self._program["placeholders"].items()}

    def run(self, elements: Iterable[Any] | None = None, feed: Mapping[str, Any] | None = None) -> Any:
        """Runs micro-batches through the stages.

        Args:
          elements: pytrees of arrays, like those of the infeed; any number of them. None if the program has
            no infeed: then it runs as many micro-batches as its pipeline did.
          feed: the placeholders' values by name.

        Returns:
          What the outfeed's `dequeue` would: the last stage's outputs with a new first axis over
          micro-batches, NumPy arrays; a list for a tuple.

        Raises:
          RuntimeError, ValueError: there are too few devices, or they are of another kind than the program
            was exported for.
          ValueError: a micro-batch or a placeholder's value does not fit.
        """
        program = self._program
        values = self._check_feed(dict(feed or {}))
        element = self.element
        if (element is None) is not (elements is None):
            wanted = "takes no elements" if element is None else "needs elements, as the infeed gave them"
            raise ValueError(f"LoadedProgram.run: this program {wanted}.")
        devices = config.devices_for(0, self.num_ipus)
        if devices[0].platform != program["platform"]:
            raise ValueError(
                f"The program was exported for devices of the kind {program['platform']!r}; those "
                "that are selected "
                f"are {devices[0].platform!r}. Export it there, or select others with IPUConfig."
            )
        rows = placement.make_rows(devices, [stage["ipu"] for stage in program["stages"]])
        inputs = [
            values[entry["placeholder"]]
            if "placeholder" in entry
            else self._snapshot.state.variables[_input_name(entry["value"])]
            for entry in program["inputs"]
        ]
        if elements is None:
            elements = [None] * program["num_micro_batches"]
        waiting: collections.deque[list[Any]] = collections.deque()
        done: list[list[np.ndarray[Any, Any]]] = []
        for number, given in enumerate(elements):
            leaves = []
            if element is not None:
                what = f"LoadedProgram.run: element {number}"
                arrays = jax.tree.map(np.asarray, given)
                leaves = check_like(arrays, element, what)
            waiting.append(self._run_one(leaves, inputs, rows, number))
            if len(waiting) > _IN_FLIGHT_PER_STAGE * len(rows):
                done.append([np.asarray(value) for value in waiting.popleft()])
        done += [[np.asarray(value) for value in values] for values in waiting]
        self._execution_count += -(-len(done) // program["num_micro_batches"])
        outputs = _make_tree(program["output_tree"])
        shapes, tree = jax.tree.flatten(outputs)
        stacks = [
            np.stack([values[place] for values in done])
            if done
            else np.empty((0, *shape.shape), shape.dtype)
            for place, shape in enumerate(shapes)
        ]
        result = jax.tree.unflatten(tree, stacks)
        return list(result) if isinstance(result, tuple) else result

    def _run_one(
        self, leaves: Sequence[Any], inputs: Sequence[Any], rows: Sequence[Any], number: int
    ) -> list[Any]:
        """Starts all stages for one micro-batch; returns the outputs, still being computed."""
        if self._variables is None:
            self._variables = {}
        variables = self._variables
        outputs: dict[tuple[int, int], Any] = {}

        def find(argument: Mapping[str, Any], row: Any) -> Any:
            kind = argument["kind"]
            if kind == "variable":
                name = argument["name"]
                place = f"{name} on {row.ipu}"
                if place not in variables:
                    known = variables.get(name, self._snapshot.state.variables[name])
                    (variables[place],) = placement.put([known], row)
                return variables[place]
            if kind == "key":
                implementation = self._snapshot.key_implementation
                return jax.random.key_data(jax.random.key(self._snapshot.seed, impl=implementation))
            if kind == "execution_count":
                return np.int32(self._execution_count + number // self._program["num_micro_batches"])
            if kind == "micro_batch":
                return np.int32(number % self._program["num_micro_batches"])
            return _find_source(argument, leaves, inputs, outputs)

        for index, (stage, function) in enumerate(
            zip(self._program["stages"], self._functions, strict=True)
        ):
            row = rows[index]
            arguments = placement.put([find(argument, row) for argument in stage["arguments"]], row)
            for places, result in zip(stage["results"], function(*arguments), strict=True):
                for place in places:
                    if place["kind"] == "output":
                        outputs[index, place["index"]] = result
                    else:
                        self._assign(place["name"], result)
        return [_find_source(source, leaves, inputs, outputs) for source in self._program["outputs"]]

    def _assign(self, name: str, value: Any) -> None:
        assert self._variables is not None
        for place in [place for place in self._variables if place.startswith(f"{name} on ")]:
            del self._variables[place]
        self._variables[name] = value

    def _check_feed(self, feed: dict[str, Any]) -> dict[str, Any]:
        known = self.placeholders
        for name in feed:
            if name not in known:
                raise ValueError(
                    f"LoadedProgram.run: there is no placeholder {name!r}; there are "
                    f"{', '.join(map(repr, known)) or 'none'}."
                )
        values = {}
        for name, shape in known.items():
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


def _describe(call: Any) -> str:
    if not isinstance(call, PipelineCall):
        return "a loop"
    return f"a pipeline that trains ({call.name})" if call.trains else f"a pipeline ({call.name})"


def _with_key_data(function: Any, takes_key: Sequence[bool], implementation: str) -> Any:
    """The function with the data of random keys in place of the keys, which files cannot hold."""

    def wrapped(*arguments: Any) -> Any:
        return function(
            *(
                jax.random.wrap_key_data(argument, impl=implementation) if is_key else argument
                for argument, is_key in zip(arguments, takes_key, strict=True)
            )
        )

    return wrapped


def _aval(
    value: Value,
    stage: TracedStage,
    element: Any,
    operands: Sequence[Any],
    stages: Sequence[TracedStage],
    key: Any,
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument of a forward."""
    if value.kind is ValueKind.VARIABLE:
        spec = stage.variables[value.index]
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    if value.kind is ValueKind.KEY:
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    if value.kind is ValueKind.INPUT:
        source = stage.inputs[value.index]
        if source.kind == "output":
            places = [place for place, own in enumerate(stages[source.stage].outputs) if own == source]
            return stages[source.stage].output_avals[places[0]]
        if source.kind == "element":
            leaf = jax.tree.leaves(element)[source.index]
        else:
            operand = operands[source.index]
            leaf = operand.aval if isinstance(operand, Placeholder) else operand
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct((), np.int32)


def _argument(value: Value, stage: TracedStage) -> dict[str, Any]:
    """What an argument of a forward is, as JSON."""
    if value.kind is ValueKind.VARIABLE:
        return {"kind": "variable", "name": stage.variables[value.index].name}
    if value.kind is ValueKind.INPUT:
        return _source(stage.inputs[value.index])
    return {"kind": value.kind.name.lower()}


def _result(value: Value, stage: TracedStage) -> dict[str, Any]:
    if value.kind is ValueKind.ASSIGNED:
        return {"kind": "assigned", "name": stage.variables[value.index].name}
    assert value.kind is ValueKind.OUTPUT
    return {"kind": "output", "index": value.index}


def _source(source: Source) -> dict[str, Any]:
    return {"kind": source.kind, "index": source.index, "stage": source.stage}


def _find_source(
    source: Mapping[str, Any],
    leaves: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Mapping[tuple[int, int], Any],
) -> Any:
    if source["kind"] == "element":
        return leaves[source["index"]]
    if source["kind"] == "input":
        return inputs[source["index"]]
    return outputs[source["stage"], source["index"]]


def _input_name(number: int) -> str:
    return f"input {number} of the program"


def _as_variables(operands: Sequence[Any]) -> dict[str, Any]:
    """Inputs with a value, to be stored among the variables."""
    return {
        _input_name(number): np.asarray(value)
        for number, value in enumerate(operands)
        if not isinstance(value, Placeholder)
    }


# Pytrees of dicts, lists, tuples and arrays' shapes as JSON.


def _describe_tree(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": [[key, _describe_tree(part)] for key, part in tree.items()]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        raise NotImplementedError(
            f"export: a {type(tree).__name__} needs its Python class; use a dict, list or tuple of arrays."
        )
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [_describe_tree(part) for part in tree]}
    if tree is None:
        return {"none": []}
    if isinstance(tree, jax.ShapeDtypeStruct):
        return describe_array(tree)
    raise NotImplementedError(
        f"export: a {type(tree).__name__} needs its Python class; use a dict, list or tuple of arrays."
    )


def _make_tree(described: Any) -> Any:
    if isinstance(described, str):
        return _parse(described)
    ((kind, parts),) = described.items()
    if kind == "dict":
        return {key: _make_tree(part) for key, part in parts}
    if kind == "none":
        return None
    made = [_make_tree(part) for part in parts]
    return tuple(made) if kind == "tuple" else made


def _parse(text: str) -> jax.ShapeDtypeStruct:
    dtype, _bracket, shape = text.partition("[")
    return jax.ShapeDtypeStruct(tuple(json.loads("[" + shape)), np.dtype(dtype))
