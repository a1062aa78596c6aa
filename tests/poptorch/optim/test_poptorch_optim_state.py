"""The state of an optimizer leaves the devices and comes back, by `state_dict`, as it was."""

import copy
import gc
import io

import jax
import numpy as np
import pytest
import torch

from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.optim.device_state import DeviceState, SavedState
from ipu_pipeline.poptorch.optim.specs import assign_groups, describe
from ipu_pipeline.poptorch.optim.transformations import export_state, import_state, inner_state
from tests.poptorch.optim.test_poptorch_optim import Ours, make_gradients, make_parameters, step_torch
from tests.support import models

pytestmark = pytest.mark.usefixtures("nothing_said")


class Executor(Ours):
    """A model in miniature: it takes the optimizer's state when it begins, and gives it when asked."""

    def __init__(self, optimizer, parameters, **options):
        super().__init__(optimizer, parameters, **options)
        self.num_fetched, self.parameters = 0, parameters
        saved = optimizer.device_state.take(parameters, [*parameters.values()])
        if saved is not None:
            self.state = import_state(self.state, saved, self.spec, self.group_of)
        optimizer.device_state.connect(self.fetch, parameters)

    def fetch(self):
        self.num_fetched += 1
        return export_state(self.state, self.spec, self.group_of)


def make(name, parameters, **arguments):
    return getattr(optim, name)(list(parameters.values()), lr=0.01, **arguments)


def start(name, **arguments):
    """An optimizer, and a model that runs with it."""
    parameters = make_parameters()
    optimizer = make(name, parameters, **arguments)
    return optimizer, Executor(optimizer, parameters)


@pytest.mark.parametrize(
    ("name", "arguments", "num_before", "is_automatic"),
    [
        ("SGD", {}, 2, False),
        ("SGD", {"momentum": 0.9, "dampening": 0.5, "velocity_accum_type": torch.float16}, 0, False),
        ("SGD", {"momentum": 0.9, "use_combined_accum": True, "velocity_scaling": 128.1}, 2, False),
        ("Adam", {"loss_scaling": 2.0}, 0, True),
        ("AdamW", {"first_order_momentum_accum_type": torch.float16, "max_grad_norm": 1.0}, 2, False),
        ("RMSprop", {"momentum": 0.5, "centered": True, "use_tf_variant": True}, 2, True),
        ("LAMB", {}, 2, False),
    ],
)
def test_as_if_never_interrupted(name, arguments, num_before, is_automatic):
    """Listing 19 of the user guide."""
    options = {"automatic_loss_scaling": is_automatic}
    parameters = make_parameters()
    optimizer = make(name, parameters, **arguments)
    assert optimizer.state_dict()["ipu_state"] is None
    assert optimizer.state_dict()["ipu_param"] is None
    ours = Executor(optimizer, parameters, **options)
    gradients = make_gradients(count=5)
    for number in range(num_before):
        ours.step(gradients[number])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.device_state.disconnect()

    new = make(name, parameters, **arguments)
    new.load_state_dict(torch.load(file))
    again = Executor(new, parameters, **options)
    again.params = jax.tree.map(lambda value: jax.numpy.array(np.asarray(value)), ours.params)
    jax.tree.map(np.testing.assert_array_equal, again.state, ours.state)
    for number in range(num_before, 5):
        ours.step(gradients[number])
        again.step(gradients[number])
    models.assert_trees_close(again.values, ours.values, 0)
    jax.tree.map(np.testing.assert_array_equal, again.state, ours.state)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_under_the_names_of_torch(name):
    references = make_parameters()
    arguments = {} if name == "Adam" else {"momentum": 0.9}
    reference = getattr(torch.optim, name)(list(references.values()), lr=0.01, **arguments)
    optimizer, ours = start(name, **arguments)
    for gradients in make_gradients(count=3):
        ours.step(gradients)
        step_torch(reference, references, gradients)
    expected = {
        f"{slot}___{variable}": value
        for variable, parameter in references.items()
        for slot, value in reference.state[parameter].items()
    }
    found = optimizer.state_dict()["ipu_state"]
    assert set(found) ^ set(expected) == {
        f"step___{variable}" for variable in references if name == "SGD"
    }  # we count SGD's updates, since its first one is another
    for key in set(found) & set(expected):
        assert found[key].dtype == expected[key].dtype
        np.testing.assert_allclose(found[key].numpy(), expected[key].numpy(), rtol=1e-5, atol=1e-7)


