"""The optimizers in a pipeline of two devices with gradient accumulation equal plain torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ipu_pipeline import engine
from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.optim.compatibility import check_compatible
from ipu_pipeline.poptorch.optim.describing import assign_groups, describe
from ipu_pipeline.poptorch.optim.transformations import make_transformation, with_hyperparameters
from tests.support import models
from tests.support.compilations import compiled_in

torch.set_num_threads(1)

NUM_MICRO_BATCHES = 4
SHAPES = {"a.weight": (6, 5), "a.bias": (5,), "b.weight": (5, 3), "b.frozen": (3,)}


def variable(name, dtype):
    with engine.variable_scope("model", reuse=True):
        return engine.get_variable(name, SHAPES[name], dtype, jax.nn.initializers.normal(0.5))


def stages(dtype):
    def first(x, y):
        return jnp.tanh(x @ variable("a.weight", dtype) + variable("a.bias", dtype)), y

    def last(hidden, y):
        found = hidden @ variable("b.weight", dtype) + variable("b.frozen", dtype)
        return jnp.mean((found.astype("float32") - y) ** 2)

    return [first, last]


def loss_of_torch(parameters, x, y):
    hidden = torch.tanh(x @ parameters["model/a.weight"] + parameters["model/a.bias"])
    return torch.mean((hidden @ parameters["model/b.weight"] + parameters["model/b.frozen"] - y) ** 2)


def make_batches(count, dtype="float32"):
    rng = np.random.default_rng(3)
    return [
        [
            (rng.normal(size=(4, 6)).astype(dtype), rng.normal(size=(4, 3)).astype("float32"))
            for _ in range(NUM_MICRO_BATCHES)
        ]
        for _ in range(count)
    ]


def make_parameters():
    rng = np.random.default_rng(4)
    found = {
        f"model/{name}": torch.nn.Parameter(torch.from_numpy(rng.normal(size=shape).astype("float32")))
        for name, shape in SHAPES.items()
    }
    found["model/b.frozen"].requires_grad_(False)
    return found


def groups_of(parameters, **second):
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    others = [parameter for name, parameter in parameters.items() if not name.endswith("weight")]
    return [{"params": weights}, {"params": others, **second}]


class Trained:
    """What an executor does: a pipeline with an optimizer of torch or PopTorch."""

    def __init__(self, optimizer, parameters, dtype="float32"):
        self.spec = describe(optimizer)
        self.group_of = assign_groups(optimizer, parameters)
        self.pipeline = engine.Pipeline(
            stages(dtype),
            num_micro_batches=NUM_MICRO_BATCHES,
            loss=lambda loss: loss,
            optimizer=make_transformation(self.spec, self.group_of),
            accumulator_dtype=self.spec.accumulator_dtype,
            reduction="running_mean" if self.spec.needs_running_mean else "mean",
            trained=list(self.group_of),
            device_mapping=(0, 1),
            donate=True,
        )
        state = self.pipeline.init(jax.random.key(0), make_batches(1, dtype)[0][0])
        values = {name: np.array(value.detach().numpy(), dtype) for name, value in parameters.items()}
        self.state = self.pipeline.place(self.replace(state, variables=values))

    def replace(self, state, **fields):
        return engine.PipelineState(**{**vars(state), **fields})

    def step(self, batches):
        self.state, outputs = self.pipeline.step(self.state, batches)
        return outputs

    def set_optimizer(self, optimizer):
        self.spec = check_compatible(self.spec, describe(optimizer))
        new = with_hyperparameters(self.state.optimizer_state, self.spec)
        self.state = self.pipeline.place(self.replace(self.state, optimizer_state=new))

    @property
    def values(self):
        return {name: np.asarray(value) for name, value in self.state.variables.items()}


def step_torch(optimizer, parameters, batches, max_norm=None):
    optimizer.zero_grad()
    for x, y in batches:
        loss = loss_of_torch(parameters, torch.from_numpy(x), torch.from_numpy(y))
        (loss / NUM_MICRO_BATCHES).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "loss_scaling": 64.0, "max_grad_norm": 0.5}),
        ("AdamW", {"max_grad_norm": 0.2}),
        ("LAMB", {"loss_scaling": 2.0}),
    ],
)
def test_equal_to_torch(name, arguments, caplog):
    """The learning rate changes half-way, and what had to be compiled was in the first step."""
    parameters, references = make_parameters(), make_parameters()
    max_norm = arguments.get("max_grad_norm")
    made = getattr(optim, name)
    of_torch = optim.LAMB if name == "LAMB" else getattr(torch.optim, name)
    plain = {n: v for n, v in arguments.items() if n not in ("loss_scaling", "max_grad_norm")}
    optimizer = made(groups_of(parameters, lr=0.02), lr=0.01, **arguments)
    reference = of_torch(groups_of(references, lr=0.02), lr=0.01, **plain)
    ours = Trained(optimizer, parameters)
    batches = make_batches(25)

    def step(number):
        ours.step(batches[number])
        step_torch(reference, references, batches[number], max_norm)

    def run():
        for number in range(1, 25):
            if number == 12:
                if optimizer.loss_scaling != 1:
                    optimizer.loss_scaling /= 2
                for changed in (optimizer, reference):
                    changed.param_groups[0]["lr"] = 0.003
                ours.set_optimizer(optimizer)
            step(number)

    assert compiled_in(lambda: step(0), caplog)
    assert compiled_in(run, caplog) == []
    expected = {key: np.array(value.detach().numpy()) for key, value in references.items()}
    models.assert_trees_close(ours.values, expected, 1e-6)
    np.testing.assert_array_equal(ours.values["model/b.frozen"], parameters["model/b.frozen"].numpy())


def test_where_the_state_lives():
    """What is kept of a variable is with the variable; everything else is two arrays."""
    parameters = make_parameters()
    ours = Trained(optim.Adam(list(parameters.values()), loss_scaling=2.0), parameters)
    ours.step(make_batches(1)[0])
    leaves = {leaf.path: leaf for leaf in ours.pipeline.updates.state_leaves}
    homes = {path: leaf.stage for path, leaf in leaves.items() if "model/" in path}
    assert homes == {
        f".inner.slots['{slot}']['model/{name}']": 0 if name.startswith("a.") else 1
        for slot in ("exp_avg", "exp_avg_sq")
        for name in SHAPES
        if name != "b.frozen"
    }
    assert {path: leaf.aval.shape for path, leaf in leaves.items() if path not in homes} == {
        ".scale": (),
        ".inner.numbers": (1, 11),
    }
    assert {move.what for move in ours.pipeline.updates.moves} == {"optimizer state .inner.numbers"}


def test_half_precision():
    """Close to torch in float32; gradients are summed or averaged as they can be."""
    parameters, references = make_parameters(), make_parameters()
    common = {"lr": 0.1, "momentum": 0.9}
    arguments = {"loss_scaling": 128.0, "accum_type": torch.float16}
    ours = Trained(optim.SGD(parameters.values(), **common, **arguments), parameters, "float16")
    reference = torch.optim.SGD(references.values(), **common)
    for batches in make_batches(5, "float16"):
        ours.step(batches)
        step_torch(reference, references, [(x.astype("float32"), y) for x, y in batches])
    assert {value.dtype.name for value in ours.values.values()} == {"float16"}
    found = {name: value.astype("float32") for name, value in ours.values.items()}
    expected = {name: value.detach().numpy() for name, value in references.items()}
    models.assert_trees_close(found, expected, 5e-3)
