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

import ipu_pipeline.poptorch as poptorch
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
from ipu_pipeline.poptorch.options.option_texts import find_value
from ipu_pipeline.poptorch.options.options import AnchoredTensor
from ipu_pipeline.poptorch.options.strategies import (
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from tests.support import pages

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "poptorch_options.md"

DEFAULTS = "POPTORCH_DEFAULT_OPTIONS"
GROUPS = ["", "Training", "Precision", "Jit", "Distributed", "TensorLocations"]

OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)
NAMES = {"poptorch": poptorch, "torch": torch, "np": np, "pathlib": pathlib, "schedules": schedules}
NAMES |= vars(enums) | {"OFF_CHIP": OFF_CHIP}


def call(options, text):
    """Calls a setter as it is written."""
    return eval(f"options.{text}", {**NAMES, "options": options})  # noqa: S307  # it is ours


# A setter as it is called, and what it sets.
SETTERS = {
    "deviceIterations(7)": {"device_iterations": 7},
    "deviceIterations(np.int64(3))": {"device_iterations": 3},
    "setExecutionStrategy(poptorch.ShardedExecution('A'))": {"execution_strategy": ShardedExecution("A")},
    "setExecutionStrategy(AutoStage.AutoIncrement)": {
        "execution_strategy": PipelinedExecution(AutoStage.AutoIncrement)
    },
    "setPipelineSchedule('sequential')": {"pipeline_schedule": "sequential"},
    "setPipelineSchedule(schedules.interleaved)": {"pipeline_schedule": schedules.interleaved},
    "outputMode(OutputMode.All)": {"output_mode": OutputMode.All, "output_return_period": 1},
    "outputMode(OutputMode.EveryN, 3)": {"output_mode": OutputMode.EveryN, "output_return_period": 3},
    "randomSeed(42)": {"random_seed": 42},
    "enableExecutableCaching('/x')": {"executable_cache_path": "/x"},
    "enableExecutableCaching(pathlib.Path('/x'))": {"executable_cache_path": "/x"},
    "enableExecutableCaching(None)": {"executable_cache_path": None},
    "enableSyntheticData(True)": {"synthetic_data": True},
    "enableSyntheticData(2)": {"synthetic_data": True},  # one of PopART's modes of them
    "enableStableNorm(True)": {"stable_norm": True},
    "splitAutomatically(4)": {"num_split_ipus": 4},
    "allowNewShapes(True, 3)": {"allow_new_shapes": True, "max_shapes": 3},
    "updatableNamedBuffers(['a', 'b'])": {"updatable_named_buffers": ["a", "b"]},
    "relaxOptimizerAttributesChecks()": {"relax_optimizer_attributes_checks": True},
    "checkIndices()": {"index_checks": True},
    "allowValueBranches(True)": {"value_branches": True},
    "replicationFactor(8)": {"replication_factor": 8},
    "inputReplicaGrouping(1, CommGroupType.Orthogonal)": {
        "input_group_size": 1,
        "input_cgt": CommGroupType.Orthogonal,
    },
    "broadcastBuffers(False)": {"broadcast_buffers": False},
    "broadcastBuffers()": {"broadcast_buffers": True},
    "autoRoundNumIPUs()": {"auto_round_num_ipus": True},
    "useIpuModel(False)": {"use_model": False},
    "useIpuId(3)": {"ipu_id": 3},
    "useOfflineIpuTarget()": {"ipu_version": 2, "connection_type": ConnectionType.Never},
    "connectionType(ConnectionType.OnDemand)": {"connection_type": ConnectionType.OnDemand},
    "syncPattern(SyncPattern.SinglePipeline)": {"sync_pattern": SyncPattern.SinglePipeline},
    "setAvailableMemoryProportion({'IPU0': 0.5, 'IPU12': 1})": {
        "available_memory_proportion": {0: 0.5, 12: 1.0}
    },
    "logDir('/tmp')": {"log_dir": "/tmp"},  # noqa: S108  # nothing is written
    "maxRepeatLogs(None)": {"max_repeat_logs": None},
    "maxRepeatLogs(2)": {"max_repeat_logs": 2},
    "modelName('m')": {"model_name": "m"},
    "anchorTensor('a', 'b')": {"anchored_tensors": {"a": AnchoredTensor("b", None, 1)}},
    "anchorTensor('a', 'b', OutputMode.EveryN, 2)": {
        "anchored_tensors": {"a": AnchoredTensor("b", OutputMode.EveryN, 2)}
    },
    "logCycleCount(True)": {"log_cycle_count": True},
    "enableProfiling()": {"profiling": True, "profile_dir": None},
    "enableProfiling('p')": {"profiling": True, "profile_dir": "p"},
    "disableModuleNamescope()": {"module_namescope": False},
    "sourceLocationExcludes(['a'])": {"source_location_excludes": ["a"]},
    "appendToLocationExcludes('a', 'b')": {"source_location_excludes": ["a", "b"]},
    "showCompilationProgressBar(False)": {"show_compilation_progress_bar": False},
    "Training.gradientAccumulation(5)": {"gradient_accumulation": 5},
    "Training.accumulationAndReplicationReductionType(ReductionType.Sum)": {
        "accumulation_and_replication_reduction_type": ReductionType.Sum
    },
    "Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)": {
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Running
    },
    "Training.setAutomaticLossScaling(True)": {"automatic_loss_scaling": True},
    "Training.setConvolutionDithering(True)": {"convolution_dithering": True},
    "Precision.enableFloatingPointExceptions(True)": {"floating_point_exceptions": True},
    "Precision.enableStochasticRounding(True)": {"stochastic_rounding": True},
    "Precision.setPartialsType(torch.half)": {"partials_type": torch.float16},
    "Jit.traceModel(False)": {"trace_model": False},
    "Distributed.configureProcessId(2, 3)": {
        "distributed_process_id": 2,
        "num_distributed_processes": 3,
        "processId": 2,
        "numProcesses": 3,
    },
    "Distributed.setEnvVarNames('NO_SIZE', 'NO_RANK')": {"processId": 0, "numProcesses": 1},
    "Distributed.disable()": {"processId": 0, "numProcesses": 1},
    **{
        f"TensorLocations.set{kind}Location(OFF_CHIP)": {f"location_{kind.lower()}": {"onChip": 0}}
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
    },
    "TensorLocations.numIOTiles(192)": {"num_io_tiles": 192},
}
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
    for name in (DEFAULTS, "POPTORCH_CACHE_DIR", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logs, "_said", set())
    level, state = logs.logger.level, torch.get_rng_state()
    logs.logger.setLevel(logging.WARNING)
    yield
    logs.logger.setLevel(level)
    torch.set_rng_state(state)


