"""Options: defaults, setters, checks, warnings, copies, printing, config files and the environment."""

import copy
import json
import logging
import pathlib
import pickle
import re

import numpy as np
import pytest
import torch

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch import enums, logs
from ipu_pipeline.poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from ipu_pipeline.poptorch.options import ConfigFileError, Options, TensorLocationSettings
from ipu_pipeline.poptorch.options.base import UNSET, is_configurable
from ipu_pipeline.poptorch.options.diagnostics import AnchoredTensor
from ipu_pipeline.poptorch.options.names import find_value
from ipu_pipeline.poptorch.options.phased import SerialPhasedExecution
from ipu_pipeline.poptorch.options.stages import Stage
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, ShardedExecution

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "poptorch_options.md"

# By PopTorch's documents; below the line, names of ours.
DEFAULTS = {
    "": {
        "replication_factor": 1,
        "input_group_size": 1,
        "input_cgt": CommGroupType.Consecutive,
        "broadcast_buffers": True,
        "device_iterations": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "auto_round_num_ipus": False,
        "anchored_tensors": {},
        "output_mode": OutputMode.Default,
        "output_return_period": 1,
        "connection_type": ConnectionType.Always,
        "sync_pattern": SyncPattern.Full,
        "available_memory_proportion": {},
        # ---
        "execution_strategy": PipelinedExecution(AutoStage.SameAsIpu),
        "pipeline_schedule": "grouped",
        "executable_cache_path": None,
        "synthetic_data": False,
        "stable_norm": False,
        "allow_new_shapes": False,
        "max_shapes": 8,
        "updatable_named_buffers": [],
        "relax_optimizer_attributes_checks": False,
        "index_checks": False,
        "log_cycle_count": False,
        "profiling": False,
        "profile_dir": None,
        "module_namescope": True,
        "source_location_excludes": [],
        "show_compilation_progress_bar": True,
    },
    "Training": {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
        # ---
        "automatic_loss_scaling": False,
        "convolution_dithering": False,
    },
    "Precision": {"floating_point_exceptions": False, "stochastic_rounding": False},
    "Jit": {"trace_model": False},
    "Distributed": {"num_distributed_processes": 1, "distributed_process_id": 0},
    "TensorLocations": {
        "location_activation": {},
        "location_weight": {},
        "location_optimizer": {},
        "location_accumulator": {},
    },
}
WITHOUT_DEFAULT = {
    "": ["use_model", "ipu_id", "ipu_version", "model_name", "random_seed"],
    "Training": [],
    "Precision": ["partials_type"],
    "Jit": [],
    "Distributed": [],
    "TensorLocations": ["num_io_tiles"],
}

OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)

