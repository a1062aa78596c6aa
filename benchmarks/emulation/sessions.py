"""Training through emulated stages by a session, as in a program of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

import ipu_pipeline as ipu
from ipu_pipeline import engine

__all__ = ["Training", "compile_training"]


class Training(NamedTuple):
    """A compiled program, and its queues."""

    program: Any
    infeed: Any
    outfeed: Any


def compile_training(
    make_stages: Callable[[], Sequence[Callable[..., Any]]],
    num_ipus: int,
    num_micro_batches: int,
    data: Callable[[], Any],
    loss: Callable[[Any], Any],
    rate: float,
) -> Training:
    """Selects the IPUs, and compiles a program that does one weight update by Adam.

    Args:
      make_stages: makes the stages; each is on an IPU of its own.
      num_ipus: the number of IPUs, in all processes.
      num_micro_batches: the number of micro-batches of an update.
      data: makes an iterator over the micro-batches.
      loss: takes what the last stage returns, returns a scalar, which is enqueued.
      rate: Adam's learning rate.
    """
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = num_ipus
    config.configure_ipu_system()
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def model() -> Any:
        return ipu.pipelining_ops.pipeline(
            make_stages(),
            gradient_accumulation_count=num_micro_batches,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            outfeed_loss=True,
            dispatch_plan=engine.Chunking(),  # else stages that do not sleep are rounded otherwise
            optimizer_function=lambda y: ipu.pipelining_ops.OptimizerFunctionOutput(
                optax.adam(rate), loss(y)
            ),
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        program = ipu.ipu_compiler.compile(model)
    return Training(program, infeed, outfeed)
