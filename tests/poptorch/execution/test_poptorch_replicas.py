"""Replicas of wrapped models: equal to plain torch over the micro-batches of all of them."""

import copy
import functools
import threading

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import CommGroupType, OutputMode, VariableRetrievalMode, logs
from ipu_pipeline.poptorch.replica_groups import find_groups
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    assert_same_state,
    join,
    leaves,
    make_batch,
    make_model,
    make_options,
    make_sgd,
    relative_difference,
    seeded,
)


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def with_replicas(number, *args, **values):
    return make_options(*args, **values).replicationFactor(number)


def test_sums_equal_plain_torch():
    """2 device iterations with 2 micro-batches per update and replica, in one stage."""
    options = with_replicas(2, 2, 2, poptorch.PipelinedExecution(poptorch.Stage("first", "second")))
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    trained = TrainedAlike(make_model(), options)
    for seed in range(2):
        trained.call(*make_batch(16, seed=seed), mean=False)
    trained.compare()


def test_inputs_that_forward_writes_to_change_as_in_torch():
    """Those of several replicas, of which two have the same inputs, in an order of their own."""

    class Writes(torch.nn.Module):
        def forward(self, x, batch):
            x.add_(1).mul_(2)
            batch["tokens"][:, 0] = x[:, 0].long()
            return x.sum()

    x, tokens = torch.randn(8, 3), torch.arange(16).reshape(8, 2)
    expected, of_tokens = (x + 1) * 2, tokens.clone()
    of_tokens[:, 0] = expected[:, 0].long()
    with torch.inference_mode():
        made_in_inference_mode = tokens.clone()
    options = with_replicas(4, 2, mode=OutputMode.Sum).inputReplicaGrouping(2, CommGroupType.Consecutive)
    total = poptorch.inferenceModel(Writes(), options)(x, {"tokens": made_in_inference_mode})
    assert_close([x, made_in_inference_mode], [expected, of_tokens])
    assert_close([total.sum()], [2 * expected.sum()])


@pytest.mark.thorough
def test_a_sum_of_half_gradients_does_not_overflow():
    """The sum over replicas of what float16 just holds is more than it holds; it is taken in float32."""

    class Steep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return poptorch.identity_loss(self.weight * x, "sum")

    model = Steep()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    executor = poptorch.trainingModel(model, with_replicas(4), optimizer)
    executor(torch.full((4, 2), 40000.0))
    assert_close([model.weight], [torch.full((2,), -40000.0)])


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.EveryN])
def test_output_modes(mode):
    """4 micro-batches of 3 rows in each of 2 replicas."""
    model = make_model(ipus=(0, 0))
    options = with_replicas(2, 4).outputMode(mode, 2 if mode is OutputMode.EveryN else None)
    x, target = make_batch(24)
    y, loss = poptorch.inferenceModel(model, options)(x, target)
    with torch.no_grad():
        made = [model(*pair) for pair in zip(x.chunk(8), target.chunk(8), strict=True)]
    kept = slice(1, None, 2) if mode is OutputMode.EveryN else slice(3, None)
    rows = torch.stack([one[0] for one in made]).reshape(4, 2, 3, 3)[kept]
    losses = torch.stack([one[1] for one in made]).reshape(4, 2)[kept]
    assert_close([y, loss], [rows.reshape(-1, 3), losses.reshape(-1)])


@pytest.mark.parametrize(("kind", "groups"), [("Consecutive", (0, 0, 1, 1)), ("Orthogonal", (0, 1, 0, 1))])
def test_groups_of_replicas_with_the_same_inputs(kind, groups):
    """A data loader gives what a call takes."""
    model = make_model(ipus=(0, 0))
    options = with_replicas(4, 2).inputReplicaGrouping(2, CommGroupType[kind])
    executor = poptorch.inferenceModel(model, options)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(*make_batch(16)), batch_size=2)
    assert loader.combinedBatchSize == 8
    for x, _target in loader:
        parts = [model(part).detach() for part in x.chunk(4)]
        assert_close([executor(x)], [torch.cat([parts[2 * k + g] for k in range(2) for g in groups])])
    message = r"\(7\) must be a multiple of .*Iterations\(2\) \* \(Options."
    with pytest.raises(AssertionError, match=message):
        poptorch.inferenceModel(make_model(), options)(make_batch(7)[0])