# A setter, its arguments, and what it sets.
SETTERS = [
    ("deviceIterations", (7,), {"device_iterations": 7}),
    ("deviceIterations", (np.int64(3),), {"device_iterations": 3}),
    ("setExecutionStrategy", (ShardedExecution("A"),), {"execution_strategy": ShardedExecution("A")}),
    (
        "setExecutionStrategy",
        (AutoStage.AutoIncrement,),
        {"execution_strategy": PipelinedExecution(AutoStage.AutoIncrement)},
    ),
    ("setPipelineSchedule", ("sequential",), {"pipeline_schedule": "sequential"}),
    ("setPipelineSchedule", (schedules.interleaved,), {"pipeline_schedule": schedules.interleaved}),
    ("outputMode", (OutputMode.All,), {"output_mode": OutputMode.All, "output_return_period": 1}),
    (
        "outputMode",
        (OutputMode.EveryN, 3),
        {"output_mode": OutputMode.EveryN, "output_return_period": 3},
    ),
    ("randomSeed", (42,), {"random_seed": 42}),
    ("enableExecutableCaching", ("/x",), {"executable_cache_path": "/x"}),
    ("enableExecutableCaching", (pathlib.Path("/x"),), {"executable_cache_path": "/x"}),
    ("enableExecutableCaching", (None,), {"executable_cache_path": None}),
    ("enableSyntheticData", (True,), {"synthetic_data": True}),
    ("enableStableNorm", (True,), {"stable_norm": True}),
    ("allowNewShapes", (True, 3), {"allow_new_shapes": True, "max_shapes": 3}),
    ("updatableNamedBuffers", (["a", "b"],), {"updatable_named_buffers": ["a", "b"]}),
    ("relaxOptimizerAttributesChecks", (), {"relax_optimizer_attributes_checks": True}),
    ("checkIndices", (), {"index_checks": True}),
    ("replicationFactor", (8,), {"replication_factor": 8}),
    (
        "inputReplicaGrouping",
        (1, CommGroupType.Orthogonal),
        {"input_group_size": 1, "input_cgt": CommGroupType.Orthogonal},
    ),
    ("broadcastBuffers", (False,), {"broadcast_buffers": False}),
    ("broadcastBuffers", (), {"broadcast_buffers": True}),
    ("autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
    ("useIpuModel", (False,), {"use_model": False}),
    ("useIpuId", (3,), {"ipu_id": 3}),
    ("useOfflineIpuTarget", (), {"ipu_version": 2, "connection_type": ConnectionType.Never}),
    ("connectionType", (ConnectionType.OnDemand,), {"connection_type": ConnectionType.OnDemand}),
    ("syncPattern", (SyncPattern.SinglePipeline,), {"sync_pattern": SyncPattern.SinglePipeline}),
    (
        "setAvailableMemoryProportion",
        ({"IPU0": 0.5, "IPU12": 1},),
        {"available_memory_proportion": {0: 0.5, 12: 1.0}},
    ),
    ("logDir", ("/tmp",), {"log_dir": "/tmp"}),  # noqa: S108  # nothing is written
    ("maxRepeatLogs", (None,), {"max_repeat_logs": None}),
    ("maxRepeatLogs", (2,), {"max_repeat_logs": 2}),
    ("modelName", ("m",), {"model_name": "m"}),
    ("anchorTensor", ("a", "b"), {"anchored_tensors": {"a": AnchoredTensor("b", None, 1)}}),
    (
        "anchorTensor",
        ("a", "b", OutputMode.EveryN, 2),
        {"anchored_tensors": {"a": AnchoredTensor("b", OutputMode.EveryN, 2)}},
    ),
    ("logCycleCount", (True,), {"log_cycle_count": True}),
    ("enableProfiling", (), {"profiling": True, "profile_dir": None}),
    ("enableProfiling", ("p",), {"profiling": True, "profile_dir": "p"}),
    ("disableModuleNamescope", (), {"module_namescope": False}),
    ("sourceLocationExcludes", (["a"],), {"source_location_excludes": ["a"]}),
    ("appendToLocationExcludes", ("a", "b"), {"source_location_excludes": ["a", "b"]}),
    ("showCompilationProgressBar", (False,), {"show_compilation_progress_bar": False}),
    ("Training.gradientAccumulation", (5,), {"gradient_accumulation": 5}),
    (
        "Training.accumulationAndReplicationReductionType",
        (ReductionType.Sum,),
        {"accumulation_and_replication_reduction_type": ReductionType.Sum},
    ),
    (
        "Training.setMeanAccumulationAndReplicationReductionStrategy",
        (MeanReductionStrategy.Running,),
        {"meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Running},
    ),
    ("Training.setAutomaticLossScaling", (True,), {"automatic_loss_scaling": True}),
    ("Training.setConvolutionDithering", (True,), {"convolution_dithering": True}),
    ("Precision.enableFloatingPointExceptions", (True,), {"floating_point_exceptions": True}),
    ("Precision.enableStochasticRounding", (True,), {"stochastic_rounding": True}),
    ("Precision.setPartialsType", (torch.half,), {"partials_type": torch.float16}),
    ("Jit.traceModel", (False,), {"trace_model": False}),
    (
        "Distributed.configureProcessId",
        (2, 3),
        {"distributed_process_id": 2, "num_distributed_processes": 3, "processId": 2, "numProcesses": 3},
    ),
    ("Distributed.setEnvVarNames", ("NO_SIZE", "NO_RANK"), {"processId": 0, "numProcesses": 1}),
    ("Distributed.disable", (), {"processId": 0, "numProcesses": 1}),
    ("TensorLocations.setActivationLocation", (OFF_CHIP,), {"location_activation": {"onChip": 0}}),
    ("TensorLocations.setWeightLocation", (OFF_CHIP,), {"location_weight": {"onChip": 0}}),
    ("TensorLocations.setOptimizerLocation", (OFF_CHIP,), {"location_optimizer": {"onChip": 0}}),
    ("TensorLocations.setAccumulatorLocation", (OFF_CHIP,), {"location_accumulator": {"onChip": 0}}),
    ("TensorLocations.numIOTiles", (192,), {"num_io_tiles": 192}),
]
LOCATION_SETTERS = [
    ("useOnChipStorage", True, {"onChip": 1}),
    ("useOnChipStorage", False, {"onChip": 0}),
    ("minElementsForOffChip", 4, {"minElementsForOffChip": 4}),
    ("minElementsForReplicatedTensorSharding", 5, {"minElementsForReplicatedTensorSharding": 5}),
    ("useReplicatedTensorSharding", True, {"useReplicatedTensorSharding": 1}),
    ("useIOTilesToLoad", False, {"useIOTilesToLoad": 0}),
    ("useIOTilesToStore", True, {"useIOTilesToStore": 1}),
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("POPTORCH_DEFAULT_OPTIONS", "POPTORCH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logs, "_said", set())
    level, state = logs.logger.level, torch.get_rng_state()
    logs.logger.setLevel(logging.WARNING)
    yield
    logs.logger.setLevel(level)
    torch.set_rng_state(state)


def find(options, path):
    """A setter or group by its path, and what it belongs to."""
    *groups, name = path.split(".")
    for group in groups:
        options = getattr(options, group)
    return options, getattr(options, name)


def group_of(options, name):
    return getattr(options, name) if name else options


def all_setters():
    options = Options()
    for name in DEFAULTS:
        group = type(group_of(options, name))
        for attribute in dir(group):
            if is_configurable(getattr(group, attribute)):
                yield f"{name}.{attribute}".lstrip(".")


# Values


@pytest.mark.parametrize("group", DEFAULTS)
def test_defaults(group):
    options = group_of(Options(), group)
    assert {name: getattr(options, name) for name in DEFAULTS[group]} == DEFAULTS[group]
    for name, value in DEFAULTS[group].items():
        assert type(getattr(options, name)) is type(value)
        assert not options.is_set(name)
    for name in WITHOUT_DEFAULT[group]:
        assert not hasattr(options, name)
        with pytest.raises(AttributeError, match=f"{name} has no value yet"):
            getattr(options, name)
    assert [*options.settings] == [
        name for name in options.settings if name in DEFAULTS[group] or name in WITHOUT_DEFAULT[group]
    ]
    assert len(options.settings) == len(DEFAULTS[group]) + len(WITHOUT_DEFAULT[group])


@pytest.mark.parametrize(("path", "args", "expected"), SETTERS)
def test_setters(path, args, expected):
    options = Options()
    group, setter = find(options, path)
    result = setter(*args)
    assert result is (None if path == "broadcastBuffers" else group)
    for name, value in expected.items():
        assert getattr(group, name) == value
        assert type(getattr(group, name)) is type(value)
        assert group.is_set(name) or name in ("processId", "numProcesses")
    for name, defaults in DEFAULTS.items():  # and nothing else
        others = group_of(options, name)
        for option, value in defaults.items():
            assert others is group or getattr(others, option) == value
            assert option in expected or "processId" in expected or getattr(others, option) == value


def test_every_setter_is_tested():
    assert sorted(all_setters()) == sorted({path for path, _args, _expected in SETTERS})
    names = {name for name, _value, _dict in LOCATION_SETTERS}
    assert names == {
        name
        for name in dir(TensorLocationSettings)
        if is_configurable(getattr(TensorLocationSettings, name))
    }


@pytest.mark.parametrize(("name", "value", "expected"), LOCATION_SETTERS)
def test_location_settings(name, value, expected):
    settings = TensorLocationSettings()
    assert settings.to_dict() == {}
    assert getattr(settings, name)(value) is settings
    assert settings.to_dict() == expected
    assert type(next(iter(settings.to_dict().values()))) is int


def test_locations_are_kept_as_they_were_given():
    options = Options()
    settings = TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(True)
    assert options.TensorLocations.location_weight == {"onChip": 0}


def test_what_lies_off_the_chip_as_the_engine_names_it():
    locations = Options().TensorLocations
    assert locations.find_offloaded(True) == []
    locations.setActivationLocation(TensorLocationSettings().useOnChipStorage(True))
    assert locations.find_offloaded(True) == []
    locations.setOptimizerLocation(OFF_CHIP)
    assert locations.find_offloaded(True) == ["weight_update_variables"]
    locations.setActivationLocation(OFF_CHIP).setWeightLocation(OFF_CHIP).setAccumulatorLocation(OFF_CHIP)
    assert locations.find_offloaded(True) == [
        "activations",
        "weights",
        "weight_update_variables",
        "gradient_accumulation_buffers",
    ]


def test_chains_and_keywords():
    options = Options().deviceIterations(device_iterations=2).replicationFactor(4).useIpuModel(True)
    assert (options.device_iterations, options.replication_factor, options.use_model) == (2, 4, True)
    options.Training.gradientAccumulation(3).setAutomaticLossScaling(True)
    assert options.Training.gradient_accumulation == 3
    assert options.Training.automatic_loss_scaling
    options.outputMode(OutputMode.EveryN, output_return_period=2)
    assert options.output_return_period == 2
    options.outputMode(OutputMode.Sum)
    assert options.output_return_period == 1


def test_options_can_be_written_by_their_names():
    options = Options()
    options.device_iterations = 6
    options.Training.gradient_accumulation = 7
    assert options.set(replication_factor=2, log_dir="x") is options
    assert (options.device_iterations, options.replication_factor, options.log_dir) == (6, 2, "x")
    assert options.Training.gradient_accumulation == 7
    with pytest.raises(AssertionError, match="device_iterations must be an integer; got 'x'"):
        options.device_iterations = "x"


def test_the_seed_is_torch_s_too():
    Options().randomSeed(42)
    first = torch.rand(3)
    torch.manual_seed(42)
    assert torch.equal(first, torch.rand(3))


def test_default_output_mode():
    assert Options().defaultOutputMode()
    assert not Options().outputMode(OutputMode.Final).defaultOutputMode()


def test_anchors_add_up_and_locations_append():
    options = Options().anchorTensor("a", "x").anchorTensor("b", "y", OutputMode.Final)
    assert options.anchorTensor("b", "z", OutputMode.EveryN).anchored_tensors == {
        "a": ("x", None, 1),
        "b": ("z", OutputMode.EveryN, 1),
    }
    options.sourceLocationExcludes(["a"]).appendToLocationExcludes("b").appendToLocationExcludes("c")
    assert options.source_location_excludes == ["a", "b", "c"]
    assert Options().source_location_excludes == []


def test_a_strategy_is_copied():
    strategy = PipelinedExecution("A", "B")
    options = Options().setExecutionStrategy(strategy)
    strategy.stage("A").ipu(5)
    assert options.execution_strategy == PipelinedExecution("A", "B")
    clone = options.clone()
    options.execution_strategy.stage("A").ipu(6)
    assert clone.execution_strategy == PipelinedExecution("A", "B")
    assert Options().execution_strategy is not Options().execution_strategy


def test_replica_groups():
    options = Options().replicationFactor(8).inputReplicaGrouping(4, CommGroupType.Consecutive)
    assert (options.input_group_size, options.input_cgt) == (4, CommGroupType.Consecutive)
    with pytest.raises(ValueError, match="must be a factor of replication_factor, 8; got 3. Call repl"):
        options.inputReplicaGrouping(3, CommGroupType.Orthogonal)
    assert (options.input_group_size, options.input_cgt) == (4, CommGroupType.Consecutive)
    with pytest.raises(ValueError, match="must be a multiple of input_group_size, 4; got 2"):
        options.replicationFactor(2)
    options.inputReplicaGrouping(1, CommGroupType.NoGrouping).replicationFactor(2)


# Processes


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": " 3"}, (3, 4)),
        (
            {
                "IPU_PIPELINE_NUM_PROCESSES": "5",
                "IPU_PIPELINE_PROCESS_ID": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            (2, 5),
        ),
    ],
)
def test_processes_by_the_launcher(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processes = Options().Distributed
    assert (processes.processId, processes.numProcesses) == expected
    processes.disable()
    assert (processes.processId, processes.numProcesses) == (0, 1)


def test_processes_by_other_variables(monkeypatch):
    monkeypatch.setenv("SIZE", "5")
    monkeypatch.setenv("RANK", "1")
    processes = Options().Distributed.setEnvVarNames("SIZE", "RANK")
    assert (processes.processId, processes.numProcesses) == (1, 5)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ValueError, match="environment variable RANK must be a number; it is 'x'"):
        processes.setEnvVarNames("SIZE", "RANK")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ValueError, match="environment variable RANK must be below SIZE, 5; it is 5"):
        processes.setEnvVarNames("SIZE", "RANK")
    assert (processes.processId, processes.numProcesses) == (1, 5)


# Checks


@pytest.mark.parametrize(
    ("path", "args", "error", "match"),
    [
        ("deviceIterations", ("2",), AssertionError, r"Options\(\).device_iterations must be an integer"),
        ("deviceIterations", (True,), AssertionError, "must be an integer; got True"),
        ("deviceIterations", (2.0,), AssertionError, "must be an integer; got 2.0"),
        ("deviceIterations", (0,), ValueError, "device_iterations must be at least 1; got 0"),
        ("setExecutionStrategy", ("A",), AssertionError, "must be a strategy.*got 'A'"),
        ("setPipelineSchedule", ("fast",), ValueError, "one of grouped, interleaved, sequential, or a f"),
        ("setPipelineSchedule", (3,), TypeError, "or a function; got 3"),
        ("setPipelineSchedule", (lambda a, b: [],), TypeError, "must take .num_stages.*too many pos"),
        ("outputMode", (2,), AssertionError, "output_mode must be one of OutputMode.*; got 2"),
        ("outputMode", (OutputMode.EveryN,), AssertionError, "EveryN needs output_return_period"),
        ("outputMode", (OutputMode.EveryN, 0), ValueError, "period must be at least 1; got 0"),
        ("outputMode", (OutputMode.EveryN, "2"), AssertionError, "period must be an integer; got '2'"),
        ("randomSeed", (1.5,), AssertionError, "random_seed must be an integer; got 1.5"),
        ("randomSeed", (-1,), ValueError, "random_seed must be at least 0; got -1"),
        ("enableExecutableCaching", (3,), AssertionError, "must be a path; got 3"),
        ("enableExecutableCaching", (b"x",), AssertionError, "must be a path; got b'x'"),
        ("enableExecutableCaching", ("",), ValueError, "must be a path; got an empty string"),
        ("enableSyntheticData", (1,), AssertionError, "synthetic_data must be True or False; got 1"),
        ("enableStableNorm", (None,), AssertionError, "stable_norm must be True or False; got None"),
        ("allowNewShapes", (1,), AssertionError, "allow_new_shapes must be True or False; got 1"),
        ("allowNewShapes", (True, 2.0), AssertionError, "max_shapes must be an integer; got 2.0"),
        ("allowNewShapes", (True, 0), ValueError, "max_shapes must be at least 1; got 0"),
        ("updatableNamedBuffers", ("ab",), AssertionError, "must be a list of strings; got 'ab'"),
        ("updatableNamedBuffers", (["a", 1],), AssertionError, "must be a list of strings"),
        ("relaxOptimizerAttributesChecks", (0,), AssertionError, "must be True or False; got 0"),
        ("checkIndices", (1,), AssertionError, "index_checks must be True or False; got 1"),
        ("replicationFactor", (2.0,), AssertionError, "must be an integer; got 2.0"),
        ("replicationFactor", (0,), ValueError, "must be at least 1; got 0"),
        ("inputReplicaGrouping", (1, CommGroupType.All), ValueError, "must not be .*CommGroupType.All"),
        ("inputReplicaGrouping", (1, 1), AssertionError, "must be one of CommGroupType.*; got 1"),
        ("inputReplicaGrouping", (2, CommGroupType.Consecutive), ValueError, "a factor of replicat.*got 2"),
        ("inputReplicaGrouping", (0, CommGroupType.Consecutive), ValueError, "must be at least 1; got 0"),
        ("inputReplicaGrouping", (2, CommGroupType.NoGrouping), ValueError, "must be 1 with .*got 2"),
        ("inputReplicaGrouping", ("1", CommGroupType.Consecutive), AssertionError, "must be an integer"),
        ("broadcastBuffers", (None,), AssertionError, "must be True or False; got None"),
        ("autoRoundNumIPUs", (1,), AssertionError, "must be True or False; got 1"),
        ("useIpuModel", (1,), AssertionError, "use_model must be True or False; got 1"),
        ("useIpuId", ("0",), AssertionError, "ipu_id must be an integer; got '0'"),
        ("useIpuId", (-1,), ValueError, "ipu_id must be at least 0; got -1"),
        ("useOfflineIpuTarget", ("2",), AssertionError, "ipu_version must be an integer"),
        ("connectionType", (0,), AssertionError, "must be one of ConnectionType.*; got 0"),
        ("syncPattern", ("Full",), AssertionError, "must be one of SyncPattern.*; got 'Full'"),
        ("setAvailableMemoryProportion", ({"0": 0.5},), AssertionError, "keys as \"IPU0\"; got '0'"),
        ("setAvailableMemoryProportion", ({0: 0.5},), AssertionError, 'keys as "IPU0"; got 0'),
        ("setAvailableMemoryProportion", ({"IPUx": 0.5},), AssertionError, "got 'IPUx'"),
        ("setAvailableMemoryProportion", (0.5,), AssertionError, "must be a dict as .*; got 0.5"),
        ("setAvailableMemoryProportion", ({"IPU0": "x"},), AssertionError, "must be a number; got 'x'"),
        ("setAvailableMemoryProportion", ({"IPU0": 1.5},), ValueError, "must be from 0 to 1; got 1.5"),
        ("logDir", (1,), AssertionError, "log_dir must be a path; got 1"),
        ("maxRepeatLogs", ("4",), AssertionError, "max_repeat_logs must be an integer; got '4'"),
        ("modelName", (None,), AssertionError, "model_name must be a string; got None"),
        ("anchorTensor", (1, "x"), AssertionError, "short_name must be a string; got 1"),
        ("anchorTensor", ("x", None), AssertionError, "long_name must be a string; got None"),
        ("anchorTensor", ("x", "y", "All"), AssertionError, "output_mode must be one of OutputMode.Final"),
        ("anchorTensor", ("x", "y", OutputMode.EveryN, 0), ValueError, "must be at least 1; got 0"),
        ("logCycleCount", (1,), AssertionError, "must be True or False; got 1"),
        ("enableProfiling", (1,), AssertionError, "profile_dir must be a path; got 1"),
        ("sourceLocationExcludes", ("a",), AssertionError, "must be a list of strings; got 'a'"),
        ("appendToLocationExcludes", (["a"],), AssertionError, "must be a list of strings"),
        ("showCompilationProgressBar", (1,), AssertionError, "must be True or False; got 1"),
        ("Training.gradientAccumulation", (0,), ValueError, "Training.gradient_accumulation must be at"),
        ("Training.gradientAccumulation", ("x",), AssertionError, "must be an integer; got 'x'"),
        (
            "Training.accumulationAndReplicationReductionType",
            (ReductionType.NoReduction,),
            ValueError,
            "must be poptorch.ReductionType.Sum or poptorch.ReductionType.Mean; got",
        ),
        ("Training.accumulationAndReplicationReductionType", (1,), ValueError, "Sum or .*Mean; got 1"),
        (
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
            (1,),
            AssertionError,
            "must be one of MeanReductionStrategy.*; got 1",
        ),
        ("Training.setAutomaticLossScaling", (1,), AssertionError, "must be True or False; got 1"),
        ("Training.setConvolutionDithering", (1,), AssertionError, "must be True or False; got 1"),
        ("Precision.enableFloatingPointExceptions", (1,), AssertionError, "must be True or False"),
        ("Precision.enableStochasticRounding", ("x",), AssertionError, "must be True or False; got 'x'"),
        ("Precision.setPartialsType", (torch.float64,), ValueError, "torch.float32; got torch.float64"),
        ("Precision.setPartialsType", ("half",), ValueError, "must be torch.float16 or .*; got 'half'"),
        ("Jit.traceModel", (True,), ValueError, "trace_model must be False; got True"),
        ("Jit.traceModel", (0,), AssertionError, "trace_model must be True or False; got 0"),
        ("Distributed.configureProcessId", (2, 2), ValueError, "below num_processes, 2; got 2"),
        ("Distributed.configureProcessId", (-1, 2), ValueError, "process_id must be at least 0; got -1"),
        ("Distributed.configureProcessId", (0, 0), ValueError, "num_processes must be at least 1; got 0"),
        ("Distributed.configureProcessId", ("0", 2), AssertionError, "process_id must be an integer"),
        ("Distributed.setEnvVarNames", (1, "x"), AssertionError, "name must be a string; got 1"),
        ("TensorLocations.setWeightLocation", ({},), AssertionError, "must be a poptorch.TensorLocationS"),
        *[
            ("TensorLocations.numIOTiles", (n,), AssertionError, "an even number between 32 and 192\\.")
            for n in (10, 30, 33, 193, 194, "32", True)
        ],
    ],
)
def test_arguments_are_checked(path, args, error, match):
    options = Options()
    with pytest.raises(error, match=match) as caught:
        find(options, path)[1](*args)
    assert caught.type is error
    assert options == Options()


@pytest.mark.parametrize("name", ["useOnChipStorage", "useReplicatedTensorSharding", "useIOTilesToLoad"])
def test_location_settings_are_checked(name):
    with pytest.raises(AssertionError, match="must be True or False; got 1"):
        getattr(TensorLocationSettings(), name)(1)
    with pytest.raises(AssertionError, match="minElementsForOffChip must be an integer; got 'x'"):
        TensorLocationSettings().minElementsForOffChip("x")


@pytest.mark.parametrize("group", DEFAULTS)
def test_unknown_options(group):
    options = group_of(Options(), group)
    with pytest.raises(AttributeError, match="has no option 'device_iteration'"):
        print(options.device_iteration)
    with pytest.raises(AssertionError, match="has no option 'device_iteration'"):
        options.device_iteration = 1
    with pytest.raises(AssertionError, match="has no option 'Training'"):
        options.Training = 1
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del options.device_iterations


def test_an_unknown_option_has_a_neighbour():
    with pytest.raises(AttributeError, match="Did you mean 'device_iterations'[?] Options: device_iter"):
        print(Options().device_iteration)


# Options without an effect


@pytest.mark.parametrize(
    ("path", "args", "reason"),
    [
        ("enableStableNorm", (True,), "stable_norm has no effect: norms are always"),
        ("syncPattern", (SyncPattern.ReplicaAndLadder,), "sync_pattern has no effect: devices wait"),
        (
            "setAvailableMemoryProportion",
            ({"IPU1": 0.1},),
            "available_memory_proportion has no effect: XLA",
        ),
        ("maxRepeatLogs", (None,), "max_repeat_logs has no effect: there is no log of Poplar"),
        ("useOfflineIpuTarget", (21,), "ipu_version has no effect: there is no IPU"),
        ("outputMode", (OutputMode.All, 3), "output_return_period has no effect"),
        ("anchorTensor", ("a", "b", OutputMode.All, 3), "output_return_period has no effect"),
        ("anchorTensor", ("a", "b", None, 3), "output_return_period has no effect"),
        ("Training.setConvolutionDithering", (True,), "convolution_dithering has no effect: it spreads"),
        ("Precision.enableStochasticRounding", (True,), "stochastic_rounding has no effect: XLA rounds"),
        ("Precision.setPartialsType", (torch.float32,), "partials_type has no effect: XLA decides"),
        ("TensorLocations.numIOTiles", (64,), "num_io_tiles has no effect: tiles"),
    ],
)
def test_what_has_no_effect_warns_once(caplog, path, args, reason):
    for options in (Options(), Options()):
        find(options, path)[1](*args)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text
    assert "poptorch.Options()" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minElementsForOffChip", 4),
        ("minElementsForReplicatedTensorSharding", 4),
        ("useIOTilesToLoad", True),
        ("useIOTilesToStore", True),
    ],
)
def test_locations_without_effect_warn(caplog, name, value):
    getattr(TensorLocationSettings(), name)(type(value)(0))
    assert not caplog.records
    getattr(TensorLocationSettings(), name)(value)
    assert f"poptorch.TensorLocationSettings().{name} has no effect: " in caplog.text


