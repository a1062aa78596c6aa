"""What torch.distributed.pipelining does, feature by feature; each function is a check that runs.

A process for each rank, gloo, one thread each, as its documentation has it: `PipelineStage` by hand, a
schedule, `step` with the whole batch.
"""

from __future__ import annotations

import datetime
import functools
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import pipelining

from benchmarks.features.values import (
    DOES_NOT,
    NUM_TOKENS,
    RATE,
    WIDTH,
    WORKS,
    WORKS_WITH,
    Verdict,
    check_close,
    draw,
    layers,
    names_in,
    shorten,
    speaker,
)

NUM_STAGES = 4
SECONDS = 8  # that a rank waits for another one
MOST_SECONDS = 60  # of a check's ranks


class RankError(Exception):
    """What a rank raised, by the number of the rank."""

    def __init__(self, said: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {shorten(text)}" for rank, text in sorted(said.items())))
        self.said = said


def on_ranks(function: Callable[[int], Any], number: int = NUM_STAGES) -> list[Any]:
    """What a function of the rank returns, on processes of one group.

    Raises:
      RankError: one of them raised something, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_run_rank, args=(function, rank, number, folder), daemon=True)
            for rank in range(number)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + MOST_SECONDS
        for process in processes:
            process.join(timeout=max(end - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        results: dict[int, Any] = {}
        said: dict[int, str] = {}
        for rank in range(number):
            path = Path(folder) / f"{rank}.pickle"
            ended = (
                f"the process ended with {processes[rank].exitcode}"  # a negative one is a signal's number
            )
            raised, value = pickle.loads(path.read_bytes()) if path.exists() else (True, ended)  # noqa: S301
            (said if raised else results)[rank] = value
        if said:
            raise RankError(said)
        return [results[rank] for rank in range(number)]


def _run_rank(function: Callable[[int], Any], rank: int, number: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, number, rank)
    try:
        told = False, function(rank)
    except Exception:
        told = True, traceback.format_exc()
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(told))
    if not told[0]:
        dist.destroy_process_group()


class Layer(torch.nn.Module):
    """A layer of the model; the last one has no tanh."""

    def __init__(self, w: Any, is_last: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w))
        self._is_last = is_last

    def forward(self, x: Any) -> Any:
        """Computes the stage."""
        return x @ self.w if self._is_last else torch.tanh(x @ self.w)


def model() -> Any:
    return torch.nn.Sequential(*(Layer(w, n == NUM_STAGES - 1) for n, w in enumerate(layers(NUM_STAGES))))


def mean_square(y: Any, target: Any) -> Any:
    return torch.mean((y - target) ** 2)


def batch(*shape: int, seed: int = 1) -> Any:
    x = torch.tensor(draw(*shape, WIDTH, seed=seed))
    return x, torch.sin(x)


def stage_of(module: Any, index: int, number: int = NUM_STAGES, **options: Any) -> Any:
    return pipelining.PipelineStage(module, index, number, torch.device("cpu"), **options)


def plain_gradients(parts: Sequence[Any], loss: Callable[..., Any] = mean_square) -> list[Any]:
    """Of the mean over micro-batches."""
    whole = model()
    for x, target in parts:
        (loss(whole(x), target) / len(parts)).backward()
    return [layer.w.grad.numpy() for layer in whole]


def run_step(schedule: Any, rank: int, last: int, x: Any, target: Any) -> None:
    """A step, of which the first rank has the inputs, and the last one the targets."""
    given = {"target": target, "losses": []} if rank == last else {}
    schedule.step(*([x] if rank == 0 else []), **given)


def chunks(x: Any, target: Any, number: int) -> list[Any]:
    return list(zip(x.tensor_split(number), target.tensor_split(number), strict=True))


def check_step(
    make: Callable[..., Any],
    x: Any,
    target: Any,
    number: int = 4,
    stages: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compares gradients with those of plain torch.

    Args:
      make: a schedule of stages, or of one stage, number of micro-batches and loss.
      x: the batch.
      target: the batch's targets.
      number: the number of micro-batches.
      stages: the numbers of each rank's stages; None: each rank has the stage of its own number.
    """

    def run(rank: int) -> Any:
        numbers = [rank] if stages is None else stages[rank]
        whole = model()
        own = [stage_of(whole[n], n) for n in numbers]
        schedule = make(own if stages else own[0], number, loss_fn=mean_square)
        last = NUM_STAGES - 1
        if stages is not None:
            last = next(number for number, held in enumerate(stages) if NUM_STAGES - 1 in held)
        run_step(schedule, rank, last, x, target)
        return [(n, whole[n].w.grad.numpy()) for n in numbers]

    found = dict(pair for pairs in on_ranks(run, len(stages) if stages else NUM_STAGES) for pair in pairs)
    check_close([found[n] for n in range(NUM_STAGES)], plain_gradients(chunks(x, target, number)))


def raised_by_ranks(call: Callable[[], Any]) -> Mapping[int, str]:
    """What each rank raised, with its traceback.

    Raises:
      AssertionError: none raised anything, so that what the table says of it is no longer true.
    """
    try:
        call()
    except RankError as error:
        return error.said
    raise AssertionError("This raised nothing: write the check anew.")


def said_by_ranks(call: Callable[[], Any]) -> dict[int, str]:
    """The last line of what each rank raised."""
    return {rank: text.strip().splitlines()[-1] for rank, text in raised_by_ranks(call).items()}


def documented_form() -> Verdict:
    check_step(pipelining.Schedule1F1B, *batch(8))
    return Verdict(WORKS, "`PipelineStage`, a schedule, `step`")


def lengths_in_turn() -> Verdict:
    def run(rank: int, renews: bool) -> Any:
        whole = model()
        found, schedule = [], None
        for length in (3, 5, 3):
            whole.zero_grad()
            if renews or schedule is None:
                schedule = pipelining.Schedule1F1B(stage_of(whole[rank], rank), 4, loss_fn=mean_square)
            run_step(schedule, rank, NUM_STAGES - 1, *batch(8, length))
            found.append(whole[rank].w.grad.clone().numpy())
        return found

    found = on_ranks(functools.partial(run, renews=True))
    for step, length in enumerate((3, 5, 3)):
        expected = plain_gradients(chunks(*batch(8, length), 4))
        check_close([steps[step] for steps in found], expected)
    check_that_a_rank_died(said_by_ranks(lambda: on_ranks(functools.partial(run, renews=False))))
    return Verdict(WORKS_WITH, "a new stage and schedule for each length; else a rank dies")


def lengths_mixed() -> Verdict:
    parts = [batch(2, length) for length in (3, 5, 3, 7)]

    def run(rank: int) -> None:
        whole = model()
        schedule = pipelining.ScheduleGPipe(stage_of(whole[rank], rank), 4, loss_fn=mean_square)
        xs = [(x,) for x, _target in parts] if rank == 0 else None
        targets = [target for _x, target in parts] if rank == NUM_STAGES - 1 else None
        schedule._step_microbatches(xs, None, targets, [])  # noqa: SLF001  # `step` cannot be given them

    check_that_a_rank_died(said_by_ranks(lambda: on_ranks(run)))
    return Verdict(DOES_NOT, "a step takes one tensor")


def check_that_a_rank_died(said: Mapping[int, str]) -> None:
    """Fails unless gloo ended one: "Received data size doesn't match expected size"."""
    assert any(text.startswith("the process") for text in said.values()), said


def fewer_micro_batches() -> Verdict:
    check_step(pipelining.ScheduleGPipe, *batch(4), number=2)
    said = said_by_ranks(lambda: check_step(pipelining.Schedule1F1B, *batch(4), number=2))
    assert said[0].startswith("ValueError"), said
    return Verdict(WORKS_WITH, "GPipe; 1F1B raises ValueError")


def smaller_last() -> Verdict:
    text = raised_by_ranks(lambda: check_step(pipelining.ScheduleGPipe, *batch(7)))[0]
    text = " ".join(text.partition("RuntimeError: \n")[2].split())
    assert "Failed to run stage backward" in text, text
    return Verdict(DOES_NOT, "RuntimeError: Failed to run stage backward")


def losses_per_token() -> Verdict:
    lengths = torch.tensor([3, 5, 3, 7, 7, 2, 4, 1])
    x, target = batch(8, 7)
    mask = (torch.arange(7) < lengths[:, None])[..., None].to(torch.float32)

    def summed(y: Any, target: Any) -> Any:
        return torch.sum((y - target[..., :-1]) ** 2 * target[..., -1:])

    def run(rank: int) -> Any:
        whole = model()
        stage = stage_of(whole[rank], rank)
        schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=summed, scale_grads=False)
        run_step(schedule, rank, NUM_STAGES - 1, x, torch.cat([target, mask], dim=-1))
        return (whole[rank].w.grad / lengths.sum()).numpy()

    found = on_ranks(run)
    whole = model()
    (summed(whole(x), torch.cat([target, mask], dim=-1)) / lengths.sum()).backward()
    check_close(found, [layer.w.grad.numpy() for layer in whole])
    return Verdict(WORKS_WITH, "own division of gradients of summed, padded losses")