def test_groups_of_replicas():
    assert find_groups(CommGroupType.All, 3, 4) == (0, 0, 0, 0)
    assert find_groups(CommGroupType.NoGrouping, 1, 4) == (0, 1, 2, 3)
    assert find_groups(CommGroupType.Consecutive, 2, 6) == (0, 0, 1, 1, 2, 2)
    assert find_groups(CommGroupType.Orthogonal, 2, 6) == (0, 1, 2, 0, 1, 2)


# Parameters with a row for each group.


class Rows(torch.nn.Module):
    """A layer, and behind it, on another IPU, a parameter of which groups of replicas have their own."""

    def __init__(self, rows):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.weight = torch.nn.Parameter(torch.randn(*rows, 4, 2))

    def forward(self, x, target, weight=None):
        with poptorch.Block("first", ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block("rows", ipu_id=1):
            x = x @ (self.weight if weight is None else weight)
            return x, poptorch.identity_loss((x - target[:, :2]) ** 2, "mean")


def train_rows(model, optimizer, batch, groups):
    """One update of plain torch, with a micro-batch for each replica."""
    optimizer.zero_grad()
    outputs = []
    for x, target, group in zip(*(t.chunk(len(groups)) for t in batch), groups, strict=True):
        outputs.append(model(x, target, model.weight[group]))
        (outputs[-1][1] / len(groups)).backward()
    optimizer.step()
    return outputs


def test_other_threads_see_all_rows_while_a_model_is_captured():
    class Looked(Rows):
        def forward(self, *args):
            thread = threading.Thread(target=lambda: shapes.append(self.weight.shape))
            thread.start()
            thread.join()
            assert self.weight.shape == (4, 2)
            return super().forward(*args)

    shapes = []
    model = seeded(lambda: Looked((2,)))
    executor = poptorch.inferenceModel(model, with_replicas(4))
    executor.weight.replicaGrouping(CommGroupType.Consecutive, 2, VariableRetrievalMode.OnePerGroup)
    executor.compile(*make_batch(8))
    assert set(shapes) == {(2, 4, 2)}


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["interleaved", "serial"])
def test_parameters_of_groups_with_gradient_accumulation(schedule):
    """In pipelines, and in phases."""
    kind, groups = CommGroupType.Orthogonal, [0, 1, 0, 1]
    if schedule == "serial":
        kind, groups = CommGroupType.Consecutive, [0, 0, 1, 1]
    model = seeded(lambda: Rows((2,)))
    plain = copy.deepcopy(model)
    optimizer = make_adam(plain.parameters())
    options = with_replicas(4, 2, 2)
    if schedule == "serial":
        strategy = poptorch.SerialPhasedExecution("first", "rows")
        options.setExecutionStrategy(strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd))
    else:
        options.setPipelineSchedule(schedule)
    options.TensorLocations.setWeightLocation(SHARED_OUT)
    executor = poptorch.trainingModel(model, options, make_adam(model.parameters()))
    executor.weight.replicaGrouping(kind, 2, VariableRetrievalMode.OnePerGroup)
    batch = make_batch(32)
    expected = []
    for update in zip(*(value.chunk(2) for value in batch), strict=True):
        expected += train_rows(plain, optimizer, update, groups * 2)
    assert_close(leaves(executor(*batch)), join(expected))
    assert_same_state(model, plain)


SHARED_OUT = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)


def share_out(options):
    options.TensorLocations.setWeightLocation(SHARED_OUT).setOptimizerLocation(SHARED_OUT)
    return options


@pytest.mark.thorough
def test_inference_with_weights_shared_out():
    model, x = make_model(hidden=6), make_batch(12)[0]
    found = poptorch.inferenceModel(model, share_out(with_replicas(2, 3)))(x)
    assert_close([found], [model(x)])


@pytest.mark.thorough
def test_a_state_of_torchs_with_a_row_for_each_replica():
    """torch's own optimizer goes on where the devices were, and they where it was."""
    model = seeded(lambda: Rows((4,)))
    plain = copy.deepcopy(model)
    optimizer, plains = make_adam(model.parameters()), make_adam(plain.parameters())
    for round_ in range(2):
        executor = poptorch.trainingModel(model, with_replicas(4), optimizer)
        executor.weight.replicaGrouping(CommGroupType.NoGrouping, 1, VariableRetrievalMode.AllReplicas)
        executor(*make_batch(8, seed=round_))
        train_rows(plain, plains, make_batch(8, seed=round_), range(4))
        executor.destroy()
        for known, chosen in ((optimizer, model), (plains, plain)):
            train_rows(chosen, known, make_batch(8, seed=9), range(4))
        assert_same_state(model, plain)


