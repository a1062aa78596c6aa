"""Every way to run a model, by models that have what models have: equal to a plain loop of `jax.grad`.

A new option of the engine is a row of FEATURES, and what stages may contain one of MODELS. What else there
is to check of an option (where arrays lie, what is compiled, errors) stands in the tests of its room.
`make test` runs each feature with one model, mostly plain layers; `make thorough` runs them with all
others, and features that are COMBINED with one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_pipeline import engine
from tests.support import beside, models

COUNT, NUM_UPDATES = 4, 2
WIDTH, NUM_CLASSES = models.WIDTH, models.NUM_CLASSES
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}


# Models of four stages. Each takes a scale that is an input of the step, and an element (x, labels).


def dense_layers():
    """Three layers and a loss, and nothing else. The second and the third have the same program."""

    def first(scale, x, labels):
        return jnp.tanh(x @ models.weight("first", x)) * scale, labels

    def again(name, x, labels):
        return jnp.sin(x @ models.weight(name, x)), labels

    layers = [first, functools.partial(again, "second"), functools.partial(again, "third")]
    return {"stages": [*layers, models.cross_entropy]}


def with_everything():
    return {"stages": models.VARIOUS_STAGES, "loss": lambda loss, **_others: loss}


def with_branches():
    """Two parallel stages between two others; one branch draws random numbers."""

    def first(scale, x, labels):
        return {"x": jnp.tanh(x @ models.weight("first", x) * scale), "labels": labels}

    def left(x, labels):
        return {"a": jnp.tanh(x @ models.weight("left", x)), "labels": labels}

    def right(x, labels):
        h = jnp.sin(x @ models.weight("right", x))
        return {"b": h * jax.random.uniform(engine.next_rng_key(), h.shape, h.dtype)}

    def last(a, b, labels):
        return models.cross_entropy((a - b) @ models.weight("last", a, size=NUM_CLASSES), labels)

    return {"stages": [first, [left, right], last]}


def with_parameters(dtype):
    """Stages that are functions of a pytree, whose first and last share a table; scanned layers."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return (0.5 * rng.normal(size=shape)).astype(dtype)

    def embed(p, scale, x, labels):
        return jnp.tanh(x @ p["table"]["kernel"]) * scale, labels

    def scanned(p, x, labels):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0], labels

    def project(p, x, labels):
        logits = x @ p[1]["kernel"].T @ p[0] + p[1]["bias"]
        return models.cross_entropy(logits, labels)

    table = engine.Shared("words", {"kernel": normal(WIDTH, WIDTH), "bias": normal(NUM_CLASSES)})
    parameters = [
        *({"table": table}, normal(2, WIDTH, WIDTH), normal(1, WIDTH, WIDTH)),
        [normal(WIDTH, NUM_CLASSES), table],
    ]
    return {
        "stages": [embed, scanned, scanned, project],
        "parameters": parameters,
    }


MODELS: dict[str, Callable[[str], dict[str, Any]]] = {
    "layers": lambda _dtype: dense_layers(),
    "everything": lambda _dtype: with_everything(),
    "branches": lambda _dtype: with_branches(),
    "parameters": with_parameters,
}


# Ways to run them.


def of_loss(loss, **_others):
    """Its state has the rate, so that it shows which loss was read."""
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * loss)
    return optax.chain(optax.trace(decay=0.0), rate)


SHOWING = models.showing_gradients()
MOMENTUM = optax.sgd(0.1, momentum=0.5)  # of the cheap model; its state is made of the gradients
# Its state also has a count, which the updates of all stages read: none of them may take its memory.
COUNTING = optax.sgd(optax.linear_schedule(0.1, 0.05, NUM_UPDATES), momentum=0.5)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), MOMENTUM)


def divide(spec):
    """Matrices by columns, or by rows where the columns are odd, and in the third stage."""
    if len(spec.shape) < 2:
        return None
    others = [None] * (len(spec.shape) - 1)
    by_rows = spec.shape[-1] % 4 != 0 or spec.name == "third/kernel"
    return P("model") if by_rows else P(*others, "model")


def divided(size):
    return engine.TensorParallel(size, divide)


