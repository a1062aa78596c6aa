"""`load`: makes a wrapped model from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ipu_pipeline.poptorch.execution.executor import PoplarExecutor
from ipu_pipeline.poptorch.execution.recalled import RestoredModel
from ipu_pipeline.poptorch.execution.together import check_alone
from ipu_pipeline.poptorch.execution.wrapping import inferenceModel, trainingModel
from ipu_pipeline.poptorch.files import contents
from ipu_pipeline.poptorch.files.tensor_files import PathLike
from ipu_pipeline.poptorch.options import Options

__all__ = ["load"]


def load(filename: PathLike, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Makes a wrapped model from a file. It continues from where it was when the file was written.

    Nothing in the file is run or unpickled, and the model's class is not needed. XLA compiles the model
    again, unless the cache of `Options.enableExecutableCaching` has it.

    Args:
      filename: a file of `compileAndExport` or `save`, with `export_model=True`.
      edit_opts_fn: a function that is called with the options before the model is wrapped, and may change
        them: other devices, another strategy, more device iterations, a new random seed (random numbers
        then start from it).

    Returns:
      What `trainingModel` or `inferenceModel` returned when the model was exported, compiled. Its `model`
      has the parameters and buffers by their names, and computes the captured graph.

    Raises:
      AssertionError: the file was written with `export_model=False`.
      Error: there is no such file; it is damaged, of another version, or something else; or it needs a
        class or an operation that does not exist here.
      NotImplementedError: there are several processes (`Options.Distributed`).
      TypeError: `filename` is not a path, or `edit_opts_fn` is not a function.
    """
    if edit_opts_fn is not None and not callable(edit_opts_fn):
        raise TypeError(f"edit_opts_fn must be a function of the options; got {edit_opts_fn!r}.")
    with torch.inference_mode(False):  # the model's tensors must be trainable
        loaded = contents.read(filename)
    saved = loaded.model
    assert saved is not None, (
        f"{filename} was exported with export_model=False: it has no weights, options and optimizer. Wrap "
        "the model as it was, and call loadExecutable of the result."
    )
    if edit_opts_fn is not None:
        seed = saved.options.values_by_name().get("random_seed")
        edit_opts_fn(saved.options)
        if saved.options.values_by_name().get("random_seed") != seed:
            loaded = dataclasses.replace(loaded, rng_state=None)
    check_alone(saved.options, "poptorch.load")
    model = RestoredModel(loaded.graph, saved)
    if loaded.graph.trains:
        executor = trainingModel(model, saved.options, saved.optimizer)
    else:
        executor = inferenceModel(model, saved.options)
    executor.go_on_from(loaded)
    return executor
