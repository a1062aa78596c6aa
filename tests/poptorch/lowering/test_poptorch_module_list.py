"""torch's own list of module tests: each module, in training and evaluation, forward and backward.

The list is that of torch.testing. Of each module, and of each mode where they differ, one case is taken: in
training the last of its inputs, in evaluation the first. In float64, where an error of a formula shows.
"""

import dataclasses
import functools

import jax
import pytest
import torch

from tests.support import lowered

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what is in its own list


@dataclasses.dataclass
class Case:
    """A module of torch's list with arguments.

    Attributes:
      fixed: arguments that have no gradient: a loss is differentiated by what it is the loss of.
    """

    name: str
    module: torch.nn.Module
    args: tuple
    kwargs: dict
    fixed: list


def make_case(info, training, given, name):
    torch.manual_seed(0)
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).double()
    module.train(training)
    args, kwargs = given.forward_input.args, given.forward_input.kwargs
    if "Lazy" in info.name:
        module(*args, **kwargs)  # makes its parameters
    samples = getattr(module, "_random_samples", None)
    if samples is not None:  # torch's list has them in float64, which torch itself refuses
        module._random_samples = samples.to(args[0].dtype)
    fixed = list(args[1:]) if info.name.endswith("Loss") else []
    return Case(name, module, args, kwargs, fixed)


@functools.cache
def cases():
    # Not at the top: every process that runs tests would import a large part of torch and SciPy.
    from torch.testing._internal.common_modules import module_db

    found = []
    for info in module_db:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            torch.manual_seed(0)
            drawn = {"device": "cpu", "dtype": torch.float64, "requires_grad": False}
            inputs = list(info.module_inputs_func(info, **drawn, training=training))
            name = f"{info.name} {'train' if training else 'eval'}"
            found.append(make_case(info, training, inputs[-1 if training else 0], name))
    return found


def failures_of(some):
    """The errors of some cases by their names; one by one only if they fail together."""
    group = lowered.Group([case.module for case in some])
    calls = [(case.args, case.kwargs) for case in some]
    fixed = [tensor for case in some for tensor in case.fixed]
    try:
        with jax.enable_x64(True):
            lowered.compare(group, calls, fixed=fixed, tolerance=1e-12)
    except Exception as error:
        if len(some) == 1:
            return {some[0].name: error}
        half = len(some) // 2
        return failures_of(some[:half]) | failures_of(some[half:])
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
def test_the_list_is_computed_as_torch_does(part):
    assert len(cases()) > 120
    assert not failures_of(cases()[part::8])
