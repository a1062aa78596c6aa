"""What each of several processes does with models of PopTorch's front, for `tests.support.joined`."""

import copy
import os
import signal
import traceback

import jax
import numpy as np
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.engine.fronts import Hooks
from tests.support import joined
from tests.support.poptorch_front import TwoLayers, leaves, make_batch, make_options, make_sgd, seeded

STRATEGIES = {
    "pipelined": poptorch.PipelinedExecution(),
    "sharded": poptorch.ShardedExecution(),
    "one stage": poptorch.PipelinedExecution(poptorch.Stage("first", "second")),
}
ITERATIONS, ACCUMULATION, CALLS, ROWS = 2, 2, 2, 2


class WithBuffers(TwoLayers):
    """Batch normalization and dropout between two layers."""

    def __init__(self, probability):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.dropout = torch.nn.Dropout(probability)

    def forward(self, x, target=None):
        return super().forward(self.dropout(self.norm(x)), target)


def make_adam(parameters):
    return poptorch.optim.Adam(parameters, lr=0.01)


def run(function, count, *arguments, directory, timeout=300):
    """What a function returns in each process, which join by themselves."""
    directory.mkdir(exist_ok=True)
    started = joined.start(function, count, None, *arguments, directory=directory, joins_itself=True)
    return joined.finish(started, directory, timeout)


def own_part(batch, rounds, index, count):
    """What a process gives a call, or gets from it, of what all replicas have."""
    parts = []
    for tensor in batch:
        dealt = tensor.reshape(rounds, count, -1, *tensor.shape[1:])
        parts.append(dealt[:, index].reshape(-1, *tensor.shape[1:]))
    return tuple(parts)


def this_process():
    """Its number, and how many there are."""
    distributed = poptorch.Options().Distributed
    return distributed.processId, distributed.numProcesses


def make_call(number, num_replicas, rounds=ITERATIONS * ACCUMULATION, dtype=torch.float32):
    """The inputs and targets of a call, of all replicas."""
    return make_batch(ROWS * rounds * num_replicas, seed=number, dtype=dtype)


def train(
    replicas=1,
    strategy="pipelined",
    make_optimizer=make_sgd,
    make_model=TwoLayers,
    dtype=torch.float32,
    reduction="Mean",
    mode="All",
    offloads=False,
    is_inferred=True,
    calls=CALLS,
):
    """Trains a model with the data of this process; in one process alone, with those of all.

    Returns:
      The outputs of each call, those of inference at the end, the weights, and the optimizer's state.
    """
    index, count = this_process()

    def configure(*args):
        options = make_options(*args).outputMode(poptorch.OutputMode[mode], 2 if mode == "EveryN" else None)
        options.replicationFactor(replicas).autoRoundNumIPUs(True).broadcastBuffers(make_model is TwoLayers)
        return options

    options = configure(ITERATIONS, ACCUMULATION, STRATEGIES[strategy])
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType[reduction])
    if offloads:
        settings = poptorch.TensorLocationSettings().useOnChipStorage(False)
        options.TensorLocations.setOptimizerLocation(settings)
    model = seeded(make_model).to(dtype)
    optimizer = make_optimizer(model.parameters())
    executor = poptorch.trainingModel(model, options, optimizer)
    outputs = []
    for call in range(calls):
        batch = make_call(call, replicas * count, dtype=dtype)
        outputs.append(leaves(executor(*own_part(batch, ITERATIONS * ACCUMULATION, index, count))))
    if is_inferred and make_model is TwoLayers:
        inference = poptorch.inferenceModel(model.eval(), configure(ITERATIONS))
        (x, _target) = make_call(0, replicas * count, ITERATIONS, dtype)
        outputs.append([inference(*own_part((x,), ITERATIONS, index, count))])
    return outputs, copy.deepcopy(model.state_dict()), optimizer.state_dict()


def train_all(cases):
    """What `train` returns in each case, by name."""
    found = {}
    for name, given in cases.items():
        print(name, flush=True)  # for whoever reads why this failed
        found[name] = train(**given)
    return found


