"""Random ways to run a whole model, as data that prints as it was drawn; and how a model is set up for one.

What is drawn changes no number: where blocks begin, which IPU they are on, the strategy, the schedule. The
rest, counts and optimizers, plain torch does as well.

An optimizer's epsilon is well above gradients that are zero but for rounding, as those of the keys' bias in
attention are: Adam would make of them what it makes of others.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from typing import Any, NamedTuple

import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import make_options
from tests.support.poptorch_models import WHOLE_MODELS, Whole

__all__ = ["Begin", "Case", "annotate", "case_options", "draw_case", "make_optimizer"]

HOWS = ("with", "start", "module", "function")
SCHEDULES = (None, "grouped", "interleaved", "sequential")
OFFLOADS = ("Activation", "Weight", "Optimizer", "Accumulator")
BETWEEN = ("nothing", "detach", "look", "other rate")
# The class, and what it gets; the rate is for float32 models of random weights.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient": ("SGD", {"lr": 1.0}),  # one update subtracts it
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.003, "eps": 1e-2, "alpha": 0.9}),
    "centered": ("RMSprop", {"lr": 0.003, "eps": 1e-2, "centered": True, "momentum": 0.5}),
}


class Begin(NamedTuple):
    """Where a block begins: a place or a layer of the model, one of `HOWS`, its name and its IPU."""

    where: str
    how: str
    name: str | None
    ipu: int | None


class Case(types.SimpleNamespace):
    """A model, a key of `WHOLE_MODELS`, and how it is run: what `draw_case` draws."""


def draw_case(seed: int, model: str | None = None, **fixed: Any) -> Case:
    """A case; the same for the same arguments. A model and fields that are given are not drawn."""
    rng = random.Random(seed)  # noqa: S311  # no secret depends on it
    name = rng.choice(sorted(WHOLE_MODELS))
    name = model or name
    whole = WHOLE_MODELS[name]
    kind = rng.choice(("none", "same ipu", "same ipu", "auto increment", "stages", "stages"))
    begins, stages, has_auto_ids = _draw_blocks(rng, whole.make, kind)
    device_iterations, accumulation = rng.randint(1, 3), rng.randint(1, 6)
    mode = rng.choice(("All", "All", "All", "Final", "Sum", "EveryN"))
    is_ours = rng.random() < 0.5
    drawn: dict[str, Any] = {
        "dtype": rng.choice(("float32", "float64")),
        "begins": begins,  # the blocks
        "has_auto_ids": has_auto_ids,  # for blocks without a name
        "stages": stages,  # names of blocks, with the IPU; none: the strategy is an `AutoStage`
        "auto_increments": kind == "auto increment",
        "is_sharded": rng.random() < 0.25,
        "schedule": rng.choice(SCHEDULES),
        "offload": tuple(rng.sample(OFFLOADS, rng.randint(1, 2))) if rng.random() < 0.2 else (),
        "device_iterations": device_iterations,
        "accumulation": accumulation,
        "rows": rng.randint(whole.min_rows, 3),  # of a micro-batch
        "optimizer": rng.choice(sorted(OPTIMIZERS.keys() - {"gradient"})),
        "is_ours": is_ours,  # of PopTorch's classes
        "loss_scaling": rng.choice((1.0, 1.0, 128.0)) if is_ours else 1.0,
        "is_mean": rng.random() < 0.75,
        "reduction_strategy": rng.choice(("Running", "Post", "PostAndLoss")),
        "output_mode": mode,
        "period": rng.randint(1, device_iterations * accumulation) if mode == "EveryN" else None,
        "with_keywords": rng.choice((0, 0, 1, 2)),  # so many of the last arguments
        "compiles_first": rng.random() < 0.2,
        "between": rng.choice(BETWEEN),  # two calls
        "frozen": rng.choice((0, 0, 0, 2)),  # so many parameters, the first ones
        "splits_groups": rng.random() < 0.25,  # of the optimizer
        "infers": rng.choice((0, 1, 3)),
        "infers_sharded": rng.random() < 0.25,
    }
    assert fixed.keys() <= drawn.keys(), fixed
    return Case(model=name, seed=seed, **(drawn | fixed))


def _draw_blocks(
    rng: random.Random, model: type[Whole], kind: str
) -> tuple[tuple[Begin, ...], tuple[tuple[tuple[str, ...], int | None], ...], bool]:
    """The blocks, the stages, and whether blocks without a name get one."""
    if kind == "none":
        return (), (), False
    places = [(place, rng.choice(HOWS[:2])) for place in model.PLACES]
    has_auto_ids = rng.random() < 0.2
    layers = [] if has_auto_ids else [(layer, rng.choice(HOWS[2:])) for layer in model.LAYERS]
    candidates = places + layers
    chosen = sorted(rng.sample(range(len(candidates)), min(rng.randint(1, 5), len(candidates))))
    num_ipus = rng.choice((1, 2, 2, 3, 4, 4, 5))
    begins: list[Begin] = []
    for number, index in enumerate(chosen):
        where, how = candidates[index]
        name: str | None = None if has_auto_ids else f"b{number}"
        ipu: int | None = rng.randrange(num_ipus)
        if kind == "same ipu":
            # A layer may be called several times: each time a block without a name is a new one.
            name = None if rng.random() < 0.3 else name
        elif rng.random() < 0.5:
            ipu = None
        if begins and name is not None and begins[-1].name is not None and rng.random() < 0.2:
            name, ipu = begins[-1].name, begins[-1].ipu  # one block in two places
        begins.append(Begin(where, how, name, ipu))
    if kind != "stages":
        return tuple(begins), (), has_auto_ids
    names = list(dict.fromkeys(b.name or str(number) for number, b in enumerate(begins)))
    positions = [rng.randrange(len(names)) for _name in names]
    parts = [
        [n for n, p in zip(names, positions, strict=True) if p == part] for part in sorted(set(positions))
    ]
    ipus = [rng.choice((None, rng.randrange(num_ipus))) for _part in parts]
    stages = tuple((tuple(part), ipu) for part, ipu in zip(parts, ipus, strict=True))
    return tuple(begins), stages, has_auto_ids


def annotate(model: Whole, case: Case) -> None:
    """Begins blocks in a model as a case says."""
    for begin in case.begins:
        if begin.how == "with":
            model.begins[begin.where] = functools.partial(poptorch.Block, begin.name, begin.ipu)
        elif begin.how == "start":
            model.begins[begin.where] = functools.partial(_start, begin.name, begin.ipu)
        elif begin.how == "module":
            poptorch.BeginBlock(model.get_submodule(begin.where), begin.name, begin.ipu)
        else:
            layer = model.get_submodule(begin.where)
            layer.forward = poptorch.BlockFunction(begin.name, begin.ipu)(layer.forward)
    if case.has_auto_ids:
        model.register_forward_pre_hook(lambda _module, _inputs: poptorch.Block.useAutoId())


def _start(name: str | None, ipu: int | None) -> Any:
    poptorch.Block.start(name, ipu)
    return contextlib.nullcontext()


def case_options(case: Case, trains: bool) -> poptorch.Options:
    """The options of a case."""
    kind = poptorch.ShardedExecution if case.is_sharded or (not trains and case.infers_sharded) else None
    kind = kind or poptorch.PipelinedExecution
    arguments: list[Any] = [_make_stage(names, ipu) for names, ipu in case.stages]
    if case.auto_increments:
        arguments = [poptorch.AutoStage.AutoIncrement]
    strategy = kind(*arguments) if case.begins else None
    if not trains:
        options = make_options(case.infers, 1, strategy)
    else:
        options = make_options(case.device_iterations, case.accumulation, strategy)
        options.outputMode(poptorch.OutputMode[case.output_mode], case.period)
        training = options.Training
        training.accumulationAndReplicationReductionType(
            poptorch.ReductionType.Mean if case.is_mean else poptorch.ReductionType.Sum
        )
        training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy[case.reduction_strategy]
        )
    if case.schedule is not None:
        options.setPipelineSchedule(case.schedule)
    for what in case.offload:
        location = poptorch.TensorLocationSettings().useOnChipStorage(False)
        getattr(options.TensorLocations, f"set{what}Location")(location)
    return options.autoRoundNumIPUs(True)


def _make_stage(names: tuple[str, ...], ipu: int | None) -> poptorch.Stage:
    stage = poptorch.Stage(*names)
    return stage if ipu is None else stage.ipu(ipu)


def make_optimizer(case: Case, model: torch.nn.Module, plain: bool) -> torch.optim.Optimizer:
    """The optimizer of a case, for plain torch or not."""
    name, arguments = OPTIMIZERS[case.optimizer]
    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if case.splits_groups and len(parameters) > 1:
        rest = {"lr": 0.5 * arguments["lr"]}
        parameters = [{"params": parameters[::2]}, {"params": parameters[1::2], **rest}]
    if plain or not case.is_ours:
        return getattr(torch.optim, name)(parameters, **arguments)
    return getattr(poptorch.optim, name)(parameters, loss_scaling=case.loss_scaling, **arguments)