def schedules_by_name() -> Verdict:
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in ("GPipe", "1F1B"):
        check_step(get_schedule_class(name), *batch(8))
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        check_step(get_schedule_class(name), *batch(8), stages=[[0, 2], [1, 3]])
    for name in ("ZBVZeroBubble", "DualPipeV"):
        check_step(get_schedule_class(name), *batch(8), stages=[[0, 3], [1, 2]])
    return Verdict(WORKS, "GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, ZB-V, DualPipe-V")


def own_schedule() -> Verdict:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rows = [
        [cell.format(number) for number in range(4) for cell in own]
        for own in (["0F{}", "2F{}", "2B{}", "0B{}"], ["1F{}", "3F{}", "3B{}", "1B{}"])
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.csv"
        path.write_text("\n".join(",".join(row) for row in rows))

        def make(stages: Any, number: int, loss_fn: Any) -> Any:
            schedule = _PipelineScheduleRuntime(stages, number, loss_fn=loss_fn)
            schedule._load_csv(str(path))  # noqa: SLF001  # there is no public name
            return schedule

        check_step(make, *batch(8), stages=[[0, 2], [1, 3]])
    return Verdict(WORKS_WITH, "private names: a CSV file")


def tied_weights() -> Verdict:
    class First(torch.nn.Module):
        def __init__(self, table: Any, w: Any) -> None:
            super().__init__()
            self.table, self.w = (
                torch.nn.Parameter(torch.tensor(table)),
                torch.nn.Parameter(torch.tensor(w)),
            )

        def forward(self, x: Any) -> Any:
            """Computes the stage."""
            return torch.tanh(x @ self.table) @ self.w

    class Last(torch.nn.Module):
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor(table))

        def forward(self, x: Any) -> Any:
            """Computes the stage."""
            return x @ self.table.T

    x, target = batch(8)

    def run(rank: int) -> Any:
        table, w = layers(2)
        module = First(table, w) if rank == 0 else Last(table)
        schedule = pipelining.Schedule1F1B(stage_of(module, rank, 2), 4, loss_fn=mean_square)
        run_step(schedule, rank, 1, x, target)
        dist.all_reduce(module.table.grad)
        return module.table.grad.numpy()

    found = on_ranks(run, 2)
    table, w = (torch.tensor(matrix, requires_grad=True) for matrix in layers(2))
    mean_square(torch.tanh(x @ table) @ w @ table.T, target).backward()
    check_close(found, [table.grad.numpy()] * 2)
    return Verdict(WORKS_WITH, "own `all_reduce` after each step")