class OneLayer(torch.nn.Module):
    """The least that can be trained."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, target):
        return torch.nn.functional.mse_loss(self.linear(x), target)


def train_one_layer():
    """Trains it with the data of this process; before, with weights that differ between processes.

    Returns:
      The losses, the weights, and what was said of the others.
    """
    index, count = this_process()
    options = make_options(accumulation=2)
    said = []
    for seed in (index, 0):
        model = seeded(OneLayer, seed)
        torch.manual_seed(0)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, options, optimizer)
        try:
            losses = [executor(*own_part(make_call(n, count, 2), 2, index, count)) for n in range(2)]
        except poptorch.Error as error:
            said.append(str(error))
    return losses, model.state_dict(), said


def make_with_buffers():
    """A model whose replicas write buffers and draw random numbers."""
    return WithBuffers(0.5)


def go_through(directory):
    """Trains with what else is done to a wrapped model in between; returns the weights after each step."""
    index, count = this_process()
    model = seeded(TwoLayers)
    optimizer = make_adam(model.parameters())
    replicas = 2 // count
    options = make_options(ITERATIONS, ACCUMULATION).replicationFactor(replicas)
    executor = poptorch.trainingModel(model, options, optimizer)
    found, calls = [], iter(range(100))

    def call():
        batch = make_call(next(calls), 2)
        executor(*own_part(batch, ITERATIONS * ACCUMULATION, index, count))
        found.append(copy.deepcopy(model.state_dict()))

    executor.compile(*own_part(make_call(0, 2), ITERATIONS * ACCUMULATION, index, count))
    call()
    path = f"{directory}/{index}.pt"
    torch.save({"model": executor.state_dict(), "optimizer": optimizer.state_dict()}, path)
    optimizer.param_groups[0]["lr"] = 0.1
    executor.setOptimizer(optimizer)
    call()
    executor.detachFromDevice()
    executor.attachToDevice()
    call()
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    executor.copyWeightsToDevice()
    call()
    saved = torch.load(path)
    executor.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    executor.setOptimizer(optimizer)
    call()
    executor.destroy()
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    call()
    return found


def load_and_train(directory):
    """An epoch of a shuffled data set; returns the batches, the losses and the weights."""
    options = make_options(ITERATIONS, ACCUMULATION).randomSeed(3)
    options.enableProfiling(directory)
    model = seeded(TwoLayers)
    rows = torch.utils.data.TensorDataset(*make_batch(52))
    loader = poptorch.DataLoader(options, rows, batch_size=3, shuffle=True)
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    batches = [tuple(batch) for batch in loader]
    losses = [executor(*batch)[1] for batch in batches]
    return batches, losses, model.state_dict()


def look_at_calls(replicas):
    """What is asked for beside outputs: a value within the model, moments of a call, zeros as data."""
    index, count = this_process()
    options = make_options(ITERATIONS, ACCUMULATION).replicationFactor(replicas)
    options.anchorTensor("hidden", "tanh")
    model = seeded(TwoLayers)
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    batch = make_call(0, replicas * count)
    executor(*own_part(batch, ITERATIONS * ACCUMULATION, index, count))
    hidden = executor.getAnchoredTensor("hidden")
    counts = {len(moments) for moments in executor.getPerfCounters().values()}
    options = make_options(ITERATIONS).enableSyntheticData(True)
    synthetic = poptorch.inferenceModel(model, options)
    (x, _target) = make_call(0, 1, ITERATIONS)
    return hidden, counts, synthetic(x), executor.getLatency()


def say(function):
    """The name of an exception, and its text."""
    try:
        function()
    except (poptorch.Error, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def negative(value):
    return -value


def find_faults(directory):
    """What is said of differences between processes, and of what several cannot do; by what it is."""
    index, _count = this_process()

    def wrap(options, lr=0.1, seed=0):
        model = seeded(TwoLayers, seed)
        torch.manual_seed(0)
        return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=lr))

    def call(executor, rows=8):
        return lambda: executor(*make_batch(rows))

    def refused(change):
        options = make_options().replicationFactor(2)
        change(options)
        return say(lambda: wrap(options))

    sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    phases = poptorch.SerialPhasedExecution("first", "second")
    found = {
        "another number": refused(lambda o: o.Distributed.configureProcessId(1 - index, 2)),
        "more": refused(lambda o: o.Distributed.configureProcessId(index, 3)),
        "alone": refused(lambda o: o.Distributed.disable()),
        "phases": refused(lambda o: o.setExecutionStrategy(phases)),
        "sharding": refused(lambda o: o.TensorLocations.setOptimizerLocation(sharded)),
        "groups": refused(lambda o: o.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)),
        "exceptions": refused(lambda o: o.Precision.enableFloatingPointExceptions(True)),
        "offline": refused(lambda o: o.useOfflineIpuTarget()),
    }
    batch = make_batch(8)
    whole = wrap(make_options())
    found["export"] = say(lambda: whole.compileAndExport(f"{directory}/{index}.poptorch", *batch))
    found["load"] = say(lambda: whole.loadExecutable(f"{directory}/{index}.poptorch"))
    grouped = wrap(make_options().replicationFactor(2))
    kind, mode = poptorch.CommGroupType.Consecutive, poptorch.VariableRetrievalMode.OnePerGroup
    grouped.per_replica_params["first.bias"] = (kind, 1, mode)
    found["grouped parameters"] = say(call(grouped))
    found["replicas"] = say(call(wrap(make_options().replicationFactor(1 + index))))
    found["rows"] = say(call(wrap(make_options()), 4 + index))
    found["rates"] = say(call(wrap(make_options(), lr=0.1 + index)))
    found["weights"] = say(call(wrap(make_options(), seed=index)))
    found["seeds"] = say(call(wrap(make_options(random_seed=index))))
    executor = wrap(make_options())
    found["alike"] = say(call(executor))
    found["new rates"] = say(
        lambda: executor.setOptimizer(torch.optim.SGD(executor.model.parameters(), lr=0.5 + index))
    )
    with torch.no_grad():
        executor.model.second.bias.add_(index)
    found["new weights"] = say(executor.copyWeightsToDevice)
    executor.model.second.bias.detach().sub_(index)
    executor.copyWeightsToDevice()
    found["alike again"] = say(call(executor))
    counts = {"num_micro_batches": 1, "num_replicas": 2}
    straddling = engine.Pipeline([negative, negative], **counts, hooks=Hooks(gathers_outputs=False))
    straddling.trace(np.float32(1))
    devices = [[d for d in jax.devices() if d.process_index == process] for process in range(2)]
    mixed = [own[place] for place in range(2) for own in devices]
    found["straddling"] = say(lambda: straddling.prepare(mixed))
    return found, copy.deepcopy(executor.model.state_dict())


def attempt(function, *arguments, **values):
    """What a function returns, or its exception, told as a text: one part does not hide the others."""
    try:
        return function(*arguments, **values)
    except Exception as error:
        return AssertionError("".join(traceback.format_exception(error)))


def do_all(trained, alike, in_float64, directory):
    """All of it in processes that are started once, since to import torch takes longest; by what it is."""
    torch.set_num_threads(1)
    found = {
        "trained": attempt(train_all, trained),
        "alike": attempt(train_all, alike),
        "buffers": attempt(train, make_model=make_with_buffers),
        "steps": attempt(go_through, directory),
        "loaded": attempt(load_and_train, f"{directory}/profile"),
        "calls": attempt(look_at_calls, 2),
    }
    jax.config.update("jax_enable_x64", True)
    wide = {name: {**given, "dtype": torch.float64} for name, given in in_float64.items()}
    return {**found, "in float64": attempt(train_all, wide)}


def differ(directory):
    """What processes do that differ from each other, in a run of their own: a fault may end it."""
    return {"one layer": attempt(train_one_layer), "faults": attempt(find_faults, directory)}


def lose_another(how):
    """Calls a model, process 0 more often than process 1, which is gone after the first call."""
    index, count = this_process()
    executor = poptorch.trainingModel(seeded(OneLayer), make_options(2))
    batch = own_part(make_call(0, count, 2), 2, index, count)
    executor(*batch)
    if index == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while index == 0:
        executor(*batch)