def group_of(options, name):
    return getattr(options, name) if name else options


def owner_of(options, text):
    """The group of a setter that is called, by its name or in full."""
    return group_of(options, text.partition("(")[0].rpartition(".")[0])


def setters_of(kind):
    return [name for name in dir(kind) if is_configurable(getattr(kind, name))]


def all_setters():
    options = Options()
    for group in GROUPS:
        yield from (f"{group}.{name}".lstrip(".") for name in setters_of(type(group_of(options, group))))


# Values


def values_of(group):
    return {name: getattr(group, name) for name in group.settings if hasattr(group, name)}


def test_nothing_is_set_at_first():
    for group in GROUPS:
        options = group_of(Options(), group)
        for name in options.settings:
            assert not options.is_set(name)
            if name not in values_of(options):
                with pytest.raises(AttributeError, match=f"{name} has no value yet"):
                    getattr(options, name)
        defaults = {name: setting.default for name, setting in options.settings.items()}
        assert values_of(options) == {n: value for n, value in defaults.items() if value is not UNSET}


def test_setters():
    for text in SETTERS:
        options, expected = Options(), SETTERS[text]
        group = owner_of(options, text)
        assert call(options, text) is (None if text.startswith("broadcastBuffers") else group)
        for name, value in expected.items():
            assert getattr(group, name) == value
            assert type(getattr(group, name)) is type(value)
            assert group.is_set(name) or name in ("processId", "numProcesses")
        for name in GROUPS:  # and nothing else
            found, before = (values_of(group_of(one, name)) for one in (options, Options()))
            assert {**found, **expected} == {**before, **expected}