class RowsOfLamb:
    """Plain torch's side of what follows: each row is a parameter of its own for the optimizer."""

    def __init__(self, model, make_optimizer):
        self.model, self.zero_grad = model, model.zero_grad
        self.rows = [torch.nn.Parameter(row) for row in model.weight.detach()]
        self.optimizer = make_optimizer([*model.first.parameters(), *self.rows])

    def step(self):
        for row, gradient in zip(self.rows, self.model.weight.grad, strict=True):
            row.grad = gradient
        self.optimizer.step()
        with torch.no_grad():
            self.model.weight.copy_(torch.stack(list(self.rows)))


def test_a_row_for_each_replica_on_the_host():
    """With LAMB, whose steps depend on the norm of each row; saved, and gone on with by another wrapper."""
    model = seeded(lambda: Rows((2,)))
    plain = copy.deepcopy(model)
    groups = [0, 1, 0, 1]
    with torch.no_grad():
        model.weight.data = model.weight[groups].clone()

    def wrap(optimizer):
        executor = poptorch.trainingModel(model, with_replicas(4), optimizer)
        kind = (CommGroupType.Orthogonal, 2, VariableRetrievalMode.AllReplicas)
        executor.per_replica_params["weight"] = kind
        return executor

    def check(executor, seed):
        outputs = executor(*make_batch(8, seed=seed))
        assert_close(leaves(outputs), join(train_rows(plain, plain_lamb, make_batch(8, seed=seed), groups)))
        assert model.weight.shape == (4, 4, 2)
        assert_close([model.weight[:2], model.weight[2:]], [plain.weight, plain.weight])

    lamb = functools.partial(poptorch.optim.LAMB, lr=0.1)
    plain_lamb = RowsOfLamb(plain, lamb)
    optimizer = lamb(model.parameters())
    executor = wrap(optimizer)
    check(executor, 0)
    check(executor, 1)
    saved = optimizer.state_dict()
    assert saved["ipu_state"]["exp_avg___model/weight"].shape == (4, 4, 2)
    executor.destroy()
    optimizer = lamb(model.parameters())
    optimizer.load_state_dict(saved)
    executor = wrap(optimizer)
    check(executor, 2)
    with torch.no_grad():
        model.weight[0] += 1
    with pytest.raises(poptorch.Error, match=r"same values in the rows .* one group; .* \[0, 1, 0, 1\]"):
        executor.copyWeightsToDevice()


def test_wrong_groups():
    kind, mode = CommGroupType.Consecutive, VariableRetrievalMode.OnePerGroup
    model = seeded(lambda: Rows((3,)))
    executor = poptorch.trainingModel(model, with_replicas(4))
    with pytest.raises(AssertionError, match="comm_group_type must be one of CommGroupType.*; got 1"):
        executor.weight.replicaGrouping(1, 2, mode)
    with pytest.raises(ValueError, match="factor of the replicationFactor, 4; got 3"):
        executor.weight.replicaGrouping(kind, 3, mode)
    with pytest.raises(poptorch.Error, match="per_replica_params"):
        model.first.to(torch.float32).weight.replicaGrouping(kind, 2, mode)
    every = VariableRetrievalMode.AllReplicas
    nobody = "names 'fc.weight', which is no parameter .* weight, first.weight"
    for name, rows, message in [
        ("weight", mode, r"must be 2, a row for each group .* is \(3, 4, 2\)"),
        ("weight", every, r"must be 4, a row for each replica .* is \(3, 4, 2\)"),
        ("fc.weight", mode, nobody),
    ]:
        executor.per_replica_params = {name: (kind, 2, rows)}
        with pytest.raises(poptorch.Error, match=message):
            executor(*make_batch(8))
    executor.per_replica_params = {}
    executor.first.weight.replicaGrouping(CommGroupType.All, 1, mode)
    assert executor.per_replica_params == {"first.weight": (CommGroupType.All, 1, mode)}
    compiled = poptorch.inferenceModel(make_model(ipus=(0, 0)), with_replicas(2))
    compiled(make_batch()[0])
    message = "replicaGrouping of first.weight must be called before the model is"
    with pytest.raises(poptorch.Error, match=message):
        compiled.first.weight.replicaGrouping(CommGroupType.All, 1, mode)
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    executor = poptorch.inferenceModel(tied, with_replicas(2))
    executor.per_replica_params = {"0.weight": (kind, 1, mode), "1.weight": (kind, 2, mode)}
    with pytest.raises(poptorch.Error, match="0.weight and 1.weight are one parameter, and have different"):
        executor(torch.ones(2, 2))