def test_nothing_else_warns(caplog):
    """Neither what has an effect, nor what asks for what is so anyway."""
    silent = 0
    for path, args, expected in SETTERS:
        options = Options()
        group, setter = find(options, path)
        if any(group.settings[name].no_effect for name in expected if name in group.settings):
            continue
        setter(*args)
        silent += 1
    assert silent > 40
    options = Options().syncPattern(SyncPattern.Full).enableStableNorm(False).maxRepeatLogs(4)
    options.setAvailableMemoryProportion({}).useOfflineIpuTarget().outputMode(OutputMode.All, 1)
    options.Precision.enableStochasticRounding(False)
    options.Training.setConvolutionDithering(False)
    assert not caplog.records


# Frozen, copied, compared, printed


def changed():
    """Options with something set in each group."""
    options = Options().deviceIterations(2).randomSeed(3).anchorTensor("a", "b", OutputMode.EveryN, 2)
    options.setExecutionStrategy(SerialPhasedExecution("A", [Stage("B").ipu(1)]))
    options.setPipelineSchedule(schedules.interleaved)
    options.Training.gradientAccumulation(4)
    options.Precision.setPartialsType(torch.float16)
    options.Jit.traceModel(False)
    options.Distributed.configureProcessId(1, 2)
    options.TensorLocations.setWeightLocation(OFF_CHIP)
    return options


