"""Makes a model to call: `trainingModel` and `inferenceModel` of a module, `load` of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ipu_pipeline.poptorch.enums import OutputMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.compilation import Wrapped
from ipu_pipeline.poptorch.execution.executor import PoplarExecutor
from ipu_pipeline.poptorch.execution.host_weights import register
from ipu_pipeline.poptorch.execution.process_groups import check_alone, join
from ipu_pipeline.poptorch.execution.restoration import RestoredModel
from ipu_pipeline.poptorch.files import model_files
from ipu_pipeline.poptorch.files.model_files import PathLike
from ipu_pipeline.poptorch.graphs.capture import modes_of
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.optim.specs import describe
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, ShardedExecution

_DEFAULT_RATE = 0.01


def trainingModel(
    model: torch.nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Makes a model train on its devices: each call of the result is one or more weight updates.

    Args:
      model: a model whose forward computes and returns the loss. Its modules keep the training mode that
        they have now. An executor stands for its model.
      options: the options, frozen from now on; a copy is kept. None for the defaults.
      optimizer: from `poptorch.optim` or `torch.optim`. None for SGD with a learning rate of 0.01.

    Returns:
      The model to call.

    Raises:
      Error: `options` is something else, or its processes (`Options.Distributed`) are not the run's.
      NotImplementedError: the options ask for something that does not exist (for several processes) yet.
      RuntimeError: the model has been wrapped for training before.
      TypeError: the model or the optimizer is not one.
    """
    module = _module_of(model)
    checked = _check_options(options, OutputMode.Final)
    if optimizer is None:
        optimizer = torch.optim.SGD(list(module.parameters()), lr=_DEFAULT_RATE)
    describe(optimizer, checked.Training.automatic_loss_scaling)
    executor = PoplarExecutor(Wrapped(module, modes_of(module), checked, trains=True), optimizer)
    register(executor, module, trains=True)
    return executor


def inferenceModel(
    model: torch.nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Makes a model run forwards on its devices.

    Args:
      model: the model. Its modules keep the training mode that they have now. An executor stands for its
        model.
      options: the options, frozen from now on; a copy is kept. None for the defaults.

    Returns:
      The model to call.

    Raises:
      Error: `options` is something else or asks for gradient accumulation, or its processes
        (`Options.Distributed`) are not the run's.
      NotImplementedError: the options ask for something that does not exist (for several processes) yet.
      TypeError: the model is not a module.
    """
    module = _module_of(model)
    checked = _check_options(options, OutputMode.All)
    if checked.Training.gradient_accumulation != 1:
        strategy = checked.execution_strategy
        is_pipelined = isinstance(strategy, PipelinedExecution) and not isinstance(
            strategy, ShardedExecution
        )
        mend = (
            " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run "
            "for pipelined execution instead."
            if is_pipelined
            else ""
        )
        raise Error(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default "
            f"value (1) when running a poptorch.inferenceModel().{mend}"
        )
    executor = PoplarExecutor(Wrapped(module, modes_of(module), checked, trains=False), None)
    register(executor, module, trains=False)
    return executor


def _module_of(model: torch.nn.Module | PoplarExecutor) -> torch.nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a wrapped one; got {type(model).__name__}.")
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                "model must be a torch.nn.Module as it was written; "
                f"{f'its part {name}' if name else 'it'} is scripted or traced. Give the module that it "
                "was made from."
            )
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"{name} of the model has no shape yet, as in torch's lazy modules. Call the model once on "
                "the CPU."
            )
    return model


def _check_options(options: Options | None, default_mode: OutputMode) -> Options:
    """Freezes the options, and returns a frozen copy with `OutputMode.Default` resolved."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise Error(f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)")
    join(options)
    _warn_of_sharding(options)
    number = options.device_iterations * options.Training.gradient_accumulation
    settings: dict[str, Any] = {
        "outputMode": options,
        **{f"anchorTensor {n!r}": a for n, a in options.anchored_tensors.items()},
    }
    for name, setting in settings.items():
        if setting.output_mode is OutputMode.EveryN and setting.output_return_period > number:
            raise Error(
                f"{name}: OutputMode.EveryN keeps the values of every {setting.output_return_period} "
                f"micro-batches, but a call has {number} in each replica. Lower output_return_period, or "
                "raise deviceIterations or gradientAccumulation."
            )
    options.freeze()
    checked = options.clone()
    if checked.defaultOutputMode():
        checked.outputMode(default_mode)
    checked.freeze()
    return checked


def _warn_of_sharding(options: Options) -> None:
    """Warns of replicated tensor sharding that has no effect."""
    locations = options.TensorLocations
    location_names = locations.asked_to_shard
    if location_names and options.replication_factor == 1:
        warn_once("useReplicatedTensorSharding has no effect: there is one replica, which has everything.")
    elif kinds := [
        name for name in location_names if name in ("location_activation", "location_accumulator")
    ]:
        warn_once(
            f"useReplicatedTensorSharding has no effect in {' and '.join(kinds)}: activations and sums of "
            "gradients are each replica's own."
        )


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
        loaded = model_files.read(filename)
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