def test_hyperparameters_in_use():
    optimizer, executor = start("AdamW", max_grad_norm=2.0, loss_scaling=4.0)
    optimizer.param_groups[0]["lr"] = 0.5  # not yet in use
    found = {name: value.tolist() for name, value in optimizer.state_dict()["ipu_param"].items()}
    assert found == {
        "loss_scaling": 4,
        "max_grad_norm": 2,
        "lr___0": np.float32(0.01),
        "betas___0": [np.float32(0.9), np.float32(0.999)],
        "eps___0": np.float32(1e-8),
        "weight_decay___0": np.float32(0.01),
    }
    assert executor.num_fetched == 1


def test_only_states_with_what_was_on_the_devices():
    parameters = make_parameters()
    optimizer = make("Adam", parameters)
    reference = torch.optim.Adam(list(parameters.values()))
    for state in (reference.state_dict(), {}):
        with pytest.raises(RuntimeError, match=r"Only IPU optimizer states can be loaded onto the IPU\."):
            optimizer.load_state_dict(state)
    optimizer.load_state_dict(make("Adam", parameters).state_dict())
    assert optimizer.device_state.take(parameters, [*parameters.values()]) is None
    state = make("Adam", parameters, weight_decay=0.5).state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # torch's part, too


def test_loading_while_a_model_runs():
    """What was loaded counts until the model has taken it."""
    optimizer, ours = start("Adam")
    first, second, third = make_gradients(count=3)
    ours.step(first)
    saved = optimizer.state_dict()
    ours.step(second)
    assert optimizer.state_dict()["ipu_state"]["step___model/b"] == 2
    assert not optimizer.device_state.is_loaded
    optimizer.load_state_dict(saved)
    ours.step(third)
    assert optimizer.device_state.is_loaded
    assert optimizer.state_dict()["ipu_state"]["step___model/b"] == 1
    again = Executor(optimizer, ours.parameters)
    assert not optimizer.device_state.is_loaded
    again.step(third)
    assert optimizer.state_dict()["ipu_state"]["step___model/b"] == 2  # of the model again


def test_a_state_before_the_first_update_resets():
    ours = start("SGD", momentum=0.9, dampening=0.5)[1]
    fresh = export_state(ours.state, ours.spec, ours.group_of)
    assert set(fresh.ipu_state) == {f"step___{name}" for name in ours.params}  # torch has no buffers yet
    first, second = make_gradients(count=2)
    ours.step(first)
    ours.state = import_state(ours.state, fresh, ours.spec, ours.group_of)
    before = ours.values
    ours.step(second)
    for name, value in ours.values.items():  # no momentum and no dampening
        np.testing.assert_allclose(before[name] - value, 0.01 * second[name], rtol=1e-3, atol=1e-7)


def test_a_state_in_part(caplog):
    """What is not there stays as it is; there is a warning where a variable has only a part."""
    ours = start("SGD", momentum=0.9)[1]
    for gradients in make_gradients(count=2):
        ours.step(gradients)
    key = "momentum_buffer___model/a.bias"
    saved = SavedState({key: torch.full((4,), 7.0), "momentum_buffer___gone": torch.zeros(1)}, {})
    state = import_state(ours.state, saved, ours.spec, ours.group_of)
    known, found = (inner_state(s).slots["momentum_buffer"] for s in (ours.state, state))
    np.testing.assert_array_equal(found["model/a.bias"], 7)
    np.testing.assert_array_equal(found["model/b"], known["model/b"])
    assert [record.message for record in caplog.records] == [
        "The optimizer's state has what is not needed, and is ignored: momentum_buffer___gone.",
    ]
    adam = start("Adam")[1]
    saved = SavedState({"exp_avg___model/b": torch.zeros(())}, {})
    import_state(adam.state, saved, adam.spec, adam.group_of)
    assert caplog.records[1].message == (
        "The optimizer's state lacks what starts from nothing: exp_avg_sq___model/b."
    )