def pickled(options):
    return pickle.loads(pickle.dumps(options))  # its own


def test_frozen_options_cannot_be_changed():
    options = changed()
    before = repr(options)
    options.freeze()
    for path, args, _expected in SETTERS:
        with pytest.raises(AttributeError, match="^Can't modify frozen Options$"):
            find(options, path)[1](*args)
    for change in (
        lambda: options.set(random_seed=42),
        lambda: setattr(options, "device_iterations", 3),
        lambda: setattr(options.Training, "gradient_accumulation", 3),
        lambda: setattr(options, "Training", 3),
        lambda: options.loadFromFile("nowhere"),
        lambda: options.from_json("{}"),
    ):
        with pytest.raises(AttributeError, match="^Can't modify frozen Options$"):
            change()
    torch.manual_seed(1)
    first = torch.rand(2)
    torch.manual_seed(1)
    with pytest.raises(AttributeError):
        options.randomSeed(7)
    assert torch.equal(torch.rand(2), first)  # torch's seed is not changed either
    assert repr(options) == before


@pytest.mark.parametrize("make", [Options.clone, copy.copy, copy.deepcopy, pickled])
def test_copies(make):
    options = changed()
    made = make(options)
    assert type(made) is Options
    assert made == options
    assert repr(made) == repr(options)
    assert made.is_set("device_iterations")
    assert not made.is_set("log_dir")
    # Each goes its own way.
    made.deviceIterations(5).anchorTensor("c", "d").appendToLocationExcludes("x")
    made.Training.gradientAccumulation(9)
    made.execution_strategy.stage("B").ipu(7)
    made.TensorLocations.location_weight["onChip"] = 1
    assert options == changed()
    assert made != options
    assert options.execution_strategy.stage("B").ipu_id == 1


