"""Operations in C++ within a model of PopTorch's interface.

Run it: python examples/custom_ops/train.py [FOLDER]

It needs a C++ compiler (c++, or what the environment variable CXX names) and the extra `torch`. The library
goes into the folder, by default one that is deleted at the end.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

import ipu_pipeline.poptorch as poptorch

SOURCE = Path(__file__).parent / "operations.cc"


def build(folder: str | Path) -> Path:
    """Compiles the operations; returns the library's path."""
    library = Path(folder) / "liboperations.so"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)  # noqa: S603  # ours
    return library


def leaky_relu_gradient(
    inputs: tuple[Any, ...], results: tuple[Any, ...], gradients: tuple[Any, ...], *, alpha: float
) -> tuple[Any, ...]:
    """Of a library's function nobody knows the gradient: it is given here, in JAX."""
    del results
    return (jnp.where(inputs[0] > 0, 1.0, alpha) * gradients[0],)


def register(library: Path) -> None:
    """Makes the library's functions operations of `poptorch.custom_op`."""
    poptorch.register_custom_op("com.acme", "Cube", 1, library=library)
    poptorch.register_custom_op("com.acme", "LeakyRelu", 1, library=library, vjp=leaky_relu_gradient)
    poptorch.register_custom_op("test.poptorch", "ManyAttributeOp", 1, library=library)


class Model(torch.nn.Module):
    """Two layers, with a leaky ReLU of ours between, on two IPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and its loss."""
        with poptorch.Block(ipu_id=0):
            x = self.first(x)
            (x,) = poptorch.custom_op(
                [x], "LeakyRelu", "com.acme", 1, example_outputs=[x], attributes={"alpha": 0.02}
            )
        with poptorch.Block(ipu_id=1):
            x = self.last(x)
            return x, torch.nn.functional.mse_loss(x, target)


def main(folder: str | Path) -> None:
    """Builds, registers, and trains."""
    register(build(folder))
    torch.manual_seed(0)
    model = Model()
    options = poptorch.Options().deviceIterations(10).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(4)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
    x = torch.randn(320, 8)
    target = x.square().mean(1, keepdim=True)
    losses = [float(training(x, target)[1]) for _call in range(5)]
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
