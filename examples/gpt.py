"""A small GPT in pipeline stages, in plain JAX, trained on the source of Python's own standard library.

It needs no data but the Python that runs it. docs/engine.md explains the engine.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec

import ipu_pipeline as ipu
from ipu_pipeline import engine

# The model: pure functions of a pytree of parameters.


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      layers: transformer blocks in each stage.
      width: of the activations.
      heads: of the attention.
      context: characters that it looks back at.
      vocabulary: how many characters there are.
      dropout: share of activations that are dropped in training.
      dtype: of the parameters: float32 or float64.
      compute_dtype: of the activations.
    """

    layers: tuple[int, ...]
    width: int
    heads: int
    context: int
    vocabulary: int
    dropout: float = 0.0
    dtype: str = "float32"
    compute_dtype: str = "float32"


def init(config: Config, key: jax.Array) -> list[Any]:
    """The parameters at the start: a pytree for each stage."""
    keys = iter(jax.random.split(key, 2 + 4 * len(config.layers)))
    width, residual = config.width, 0.02 / math.sqrt(2 * sum(config.layers))

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, config.dtype)

    def ones(*shape: int) -> jax.Array:
        return jnp.ones(shape, config.dtype)

    # The first stage embeds characters with the table with which the last one predicts them.
    table = engine.Shared("characters", normal(config.vocabulary, width))
    positions = normal(config.context, width)
    parameters: list[Any] = [
        {  # the blocks of a stage, stacked: the first axis is the block
            "blocks": {
                "attention": {
                    "norm": ones(count, width),
                    "in": normal(count, width, 3 * width),
                    "out": normal(count, width, width, scale=residual),
                },
                "mlp": {
                    "norm": ones(count, width),
                    "in": normal(count, width, 4 * width),
                    "out": normal(count, 4 * width, width, scale=residual),
                },
            }
        }
        for count in config.layers
    ]
    parameters[0] |= {"characters": table, "positions": positions}
    parameters[-1] |= {"norm": ones(width), "characters": table}
    return parameters