def test_states_of_others():
    ours, other = start("Adam")[1], start("SGD", momentum=0.9)[1]
    state = export_state(ours.state, ours.spec, ours.group_of).ipu_state
    wide = {"exp_avg___model/a.bias": torch.zeros(5)}
    for model, changes, error, match in [
        (other, {}, RuntimeError, "is of another optimizer or of another model: it has exp_avg___model"),
        (ours, wide, ValueError, r"exp_avg___model/a.bias must have the shape \[4\] .* it has \[5\]"),
    ]:
        with pytest.raises(error, match=match):
            import_state(model.state, SavedState({**state, **changes}, {}), model.spec, model.group_of)


def test_a_loaded_state_under_other_names():
    """It is an error each time, and not only once."""
    parameters, (other, others) = make_parameters(), start("Adam")
    state = other.state_dict()
    state["ipu_state"] = {f"{key}_of_other": value for key, value in state["ipu_state"].items()}
    optimizer = make("Adam", parameters)
    optimizer.load_state_dict(state)
    for _number in range(2):
        with pytest.raises(RuntimeError, match="is of another optimizer or of another model"):
            Executor(optimizer, parameters)
    assert optimizer.state_dict()["ipu_state"].keys() == state["ipu_state"].keys()
    assert others.num_fetched == 1


def test_groups_count_for_themselves():
    """A group that is added later starts from the first update, as in torch."""
    parameters, references = make_parameters(), make_parameters()
    gradients = make_gradients(count=5)

    def begin(values):
        first, *others = values.values()
        return optim.Adam([first], lr=0.01), others

    optimizer, others = begin(parameters)
    reference, of_reference = begin(references)
    ours = Executor(optimizer, {"model/a.weight": parameters["model/a.weight"]})
    for number in range(2):
        ours.step({"model/a.weight": gradients[number]["model/a.weight"]})
        step_torch(reference, {"model/a.weight": references["model/a.weight"]}, gradients[number])
    optimizer.device_state.disconnect()
    optimizer.add_param_group({"params": others})
    reference.add_param_group({"params": of_reference})
    again = Executor(optimizer, parameters)
    again.params["model/a.weight"] = ours.params["model/a.weight"]
    for number in range(2, 5):
        again.step(gradients[number])
        step_torch(reference, references, gradients[number])
    expected = {name: parameter.detach().numpy() for name, parameter in references.items()}
    models.assert_trees_close(again.values, expected, 1e-6)


def test_who_has_the_state():
    parameters = make_parameters()
    optimizer = make("AdamW", parameters)
    ours = Executor(optimizer, parameters)
    *steps, last = make_gradients(count=3)
    for gradients in steps:
        ours.step(gradients)
    duplicate = copy.deepcopy(optimizer)
    assert duplicate.state_dict()["ipu_state"]["step___model/b"] == 2
    assert not duplicate.device_state.is_loaded
    copies = duplicate.param_groups[0]["params"]
    renamed = dict(zip("abcdef", copies, strict=False))
    assert duplicate.device_state.take(renamed, copies).ipu_state["step___a"] == 2
    ours.step(last)
    another = Executor(optimizer, parameters)  # takes over from the first, which is still there
    assert inner_state(another.state).slots["step"]["model/b"] == 3
    del ours, another  # the executor is held weakly: what was last known counts
    gc.collect()
    assert optimizer.state_dict()["ipu_state"]["step___model/b"] == 3
    assert optimizer.device_state.take(parameters, [*parameters.values()]) is not None

    state = DeviceState()
    state.connect(nothing, parameters)
    assert state.read([]) is None
    state.disconnect()
    assert state.take(parameters, [*parameters.values()]) is None


def nothing():
    """A model that has not been compiled."""
    return


def test_parameters_that_two_names_stand_for():
    """Tied weights are one variable; the caller gives one name."""
    (parameter,) = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([parameter])
    assert assign_groups(optimizer, {"model/a": parameter}) == {"model/a": 0}
    assert describe(optimizer).values[0]["lr"] == 0.001
