"""The layers of stages that other stages could have, and their order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.inspect.layers import name_whole_layers

WIDTH = 4


def dense(*shape):
    return {"kernel": np.ones(shape or (WIDTH, WIDTH), np.float32), "bias": np.zeros(WIDTH, np.float32)}


def make_block():
    """A block as Flax names its parts, which sort otherwise than they run."""
    return {
        "norm": {"scale": np.ones(WIDTH, np.float32)},
        "attention": {name: dense() for name in ("query", "out")},
        "Dense_0": dense(),
        "Dense_1": dense(),
    }


def apply(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def run_block(block, x):
    h = x * block["norm"]["scale"]
    x = x + apply(block["attention"]["out"], jnp.tanh(apply(block["attention"]["query"], h)))
    return x + apply(block["Dense_1"], jnp.tanh(apply(block["Dense_0"], x)))


def find_layers(stages, element, **options):
    pipeline = engine.Pipeline(stages, num_micro_batches=1, **options)
    pipeline.trace(element)
    return [stage.whole_layers for stage in engine.inspect.find_facts(pipeline).stages]


def test_blocks_of_a_nested_tree_in_the_order_of_the_model():
    """Moves were leaf modules in alphabetical order: "move wte"."""

    def first(p, ids):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p["params"])  # which reads them by name
        x = p["wte"]["embedding"][ids] + p["wpe"]
        for number in (8, 9, 10):
            x = run_block(p[f"block_{number}"], x)
        return x

    def last(p, x):
        logits = apply(p["head"], run_block(p["block_11"], x.astype(jnp.float32)))
        return jnp.mean(logits) + sum(jnp.sum(w**2) for w in jax.tree.leaves(p))

    tables = {"wte": {"embedding": np.ones((7, WIDTH), np.float32)}, "wpe": np.ones((3, WIDTH), np.float32)}
    blocks = {f"block_{number}": make_block() for number in (10, 8, 9)}
    parameters = [{"params": {**blocks, **tables}}, {"head": dense(), "block_11": make_block()}]
    options = {"parameters": parameters, "optimizer": optax.sgd(0.1)}
    first_layers, last_layers = find_layers([first, last], np.zeros((2, 3), np.int32), **options)
    names = ["wte", "wpe", "block_8", "block_9", "block_10"]
    assert [layer.name for layer in first_layers] == [f"stage0/params/{name}" for name in names]
    assert [layer.num_parameters for layer in first_layers] == [28, 12, 84, 84, 84]
    assert first_layers[2].operations == first_layers[3].operations > first_layers[1].operations
    assert [layer.name for layer in last_layers] == ["stage1/block_11", "stage1/head"]


VECTOR, SQUARE = np.ones(WIDTH, np.float32), np.ones((WIDTH, WIDTH), np.float32)
BLOCKS = [f"stage0/blocks/{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"scale": VECTOR}, [*BLOCKS, "stage0/scale"]),
        ({"table": engine.Shared("table", VECTOR)}, ["table", *BLOCKS]),
        ({}, BLOCKS),
    ],
    ids=["scale", "table", "blocks alone"],
)
def test_a_scan_over_blocks_is_a_layer_for_each(others, expected):
    def run(x, w):
        return jnp.tanh(x @ w["up"]["kernel"]) + x @ w["down"]["kernel"], None

    def stage(p, x):
        x = x + p["table"] if "table" in p else x
        x = jax.lax.scan(run, x, p["blocks"])[0]
        return x * p["scale"] if "scale" in p else x

    kernel = {"kernel": np.stack([SQUARE] * 3)}
    parameters = {"blocks": {"up": kernel, "down": kernel}, **others}
    (layers,) = find_layers([stage], np.ones((2, WIDTH), np.float32), parameters=[parameters])
    assert [layer.name for layer in layers] == expected
    blocks = [layer for layer in layers if "blocks" in layer.name]
    assert {layer.num_parameters for layer in blocks} == {32}
    assert len({layer.operations for layer in blocks}) == 1


def test_what_cannot_be_told_apart_is_one_layer():
    def stage(p, x):
        for number in (0, 1):  # turns between two
            x = jnp.tanh(x @ p["a"]["w"][number])
            x = jnp.tanh(x @ p["b"][f"w{number}"])
        return x @ p["c"]["w"] + x @ p["a"]["w"][0]

    parameters = {"a": {"w": [SQUARE] * 2}, "b": {"w0": SQUARE, "w1": SQUARE}, "c": {"w": SQUARE}}
    (layers,) = find_layers([stage], np.ones((2, WIDTH), np.float32), parameters=[parameters])
    assert [layer.name for layer in layers] == ["stage0/a, stage0/b", "stage0/c", "stage0/a"]
    assert [layer.num_parameters for layer in layers] == [64, 16, 0]  # the last one only reads again


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["stage3/w", "stage3/b"], ["stage3"]),
        (["stage3/block_4/mlp/w", "stage3/block_4/attention/w"], ["stage3/block_4"]),
        (["model/h_0/a/w", "model/h_1/a/w", "model/ln/scale"], ["model/h_0", "model/h_1", "model/ln"]),
        (["stage3/blocks/0/w", "stage3/blocks/1/w", "stage3/norm"], ["blocks/0", "blocks/1", "norm"]),
        (["enc/b_0/a/w", "enc/b_1/a/w", "enc/ln/w", "head/w"], ["enc/b_0", "enc/b_1", "enc/ln", "head"]),
        (["h_0/Dense_0/w", "h_0/Dense_1/w", "h_1/Dense_0/w", "h_1/Dense_1/w"], ["h_0", "h_1"]),
        (["layers.0.attn.q.weight", "layers.1.attn.q.weight", "fc.weight"], ["layers.0", "layers.1", "fc"]),
        (["stage3/0", "stage3/1"], ["stage3/0", "stage3/1"]),
        (["a/" * 2000 + "w"], ["a"]),
        (["a", "a/b/c", "/", ""], None),
    ],
)
def test_names_of_layers(names, layers):
    found = name_whole_layers(names, 3)
    assert list(found) == names
    if layers is not None and not names[0].startswith("a/"):
        assert {layer.removeprefix("stage3/") for layer in found.values()} == {
            layer.removeprefix("stage3/") for layer in layers
        }