def normalize(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Layer normalization without an offset."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * scale


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attend(config: Config, x: jax.Array) -> jax.Array:
    """Mixes what each position may see, itself and those before it; x has queries, keys and values."""
    sequences, positions, _width = x.shape
    size = config.width // config.heads
    # Those of a head lie together, so that devices can divide the heads (`divide`).
    queries, keys, values = jnp.moveaxis(x.reshape(sequences, positions, config.heads, 3, size), 3, 0)
    scores = jnp.einsum("sqhd,skhd->shqk", queries, keys) / math.sqrt(size)
    may_see = jnp.tril(jnp.ones((positions, positions), bool))
    shares = jax.nn.softmax(jnp.where(may_see, scores.astype(config.dtype), -jnp.inf))
    mixed = jnp.einsum("shqk,skhd->sqhd", shares.astype(x.dtype), values)
    return mixed.reshape(sequences, positions, config.width)


def apply_block(config: Config, x: jax.Array, parameters: Any, key: jax.Array | None) -> jax.Array:
    """A transformer block; x has the axes [sequence, position, width]."""
    key1, key2 = (None, None) if key is None else jax.random.split(key)
    attention, mlp = parameters["attention"], parameters["mlp"]
    mixed = attend(config, normalize(attention["norm"], x) @ attention["in"])
    x = x + drop(mixed @ attention["out"], config.dropout, key1)
    hidden = jax.nn.gelu(normalize(mlp["norm"], x) @ mlp["in"])
    return x + drop(hidden @ mlp["out"], config.dropout, key2)


def apply_blocks(config: Config, is_training: bool, parameters: Any, x: jax.Array) -> jax.Array:
    """All blocks of a stage, one after another."""
    blocks = jax.tree.map(lambda leaf: leaf.astype(config.compute_dtype), parameters["blocks"])
    count = jax.tree.leaves(blocks)[0].shape[0]
    keys = None
    if is_training and config.dropout > 0:
        keys = jax.random.split(engine.next_rng_key(), count)  # another key for each micro-batch

    def body(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return apply_block(config, x, *block), None

    return jax.lax.scan(body, x, (blocks, keys))[0]


# The stages. What a later stage needs, the targets, travels through those before it.


def first_stage(config: Config, is_training: bool, parameters: Any, tokens: Any, rest: Any) -> Any:
    x = parameters["characters"][tokens] + parameters["positions"]
    return apply_blocks(config, is_training, parameters, x.astype(config.compute_dtype)), rest


def middle_stage(config: Config, is_training: bool, parameters: Any, x: Any, rest: Any) -> Any:
    return apply_blocks(config, is_training, parameters, x), rest


def predict(config: Config, is_training: bool, parameters: Any, x: Any) -> jax.Array:
    """What the last stage says of the next character: the logits."""
    x = apply_blocks(config, is_training, parameters, x).astype(config.dtype)
    return normalize(parameters["norm"], x) @ parameters["characters"].T


def last_stage(config: Config, is_training: bool, parameters: Any, x: Any, targets: Any) -> Any:
    logits = predict(config, is_training, parameters, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def next_character_stage(config: Config, parameters: Any, x: Any, position: Any) -> Any:
    return predict(config, False, parameters, x)[:, position]


def divide(variable: Any) -> PartitionSpec | None:
    """How devices that compute a stage together divide its blocks: each has some heads and hidden units.

    So they exchange values twice in a block, where "out" adds up what all of them have (Shoeybi et al.,
    "Megatron-LM", 2019, section 3). The first axis is the block.
    """
    axes = {"in": (None, None, "model"), "out": (None, "model", None)}.get(variable.name.split("/")[-1])
    return None if axes is None else PartitionSpec(*axes)


def make_stages(config: Config, is_training: bool) -> list[Any]:
    """A function for each stage: tokens and targets go in, the loss comes out."""
    count = len(config.layers) - 2
    functions = [first_stage, *[middle_stage] * count, last_stage]
    return [functools.partial(function, config, is_training) for function in functions]


# The data.


def read_text() -> str:
    """The modules of the standard library that have no other characters than ASCII, one after another."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_bytes() for path in paths]
    return b"".join(text for text in texts if text.isascii()).decode()


class Text:
    """A text as numbers, its last tenth kept for evaluation."""

    def __init__(self, text: str, context: int) -> None:
        self.characters = sorted(set(text))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.context = context
        ids = self.encode(text)
        split = len(ids) * 9 // 10
        self.training, self.validation = ids[:split], ids[split:]
        if len(self.validation) <= context:
            raise ValueError(f"The text has {len(text):,} characters, too few for a context of {context}.")

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        """The numbers of its characters, all of which must be known."""
        codes = np.array([ord(character) for character in self.characters])
        return np.searchsorted(codes, np.frombuffer(text.encode(), np.uint8)).astype(np.int32)

    def draw(self, seed: int, step: int, num_micro_batches: int, size: int) -> Iterator[Any]:
        """The micro-batches of a step. They depend on nothing else, so a resumed run draws the same."""
        random = np.random.default_rng([seed, step])
        for _number in range(num_micro_batches):
            yield self._cut(self.training, random.integers(0, len(self.training) - self.context, size))

    def for_evaluation(self, num_micro_batches: int, size: int) -> Iterator[Any]:
        """Passages of the rest at equal distances, always the same."""
        last = len(self.validation) - self.context - 1
        starts = np.linspace(0, last, num_micro_batches * size).astype(int)
        for part in np.split(starts, num_micro_batches):
            yield self._cut(self.validation, part)

    def _cut(self, ids: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> Any:
        passages = np.stack([ids[start : start + self.context + 1] for start in starts])
        return passages[:, :-1], passages[:, 1:]


# Training.


def decays(parameters: Any) -> Any:
    """Which parameters decay: all but the scales of normalizations."""

    def decays(path: Any, leaf: Any) -> bool:
        del leaf
        return not jax.tree_util.keystr(path, simple=True, separator="/").endswith("norm")

    return jax.tree_util.tree_map_with_path(decays, parameters)


def make_optimizer(rate: float, steps: int, dtype: str = "float32") -> optax.GradientTransformation:
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(steps, warmup + 1), rate / 10)

    def rate_after(count: Any) -> Any:
        # Of an integer Optax would make float32, whatever the model has.
        return schedule(count.astype(dtype))

    return optax.chain(
        optax.clip_by_global_norm(1.0),  # over all stages
        optax.adamw(rate_after, b2=0.95, weight_decay=0.1, mask=decays),
    )


def make_trainer(config: Config, seed: int, **options: Any) -> engine.Pipeline:
    return engine.Pipeline(
        make_stages(config, is_training=True),
        parameters=init(config, jax.random.key(seed)),
        collect_outputs=False,
        **options,
    )


def make_evaluator(config: Config, num_micro_batches: int, **options: Any) -> engine.Pipeline:
    """Forwards only, on the trainer's state: so it needs the shapes of the parameters, and no values."""
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return engine.Pipeline(
        make_stages(config, is_training=False),
        parameters=shapes,
        num_micro_batches=num_micro_batches,
        **options,
    )


def make_predictor(config: Config, **options: Any) -> engine.Pipeline:
    """Forwards only, for one passage: out come the logits of what follows a position."""
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    stages = [*make_stages(config, is_training=False)[:-1], functools.partial(next_character_stage, config)]
    return engine.Pipeline(stages, parameters=shapes, num_micro_batches=1, **options)


def generate(
    predictor: engine.Pipeline, state: engine.PipelineState, text: Text, prompt: str, count: int, seed: int
) -> str:
    """Writes on from a prompt, character by character."""
    random = np.random.default_rng(seed)
    ids = list(text.encode(prompt))
    for _number in range(count):
        seen = ids[-text.context :]
        # Always as many, so that it compiles once; attention looks back only, so what follows is not seen.
        tokens = np.zeros((1, text.context), np.int32)
        tokens[0, : len(seen)] = seen
        _state, outputs = predictor.step(state, [(tokens, np.int32(len(seen) - 1))])
        # Divided by less than 1: likely characters come more often.
        logits = np.asarray(outputs.outputs[0][0], np.float64) / 0.8
        shares = np.exp(logits - logits.max())
        ids.append(random.choice(len(shares), p=shares / shares.sum()))
    return "".join(text.characters[number] for number in ids)


# The program.


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0; got {number}")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1; got {text}")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0; got {text}")
    return number


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--layers", nargs="+", type=positive, default=[1, 1, 1, 1], help="blocks in each stage, two or more"
    )
    model.add_argument("--width", type=positive, default=96, help="of the activations")
    model.add_argument("--heads", type=positive, default=4, help="of the attention; they divide the width")
    model.add_argument("--context", type=positive, default=64, help="characters that it looks back at")
    model.add_argument("--dropout", type=share, default=0.0, help="share of activations that are dropped")
    model.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16"],
        default="float32",
        help="bfloat16 is that of the activations only",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=400, help="weight updates in all")
    training.add_argument("--batch", type=positive, default=8, help="passages in a micro-batch")
    training.add_argument(
        "--micro-batches", type=positive, default=4, help="micro-batches of a weight update"
    )
    training.add_argument("--rate", type=positive_float, default=3e-3, help="the highest learning rate")
    training.add_argument(
        "--schedule",
        choices=["grouped", "interleaved", "sequential"],
        default="grouped",
        help="the pipeline's",
    )
    training.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="devices that share each stage"
    )
    training.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help="copies of it, each with micro-batches"
    )
    training.add_argument("--seed", type=natural, default=0, help="of parameters, data, dropout and sample")
    running = parser.add_argument_group("what is done with it")
    running.add_argument(
        "--evaluate-every", type=positive, default=50, metavar="STEPS", help="on held-out text"
    )
    running.add_argument(
        "--sample", type=natural, default=300, metavar="N", help="characters to write at the end"
    )
    running.add_argument("--prompt", default="def ", help="what the sample begins with")
    running.add_argument("--log", type=Path, metavar="FILE", help="losses as JSON lines")
    running.add_argument("--checkpoint", type=Path, metavar="DIR", help="saves there at each evaluation")
    running.add_argument("--resume", action="store_true", help="goes on from the newest checkpoint in DIR")
    running.add_argument("--stop-at", type=positive, metavar="STEP", help="ends before all steps are done")
    args = parser.parse_args(arguments)
    if len(args.layers) < 2:
        parser.error(
            f"argument --layers: needs a number for each of at least two stages; got {args.layers}"
        )
    if args.width % args.heads:
        parser.error(f"argument --heads: must divide --width {args.width}; got {args.heads}")
    if args.heads % args.tensor_parallel:
        parser.error(
            f"argument --tensor-parallel: must divide --heads {args.heads}; got {args.tensor_parallel}"
        )
    if not args.prompt or not args.prompt.isascii():
        parser.error(f"argument --prompt: must be at least one ASCII character; got {args.prompt!r}")
    if args.resume and args.checkpoint is None:
        parser.error("argument --resume: needs --checkpoint DIR")
    return args