def test_every_setter_is_tested():
    assert sorted(all_setters()) == sorted({text.partition("(")[0] for text in SETTERS})
    names = {name for name, _value, _dict in LOCATION_SETTERS}
    assert names == set(setters_of(TensorLocationSettings))


def test_location_settings():
    for name, value, expected in LOCATION_SETTERS:
        settings = TensorLocationSettings()
        assert settings.to_dict() == {}
        assert getattr(settings, name)(value) is settings
        assert settings.to_dict() == expected
        assert type(next(iter(settings.to_dict().values()))) is int


def test_locations_are_kept_as_they_were_given_and_named_as_the_engine_does():
    options = Options()
    locations = options.TensorLocations
    settings = TensorLocationSettings().useOnChipStorage(True)
    assert locations.find_offloaded(True) == []
    locations.setActivationLocation(settings)
    settings.useOnChipStorage(False)
    assert locations.location_activation == {"onChip": 1}
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


def test_chains_keywords_and_names():
    options = Options().deviceIterations(device_iterations=2).replicationFactor(4).useIpuModel(True)
    assert (options.device_iterations, options.replication_factor, options.use_model) == (2, 4, True)
    options.Training.gradientAccumulation(3).setAutomaticLossScaling(True)
    assert options.Training.gradient_accumulation == 3
    assert options.Training.automatic_loss_scaling
    assert options.defaultOutputMode()
    options.outputMode(OutputMode.EveryN, output_return_period=2)
    assert options.output_return_period == 2
    assert not options.outputMode(OutputMode.Sum).defaultOutputMode()
    assert options.output_return_period == 1
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


