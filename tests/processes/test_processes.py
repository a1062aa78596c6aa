"""Pipelines whose stages are in several processes give what they give in one."""

import functools
import os
import pickle
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.devices import links
from ipu_pipeline.engine.updates.optimizer_wrappers import scale_loss
from tests.engine.tracing import test_shared_variables as shared
from tests.engine.updates import test_updates_joined as updates
from tests.support import forked, joined, models
from tests.support.programs import environment

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4


def make_mlp(num_stages=4, optimizer=None, **options):
    given = {"num_micro_batches": NUM_MICRO_BATCHES, **options}
    return engine.Pipeline(
        models.mlp_stages(num_stages),
        optimizer=updates.clipped() if optimizer is None else optimizer,
        **given,
    )


def make_steps(seed, num_micro_batches):
    rng = np.random.default_rng(seed)
    return [models.mlp_batches(rng, num_micro_batches) for _step in range(NUM_STEPS)]


mlp_steps = functools.partial(make_steps, 0, NUM_MICRO_BATCHES)
replicated_steps = functools.partial(make_steps, 1, 2 * NUM_MICRO_BATCHES)


def make_normalized(**options):
    """Statistics that stages assign, random keys, metrics, and an optimizer that reads the last outputs."""

    def normalize(name, x):
        with engine.variable_scope(name):
            mean = engine.get_variable("mean", (x.shape[-1],), trainable=False)
            engine.assign("mean", 0.9 * mean + 0.1 * jnp.mean(x, axis=0))
        keep = jax.random.bernoulli(engine.next_rng_key(), 0.8, x.shape)
        engine.metric(f"{name}_mean", jnp.mean(x))
        return jnp.where(keep, x - jax.lax.stop_gradient(mean), 0)

    def first(x, labels):
        return normalize("first", models.layer(0)(x)), labels

    def second(x, labels):
        return normalize("second", models.layer(1)(x)), labels

    def last(x, labels):
        loss = models.cross_entropy(models.layer(3)(x), labels)
        engine.metric("loss", loss)
        return loss, jnp.max(x)

    def optimizer(loss, largest):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1 / (1 + jnp.abs(largest))))

    return engine.Pipeline(
        [first, second, last],
        num_micro_batches=NUM_MICRO_BATCHES,
        loss=lambda loss, largest: loss,
        optimizer=optimizer,
        **options,
    )


def make_inference(**options):
    return engine.Pipeline(models.mlp_stages(4), num_micro_batches=NUM_MICRO_BATCHES, **options)


def make_scaled(**options):
    return make_mlp(optimizer=scale_loss(optax.sgd(0.1), 2.0**120, True, 2, 2.0**60), **options)


def make_around(**options):
    """Two IPUs with two stages each; in two processes, each has one."""
    return make_mlp(device_mapping=[0, 1, 0, 1], devices=jax.devices()[::2], **options)


def make_shared(**options):
    return shared.make(**{"mapping": (0, 1, 3), "num_micro_batches": 5, "donate": True, **options})


def shared_steps(num_micro_batches=5):
    rng = np.random.default_rng(0)
    return [shared.make_step(rng, num_micro_batches) for _step in range(NUM_STEPS)]


OFFLOADED = ["weights", "weight_update_variables", "activations", "gradient_accumulation_buffers"]
TWO = {"num_replicas": 2}
RECOMPUTED = {"recompute": "recompute_then_backpropagate"}
SHARED_OUT = {"schedule": "zero_bubble", "shard": ["optimizer_state", "weights"]}
CHUNKS = {"dispatch_plan": engine.Chunking(2)}


def case(make, steps, **options):
    """What makes a pipeline, and what makes the micro-batches of each step."""
    return functools.partial(make, **options), steps


