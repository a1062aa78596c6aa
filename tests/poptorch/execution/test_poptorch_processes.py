"""PopTorch's models in several processes: equal to plain torch over the data of all of them."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.engine import peers
from ipu_pipeline.poptorch.execution import process_groups
from tests.support import joined
from tests.support import poptorch_processes as processes
from tests.support.poptorch_front import assert_close, join, make_options, reference, second, seeded
from tests.support.poptorch_processes import ACCUMULATION, CALLS, ITERATIONS, make_call, own_part, run

TRAINED = {
    # First, as it needs most devices; a process has two more than its replicas take.
    "three replicas": {"replicas": 3},
    "pipelined": {},
    "offloaded": {"make_optimizer": processes.make_adam, "offloads": True},
}
IN_FLOAT64 = {
    "sum, two replicas": {"reduction": "Sum", "replicas": 2},
    "sharded": {"strategy": "sharded"},
    "offloaded": TRAINED["offloaded"],
}
RUN_ALIKE = {
    "sum, two replicas": {"mode": "Sum", "replicas": 2},
    "every": {"mode": "EveryN", "replicas": 2},
    "one stage": {"mode": "Final", "strategy": "one stage"},
}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    """A folder, and what each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    arguments = TRAINED, RUN_ALIKE, IN_FLOAT64, str(folder)
    return folder, run(processes.do_all, 2, *arguments, directory=folder / "run", timeout=1800)


@pytest.fixture(scope="module")
def found_by_others(tmp_path_factory):
    """Likewise, of processes that differ."""
    folder = tmp_path_factory.mktemp("others")
    return folder, run(processes.differ, 2, str(folder), directory=folder / "run", timeout=1800)


def results_of(found, name):
    """What each process found of a part; raises what was raised there."""
    for own in found[1]:
        if isinstance(own[name], Exception):
            raise own[name]
    return [own[name] for own in found[1]]


