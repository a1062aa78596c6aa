"""Whole models with random blocks, strategies and counts equal plain torch; see `poptorch_cases`.

`make thorough` compares more than `make test`; POPTORCH_CASES says how many there are in all, so that
`POPTORCH_CASES=500 pytest -m thorough tests/test_poptorch_models.py` compares many.
"""

import inspect

import jax
import numpy as np
import torch

import ipu_pipeline.poptorch as poptorch
from tests.poptorch_cases import annotate, case_options, make_optimizer
from tests.poptorch_front import join, leaves, reference, seeded
from tests.poptorch_models import WHOLE_MODELS, Draw

NUM_CALLS = 2
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}  # of a leaf's 2-norm


def norm(tensor):
    return float(np.linalg.norm(np.asarray(tensor.detach(), np.float64)))


def assert_near(actual, expected, tolerance, rooms=None):
    """Compares tensors by name: integers exactly, others by the 2-norm.

    Args:
      actual: tensors by name.
      expected: likewise.
      tolerance: of each one's norm.
      rooms: what may be added to that.
    """
    assert actual.keys() == expected.keys()
    wrong = {}
    for name, wanted in expected.items():
        found = actual[name]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        if wanted.is_floating_point():
            difference = norm(found.detach().double() - wanted.detach().double())
            if not difference <= tolerance * norm(wanted) + (rooms or {}).get(name, 0.0):
                wrong[name] = (difference, norm(wanted))
        else:
            assert torch.equal(found, wanted), name
    assert not wrong, f"difference and norm: {wrong}"


def numbered(tensors):
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(tensors)}


def wanted_outputs(outputs, case):
    """What a call returns, of what plain torch gave for each micro-batch."""
    if case.output_mode == "Sum":
        return [sum(values) for values in zip(*map(leaves, outputs), strict=True)]
    if case.output_mode == "Final":
        return leaves(outputs[-1])
    return join(outputs if case.output_mode == "All" else outputs[case.period - 1 :: case.period])


class Compared:
    """A model, and plain torch with a copy of it, which are trained alike."""

    def __init__(self, case):
        self.case = case
        self.whole = WHOLE_MODELS[case.model]
        self.dtype = getattr(torch, case.dtype)
        self.tolerance = TOLERANCES[case.dtype]
        self.draw = Draw(torch.Generator().manual_seed(case.seed), self.dtype)
        self.model = seeded(self.whole.make, case.seed).to(self.dtype)
        for parameter in list(self.model.parameters())[: case.frozen]:
            parameter.requires_grad_(False)
        self.plain = reference(self.model, lambda _parameters: None)
        self.plain.optimizer = make_optimizer(case, self.plain.model, plain=True)
        annotate(self.model, case)
        self.optimizer = make_optimizer(case, self.model, plain=False)
        self.executor = poptorch.trainingModel(self.model, case_options(case, True), self.optimizer)

    def arguments(self, batch):
        """Positional ones, and the last ones by name."""
        names = list(inspect.signature(self.model.forward).parameters)
        number = len(batch) - min(self.case.with_keywords, len(batch))
        return batch[:number], dict(zip(names[number:], batch[number:], strict=False))

    def train(self):
        """Calls both, and compares what they return."""
        case = self.case
        rows = case.rows * case.device_iterations * case.accumulation
        batch = self.whole.make_batch(self.draw, rows)
        args, kwargs = self.arguments(batch)
        outputs = leaves(self.executor(*args, **kwargs))
        expected = self.plain.train(
            batch, case.device_iterations, case.accumulation, self.whole.find_loss, case.is_mean
        )
        assert_near(numbered(outputs), numbered(wanted_outputs(expected, case)), self.tolerance)

    def set_rate(self, rate):
        """Changes the rate of both, in all groups alike."""
        for optimizer in (self.optimizer, self.plain.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.executor.setOptimizer(self.optimizer)

    def compare_state(self, tolerance=None):
        """Compares parameters and buffers."""
        state, expected = self.model.state_dict(), self.plain.model.state_dict()
        assert_near(state, expected, tolerance or self.tolerance)

    def infer(self):
        """Compares inference, with all modules in evaluation mode."""
        self.model.eval(), self.plain.model.eval()
        inference = poptorch.inferenceModel(self.model, case_options(self.case, False))
        batch = self.whole.make_batch(self.draw, self.case.rows * self.case.infers)
        inputs = batch[: self.whole.num_inputs]
        outputs = leaves(inference(*inputs))
        expected = join(self.plain.infer(inputs, self.case.infers))
        assert_near(numbered(outputs), numbered(expected), self.tolerance)


def check(case):
    """Trains with a case, and then infers."""
    with jax.enable_x64(case.dtype == "float64"):
        try:
            compared = Compared(case)
            for call in range(NUM_CALLS):
                if call:
                    come_between(compared)
                compared.train()
            compared.compare_state()
            if case.infers:
                compared.infer()
        except BaseException as error:
            error.add_note(f"The case that failed: {case}")
            raise


def come_between(compared):
    """Does to both what must not matter, or what plain torch does as well."""
    if compared.case.between == "detach":
        compared.executor.detachFromDevice()
        compared.executor.attachToDevice()
    elif compared.case.between == "look":
        compared.compare_state()
    elif compared.case.between == "other rate":
        compared.set_rate(0.02)


def check_gradients(case):
    """With a rate of 1, the first update of SGD subtracts the gradient: its difference, but for rounding."""
    with jax.enable_x64(case.dtype == "float64"):
        try:
            compared = Compared(case)
            before = {name: p.detach().clone() for name, p in compared.model.named_parameters()}
            compared.train()
            plain = dict(compared.plain.model.named_parameters())
            trained = {name: p for name, p in compared.model.named_parameters() if p.requires_grad}
            gradients = {name: before[name] - p.detach() for name, p in trained.items()}
            expected = {name: plain[name].grad for name in trained}
            unit = torch.finfo(compared.dtype).eps
            rooms = {name: unit * norm(before[name]) for name in trained}
            assert_near(gradients, expected, compared.tolerance, rooms)
            buffers = dict(compared.model.named_buffers())
            assert_near(buffers, dict(compared.plain.model.named_buffers()), compared.tolerance)
        except BaseException as error:
            error.add_note(f"The case that failed: {case}")
            raise
