"""A pipeline against torch.distributed.pipelining: time per training step.

    python -m benchmarks.against_torch_pipelining.run [--cases mlp64 mlp256] [--rounds 7] [--json FILE]

The other side is torch.distributed.pipelining with GPipe and with 1F1B, whichever is faster: gloo, a
process per stage with one thread each, plain SGD. Both sides train the same model on the same
micro-batches, which lie in memory beforehand, and compute the losses. A jitted scan of plain JAX on one
device, which is no pipeline, takes turns with them: where that is no faster either, the time is in the
matrix products of the two libraries.
"""

from __future__ import annotations

import datetime
import os
import statistics
from typing import Any

from benchmarks import harness, models, training
from benchmarks.harness import Row

MODULE = "benchmarks.against_torch_pipelining.run"
MOST_SECONDS = 120  # that a stage waits for another one, which also ends it where the other one has died
TARGETS = {"mlp64": 3.0, "mlp256": 2.0, "mlp512": 2.0, "mlp512-4": 2.0, "mlp1024": 2.0}


def make_torch_stage(model: Any, index: int) -> Any:
    """A stage of an MLP of `models` as a torch module."""
    import torch

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = model.parameters[index]
            self.kernels = torch.nn.ParameterList([torch.tensor(kernel) for kernel, _bias in layers])
            self.biases = torch.nn.ParameterList([torch.tensor(bias) for _kernel, bias in layers])

        def forward(self, x: Any) -> Any:
            for kernel, bias in zip(self.kernels, self.biases, strict=True):
                x = torch.relu(torch.addmm(bias, x, kernel))
            return x

    return Stage()


def serve_torch(case: str, schedule_name: str) -> None:
    """The process of the first stage, which starts the others and passes on how many steps to run."""
    import torch.multiprocessing

    workload = models.WORKLOADS[case]
    port = _free_port()
    context = torch.multiprocessing.get_context("spawn")
    others = [
        context.Process(target=run_rank, args=(case, schedule_name, rank, port), daemon=True)
        for rank in range(1, workload.num_stages)
    ]
    for process in others:
        process.start()
    run_rank(case, schedule_name, 0, port)  # daemons end with this process, also where this raises
    for process in others:
        process.join(timeout=MOST_SECONDS)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_rank(case: str, schedule_name: str, rank: int, port: int) -> None:
    """One stage."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    workload = models.WORKLOADS[case]
    model = workload.make()
    num_stages, num_micro_batches = workload.num_stages, workload.num_micro_batches
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout = datetime.timedelta(seconds=MOST_SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=num_stages, timeout=timeout)
    module = make_torch_stage(model, rank)
    micro_batches = model.micro_batches(num_micro_batches)
    x = torch.cat([torch.tensor(x) for x, _target in micro_batches])
    target = torch.cat([torch.tensor(target) for _x, target in micro_batches])
    stage = pipelining.PipelineStage(module, rank, num_stages, torch.device("cpu"))
    make = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule_name]

    def loss(output: Any, wanted: Any) -> Any:
        return torch.mean((output - wanted) ** 2)

    schedule = make(stage, num_micro_batches, loss_fn=loss, scale_grads=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=models.RATE)

    def step() -> Any:
        losses: list[Any] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == num_stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return losses

    # The last stage has the losses, the first one the pipe to the process that compares.
    told_losses = []
    for _ in range(training.NUM_TOLD):
        losses = step()
        shared = torch.zeros(num_micro_batches)
        if losses:
            shared = torch.stack([value.detach() for value in losses])
        dist.broadcast(shared, num_stages - 1)
        told_losses.append(shared.tolist())

    def run_round(number: int) -> None:
        for _ in range(number):
            step()
        dist.barrier()

    if rank == 0:

        def run_told(number: int) -> None:
            tell(number)
            run_round(number)

        harness.serve_rounds(run_told, {"losses": told_losses})
        tell(0)
    else:
        while number := told():
            run_round(number)
    dist.destroy_process_group()


def tell(number: int) -> None:
    """Tells all stages how many steps a round has; 0 ends them."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.tensor(number), 0)


def told() -> int:
    """What `tell` told."""
    import torch
    import torch.distributed as dist

    number = torch.tensor(0)
    dist.broadcast(number, 0)
    return int(number)


def measure(case: str, num_rounds: int, seconds: float) -> list[Row]:
    """Compares the pipeline with the better schedule of the other side, and plain JAX likewise."""
    sides = ["pipeline", "gpipe", "1f1b", "plain"]
    taken = harness.run_agreeing_sides(MODULE, sides, case, num_rounds, seconds, tolerance=1e-4)
    better = min(("gpipe", "1f1b"), key=lambda name: statistics.median(taken[name]))
    name = f"{models.WORKLOADS[case].name}, {better}"
    return [
        harness.compare(
            "against_torch_pipelining", named, taken[ours], taken[better], target, is_speed=True
        )
        for named, ours, target in (
            (name, "pipeline", TARGETS[case]),
            (f"{name}: plain JAX on one device against it", "plain", None),
        )
    ]


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(TARGETS))
    args = parser.parse_args()
    if args.side == "pipeline":
        training.serve_pipeline(args.cases[0])
    elif args.side == "plain":
        training.serve_plain(args.cases[0])
    elif args.side is not None:
        serve_torch(args.cases[0], args.side)
    else:
        num_rounds, seconds = (3, 0.5) if args.short else (args.rounds, harness.ROUND_SECONDS)
        rows = [measure(case, num_rounds, seconds) for case in args.cases or list(TARGETS)]
        harness.report([row for pair in rows for row in pair], args.json)


if __name__ == "__main__":
    main()
