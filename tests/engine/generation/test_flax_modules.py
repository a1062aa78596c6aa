"""Modules of Flax with decode=True: their caches become those of each request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from ipu_pipeline import engine, layers

WIDTH, LENGTH, WORDS = 8, 10, 20


class Reader(linen.Module):
    decode: bool = False

    @linen.compact
    def __call__(self, tokens, position):
        places = self.param("places", linen.initializers.normal(2.0), (LENGTH, WIDTH))
        own = jax.lax.dynamic_slice_in_dim(places, position, tokens.shape[1])
        x = linen.Embed(WORDS, WIDTH, embedding_init=linen.initializers.normal(2.0))(tokens) + own
        return Block(self.decode)(x)


class Block(linen.Module):
    decode: bool = False

    @linen.compact
    def __call__(self, x):
        mask = None if self.decode else linen.make_causal_mask(x[..., 0])
        return x + linen.MultiHeadDotProductAttention(2, decode=self.decode, use_bias=False)(x, mask=mask)


class NnxBlock(nnx.Module):
    def __init__(self, rngs, decode=False):
        init, options = nnx.initializers.normal(0.3), {"num_heads": 2, "in_features": WIDTH}
        self.attention = nnx.MultiHeadAttention(**options, decode=decode, rngs=rngs, kernel_init=init)
        self.decode = decode
        if decode:
            self.attention.init_cache((1, LENGTH, WIDTH))

    def __call__(self, x):
        mask = None if self.decode else nnx.make_causal_mask(x[..., 0])
        return x + self.attention(x, mask=mask)


def linen_parts(decode):
    kept = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    read = layers.Flax(Reader(decode), name="read", init_inputs=tokens if decode else None)
    return read, layers.Flax(Block(decode), name="block", init_inputs=(kept,) if decode else None)


def nnx_parts(decode):
    def table(name, size, seed):
        init = nnx.initializers.normal(2.0)
        return layers.Flax(nnx.Embed(size, WIDTH, embedding_init=init, rngs=nnx.Rngs(seed)), name=name)

    words, places = table("words", WORDS, 0), table("places", LENGTH, 3)
    first = layers.Flax(NnxBlock(nnx.Rngs(1), decode), name="first")
    second = layers.Flax(NnxBlock(nnx.Rngs(2), decode), name="second")

    def read(tokens, position):
        return first(words(tokens) + places(position + jnp.arange(tokens.shape[1])))

    return read, second


@pytest.mark.parametrize("make", [linen_parts, nnx_parts])
def test_tokens_are_those_of_the_module_in_one_call(make):
    read, block = make(decode=False)
    head = layers.Flax(linen.Dense(WORDS, use_bias=False), name="head")
    stages = [lambda tokens: read(tokens, jnp.int32(0)), lambda x: head(block(x))]
    whole = engine.Pipeline(stages, num_micro_batches=1, device_mapping=[0, 0])
    state = whole.init(jax.random.key(1), np.zeros((1, LENGTH), np.int32))
    reading, blocking = make(decode=True)
    generator = engine.Generator(
        [lambda tokens, position: reading(tokens[None], position), lambda x: head(blocking(x))[0]],
        max_length=LENGTH,
        num_slots=1,
        chunk_lengths=(1, 2),
    )
    assert generator.token_by_token
    prompt = [2, 3, 5]
    (answer,) = generator.generate(state, [prompt], max_new_tokens=5)
    written = np.zeros((1, LENGTH), np.int32)
    end = len(prompt) + len(answer)
    written[0, :end] = [*prompt, *answer]
    _state, outputs = whole.step(state, [written])
    expected = np.argmax(outputs.outputs[0][0], axis=-1)
    assert answer.tolist() == expected[len(prompt) - 1 : end - 1].tolist()
    assert len(set(answer.tolist())) > 1


def test_init_inputs_are_for_linen():
    with pytest.raises(ValueError, match="init_cache"):
        layers.Flax(NnxBlock(nnx.Rngs(0)), init_inputs=(jnp.zeros(3),))
    with pytest.raises(TypeError, match="must be a tuple"):
        layers.Flax(Block(), init_inputs=jnp.zeros(3))