# What a resumed run must have in common with the one before, to be equal to one that was not interrupted.
EXACT_OPTIONS = [
    "layers",
    "width",
    "heads",
    "context",
    "dropout",
    "dtype",
    "steps",
    "batch",
    "micro_batches",
]
EXACT_OPTIONS += ["rate", "seed", "replicas"]
LAYOUT = "queries, keys and values of a head together"  # of parameters; other checkpoints are refused


class Checkpoints:
    """The newest two states in a directory, each with the options that it was trained with."""

    def __init__(self, directory: Path, trained_with: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )
        self._trained_with = trained_with
        self.newest = self._manager.latest_step()

    def save(self, state: engine.PipelineState) -> None:
        """Writes a state, which is a pytree; until it is complete, it counts as not there."""
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), trained_with=ocp.args.JsonSave(self._trained_with)
        )
        self._manager.save(state.update_count, args=arguments)

    def restore(self, like: engine.PipelineState) -> engine.PipelineState:
        """The newest state, its arrays where those of the given one are."""
        before = self._manager.restore(
            self.newest, args=ocp.args.Composite(trained_with=ocp.args.JsonRestore())
        ).trained_with
        for name, value in self._trained_with.items():
            if before.get(name) != value:
                hint = (
                    " The learning rate depends on all steps: begin with as many --steps as there are to "
                    "be in the end, and interrupt with --stop-at."
                )
                raise ValueError(
                    f"The checkpoint of step {self.newest} was trained with {name} {before.get(name)}; "
                    f"now it is {value}. Resuming is exact with the same options only."
                    f"{hint if name == 'steps' else ''}"
                )
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        state: engine.PipelineState = self._manager.restore(self.newest, args=arguments).state
        return state


