"""Optimizers on the host: arguments, constant and variable attributes, what is refused, what is told of."""

import copy
import inspect
import itertools
import logging
import pickle

import numpy as np
import pytest
import torch

from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.optim.specs import LossScaling, check_compatible, check_same_groups, describe

pytestmark = pytest.mark.usefixtures("nothing_said")


NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")


def parameters(count=1):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_defaults_and_what_pop_torch_adds():
    for name in NAMES:
        optimizer = getattr(optim, name)(parameters())
        assert optimizer.loss_scaling == 1
        assert optimizer.accum_type is torch.float32
        if name == "LAMB":
            adams = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
            assert optimizer.defaults == {**adams, "weight_decay": 1e-2, "max_weight_norm": 65500.0}
        else:
            of_torch = getattr(torch.optim, name)
            assert isinstance(optimizer, of_torch)
            assert optimizer.defaults == of_torch(parameters()).defaults
        has_no_norm = name in ("RMSprop", "LAMB")
        assert getattr(optimizer, "max_grad_norm", None) == (None if has_no_norm else np.inf)
        has_correction = name in ("AdamW", "LAMB")
        assert getattr(optimizer, "bias_correction", None) == (True if has_correction else None)
        if name == "SGD":
            assert optimizer.use_combined_accum is False
            assert optimizer.velocity_accum_type is torch.float32
            assert "velocity_scaling" not in optimizer.param_groups[0]
        else:
            assert optimizer.first_order_momentum_accum_type is torch.float32
            assert optimizer.second_order_momentum_accum_type is torch.float32
        attributes = optimizer.variable_attrs
        for method in (attributes.isConstant, attributes.markAsConstant, attributes.markAsVariable):
            with pytest.raises(AssertionError, match=r"Unknown attribute nobody, allowed values: \['lr', "):
                method("nobody")


def test_every_argument_of_torch():
    """By the same name, and what may be given by position at the same place, with torch's default."""
    values = dict.fromkeys(("lr", "momentum", "alpha", "eps", "weight_decay"), 0.5) | {"betas": (0.5, 0.6)}
    for name in NAMES[:-1]:
        theirs = inspect.signature(getattr(torch.optim, name)).parameters
        ours = inspect.signature(getattr(optim, name)).parameters
        assert set(theirs) <= set(ours)
        positional = [n for n, p in theirs.items() if p.kind is not p.KEYWORD_ONLY]
        if name == "RMSprop":  # PopTorch has it without `capturable`
            positional = positional[: positional.index("capturable")]
        assert list(ours)[: len(positional)] == positional
        for argument in theirs.keys() - {"params", "dampening", "differentiable"}:
            value = values.get(argument, True)
            given = {argument: value} | ({"momentum": 0.5} if argument == "nesterov" else {})
            optimizer = getattr(optim, name)(parameters(), **given)
            if argument != "decoupled_weight_decay" or name == "Adam":
                assert optimizer.defaults[argument] == value


def test_which_attributes_are_constant():
    """What has its default value, but the learning rate; of ours, what is not given."""
    groups = [{"params": parameters()}, {"params": parameters(), "weight_decay": 0.1}]
    spec = describe(torch.optim.SGD(groups, lr=0.001, momentum=0.9))
    of_groups = {(0, "dampening"), (0, "weight_decay"), (1, "dampening")}
    assert spec.constants == {*of_groups, (None, "loss_scaling")}
    spec = describe(torch.optim.AdamW(parameters(), weight_decay=1e-2, betas=(0.9, 0.98)))
    assert spec.constants == {(0, "weight_decay"), (0, "eps"), (None, "loss_scaling")}
    names = ("lr", "momentum", "loss_scaling")
    ours = optim.SGD(parameters(), lr=0.01)
    assert [ours.variable_attrs.isConstant(name) for name in names] == [False, True, True]
    ours = optim.SGD(parameters(), lr=0.01, momentum=0.0, loss_scaling=1.0)
    assert not any(map(ours.variable_attrs.isConstant, names))
    ours.variable_attrs.markAsConstant("loss_scaling")
    assert ours.variable_attrs.isConstant("loss_scaling")


def test_what_is_constant_and_nothing_is_left_out():
    constant, variable = describe(optim.SGD(parameters())), describe(optim.SGD(parameters(), momentum=0.0))
    assert not constant.structure.groups[0].has_momentum
    assert variable.structure.groups[0].has_momentum
    assert constant.structure.loss_scaling is LossScaling.NONE
    assert describe(optim.SGD(parameters(), loss_scaling=1.0)).structure.loss_scaling is LossScaling.MANUAL
    automatic = describe(optim.SGD(parameters()), automatic_loss_scaling=True)
    assert automatic.structure.loss_scaling is LossScaling.AUTOMATIC


