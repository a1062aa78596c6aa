"""What the figures show, as the library says it: layers, parameters, bytes, time-steps.

The model is that of tutorial step 4, traced; it is not run, and no JAX backend starts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import jax
import numpy as np

from ipu_pipeline import engine
from ipu_pipeline.data import datasets
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from ipu_pipeline.engine.schedules import timetables
from ipu_pipeline.engine.tracing.stages import Source

__all__ = [
    "Layer",
    "bytes_across",
    "count_parameters",
    "defaults",
    "find_ramps",
    "layers_of_stages",
    "micro_batch",
    "model_layers",
    "percent_idle",
    "timetable",
    "trace",
]

_MODEL = Path(__file__).resolve().parents[2] / "answers" / "step4_configurable_stages.py"


@dataclass(frozen=True)
class Layer:
    """A layer of the model.

    Attributes:
      name: as `--splits` has it.
      output: shape and dtype of what it returns.
      num_parameters: how many numbers its variables have.
      feeds: positions of the leaves of the micro-batch that it reads.
    """

    name: str
    output: jax.ShapeDtypeStruct
    num_parameters: int
    feeds: tuple[int, ...]


@functools.cache
def _step4() -> ModuleType:
    """The tutorial's program of step 4."""
    spec = importlib.util.spec_from_file_location(_MODEL.stem, _MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def defaults() -> argparse.Namespace:
    """The default arguments of the tutorial's programs."""
    with mock.patch.object(sys, "argv", [_MODEL.name]):
        arguments: argparse.Namespace = _step4().parse_arguments([])
    return arguments


@functools.cache
def micro_batch() -> dict[str, jax.ShapeDtypeStruct]:
    """What the tutorial's programs are fed with, by name."""
    data = datasets.load_digits()
    batches = datasets.TrainingBatches(data.train_images, data.train_labels, defaults().batch_size)
    leaves = zip(("images", "labels"), next(iter(batches)), strict=True)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves}


def trace(splits: list[str]) -> engine.Pipeline:
    """The model of step 4 in stages, traced."""
    module = _step4()
    stages = module.move_layers_to_stages(module.discover_layers(), splits)
    pipeline = engine.Pipeline(
        [module.make_stage(index, stage) for index, stage in enumerate(stages)],
        num_micro_batches=defaults().batches_to_accumulate,
        loss=lambda *results: module.optimizer_function(*results).loss,
        optimizer=lambda *results: module.optimizer_function(*results).opt,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the stages print when they are traced
        pipeline.trace(tuple(micro_batch().values()), jax.ShapeDtypeStruct((), np.float32))
    return pipeline


@functools.cache
def model_layers() -> tuple[Layer, ...]:
    """The layers, from a trace in which each is a stage."""
    names = [name for name, _function in _step4().discover_layers()]
    pipeline = trace(names[1:])
    layers = []
    for index, (name, stage) in enumerate(zip(names, pipeline.traced.stages, strict=True)):
        own = [
            aval
            for position, aval in enumerate(stage.output_avals)
            if stage.outputs[position] == Source("output", position, index)
        ]
        feeds = tuple(source.index for source in _read_by(pipeline, index) if source.kind == "element")
        layers.append(Layer(name, own[0], count_parameters(pipeline, index), feeds))
    return tuple(layers)


def layers_of_stages(splits: list[str]) -> list[list[Layer]]:
    """The layers of each stage."""
    by_name = {layer.name: layer for layer in model_layers()}
    stages = _step4().move_layers_to_stages(_step4().discover_layers(), splits)
    return [[by_name[name] for name, _function in stage] for stage in stages]


def count_parameters(pipeline: engine.Pipeline, stage: int) -> int:
    """How many numbers the variables of a stage have."""
    return sum(int(np.prod(spec.shape)) for spec in pipeline.traced.stages[stage].variables)


def _read_by(pipeline: engine.Pipeline, stage: int) -> list[Source]:
    """The values from outside that a stage's programs take; what it only passes on is not among them."""
    programs = pipeline.programs[stage]
    arguments = [*programs.forward.arguments, *(programs.backward.arguments if programs.backward else ())]
    indices = sorted({value.index for value in arguments if value.kind is ValueKind.INPUT})
    return [pipeline.traced.stages[stage].inputs[index] for index in indices]


def bytes_across(pipeline: engine.Pipeline, first: int, second: int) -> tuple[int, int]:
    """The bytes that cross the edge between two stages per micro-batch, forwards and backwards."""
    edges = engine.inspect.find_facts(pipeline).edges
    forwards = sum(
        edge.num_forward_bytes for edge in edges if (edge.source, edge.target) == (first, second)
    )
    backwards = sum(
        edge.num_backward_bytes for edge in edges if (edge.source, edge.target) == (second, first)
    )
    return forwards, backwards


def timetable(schedule: str, num_stages: int, num_micro_batches: int) -> schedules.Timetable:
    """A timetable for training, with each stage on an IPU of its own."""
    mapping = tuple(range(num_stages))
    return schedules.timetable(schedule, num_stages, num_micro_batches, mapping, True)


def percent_idle(table: schedules.Timetable) -> int:
    """The share of time-steps in which an IPU waits, over all IPUs, rounded."""
    return round(100 - 100 * len(table.order) / (len(table.rows) * table.num_time_steps))


def find_ramps(table: schedules.Timetable) -> list[tuple[str, int, int]]:
    """The phases as (name, first time-step, last one), each stage on an IPU of its own."""
    phases = timetables.find_ramps(table, range(len(table.rows)))
    return [(phase.name.replace("-", " "), phase.first, phase.last) for phase in phases]