# Buffers, and what is shared out.


class Counting(torch.nn.Module):
    """A batch norm, and a buffer that sums up what it saw."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.second = torch.nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, target):
        with poptorch.Block(ipu_id=0):
            self.seen += x.sum()
            x = self.second(self.norm(x))
            return x, self.seen.clone(), torch.nn.functional.mse_loss(x, target)


def test_each_replica_has_its_buffers():
    model = seeded(Counting)
    copies = [copy.deepcopy(model) for _replica in range(2)]
    for name, parameter in copies[0].named_parameters():  # one model with buffers apart
        owner, _dot, last = name.rpartition(".")
        copies[1].get_submodule(owner)._parameters[last] = parameter
    optimizer = make_sgd(copies[0].parameters())
    options = with_replicas(2, 2, 2)
    options.broadcastBuffers(False)
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    batch = make_batch(24)
    expected = []
    parts = list(zip(*(t.chunk(8) for t in batch), strict=True))
    for update in (parts[:4], parts[4:]):
        optimizer.zero_grad()
        for number, part in enumerate(update):
            expected.append(copies[number % 2](*part))
            (expected[-1][2] / 4).backward()
        optimizer.step()
    assert_close(leaves(executor(*batch)), join(expected))
    assert_same_state(model, copies[0])
    assert relative_difference(copies[1].seen, copies[0].seen) > 0.1
    executor.detachFromDevice()
    executor.attachToDevice()  # all replicas get the host's
    seen = executor(*batch)[1]
    sums = [part[0].sum() for part in parts]
    assert_close([seen[:2]], [copies[0].seen + torch.stack(sums[:2])])


def test_buffers_that_are_written_are_refused():
    batch = make_batch(4)
    executor = poptorch.trainingModel(seeded(Counting), with_replicas(2))
    message = r"not support broadcasting buffers.*: norm.num_batches_tracked"
    with pytest.raises(poptorch.Error, match=message):
        executor(*batch)
    model = seeded(Counting)
    model.forward = lambda x: torch.relu(x)
    poptorch.inferenceModel(model, with_replicas(2))(batch[0])


def test_state_is_shared_out(caplog):
    trained = TrainedAlike(make_model(size=4, hidden=6), share_out(with_replicas(2, 2, 2)), make_adam)
    before = jax.live_arrays()
    for seed in range(2):
        trained.call(*make_batch(16, 4, seed=seed))
    trained.compare()
    new = [array for array in jax.live_arrays() if not any(array is one for one in before)]
    weights = [array for array in new if array.shape == (6, 4)]
    halves = [array for array in weights if array.addressable_shards[0].data.shape == (3, 4)]
    assert len(halves) == 3  # the first layer's weights, and Adam's two averages
    assert "no effect" not in caplog.text


def test_what_is_not_shared_out_is_told(caplog, monkeypatch):
    monkeypatch.setattr(logs, "_said", set())
    poptorch.inferenceModel(make_model(), share_out(make_options()))
    options = with_replicas(2)
    options.TensorLocations.setAccumulatorLocation(SHARED_OUT)
    poptorch.inferenceModel(make_model(), options)
    assert "no effect: there is one replica" in caplog.text
    assert "no effect in location_accumulator: activations and sums" in caplog.text


# The rest of a wrapped model's life.


def test_random_numbers_differ_between_replicas():
    model = torch.nn.Dropout(0.5)
    out = poptorch.inferenceModel(model, with_replicas(2).randomSeed(3))(torch.ones(2, 64))
    assert not torch.equal(out[0], out[1])


def test_numbers_of_ipus():
    with pytest.raises(poptorch.Error, match="use of 6 IPUs, however PopTorch must reserve a minimum of 8"):
        poptorch.inferenceModel(make_model(), with_replicas(3))(make_batch(3)[0])
    # One that is between others counts, too.
    with pytest.raises(poptorch.Error, match="use of 3 IPUs, however PopTorch must reserve a minimum of 4"):
        poptorch.inferenceModel(make_model(ipus=(0, 2)), make_options())(make_batch(3)[0])
    model = make_model(ipus=(0, 0))
    executor = poptorch.inferenceModel(model, with_replicas(3).autoRoundNumIPUs(True))
    with torch.no_grad():
        assert_close([executor(make_batch(3)[0])], [model(make_batch(3)[0])])