def another_split() -> Verdict:
    from torch.distributed.checkpoint import state_dict

    def cut(names: Sequence[str]) -> Any:
        split = dict.fromkeys(names, pipelining.SplitPoint.BEGINNING)
        return pipelining.pipeline(model(), (batch(2)[0],), split_spec=split)

    def train(rank: int, pipe: Any, saved: Any) -> Any:
        stage = pipe.build_stage(rank, torch.device("cpu"))
        optimizer = torch.optim.Adam(stage.submod.parameters(), RATE)
        if saved is not None:
            for options in (state_dict.StateDictOptions(strict=False),):
                own = {name for name, _value in stage.submod.named_parameters()}
                weights, moments = saved
                state_dict.set_model_state_dict(stage.submod, {n: weights[n] for n in own}, options=options)
                kept = {
                    "state": {n: v for n, v in moments["state"].items() if n in own},
                    "param_groups": [{**moments["param_groups"][0], "params": sorted(own)}],
                }
                state_dict.set_optimizer_state_dict(stage.submod, optimizer, kept, options=options)
        schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=mean_square)
        run_step(schedule, rank, dist.get_world_size() - 1, *batch(8))
        optimizer.step()
        return state_dict.get_state_dict(stage.submod, optimizer)

    two = on_ranks(lambda rank: train(rank, cut(["2"]), None), 2)
    weights = {name: value for part, _moments in two for name, value in part.items()}
    moments = {
        "state": {name: value for _part, moments in two for name, value in moments["state"].items()},
        "param_groups": two[0][1]["param_groups"],
    }
    three = on_ranks(lambda rank: train(rank, cut(["1", "3"]), (weights, moments)), 3)
    found = {name: value.numpy() for part, _moments in three for name, value in part.items()}
    whole = model()
    optimizer = torch.optim.Adam(whole.parameters(), RATE)
    for _step in range(2):
        optimizer.zero_grad()
        mean_square(whole(batch(8)[0]), batch(8)[1]).backward()
        optimizer.step()
    expected = {name: value.detach().numpy() for name, value in whole.named_parameters()}
    check_close([found[name] for name in expected], list(expected.values()))
    return Verdict(WORKS_WITH, "own merging of state dicts")