@dataclasses.dataclass(frozen=True)
class Feature:
    """Options of a pipeline.

    Attributes:
      options: those of `engine.Pipeline`.
      mapping: the IPU of each of the four stages; None: one each.
      num_replicas: how many.
      phases: those of `engine.ExecutionPhases`, with `of_levels` for four levels; None: no phases.
      given: whether each step is told its number of micro-batches.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mapping: tuple[int, ...] | None = None
    num_replicas: int = 1
    phases: dict[str, Any] | None = None
    given: bool = False


MEMORY = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]
ONE, LOOPED, MIXED, NEIGHBOURS = (0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 2, 0), (0, 0, 1, 1)
V_SHAPE = (0, 1, 1, 0)
THEN, INTERLEAVED = "recompute_then_backpropagate", "recompute_and_backpropagate_interleaved"
CHUNKS = {"dispatch_plan": engine.Chunking(2)}
SHARED_OUT = {"shard": ["optimizer_state", "weights"]}
ONE_GROUP = {"num_serialized": 2, "schedule": "sequential"}
IN_TURN = {"schedule": "sequential"}
HALVES = {"schedule": "zero_bubble"}
SEARCHED = engine.SearchedSchedule()
NOT_PARALLEL = {"looped", "looped_zero_bubble", "zero_bubble_v", "v_half", "v_min", "dual_pipe_v"}
NOT_PARALLEL |= {SEARCHED}

FEATURES: dict[str, Feature] = {
    # Schedules and places.
    "grouped": Feature({"schedule": "grouped"}),
    "interleaved": Feature({"schedule": "interleaved", "reduction": "sum"}),
    "sequential": Feature({"schedule": "sequential", "reduction": "running_mean"}),
    "grouped, looped": Feature({"schedule": "grouped", "donate": True}, LOOPED),
    "interleaved, mixed": Feature({"schedule": "interleaved"}, MIXED),
    "sequential, neighbours": Feature({"schedule": "sequential", "donate": True}, NEIGHBOURS),
    "one IPU": Feature({"donate": True, "optimizer": COUNTING}, ONE),
    "one IPU, sum": Feature({"reduction": "sum"}, ONE),
    "one IPU, running mean": Feature({"reduction": "running_mean"}, ONE),
    "one IPU, in parts": Feature({"block_bytes": 600, "donate": True}, ONE),
    # Programs.
    "chunks": Feature(CHUNKS),
    "chunks of all": Feature({"dispatch_plan": engine.Chunking(4), "reduction": "sum"}, LOOPED),
    "chunks, interleaved": Feature(
        {**CHUNKS, "schedule": "interleaved", "reduction": "running_mean"}, NEIGHBOURS
    ),
    "count given": Feature({"reduction": "sum"}, given=True),
    "count given, one IPU": Feature({"reduction": "running_mean"}, ONE, given=True),
    "groups": Feature(ONE_GROUP, ONE),
    "groups, in parts": Feature({**ONE_GROUP, "block_bytes": 1, "reduction": "sum"}, ONE),
    "groups, recomputed": Feature({**ONE_GROUP, "recompute": THEN, "offload": MEMORY}, ONE),
    # Memory.
    "recomputed": Feature({"recompute": "auto"}),
    "recomputed at once": Feature({"recompute": THEN, **CHUNKS}, LOOPED),
    "recomputed in turn": Feature({"recompute": INTERLEAVED, "schedule": "interleaved"}),
    "recomputed, one IPU": Feature({"recompute": "auto"}, ONE),
    "recomputed in turn, one IPU": Feature({"recompute": INTERLEAVED}, ONE),
    "state offloaded": Feature({"offload": MEMORY[:1], "donate": True, "optimizer": COUNTING}),
    "activations offloaded": Feature({"offload": MEMORY[1:2], **CHUNKS}),
    "accumulators offloaded": Feature({"offload": MEMORY[2:3], **CHUNKS}, LOOPED),
    "all offloaded": Feature({"offload": MEMORY, "recompute": "auto"}),
    "all offloaded, one IPU": Feature({"offload": MEMORY, "donate": True}, ONE),
    "phases": Feature(
        {**IN_TURN, "offload": MEMORY}, MIXED, phases={"of_levels": (0, 1, 2, 2), "num_ahead": 1}
    ),
    "phases, one IPU": Feature(
        {**IN_TURN, "offload": MEMORY},
        ONE,
        phases={"of_levels": (0, 1, 2, 3), "num_ahead": 0, "keeps_values": False},
    ),
    "phases, replicas": Feature(IN_TURN, ONE, 2, phases={"of_levels": (0, 0, 1, 1)}),
    "phases, replicas, shared out": Feature(
        {**IN_TURN, "offload": MEMORY, **SHARED_OUT},
        MIXED,
        num_replicas=2,
        phases={"of_levels": (0, 1, 2, 2), "num_ahead": 0, "keeps_values": False},
    ),
    "phases, chunks": Feature(
        {**IN_TURN, **CHUNKS, "offload": MEMORY}, ONE, phases={"of_levels": (0, 0, 1, 1), "num_ahead": 0}
    ),
    # Replicas and devices of an IPU.
    "two replicas": Feature({"schedule": "interleaved", "reduction": "sum"}, num_replicas=2),
    "two replicas, sequential": Feature({"schedule": "sequential", "donate": True}, MIXED, 2),
    "replicas, chunks": Feature({**CHUNKS, "reduction": "running_mean"}, num_replicas=2),
    "three replicas, one IPU": Feature({}, ONE, 3),
    "replicas, one IPU, chunks": Feature(CHUNKS, ONE, 2),
    "replicas, offloaded": Feature({"offload": MEMORY, "recompute": "auto"}, LOOPED, 2),
    "replicas, state shared out": Feature({"shard": ["optimizer_state"], "optimizer": COUNTING}, None, 2),
    "replicas, shared out": Feature({**SHARED_OUT, **CHUNKS}, num_replicas=2),
    "replicas, shared out, one IPU": Feature({**SHARED_OUT, "recompute": "auto"}, ONE, 2),
    "replicas, shared out and offloaded": Feature({**SHARED_OUT, "offload": MEMORY}, LOOPED, 2),
    "tensor parallel": Feature({"tensor_parallel": divided(2), "schedule": "interleaved"}),
    "tensor parallel, one IPU": Feature({"tensor_parallel": divided(4), "donate": True}, ONE),
    "tensor parallel, chunks": Feature({"tensor_parallel": divided(2), **CHUNKS, "recompute": "auto"}),
    "tensor parallel, replicas": Feature({"tensor_parallel": divided(2), "offload": MEMORY}, LOOPED, 2),
    "tensor parallel, shared out": Feature({"tensor_parallel": divided(2), **SHARED_OUT}, LOOPED, 2),
    # Backwards in halves, and stages around the IPUs.
    "looped": Feature(
        {"schedule": "looped", "recompute": "auto", "donate": True, "optimizer": COUNTING}, LOOPED
    ),
    "looped, chunks": Feature({"schedule": "looped", "reduction": "sum", **CHUNKS}, LOOPED),
    "halves": Feature({**HALVES, "donate": True}),
    "halves, more held": Feature({"schedule": "zero_bubble_h2", "reduction": "running_mean"}),
    "halves, around": Feature({"schedule": "looped_zero_bubble", "donate": True}, LOOPED),
    "halves, down and up": Feature({"schedule": "zero_bubble_v", "donate": True}, V_SHAPE),
    "halves, half held": Feature({"schedule": "v_half", "reduction": "sum"}, V_SHAPE),
    "halves, a third held": Feature({"schedule": "v_min", "recompute": "auto"}, V_SHAPE),
    "halves, both ways": Feature({"schedule": "dual_pipe_v"}, V_SHAPE),
    "all forwards": Feature({"schedule": "all_forwards", "donate": True}, MIXED),
    "halves, count given": Feature({**HALVES, "reduction": "sum"}, given=True),
    "halves, looped": Feature({**HALVES, "reduction": "running_mean"}, LOOPED),
    "halves, recomputed": Feature({**HALVES, "recompute": "auto"}, MIXED),
    "halves, recomputed at once": Feature({**HALVES, "recompute": THEN, **CHUNKS}),
    "halves, recomputed in turn": Feature({**HALVES, "recompute": INTERLEAVED, **CHUNKS}),
    "halves, offloaded": Feature({**HALVES, "offload": MEMORY, "donate": True}),
    "halves, replicas, shared out": Feature({**HALVES, **SHARED_OUT}, LOOPED, 2),
    "halves, replicas, all": Feature(
        {**HALVES, **SHARED_OUT, **CHUNKS, "offload": MEMORY, "recompute": "auto"}, MIXED, 2
    ),
    "halves, tensor parallel": Feature({**HALVES, "tensor_parallel": divided(2)}),
    "halves, of the loss": Feature({**HALVES, "optimizer": of_loss, "reduction": "sum"}, NEIGHBOURS),
    "halves, of the norm": Feature({**HALVES, "optimizer": CLIPPED}, LOOPED),
    "searched": Feature({"schedule": SEARCHED, "donate": True}),
    "searched, replicas, all": Feature(
        {"schedule": SEARCHED, **SHARED_OUT, **CHUNKS, "offload": MEMORY}, V_SHAPE, 2
    ),
    # Optimizers.
    "of the loss": Feature({"optimizer": of_loss}),
    "of the loss, replicas": Feature({"optimizer": of_loss}, LOOPED, 2),
    "of the loss, one IPU": Feature({"optimizer": of_loss}, ONE),
    "of the loss, tensor parallel": Feature(
        {"optimizer": of_loss, "tensor_parallel": divided(2), "reduction": "running_mean", "donate": True}
    ),
    "of the norm": Feature({"optimizer": CLIPPED}, LOOPED, 2),
    "of the norm, shared out": Feature({"optimizer": CLIPPED, **SHARED_OUT}, LOOPED, 2),
    "of the norm, tensor parallel": Feature(
        {"optimizer": CLIPPED, "tensor_parallel": divided(2), "schedule": "sequential"}
    ),
    "sums": Feature({"sum_collected": True, "reduction": "sum"}, num_replicas=2),
    # Forwards only.
    "inference": Feature({"optimizer": None}),
    "inference, chunks": Feature({"optimizer": None, **CHUNKS, "schedule": "interleaved"}, LOOPED),
    "inference, groups": Feature({"optimizer": None, **ONE_GROUP}, ONE),
    "inference, halves": Feature({"optimizer": None, **HALVES}),
    "inference, searched": Feature({"optimizer": None, "schedule": SEARCHED}),
    "inference, around": Feature({"optimizer": None, "schedule": "looped", **CHUNKS}, LOOPED),
    "inference, replicas": Feature({"optimizer": None, "schedule": "sequential"}, num_replicas=2),
    "inference, tensor parallel": Feature({"optimizer": None, "tensor_parallel": divided(2)}),
}  # fmt: skip


def make(model, dtype, feature):
    built = MODELS[model](dtype)
    training = {"optimizer": MOMENTUM if model == "layers" else SHOWING}
    options = {**built, **training, "num_replicas": feature.num_replicas, **feature.options}
    if options["optimizer"] is None:
        options["loss"] = None
    levels, mapping = len(built["stages"]), feature.mapping
    if mapping is not None and levels == 3:
        mapping = (mapping[0], list(mapping[1:3]), mapping[3])
    if feature.phases is not None:
        of_levels = feature.phases["of_levels"][4 - levels :]
        of_levels = [level - of_levels[0] for level in of_levels]
        options["execution_phases"] = engine.ExecutionPhases(**feature.phases | {"of_levels": of_levels})
    count = None if feature.given else COUNT // options.get("num_serialized", 1)
    return engine.Pipeline(num_micro_batches=count, device_mapping=mapping, **options)


SIZES = {  # by step and micro-batch of a replica
    "same": [[4, 4, 4, 4], [4, 4, 4, 4]],
    "different": [[4, 4, 2, 2], [2, 2, 4, 4]],
}


@functools.cache
def make_steps(dtype, sizes, num_replicas):
    rng = np.random.default_rng(num_replicas)

    def make_step(own):
        batches = (models.various_batches(rng, num_replicas, size, dtype) for size in own)
        return list(itertools.chain.from_iterable(batches))

    return list(map(make_step, SIZES[sizes]))


def add(*values):
    return sum(values[1:], values[0])


# Combinations of features that other rows have alone or in pairs: for `make thorough`.
COMBINED = {
    *("grouped, looped", "interleaved, mixed", "sequential, neighbours", "chunks of all"),
    *("chunks, interleaved", "count given, one IPU", "groups, in parts", "recomputed in turn, one IPU"),
    *("phases, replicas", "phases, chunks", "phases, replicas, shared out", "two replicas, sequential"),
    *("replicas, one IPU, chunks", "replicas, offloaded", "replicas, shared out and offloaded"),
    *("tensor parallel, chunks", "tensor parallel, replicas"),
    *("tensor parallel, shared out", "looped, chunks", "halves, looped", "halves, count given"),
    *("halves, recomputed at once", "halves, recomputed in turn", "halves, offloaded"),
    *("halves, tensor parallel", "halves, replicas, shared out", "halves, of the loss"),
    *("halves, of the norm", "of the loss, replicas"),
    *("of the loss, tensor parallel", "of the norm, tensor parallel"),
    *("inference, groups", "inference, tensor parallel", "searched, replicas, all"),
}
# What `make test` runs with another model than the layers, with 64 bits, or with two sizes.
RICH = {
    "interleaved": ("layers", "float32", "different"),
    "one IPU, sum": ("layers", "float32", "different"),
    "one IPU, running mean": ("everything", "float32", "same"),
    "one IPU, in parts": ("parameters", "float64", "same"),
    "recomputed": ("layers", "float64", "same"),
    "all offloaded, one IPU": ("branches", "float32", "same"),
    "replicas, chunks": ("everything", "float32", "same"),
    "halves": ("branches", "float32", "same"),
    "halves, replicas, all": ("parameters", "float32", "same"),
}
PLAIN = ("layers", "float32", "same")
CASES = {feature: RICH.get(feature, PLAIN) for feature in FEATURES if feature not in COMBINED}


def rich_models(feature, row):
    """The rich models that `make thorough` runs a feature with: all that it can; one for a combination."""
    possible = [
        (number, model)
        for number, model in enumerate(MODELS)
        if model not in ("layers", CASES.get(feature, (None,))[0])
        and not (model == "branches" and FEATURES[feature].options.get("schedule") in NOT_PARALLEL)
    ]
    return possible[row % len(possible) :][:1] if feature in COMBINED else possible


def sizes_of(feature):
    """What the last stage returns is added up over micro-batches of one shape."""
    return "same" if "sum_collected" in FEATURES[feature].options else "different"


# Each model meets both dtypes and both sizes.
OTHERS = [
    (
        *(feature, model, ("float32", "float64")[(number + row) % 2]),
        sizes_of(feature) if (number + row // 3) % 3 == 0 else "same",
    )
    for row, feature in enumerate(FEATURES)
    for number, model in rich_models(feature, row)
]


@functools.cache
def plain_pipeline(model, dtype, is_trained):
    """The pipeline whose stages the plain loops of all features call, so that they are compiled once."""
    built = MODELS[model](dtype) | {"optimizer": MOMENTUM if is_trained else None}
    if not is_trained:
        built["loss"] = None
    return engine.Pipeline(num_micro_batches=COUNT, **built)


@functools.cache
def trained_plainly(model, dtype, sizes, num_replicas, reduction, optimizer):
    """The plain loop's first state, and the state and outputs after each step. Features share them."""
    pipeline = plain_pipeline(model, dtype, optimizer is not None)
    steps, scale = make_steps(dtype, sizes, num_replicas), np.asarray(0.9, dtype)
    state = beside.copied(pipeline.init(jax.random.key(3), steps[0][0], scale))
    start = state = dataclasses.replace(state, optimizer_state=None)
    options = {"optimizer": optimizer, "reduction": reduction, "num_replicas": num_replicas}
    results = []
    for step in steps:
        state, outputs = beside.step_plainly(pipeline, state, step, scale, **options)
        results.append((state, outputs))
    return start, results


