"""The optimizers' formulas equal torch's own, step by step; hyperparameters change without compiling."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.optim.specs import assign_groups, check_compatible, describe
from ipu_pipeline.poptorch.optim.transformations import (
    inner_state,
    make_transformation,
    with_hyperparameters,
)
from tests.support import models

torch.set_num_threads(1)

TORCH = torch.optim

SHAPES = {"model/a.weight": (3, 4), "model/a.bias": (4,), "model/b": ()}
NUM_STEPS = 10


def make_parameters(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: torch.nn.Parameter(torch.from_numpy(np.asarray(rng.normal(size=shape), dtype)))
        for name, shape in SHAPES.items()
    }


def make_gradients(dtype="float32", count=NUM_STEPS, seed=1):
    rng = np.random.default_rng(seed)
    return [
        {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def as_numpy(parameters):
    return {name: np.array(parameter.detach().numpy()) for name, parameter in parameters.items()}


def step_torch(optimizer, parameters, gradients, max_norm=None):
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(np.array(gradients[name]))
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    optimizer.step()


class Ours:
    """A transformation applied by itself, jitted once, to what a torch optimizer describes."""

    def __init__(self, optimizer, parameters, **options):
        self.spec = describe(optimizer, **options)
        self.group_of = assign_groups(optimizer, parameters)
        self.transformation = make_transformation(self.spec, self.group_of)
        self.params = jax.tree.map(jax.numpy.array, as_numpy(parameters))
        self.state = self.transformation.init(self.params)
        self.update = jax.jit(self._update)
        self.num_traces = 0

    def _update(self, params, state, gradients):
        self.num_traces += 1
        changes, state = self.transformation.update(gradients, state, params)
        return {
            name: (value.astype(changes[name].dtype) + changes[name]).astype(value.dtype)
            for name, value in params.items()
        }, state

    def step(self, gradients):
        self.params, self.state = self.update(self.params, self.state, gradients)

    def set_optimizer(self, optimizer):
        self.spec = check_compatible(self.spec, describe(optimizer))
        self.state = with_hyperparameters(self.state, self.spec)

    @property
    def values(self):
        return jax.tree.map(np.asarray, self.params)


def compare(make, dtype="float32", tolerance=1e-6):
    """Runs ours and torch's from the same parameters, with the same gradients."""
    parameters, references = make_parameters(dtype), make_parameters(dtype)
    ours, reference = Ours(make(list(parameters.values())), parameters), make(list(references.values()))
    for gradients in make_gradients(dtype):
        ours.step(gradients)
        step_torch(reference, references, gradients)
    models.assert_trees_close(ours.values, as_numpy(references), tolerance)
    assert ours.num_traces == 1