def test_copies_of_frozen_options():
    options = changed()
    options.freeze()
    for made in (options.clone(), copy.deepcopy(options), copy.copy(options)):
        made.deviceIterations(5).Training.gradientAccumulation(4)
        made.Distributed.configureProcessId(5, 15)
    again = pickled(options)
    assert again == options
    with pytest.raises(AttributeError, match="frozen"):
        again.Training.gradientAccumulation(4)
    assert options == changed()


def test_copies_do_not_read_the_environment_again(monkeypatch):
    options = Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 9}')
    assert options.clone().device_iterations == 1
    assert pickled(options).device_iterations == 1
    assert Options().device_iterations == 9


@pytest.mark.parametrize("path", ["deviceIterations", "Training.gradientAccumulation"])
def test_options_differ_by_a_value(path):
    options, others = Options(), Options()
    assert options == others
    find(options, path)[1](2)
    assert options != others
    find(others, path)[1](2)
    assert options == others
    assert options != "options"
    assert options.Training != options.Precision
    with pytest.raises(TypeError, match="unhashable"):
        hash(options)


def test_printing():
    options = Options().replicationFactor(4)
    text = repr(options)
    assert text.startswith("Options(")
    assert str(options) == text
    assert "replication_factor=4" in text
    assert "random_seed" not in text
    assert "execution_strategy=PipelinedExecution(AutoStage.SameAsIpu)" in text
    for group, values in DEFAULTS.items():
        assert not group or f"{group}={group}Options(" in text.replace(
            "TensorLocations=TensorLocationOptions(", "TensorLocations=TensorLocationsOptions("
        )
        for name, value in values.items():
            assert name == "replication_factor" or f"{name}={value!r}" in text
    assert "random_seed=8" in repr(options.randomSeed(8))
    assert repr(OFF_CHIP) == "TensorLocationSettings(onChip=0)"


