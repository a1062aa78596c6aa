"""The part of a wrapped model that is about files: what was compiled, exported and loaded."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import (
    OF_FILE,
    Arguments,
    Signature,
    check_like_first,
    check_shapes,
    shapes_of,
)
from ipu_pipeline.poptorch.execution.building import Wrapped, batching_of
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.jax_errors import translating
from ipu_pipeline.poptorch.execution.recalled import RestoredModel, bind, make_arguments, to_graph
from ipu_pipeline.poptorch.execution.together import check_alone
from ipu_pipeline.poptorch.execution.weights import HostWeights, on_host
from ipu_pipeline.poptorch.files import contents
from ipu_pipeline.poptorch.files.contents import Contents, SavedGraph, SavedModel, SavedTensor
from ipu_pipeline.poptorch.files.tensor_files import PathLike, find_target
from ipu_pipeline.poptorch.options import Options

__all__ = ["NOT_COMPILED", "Exported"]

NOT_COMPILED = (
    "Model has not been compiled or has been destroyed. Call it with its inputs first, or "
    "compile(*inputs), which runs nothing."
)


class Exported(abc.ABC):
    """Compiling ahead of time, files of compiled models, and the random numbers' state."""

    _wrapped: Wrapped
    _optimizer: torch.optim.Optimizer | None
    _signature: Signature
    _host: HostWeights
    _graph: SavedGraph | None  # of a file, in place of the model's forward
    _compiled: CompiledModel | None
    _detached: Mapping[str, Any] | None

    @property
    @abc.abstractmethod
    def options(self) -> Options:
        """The model's options, frozen."""

    @abc.abstractmethod
    def _compile(self, arguments: Arguments) -> CompiledModel:
        """Compiles the model, if it is not compiled yet."""

    @abc.abstractmethod
    def _bring_newer(self) -> None:
        """Puts on the devices what has changed elsewhere since the last call."""

    @abc.abstractmethod
    def isCompiled(self) -> bool:
        """Whether the model is compiled."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Copies newer weights to the host, and forgets everything that was compiled."""

    @abc.abstractmethod
    def _attached(self) -> CompiledModel:
        """The compiled model, with its state on the devices."""

    @translating
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model for arguments like these, and runs nothing.

        Args:
          *args: as for a call.
          **kwargs: likewise.

        Raises:
          Error: as for a call.
        """
        with self._host.lock:
            self._compile(self._signature.bind(args, kwargs))

    def compileAndExport(
        self, filename: PathLike, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compiles the model for arguments like these, and writes it to a file, for `poptorch.load`.

        Args:
          filename: where to; see `save`.
          *args: as for a call.
          export_model: see `save`.
          **kwargs: as for a call.

        Raises:
          Error: as for a call; or see `save`.
          NotImplementedError: there are several processes (`Options.Distributed`).
        """
        _check_flag("export_model", export_model)
        check_alone(self._wrapped.options, "compileAndExport")
        find_target(filename)  # before the work whose result it is to hold
        with self._host.lock:
            self.compile(*args, **kwargs)
            self.save(filename, export_model)

    def save(self, filename: PathLike, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Writes the compiled model to a file.

        The file has the model as torch.export captured it: its graph, and tensors; no code of its classes,
        and no machine code, which XLA makes when the file is loaded (or takes from
        `Options.enableExecutableCaching`). docs/poptorch_executables.md says what it has and has not. With
        `Options.allowNewShapes` it has the graph for the shapes that were called or compiled last.

        Args:
          filename: where to; its directory is made if there is none. A file that is there is replaced when
            the new one is whole.
          export_model: whether `poptorch.load` can make the model of the file: with its parameters and
            buffers, the options, and the optimizer with its state. Without them `loadExecutable` needs the
            model to be wrapped as it was.
          save_rng_state: whether random numbers go on from where they are. Without it they start from
            `Options.randomSeed`, or torch's seed, when the file is loaded.

        Raises:
          Error: the model has not been compiled; or parameters have `replicaGrouping`; or it cannot be
            written; or its arguments, results, options or optimizer have what no file can hold.
          NotImplementedError: there are several processes (`Options.Distributed`).
          TypeError: `filename` is no path, or a flag is no boolean.
        """
        _check_flag("export_model", export_model)
        _check_flag("save_rng_state", save_rng_state)
        check_alone(self._wrapped.options, "save")
        with self._host.lock:
            compiled, wrapped = self._compiled, self._wrapped
            if compiled is None:
                raise Error(NOT_COMPILED)
            if compiled.stages.group_rows:
                raise Error(
                    f"{', '.join(compiled.stages.group_rows)} have values for each group of replicas "
                    "(replicaGrouping), and a file has one of each. Save the weights with torch.save."
                )
            compiled.check_same_tensors()
            if compiled.state is None:
                self._host.refresh()
            else:
                self._bring_newer()
            program = compiled.program
            graph = to_graph(program.captured, program.arguments.structure, wrapped.model, wrapped.trains)
            rng_state = self._read_rng_state() if save_rng_state else None
            model = self._save_model() if export_model else None
            contents.write(filename, Contents(graph, model, rng_state))

    def loadExecutable(self, filename: PathLike) -> None:
        """Takes over a model as it was captured for a file, and compiles it.

        Weights, options and the optimizer stay those of this wrapper: of the file are the graph, what it
        was compiled for, tensors that are constants, and the random numbers' state. The model's own forward
        is not used any more.

        Args:
          filename: of `compileAndExport` or `save`, of a model like this one.

        Raises:
          Error: the model is compiled already; or there is no such file, it is damaged, or of another
            model.
          NotImplementedError: there are several processes (`Options.Distributed`).
          TypeError: `filename` is no path.
        """
        check_alone(self._wrapped.options, "loadExecutable")
        with self._host.lock:
            if self._compiled is not None:
                raise Error(
                    "The model has been compiled already. Call destroy() first, or loadExecutable before "
                    "the first call."
                )
            with torch.inference_mode(False):
                loaded = contents.read(filename)
            bind(loaded.graph, self._wrapped.model, self._wrapped.trains)
            before, self._graph = self._graph, loaded.graph
            try:
                self.go_on_from(loaded)
            except BaseException:
                if self.isCompiled():
                    self.destroy()
                self._graph = before
                raise

    def go_on_from(self, loaded: Contents) -> None:
        """Compiles the graph of a file, and goes on where the file ends; `poptorch.load` calls it."""
        assert self._graph is not None
        self._compile(make_arguments(self._graph, self._signature, batching_of(self.options)))
        if loaded.rng_state is not None:
            if len(loaded.rng_state) != len(self._read_rng_state()):
                raise Error(
                    "The file has the state of another kind of random numbers than JAX makes here: set "
                    "jax_default_prng_impl as it was when the model was exported, or export it with "
                    "save_rng_state=False."
                )
            self._write_rng_state(loaded.rng_state)

    def _check_like_graph(self, arguments: Arguments) -> None:
        """Checks the arguments of a call against those of a file's graph, if there is one.

        Raises:
          Error: something differs.
        """
        if self._graph is not None:
            first = make_arguments(self._graph, self._signature, batching_of(self.options))
            check_like_first(self._signature, first, arguments, OF_FILE)
            check_shapes(arguments, shapes_of(first), OF_FILE)

    def _save_model(self) -> SavedModel:
        assert self._compiled is not None
        model, state = self._wrapped.model, self._compiled.state
        values = {} if state is None else self._compiled.current_values()
        persistent = model.state_dict(keep_vars=True).keys()
        named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        with on_host(*named.values()):
            for tensor in named.values():
                if id(tensor) not in values:
                    values[id(tensor)] = tensor.detach().clone()
        return SavedModel(
            class_name=type(model).__name__ if not isinstance(model, RestoredModel) else model.class_name,
            is_training=self._wrapped.modes[model],
            tensors=[
                SavedTensor(name, tensor, values[id(tensor)], name in persistent)
                for name, tensor in named.items()
            ],
            options=self.options,
            optimizer=self._optimizer,
        )

    @property
    def rng_state(self) -> list[int]:
        """Where the model's random numbers are: words of the key, and how often they were drawn from."""
        self._attached()
        return self._read_rng_state()

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        if len(state) != len(self.rng_state):
            raise ValueError(f"rng_state must have the numbers that it was read with; got {state!r}.")
        with self._host.lock:
            self._attached()
            self._write_rng_state(state)

    def _read_rng_state(self) -> list[int]:
        assert self._compiled is not None
        state = self._compiled.state
        kept: Any = self._detached if state is None else vars(state)
        return [*map(int, jax.random.key_data(kept["key"]).ravel()), kept["execution_count"]]

    def _write_rng_state(self, state: list[int]) -> None:
        assert self._compiled is not None
        words: Any = np.asarray(state[:-1], np.uint32)  # NumPy's, as making JAX's compiles a program
        key = jax.random.wrap_key_data(words)
        found = {"key": key, "execution_count": int(state[-1])}
        if self._compiled.state is not None:
            self._compiled.replace(**found)
        else:
            assert self._detached is not None
            self._detached = {**self._detached, **found}


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}.")
