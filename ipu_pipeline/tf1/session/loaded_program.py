"""Loads exported programs: inference pipelines that run without their Python code.

`exporting` writes them. Their directories have no Python code, and nothing in them is unpickled.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import jax
import jax.export
import numpy as np

from ipu_pipeline.checkpointing import checkpoints
from ipu_pipeline.checkpointing.snapshots import Snapshot, parse_array
from ipu_pipeline.data import json_trees
from ipu_pipeline.engine.fronts import StageRunner
from ipu_pipeline.engine.processes import is_here
from ipu_pipeline.ground.errors import CheckpointError
from ipu_pipeline.ground.shapes import check_like
from ipu_pipeline.ground.tested import warn_of_untested
from ipu_pipeline.ground.values import cast_exactly
from ipu_pipeline.processes import executable_cache, selection
from ipu_pipeline.tf1.session.exporting import FORMAT_VERSION, PROGRAM, input_name
from ipu_pipeline.tf1.session.signatures import join_rows, split_rows

__all__ = ["LoadedProgram", "load_program"]

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
    program = checkpoints.read_document(directory)["extra"].get(PROGRAM)
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
    selection.select_automatically([(0, program["num_ipus"])])  # Orbax starts JAX's backend
    snapshot = checkpoints.read_checkpoint(directory)
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

    def __init__(self, program: Mapping[str, Any], functions: Sequence[Any], snapshot: Snapshot) -> None:
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
        return json_trees.decode(described, parse_array)

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
        shapes = json_trees.decode(self._program["output_tree"], parse_array)
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
            wanted = "takes no elements" if element is None else "needs elements, as the infeed gave them"
            raise ValueError(f"LoadedProgram.run: this program {wanted}.")
        devices = selection.devices_for(0, self.num_ipus)
        if devices[0].platform != program["platform"]:
            raise ValueError(
                f"The program was exported for devices of the kind {program['platform']!r}; those "
                "that are selected "
                f"are {devices[0].platform!r}. Export it there, or select others with IPUConfig."
            )
        used = [devices[stage["ipu"]] for stage in program["stages"]]
        if not all(map(is_here, used)):
            raise NotImplementedError(
                "LoadedProgram.run: a loaded program runs on the devices of one process, and some of those "
                f"that are selected are of another: {', '.join(map(str, used))}. Run it in a process that "
                "is not joined with others."
            )
        inputs = [
            values[entry["placeholder"]]
            if "placeholder" in entry
            else self._snapshot.state.variables[input_name(entry["value"])]
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
            waiting.append(self._run_one(leaves, inputs, devices, number))
            if len(waiting) > _IN_FLIGHT_PER_STAGE * len(used):
                done.append([np.asarray(value) for value in waiting.popleft()])
        done += [[np.asarray(value) for value in values] for values in waiting]
        self._execution_count += -(-len(done) // program["num_micro_batches"])
        outputs = json_trees.decode(program["output_tree"], parse_array)
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
        self, leaves: Sequence[Any], inputs: Sequence[Any], devices: Sequence[Any], number: int
    ) -> list[Any]:
        """Starts all stages for one micro-batch; returns the outputs, which are still being computed."""
        execution, micro_batch = divmod(number, self._program["num_micro_batches"])
        return self._runner.run(leaves, inputs, devices, self._execution_count + execution, micro_batch)

    @functools.cached_property
    def _runner(self) -> StageRunner:
        snapshot, program = self._snapshot, self._program
        return StageRunner(
            program["stages"],
            program["outputs"],
            self._functions,
            snapshot.state.variables,
            jax.random.key(snapshot.seed, impl=snapshot.key_implementation),
            program.get("update_count", 0),  # which only later versions write, and ask for
        )

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
