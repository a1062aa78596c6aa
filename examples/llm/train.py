"""Trains a GPT of ten million parameters in a pipeline on conversations.txt.

Ctrl-C, or --stop-at, saves and ends. The same command then goes on, also with another number of stages.
README.md shows a run.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import optax
import tqdm
from conversations import make_tokenizer, micro_batches, read_conversations
from model import Config, init, training_stages
from tokenizers import Tokenizer

import ipu_pipeline as ipu
from ipu_pipeline import engine

HERE = Path(__file__).parent
SETTINGS, TOKENIZER, CHECKPOINT = (
    "settings.json",
    "tokenizer.json",
    "checkpoint",
)  # in the directory of a run


def at_least(lowest: int) -> Any:
    """Returns a type for an option that is an integer from `lowest`."""

    def integer(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}; got {text}")
        return int(text)

    return integer


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0; got {text}")
    return number


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("llm_run"), help="for the checkpoint and the tokenizer"
    )
    parser.add_argument("--stages", type=at_least(2), default=4, help="of the pipeline")
    parser.add_argument("--steps", type=at_least(1), default=120, help="weight updates in all")
    parser.add_argument("--stop-at", type=at_least(1), metavar="STEP", help="save and end earlier")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="record a step as a page (extra reports)"
    )
    parser.add_argument("--rate", type=positive_float, default=1.5e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--micro-batches", type=at_least(1), default=4, help="of a weight update")
    parser.add_argument("--batch", type=at_least(1), default=4, help="conversations in a micro-batch")
    parser.add_argument(
        "--lengths", type=at_least(2), nargs="+", default=[40, 80, 128], help="of the buckets, in tokens"
    )
    parser.add_argument("--words", type=at_least(300), default=1024, help="tokens of the vocabulary")
    parser.add_argument("--layers", type=at_least(2), default=4, help="transformer blocks in all")
    parser.add_argument("--width", type=at_least(2), default=448, help="of the activations")
    parser.add_argument("--heads", type=at_least(1), default=7, help="of the attention")
    parser.add_argument("--conversations", type=Path, default=HERE / "conversations.txt")
    return parser.parse_args(arguments)


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipping by the norm over all stages, warm-up in a tenth of the steps, and a cosine."""
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(steps, warmup + 1), rate / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))


def prepare(directory: Path, settings: dict[str, Any], conversations: Any) -> tuple[Tokenizer, Config]:
    """Makes the directory with the tokenizer and the settings, or reads them if they are there.

    Raises:
      ValueError: it is of a run with other settings.
    """
    path = directory / SETTINGS
    if path.exists():
        saved = json.loads(path.read_text())
        others = []
        for name, value in settings.items():
            if saved.get(name) != value:
                old = saved.get(name)
                text = " ".join(map(str, old)) if isinstance(old, list) else str(old)
                others.append(f"--{name.replace('_', '-')} {text}")
        if others:
            raise ValueError(
                f"{directory} is of a run with {', '.join(others)}. Give the same, or another --directory."
            )
    else:
        directory.mkdir(parents=True, exist_ok=True)
        make_tokenizer(conversations, settings["words"]).save(str(directory / TOKENIZER))
        path.write_text(json.dumps(settings))
    return read_settings(directory)


def read_settings(directory: Path) -> tuple[Tokenizer, Config]:
    """Reads the tokenizer and the model's sizes of a run.

    Raises:
      OSError: there is no run in the directory.
    """
    settings = json.loads((directory / SETTINGS).read_text())
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    sizes = {name: settings[name] for name in ("layers", "width", "heads")}
    return tokenizer, Config(tokenizer.get_vocab_size(), settings["lengths"][-1], **sizes)


def train(args: argparse.Namespace) -> engine.PipelineState:
    """Trains, from the checkpoint if there is one, and saves."""
    begin = time.perf_counter()
    conversations = read_conversations(args.conversations)
    names = (
        "steps",
        "rate",
        "seed",
        "micro_batches",
        "batch",
        "lengths",
        "words",
        "layers",
        "width",
        "heads",
    )
    tokenizer, config = prepare(
        args.directory, {name: getattr(args, name) for name in names}, conversations
    )
    key = jax.random.key(args.seed)
    pipeline = engine.Pipeline(
        training_stages(config, args.stages),
        parameters=init(config, args.stages, key),
        num_micro_batches=args.micro_batches,
        loss=lambda total, _number: total,
        loss_weight=lambda _total, number: number,  # so gradients are of the mean over a step's answers
        optimizer=make_optimizer(args.rate, args.steps),
    )
    # What a step trains on depends on its number alone, so that a run in two parts equals one in one.
    batches = micro_batches(
        tokenizer, conversations, args.lengths, args.batch, args.micro_batches, args.seed
    )
    checkpoint = args.directory / CHECKPOINT
    first = next(batches)
    pipeline.trace(first)
    try:
        state = engine.restore(checkpoint, pipeline)
        print(f"Goes on after step {state.update_count}.")
    except ipu.errors.NoCheckpointError:
        state = pipeline.init(key, first)
    batches = itertools.chain([first], batches)
    batches = itertools.islice(batches, args.micro_batches * state.update_count, None)
    num_parameters = sum(value.size for value in state.variables.values())
    print(
        f"{num_parameters:,} parameters, {args.stages} stages, {config.words} tokens in the vocabulary",
        flush=True,
    )

    end = min(args.steps, args.stop_at or args.steps)
    recorded = min(state.update_count + 10, end) if args.report else None
    results: list[Any] = []  # the sums of the losses and of their weights since the last line
    with tqdm.tqdm(total=args.steps, initial=state.update_count, unit="step", disable=None) as bar:
        try:
            while state.update_count < end:
                step = state.update_count + 1
                watch = ipu.reports.capture(args.report) if step == recorded else contextlib.nullcontext()
                with watch:
                    state, outputs = pipeline.step(state, batches)
                    results += jax.device_get(outputs.outputs)  # waits for the step
                bar.update()
                if step % 10 == 0 or step == end:
                    losses, numbers = zip(*results, strict=True)
                    seconds = time.perf_counter() - begin
                    with bar.external_write_mode():
                        print(
                            f"Step {step}: loss {sum(losses) / sum(numbers):.3f} per token of the answers, "
                            f"{seconds:.0f} s",
                            flush=True,
                        )
                    results = []
        except KeyboardInterrupt:
            engine.save(checkpoint, state)
            print(f"Stopped after step {state.update_count}, and saved in {checkpoint}.", file=sys.stderr)
            raise
    engine.save(checkpoint, state)
    print(f"Saved step {state.update_count} in {checkpoint}.")
    return state


def main(arguments: list[str] | None = None) -> engine.PipelineState:
    args = parse_arguments(arguments)
    ipu.set_num_devices(args.stages)  # as many devices of the CPU, where there are no accelerators
    return train(args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