def test_another_optimizer_in_its_place():
    half, clipped = torch.float16, {"max_grad_norm": 1.0}
    for first, second, match in [
        ({}, {"momentum": 0.9}, "momentum of group 0 is constant since the model was compiled, and cannot"),
        ({}, {"loss_scaling": 2.0}, "loss_scaling is constant .* cannot change from 1.0 to 2.0"),
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}, None),
        ({"weight_decay": 0.1}, {}, None),
        ({}, {"momentum": 0.0, "loss_scaling": 1.0}, None),
        ({}, {"nesterov": True, "momentum": 0.1}, "differs in nesterov of group 0: it was False and now"),
        ({}, {"maximize": True}, "differs in maximize of group 0"),
        ({}, {"accum_type": half}, "is already compiled.*accum_type.*was float32 and now is float16"),
        ({}, {"velocity_accum_type": half}, "differs in velocity_accum_type"),
        ({}, {"use_combined_accum": True}, "use_combined_accum"),
        ({}, clipped, "differs in whether max_grad_norm is infinite: it was infinite and now is"),
        ({"max_grad_norm": 2.0}, clipped, None),
        ({"max_grad_norm": 2.0}, {}, None),
    ]:
        old, new = (describe(optim.SGD(parameters(), lr=0.1, **arguments)) for arguments in (first, second))
        if match is None:
            found = check_compatible(old, new)
            assert found.structure == old.structure
            assert found.constants == old.constants
            assert (found.values, found.max_grad_norm) == (new.values, new.max_grad_norm)
        else:
            with pytest.raises(Error, match=match):
                check_compatible(old, new)


def test_another_class_or_number_of_groups():
    old = describe(torch.optim.Adam(parameters()))
    with pytest.raises(Error, match="differs in its class: it was Adam and now is SGD"):
        check_compatible(old, describe(torch.optim.SGD(parameters())))
    with pytest.raises(Error, match="differs in decoupled_weight_decay of group 0"):
        check_compatible(old, describe(torch.optim.AdamW(parameters(), weight_decay=0)))
    groups = [{"params": parameters()}, {"params": parameters()}]
    with pytest.raises(Error, match="differs in the number of groups: it was 1 and now is 2"):
        check_compatible(old, describe(torch.optim.Adam(groups)))
    for name in ("bias_correction", "use_tf_variant"):
        made = optim.AdamW if name == "bias_correction" else optim.RMSprop
        old, new = (describe(made(parameters(), **{name: value})) for value in (True, False))
        with pytest.raises(Error, match=f"differs in {name}: it was True and now is False"):
            check_compatible(old, new)


def test_parameters_stay_in_their_groups():
    check_same_groups({"a": 0, "b": 1}, {"a": 0, "b": 1})
    with pytest.raises(Error, match="a was in group 0 and now is in none, and 1 more have moved"):
        check_same_groups({"a": 0, "b": 1}, {"b": 0})


def test_accumulation_types():
    for name in NAMES:
        made = getattr(optim, name)
        arguments = [n for n in inspect.signature(made).parameters if n.endswith("accum_type")]
        assert len(arguments) == (2 if name == "SGD" else 3)
        for argument in arguments:
            text = "Accumulation types must be either torch.float32 or torch.float16"
            with pytest.raises(AssertionError, match=text):
                made(parameters(), **{argument: torch.bfloat16})
            optimizer = made(parameters())
            setattr(optimizer, argument, torch.float64)
            text = f"{argument} must be set to either torch.float16 or torch.float32"
            with pytest.raises(ValueError, match=text):
                describe(optimizer)


