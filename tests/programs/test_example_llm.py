"""examples/llm: it learns answers, goes on in other stages, is interrupted, and answers."""

import importlib
import io
import itertools
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline import engine
from tests.support import models
from tests.support.programs import ROOT

FOLDER = ROOT / "examples" / "llm"
TEXT = """# Two conversations.
How many?
Say how many.
~ Tell me how many.
> Four.
And now?
~ And today?
> Five of them.

Is it so?
~ So is it?
> Yes, as I said.
"""
SMALL = ["--words", "300", "--layers", "3", "--width", "32", "--heads", "2", "--lengths", "64"]
SMALL += ["--micro-batches", "2", "--batch", "2", "--rate", "1e-2", "--steps", "50"]


@pytest.fixture(scope="module")
def llm():
    """The example's modules, which are not left among those of the process."""
    pytest.importorskip("flax", reason="Flax is not installed (extra flax)")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    jax.devices()  # all of the tests, before the example asks for a few
    names = ("conversations", "model", "train", "chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The options of a small run: its conversations."""
    path = tmp_path_factory.mktemp("llm") / "conversations.txt"
    path.write_text(TEXT)
    return ["--conversations", str(path)]


def train_until(llm, options, last):
    """Trains, and is interrupted in the step after the last one."""
    step = engine.Pipeline.step

    def interrupted(pipeline, state, micro_batches):
        if state.update_count == last:
            raise KeyboardInterrupt
        return step(pipeline, state, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Pipeline, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.train.main(options)


@pytest.fixture(scope="module")
def trained(llm, given, tmp_path_factory):
    """A directory with a model whose training was interrupted in two stages and ended in three."""
    directory = tmp_path_factory.mktemp("llm") / "run"
    options = [*SMALL, *given, "--directory", str(directory)]
    train_until(llm, [*options, "--stages", "2"], 4)
    state = llm.train.main([*options, "--stages", "3"])
    return directory, state


def test_what_it_trains_on(llm):
    conversations = llm.conversations.read_conversations(FOLDER / "conversations.txt")
    exchanges = [exchange for conversation in conversations for exchange in conversation]
    assert len(exchanges) > 100
    for conversation in conversations:
        for exchange in conversation:
            assert exchange.held_out not in exchange.questions
    tokenizer = llm.conversations.make_tokenizer(conversations, 1024)
    for text in ("What is a stage?", "<end> Ünknown"):
        tokens = llm.conversations.encode(tokenizer, text, None)
        assert tokenizer.decode(tokens[1:-1], skip_special_tokens=False).strip() == text
        assert llm.conversations.END not in tokens

    def draw(number):
        batches = llm.conversations.micro_batches(tokenizer, conversations, [40, 80, 128], 4, 2, seed=3)
        return list(itertools.islice(batches, number))

    drawn = draw(100)
    assert {tokens.shape for tokens, _weights in drawn} == {(4, 40), (4, 80), (4, 128)}
    models.assert_trees_close(drawn[:10], draw(10))
    answers = {exchange.answer for exchange in exchanges}
    tokens, weights = drawn[0]
    for row, weight in zip(tokens, weights, strict=True):
        parts = np.split(row, np.flatnonzero(np.diff(weight)) + 1)
        spoken = [part for part in parts if part[-1] == llm.conversations.END]
        assert spoken
        assert {tokenizer.decode(part).strip() for part in spoken} <= answers
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the context 30\. Give a larger context"):
        next(llm.conversations.micro_batches(tokenizer, conversations, [30], 4, 2, seed=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("> Yes.\n", "line 1: an answer needs at least one question"),
        ("Is it?\n> Yes.\n", "line 2: an answer needs .* one wording"),
        ("Is it?\n~ So?\n\n> Yes.\n", "line 3: the question before it has no answer"),
        ("# nothing\n", "there is no conversation"),
    ],
)
def test_files_that_are_no_conversations(llm, text, message, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        llm.conversations.read_conversations(path)


@pytest.mark.thorough
def test_answers(llm, trained, monkeypatch, capsys):
    directory, state = trained
    assert state.update_count == 50
    chat = llm.chat.Chat(llm.chat.parse_arguments(["--directory", str(directory)]))
    questions = ["How many?", "Is it so?", "Say how many."]
    prompts = [llm.conversations.encode(chat.tokenizer, question, None) for question in questions]
    assert chat.answer(prompts) == ["Four.", "Yes, as I said.", "Four."]
    lines = ["Say how many.", "And now?", "", "x " * 200, "Is it so?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    capsys.readouterr()
    chat.converse()
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(">")]
    too_long = "Please use fewer than 64 tokens; these are 402."
    assert printed == ["Four.", "Five of them.", too_long, "Yes, as I said."]


@pytest.mark.thorough
def test_stopped_and_split_differently_it_equals_a_run_in_one_piece(llm, given, trained, tmp_path, capsys):
    directory, state = trained
    capsys.readouterr()
    whole = llm.train.main([*SMALL, *given, "--directory", str(tmp_path / "run"), "--stages", "2"])
    models.assert_trees_close(state.variables, whole.variables, tolerance=1e-4)
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert losses[0] > 2
    assert losses[-1] < 0.3
    llm.chat.main([*given, "--directory", str(directory), "--stages", "3", "--evaluate"])
    assert "as in training, 3 of 3 questions get their answer" in capsys.readouterr().out


def test_a_block_with_a_cache_equals_one_without(llm, rng):
    config = llm.model.Config(words=10, context=8, layers=1, width=16, heads=2)
    block = llm.model.Block(config)
    x = rng.normal(size=(2, 6, 16)).astype("float32")
    with jax.numpy_dtype_promotion("standard"):
        apply = jax.jit(block.apply)
        parameters = jax.jit(block.init)(jax.random.key(0), x)
        whole, _cache = apply(parameters, x)
        cache, parts = (jnp.zeros((2, 8, 2, 8)), jnp.zeros((2, 8, 2, 8))), []
        for first, last in [(0, 3), (3, 6)]:
            part, cache = apply(parameters, x[:, first:last], cache, np.int32(first))
            parts.append(part)
    models.assert_trees_close(jnp.concatenate(parts, axis=1), whole, 1e-5)


def test_errors(llm, given, tmp_path):
    settings = {"words": 300, "lengths": [64], "layers": 2, "width": 16, "heads": 2}
    conversations = llm.conversations.read_conversations(Path(given[1]))
    llm.train.prepare(tmp_path / "run", settings, conversations)
    other = "is of a run with --width 16. Give the same, or another --directory"
    with pytest.raises(ValueError, match=other):
        llm.train.prepare(tmp_path / "run", {**settings, "width": 48}, conversations)
    with pytest.raises(ValueError, match="from 2 to that of the layers, 3; got 4"):
        llm.train.main([*SMALL, *given, "--directory", str(tmp_path / "other"), "--stages", "4"])
    with pytest.raises(ValueError, match="multiple of twice the heads, 6; got 32"):
        llm.model.Config(100, width=32, heads=3)
    with pytest.raises(FileNotFoundError, match=r"settings\.json"):
        llm.chat.main(["--directory", str(tmp_path / "none"), "Is it?"])
