"""The other side of two benchmarks: torch.distributed.pipelining.

It runs with gloo, a process per rank with one thread each.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import harness

__all__ = ["SCHEDULES", "Training", "serve"]

SCHEDULES = ("gpipe", "1f1b")  # those that have one stage per process
_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
MOST_SECONDS = 120  # that a stage waits for another one, which also ends it where the other one has died
_NUM_TOLD = 2  # steps whose losses are told


@dataclass(frozen=True)
class Training:
    """What is trained, with plain SGD and gradients averaged over the micro-batches.

    Attributes:
      num_stages: how many stages there are.
      make_module: the torch module of a stage.
      micro_batches: pairs of inputs and targets, NumPy arrays; the loss is their mean square difference.
      rate: of SGD.
      num_ranks: in how many processes, which have the same numbers of stages: stage i is in process i mod
        `num_ranks` or, where they come back as in ZBV, the last ones are in the first process; None: one
        stage each.
      time_ideal: what a step takes at least, in seconds, measured by the first process while the others
        wait; None where nobody asks.
    """

    num_stages: int
    make_module: Callable[[int], Any]
    micro_batches: Sequence[tuple[Any, Any]]
    rate: float
    time_ideal: Callable[[Any], float] | None = None
    num_ranks: int | None = None

    def stages_of(self, rank: int, schedule: str) -> list[int]:
        """The stages of a process."""
        size = self.num_ranks or self.num_stages
        if schedule == "zbv":
            return [rank, self.num_stages - 1 - rank]
        return list(range(rank, self.num_stages, size))


def serve(make: Callable[..., Training], arguments: Sequence[Any], schedule: str) -> None:
    """The process of the first stage, which starts the others and passes on how many steps to run.

    Args:
      make: makes what is trained, in every process; a function of a module.
      arguments: of it.
      schedule: one of `SCHEDULES`, or, with several stages in each process, "interleaved_1f1b",
        "interleaved_zero_bubble" or "zbv".
    """
    import torch.multiprocessing

    training = make(*arguments)
    num_ranks = training.num_ranks or training.num_stages
    port = _free_port()
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining"])  # imported once, not in each process
    others = [
        context.Process(target=_run_rank, args=(make, arguments, schedule, rank, port), daemon=True)
        for rank in range(1, num_ranks)
    ]
    for process in others:
        process.start()
    _run_rank(make, arguments, schedule, 0, port)  # daemons end with this process, also where this raises
    for process in others:
        process.join(timeout=MOST_SECONDS)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _run_rank(
    make: Callable[..., Training], arguments: Sequence[Any], schedule_name: str, rank: int, port: int
) -> None:
    """One process."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    training = make(*arguments)
    num_stages, num_micro_batches = training.num_stages, len(training.micro_batches)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=MOST_SECONDS)
    size = training.num_ranks or num_stages
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    numbers = training.stages_of(rank, schedule_name)
    modules = [training.make_module(number) for number in numbers]
    has_last = num_stages - 1 in numbers
    rank_of_last = next(r for r in range(size) if num_stages - 1 in training.stages_of(r, schedule_name))
    x = torch.cat([torch.tensor(x) for x, _target in training.micro_batches])
    target = torch.cat([torch.tensor(target) for _x, target in training.micro_batches])
    stages = [
        pipelining.PipelineStage(module, number, num_stages, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    make_schedule = getattr(pipelining, _CLASSES[schedule_name])

    def loss(output: Any, wanted: Any) -> Any:
        return torch.mean((output - wanted) ** 2)

    given = stages if len(stages) > 1 else stages[0]
    schedule = make_schedule(given, num_micro_batches, loss_fn=loss)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=training.rate)

    def step() -> Any:
        losses: list[Any] = []
        optimizer.zero_grad()
        values = {"target": target, "losses": losses} if has_last else {}
        schedule.step(*([x] if rank == 0 else []), **values)
        optimizer.step()
        return losses

    # The last stage has the losses, the first one the pipe to the process that compares.
    told_losses = []
    for _ in range(_NUM_TOLD):
        losses = step()
        shared = torch.zeros(num_micro_batches)
        if losses:
            shared = torch.stack([value.detach() for value in losses])
        dist.broadcast(shared, rank_of_last)
        told_losses.append(shared.tolist())

    def run_round(number: int) -> None:
        for _ in range(number):
            step()
        dist.barrier()

    if rank == 0:

        def run_told(number: int) -> float | None:
            if number == 0:
                assert training.time_ideal is not None
                return training.time_ideal(modules[0])
            _tell(number)
            run_round(number)
            return None

        harness.serve_rounds(run_told, {"losses": told_losses})
        _tell(0)
    else:
        while number := _told():
            run_round(number)
    dist.destroy_process_group()


def _tell(number: int) -> None:
    """Tells all stages how many steps a round has; 0 ends them."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.tensor(number), 0)


def _told() -> int:
    """What `_tell` told."""
    import torch
    import torch.distributed as dist

    number = torch.tensor(0)
    dist.broadcast(number, 0)
    return int(number)