def test_what_is_refused():
    for made in (torch.optim.Adam, torch.optim.AdamW, optim.Adam, optim.AdamW):
        with pytest.raises(ValueError, match=r"Only non-amsgrad Adam/AdamW optimizers are supported\."):
            describe(made(parameters(), amsgrad=True))
    with pytest.raises(ValueError, match="Group 0 of the optimizer has differentiable=True"):
        describe(torch.optim.SGD(parameters(), differentiable=True))
    for other in (torch.optim.LBFGS(parameters()), torch.optim.SparseAdam(parameters()), None):
        text = "Unsupported optimizer type .* Types supported: .*SGD, RMSprop, Adam"
        with pytest.raises(TypeError, match=text):
            describe(other)
    optimizer = optim.SGD(parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = "0.1"
    with pytest.raises(TypeError, match="The optimizer's lr of group 0 must be a number; got '0.1'"):
        describe(optimizer)
    for scale in (0, -1.0, np.inf, np.nan, 1e39):
        text = "The optimizer's loss_scaling must be above 0 and finite in float32"
        with pytest.raises(ValueError, match=text):
            describe(optim.SGD(parameters(), loss_scaling=scale))
    with pytest.raises(ValueError, match="The optimizer's max_grad_norm must be above 0; got 0.0"):
        describe(optim.SGD(parameters(), max_grad_norm=0.0))
    with pytest.raises(ValueError, match="lr must be at least 0; got -1"):
        optim.LAMB(parameters(), lr=-1.0)
    with pytest.raises(ValueError, match="betas must be two numbers"):
        optim.LAMB(parameters(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="velocity_scaling of group 0 must be above 0"):
        describe(optim.SGD(parameters(), use_combined_accum=True, velocity_scaling=0.0))


def test_how_torch_computes_has_no_effect(caplog):
    optimizer = torch.optim.Adam(parameters(), foreach=False, capturable=True)
    assert describe(optimizer).structure == describe(torch.optim.Adam(parameters())).structure
    assert warnings_of(caplog) == [
        "capturable=True has no effect: it says how torch computes; updates run on JAX."
    ]


class Mine(optim.LAMB):
    def step(self):
        raise AssertionError


def test_subclasses(caplog):
    for _time in range(2):
        assert describe(Mine(parameters())).name == "LAMB"
    (warning,) = warnings_of(caplog)
    told = "Mine is a subclass of LAMB. PopTorch does not run Python optimizer code directly"
    assert warning.startswith(told)
    for name in NAMES:
        describe(getattr(optim, name)(parameters()))
    assert len(warnings_of(caplog)) == 1


def test_what_means_nothing(caplog):
    """At first it is somebody's own. What comes later is told of, once."""
    optimizer = optim.SGD([{"params": parameters()}, {"params": parameters()}], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    optimizer.mine = 1
    old = describe(optimizer)
    check_compatible(old, describe(optimizer))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # sets initial_lr in the other group, and wraps step
    optimizer.lr = 0.5
    check_compatible(old, describe(optimizer), relaxed=True)
    assert warnings_of(caplog) == []
    for _time in range(2):
        check_compatible(old, describe(optimizer))
    assert warnings_of(caplog) == [
        "Ignoring unexpected group 1 attribute in SGD optimizer: ['initial_lr']",
        "Ignoring unexpected optimizer attribute in SGD optimizer: ['lr']",
    ]


def test_a_scale_in_a_group(caplog):
    optimizer = optim.SGD(parameters(), lr=0.1)
    optimizer.param_groups[0]["loss_scaling"] = 4.0
    assert describe(optimizer).loss_scaling == 1
    (warning,) = warnings_of(caplog)
    assert warning == "Ignoring unexpected group 0 attribute in SGD optimizer: ['loss_scaling']"


def test_scaled_velocities(caplog):
    optim.SGD(parameters(), velocity_scaling=2.0)
    assert "velocity_scaling value ignored when using the separate variant" in warnings_of(caplog)[0]
    optim.SGD(parameters(), use_combined_accum=True, accum_type=torch.float16)
    assert "are ignored when using the combined variant" in warnings_of(caplog)[1]
    groups = [{"params": parameters()}, {"params": parameters(), "velocity_scaling": 8.0}]
    optimizer = optim.SGD(groups, use_combined_accum=True, velocity_scaling=2.0)
    assert [group["velocity_scaling"] for group in optimizer.param_groups] == [2, 8]
    assert not optimizer.variable_attrs.isConstant("velocity_scaling")
    spec = describe(optimizer)
    assert spec.structure.scales_velocity
    assert not spec.needs_running_mean
    optimizer.add_param_group({"params": parameters()})
    assert optimizer.param_groups[2]["velocity_scaling"] == 2


def test_a_new_scale_is_ignored_where_it_is_found(caplog):
    old, new = (
        describe(optim.SGD(parameters(), loss_scaling=scale), automatic_loss_scaling=True)
        for scale in (1, 2)
    )
    check_compatible(old, new)
    assert "The new loss_scaling, 2.0, is ignored" in warnings_of(caplog)[0]


def through_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))  # our own


def test_copies_keep_what_pop_torch_adds():
    for name, duplicate in itertools.product(NAMES, (copy.copy, copy.deepcopy, through_pickle)):
        optimizer = getattr(optim, name)(parameters(), lr=0.5, loss_scaling=8.0, accum_type=torch.float16)
        optimizer.variable_attrs.markAsVariable("weight_decay")
        found = duplicate(optimizer)
        assert (found.loss_scaling, found.accum_type) == (8, torch.float16)
        assert not found.variable_attrs.isConstant("weight_decay")
        assert describe(found).structure == describe(optimizer).structure
        assert describe(found).values == describe(optimizer).values
        assert found.device_state is not optimizer.device_state
        assert found.state_dict()["ipu_state"] is None
