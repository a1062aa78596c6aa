"""A small language model in two stages, and what it writes without a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine

WIDTH, LENGTH, WORDS = 16, 24, 40
PROMPT_LENGTHS = (1, 3, 6, 2, 9)


def attend(p, x, position):
    """Attention of a chunk of one request, x[length, width], to all that came before, and to itself."""
    kept = []
    for name in ("keys", "values"):
        old = engine.get_variable(name, (LENGTH, WIDTH), initializer="zeros", trainable=False)
        kept.append(jax.lax.dynamic_update_slice(old, x @ p[name], (position, 0)))
        engine.assign(name, kept[-1])
    keys, values = kept
    is_known = jnp.arange(LENGTH) <= position + jnp.arange(len(x))[:, None]
    scores = jnp.where(is_known, (x @ p["queries"]) @ keys.T / WIDTH**0.5, -jnp.inf)
    return x + jax.nn.softmax(scores) @ values


def read(p, tokens, position):
    x = p["words"][tokens] + p["places"][position + jnp.arange(len(tokens))]
    with engine.variable_scope("first"):
        return attend(p, x, position), position


def write(p, x, position):
    with engine.variable_scope("second"):
        return attend(p, x, position) @ p["words"].T


def attend_whole(p, x):
    scores = (x @ p["queries"]) @ (x @ p["keys"]).swapaxes(-1, -2) / WIDTH**0.5
    is_known = jnp.tri(x.shape[-2], dtype=bool)
    return x + jax.nn.softmax(jnp.where(is_known, scores, -jnp.inf)) @ (x @ p["values"])


def read_whole(p, tokens):
    return attend_whole(p, p["words"][tokens] + p["places"][: tokens.shape[-1]]), tokens


def write_whole(p, x, tokens):
    logits = attend_whole(p, x) @ p["words"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]))


@jax.jit
def predict(parameters, tokens):
    x, _tokens = read_whole(parameters[0], tokens)
    return jnp.argmax(attend_whole(parameters[1], x) @ parameters[1]["words"].T, axis=-1)


def write_unsplit(parameters, prompt, number):
    """The prompt's continuation, greedily, by the model in one call for each token."""
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + number):
        tokens[place] = predict(parameters, tokens)[place - 1]
    return tokens[len(prompt) : len(prompt) + number].tolist()


@pytest.fixture(scope="module")
def parameters():
    rng = np.random.default_rng(5)

    def draw(*shape, scale=1.0):
        return (scale * rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    def squares():
        return {name: draw(WIDTH, WIDTH, scale=2) for name in ("queries", "keys", "values")}

    first, second, words = squares(), squares(), engine.Shared("words", draw(WORDS, WIDTH, scale=3))
    places = draw(LENGTH, WIDTH, scale=3)
    return [{**first, "words": words, "places": places}, {**second, "words": words}]


@pytest.fixture(scope="module")
def plain(parameters):
    """The parameters without `Shared`."""
    return [{name: getattr(x, "value", x) for name, x in own.items()} for own in parameters]


@pytest.fixture(scope="module")
def trainer(parameters):
    """The same model, whole sequences at a time, to be trained."""
    return engine.Pipeline(
        [read_whole, write_whole],
        parameters=parameters,
        num_micro_batches=2,
        optimizer=optax.sgd(1.0),
    )


@pytest.fixture(scope="module")
def state(trainer):
    return trainer.init(jax.random.key(0), np.zeros(LENGTH, np.int32))


@pytest.fixture(scope="module")
def generator(parameters):
    return engine.Generator(
        [read, write], parameters=parameters, max_length=LENGTH, num_slots=4, chunk_lengths=(1, 4)
    )


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(6)
    return [rng.integers(0, WORDS, length).astype(np.int32) for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def continuations(plain, prompts):
    """What the unsplit model writes, twelve tokens each."""
    return [write_unsplit(plain, prompt, 12) for prompt in prompts]
