"""Stages of layers: what is chosen and shown, and that training does not depend on it."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import automatic_splits
from ipu_pipeline.engine.execution import measured_costs
from ipu_pipeline.engine.execution.measured_costs import ProgramTime
from ipu_pipeline.engine.planning import plan_ipu_memory
from ipu_pipeline.engine.schedules.graph_splits import find_graph_split
from ipu_pipeline.engine.schedules.layer_splits import weigh
from ipu_pipeline.engine.tracing.stage_lists import join_layers
from ipu_pipeline.ground.host import count_cores
from tests.support import beside, models

COUNT = 4
WIDTHS = [8, 16, 16, 32, 16, 16, 8]
TRAINING = {"num_micro_batches": COUNT, "optimizer": optax.adam(1e-2)}


def dense(parameters, x, labels):
    return jnp.tanh(x @ parameters["w"] + parameters["b"]), labels


def mean_square(x, labels):
    return jnp.mean((x * engine.get_variable("scale", (8,)) - labels) ** 2)


def make_parameters(widths=WIDTHS):
    rng = np.random.default_rng(0)
    return [
        {"w": rng.normal(size=(before, after)).astype(np.float32) / 4, "b": np.zeros(after, np.float32)}
        for before, after in itertools.pairwise(widths)
    ]


def make_layers(widths=WIDTHS):
    """Layers with parameters of their own, and a loss with a variable."""
    return [*(engine.Stage(dense, parameters) for parameters in make_parameters(widths)), mean_square]


def make_batches(number=COUNT):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(4, 8)).astype("float32"), np.ones((4, 8), "float32")) for _ in range(number)]


def split(layers, num_stages, **options):
    return engine.auto_stages(layers, num_stages, make_batches()[0], **{**TRAINING, **options})


@functools.cache
def counted():
    return split(make_layers(), 2, measure=False)


@pytest.fixture
def by_size(monkeypatch):
    """Programs take as long as they have bytes of arguments, in nanoseconds; nothing is run or kept."""
    monkeypatch.setattr(measured_costs, "_measured", {})
    monkeypatch.setattr(measured_costs, "find_directory", lambda: None)
    monkeypatch.setattr(measured_costs, "_PASSES", 1)
    timed = []

    def time(program, _compiled, _num_copies):
        timed.append(program)
        size = sum(np.prod(struct.shape) * 4 for struct in program.arguments)
        return ProgramTime(1e-9 * float(size), 1.0, 0)

    monkeypatch.setattr(measured_costs, "_time", time)
    monkeypatch.setattr(automatic_splits, "time_shortest", lambda _group: 0.0)
    monkeypatch.setattr(measured_costs, "time_copy", lambda _avals, _source, _target: 1e-6)
    return timed


@pytest.fixture
def problems(monkeypatch):
    """The problems that are solved."""
    found = []

    def find(problem, *others):
        found.append(problem)
        return find_graph_split(problem, *others)

    monkeypatch.setattr(automatic_splits, "find_graph_split", find)
    return found


def test_training_is_that_of_a_plain_loop_over_the_layers():
    """And the parameters of stages are lists of those of layers."""
    given, stages, batches = make_parameters(), counted(), make_batches()
    assert [layer for group in stages.groups for layer in group] == list(range(7))
    assert len(stages) == 2
    pipeline = engine.Pipeline(stages, **TRAINING)
    state = pipeline.init(jax.random.key(0), batches[0])
    parameters = pipeline.parameters(state)
    together = [own for group in parameters for own in group]
    assert together.pop() is None  # the loss has none of these
    for own, wanted in zip(together, given, strict=True):
        jax.tree.map(np.testing.assert_array_equal, own, wanted)
    halved = jax.tree.map(lambda value: value / 2, parameters)
    changed = pipeline.with_parameters(state, halved)
    np.testing.assert_array_equal(changed.variables["layer1/w"], given[1]["w"] / 2)
    state, _outputs = beside.train(pipeline, [batches])
    assert list(state.variables) == [f"layer{n}/{name}" for n in range(6) for name in "bw"] + ["scale"]


def test_parameters_from_keys_and_shared_ones():
    table = engine.Shared("table", np.ones((8, 8), np.float32))

    def looked_up(parameters, x, labels):
        return x @ parameters["table"], labels

    def made(key):
        return {"w": jax.random.normal(key, (8, 8)), "b": jnp.zeros(8)}

    layers = [
        engine.Stage(looked_up, {"table": table}),
        engine.Stage(dense, made),
        engine.Stage(looked_up, {"table": table}, name="second"),
        mean_square,
    ]
    found = []
    for num_stages in (1, 4):
        pipeline = engine.Pipeline(split(layers, num_stages, measure=False), **TRAINING)
        found.append(pipeline.init(jax.random.key(0), make_batches()[0]).variables)
        assert sorted(found[-1]) == ["layer1/b", "layer1/w", "scale", "table"]
    models.assert_trees_close(found[1], found[0], 0.0)


def test_functions_and_parameters_beside_them():
    layers = [functools.partial(dense), *[dense] * 4]
    layers.append(lambda parameters, x, labels: jnp.mean((dense(parameters, x, labels)[0] - labels) ** 2))
    options = {"recompute": "auto", "accumulator_dtype": np.float32}
    stages = split(layers, 3, parameters=make_parameters(), measure=False, **options)
    pipeline = engine.Pipeline(stages, **TRAINING)
    state = pipeline.init(jax.random.key(0), make_batches()[0])
    assert sorted(state.variables)[:2] == ["layer0/b", "layer0/w"]
    assert stages.table.layers[:2] == ("dense.0", "dense.1")
    assert stages.table.layers[5] == "<lambda>"


def test_equal_layers_are_measured_once(by_size):
    """Also those that draw random numbers, which have keys of their own."""

    def make(number):
        def dropping(x, labels):
            kept = jax.random.bernoulli(engine.next_rng_key(), 0.5, x.shape)
            with engine.variable_scope(f"layer{number}"):
                weight = engine.get_variable("w", (8, 8))
            return jnp.where(kept, x @ weight, 0.0), labels

        return dropping

    table = split([*map(make, range(4)), mean_square], 2).table
    assert len(table.layers) == 5
    assert len(set(table.forward_seconds[:4])) == 1
    # The first layer sends no gradient back; the last one is a program of its own; updates are one and two.
    # So it is with pairs of layers, which have no updates.
    assert len(by_size) <= 13


def test_pairs_of_layers_take_what_they_do_as_stages(by_size, problems):
    """What two layers take in one stage is measured, and is not the sum of what they take alone."""
    parameters = enumerate(make_parameters([8, 16, 32, 8]))
    layers = [*(engine.Stage(dense, own, name=f"layer{n}") for n, own in parameters), mean_square]
    options = {"schedule": "zero_bubble", "device_mapping": [0, 1]}
    stages = split(layers, 2, **options)
    problem, alone = problems
    assert (problem.cores, alone.cores) == (count_cores(), None)
    pairs = [join_layers(layers[first : first + 2]) for first in range(0, len(layers), 2)]
    pipeline = engine.Pipeline(pairs, **{**TRAINING, **options})
    pipeline.init(jax.random.key(0), make_batches()[0])
    expected = pipeline.prepare().measure().costs
    found = problem.costs((0, 2))
    np.testing.assert_allclose(found.forward, expected.forward)
    np.testing.assert_allclose(found.backward, expected.backward)
    np.testing.assert_allclose(found.weight_gradients, expected.weight_gradients, atol=1e-15)
    alone = dataclasses.replace(problem, fused=()).costs((0, 2))
    assert alone.forward[0] > found.forward[0]
    assert len(stages) == 2


def test_pairs_that_took_longer_save_nothing(by_size, problems, monkeypatch):
    """Something else ran while they were measured: what a stage takes is then the sum of its layers."""

    def time(program, _compiled, _num_copies):
        return ProgramTime(1e-15 * float(sum(np.prod(s.shape) * 4 for s in program.arguments)) ** 2, 1.0, 0)

    monkeypatch.setattr(measured_costs, "_time", time)
    split(make_layers([8] * 4), 2)
    fused = {pair.layers: (pair.forward, pair.backward) for pair in problems[0].fused}
    assert fused.keys() == {(0, 1), (1, 2), (2, 3)}
    assert fused[0, 1] == fused[1, 2] == (0.0, 0.0)  # in the last one there is one program less


def test_two_long_layers_are_in_two_stages(by_size, monkeypatch):
    monkeypatch.setattr(automatic_splits, "count_cores", lambda: 100)
    stages = split(make_layers([8, 8, 512, 8, 8]), 3)
    with_long = [stage for stage, group in enumerate(stages.groups) if {1, 2} & set(group)]
    assert len(with_long) == 2
    chosen, even, *_others = stages.table.rows
    assert (chosen.what, even.what) == ("chosen", "even by layers")
    assert chosen.step_seconds == min(row.step_seconds for row in stages.table.rows)
    assert chosen.step_seconds < even.step_seconds
    assert chosen.stage_seconds.index(max(chosen.stage_seconds)) in with_long


def test_the_table():
    stages = counted()
    table = stages.table
    assert table.source == "counted"
    lines = str(table).split("\n")
    assert lines[0] == "Layers (counted):"
    assert " ".join(lines[1].split()) == "layer forward backward update crosses the cut before it"
    assert lines[2].startswith("  dense.0 ")
    assert lines[8].startswith("  mean_square ")
    assert lines[9] == "Splits (all 6 simulated):"
    assert [line.split("  ")[1] for line in lines[11:]] == [row.what for row in table.rows]
    names = [tuple(table.layers[layer] for layer in group) for group in stages.groups]
    assert list(table.rows[0].groups) == names
    assert table.sent_bytes[:2] == (0, 2 * 4 * 16 * 4)  # there and back, four rows of 16 numbers
    assert table.update_seconds[2] > table.update_seconds[0] > 0
    assert table.device_mapping == (0, 1)
    assert split(make_layers(), 2, measure=False).table == table


def test_without_training(by_size):
    stages = split(make_layers([8, 16, 8])[:-1], 2, loss=None, optimizer=None)
    pipeline = engine.Pipeline(stages, num_micro_batches=COUNT)
    state = pipeline.init(jax.random.key(0), make_batches()[0])
    _state, outputs = pipeline.step(state, make_batches())
    assert len(outputs.outputs) == COUNT
    assert set(stages.table.backward_seconds) == {0.0}


@pytest.mark.parametrize(
    ("schedule", "mapping"),
    [("looped", [0, 1, 0, 1]), ("zero_bubble_v", [0, 1, 1, 0]), ("searched", [0, 1, 2, 3]), ("1f1b", None)],
)
def test_schedules_and_mappings(schedule, mapping):
    options = {"schedule": schedule, "device_mapping": mapping, "num_micro_batches": 16}
    table = split(make_layers(), 4, measure=False, **options).table
    assert table.device_mapping == tuple(mapping or range(4))
    judged = [weigh(row.step_seconds, row.shared_seconds) for row in table.rows]
    assert judged[0] == min(judged)  # the chosen one


@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
def test_memory_is_what_the_pipeline_plans(schedule):
    options = {"schedule": schedule, "num_micro_batches": 8}
    stages = split(make_layers(), 3, measure=False, **options)
    size = 2 if schedule == "grouped" else 1  # the largest that the pipeline may choose
    held = planned(stages, **options, dispatch_plan=engine.Chunking(size))
    estimates = stages.table.rows[0].num_bytes
    assert estimates[:2] == pytest.approx(held[:2], rel=0.02)
    # The last stage holds nothing for its backward; here that is among its temporaries.
    assert estimates[2] >= held[2]


def test_layers_that_do_not_fit():
    with pytest.raises(ValueError, match=r"bytes_per_ipu must be enough .* got 100\. Raise it, or take"):
        split(make_layers(), 2, bytes_per_ipu=100, measure=False)
    row = counted().table.rows[0]
    enough = max(row.num_bytes)
    assert split(make_layers(), 2, bytes_per_ipu=enough, measure=False).table.rows[0].fits


def printing(x, labels):
    jax.debug.print("{}", x[0, 0])
    return x, labels


def waiting(x, labels):
    return jax.lax.while_loop(lambda own: own[0, 0] < 0, lambda own: own + 1, x), labels


def calling(x, labels):
    return jax.pure_callback(lambda own: own, x, jax.lax.stop_gradient(x)), labels


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (printing, "functions that print or call back into Python would notice"),
        (waiting, "a loop that ends when its data says so may not end on them, and waiting has one"),
    ],
)
def test_what_may_not_run_on_zeros_is_counted(layer, reason, capfd):
    stages = split([layer, *make_layers()], 2)
    assert stages.table.source.startswith("counted, since ")
    assert reason in stages.table.source
    assert capfd.readouterr().out == ""


def test_what_cannot_be_counted_either():
    with pytest.raises(ValueError, match=r"layers call pure_callback, whose time is not known"):
        split([calling, *make_layers()], 2)


def test_custom_calls_are_measured(by_size):
    """Their time is in no equation."""

    def solve(x, labels):
        return jnp.linalg.qr(x)[0] @ jnp.ones((4, 8), x.dtype), labels

    assert split([solve, mean_square], 2).table.source == "measured on cpu"
    with pytest.raises(ValueError, match=r"layers call .*qr.*, whose time is not known"):
        split([solve, mean_square], 2, measure=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": []}, "layers must be a list of at least one function"),
        ({"layers": mean_square}, "layers must be a list of at least one function"),
        ({"layers": [[mean_square]]}, r"layers\[0\] must be a function or a Stage"),
        ({"num_stages": 0}, "num_stages must be an integer from 1 to the number of layers, 7; got 0"),
        ({"num_stages": 8}, "num_stages must be an integer from 1 to the number of layers, 7; got 8"),
        ({"num_stages": True}, "num_stages must be an integer"),
        ({"bytes_per_ipu": 0}, "bytes_per_ipu must be an integer of at least 1, or None; got 0"),
        ({"num_micro_batches": None}, "num_micro_batches must be given"),
        ({"device_mapping": [0]}, "must have the number of a device for each of the 2 stages"),
        ({"device_mapping": [0, -1]}, "device_mapping must have"),
        ({"forward_options": [{}]}, "forward_options is not supported"),
        ({"dispatch_plan": engine.Chunking(2)}, "dispatch_plan is not supported"),
        ({"num_serialized": 2}, "num_serialized"),
        ({"device_mapping": [0, 0]}, r"device_mapping must have several devices; got \[0, 0\]"),
        ({"num_stages": 1, "bytes_per_ipu": 1000}, "bytes_per_ipu needs several devices"),
        ({"scheduler": "grouped"}, "scheduler"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    given = {"layers": make_layers(), "num_stages": 2, **arguments}
    with pytest.raises(TypeError if "scheduler" in arguments else ValueError, match=message):
        split(given.pop("layers"), given.pop("num_stages"), **given)


def test_a_fault_of_a_layer_is_named():
    def wrong(x, labels):
        return x @ labels, labels

    with pytest.raises(TypeError, match="dot_general") as caught:
        split([*make_layers()[:-1], wrong, mean_square], 2)
    assert any("stage 6 (wrong)" in note for note in caught.value.__notes__)


# One step beside.


def test_an_optimizer_that_may_not_end_on_zeros_is_not_run(by_size):
    def grow(g, state, _parameters=None):
        longer = jax.lax.while_loop(lambda own: jnp.abs(own).sum() < 1.0, lambda own: own * 2, g["scale"])
        return jax.tree.map(lambda own: -0.1 * own, {**g, "scale": longer}), state

    optimizer = optax.GradientTransformation(lambda _parameters: (), grow)
    table = split(make_layers([8, 16, 8]), 2, optimizer=optimizer).table
    assert table.source == "measured on cpu"
    assert set(table.update_seconds) == {0.0}


def make_skipping():
    """The first layer makes a large value that only the last but one reads."""

    def first(x, labels):
        return jnp.tanh(x), jnp.tile(x, (1, 512)), labels

    def between(name, x, skipped, labels):
        return jnp.tanh(x * engine.get_variable(name, (8,), initializer=jnp.ones)), skipped, labels

    def joining(x, skipped, labels):
        return x + skipped[:, :8] * skipped[:, -8:], labels

    middle = (functools.partial(between, name) for name in ("between", "again"))
    return [first, *middle, joining, mean_square]


def test_replicas_share_the_cores_and_the_choice_is_the_same_again(problems):
    layers = make_layers([8] * 3)
    first, second = (split(layers, 2, num_replicas=2) for _time in range(2))
    assert problems[0].cores == count_cores() / 2
    assert first.table == second.table


def test_one_device_stands_for_several():
    """A transfer from a device to itself says nothing, and is not kept."""
    table = split(make_layers([8, 8]), 2, devices=jax.devices()[:1]).table
    assert table.source == "measured on cpu"


@pytest.mark.parametrize("measure", [True, False])
def test_what_skips_layers_is_sent_wherever_it_is_cut(measure, problems, monkeypatch):
    def time_copy(avals, *_groups):
        return 1e-9 * sum(np.prod(aval.shape) for aval in avals)

    monkeypatch.setattr(measured_costs, "time_copy", time_copy)
    split(make_skipping(), 2, measure=measure)
    assert len(problems) == 1 + measure  # of what was measured on a CPU also for devices of their own
    sent = collections.Counter()
    for value in problems[0].sent:
        sent.update({(value.maker, reader): value.seconds for reader in value.readers})
    assert {(0, 3), (0, 1), (1, 2), (2, 3), (3, 4)} <= sent.keys()
    assert sent[0, 3] > sent[0, 1]


def planned(stages, **options):
    """The bytes of each IPU by the pipeline's own plan, without temporaries."""
    pipeline = engine.Pipeline(stages, **{**TRAINING, **options})
    pipeline.init(jax.random.key(0), make_batches()[0])
    return [plan.num_device_bytes - (plan.num_temporary_bytes or 0) for plan in plan_ipu_memory(pipeline)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_micro_batches": 256, "schedule": "gpipe"},  # which hold all of a step
        pytest.param({"recompute": "recompute_then_backpropagate"}, marks=pytest.mark.thorough),
        {"num_replicas": 2, "shard": ["optimizer_state", "weights"]},
        pytest.param({"offload": ["weight_update_variables"]}, marks=pytest.mark.thorough),
        pytest.param({"schedule": "looped", "device_mapping": [0, 1, 0, 1]}, marks=pytest.mark.thorough),
        {"optimizer": optax.sgd(0.1, momentum=0.9)},
    ],
    ids=["gpipe", "recomputation", "zero", "offloading", "looped", "momentum"],
)
def test_memory_with_options(options):
    """What IPUs hold is never estimated too low, and not far too high."""
    stages = split(make_layers(), len(options.get("device_mapping", range(3))), measure=False, **options)
    for estimate, plan in zip(stages.table.rows[0].num_bytes, planned(stages, **options), strict=True):
        assert plan <= 1.01 * estimate
        assert estimate <= 1.6 * plan