@pytest.mark.thorough  # two processes that import torch take 11 s of CPU time
def test_two_processes_train_a_model(found_by_others):
    made = results_of(found_by_others, "one layer")
    plain = reference(seeded(processes.OneLayer), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for call in range(2):
        expected = torch.stack(plain.train(make_call(call, 2, 2), 1, 4, lambda loss: loss)).detach()
        for index, (losses, _weights, _said) in enumerate(made):
            assert_close([losses[call]], own_part((expected,), 2, index, 2))
    for _losses, weights, (said,) in made:
        assert_close(weights.values(), plain.model.state_dict().values())
        assert "weights differ between the 2 processes: linear.weight, linear.bias. Give all" in said


def check_all(made, cases, tolerance):
    """Compares what `train` returned in each process, with OutputMode.All, with plain torch."""
    for name, given in cases.items():
        results = [one[name] for one in made]
        dtype = results[0][0][0][0].dtype
        number = given.get("replicas", 1) * len(made)
        is_adam = given.get("make_optimizer") is processes.make_adam
        make_adam = functools.partial(torch.optim.Adam, lr=0.01)
        model = seeded(processes.TwoLayers).to(dtype)
        plain = reference(model, make_adam if is_adam else processes.make_sgd)
        for call in range(CALLS):
            batch, is_mean = make_call(call, number, dtype=dtype), given.get("reduction") != "Sum"
            expected = join(plain.train(batch, ITERATIONS, ACCUMULATION * number, second, is_mean))
            for index, (outputs, _weights, _state) in enumerate(results):
                wanted = own_part(expected, ITERATIONS * ACCUMULATION, index, len(made))
                assert_close(outputs[call], wanted, tolerance)
        (x, _target) = make_call(0, number, ITERATIONS, dtype)
        inferred = plain.model(x).detach()
        for index, (outputs, weights, _state) in enumerate(results):
            assert_close(outputs[CALLS], own_part((inferred,), ITERATIONS, index, len(made)), tolerance)
            assert_close(weights.values(), plain.model.state_dict().values(), tolerance)
            torch.testing.assert_close(weights, results[0][1], rtol=0, atol=0)


@pytest.mark.thorough
def test_strategies_reductions_and_optimizers(found_by_two):
    check_all(results_of(found_by_two, "trained"), TRAINED, 1e-5)
    check_all(results_of(found_by_two, "in float64"), IN_FLOAT64, 1e-12)


def test_processes_that_have_not_joined():
    options = make_options()
    options.Distributed.configureProcessId(1, 2)
    message = "process 1 of 2, but it has joined none. Start the program by"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(processes.OneLayer(), options)


class OtherProcess:
    """Stands for a run of two processes, the other of which has other weights."""

    index, count = 0, 2

    def exchange(self, what, text):
        assert what == "PopTorch: The weights"
        own = json.loads(text)
        return [text, json.dumps({**own, "linear.bias": "float32[3] 0123", "more": "float32[] 45"})]


def test_weights_that_differ_are_named(monkeypatch):
    monkeypatch.setattr(peers, "_current", OtherProcess())
    said = "The weights differ between the 2 processes: linear.bias, more. Give all processes the same"
    with pytest.raises(poptorch.Error, match=said):
        process_groups.compare_weights(processes.OneLayer(), process_groups.Processes(0, 2))


def test_micro_batches_are_dealt_to_the_replicas_of_all_processes():
    """Process 1 of 4, with 2 replicas in each: something stands in place of what the others have."""
    options = make_options(accumulation=2).replicationFactor(8)
    executor = poptorch.trainingModel(processes.OneLayer(), options)
    executor.compile(*make_call(0, 8, 2))
    compiled = executor._compiled
    compiled._processes = process_groups.Processes(1, 4)
    own = [(number,) for number in range(4)]
    dealt = [None if leaves is compiled.program.stand_ins else leaves for leaves in compiled._deal(own)]
    assert dealt == [None, None, *own[:2], *[None] * 4, None, None, *own[2:], *[None] * 4]


@pytest.mark.thorough
def test_output_modes_are_those_of_as_many_replicas_in_one_process(found_by_two):
    made = results_of(found_by_two, "alike")
    for name, given in RUN_ALIKE.items():
        replicas = given.get("replicas", 1)
        outputs, weights, _state = processes.train(**{**given, "replicas": 2 * replicas})
        for index, (own, own_weights, _state) in enumerate(one[name] for one in made):
            assert_close(own_weights.values(), weights.values())
            for mine, expected in zip(own, outputs, strict=True):
                # EveryN gives 2 of a call of training, and 1 of one of inference.
                rounds = 2 if given["mode"] == "EveryN" and len(mine) > 1 else 1
                wanted = own_part(expected, rounds, index, 2)
                assert_close(mine, [w.reshape(m.shape) for m, w in zip(mine, wanted, strict=True)])
                least = 0 if replicas == 1 else 1
                assert [m.dim() for m in mine] == [e.dim() if e.dim() > 1 else least for e in expected]


@pytest.mark.thorough
def test_buffers_and_random_numbers_are_those_of_replicas(found_by_two):
    made = results_of(found_by_two, "buffers")
    outputs, weights, _state = processes.train(make_model=processes.make_with_buffers, replicas=2)
    means = [own_weights.pop("norm.running_mean") for _outputs, own_weights, _state in made]
    variances = [own_weights.pop("norm.running_var") for _outputs, own_weights, _state in made]
    assert_close([means[0]], [weights.pop("norm.running_mean")])
    assert_close([variances[0]], [weights.pop("norm.running_var")])
    assert (means[0] != means[1]).all()
    for index, (own, own_weights, _state) in enumerate(made):
        assert_close(own_weights.values(), weights.values())
        for mine, expected in zip(own, outputs, strict=True):
            assert_close(mine, own_part(expected, ITERATIONS * ACCUMULATION, index, 2))


@pytest.mark.thorough
def test_checkpoints_and_values_that_change(found_by_two, tmp_path):
    made = results_of(found_by_two, "steps")
    alone = processes.go_through(str(tmp_path))
    for own in made:
        for mine, expected in zip(own, alone, strict=True):
            assert_close(mine.values(), expected.values())


@pytest.mark.thorough
def test_data_loader(found_by_two):
    made = results_of(found_by_two, "loaded")
    plain = reference(seeded(processes.TwoLayers), processes.make_sgd)
    assert [len(batches) for batches, _losses, _weights in made] == [2, 2]
    rows = {tuple(row.tolist()) for batches, *_rest in made for x, _target in batches for row in x}
    assert len(rows) == 48
    for call in range(2):
        parts = zip(*(batches[call] for batches, _losses, _weights in made), strict=True)
        batch = [torch.stack([p.reshape(4, 3, 3) for p in part], 1).reshape(24, 3) for part in parts]
        (_outputs, losses) = join(plain.train(batch, ITERATIONS, 2 * ACCUMULATION, second))
        for index, (_batches, own, _weights) in enumerate(made):
            assert_close([own[call]], own_part((losses,), 4, index, 2))
    for index, (_batches, _losses, weights) in enumerate(made):
        assert_close(weights.values(), plain.model.state_dict().values())
        profile = found_by_two[0] / "profile" / "training" / f"process_{index}"
        assert any(profile.rglob("*.xplane.pb"))


@pytest.mark.thorough
def test_what_a_call_is_asked_for(found_by_two):
    made = results_of(found_by_two, "calls")
    whole, _counts, expected, _latency = processes.look_at_calls(4)
    rounds = ITERATIONS * ACCUMULATION
    for index, (hidden, counts, zeros, latency) in enumerate(made):
        assert_close([hidden], own_part((whole,), rounds, index, 2))
        assert counts == {2 * rounds}
        assert min(latency) > 0
        # Zeros as data: the weights of both are those after the call.
        assert_close([zeros], [expected])


FAULTS = {
    "another number": "Error: {path} says that this is process {other} of 2, but it has joined the others",
    "more": "Error: {path} says that this is process {own} of 3, but it has joined the others as process",
    "alone": "says that this is process 0 of 1, but it has joined the others as process {own} of 2. Leave",
    "phases": "NotImplementedError: poptorch.SerialPhasedExecution does not exist here yet for several",
    "sharding": "NotImplementedError: useReplicatedTensorSharding does not",
    "groups": "NotImplementedError: inputReplicaGrouping does not",
    "exceptions": "NotImplementedError: Precision.enableFloatingPointExceptions does not",
    "offline": "NotImplementedError: ConnectionType.Never (useOfflineIpuTarget) does not",
    "export": "NotImplementedError: compileAndExport does not",
    "load": "NotImplementedError: loadExecutable does not",
    "grouped parameters": "NotImplementedError: replicaGrouping does not",
    "replicas": "Options.replication_factor: '1' in process 0, '2' in process 1",
    "rows": "the arguments: 'x: torch.float32[4, 3], target: torch.float32[4, 3]' in process 0, 'x: torch",
    "rates": "the optimizer's values: \"[{{'dampening': 0.0, 'lr': 0.1, ",
    "weights": "Error: The weights differ between the 2 processes: first.weight, first.bias, second.weight",
    "seeds": "the seed (Options.randomSeed, or torch.manual_seed): '0' in process 0, '1' in process 1",
    "alike": "nothing",
    "new rates": "the optimizer's values",
    "new weights": "Error: The weights differ between the 2 processes: model/second.bias. Give",
    "alike again": "nothing",
    "straddling": "ValueError: gathers_outputs=False needs each replica in one process; replica 0 is in 2.",
}


@pytest.mark.thorough
def test_differences_and_what_several_processes_cannot_do_are_named(found_by_others):
    made = results_of(found_by_others, "faults")
    for index, (found, weights) in enumerate(made):
        texts = {"path": "poptorch.Options().Distributed", "own": index, "other": 1 - index}
        assert found.keys() == FAULTS.keys()
        for name, text in FAULTS.items():
            assert text.format(**texts) in found[name], (name, found[name])
        torch.testing.assert_close(weights, made[0][1], rtol=0, atol=0)


@pytest.mark.soak  # two processes killed or not, each imports torch
@pytest.mark.parametrize(("how", "said"), [("killed", "has died"), ("ended", "process 1 has ended")])
def test_a_process_that_is_gone(tmp_path, how, said):
    started = joined.start(processes.lose_another, 2, None, how, directory=tmp_path, joins_itself=True)
    try:
        assert started[0].wait() == 1
        log = (tmp_path / "log0").read_text()
        assert said in log, log
        started[1].wait()
    finally:
        joined.end(started)


@pytest.mark.thorough
def test_the_tutorial_unchanged():
    """Started by the launcher; one of the processes is shown."""
    program = joined.ROOT / "tutorial" / "poptorch" / "mnist_pipeline.py"
    command = [sys.executable, "-m", "ipu_pipeline", "launch", "-n", "2", program]
    command += ["--dataset", "digits", "--batch-size", "4", "--epochs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(joined.ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Program ran successfully") == 1
    assert "of 180 images" in ended.stdout