CASES = {
    "interleaved, offloaded": case(make_mlp, mlp_steps, schedule="interleaved", offload=OFFLOADED),
    "folded, recomputed": case(make_mlp, mlp_steps, device_mapping=[0, 3, 3, 0], donate=True, **RECOMPUTED),
    "one by one": case(make_mlp, mlp_steps, device_mapping=[3, 2, 1, 0], reduction="sum"),
    "all on the last": case(make_mlp, mlp_steps, device_mapping=[3, 3, 3, 3], sum_collected=True),
    "scaled": case(make_scaled, mlp_steps, donate=True),
    "flattened": case(make_mlp, mlp_steps, optimizer=optax.flatten(optax.adam(0.01)), donate=True),
    "normalized in chunks": case(make_normalized, mlp_steps, device_mapping=[0, 1, 2], **CHUNKS),
    "shared": case(make_shared, shared_steps),
    "shared, running mean": case(
        make_shared, shared_steps, reduction="running_mean", schedule="interleaved"
    ),
    "inference": case(make_inference, mlp_steps),
    "around": case(make_around, mlp_steps, schedule="looped", donate=True),
    "replicas, chunks": case(make_mlp, replicated_steps, **TWO, **CHUNKS, donate=True),
    "replicas, normalized": case(
        make_normalized, replicated_steps, **TWO, device_mapping=[0, 3, 1], donate=True
    ),
    "replicas, shared": case(make_shared, functools.partial(shared_steps, num_micro_batches=10), **TWO),
    "replicas, inference": case(make_inference, replicated_steps, **TWO),
    "replicas, three IPUs": case(make_mlp, replicated_steps, **TWO, device_mapping=[0, 1, 1, 2]),
    "replicas, halves, shared out": case(make_mlp, replicated_steps, **TWO, **SHARED_OUT),
}


def train(name):
    """What a process has of the results of some steps, by what it is."""
    pipeline, steps = (make() for make in CASES[name])
    state = pipeline.init(jax.random.key(7), steps[0][0])
    made = {}
    for number, step in enumerate(steps):
        state, outputs = pipeline.step(state, step)
        made |= {f"step {number}, {key}": value for key, value in outputs.metrics.items()}
        if outputs.is_here:
            made[f"step {number}, losses"] = [np.asarray(loss) for loss in outputs.losses]
            made[f"step {number}, outputs"] = [jax.tree.map(np.asarray, one) for one in outputs.outputs]
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.variables, state.optimizer_state)):
        for shard in leaf.addressable_shards:  # of replicas, each the whole
            made.setdefault(jax.tree_util.keystr(path), []).append(np.asarray(shard.data))
    return made


train_here = functools.cache(train)


def train_all(names, num_devices=None):
    """The results of each case; the process joins the others itself if it is told its devices."""
    if num_devices is not None:
        jax.config.update("jax_num_cpu_devices", num_devices)
        ipu.distributed.initialize(death_timeout=300)
    made = {}
    for name in names:
        print(name, flush=True)  # for whoever reads why this failed
        made[name] = train(name)
    return made


