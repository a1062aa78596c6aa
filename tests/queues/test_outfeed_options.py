"""What a pipeline enqueues: masks, sums per weight update, and their errors."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front, models

COUNT, ALL, LAST = 4, IPUOutfeedMode.ALL, IPUOutfeedMode.LAST


def last_stage(kind):
    """A last stage whose outputs are in a tuple, list or dict, or nested."""

    def stage(rate, x, labels):
        with ipu.variable_scope("second"):
            logits = ipu.layers.Dense(10)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        named = {"loss": jnp.mean(losses), "logits": logits, "right": jnp.argmax(logits, 1) == labels}
        if kind == "dict":
            return named
        if kind == "nested":
            return named["loss"], {"pair": (logits, named["right"]), "labels": labels}, ()
        return {"tuple": tuple, "list": list}[kind](named.values())

    return stage


def optimizer_function(*args, **named):
    return OptimizerFunctionOutput(optax.sgd(0.1), named["loss"] if named else args[0])


def logits_in_memory():
    """Arrays of one or more micro-batches' logits by their addresses, which some share."""
    found = [array for array in jax.live_arrays() if array.shape[-2:] == (4, 10)]
    return {array.unsafe_buffer_pointer(): array for array in found}


class Model(front.Pipelined):
    """A program with this last stage, in training or not, and its outfeed."""

    def __init__(self, kind="tuple", mode=ALL, trains=True, stage=None, length=None, **options):
        options |= {"optimizer_function": optimizer_function if trains else None, "inputs": [np.float32(0)]}
        stages = [front.first_stage, stage or last_stage(kind)]
        super().__init__(stages, COUNT, front.data(length), mode=mode, **options)

    def run(self):
        with ipu.Session(seed=1) as session:
            before = logits_in_memory()
            session.run([self.initializer, self.program])
            held = [value for address, value in logits_in_memory().items() if address not in before]
            self.num_held = sum(value.size // 40 for value in held)  # micro-batches
            return session.run(self.outfeed.dequeue())


@pytest.fixture(scope="module")
def unmasked():
    """What two weight updates enqueue without a mask: losses, logits, and what was right."""
    model = Model(repeat_count=2)
    outputs = model.run()
    assert model.num_held == 2 * COUNT
    return outputs


def close(actual, expected):
    models.assert_trees_close(actual, expected)


# Masks.


@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
def test_masks(mapping, unmasked):
    """What is masked is not kept in memory."""
    losses, logits, right = unmasked
    options = {"repeat_count": 2, "device_mapping": mapping}
    if mapping == [0, 0]:
        model = Model("dict", outfeed_mask={"loss": False, "logits": True, "right": False}, **options)
        close(model.run(), {"loss": losses, "right": right})
        assert model.num_held == 0
    else:
        mask = np.bool_(True), False, True
        found = Model("nested", LAST, outfeed_mask=mask, **options).run()
        assert list(found[0]) == ["labels", "pair"]
        close(found[0]["pair"], (logits[-1], right[-1]))


def test_a_mask_for_an_output_that_is_alone(unmasked):
    def stage(rate, x, labels):
        return last_stage("tuple")(rate, x, labels)[0]

    close(Model(stage=stage, repeat_count=2, outfeed_mask=[False]).run(), unmasked[0])
    with pytest.raises(ValueError, match=r"outfeed_mask leaves nothing to enqueue; got \[True\]"):
        Model(stage=stage, outfeed_mask=[True])


# Sums.


def test_the_sum_of_losses():
    """What is masked need not have a sum. Of a tuple, a list is dequeued."""
    options = {"repeat_count": 2, "reduction_method": "running_mean"}
    losses = Model(outfeed_loss=True, **options).run()
    model = Model(accumulate_outfeed=True, outfeed_mask=[False, True, True], **options)
    close(model.run(), [losses.reshape(2, COUNT).sum(1)])
    assert model.num_held == 0


def test_the_sums_of_outputs(unmasked):
    seen = []

    def choose(value):
        seen.append((value.shape, value.dtype.name))
        return jnp.int32 if value.dtype == bool else None

    def add(values):
        return np.asarray(values.reshape(2, COUNT, *values.shape[1:]).sum(1))

    losses, logits, right = unmasked
    options = {"repeat_count": 2, "accumulate_outfeed": True}
    model = Model(**options, accumulate_outfeed_dtype=choose)
    sums = model.run()
    assert model.num_held == 2
    assert set(seen) == {((), "float32"), ((4, 10), "float32"), ((4,), "bool")}
    close(sums[:2], [add(losses), add(logits)])
    assert sums[2].dtype == np.int32
    np.testing.assert_array_equal(sums[2], add(right))
    options |= {"trains": False, "device_mapping": [0, 0], "accumulate_outfeed_dtype": "float32"}
    named = Model("dict", **options).run()
    assert list(named) == ["logits", "loss", "right"]
    close([named[name][0] for name in ("loss", "logits")], [sums[0][0], sums[1][0]])  # before any update
    close(named["right"][0], sums[2][0].astype(np.float32))


@pytest.mark.parametrize(
    ("options", "block_bytes"),
    [
        pytest.param({"count": None}, 2**20, marks=pytest.mark.thorough),
        pytest.param({"num_serialized": 2}, 1300, marks=pytest.mark.thorough),
    ],
)
def test_sums_survive_between_the_parts_of_an_update(block_bytes, options, rng):
    """Also of groups, and with a count that is known at run."""
    group = options.get("num_serialized", 1)
    batches = models.mlp_batches(rng, 6)
    found = []
    for is_summed in (False, True):
        made = engine.Pipeline(
            models.mlp_stages(2),
            num_micro_batches=options.get("count", 6 // group),
            num_serialized=group,
            loss=lambda loss: loss,
            optimizer=optax.sgd(0.1),
            schedule="sequential",
            device_mapping=[0, 0],
            sum_collected=is_summed,
            block_bytes=block_bytes,
        )
        given = {"num_micro_batches": 6} if "count" in options else {}
        state = made.init(jax.random.key(1), batches[0])
        state, outputs = made.step(state, batches, **given)
        found.append((np.stack(outputs.outputs), np.stack(outputs.losses)))
    (each, losses), (total, total_loss) = found
    assert total.shape == total_loss.shape == (1,)
    close(total[0], each.sum(0))
    close(total_loss[0], losses.sum(0))


def test_a_wider_sum():
    """Of 300 ones in bfloat16, in which it stops growing."""
    for dtype, name, expected in ((None, "bfloat16", 256), (jnp.float32, "float32", 300)):
        options = {"accumulate_outfeed": True, "accumulate_outfeed_dtype": dtype}
        model = front.Pipelined([lambda x: x], 300, [jnp.bfloat16(1)] * 300, **options)
        (total,), _variables = model.once()
        assert (total.dtype.name, float(total)) == (name, expected)


def test_sums_stay_with_the_updates_that_are_complete():
    model = Model(length=2 * COUNT + 1, repeat_count=5, outfeed_loss=True, accumulate_outfeed=True)
    with ipu.Session() as session:
        session.run(model.initializer)
        with pytest.raises(ipu.errors.OutOfRangeError):
            session.run(model.program)
        assert session.run(model.outfeed.dequeue()).shape == (2,)


# Errors.


LOSS, MASK = {"outfeed_loss": True}, {"outfeed_mask": [True, False, False]}
SUM, SUM_DTYPE = {"accumulate_outfeed": True}, "accumulate_outfeed_dtype"
INFERS, DICT, NO_QUEUE = {"trains": False}, {"kind": "dict"}, {"outfeed_queue": None}
WRONG_VALUES = [
    ({**LOSS, **MASK}, "Only one of `outfeed_loss` and `outfeed_mask` can be set."),
    ({**MASK, **INFERS}, "An optimizer_function must be provided when outfeed_mask is set."),
    ({**LOSS, **INFERS}, "An optimizer_function must be provided when outfeed_loss is True."),
    ({**MASK, **NO_QUEUE}, "An outfeed_queue must be provided when outfeed_mask is set."),
    ({**SUM, **NO_QUEUE}, "An outfeed_queue must be provided when accumulate_outfeed is True."),
    ({**SUM, "mode": LAST}, "it must be in IPUOutfeedMode ALL. outfeed_queue is in mode LAST"),
    ({"outfeed_mask": [True, False]}, "the last stage's 3 outputs; it has 2"),
    ({"outfeed_mask": []}, "the last stage's 3 outputs; it has 0"),
    ({"outfeed_mask": [True] * 3}, "outfeed_mask leaves nothing to enqueue"),
    ({"outfeed_mask": {"loss": True}}, "outfeed_mask must be a list of booleans"),
    ({**MASK, **DICT}, "outfeed_mask must be a dict of booleans by name"),
    ({"outfeed_mask": {"loss": True, "logit": True}, **DICT}, "outputs, .*'right'; got 'loss', 'logit'"),
    (SUM, r"accumulate_outfeed_dtype: an output of the last stage, bool\[4\], has no sum"),
    (
        {**SUM, SUM_DTYPE: jnp.int32},
        r"an output of the last stage, float32\[\], is summed in .*hold it; got int32",
    ),
    ({**SUM, SUM_DTYPE: "wide"}, "accumulate_outfeed_dtype must be a dtype; got 'wide'"),
    ({**SUM, SUM_DTYPE: lambda _value: np.bool_}, "is summed in a dtype that can hold it; got bool"),
    ({SUM_DTYPE: jnp.float32}, "only used when accumulate_outfeed is True"),
]
WRONG_TYPES = [
    ({"accumulate_outfeed": 1}, "accumulate_outfeed must be True or False; got 1"),
    ({"outfeed_loss": None}, "outfeed_loss must be True or False; got None"),
    ({"outfeed_mask": "loss"}, "outfeed_mask must be a list or tuple of booleans.*'loss'"),
    ({"outfeed_mask": [0, 1, 1]}, r"must have booleans; outfeed_mask\[0\] is 0"),
    ({"outfeed_mask": {"loss": 1}, **DICT}, r"outfeed_mask\['loss'\] is 1"),
]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [(ValueError, *case) for case in WRONG_VALUES] + [(TypeError, *case) for case in WRONG_TYPES],
)
def test_wrong_calls(error, options, message):
    with pytest.raises(error, match=message):
        Model(**options)


def test_keys_have_no_sum():
    with pytest.raises(ValueError, match=r"key<fry>\[\], cannot be summed; do not collect it"):
        front.Pipelined([lambda: jax.random.key(0)], 1, accumulate_outfeed=True)


def test_a_function_that_chooses_outputs_must_fit():
    made = engine.Pipeline([lambda x: (x, x)], num_micro_batches=1, collect_outputs=lambda _shapes: [True])
    with pytest.raises(ValueError, match="one boolean for each of the 2 leaves.*it returned 1"):
        made.trace(np.float32(1))


def test_the_last_element_is_all_that_is_held():
    """In mode LAST nobody can ask for what came before."""
    queue = IPUOutfeedQueue(outfeed_mode=LAST)
    queue.bind(jax.tree.structure(0.0), [jax.ShapeDtypeStruct((), "float32")])
    values = [jnp.float32(number) for number in range(3)]
    dropped = [weakref.ref(value) for value in values]
    while values:
        queue.extend([values.pop(0)], None)
    gc.collect()
    assert [reference() is None for reference in dropped] == [True, True, False]
    assert queue.read() == 2