@pytest.mark.parametrize(
    ("name", "model", "dtype", "sizes"),
    [
        *((feature, *case) for feature, case in CASES.items()),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS),
    ],
)
def test_equals_a_plain_loop(name, model, dtype, sizes):
    """Compares losses, outputs, gradients, variables and the optimizer's state after each update."""
    feature = FEATURES[name]
    with jax.enable_x64(dtype == "float64"):
        pipeline = make(model, dtype, feature)
        steps, scale = make_steps(dtype, sizes, feature.num_replicas), np.asarray(0.9, dtype)
        options = pipeline.options
        start, results = trained_plainly(
            model, dtype, sizes, feature.num_replicas, options.reduction, options.optimizer
        )
        state = pipeline.init(jax.random.key(3), steps[0][0], scale)
        models.assert_trees_close(state.variables, start.variables, 0.0)
        # One that reads outputs depends on those of the first micro-batch.
        assert (state.optimizer_state is None) == (options.optimizer in (None, of_loss))
        bound = TOLERANCES[dtype]
        given = {"num_micro_batches": COUNT} if feature.given else {}
        for step, (expected, wanted) in zip(steps, results, strict=True):
            before = state
            state, outputs = pipeline.step(before, step, scale, **given)
            losses, collected = wanted.losses, wanted.outputs
            if options.sum_collected:
                losses, collected = ([jax.tree.map(add, *values)] for values in (losses, collected))
            models.assert_trees_close(outputs.losses, losses, bound)
            models.assert_trees_close(outputs.outputs, collected, bound)
            models.assert_trees_close(state.variables, expected.variables, bound)
            models.assert_trees_close(state.optimizer_state, expected.optimizer_state, bound)
        trains = options.optimizer is not None
        assert (state.execution_count, state.update_count) == (NUM_UPDATES, NUM_UPDATES * trains)
        if "block_bytes" in feature.options:
            assert pipeline.prepare().sizes(COUNT, COUNT).capacity < COUNT
        if not options.donate:  # the state before is whole, and gives the same again
            again, same = pipeline.step(before, steps[-1], scale, **given)
            models.assert_trees_close(again.variables, state.variables, 0.0)
            models.assert_trees_close(same.losses, outputs.losses, 0.0)