def run(names, num_processes, num_devices, *last):
    """What each process has of each case, and what a function returns there; last are its arguments."""
    made = joined.run(do_all, num_processes, num_devices // num_processes, names, last, timeout=400)
    return [found for found, _more in made], [more for _found, more in made]


def do_all(names, last):
    found = train_all(names)
    print(last, flush=True)
    return found, last[0](*last[1:]) if last else None


def check(names, made):
    """Compares what the processes have of each case with the same in this one."""
    for name in names:
        expected = train_here(name)
        found = {}
        for one in made:
            for key, value in one[name].items():
                assert key not in found or isinstance(value, list), (name, key)
                found[key] = [*found.get(key, []), *value] if isinstance(value, list) else value
        assert found.keys() == expected.keys(), (name, found.keys() ^ expected.keys())
        for key, value in expected.items():
            models.assert_trees_close(found[key], value)


_JOIN = """
import os, pathlib, sys
import jax
from tests.processes import test_processes
from tests.support import joined
jax.config.update("jax_compilation_cache_dir", None)  # both would write the same entries
for number in range(2):
    if os.fork() == 0:
        os.environ["IPU_PIPELINE_PROCESS_ID"] = str(number)
        joined.main(pathlib.Path({directory!r}), number)
        sys.exit()
sys.exit(any([os.wait()[1] for _process in range(2)]))
"""


class Faulty:
    """An iterator that goes on after its errors."""

    def __init__(self, batches, faults):
        self.batches, self.faults = enumerate(batches), faults

    def __iter__(self):
        return self

    def __next__(self):
        number, batch = next(self.batches)
        if number in self.faults:
            raise self.faults[number]
        return batch


# Of four steps of four micro-batches, by process.
FAULTS = [{4: OSError("lost"), 10: StopIteration()}, {9: OSError("torn")}]


def step_over_faults(faults):
    """What steps raise, and what there is after them."""
    pipeline, steps = make_mlp(2, device_mapping=[0, 3], max_shapes=1), mlp_steps()
    data = Faulty([batch for step in (*steps, steps[0]) for batch in step], faults)
    state, told = pipeline.init(jax.random.key(7), steps[0][0]), []
    too_many = [*steps[0], *steps[0]] if faults is FAULTS[1] else steps[0]
    for given in [data, data, data, data, too_many]:
        try:
            state, outputs = pipeline.step(state, given)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append([np.asarray(loss) for loss in outputs.losses] if outputs.is_here else [])
    return told, state.update_count


def train_all_and_fail(names, num_devices):
    made = train_all(names, num_devices)
    return made, step_over_faults(FAULTS[jax.process_index()])


def test_two_processes(tmp_path):
    """They join each other, and end together. Four stages of a session are in test_session_processes.py.

    Where the data of one of two that read failed, the other returned from the step: each waited for the
    other at another place, for ever.
    """
    given = (__name__, "train_all_and_fail", None, 2, None, (["shared"], 2))
    (tmp_path / "given").write_bytes(pickle.dumps(given))
    with joined.hold_port() as held:
        variables = environment(as_tests=True)
        variables["IPU_PIPELINE_COORDINATOR_ADDRESS"] = f"127.0.0.1:{held.getsockname()[1]}"
        variables["IPU_PIPELINE_NUM_PROCESSES"] = "2"
        done = forked.run(_JOIN.format(directory=str(tmp_path)), variables)
    assert done.returncode == 0, done.stderr
    made = [pickle.loads((tmp_path / f"made{number}").read_bytes()) for number in range(2)]
    check(["shared"], [found for found, _failed in made])
    (first, *counts), (last, *others) = (failed for _found, failed in made)
    assert counts == others == [2]
    assert first == [
        [],
        "OSError: lost",
        "ProcessError: In process 1, which reads the micro-batches: OSError: torn",
        [],
        "ProcessError: In process 1, which reads the micro-batches: " + last[4],
    ]
    assert "a step takes 4; the list has 8" in last[4]
    assert last[1:3] == [
        "ProcessError: In process 0, which reads the micro-batches: OSError: lost",
        "OSError: torn",
    ]
    expected, _count = step_over_faults({})
    models.assert_trees_close(last[0], expected[0])


IN_SEVERAL = {  # numbers of processes and devices -> cases
    (2, 4): [
        "interleaved, offloaded",
        "scaled",
        "flattened",
        "inference",
        "shared, running mean",
        "around",
    ],
    (2, 8): ["replicas, chunks", "replicas, halves, shared out"],
    # In some cases one or two of them have no device.
    (4, 8): ["replicas, normalized", "replicas, three IPUs", "replicas, inference", "replicas, shared"],
}


@pytest.mark.parametrize(
    ("num_processes", "num_devices"),
    [
        pytest.param(2, 4, marks=pytest.mark.thorough),
        pytest.param(2, 8, marks=pytest.mark.thorough),
        pytest.param(4, 8, marks=pytest.mark.soak),
    ],
)
def test_more_cases_in_several_processes(num_processes, num_devices):
    names = IN_SEVERAL[num_processes, num_devices]
    made, _nothing = run(names, num_processes, num_devices)
    check(names, made)


@pytest.mark.soak
def test_four_processes():
    """Kinds of mapping; and data that ends, which all hear of."""
    names = ["folded, recomputed", "one by one", "all on the last", "normalized in chunks"]
    made, ends = run(names, 4, 4, end_of_data, "labels", 3)
    check(names, made)
    expected, losses = end_of_data("labels", 3)
    assert expected[0] == "OutOfRangeError: The data ended after 3 of the 4 micro-batches of a step."
    assert expected[1].startswith("ValueError: Micro-batch 1")
    # The first stage reads the data in process 0, the last in process 3; the second and third do not.
    for process, (raised, own) in enumerate(ends):
        if process in (0, 3):
            assert raised == expected
        else:
            told = [f"In process 0, which reads the micro-batches: {text}" for text in expected]
            assert raised == [f"OutOfRangeError: {told[0]}", f"ProcessError: {told[1]}"]
        assert own == (losses if process == 3 else [])


def train_and_look(num_steps):
    """Trains replicas of one stage in processes of one device; one reads the losses of each step."""
    ipu.distributed.initialize()
    pipeline = make_mlp(1, num_replicas=2)
    batch = models.mlp_batches(np.random.default_rng(0), 2 * NUM_MICRO_BATCHES)
    state = pipeline.init(jax.random.key(7), batch[0])
    losses = []
    for _step in range(num_steps):
        state, outputs = pipeline.step(state, batch)
        if outputs.is_here:
            losses += [np.asarray(loss) for loss in outputs.losses]
    return len(losses)


@pytest.mark.soak
def test_a_process_waits_for_others_and_sends_at_once(tmp_path):
    """It had one thread for both, and the processes waited for each other for ever."""
    processes = joined.start(train_and_look, 2, None, 100, directory=tmp_path, joins_itself=True)
    made = joined.finish(processes, tmp_path, timeout=400)
    assert sorted(made) == [0, 100 * NUM_MICRO_BATCHES]


def end_of_data(kind, num_left):
    """What steps raise whose micro-batches do not suffice, and what there is after the next step."""
    if kind == "replicas":
        pipeline, steps = make_unlabelled(), [[x for x, _labels in step] for step in replicated_steps()]
    else:
        pipeline, steps = make_mlp(max_shapes=1), mlp_steps()
    first, second, *_rest = steps
    state = pipeline.init(jax.random.key(7), first[0])
    state, _outputs = pipeline.step(state, first)
    raised = []
    for step in (second[:num_left], [second[0], jax.tree.map(lambda leaf: leaf[:2], second[1])]):
        try:
            pipeline.step(state, step)
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    state, outputs = pipeline.step(state, second)
    return raised, [np.asarray(loss).tolist() for loss in outputs.losses]


def make_unlabelled():
    """Two replicas of three stages, of which only the first reads micro-batches."""
    first, second, third = (models.layer(index) for index in range(3))
    return engine.Pipeline(
        [first, second, lambda x: jnp.mean(third(x) ** 2)],
        num_micro_batches=NUM_MICRO_BATCHES,
        optimizer=optax.sgd(0.1),
        num_replicas=2,
        max_shapes=1,
    )


@pytest.mark.soak
def test_the_data_ends_in_all_processes_of_replicas():
    """Process 1 has the last stage of a replica and the first of the other: it hears, and it is heard."""
    expected, losses = end_of_data("replicas", 7)
    found = joined.run(end_of_data, 3, 2, "replicas", 7, timeout=400)
    for process, (raised, own) in enumerate(found):
        assert [text.partition(":")[0] for text in raised] == (
            ["OutOfRangeError", "ValueError" if process == 0 else "ProcessError"]
        )
        assert all(text.endswith(end) for text, end in zip(raised, expected, strict=True))
        assert own == (losses if process == 1 else [])


def die_in_step(process):
    """The error of a process while another one, killed in the middle of a step, owes it values."""

    def tell(x):
        if jax.process_index() == process:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def make(index):
        def stage(x):
            x = models.layer(index)(x)
            if index == 1:
                shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
                x = jax.pure_callback(tell, shape, jax.lax.stop_gradient(x)) + x
            return jnp.mean(x) if index == 2 else x

        return stage

    pipeline = engine.Pipeline(
        [make(index) for index in range(3)],
        num_micro_batches=2,
        optimizer=optax.sgd(0.1),
    )
    elements = [np.ones((4, 12), np.float32)] * 2
    state = pipeline.init(jax.random.key(0), elements[0])
    with pytest.raises(engine.ProcessError) as raised, links.naming_peers():
        for _number in range(2):
            state, outputs = pipeline.step(state, elements)
            jax.block_until_ready((outputs.collected, state))
    with pytest.raises(engine.ProcessError):  # it stays so
        pipeline.step(state, elements)
    return raised.value


@pytest.mark.thorough
def test_an_error_names_the_process_that_died():
    found = joined.run(die_in_step, 3, 1, 1, timeout=400, dead=1)
    for process in (0, 2):
        told = str(found[process])
        assert re.match(r"Process 1 did not send what .* needs in step \d+: it has ended", told)
