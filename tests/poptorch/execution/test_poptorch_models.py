"""Whole models with random blocks, strategies and counts equal plain torch; see `poptorch_cases`.

`make thorough` compares more than `make test`, and any number are compared by
`POPTORCH_CASES=500 pytest tests/poptorch/execution/test_poptorch_models.py`.
"""

import inspect
import operator
import os

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_cases import annotate, case_options, draw_case, make_optimizer
from tests.support.poptorch_front import Reference, join, leaves, norm, reference, seeded
from tests.support.poptorch_models import WHOLE_MODELS, Draw

NUM_CALLS = 2
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}  # of a leaf's 2-norm
UNIT = 2.0**-53  # to which float64 rounds
ILL_CONDITIONED = 1e-3

# With the first updates in `test_gradients_in_float64` they have every mode of outputs, both reductions and
# kinds of strategy, and both ways to place blocks. `make test` has the first one.
SHARDED = {"is_sharded": True, "offload": ("Accumulator", "Activation"), "loss_scaling": 128.0, "frozen": 2}
CASES = {
    "experts": lambda: draw_case(87, "experts"),  # EveryN, sums
    "siamese": lambda: draw_case(156, "siamese"),  # Sum, Running means, AutoIncrement, offloaded
    "sharded": lambda: draw_case(2296, "siamese", **SHARDED),  # Final, given stages, detached
}
NUM_RANDOM = int(os.environ.get("POPTORCH_CASES", "1"))


def largest_difference(tensors, others):
    """Relative to the norm of each of the others."""
    pairs = [(tensors[name], others[name]) for name in others if others[name].is_floating_point()]
    return max((norm(one.double() - other) / max(norm(other), 1e-30) for one, other in pairs), default=0.0)


def assert_near(actual, expected, tolerance, rooms=None):
    """Compares tensors by name: integers exactly, others by the 2-norm and the room of each."""
    assert actual.keys() == expected.keys()
    wrong = {}
    for name, wanted in expected.items():
        found = actual[name]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        if wanted.is_floating_point():
            difference = norm(found.double() - wanted.double())
            if not difference <= tolerance * norm(wanted) + (rooms or {}).get(name, 0.0):
                wrong[name] = (difference, norm(wanted))
        else:
            assert torch.equal(found, wanted), name
    assert not wrong, f"difference and norm: {wrong}"


def numbered(tensors):
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(tensors)}


def state_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def wanted_outputs(outputs, case):
    """What a call returns, of what plain torch gave for each micro-batch."""
    if case.output_mode == "Sum":
        return numbered([sum(values) for values in zip(*map(leaves, outputs), strict=True)])
    if case.output_mode == "Final":
        return numbered(leaves(outputs[-1]))
    return numbered(join(outputs if case.output_mode == "All" else outputs[case.period - 1 :: case.period]))