def test_processes_by_the_launcher(monkeypatch):
    ours = {"IPU_PIPELINE_NUM_PROCESSES": "5", "IPU_PIPELINE_PROCESS_ID": "2"}
    for variables, expected in (
        ({}, (0, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": " 3"}, (3, 4)),
        (ours, (2, 5)),  # beside the others
    ):
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

WRONG = {
    AssertionError: {
        "deviceIterations('2')": r"Options\(\).device_iterations must be an integer; got '2'",
        "deviceIterations(True)": "must be an integer; got True",
        "deviceIterations(2.0)": "must be an integer; got 2.0",
        "setExecutionStrategy('A')": "must be a strategy.*got 'A'",
        "outputMode(2)": "output_mode must be one of OutputMode.*; got 2",
        "outputMode(OutputMode.EveryN)": "EveryN needs output_return_period",
        "outputMode(OutputMode.EveryN, '2')": "period must be an integer; got '2'",
        "randomSeed(1.5)": "random_seed must be an integer; got 1.5",
        "enableExecutableCaching(b'x')": "must be a path; got b'x'",
        "splitAutomatically(True)": "num_split_ipus must be an integer; got True",
        "allowNewShapes(True, 2.0)": "max_shapes must be an integer; got 2.0",
        "updatableNamedBuffers('ab')": "must be a list of strings; got 'ab'",
        "updatableNamedBuffers(['a', 1])": "must be a list of strings",
        "replicationFactor(2.0)": "must be an integer; got 2.0",
        "inputReplicaGrouping(1, 1)": "must be one of CommGroupType.*; got 1",
        "inputReplicaGrouping('1', CommGroupType.Consecutive)": "must be an integer",
        "useIpuId('0')": "ipu_id must be an integer; got '0'",
        "useOfflineIpuTarget('2')": "ipu_version must be an integer",
        "syncPattern('Full')": "must be one of SyncPattern.*; got 'Full'",
        "connectionType(0)": "must be one of ConnectionType.*; got 0",
        "setAvailableMemoryProportion({'0': 0.5})": "keys as \"IPU0\"; got '0'",
        "setAvailableMemoryProportion({0: 0.5})": 'keys as "IPU0"; got 0',
        "setAvailableMemoryProportion({'IPUx': 0.5})": "got 'IPUx'",
        "setAvailableMemoryProportion(0.5)": "must be a dict as .*; got 0.5",
        "setAvailableMemoryProportion({'IPU0': 'x'})": "must be a number; got 'x'",
        "logDir(1)": "log_dir must be a path; got 1",
        "maxRepeatLogs('4')": "max_repeat_logs must be an integer; got '4'",
        "modelName(None)": "model_name must be a string; got None",
        "anchorTensor(1, 'x')": "short_name must be a string; got 1",
        "anchorTensor('x', None)": "long_name must be a string; got None",
        "anchorTensor('x', 'y', 'All')": "output_mode must be one of OutputMode.Final",
        "enableProfiling(1)": "profile_dir must be a path; got 1",
        "sourceLocationExcludes('a')": "must be a list of strings; got 'a'",
        "appendToLocationExcludes(['a'])": "must be a list of strings",
        "Training.gradientAccumulation('x')": "must be an integer; got 'x'",
        "Training.setMeanAccumulationAndReplicationReductionStrategy(1)": "MeanReductionStrategy.*; got 1",
        "Distributed.configureProcessId('0', 2)": "process_id must be an integer",
        "Distributed.setEnvVarNames(1, 'x')": "name must be a string; got 1",
        "TensorLocations.setWeightLocation({})": "must be a poptorch.TensorLocationS",
        **{
            f"TensorLocations.numIOTiles({n!r})": "an even number between 32 and 192\\."
            for n in (30, 33, 194, "32", True)
        },
        **{  # all that are a bool
            text.replace("()", "(1)").replace("True", "1").replace("False", "1"): "be True or False; got 1"
            for text, expected in SETTERS.items()
            if isinstance(next(iter(expected.values())), bool)
            and not text.startswith(("enableProfiling", "enableSyntheticData", "disable"))
        },
    },
    ValueError: {
        "deviceIterations(0)": "device_iterations must be at least 1; got 0",
        "setPipelineSchedule('fast')": "one of grouped .*interleaved .1f1b, ",
        "outputMode(OutputMode.EveryN, 0)": "period must be at least 1; got 0",
        "randomSeed(-1)": "random_seed must be at least 0; got -1",
        "enableExecutableCaching('')": "must be a path; got an empty string",
        "splitAutomatically(0)": "num_split_ipus must be at least 1; got 0",
        "allowNewShapes(True, 0)": "max_shapes must be at least 1; got 0",
        "replicationFactor(0)": "must be at least 1; got 0",
        "inputReplicaGrouping(1, CommGroupType.All)": "must not be .*CommGroupType.All",
        "inputReplicaGrouping(2, CommGroupType.Consecutive)": "a factor of replicat.*got 2",
        "inputReplicaGrouping(0, CommGroupType.Consecutive)": "must be at least 1; got 0",
        "inputReplicaGrouping(2, CommGroupType.NoGrouping)": "must be 1 with .*got 2",
        "useIpuId(-1)": "ipu_id must be at least 0; got -1",
        "setAvailableMemoryProportion({'IPU0': 1.5})": "must be from 0 to 1; got 1.5",
        "anchorTensor('x', 'y', OutputMode.EveryN, 0)": "must be at least 1; got 0",
        "Training.gradientAccumulation(0)": "Training.gradient_accumulation must be at",
        "Training.accumulationAndReplicationReductionType(ReductionType.NoReduction)": (
            "must be poptorch.ReductionType.Sum or poptorch.ReductionType.Mean; got"
        ),
        "Training.accumulationAndReplicationReductionType(1)": "Sum or .*Mean; got 1",
        "Precision.setPartialsType(torch.float64)": "torch.float32; got torch.float64",
        "Precision.setPartialsType('half')": "must be torch.float16 or .*; got 'half'",
        "Jit.traceModel(True)": "trace_model must be False; got True",
        "Distributed.configureProcessId(2, 2)": "below num_processes, 2; got 2",
        "Distributed.configureProcessId(-1, 2)": "process_id must be at least 0; got -1",
        "Distributed.configureProcessId(0, 0)": "num_processes must be at least 1; got 0",
    },
    TypeError: {
        "setPipelineSchedule(3)": "a function of .*; got 3",
        "setPipelineSchedule(lambda a, b: [])": r"must take .num_stages.* takes \(a, b\)",
    },
}


@pytest.mark.parametrize("error", WRONG)
def test_arguments_are_checked(error):
    options = Options()
    for text, match in WRONG[error].items():
        with pytest.raises(error, match=match) as caught:
            call(options, text)
        assert caught.type is error, text
    assert options == Options()
    settings = TensorLocationSettings()
    for name, _value, expected in LOCATION_SETTERS:
        kind = "an integer; got 'x'" if name.startswith("min") else "True or False; got 'x'"
        with pytest.raises(AssertionError, match=f"{next(iter(expected))} must be {kind}"):
            getattr(settings, name)("x")


def test_unknown_options():
    for group in GROUPS:
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

WITHOUT_EFFECT = {
    "enableStableNorm(True)": "stable_norm has no effect: norms are always",
    "syncPattern(SyncPattern.ReplicaAndLadder)": "sync_pattern has no effect: devices wait",
    "setAvailableMemoryProportion({'IPU1': 0.1})": "available_memory_proportion has no effect: XLA",
    "maxRepeatLogs(None)": "max_repeat_logs has no effect: there is no log of Poplar",
    "useOfflineIpuTarget(21)": "ipu_version has no effect: there is no IPU",
    "outputMode(OutputMode.All, 3)": "output_return_period has no effect",
    "anchorTensor('a', 'b', OutputMode.All, 3)": "output_return_period has no effect",
    "anchorTensor('a', 'b', None, 3)": "output_return_period has no effect",
    "Training.setConvolutionDithering(True)": "convolution_dithering has no effect: it spreads",
    "Precision.enableStochasticRounding(True)": "stochastic_rounding has no effect: XLA rounds",
    "Precision.setPartialsType(torch.float32)": "partials_type has no effect: XLA decides",
    "TensorLocations.numIOTiles(64)": "num_io_tiles has no effect: tiles",
}


def test_what_has_no_effect_warns_once(caplog):
    for text in WITHOUT_EFFECT:
        logs._said.clear()
        caplog.clear()
        for _time in range(2):
            call(Options(), text)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert WITHOUT_EFFECT[text] in caplog.text
        assert "poptorch.Options()" in caplog.text


def test_locations_without_effect_warn(caplog):
    settings = TensorLocationSettings()
    for name, value in {
        "minElementsForOffChip": 4,
        "minElementsForReplicatedTensorSharding": 4,
        "useIOTilesToLoad": True,
        "useIOTilesToStore": True,
    }.items():
        caplog.clear()
        getattr(settings, name)(type(value)(0))
        assert not caplog.records
        getattr(settings, name)(value)
        assert f"poptorch.TensorLocationSettings().{name} has no effect: " in caplog.text


def test_nothing_else_warns(caplog):
    """Neither what has an effect, nor what asks for what is so anyway."""
    silent = 0
    for text, expected in SETTERS.items():
        options = Options()
        settings = owner_of(options, text).settings
        if any(settings[name].no_effect for name in expected if name in settings):
            continue
        call(options, text)
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
    for text in SETTERS:
        with pytest.raises(AttributeError, match="^Can't modify frozen Options$"):
            call(options, text)
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


def test_copies():
    for make in [Options.clone, copy.copy, copy.deepcopy, pickled]:
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


def test_copies_of_frozen_options(monkeypatch):
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
    options = Options()  # copies do not read the environment again
    monkeypatch.setenv(DEFAULTS, '{"deviceIterations": 9}')
    assert options.clone().device_iterations == 1
    assert pickled(options).device_iterations == 1
    assert Options().device_iterations == 9


def test_options_differ_by_a_value():
    options, others = Options(), Options()
    for text in ("deviceIterations(2)", "Training.gradientAccumulation(2)"):
        assert options == others
        call(options, text)
        assert options != others
        call(others, text)
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
    for name in GROUPS:
        group = group_of(options, name)
        assert not name or f"{name}={type(group).__name__}(" in text
        assert all(f"{name}={value!r}" in text for name, value in values_of(group).items())
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
    text = "deviceIterations(1)\nsetExecutionStrategy(poptorch.ShardedExecution())\n  replicationFactor(1)"
    text += "\n \nenableSyntheticData(True) # an inline comment\n# a comment\n\t# another\r\n"
    options = load(tmp_path, text)
    expected = Options().setExecutionStrategy(ShardedExecution()).enableSyntheticData(True)
    assert options == expected
    assert options.is_set("replication_factor")


def test_a_second_config_file_overrides_what_it_sets(tmp_path):
    options = load(tmp_path, "deviceIterations(2)\nreplicationFactor(2)")
    load(tmp_path, "deviceIterations(1)", options)
    assert (options.device_iterations, options.replication_factor) == (1, 2)
    assert options == Options().replicationFactor(2)


def test_lines_do_what_they_would_in_python(tmp_path):
    for line in [
        "outputMode(poptorch.OutputMode.EveryN, 2)",
        "outputMode(output_return_period=2, output_mode=poptorch.enums.OutputMode.EveryN)",
        "deviceIterations(2).replicationFactor(3)",
        "Training.gradientAccumulation(4).setAutomaticLossScaling(True)",
        "Precision.setPartialsType(torch.half)",
        "maxRepeatLogs(None)",
        "logDir('a#b')  # c",
        "updatableNamedBuffers(['a', 'b',])",
        'setAvailableMemoryProportion({"IPU0": 0.25})',
        'setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("A", "B").ipu(1), ["C"]))',
        "setExecutionStrategy(poptorch.AutoStage.AutoIncrement)",
        'setExecutionStrategy(poptorch.SerialPhasedExecution(poptorch.Phase(poptorch.Stage("A"), '
        'poptorch.Stage("B")).ipus(0, 1)).useSeparateBackwardPhase(True))',
        "disableModuleNamescope()",
    ]:
        options = Options()
        call(options, line)
        assert options != Options()
        assert load(tmp_path, line) == options


def test_lines_that_are_refused(tmp_path):
    for line, kind, detail in [
        ("outputMode(poptorch.OutputMode.All", "SyntaxError", "'(' was never closed"),
        ("deviceIterations(1) deviceIterations(2)", "SyntaxError", "invalid syntax"),
        ("device_iterations = 2", "SyntaxError", "invalid syntax"),
        ("deviceIterations", "SyntaxError", "a line must be a call of a setter"),
        ("Training", "SyntaxError", "a line must be a call of a setter"),
        ("deviceIterations(2) if True else 3", "SyntaxError", "a line must be a call of a setter"),
        ("deviceIterations(2)(3)", "SyntaxError", "options.deviceIterations(2) is no setter"),
        ("Trainings.gradientAccumulation(2)", "SyntaxError", "options.Trainings is no group of options"),
        ("deviceIteration(2)", "AttributeError", "Options has no setter 'deviceIteration'"),
        ("freeze()", "AttributeError", "Options has no setter 'freeze'"),
        ("loadFromFile('mine.conf')", "AttributeError", "Options has no setter 'loadFromFile'"),
        ("__init__()", "AttributeError", "Options has no setter '__init__'"),
        ("__class__.__bases__()", "SyntaxError", "options.__class__ is no group of options"),
        ("broadcastBuffers(False).deviceIterations(2)", "AttributeError", "NoneType has no setter"),
        ("deviceIterations(0)", "ValueError", "device_iterations must be at least 1; got 0"),
        ("deviceIterations('x')", "AssertionError", "device_iterations must be an integer; got 'x'"),
        ("deviceIterations()", "TypeError", "missing 1 required positional argument"),
        ("deviceIterations(a)", "SyntaxError", "a is not allowed as an argument"),
        ("deviceIterations(*[1])", "SyntaxError", "*[1] is not allowed as an argument"),
        ("deviceIterations(**{'device_iterations': 1})", "SyntaxError", "is not allowed"),
        ("modelName(poptorch.Options())", "SyntaxError", "poptorch.Options is not allowed"),
        ("modelName(open('x'))", "SyntaxError", "open is not allowed as an argument"),
        ("modelName(__import__('os').getcwd())", "SyntaxError", "__import__ is not allowed"),
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
    ]:
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


def test_nothing_of_a_config_file_is_executed(tmp_path):
    """Arguments are read before a setter is called, and a call's own before what it is called on."""
    with pytest.raises(ConfigFileError, match="SyntaxError"):
        options = Options()
        load(tmp_path, f"deviceIterations(2).logDir(open({str(tmp_path / 'made')!r}, 'w'))", options)
    assert options.device_iterations == 1
    assert not (tmp_path / "made").exists()
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(tmp_path / "nothing.conf")


# JSON and the environment


def test_json(monkeypatch):
    for text, line in [
        ("{}", "set()"),
        (
            '{"deviceIterations": 2, "replicationFactor": 1, "logDir": "x", "enableSyntheticData": true}',
            "deviceIterations(2).logDir('x').enableSyntheticData(True)",
        ),
        ('{"connectionType": "ConnectionType.OnDemand"}', "connectionType(ConnectionType.OnDemand)"),
        ('{"outputMode": ["poptorch.OutputMode.EveryN", 2]}', "outputMode(OutputMode.EveryN, 2)"),
        ('{"updatableNamedBuffers": [["a", "b"]]}', "updatableNamedBuffers(['a', 'b'])"),
        ('{"setAvailableMemoryProportion": {"IPU0": 0.5}}', "setAvailableMemoryProportion({'IPU0': 0.5})"),
        ('{"maxRepeatLogs": null}', "maxRepeatLogs(None)"),
        ('{"disableModuleNamescope": []}', "disableModuleNamescope()"),
        (
            '{"setExecutionStrategy": "AutoStage.AutoIncrement"}',
            "setExecutionStrategy(AutoStage.AutoIncrement)",
        ),
        ('{"Precision.setPartialsType": "torch.half"}', "Precision.setPartialsType(torch.half)"),
        ('{"modelName": "OutputMode.Alles"}', "modelName('OutputMode.Alles')"),
    ]:
        monkeypatch.delenv(DEFAULTS, raising=False)
        options = Options()
        call(options, line)
        made = Options()
        assert made.from_json(text) is made
        assert made == options
        monkeypatch.setenv(DEFAULTS, text)
        assert Options() == options
        assert repr(Options()) == repr(options)


def test_every_enumeration_is_known_by_name():
    for kind in enums.__all__:
        for member in getattr(enums, kind):
            assert find_value(f"{kind}.{member.name}") is member
            assert find_value(f"poptorch.{kind}.{member.name}") is member
            assert find_value(f"poptorch.enums.{kind}.{member.name}") is member
            assert find_value(member.name) is None


def test_json_that_is_refused(monkeypatch):
    for text, error, match in [
        ("deviceIterations(4)", ValueError, "must be JSON"),
        ("[1]", ValueError, "must be a JSON object.*it is '.1.'"),
        ('{"deviceIteration": 1}', AttributeError, "has no setter 'deviceIteration'"),
        ('{"Train.gradientAccumulation": 1}', AttributeError, "no group 'Train'"),
        ('{"Training.loadFromFile": "x"}', AttributeError, "has no setter 'loadFromFile'"),
        ('{"deviceIterations": "4"}', AssertionError, "must be an integer; got '4'"),
        ('{"deviceIterations": 0}', ValueError, "must be at least 1; got 0"),
        ('{"deviceIterations": [1, 2]}', TypeError, "positional arguments"),
    ]:
        monkeypatch.delenv(DEFAULTS, raising=False)
        with pytest.raises(error, match=match):
            Options().from_json(text)
        monkeypatch.setenv(DEFAULTS, text)
        with pytest.raises(error, match=match) as caught:
            Options()
        told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "The environment variable POPTORCH_DEFAULT_OPTIONS" in told


def test_the_environment_may_name_a_config_file(monkeypatch, tmp_path):
    (tmp_path / "mine.conf").write_text("setExecutionStrategy(poptorch.ShardedExecution('A', 'B'))")
    monkeypatch.setenv(DEFAULTS, json.dumps({"loadFromFile": str(tmp_path / "mine.conf")}))
    assert Options().execution_strategy == ShardedExecution("A", "B")


def test_the_cache_directory(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert Options().executable_cache_path is None
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/cache")
    assert Options().executable_cache_path == "/cache"
    assert Options().enableExecutableCaching(None).executable_cache_path is None
    monkeypatch.setenv(DEFAULTS, '{"enableExecutableCaching": "/other"}')
    assert Options().executable_cache_path == "/other"


# The page


def names_set_by(setter):
    """The names by which what a setter sets is read."""
    if setter.startswith("Distributed."):
        return ["distributed_process_id", "num_distributed_processes"]
    return next(list(names) for text, names in SETTERS.items() if text.partition("(")[0] == setter)


def test_the_pages_example(capsys):
    pages.execute(PAGE)
    assert capsys.readouterr().out == "4 16\n"


def test_the_page_has_every_option():
    page, told = PAGE.read_text(), set()
    with_effect, without = page.split("\n## Options without effect\n")
    for cell, defaults in re.findall(r"^\| (`[^|]+) \| ([^|]+) \| [^|]+ \|$", with_effect, re.M):
        for setter in re.findall(r"`([\w.]+)`", cell):
            settings = [owner_of(Options(), setter).settings[name] for name in names_set_by(setter)]
            texts = [text.strip().strip("`").strip('"') for text in defaults.split(",")]
            for setting, text in zip(settings, texts, strict=True):
                value = setting.default
                value = "none" if value is UNSET else getattr(value, "name", value)
                assert text.replace("Execution()", "Execution(AutoStage.SameAsIpu)") == str(value)
            assert not any(setting.no_effect for setting in settings if setting.name != "ipu_version")
            told.add(setter)
    others = re.findall(r"^\| (`[^|]+) \| [^|]+ \|$", without, re.M)
    for setter in re.findall(r"`([\w.]+)`", "".join(others)):
        if setter in (
            "Precision.autocastEnabled",
            "Precision.autocastPolicy",
            "Precision.halfFloatCasting",
        ):
            assert callable(getattr(Options().Precision, setter.partition(".")[2]))  # and sets nothing
        elif setter in TensorLocationSettings.settings:
            assert TensorLocationSettings.settings[setter].no_effect
            assert is_configurable(getattr(TensorLocationSettings, setter))
        else:
            (name,) = names_set_by(setter)
            assert owner_of(Options(), setter).settings[name].no_effect
            told.add(setter)
    assert told == set(all_setters())
    told = {
        f"{group}.{name}".lstrip(".") for group in GROUPS for name in group_of(Options(), group).settings
    }
    known = {
        f"{setter.rpartition('.')[0]}.{n}".lstrip(".")
        for setter in all_setters()
        for n in names_set_by(setter)
    }
    assert known == told
    for name, setting in TensorLocationSettings.settings.items():
        setter = name if setting.no_effect or name.startswith("use") else "useOnChipStorage"
        assert f"`{setter}" in (without if setting.no_effect else with_effect)


def test_options_of_popart(caplog, monkeypatch):
    monkeypatch.setattr(logs, "_said", set())
    options = Options()
    assert options._Popart.set("enableOutlining", False) is options._Popart
    options.clone()._Popart.setPatterns({"TiedGather": True}, level=0)
    options.freeze()
    pickle.loads(pickle.dumps(options.clone()))._Popart.set("enableOutlining", False)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options._Popart.set("a", 1)
    assert [record.getMessage().split(" has no effect")[0] for record in caplog.records] == [
        "poptorch.Options()._Popart.set('enableOutlining', False)",
    ]
    assert options._popart is options._Popart