def test_a_program_may_derive_groups():
    """As Graphcore's popdist does."""
    options = Options()

    class Mine(type(options.Distributed)):
        pass

    options.Distributed.__class__ = Mine
    assert options.Distributed.disable().processId == 0


# Config files


def load(tmp_path, text, options=None):
    path = tmp_path / "mine.conf"
    path.write_text(text)
    options = Options() if options is None else options
    assert options.loadFromFile(path) is options
    return options


def test_a_config_file(tmp_path):
    """Listing 1 of PopTorch's user guide."""
    options = load(
        tmp_path,
        "deviceIterations(1)\n"
        "setExecutionStrategy(poptorch.ShardedExecution())\n"
        "  replicationFactor(1)\n"
        " \n"
        "enableSyntheticData(True) # an inline comment\n"
        "# a comment\n"
        "\t# another\r\n",
    )
    expected = Options().setExecutionStrategy(ShardedExecution()).enableSyntheticData(True)
    assert options == expected
    assert options.is_set("replication_factor")


def test_a_second_config_file_overrides_what_it_sets(tmp_path):
    options = load(tmp_path, "deviceIterations(2)\nreplicationFactor(2)")
    load(tmp_path, "deviceIterations(1)", options)
    assert (options.device_iterations, options.replication_factor) == (1, 2)
    assert options == Options().replicationFactor(2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("outputMode(poptorch.OutputMode.EveryN, 2)", lambda o: o.outputMode(OutputMode.EveryN, 2)),
        (
            "outputMode(output_return_period=2, output_mode=poptorch.enums.OutputMode.EveryN)",
            lambda o: o.outputMode(OutputMode.EveryN, 2),
        ),
        ("deviceIterations(2).replicationFactor(3)", lambda o: o.deviceIterations(2).replicationFactor(3)),
        (
            "Training.gradientAccumulation(4).setAutomaticLossScaling(True)",
            lambda o: o.Training.gradientAccumulation(4).setAutomaticLossScaling(True),
        ),
        ("Precision.setPartialsType(torch.half)", lambda o: o.Precision.setPartialsType(torch.float16)),
        ("maxRepeatLogs(None)", lambda o: o.maxRepeatLogs(None)),
        ("logDir('a#b')  # c", lambda o: o.logDir("a#b")),
        ("updatableNamedBuffers(['a', 'b',])", lambda o: o.updatableNamedBuffers(["a", "b"])),
        ("updatableNamedBuffers(('a',))", lambda o: o.updatableNamedBuffers(["a"])),
        (
            'setAvailableMemoryProportion({"IPU0": 0.25})',
            lambda o: o.setAvailableMemoryProportion({"IPU0": 0.25}),
        ),
        (
            'setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("A", "B").ipu(1), ["C"]))',
            lambda o: o.setExecutionStrategy(PipelinedExecution(Stage("A", "B").ipu(1), ["C"])),
        ),
        (
            "setExecutionStrategy(poptorch.AutoStage.AutoIncrement)",
            lambda o: o.setExecutionStrategy(AutoStage.AutoIncrement),
        ),
        (
            'setExecutionStrategy(poptorch.SerialPhasedExecution(poptorch.Phase(poptorch.Stage("A"), '
            'poptorch.Stage("B")).ipus(0, 1)).useSeparateBackwardPhase(True))',
            lambda o: o.setExecutionStrategy(
                SerialPhasedExecution([Stage("A").ipu(0), Stage("B").ipu(1)]).useSeparateBackwardPhase(True)
            ),
        ),
        (
            "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))",
            lambda o: o.TensorLocations.setOptimizerLocation(OFF_CHIP),
        ),
        ("disableModuleNamescope()", lambda o: o.disableModuleNamescope()),
    ],
)
def test_lines(tmp_path, line, expected):
    options = Options()
    expected(options)
    assert options != Options()
    assert load(tmp_path, line) == options


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [
        ("outputMode(poptorch.OutputMode.All", "SyntaxError", "'(' was never closed"),
        ("deviceIterations(1) deviceIterations(2)", "SyntaxError", "invalid syntax"),
        ("deviceIterations(1); deviceIterations(2)", "SyntaxError", "invalid syntax"),
        ("device_iterations = 2", "SyntaxError", "invalid syntax"),
        ("deviceIterations", "SyntaxError", "a line must be a call of a setter"),
        ("Training", "SyntaxError", "a line must be a call of a setter"),
        ("deviceIterations(2) if True else 3", "SyntaxError", "a line must be a call of a setter"),
        ("deviceIterations(2)(3)", "SyntaxError", "options.deviceIterations(2) is no setter"),
        ("Trainings.gradientAccumulation(2)", "SyntaxError", "options.Trainings is no group of options"),
        ("deviceIteration(2)", "AttributeError", "Options has no setter 'deviceIteration'"),
        ("Training.gradientAccumulations(2)", "AttributeError", "TrainingOptions has no setter"),
        ("freeze()", "AttributeError", "Options has no setter 'freeze'"),
        ("clone()", "AttributeError", "Options has no setter 'clone'"),
        ("loadFromFile('mine.conf')", "AttributeError", "Options has no setter 'loadFromFile'"),
        ("__init__()", "AttributeError", "Options has no setter '__init__'"),
        ("__class__.__bases__()", "SyntaxError", "options.__class__ is no group of options"),
        ("broadcastBuffers(False).deviceIterations(2)", "AttributeError", "NoneType has no setter"),
        ("deviceIterations(0)", "ValueError", "device_iterations must be at least 1; got 0"),
        ("deviceIterations('x')", "AssertionError", "device_iterations must be an integer; got 'x'"),
        ("deviceIterations()", "TypeError", "missing 1 required positional argument"),
        ("deviceIterations(a)", "SyntaxError", "a is not allowed as an argument"),
        ("deviceIterations(1 + 1)", "SyntaxError", "1 + 1 is not allowed as an argument"),
        ("deviceIterations(*[1])", "SyntaxError", "*[1] is not allowed as an argument"),
        ("deviceIterations(**{'device_iterations': 1})", "SyntaxError", "is not allowed"),
        ("modelName(f'{1}')", "SyntaxError", "is not allowed as an argument"),
        ("modelName(open('x'))", "SyntaxError", "open is not allowed as an argument"),
        ("modelName(poptorch.Options())", "SyntaxError", "poptorch.Options is not allowed"),
        ("modelName(__import__('os').getcwd())", "SyntaxError", "__import__ is not allowed"),
        ("modelName('a'.upper())", "SyntaxError", "'a'.upper is not allowed as an argument"),
        ("modelName([x for x in 'a'])", "SyntaxError", "is not allowed as an argument"),
        ("modelName((lambda: 'a')())", "SyntaxError", "is not allowed as an argument"),
        ("setAvailableMemoryProportion({**{}})", "SyntaxError", "is not allowed as an argument"),
        ("outputMode(poptorch.OutputMode.Some)", "SyntaxError", "poptorch.OutputMode.Some is not allowed"),
        ("outputMode(poptorch.enums.enum.IntEnum)", "SyntaxError", "is not allowed as an argument"),
        ("Precision.setPartialsType(torch.load)", "SyntaxError", "torch.load is not allowed"),
        (
            "setExecutionStrategy(poptorch.Stage('A').__init__('B'))",
            "AttributeError",
            "Stage has no setter '__init__'. It has: ipu.",
        ),
        ("modelName('\0')", "SyntaxError", "null bytes"),
        (f"modelName({'(' * 5000})", "MemoryError|SyntaxError", "|too many nested parentheses"),
    ],
)
def test_lines_that_are_refused(tmp_path, line, kind, detail):
    path = tmp_path / "mine.conf"
    path.write_text(f"replicationFactor(3)\n\n# a comment\n  {line}\nreplicationFactor(4)\n")
    options = Options()
    with pytest.raises(ConfigFileError) as caught:
        options.loadFromFile(str(path))
    assert re.match(f"({kind}) at line 4 of mine.conf: ", str(caught.value))
    assert any(one in str(caught.value) for one in detail.split("|"))
    assert str(caught.value).endswith(f"\n> options.{line}")
    assert options.replication_factor == 3
    assert options.device_iterations == 1


