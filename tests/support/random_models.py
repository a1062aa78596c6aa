"""Random models, and random ways to run them, as data that prints as it was drawn.

A model is a list of layers over a dict of values. One model is trained in a few ways (`Training`), and each
of them runs as several pipelines (`Split`, `Run`) that differ in what must not change a number: where the
model is cut, where the stages lie, the schedule, how many micro-batches a program handles, what is
recomputed or offloaded. So one plain loop serves for many pipelines.

The models are well conditioned, so that rounding stays rounding: no kinks, noise as targets, no trained
scalar (whose gradient may happen to be a small difference of large numbers), a nonlinearity before each
normalization (a bias straight before one has the gradient zero), and Adam with an epsilon that gradients
near zero do not reach. What branches does so by integers. The squares of float16 gradients are below its
smallest normal number, so Adam has float32 accumulators there, in whose dtype it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

from ipu_pipeline import engine, layers

WIDTH, BATCH, NUM_IDS = 6, 4, 7
NUM_TRAININGS, NUM_SPLITS, NUM_RUNS = 2, 2, 4  # of a model; of a model; of a training and a split
SCHEDULES = ("grouped", "interleaved", "sequential", "zero_bubble", "zero_bubble_h2", "all_forwards")
AROUND = ("looped", "looped_zero_bubble")
DOWN_AND_UP = ("zero_bubble_v", "v_half", "v_min", "dual_pipe_v")
OFFLOADS = ("weight_update_variables", "activations", "gradient_accumulation_buffers", "weights")
RECOMPUTATIONS = ("auto", "recompute_then_backpropagate", "recompute_and_backpropagate_interleaved")
ACTIVATIONS = (jnp.tanh, jax.nn.gelu, jax.nn.softplus, jax.nn.sigmoid)

BRANCHES = ("left", "right")

Values = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One layer: a key of `LAYERS`; which variant of it; and the layer whose result or variable it uses."""

    kind: str
    variant: int = 0
    source: int = -1


@dataclass(frozen=True)
class Model:
    """Layers, the dtype of values and variables, and the seed of data and variables."""

    layers: tuple[Layer, ...]
    dtype: str
    seed: int


@dataclass(frozen=True)
class Training:
    """What the numbers depend on besides the model; the optimizer is a key of `OPTIMIZERS`."""

    num_micro_batches: int
    num_updates: int
    reduction: str
    optimizer: str
    keeps_gradients: bool
    wide_accumulators: bool


@dataclass(frozen=True)
class Split:
    """What most of the compiled programs depend on.

    `cuts` are the layers that begin a stage, `is_parallel` tells whether the two branches of the model are
    parallel stages, `forms` are those in which values go from stage to stage.
    """

    cuts: tuple[int, ...]
    is_parallel: bool
    forms: tuple[str, ...]
    device_mapping: tuple[Any, ...]
    recompute: str | None
    offload: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """How a split is run; `dispatch_plan` None is the pipeline's choice."""

    schedule: str
    donate: bool
    count_is_traced: bool
    num_serialized: int
    collected: str
    block_bytes: int
    dispatch_plan: engine.Chunking | None = None


@dataclass(frozen=True)
class Pipeline:
    """One pipeline."""

    model: Model
    training: Training
    split: Split
    run: Run


# Layers: functions of the layer, its name and the values, which they change in place.


def variable(name: str, shape: tuple[int, ...], x: Any, reuse: bool = False, **options: Any) -> Any:
    scope, _slash, short = name.rpartition("/")
    with engine.variable_scope(scope, reuse=reuse):
        return engine.get_variable(short, shape, x.dtype, **options)


