"""Small torch models, and plain torch to compare with, for the tests of PopTorch's front."""

import copy
import dataclasses
import io
import re

import numpy as np
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.structures import flatten

torch.set_num_threads(1)  # its threads and XLA's would fight for the cores

QUIET = {"show_compilation_progress_bar": False}


def make_options(device_iterations=1, accumulation=1, strategy=None, mode=None, **values):
    """Options without a progress bar."""
    options = poptorch.Options().set(**QUIET, **values).deviceIterations(device_iterations)
    options.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    return options.outputMode(poptorch.OutputMode.All if mode is None else mode)


class TwoLayers(torch.nn.Module):
    """Two linear layers in two blocks, with a loss where there is a target."""

    def __init__(self, size=3, hidden=5, ipus=(0, 1)):
        super().__init__()
        self.first = torch.nn.Linear(size, hidden)
        self.second = torch.nn.Linear(hidden, size)
        self.ipus = ipus

    def forward(self, x, target=None):
        with poptorch.Block("first", ipu_id=self.ipus[0]):
            x = torch.tanh(self.first(x))
        with poptorch.Block("second", ipu_id=self.ipus[1]):
            x = self.second(x)
            if target is None:
                return x
            return x, torch.nn.functional.mse_loss(x, target)


def make_batch(size=8, features=3, seed=0, dtype=torch.float32):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, features, generator=generator, dtype=dtype)
    return x[0], x[1]


def seeded(make, seed=0):
    """A model with weights that depend on the seed only."""
    torch.manual_seed(seed)
    return make()


def model_of(forward, **attributes):
    """A module with a linear layer and that forward; attributes named buffer... become its buffers.

    `linear=None` leaves the layer out.
    """

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            for name, value in attributes.items():
                if name.startswith("buffer"):
                    self.register_buffer(name, value.clone())
                else:
                    setattr(self, name, value)

        def forward(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

    return seeded(Model)


@dataclasses.dataclass
class Reference:
    """Plain torch: a loop over the micro-batches of each weight update.

    Attributes:
      model: a copy of the model.
      optimizer: of the copy.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, inputs, device_iterations, accumulation, find_loss, mean=True):
        """Does what a call of a training model does; returns the outputs of each micro-batch."""
        outputs = []
        for update in _cut(inputs, device_iterations):
            self.optimizer.zero_grad()
            for micro_batch in _cut(update, accumulation):
                made = self.model(*micro_batch)
                (find_loss(made) / (accumulation if mean else 1)).backward()
                outputs.append(made)
            self.optimizer.step()
        return outputs

    def infer(self, inputs, device_iterations):
        """Does what a call of an inference model does."""
        with torch.no_grad():
            return [self.model(*micro_batch) for micro_batch in _cut(inputs, device_iterations)]


def reference(model, make_optimizer):
    """Plain torch with a copy of a model.

    Args:
      model: it is copied as it is.
      make_optimizer: from parameters to an optimizer of torch.
    """
    copied = copy.deepcopy(model)
    return Reference(copied, make_optimizer(copied.parameters()))


def _cut(inputs, number):
    if number == 1:
        return [inputs]
    return list(zip(*[tensor.chunk(number) for tensor in inputs], strict=True))


def leaves(value):
    """The tensors of an output, in order."""
    return flatten(value)[0]


def join(outputs):
    """The outputs of micro-batches as `OutputMode.All` has them."""
    if len(outputs) == 1:
        return [output.detach() for output in leaves(outputs[0])]
    parts = zip(*[leaves(output) for output in outputs], strict=True)
    return [torch.cat([p.detach().reshape(-1, *p.shape[1:]) for p in same]) for same in parts]


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def second(outputs):
    """Of what `TwoLayers` returns, the loss."""
    return outputs[1]


class TrainedAlike:
    """A model that is wrapped for training, and a copy of it that plain torch trains with the same data.

    Attributes:
      model: the user's.
      executor: of `poptorch.trainingModel`.
      plain: the copy, as a `Reference`.
    """

    def __init__(self, model, options=None, make_optimizer=make_sgd, make_plain_optimizer=None):
        """Wraps it.

        Args:
          model: returns its loss last.
          options: None: those of `make_options`.
          make_optimizer: from parameters to an optimizer.
          make_plain_optimizer: the same for plain torch, where `make_optimizer` makes one of PopTorch's.
        """
        self.model, self.options = model, options or make_options()
        self.plain = reference(model, make_plain_optimizer or make_optimizer)
        self.executor = poptorch.trainingModel(model, self.options, make_optimizer(model.parameters()))

    def call(self, *batch, mean=True, tolerance=1e-5):
        """Trains both, compares what they return, and returns it."""
        accumulation = self.options.Training.gradient_accumulation * self.options.replication_factor
        expected = self.plain.train(
            batch, self.options.device_iterations, accumulation, lambda made: leaves(made)[-1], mean
        )
        outputs = self.executor(*batch)
        assert_close(leaves(outputs), join(expected), tolerance)
        return outputs

    def compare(self, tolerance=1e-5):
        """Compares parameters and buffers."""
        assert_same_state(self.model, self.plain.model, tolerance)


def infer(model, *args, **kwargs):
    """What a model that is wrapped for inference returns."""
    return poptorch.inferenceModel(model, make_options())(*args, **kwargs)


def make_model(**arguments):
    """`TwoLayers` of seed 0."""
    return seeded(lambda: TwoLayers(**arguments))


def ipus_of(executor):
    """The IPU of each stage, as the summary says."""
    return [int(number) for number in re.findall(r"^ *\d+ +(\d+) ", str(executor.summary()), re.M)]


def through_file(value, **options):
    """What torch loads of what it saved."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def norm(tensor):
    return float(np.linalg.norm(tensor.detach().double().numpy()))


def relative_difference(actual, expected):
    """The 2-norm of the difference, of that of what is expected."""
    actual, expected = (t.detach().double().numpy() for t in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_close(actual, expected, tolerance=1e-5):
    """Compares tensors one by one, by the 2-norm."""
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype, number
        difference = relative_difference(one, other)
        scale = float(other.detach().double().norm())
        is_close = difference <= tolerance or difference * scale <= 1e-2 * tolerance
        assert is_close, (number, difference, scale)


def assert_same_state(model, other, tolerance=1e-5):
    """Compares the parameters and buffers of two models."""
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert_close(state.values(), expected.values(), tolerance)