def test_the_text_of_a_config_file_s_error(tmp_path):
    path = tmp_path / "tmp.conf"
    path.write_text("deviceIterations(1\n")
    with pytest.raises(ConfigFileError) as caught:
        Options().loadFromFile(path)
    assert str(caught.value) == (
        "SyntaxError at line 1 of tmp.conf: '(' was never closed\n> options.deviceIterations(1"
    )


def test_nothing_of_a_config_file_is_executed(tmp_path):
    """Arguments are read before a setter is called, and a call's own before what it is called on."""
    with pytest.raises(ConfigFileError, match="SyntaxError"):
        options = Options()
        load(tmp_path, f"deviceIterations(2).logDir(open({str(tmp_path / 'made')!r}, 'w'))", options)
    assert options.device_iterations == 1
    assert not (tmp_path / "made").exists()


def test_a_missing_config_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(tmp_path / "nothing.conf")


# JSON and the environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", lambda o: o),
        (
            '{"deviceIterations": 2, "replicationFactor": 1, "logDir": "x", "enableSyntheticData": true}',
            lambda o: o.deviceIterations(2).logDir("x").enableSyntheticData(True),
        ),
        (
            '{"Precision.enableFloatingPointExceptions": true}',
            lambda o: o.Precision.enableFloatingPointExceptions(True),
        ),
        (
            '{"connectionType": "ConnectionType.OnDemand"}',
            lambda o: o.connectionType(ConnectionType.OnDemand),
        ),
        (
            '{"outputMode": ["poptorch.OutputMode.EveryN", 2]}',
            lambda o: o.outputMode(OutputMode.EveryN, 2),
        ),
        ('{"updatableNamedBuffers": [["a", "b"]]}', lambda o: o.updatableNamedBuffers(["a", "b"])),
        (
            '{"setAvailableMemoryProportion": {"IPU0": 0.5}}',
            lambda o: o.setAvailableMemoryProportion({"IPU0": 0.5}),
        ),
        ('{"maxRepeatLogs": null}', lambda o: o.maxRepeatLogs(None)),
        ('{"disableModuleNamescope": []}', lambda o: o.disableModuleNamescope()),
        (
            '{"setExecutionStrategy": "AutoStage.AutoIncrement"}',
            lambda o: o.setExecutionStrategy(AutoStage.AutoIncrement),
        ),
        ('{"Precision.setPartialsType": "torch.half"}', lambda o: o.Precision.setPartialsType(torch.half)),
        ('{"modelName": "OutputMode.Alles"}', lambda o: o.modelName("OutputMode.Alles")),
    ],
)
def test_json(monkeypatch, text, expected):
    options = Options()
    expected(options)
    made = Options()
    assert made.from_json(text) is made
    assert made == options
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
    assert Options() == options
    assert repr(Options()) == repr(options)