def small(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.random.normal(key, shape, dtype) * 0.3


def dense(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    y = x @ variable(f"{name}/kernel", (WIDTH, WIDTH), x)
    if layer.variant < 2:
        y += variable(f"{name}/bias", (WIDTH,), x, initializer=small)
    values["x"] = ACTIVATIONS[layer.variant](y)


def tied(layer: Layer, name: str, values: Values) -> None:
    kernel = variable(f"layer{layer.source}/kernel", (WIDTH, WIDTH), values["x"], reuse=True)
    values["x"] = jnp.tanh(values["x"] @ (kernel.T if layer.variant % 2 else kernel))


def skip(layer: Layer, name: str, values: Values) -> None:
    x, saved = values["x"], values[f"saved{layer.source}"]
    if layer.variant == 0:
        values["x"] = (x + saved) * 0.7
    elif layer.variant == 1:
        values["x"] = x * jax.nn.sigmoid(saved)
    elif layer.variant == 2:
        values["x"] = x + 0.5 * jax.lax.stop_gradient(jnp.sin(saved))
    else:
        halved = jax.lax.while_loop(  # has no derivative in reverse mode
            lambda pair: pair[0] < 2,
            lambda pair: (pair[0] + 1, pair[1] * 0.5),
            (jnp.int32(0), jax.lax.stop_gradient(saved)),
        )[1]
        values["x"] = x + halved


def normalization(layer: Layer, name: str, values: Values) -> None:
    kind = layers.BatchNormalization if layer.variant < 3 else layers.LayerNormalization
    options = {"momentum": 0.8} if layer.variant < 3 else {}
    x = jnp.tanh(values["x"])
    values["x"] = kind(name=name, dtype=x.dtype, epsilon=0.01, **options)(x)


def random(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    if layer.variant < 3:
        values["x"] = layers.Dropout(0.25, name=name)(x)
    else:
        values["x"] = x + 0.1 * jax.random.normal(engine.next_rng_key(), x.shape, x.dtype)


def embedding(layer: Layer, name: str, values: Values) -> None:
    is_shared = layer.variant >= 2
    scope = "embedding" if is_shared else name
    shape, x = (NUM_IDS, WIDTH), values["x"]
    table = variable(f"{scope}/table", shape, x, reuse=is_shared, initializer=small)
    values["x"] = values["x"] + table[values["ids"]]


def integers(layer: Layer, name: str, values: Values) -> None:
    values["number"] = values["ids"] * 2 + layer.variant
    values["is_even"] = values["ids"] % 2 == 0


def use_integers(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    if "is_even" in values:
        x = jnp.where(values["is_even"][:, None], x, jnp.sin(x))
    if "number" in values:
        x = x * (1 + 0.02 * values["number"].astype(x.dtype)[:, None])
    values["x"] = x


def constant(layer: Layer, name: str, values: Values) -> None:
    values["constant"] = jnp.linspace(0.5, 1.5, WIDTH).astype(values["x"].dtype)
    if layer.variant % 2:
        values["x"] = values["x"] * np.linspace(1, 0.5, WIDTH).astype(values["x"].dtype)


def scan(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    outer = variable(f"{name}/kernel", (WIDTH, WIDTH), x) if layer.variant % 2 else None

    def body(carry: Any, index: Any) -> tuple[Any, Any]:
        kernel = variable(f"{name}/kernel", (WIDTH, WIDTH), x) if outer is None else outer
        carry = 0.5 * carry + 0.5 * jnp.tanh(carry @ kernel)
        return carry, carry * index.astype(x.dtype)

    last, rows = jax.lax.scan(body, x, jnp.arange(3))
    values["x"] = last + 0.2 * rows.sum(0)


def conditional(layer: Layer, name: str, values: Values) -> None:
    def first(x: Any) -> Any:
        return jnp.tanh(x @ variable(f"{name}/kernel", (WIDTH, WIDTH), x))

    def second(x: Any) -> Any:
        return x * variable(f"{name}/scale", (WIDTH,), x, initializer=jax.nn.initializers.ones)

    values["x"] = jax.lax.cond(values["ids"][0] % 2 == 0, first, second, values["x"])


@jax.custom_vjp
def damped(x: Any, w: Any) -> Any:
    return jnp.tanh(x * w)


damped.defvjp(
    lambda x, w: (jnp.tanh(x * w), (x, w)),
    lambda kept, g: (g * kept[1] * 0.5, (g * kept[0]).sum(0)),
)


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return jnp.sin(x)


doubled.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * tangents[0]))


def custom(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    if layer.variant % 2:
        values["x"] = damped(x, variable(f"{name}/w", (WIDTH,), x, initializer=jax.nn.initializers.ones))
    else:
        values["x"] = doubled(x)


def plain(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    if layer.variant % 2:
        swapped = x.reshape(BATCH, 2, WIDTH // 2).swapaxes(1, 2).reshape(BATCH, WIDTH)
        values["x"] = swapped * values["scale"]
    else:
        values["x"] = x + jax.nn.softmax(x)


def inner(layer: Layer, name: str, values: Values) -> None:
    def call(x: Any) -> Any:
        return jnp.tanh(x @ variable(f"{name}/kernel", (WIDTH, WIDTH), x)) * x

    values["x"] = (jax.checkpoint if layer.variant % 2 else jax.jit)(call)(values["x"])


def marked(layer: Layer, name: str, values: Values) -> None:
    values["x"] = engine.recomputation_checkpoint({"x": jnp.sin(values["x"])})["x"]


def counter(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    with engine.variable_scope(name):
        count = engine.get_variable("count", (), "int32", trainable=False)
        engine.assign("count", count + 1)
    values["x"] = x * (1 + 0.02 * count.astype(x.dtype))


def frozen(layer: Layer, name: str, values: Values) -> None:
    x = values["x"]
    values["x"] = jnp.tanh(x @ variable(f"{name}/frozen", (WIDTH, WIDTH), x, trainable=False))


def left(layer: Layer, name: str, values: Values) -> None:
    values["left"] = jnp.tanh(values["x"] @ variable(f"{name}/kernel", (WIDTH, WIDTH), values["x"]))
    if layer.variant % 2:
        values["left"] = layers.Dropout(0.25, name=name)(values["left"])


def right(layer: Layer, name: str, values: Values) -> None:
    table = variable("embedding/table", (NUM_IDS, WIDTH), values["x"], reuse=True, initializer=small)
    values["right"] = jax.nn.gelu(values["x"] + table[values["ids"]])


def join(layer: Layer, name: str, values: Values) -> None:
    values["x"] = values.pop("left") + values.pop("right") * values["x"]


LAYERS: dict[str, Callable[[Layer, str, Values], None]] = {
    function.__name__: function
    for function in (
        dense, tied, skip, normalization, random, embedding, integers, use_integers, constant, scan,
        conditional, custom, plain, inner, marked, counter, frozen, left, right, join,
    )
}  # fmt: skip


def apply_layers(model: Model, indices: range, values: Values) -> None:
    used = {layer.source: index for index, layer in enumerate(model.layers) if layer.kind == "skip"}
    for index in indices:
        layer = model.layers[index]
        LAYERS[layer.kind](layer, f"layer{index}", values)
        if layer.kind == "skip" and used[layer.source] == index:
            del values[f"saved{layer.source}"]
        if index in used:
            values[f"saved{index}"] = values["x"]


def finish(model: Model, values: Values) -> Values:
    x = values["x"]
    predictions = x @ variable("head/kernel", (WIDTH, WIDTH), x)
    predictions += variable("head/bias", (WIDTH,), x, initializer=small)
    if "constant" in values:
        predictions *= values["constant"]
    wide = "float64" if model.dtype == "float64" else "float32"
    difference = predictions.astype(wide) - values["targets"].astype(wide)
    others = {key: values[key] for key in ("ids", "is_even", "number", "scale") if key in values}
    return {"loss": jnp.mean(difference**2), "predictions": predictions, **others}


# Stages.


def pack(form: str, values: Values) -> Any:
    if form == "keywords":
        return values
    rest = {key: value for key, value in values.items() if key != "x"}
    if form == "pair":
        return values["x"], rest
    return {"main": [values["x"], {"scale": rest.pop("scale")}], "others": (rest, None)}


def unpack(form: str, args: tuple[Any, ...], kwargs: Values) -> Values:
    if form == "element":
        return {"scale": args[0], **kwargs}
    if form == "keywords":
        return dict(kwargs)
    if form == "pair":
        return {"x": args[0], **args[1]}
    x, more = kwargs["main"]
    return {"x": x, **more, **kwargs["others"][0]}


def stage(model: Model, indices: range, takes: str, gives: str, keeps: str | None = None) -> Any:
    """The stage of some layers; with `keeps` it returns that value only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = unpack(takes, args, kwargs)
        apply_layers(model, indices, values)
        if keeps is not None:
            return {keeps: values[keeps]}
        if indices.stop == len(model.layers):
            return finish(model, values)
        return pack(gives, values)

    return call


def make_stages(
    model: Model, cuts: tuple[int, ...], forms: tuple[str, ...], is_parallel: bool
) -> list[Any]:
    bounds = [0, *cuts, len(model.layers)]
    takes = ["element", *forms]
    gives = [*forms, "keywords"]
    made: list[Any] = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        kinds = [layer.kind for layer in model.layers[start:stop]]
        if is_parallel and kinds == ["left", "right"]:
            # The branch that comes second gives its own value only; they are joined by keyword.
            left, right = range(start, start + 1), range(start + 1, stop)
            of_left = stage(model, left, takes[index], "keywords")
            made.append([of_left, stage(model, right, takes[index], "keywords", keeps="right")])
        else:
            made.append(stage(model, range(start, stop), takes[index], gives[index]))
    return made


# Training.


def _masked() -> optax.GradientTransformation:
    def is_kernel(tree: Any) -> Any:
        return {name: name.endswith("kernel") for name in tree}

    return optax.chain(optax.masked(optax.trace(decay=0.9), is_kernel), optax.scale(-0.05))


def _multi() -> optax.GradientTransformation:
    def labels(tree: Any) -> Any:
        return {name: "wide" if name.endswith("kernel") else "other" for name in tree}

    return optax.multi_transform({"wide": _adam(), "other": optax.sgd(0.05)}, labels)


def _adam() -> optax.GradientTransformation:
    return optax.adam(0.01, eps=1e-2)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": _adam,
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), _adam()),
    "masked": _masked,
    "multi": _multi,
    "if_finite": lambda: optax.apply_if_finite(_adam(), max_consecutive_errors=3),
    "scheduled": lambda: optax.sgd(optax.exponential_decay(0.05, 1, 0.5)),
}


def make_optimizer(training: Training) -> Any:
    if training.optimizer == "from outputs":

        def optimizer(scale: Any, **_others: Any) -> Any:
            return optax.chain(optax.trace(decay=0.0), optax.sgd(scale * 0.05))

        return optimizer
    made = OPTIMIZERS[training.optimizer]()
    # Without decay the trace is the gradient that the optimizer was given.
    return optax.chain(optax.trace(decay=0.0), made) if training.keeps_gradients else made


def make_steps(model: Model, training: Training) -> list[list[Values]]:
    """The micro-batches of each step."""
    rng = np.random.default_rng(model.seed)

    def micro_batch() -> Values:
        return {
            "x": rng.normal(size=(BATCH, WIDTH)).astype(model.dtype),
            "ids": rng.integers(0, NUM_IDS, BATCH).astype("int32"),
            "targets": rng.normal(size=(BATCH, WIDTH)).astype(model.dtype),
        }

    count = training.num_micro_batches
    return [[micro_batch() for _ in range(count)] for _ in range(training.num_updates)]


def make_scale(model: Model) -> Any:
    """The input that is the same for all micro-batches."""
    return np.asarray(0.9, model.dtype)


def make_pipeline(drawn: Pipeline) -> engine.Pipeline:
    training, split, run = drawn.training, drawn.split, drawn.run
    count = training.num_micro_batches // run.num_serialized
    return engine.Pipeline(
        make_stages(drawn.model, split.cuts, split.forms, split.is_parallel),
        num_micro_batches=None if run.count_is_traced else count,
        loss=lambda loss, **_others: loss,
        optimizer=make_optimizer(training),
        schedule=run.schedule,
        device_mapping=split.device_mapping,
        reduction=training.reduction,
        donate=run.donate,
        recompute=split.recompute,
        offload=split.offload,
        accumulator_dtype="float32" if training.wide_accumulators else None,
        num_serialized=run.num_serialized,
        collect_outputs=wanted_outputs if run.collected == "some" else run.collected != "losses",
        sum_collected=run.collected == "sums",
        sum_dtype=sum_dtype if run.collected == "sums" else None,
        block_bytes=run.block_bytes,
        dispatch_plan=run.dispatch_plan,
    )


def unsplit(model: Model, training: Training) -> Pipeline:
    """The pipeline of one stage."""
    split = Split((), False, (), (0,), None, ())
    return Pipeline(model, training, split, Run("grouped", False, False, 1, "all", 2**26))


def wanted_outputs(shapes: Values) -> list[bool]:
    """Every other one."""
    return [number % 2 == 0 for number in range(len(jax.tree.leaves(shapes)))]


def sum_dtype(shape: jax.ShapeDtypeStruct) -> Any:
    """Booleans are counted, and 16 bits added in 32."""
    if shape.dtype == np.bool_:
        return np.dtype("int32")
    return np.dtype("float32") if shape.dtype.itemsize == 2 else None


# Strategies.


@st.composite
def models(draw: Any, part: int) -> Model:
    made: list[Layer] = [Layer("dense", draw(st.integers(0, 3)))]
    kinds = sorted(set(LAYERS) - {"left", "right", "join"})
    variants = st.integers(0, 3)
    num_layers = draw(st.integers(2, 6))
    branch_at = draw(st.sampled_from([None, None, *range(num_layers)]))
    for place in range(num_layers):
        if place == branch_at:
            made += [Layer("left", draw(variants)), Layer("right"), Layer("join")]
        kind = draw(st.sampled_from(kinds))
        source = -1
        if kind == "tied":
            source = draw(st.sampled_from([n for n, layer in enumerate(made) if layer.kind == "dense"]))
        if kind == "skip":
            saved = [n for n, layer in enumerate(made) if layer.kind not in BRANCHES]
            source = draw(st.sampled_from(saved))
        made.append(Layer(kind, draw(variants), source))
    dtype = draw(st.sampled_from(["float32", "float32", "float64", "float64", "bfloat16", "float16"]))
    return Model(tuple(made), dtype, 1000 * part + draw(st.integers(0, 999)))


@st.composite
def trainings(draw: Any, model: Model) -> Training:
    is_narrow = model.dtype in ("bfloat16", "float16")
    optimizer = draw(st.sampled_from([*OPTIMIZERS, "from outputs"]))
    has_squares = optimizer in ("adam", "clipped", "multi", "if_finite")
    needs_wide = model.dtype == "float16" and has_squares
    return Training(
        num_micro_batches=draw(st.integers(1, 6)),
        num_updates=draw(st.integers(2, 3)),
        reduction=draw(st.sampled_from(["sum", "mean", "running_mean"])),
        optimizer=optimizer,
        keeps_gradients=draw(st.booleans()),
        wide_accumulators=needs_wide or (is_narrow and draw(st.booleans())),
    )


@st.composite
def splits(draw: Any, model: Model) -> Split:
    num_layers = len(model.layers)
    kinds = [layer.kind for layer in model.layers]
    is_parallel = "left" in kinds and draw(st.booleans())
    cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=1 if is_parallel else 3))
    if is_parallel:  # the two branches alone are a stage
        branch = kinds.index("left")
        cuts = {cut for cut in cuts if cut != branch + 1} | {branch, branch + 2}
    bounds = sorted(cuts)
    num_cuts = len(bounds)
    form = st.sampled_from(["keywords", "pair", "nested"])
    forms = draw(st.lists(form, min_size=num_cuts, max_size=num_cuts))
    mapping = draw(_mappings(num_cuts + 1))
    if is_parallel:
        forms[bounds.index(branch + 2)] = "keywords"
        place = bounds.index(branch) + 1
        on_two = draw(st.sampled_from([(0, 1), (1, 0), (2, 1)]))
        mapping[place] = (0, 0) if set(mapping) == {0} else on_two
    return Split(
        cuts=tuple(bounds),
        is_parallel=is_parallel,
        forms=tuple(forms),
        device_mapping=tuple(mapping),
        recompute=draw(st.sampled_from([None, None, None, *RECOMPUTATIONS])),
        offload=tuple(sorted(draw(st.one_of(st.just(()), st.sets(st.sampled_from(OFFLOADS)))))),
    )


@st.composite
def dispatch_plans(draw: Any, training: Training, split: Split) -> engine.Chunking | None:
    """One for a training and a split, whose runs so have the same programs."""
    if _is_on_one_ipu(split):
        return None
    count = training.num_micro_batches
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    given = st.builds(engine.Chunking, st.sampled_from(sizes))
    return draw(st.one_of(st.none(), given, given, given))


@st.composite
def runs(draw: Any, training: Training, split: Split, plan: engine.Chunking | None) -> Run:
    schedule = draw(st.sampled_from((*SCHEDULES, *_schedules_of(split))))
    divisors = [n for n in (1, 2, 3) if training.num_micro_batches % n == 0]
    is_serialized = _is_on_one_ipu(split) and schedule == "sequential"
    count_is_traced = draw(st.sampled_from([False, False, True]))
    if plan is not None and count_is_traced:
        plan = dataclasses.replace(plan, chunk_size=1)
    return Run(
        schedule=schedule,
        donate=draw(st.booleans()),
        count_is_traced=count_is_traced,
        num_serialized=draw(st.sampled_from(divisors)) if is_serialized else 1,
        collected=draw(st.sampled_from(["all", "all", "some", "losses", "sums"])),
        block_bytes=draw(st.sampled_from([2**26, 2**26, 1])),
        dispatch_plan=plan,
    )


def _is_on_one_ipu(split: Split) -> bool:
    return len(set(_flat_mapping(split))) == 1


def _schedules_of(split: Split) -> tuple[str, ...]:
    """The schedules that need several stages on each IPU, and can run these."""
    mapping = _flat_mapping(split)
    first = tuple(range(max(mapping) + 1))
    num_turns, left = divmod(len(mapping), len(first))
    if split.is_parallel or left or num_turns < 2:
        return ()
    if mapping == first + first[::-1]:
        return (*DOWN_AND_UP, *(AROUND if len(first) == 1 else ()))
    return AROUND if mapping == first * num_turns else ()


def _flat_mapping(split: Split) -> tuple[int, ...]:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in split.device_mapping)
    return tuple(ipu for entry in entries for ipu in entry)


def _mappings(num_stages: int) -> Any:
    own = list(range(num_stages))
    looped = [index % 2 for index in own]
    down_and_up = [min(index, num_stages - 1 - index) for index in own]
    return st.one_of(
        st.sampled_from([own, looped, down_and_up, [0] * num_stages]).map(list),
        st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages),
    )


@st.composite
def cases(draw: Any, part: int) -> list[Pipeline]:
    """Several pipelines of one model; those of one training are next to each other.

    Parts have no pipeline in common, as the seeds of their models differ.
    """

    def several(strategy: Any, number: int) -> Any:
        return draw(st.lists(strategy, min_size=number, max_size=number, unique=True))

    model = draw(models(part))
    model_splits = several(splits(model), NUM_SPLITS)
    return [
        Pipeline(model, training, split, run)
        for training in several(trainings(model), NUM_TRAININGS)
        for split in model_splits
        for run in several(runs(training, split, draw(dispatch_plans(training, split))), NUM_RUNS)
    ]


def unit_roundoff(dtype: str) -> float:
    """Half the distance of 1 to the next number."""
    return float(jnp.finfo(dtype).eps) / 2
