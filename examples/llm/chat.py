"""Answers questions with the model that train.py saved: those of the command line, or of a conversation.

    python examples/llm/chat.py "What is a stage?" "What is the bubble?"
    python examples/llm/chat.py              # a conversation; an empty line begins another one
    python examples/llm/chat.py --evaluate   # how many questions of the file get their answer

Questions of the command line are answered at the same time: while one stage computes tokens of some
answers, the other stages compute tokens of others.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from conversations import END, Exchange, encode, read_conversations
from model import generating_stages, init, training_stages
from train import CHECKPOINT, HERE, at_least, read_settings

import ipu_pipeline as ipu
from ipu_pipeline import engine


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", help="none: a conversation")
    parser.add_argument(
        "--directory", type=Path, default=Path("llm_run"), help="that of train.py (default: llm_run)"
    )
    parser.add_argument(
        "--stages", type=at_least(2), default=2, help="also others than in training (default: 2)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 for the likeliest tokens (default: 0)"
    )
    parser.add_argument("--top-k", type=at_least(1), help="draw from the K likeliest tokens only")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--evaluate", action="store_true", help="count the questions that get their answer")
    parser.add_argument("--conversations", type=Path, default=HERE / "conversations.txt")
    return parser.parse_args(arguments)


class Chat:
    """A trained model and its tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Reads the newest checkpoint of a run of train.py.

        Raises:
          OSError: there is none.
        """
        self.tokenizer, self.config = read_settings(args.directory)
        self._sampling = engine.Sampling(temperature=args.temperature, top_k=args.top_k)
        self._seed = args.seed
        shapes = jax.eval_shape(functools.partial(init, self.config, args.stages), jax.random.key(0))
        # A pipeline that runs forwards, to restore for: the stages of training have the same variables.
        forwards = engine.Pipeline(
            training_stages(self.config, args.stages), parameters=shapes, num_micro_batches=1
        )
        tokens = jax.ShapeDtypeStruct((1, self.config.context), np.int32)
        forwards.trace((tokens, jax.ShapeDtypeStruct(tokens.shape, np.float32)))
        self.state = engine.restore(args.directory / CHECKPOINT, forwards)
        self.generator = engine.Generator(
            generating_stages(self.config, args.stages),
            parameters=shapes,
            max_length=self.config.context,
            num_slots=16 * args.stages,
            chunk_lengths=[1, 8],  # of prompts: there is a program of each stage for each of them
        )

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Answers prompts, all at the same time."""
        room = [self.config.context - len(prompt) for prompt in prompts]
        answers = self.generator.generate(
            self.state,
            prompts,
            max_new_tokens=room,
            stop_tokens=[END],
            sampling=self._sampling,
            seed=self._seed,
        )
        return [self.decode(tokens) for tokens in answers]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def converse(self) -> None:
        """Reads questions from the standard input until its end, and writes answers token by token."""
        history: list[int] = []
        is_terminal = sys.stdin.isatty()
        with self.generator.serving(self.state):
            while True:
                print("> ", end="", flush=True)
                line = sys.stdin.readline()
                if not is_terminal:
                    print(line.strip() if line else "")
                if not line:
                    return
                question = line.strip()
                if not question:
                    history = []
                    continue
                asked = encode(self.tokenizer, question, None)
                if len(history) + len(asked) > self.config.context * 3 // 4:
                    history = []  # there would be no room for an answer
                if len(asked) >= self.config.context:
                    print(f"Please use fewer than {self.config.context} tokens; these are {len(asked)}.")
                    continue
                prompt = history + asked
                request = self.generator.submit(
                    prompt,
                    max_new_tokens=self.config.context - len(prompt),
                    stop_tokens=[END],
                    sampling=self._sampling,
                    seed=self._seed,
                )
                tokens: list[int] = []
                for token in request:
                    before = self.decode(tokens)
                    tokens.append(token)
                    print(self.decode(tokens)[len(before) :], end="", flush=True)
                print()
                history = prompt + tokens


def evaluate(chat: Chat, conversations: Sequence[Sequence[Exchange]]) -> None:
    """Prints how many questions get exactly their answer, as in training and in the held-out wording."""
    trained, held_out, right = [], [], []
    for conversation in conversations:
        history: list[int] = []
        for exchange in conversation:
            trained.append(history + encode(chat.tokenizer, exchange.questions[0], None))
            held_out.append(history + encode(chat.tokenizer, exchange.held_out, None))
            right.append(exchange.answer)
            history = history + encode(chat.tokenizer, exchange.questions[0], exchange.answer)
    begin = time.perf_counter()
    answers = chat.answer(trained + held_out)
    seconds = time.perf_counter() - begin
    count = len(right)
    for name, own in (("as in training", answers[:count]), ("in other words", answers[count:])):
        num_right = sum(answer == wanted for answer, wanted in zip(own, right, strict=True))
        print(f"Asked {name}, {num_right} of {count} questions get their answer.")
    num_tokens = sum(len(chat.tokenizer.encode(answer).ids) + 1 for answer in answers)
    print(f"{num_tokens:,} tokens in {seconds:.1f} s")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    ipu.set_num_devices(args.stages)
    chat = Chat(args)
    if args.questions:
        prompts = [encode(chat.tokenizer, question, None) for question in args.questions]
        for question, answer in zip(args.questions, chat.answer(prompts), strict=True):
            print(f"> {question}\n{answer}", flush=True)
    if args.evaluate:
        evaluate(chat, read_conversations(args.conversations))
    elif not args.questions:
        chat.converse()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