class Speaker(torch.nn.Module):
    """A stage that has a cache; the first one has words, the last one gives scores of words."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        table, ws, head = speaker()
        self.table = torch.tensor(table) if rank == 0 else None
        self.w, self.head = torch.tensor(ws[rank]), torch.tensor(head) if rank == NUM_STAGES - 1 else None
        self.cache = torch.zeros(2, NUM_TOKENS, WIDTH)

    def forward(self, x: Any, position: Any) -> Any:
        """Computes the stage."""
        x = x if self.table is None else self.table[x]
        place = position[:, None] == torch.arange(NUM_TOKENS)
        known = (torch.arange(NUM_TOKENS) <= position[:, None])[..., None]
        self.cache = torch.where(place[..., None], x[:, None], self.cache)
        x = x + torch.tanh(torch.sum(self.cache * known, dim=1) @ self.w)
        return x if self.head is None else x @ self.head


def generation() -> Verdict:
    def run(rank: int) -> Any:
        schedule = pipelining.ScheduleGPipe(stage_of(Speaker(rank), rank), 1)
        tokens, text = torch.tensor([1, 2]), []
        with torch.no_grad():
            for number in range(NUM_TOKENS):
                position = torch.full((2,), number)
                scores = schedule.eval(*([tokens] if rank == 0 else []), position=position)
                tokens = torch.zeros(2, dtype=torch.long) if scores is None else scores.argmax(dim=-1)
                dist.broadcast(tokens, NUM_STAGES - 1)
                text.append(tokens.tolist())
        return text

    stages = [Speaker(rank) for rank in range(NUM_STAGES)]
    tokens, expected = torch.tensor([1, 2]), []
    for number in range(NUM_TOKENS):
        x = tokens
        for stage in stages:
            x = stage(x, torch.full((2,), number))
        tokens = x.argmax(dim=-1)
        expected.append(tokens.tolist())
    found = on_ranks(run)
    assert found[0] == expected, (found, expected)
    return Verdict(WORKS_WITH, "own loop and caches")


def continuous_batching() -> Verdict:
    names = names_in(pipelining, "generator|request|decode|continuous")
    assert not names, names
    return Verdict(DOES_NOT, "nothing of the kind")


def stage_meshes() -> Verdict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make() -> list[Any]:
        stages = []
        for number in range(2):
            stage = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _layer in range(2)))
            for layer, w in zip(stage, layers(4)[2 * number :], strict=False):
                layer.weight.data = torch.tensor(w.T)
            stages.append(stage)
        return stages

    x, target = batch(8)

    def run(_rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        number = mesh["pp"].get_local_rank()
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        module = parallelize_module(make()[number], mesh["tp"], plan)
        stage = stage_of(module, number, 2, group=mesh.get_group("pp"))
        schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=mean_square)
        run_step(schedule, number, 1, x, target)
        return [layer.weight.grad.full_tensor().numpy() for layer in module]

    found = on_ranks(run)
    first, last = make()
    mean_square(last(first(x)), target).backward()
    check_close([*found[0], *found[2]], [layer.weight.grad.numpy() for layer in (*first, *last)])
    return Verdict(WORKS, "DTensor: `parallelize_module`")


def trained_twice(rank: int, loss: Callable[..., Any], first: Any, second: Any, module: Any = None) -> None:
    """A step that also finds out shapes, and one with what is to be found."""
    module = model()[rank] if module is None else module
    schedule = pipelining.Schedule1F1B(stage_of(module, rank), 4, loss_fn=loss)
    run_step(schedule, rank, NUM_STAGES - 1, *first)
    module.most = 1.0
    with torch.autograd.set_detect_anomaly(True):
        run_step(schedule, rank, NUM_STAGES - 1, *second)


def nan_origin() -> Verdict:
    def through_root(y: Any, target: Any) -> Any:
        return torch.mean(torch.sqrt(target * (1 + y**2)))

    x, target = batch(8)[0], torch.ones(8, WIDTH)
    bad = torch.where(torch.arange(8)[:, None] // 2 == 2, -target, target)

    def run(rank: int) -> None:
        trained_twice(rank, through_root, (x, target), (x, bad))

    text = raised_by_ranks(lambda: on_ranks(run))[NUM_STAGES - 1]
    assert "SqrtBackward" in next(line for line in text.splitlines() if "nan values" in line), text
    return Verdict(WORKS_WITH, "`set_detect_anomaly`: in backwards, the line, no micro-batch")


class Checked(Layer):
    """A layer with a check, but not in the first step, which calls it with uninitialized values, too."""

    most = float("inf")

    def forward(self, x: Any) -> Any:
        """Computes the stage."""
        assert not bool(torch.any(torch.abs(x) >= self.most)), "x must be less than 1"
        return super().forward(x)


def own_check() -> Verdict:
    x, target = batch(8)
    bad = torch.where(torch.arange(8)[:, None] // 2 == 2, 1e4 * x, x)

    def run(rank: int) -> None:
        module = Checked(layers(NUM_STAGES)[1]) if rank == 1 else None
        trained_twice(rank, mean_square, (x, target), (bad, target), module)

    text = raised_by_ranks(lambda: on_ranks(run))[1]
    assert "AssertionError: x must be less than 1" in text, text
    assert "[Stage 1] failed to run forward" in text, text
    return Verdict(WORKS_WITH, "`assert`: the stage, no micro-batch")


def hang() -> Verdict:
    def run(rank: int) -> Any:
        schedule = pipelining.Schedule1F1B(stage_of(model()[rank], rank), 4, loss_fn=mean_square)
        run_step(schedule, rank, NUM_STAGES - 1, *batch(8))
        if rank == 1:
            time.sleep(2 * SECONDS)
        run_step(schedule, rank, NUM_STAGES - 1, *batch(8))

    said = said_by_ranks(lambda: on_ranks(run))
    timed_out = {rank: text for rank, text in said.items() if "Timed out" in text}
    assert {2, 3} <= set(timed_out) <= {0, 2, 3}, said
    return Verdict(WORKS_WITH, "the group's timeout, which ends ranks that wait, not for whom")


def debugger() -> Verdict:
    seen = []

    class Looking(Layer):
        def forward(self, x: Any) -> Any:
            """Computes the stage."""
            seen.append(float(x.max()))
            return super().forward(x)

    def run(rank: int) -> int:
        whole = model()
        module = Looking(layers(4)[1]) if rank == 1 else whole[rank]
        schedule = pipelining.Schedule1F1B(stage_of(module, rank), 4, loss_fn=mean_square)
        run_step(schedule, rank, NUM_STAGES - 1, *batch(8))
        return len(seen)

    assert on_ranks(run)[1] >= 4
    return Verdict(WORKS, "eager, in several processes")


def first_step() -> Verdict:
    def run(rank: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        whole = model()
        schedule = pipelining.Schedule1F1B(stage_of(whole[rank], rank), 4, loss_fn=mean_square)
        run_step(schedule, rank, NUM_STAGES - 1, *batch(8))
        return time.perf_counter() - begin

    return Verdict(WORKS, f"{max(on_ranks(run)):.1f} s, not compiled, without an update")


def split_advice() -> Verdict:
    assert not names_in(pipelining, "advi|suggest|balance|cost|equal")
    return Verdict(DOES_NOT, "`pipeline()` cuts where it is told")


class Branching(torch.nn.Module):
    """What `torch.export` cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(layers(1)[0])

    def forward(self, x: Any) -> Any:
        """Computes the stage."""
        return self.layer(x) if x.sum() > 0 else x


def cannot_trace() -> Verdict:
    split = {"layer": pipelining.SplitPoint.BEGINNING}
    cause = ""
    try:
        pipelining.pipeline(Branching(), (batch(2)[0],), split_spec=split)
    except RuntimeError as error:
        cause = str(error.__cause__)
    assert "on_torch.py" in cause, cause
    assert "if x.sum() > 0" in cause, cause
    return Verdict(WORKS, "stages are not traced; `pipeline()` names the line")