def open_checkpoints(args: argparse.Namespace, text: Text) -> Checkpoints | None:
    if args.checkpoint is None:
        return None
    trained_with = {name: getattr(args, name) for name in EXACT_OPTIONS}
    trained_with |= {"text": text.digest, "layout": LAYOUT}
    checkpoints = Checkpoints(args.checkpoint, trained_with)
    if checkpoints.newest is None and args.resume:
        raise ValueError(f"--resume: there is no checkpoint in {args.checkpoint}.")
    if checkpoints.newest is not None and not args.resume:
        raise ValueError(
            f"{args.checkpoint} has a checkpoint of step {checkpoints.newest}. Go on with --resume, or "
            "give another directory."
        )
    return checkpoints


def start_log(path: Path, done: int) -> None:
    """Empties a file of JSON lines, but for those of steps that are not done over again."""
    lines = path.read_text().splitlines(keepends=True) if done and path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
    path.write_text("".join(kept))


def evaluate(evaluator: engine.Pipeline, state: engine.PipelineState, held_out: list[Any]) -> float:
    """The mean loss; the state stays as it is."""
    _state, outputs = evaluator.step(state, held_out)
    return mean(outputs.outputs)


def mean(values: list[jax.Array]) -> float:
    """Waits for some scalars. NumPy alone would turn a Ctrl-C that comes meanwhile into a ValueError."""
    return float(np.mean(jax.device_get(values)))