@pytest.mark.parametrize("kind", enums.__all__)
def test_every_enumeration_is_known_by_name(kind):
    for member in getattr(enums, kind):
        assert find_value(f"{kind}.{member.name}") is member
        assert find_value(f"poptorch.{kind}.{member.name}") is member
        assert find_value(f"poptorch.enums.{kind}.{member.name}") is member
        assert find_value(member.name) is None


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("deviceIterations(4)", ValueError, "must be JSON"),
        ("[1]", ValueError, "must be a JSON object.*it is '.1.'"),
        ('{"deviceIteration": 1}', AttributeError, "has no setter 'deviceIteration'"),
        ('{"Train.gradientAccumulation": 1}', AttributeError, "no group 'Train'"),
        ('{"freeze": []}', AttributeError, "has no setter 'freeze'"),
        ('{"Training.loadFromFile": "x"}', AttributeError, "has no setter 'loadFromFile'"),
        ('{"deviceIterations": "4"}', AssertionError, "must be an integer; got '4'"),
        ('{"deviceIterations": 0}', ValueError, "must be at least 1; got 0"),
        ('{"deviceIterations": [1, 2]}', TypeError, "positional arguments"),
    ],
)
def test_json_that_is_refused(monkeypatch, text, error, match):
    with pytest.raises(error, match=match):
        Options().from_json(text)
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
    with pytest.raises(error, match=match) as caught:
        Options()
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "The environment variable POPTORCH_DEFAULT_OPTIONS" in told


def test_the_environment_may_name_a_config_file(monkeypatch, tmp_path):
    (tmp_path / "mine.conf").write_text("setExecutionStrategy(poptorch.ShardedExecution('A', 'B'))")
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS", json.dumps({"loadFromFile": str(tmp_path / "mine.conf")})
    )
    assert Options().execution_strategy == ShardedExecution("A", "B")


def test_the_cache_directory(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert Options().executable_cache_path is None
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/cache")
    assert Options().executable_cache_path == "/cache"
    assert Options().enableExecutableCaching(None).executable_cache_path is None
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "/other"}')
    assert Options().executable_cache_path == "/other"


# The page


def test_the_page_has_every_option():
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    assert sorted(setter for setter, *_rest in rows) == sorted(set(all_setters()))
    for setter, names, defaults, what in rows:
        group = find(Options(), setter)[0]
        names = re.findall(r"`(\w+)`", names)
        settings = [group.settings[name] for name in names]
        texts = [text.strip().strip("`").strip('"') for text in defaults.split(",")]
        for setting, text in zip(settings, texts, strict=True):
            value = setting.default
            value = "none" if value is UNSET else getattr(value, "name", value)
            assert text.replace("PipelinedExecution()", "PipelinedExecution(AutoStage.SameAsIpu)") == str(
                value
            )
        assert any(setting.no_effect for setting in settings) == ("o effect" in what)
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+) \|$", PAGE.read_text(), re.M)
    assert {key for _setter, key, _what in rows} == set(TensorLocationSettings.settings)
    for setter, key, what in rows:
        assert is_configurable(getattr(TensorLocationSettings, setter))
        assert bool(TensorLocationSettings.settings[key].no_effect) == ("No effect" in what)


def test_options_of_popart(caplog, monkeypatch):
    monkeypatch.setattr(logs, "_said", set())
    options = Options()
    assert options._Popart.set("enableOutlining", False) is options._Popart
    options.clone()._Popart.setPatterns({"TiedGather": True}, level=0)
    options.freeze()
    pickle.loads(pickle.dumps(options.clone()))._Popart.set("enableOutlining", False)
    assert [record.getMessage().split(" has no effect")[0] for record in caplog.records] == [
        "poptorch.Options()._Popart.set('enableOutlining', False)",
        "poptorch.Options()._Popart.setPatterns({'TiedGather': True}, 0)",
    ]
