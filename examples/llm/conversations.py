"""Conversations from a file, as tokens: the vocabulary, and micro-batches to train on."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ipu_pipeline import datasets

__all__ = ["Exchange", "encode", "make_tokenizer", "micro_batches", "read_conversations"]

PADDING, QUESTION, ANSWER, END = range(4)
SPECIAL = ["<padding>", "<question>", "<answer>", "<end>"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question and its answer.

    Attributes:
      questions: wordings of the question that are trained on.
      held_out: one that is not.
      answer: the same for all wordings.
    """

    questions: tuple[str, ...]
    held_out: str
    answer: str


def read_conversations(path: Path) -> list[list[Exchange]]:
    """Reads a file in the format that conversations.txt explains.

    Raises:
      ValueError: a line of the file is not in that format.
    """
    conversations: list[list[Exchange]] = [[]]
    questions: list[str] = []
    held_out: list[str] = []
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        text = line[1:].strip()
        if line.startswith("#"):
            continue
        if line.startswith("~"):
            held_out.append(text)
        elif line.startswith(">"):
            if not questions or len(held_out) != 1:
                raise ValueError(
                    f"{path}, line {number}: an answer needs at least one question before it, and one "
                    'wording that begins with "~".'
                )
            conversations[-1].append(Exchange(tuple(questions), held_out[0], text))
            questions, held_out = [], []
        elif line.strip():
            questions.append(line.strip())
        elif questions or held_out:
            raise ValueError(f"{path}, line {number}: the question before it has no answer.")
        elif conversations[-1]:
            conversations.append([])
    if not conversations[0]:
        raise ValueError(f"{path}: there is no conversation.")
    return conversations[:-1]


def make_tokenizer(conversations: Sequence[Sequence[Exchange]], words: int) -> Tokenizer:
    """Trains a tokenizer of byte pairs (Sennrich et al., 2016) on what is trained on.

    Any text can be encoded, since every byte is a token.

    Args:
      conversations: what it is trained on.
      words: the most tokens of the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # a word and the space before it stay together
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    exchanges = [exchange for conversation in conversations for exchange in conversation]
    texts = [text for exchange in exchanges for text in (*exchange.questions, exchange.answer)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True  # what looks like one in a user's text is text
    return tokenizer


def encode(tokenizer: Tokenizer, question: str, answer: str | None) -> list[int]:
    """Returns the tokens of an exchange; without an answer, of a prompt for one."""
    tokens = [QUESTION, *tokenizer.encode(question).ids, ANSWER]
    return tokens if answer is None else [*tokens, *tokenizer.encode(answer).ids, END]


def endless_examples(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Exchange]], context: int, seed: int
) -> Iterator[Any]:
    """Yields tokens int32 [length] and weights float32 [length], the same for each seed.

    An example is one conversation or several, with one of the wordings of each question. Answers have the
    weight 1, and questions 0.

    Raises:
      ValueError: a conversation is longer than the context.
    """
    draw = random.Random(seed)  # noqa: S311  # not for cryptography
    while True:
        tokens: list[int] = []
        weights: list[int] = []
        for conversation in draw.sample(conversations, len(conversations)):
            own: list[int] = []
            own_weights: list[int] = []
            for exchange in conversation:
                asked = encode(tokenizer, draw.choice(exchange.questions), None)
                answered = [*tokenizer.encode(exchange.answer).ids, END]
                own += asked + answered
                own_weights += [0] * len(asked) + [1] * len(answered)
            if len(own) > context:
                raise ValueError(
                    f"The conversation with {conversation[0].answer!r} has {len(own)} tokens, and the "
                    f"context {context}. Give a larger context, or more words."
                )
            if tokens and (len(tokens) + len(own) > context or draw.random() < 0.6):
                yield np.array(tokens, np.int32), np.array(weights, np.float32)
                tokens, weights = [], []
            tokens, weights = tokens + own, weights + own_weights
        yield np.array(tokens, np.int32), np.array(weights, np.float32)


def micro_batches(
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[Exchange]],
    lengths: Sequence[int],
    batch_size: int,
    in_a_row: int,
    seed: int,
) -> Iterator[Any]:
    """Yields tokens int32 and weights float32, both [batch_size, one of lengths], without end.

    Args:
      tokenizer: made for the conversations.
      conversations: what is trained on.
      lengths: of the buckets; the last one is the context.
      batch_size: examples of a micro-batch.
      in_a_row: micro-batches of one length that follow each other.
      seed: of the order of conversations and of the choice of wordings.
    """

    def examples() -> Iterator[Any]:
        return endless_examples(tokenizer, conversations, lengths[-1], seed)

    for tokens, weights, _mask in datasets.Buckets(examples, lengths, batch_size, in_a_row=in_a_row):
        yield tokens, weights  # padding has the weight 0