class Compared:
    """A model, and plain torch with a copy of it, which are trained alike.

    How far rounding goes depends on the model. In float32 plain torch therefore does the same in float64 as
    well, and where its own results are further apart than usual, ours may be from them, too.
    """

    def __init__(self, case):
        self.case = case
        self.whole = WHOLE_MODELS[case.model]
        self.draw = Draw(torch.Generator().manual_seed(case.seed), getattr(torch, case.dtype))
        self.model = seeded(self.whole.make, case.seed).to(self.draw.dtype)
        for parameter in list(self.model.parameters())[: case.frozen]:
            parameter.requires_grad_(False)
        self.plain = self.make_plain(self.draw.dtype)
        self.exact = self.make_plain(torch.float64) if case.dtype == "float32" else None
        self.before = state_of(self.model)
        annotate(self.model, case)
        self.optimizer = make_optimizer(case, self.model, plain=False)
        self.executor = poptorch.trainingModel(self.model, case_options(case, True), self.optimizer)

    def make_plain(self, dtype):
        plain = reference(self.model, lambda _parameters: None)
        model = plain.model.to(dtype)
        return Reference(model, make_optimizer(self.case, model, plain=True))

    def tolerance(self, expected, find_exact):
        """For what plain torch gave; `find_exact` gives the same of the one that computes in float64."""
        base = TOLERANCES[self.case.dtype]
        if self.exact is None:
            return base
        own = largest_difference(expected, find_exact())
        assert own < ILL_CONDITIONED, "plain torch differs from itself"
        return max(base, 16 * own)  # torch adds up in float64 here and there, JAX does not

    def arguments(self, batch):
        """Positional ones, and the last ones by name."""
        names = list(inspect.signature(self.model.forward).parameters)
        number = len(batch) - min(self.case.with_keywords, len(batch))
        return batch[:number], dict(zip(names[number:], batch[number:], strict=False))

    def train(self):
        """Calls both; compares what they return."""
        case = self.case
        counts = case.device_iterations, case.accumulation
        batch = self.whole.make_batch(self.draw, case.rows * counts[0] * counts[1])
        args, kwargs = self.arguments(batch)
        if case.compiles_first and not self.executor.isCompiled():
            self.executor.compile(*args, **kwargs)
        outputs = numbered(leaves(self.executor(*args, **kwargs)))

        def run(plain):
            dtype = next(plain.model.parameters()).dtype
            cast = [t.to(dtype) if t.is_floating_point() else t for t in batch]
            made = plain.train(cast, *counts, operator.itemgetter(-1), case.is_mean)
            return wanted_outputs(made, case)

        expected = run(self.plain)
        assert_near(outputs, expected, self.tolerance(expected, lambda: run(self.exact)))

    def compare_state(self):
        """Compares parameters and buffers, and in float64 by how much they changed, which says more."""
        state, expected = state_of(self.model), state_of(self.plain.model)
        assert_near(state, expected, self.tolerance(expected, lambda: state_of(self.exact.model)))
        if self.exact is None:
            changes, wanted = ({n: t - self.before[n] for n, t in of.items()} for of in (state, expected))
            steps = 2 * NUM_CALLS * self.case.device_iterations  # each rounds its result, ours and torch's
            rooms = {name: steps * UNIT * norm(tensor) for name, tensor in expected.items()}
            assert_near(changes, wanted, TOLERANCES["float64"], rooms)

    def compare_optimizer(self):
        """Compares what an optimizer of PopTorch shows of its state: averages of gradients."""
        state = {}
        for key, tensor in self.optimizer.state_dict()["ipu_state"].items():
            slot, _separator, name = key.partition("___model/")
            if name and slot != "step":
                state[slot, name] = tensor

        def find(plain):
            of = plain.optimizer.state
            return {(slot, name): of[plain.model.get_parameter(name)][slot] for slot, name in state}

        expected = find(self.plain)
        assert_near(state, expected, 2 * self.tolerance(expected, lambda: find(self.exact)))

    def set_rate(self, rate):
        """Changes the rate of all, in each group alike."""
        others = [plain.optimizer for plain in (self.plain, self.exact) if plain is not None]
        for optimizer in (self.optimizer, *others):
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.executor.setOptimizer(self.optimizer)

    def go_back(self):
        """To the weights of the start, with a small rate."""
        for plain in (self.plain, self.exact):
            if plain is not None:
                plain.model.load_state_dict(self.before)
        self.executor.load_state_dict(self.before)
        self.set_rate(0.02)

    def infer(self):
        """Compares inference, with all modules in evaluation mode."""
        inference = poptorch.inferenceModel(self.model.eval(), case_options(self.case, False))
        batch = self.whole.make_batch(self.draw, self.case.rows * self.case.infers)
        inputs = batch[: self.whole.num_inputs]

        def run(plain):
            plain.model.eval()
            dtype = next(plain.model.parameters()).dtype
            cast = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
            return numbered(join(plain.infer(cast, self.case.infers)))

        expected = run(self.plain)
        found = numbered(leaves(inference(*inputs)))
        assert_near(found, expected, self.tolerance(expected, lambda: run(self.exact)))


def check(case):
    """Trains as a case says, and then infers."""
    with jax.enable_x64(case.dtype == "float64"):
        try:
            compared = Compared(case)
            for call in range(NUM_CALLS):
                if call:
                    _come_between(compared)
                compared.train()
            compared.compare_state()
            if case.is_ours:
                compared.compare_optimizer()
            if case.infers:
                compared.infer()
        except BaseException as error:
            error.add_note(f"The case that failed: {case}")
            raise


def _come_between(compared):
    """Does to all what must not matter, or what plain torch does as well."""
    if compared.case.optimizer == "gradient":
        compared.compare_state()
        compared.go_back()
    elif compared.case.between == "detach":
        compared.executor.detachFromDevice()
        compared.executor.attachToDevice()
    elif compared.case.between == "look":
        compared.compare_state()
    elif compared.case.between == "other rate":
        compared.set_rate(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(WHOLE_MODELS))
def test_gradients_in_float64(name):
    """With a rate of 1, the first update of SGD subtracts the gradient."""
    fixed = {"dtype": "float64", "optimizer": "gradient", "is_ours": False, "loss_scaling": 1.0}
    fixed |= {"device_iterations": 1, "output_mode": "All", "period": None, "frozen": 0}
    seed = 187 + sorted(WHOLE_MODELS).index(name)  # blocks begin in all of `HOWS`
    check(draw_case(seed, name, **fixed, splits_groups=False, infers=0))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "experts" else pytest.mark.thorough) for name in CASES]
)
def test_equal_to_plain_torch(name):
    check(CASES[name]())


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_cases_equal_plain_torch(seed):
    check(draw_case(seed))
    if seed % 50 == 49:
        jax.clear_caches()  # of what is compiled, nothing is used again