def train(args: argparse.Namespace) -> engine.PipelineState:
    """The program."""
    text = Text(read_text(), args.context)
    unknown = set(args.prompt) - set(text.characters)
    if unknown:
        raise ValueError(f"--prompt: the text has no {''.join(sorted(unknown))!r}.")
    config = Config(
        layers=tuple(args.layers),
        width=args.width,
        heads=args.heads,
        context=args.context,
        vocabulary=len(text.characters),
        dropout=args.dropout,
        dtype="float64" if args.dtype == "float64" else "float32",
        compute_dtype=args.dtype,
    )
    parallel = engine.TensorParallel(args.tensor_parallel, divide)
    trainer = make_trainer(
        config,
        args.seed,
        num_micro_batches=args.micro_batches,
        optimizer=make_optimizer(args.rate, args.steps, config.dtype),
        schedule=args.schedule,
        num_replicas=args.replicas,
        tensor_parallel=parallel,
    )
    evaluator = make_evaluator(config, 8, tensor_parallel=parallel)
    predictor = make_predictor(config, tensor_parallel=parallel)
    held_out = list(text.for_evaluation(8, args.batch))
    checkpoints = open_checkpoints(args, text)
    state = trainer.init(jax.random.key(args.seed), held_out[0])
    num_parameters = sum(value.size for value in state.variables.values())
    print(
        f"{num_parameters:,} parameters in {len(config.layers)} stages; {len(text.training):,} characters "
        f"to train on, {len(text.validation):,} held out"
    )
    if checkpoints is not None and checkpoints.newest is not None:
        state = checkpoints.restore(state)
        print(f"Resumed after step {state.update_count}")
    if args.log is not None:
        start_log(args.log, state.update_count)
    begin, losses, validation = time.perf_counter(), [], math.nan
    end = min(args.steps, args.stop_at or args.steps)
    step = state.update_count + 1
    try:
        while state.update_count < end:
            step = state.update_count + 1
            batches = text.draw(args.seed, step, args.micro_batches * args.replicas, args.batch)
            state, outputs = trainer.step(state, batches)
            losses.append(mean(outputs.losses))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"The loss of step {step} is {losses[-1]}; try a lower --rate.")
            if step % args.evaluate_every and step != end:
                continue
            validation = evaluate(evaluator, state, held_out)
            entry = {"step": step, "loss": float(np.mean(losses)), "validation_loss": validation}
            seconds = time.perf_counter() - begin
            print(
                f"Step {step}: loss {entry['loss']:.4f}, held out {validation:.4f}, {seconds:.1f} s",
                flush=True,
            )
            losses = []
            if args.log is not None:
                with args.log.open("a") as log:
                    print(json.dumps(entry), file=log)
            if checkpoints is not None:
                checkpoints.save(state)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted in step {step}.") from None
    if math.isnan(validation):  # nothing was left to do
        validation = evaluate(evaluator, state, held_out)
    if args.sample:
        print(generate(predictor, state, text, args.prompt, args.sample, args.seed))
    print(f"Done: {state.update_count} steps, held-out loss {validation:.4f}")
    return state


def main(arguments: list[str] | None = None) -> engine.PipelineState:
    args = parse_arguments(arguments)
    # As many CPU devices, where there are no accelerators.
    ipu.set_num_devices(len(args.layers) * args.tensor_parallel * args.replicas)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    if jax.process_count() > 1:
        raise ValueError("this example runs in one process. docs/distributed.md is about several.")
    return train(args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt as error:
        print(str(error) or "Interrupted.", file=sys.stderr)
        sys.exit(130)