# What is constant and 0 is left out of torch's classes. Those of torch alone have what is not the default.
CASES = [
    (optim, "SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (optim, "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (optim, "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (optim, "SGD", {"lr": 0.1, "momentum": 0.0, "dampening": 0.3}),
    (optim, "Adam", {"lr": 0.01, "betas": (0.5, 0.99), "eps": 1e-3, "weight_decay": 0.1}),
    (optim, "Adam", {"lr": 0.01, "betas": (0.0, 0.9), "maximize": True}),
    (optim, "Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.3}),
    (optim, "AdamW", {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.3, "maximize": True}),
    (optim, "RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.5}),
    (optim, "RMSprop", {"lr": 0.01, "centered": True, "maximize": True}),
    (optim, "LAMB", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0, "bias_correction": False}),
    (optim, "LAMB", {"lr": 0.1, "eps": 1e-3, "max_weight_norm": 0.7}),
    (TORCH, "SGD", {"lr": 0.1, "momentum": 0.9}),
    (TORCH, "AdamW", {"lr": 0.1, "betas": (0.9, 0.99)}),
    (TORCH, "RMSprop", {"lr": 0.1, "centered": True}),
    (TORCH, "Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    (TORCH, "Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1, "maximize": True}),
    (TORCH, "Adamax", {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (TORCH, "NAdam", {"lr": 0.1, "weight_decay": 0.1, "momentum_decay": 0.1}),
    (TORCH, "NAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (
        TORCH,
        "RAdam",
        {"lr": 0.1, "betas": (0.8, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    (TORCH, "ASGD", {"lr": 0.1, "lambd": 0.1, "t0": 5, "weight_decay": 0.1}),
    (TORCH, "Rprop", {"lr": 0.1, "etas": (0.4, 1.5), "step_sizes": (0.05, 0.2), "maximize": True}),
    (TORCH, "Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
    (TORCH, "Adafactor", {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 1.5, "maximize": True}),
]


@pytest.mark.parametrize(
    ("module", "name", "arguments"), CASES, ids=[f"{m.__name__} {n} {a}" for m, n, a in CASES]
)
def test_equal_to_torch(module, name, arguments):
    with jax.enable_x64(True):
        compare(lambda parameters: getattr(module, name)(parameters, **arguments), "float64", 1e-12)


def test_whole_weights_are_needed():
    parameters = make_parameters()
    optimizer = torch.optim.Adafactor(list(parameters.values()))
    groups = assign_groups(optimizer, parameters)
    with pytest.raises(ValueError, match="Adafactor needs whole weights, and cannot train model/b:"):
        make_transformation(describe(optimizer), groups, with_rows=["model/b"])


def changes_of(name):
    """Hyperparameters from update 2, 4, 6 and 8 on, all variable."""
    if name == "SGD":
        return [
            {"lr": 0.1, "momentum": 0.0, "dampening": 0.2, "weight_decay": 0.0},
            {"momentum": 0.9},  # the buffer starts here, as in torch
            {"momentum": 0.0, "lr": 0.05},  # and rests here
            {"momentum": 0.5, "weight_decay": 0.1},
            {"dampening": 0.7, "lr": 0.2},
        ]
    if name == "RMSprop":
        return [
            {"lr": 0.01, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.0, "momentum": 0.5},
            {"momentum": 0.0},
            {"momentum": 0.9, "alpha": 0.5},
            {"weight_decay": 0.1},
            {"eps": 1e-2, "lr": 0.1},
        ]
    return [
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0},
        {"lr": 0.1},
        {"betas": (0.5, 0.9)},
        {"weight_decay": 0.1},
        {"eps": 1e-2},
    ]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "LAMB"])
def test_hyperparameters_change_and_compile_nothing(name):
    first, *others = changes_of(name)
    parameters, references = make_parameters(), make_parameters()
    optimizer = getattr(optim, name)(list(parameters.values()), **first)
    of_torch = optim.LAMB if name == "LAMB" else getattr(torch.optim, name)
    reference = of_torch(list(references.values()), **first)
    ours = Ours(optimizer, parameters)
    for number, gradients in enumerate(make_gradients()):
        if number and number % 2 == 0:
            optimizer.param_groups[0].update(others[number // 2 - 1])
            reference.param_groups[0].update(others[number // 2 - 1])
            ours.set_optimizer(optimizer)
        ours.step(gradients)
        step_torch(reference, references, gradients)
        models.assert_trees_close(ours.values, as_numpy(references), 1e-6)
    assert ours.num_traces == 1


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}, {"lr": torch.tensor(0.05), "maximize": True}),
        ("Adam", {"weight_decay": 0.1, "betas": (torch.tensor(0.8), torch.tensor(0.9))}, {"lr": 0.02}),
    ],
)
def test_groups(name, first, second):
    def make(parameters):
        groups = [{"params": parameters[:1], **first}, {"params": parameters[1:], **second}]
        return getattr(torch.optim, name)(groups, lr=0.01)

    compare(make)


def test_the_norm_changes_without_compiling():
    parameters, references = make_parameters(), make_parameters()
    optimizer = optim.SGD(list(parameters.values()), lr=0.1, max_grad_norm=100.0)
    reference = torch.optim.SGD(list(references.values()), lr=0.1)
    ours = Ours(optimizer, parameters)
    for number, gradients in enumerate(make_gradients(count=5)):
        ours.step(gradients)
        step_torch(reference, references, gradients, optimizer.max_grad_norm)
        optimizer.max_grad_norm = (1.0, 0.1, np.inf, 2.0, 1.0)[number]
        ours.set_optimizer(optimizer)
    models.assert_trees_close(ours.values, as_numpy(references), 1e-6)
    assert ours.num_traces == 1


def test_a_scale_of_the_loss_changes_nothing():
    """Gradients come in too large by it. It changes, too; 3 is no power of two."""
    parameters = make_parameters()

    def make(scale):
        return optim.LAMB(list(parameters.values()), lr=0.1, loss_scaling=scale)

    plain = Ours(optim.LAMB(list(parameters.values()), lr=0.1), parameters)
    ours = Ours(make(1024.0), parameters)
    assert jax.tree.leaves(ours.state)[0] == ours.transformation.initial_scale == 1024
    scale = np.float32(1024)
    for number, gradients in enumerate(make_gradients(count=4)):
        if number == 2:
            scale = np.float32(3)
            ours.set_optimizer(make(3.0))
        ours.step({key: gradient * scale for key, gradient in gradients.items()})
        plain.step(gradients)
        assert jax.tree.leaves(ours.state)[0] == scale
    models.assert_trees_close(ours.values, plain.values, 1e-6)
    assert ours.num_traces == 1


def test_the_scale_is_a_float32_in_float64_too():
    """Divided by what the loss was multiplied by: 3.7 is not the same in both."""
    with jax.enable_x64(True):
        parameters = make_parameters("float64")
        values = list(parameters.values())
        plain = Ours(optim.SGD(values, lr=0.1), parameters)
        ours = Ours(optim.SGD(values, lr=0.1, loss_scaling=3.7), parameters)
        scale = np.float64(ours.state.scale)
        for gradients in make_gradients("float64", 3):
            ours.step({key: gradient * scale for key, gradient in gradients.items()})
            plain.step(gradients)
        models.assert_trees_close(ours.values, plain.values, 1e-12)


def test_what_is_not_finite_gets_through_a_manual_scale():
    parameters = make_parameters()
    ours = Ours(optim.SGD(list(parameters.values()), lr=0.1, loss_scaling=2.0), parameters)
    (gradients,) = make_gradients(count=1)
    gradients["model/b"] = np.float32(np.inf)
    ours.step(gradients)
    assert ours.values["model/b"] == -np.inf
    assert np.all(np.isfinite(ours.values["model/a.bias"]))


def test_an_automatic_scale():
    parameters = make_parameters()
    optimizer = optim.AdamW(list(parameters.values()), lr=0.1, loss_scaling=8.0)
    ours = Ours(optimizer, parameters, automatic_loss_scaling=True)
    ours.transformation = make_transformation(ours.spec, ours.group_of, growth_interval=2)
    plain = Ours(optim.AdamW(list(parameters.values()), lr=0.1), parameters)
    scales = []
    for number, gradients in enumerate(make_gradients(count=6)):
        scale = np.asarray(ours.state.scale)
        scales.append(float(scale))
        scaled = {key: gradient * scale for key, gradient in gradients.items()}
        if number == 3:
            scaled["model/b"] = np.float32(np.nan)
        else:
            plain.step(gradients)
        ours.step(scaled)
    assert scales == [8, 8, 16, 16, 8, 8]
    assert ours.transformation.initial_scale == 8
    models.assert_trees_close(ours.values, plain.values, 1e-6)
    # It goes on from where it is, whatever the user sets.
    optimizer.loss_scaling = 2.0
    after = with_hyperparameters(ours.state, describe(optimizer, automatic_loss_scaling=True))
    assert after.scale == ours.state.scale


def by_hand(formula, parameters):
    """A formula in NumPy and float64: of parameter, gradient, step, and a dict to keep things."""
    values = {name: value.astype("float64") for name, value in as_numpy(parameters).items()}
    kept = {name: {} for name in values}
    for number, gradients in enumerate(make_gradients(), 1):
        for name, gradient in gradients.items():
            gradient = gradient.astype("float64")
            values[name] = values[name] + formula(values[name], gradient, number, kept[name])
    return {name: np.asarray(value, "float32") for name, value in values.items()}


def averages(kept, gradient, betas):
    kept["m"] = betas[0] * kept.get("m", 0) + (1 - betas[0]) * gradient
    kept["v"] = betas[1] * kept.get("v", 0) + (1 - betas[1]) * gradient**2
    return kept["m"], kept["v"]


@pytest.mark.parametrize(("bias_correction", "max_weight_norm"), [(True, None), (False, 0.5)])
def test_lamb_by_hand(bias_correction, max_weight_norm):
    def formula(w, g, step, kept):
        m, v = averages(kept, g, (0.9, 0.999))
        if bias_correction:
            m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
        update = m / (np.sqrt(v) + 1e-8) + 0.01 * w
        size, norm = min(np.linalg.norm(w), max_weight_norm or 65500), np.linalg.norm(update)
        return -0.1 * (size / norm if size and norm else 1) * update

    parameters = make_parameters()
    with torch.no_grad():
        parameters["model/b"].zero_()  # the ratio is 1 at first
    arguments = {"lr": 0.1, "bias_correction": bias_correction, "max_weight_norm": max_weight_norm}
    optimizer = optim.LAMB(list(parameters.values()), **arguments)
    expected = by_hand(formula, parameters)
    ours = Ours(optimizer, parameters)
    for gradients in make_gradients():
        ours.step(gradients)
        step_torch(optimizer, parameters, gradients)
    models.assert_trees_close(ours.values, expected, 2e-6)
    models.assert_trees_close(as_numpy(parameters), expected, 2e-6)


def compare_by_hand(formula, make, **arguments):
    parameters = make_parameters()
    ours = Ours(make(list(parameters.values()), **arguments), parameters)
    for gradients in make_gradients():
        ours.step(gradients)
    models.assert_trees_close(ours.values, by_hand(formula, parameters), 1e-6)


def test_adamw_without_correction_by_hand():
    def formula(w, g, _step, kept):
        m, v = averages(kept, g, (0.9, 0.999))
        return -0.01 * (m / (np.sqrt(v) + 1e-8) + 0.1 * w)

    compare_by_hand(formula, optim.AdamW, lr=0.01, weight_decay=0.1, bias_correction=False)


@pytest.mark.parametrize(("momentum", "centered"), [(None, False), (0.9, True)])
def test_rmsprop_of_tensorflow_by_hand(momentum, centered):
    def formula(w, g, _step, kept):
        g = g + 0.1 * w
        kept["s"] = 0.9 * kept.get("s", 1) + 0.1 * g**2
        kept["a"] = 0.9 * kept.get("a", 0) + 0.1 * g
        step = 0.05 * g / np.sqrt(kept["s"] - (kept["a"] ** 2 if centered else 0) + 1e-3)
        kept["b"] = (momentum or 0) * kept.get("b", 0) + step
        return -kept["b"]

    arguments = {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": momentum, "centered": centered}
    compare_by_hand(formula, optim.RMSprop, lr=0.05, use_tf_variant=True, **arguments)


HALF, MOMENTUM = torch.float16, {"momentum": 0.9}
FIRST, SECOND = ({f"{order}_order_momentum_accum_type": HALF} for order in ("first", "second"))


@pytest.mark.parametrize(
    ("name", "is_automatic", "arguments", "slots", "accumulators"),
    [
        ("SGD", False, MOMENTUM, "momentum_buffer float32", "float32"),
        ("SGD", False, {**MOMENTUM, "velocity_accum_type": HALF}, "momentum_buffer float16", "float32"),
        ("SGD", False, {**MOMENTUM, "accum_type": HALF}, "momentum_buffer float32", "float16"),
        ("SGD", False, {**MOMENTUM, "use_combined_accum": True}, "momentum_buffer float16", None),
        ("AdamW", True, FIRST, "exp_avg float16, exp_avg_sq float32", "float32"),
        ("LAMB", False, {**SECOND, "accum_type": HALF}, "exp_avg float32, exp_avg_sq float16", "float16"),
        (
            "RMSprop",
            False,
            {**FIRST, "momentum": 0.5, "centered": True},
            "square_avg float32, momentum_buffer float16, grad_avg float16",
            "float32",
        ),
    ],
)
def test_dtypes(name, is_automatic, arguments, slots, accumulators):
    """What is kept has the dtypes that were asked for, and after an update still."""
    parameters = make_parameters("float16")
    if "velocity_accum_type" in arguments:
        arguments = {**arguments, "loss_scaling": 4.0}
    optimizer = getattr(optim, name)(list(parameters.values()), lr=0.1, **arguments)
    ours = Ours(optimizer, parameters, automatic_loss_scaling=is_automatic)
    variable = jax.ShapeDtypeStruct((), np.float16)
    expected = None if accumulators is None else np.dtype(accumulators)
    assert ours.spec.accumulator_dtype(variable) == expected
    assert ours.spec.needs_running_mean is (accumulators == "float16")
    (gradients,) = make_gradients("float32" if accumulators == "float32" else "float16", 1)
    avals = jax.eval_shape(ours._update, ours.params, ours.state, gradients)[1]
    for state in (ours.state, avals):
        found = {slot: {v.dtype.name for v in of.values()} for slot, of in inner_state(state).slots.items()}
        assert found.pop("step") == {"float32"}
        assert found == {slot: {dtype} for slot, dtype in map(str.split, slots.split(", "))}


def test_accumulators_are_no_narrower_than_their_variables():
    spec = describe(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    with jax.enable_x64(True):
        for dtype, expected in (("float32", None), ("float64", None), ("bfloat16", np.dtype("float32"))):
            assert spec.accumulator_dtype(jax.ShapeDtypeStruct((), dtype)) == expected


def test_a_scaled_velocity():
    """In float16 small velocities are lost, unless they are kept scaled; the factor may change."""
    parameters = make_parameters("float16")
    values = list(parameters.values())
    common = {"lr": 2.0**24, "momentum": 0.5}
    plain = Ours(optim.SGD(values, **common), parameters)
    lost = Ours(optim.SGD(values, **common, use_combined_accum=True), parameters)

    def make(scaling):
        return optim.SGD(values, **common, use_combined_accum=True, velocity_scaling=scaling)

    kept = Ours(make(2.0**20), parameters)
    tiny = {name: np.full(shape, 2.0**-27, "float32") for name, shape in SHAPES.items()}
    for number in range(4):
        if number == 2:
            kept.set_optimizer(make(2.0**18))
        for ours in (plain, lost, kept):
            ours.step(tiny)
    buffers = inner_state(kept.state).slots["momentum_buffer"]
    np.testing.assert_array_equal(np.asarray(buffers["model/a.bias"]), 2.0**-9 * 1.875)
    models.assert_trees_close(kept.values, plain.values, 1e-3)
    assert not np.allclose(lost.values["model/a.bias"], plain.values["model/a.bias"], rtol=1e-1)
    assert kept.num_traces == 1


def test_a_variable_without_a_group():
    parameters = make_parameters()
    first, *others = parameters.values()
    first.requires_grad_(False)
    optimizer = torch.optim.SGD([first, others[0]])
    groups = assign_groups(optimizer, parameters)
    assert groups == {"model/a.bias": 0}
    transformation = make_transformation(describe(optimizer), groups)
    with pytest.raises(ValueError, match="Variable model/a.weight is in no group of the optimizer"):
        transformation.init({"model/a.weight": np.zeros(3, "float32")})
    with pytest.raises(ValueError, match="params must be given"):
        transformation.update({}, None)


def test_specs_are_values():
    """Equal structures share an update; the values do not matter for that."""
    parameters = list(make_parameters().values())
    spec = describe(optim.Adam(parameters, lr=0.1))
    other = describe(optim.Adam(parameters, lr=0.2))
    assert spec.structure == other.structure
    assert hash(spec.structure) == hash(other.structure)
    assert dataclasses.replace(spec.structure, clips=True) != spec.structure
    assert spec.with_values_of(other).values[0]["lr"] == 0.2