def test_leaves_that_several_layers_read_are_there_once():
    def masked(parameters, x, labels, mask):
        return *dense(parameters, x * mask, labels), mask

    layers = [engine.Stage(masked, own) for own in make_parameters([8] * 7)]
    layers.append(lambda x, labels, mask: jnp.mean((x * mask - labels) ** 2))
    batch = (*make_batches()[0], np.ones((4, 8), np.float32))
    stages = engine.auto_stages(layers, 2, batch, measure=False, **TRAINING)
    pipeline = engine.Pipeline(stages, **TRAINING)
    pipeline.init(jax.random.key(0), batch)
    plans = plan_ipu_memory(pipeline)
    for estimate, plan in zip(stages.table.rows[0].num_bytes, plans, strict=True):
        assert estimate == pytest.approx(plan.num_device_bytes, rel=0.3)


def only_128(num_stages, num_micro_batches, device_mapping, training):
    assert num_micro_batches == 128
    return engine.schedules.interleaved(num_stages, num_micro_batches, device_mapping, training)


def test_schedules_for_one_number_of_micro_batches(tmp_path):
    timetable = engine.schedules.timetable("interleaved", 2, 128, (0, 1), True)
    engine.schedules.write_csv(timetable.rows, tmp_path / "rows.csv")
    for schedule in (only_128, tmp_path / "rows.csv"):
        found = split(make_layers(), 2, schedule=schedule, num_micro_batches=128, measure=False)
        assert len(found) == 2


def test_limits_of_searched_schedules():
    limit = 4 * max(counted().table.rows[0].num_bytes)
    message = rf"Give the schedule SearchedSchedule\(bytes_per_ipu={limit}\) here"
    with pytest.raises(ValueError, match=message):
        split(make_layers(), 2, schedule="searched", bytes_per_ipu=limit, measure=False)
    schedule = engine.SearchedSchedule(bytes_per_ipu=limit)
    assert split(make_layers(), 2, schedule=schedule, measure=False).table.rows[0].fits
    with pytest.raises(ValueError, match="bytes_per_ipu must be enough"):
        split(make_layers(), 2, schedule=engine.SearchedSchedule(bytes_per_ipu=100), measure=False)


def test_a_single_layer_needs_no_times():
    def only(x, labels):
        return jnp.mean((jnp.linalg.qr(engine.get_variable("a", (8, 8)))[0] @ x.T - labels.T) ** 2)

    stages = split([only], 1)
    assert stages.groups == ((0,),)
    assert stages.table.source == "counted"
    assert stages.table.rows[0].num_bytes == ()
    assert "not known" in str(stages.table)
