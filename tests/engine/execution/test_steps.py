"""A step as a list of blocks, and running several steps."""

import contextlib
import itertools

import jax
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.plan.plan import describe
from ipu_pipeline.ground.errors import OutOfRangeError
from tests.support import beside, models, watchers


def make(stages=2, num_micro_batches=2, **options):
    """A pipeline of its own stages, or of so many."""
    stages = models.mlp_stages(stages) if isinstance(stages, int) else stages
    options = {"optimizer": optax.sgd(0.1), **options}
    return engine.Pipeline(stages, num_micro_batches=num_micro_batches, **options)


def lower(pipeline, num_micro_batches=2):
    """The blocks of a step's micro-batches, each with what it moves and waits for."""
    pipeline.trace(models.elements_of(1)[0])
    found = []
    for line in describe(pipeline.prepare().find_plan(num_micro_batches)).splitlines():
        name, parts = line.split(": ")
        shown = [
            part for part in parts.split(", ") if part.split()[0] in ("gather", "send", "store", "wait")
        ]
        found.append(": ".join([name, ", ".join(shown)] if shown else [name]))
    return found[found.index("feed 0") : found.index("end of micro-batches")]


def test_what_a_pipeline_uses_has_instructions():
    """Weights are gathered before each program; a group is joined when its last program is started."""
    replicated = lower(make(2, schedule="sequential", num_replicas=2, shard=["weights"]))
    assert replicated == [
        *["feed 0", "F0.0: gather 4, send 1 to 1, send 1 to 1", "F1.0: gather 4, send 1 to 0, send 1 to 0"],
        *["B0.0: gather 1", "feed 1", "F0.1: gather 4, send 1 to 1, send 1 to 1"],
        *["F1.1: gather 4, send 1 to 0, send 1 to 0", "join 1", "B0.1: gather 1", "join 0"],
    ]
    offloaded = lower(make(2, schedule="sequential", offload=["activations"]), 1)
    assert offloaded == ["feed 0", "F0.0: send 1 to 1, store 4", "F1.0: send 1 to 0, store 1", "B0.0"]
    phases = engine.ExecutionPhases(of_levels=(0, 1), num_ahead=1)
    phased = lower(make(2, schedule="sequential", execution_phases=phases), 1)
    ended = "end of phase 0: wait 1"
    assert phased == ["feed 0", "F0.0: send 1 to 1", ended, "F1.0: send 1 to 0", ended, "B0.0", ended]


def last_stage(x, labels):
    return models.cross_entropy(models.dense("last", 10, x), labels)


def test_programs_that_call_python_are_waited_for_before_anything_is_joined():
    def stage(x, labels):
        jax.debug.callback(lambda _value: None, x[0, 0])
        return last_stage(x, labels)

    assert lower(make([stage], 1, num_replicas=2), 1)[-2:] == ["wait: wait 6", "join 0"]


def test_where_rows_are_joined_last(monkeypatch):
    """Behind the last phase, and where starting may be to wait for other processes."""
    phases = engine.ExecutionPhases(of_levels=(0, 1), num_ahead=1)
    phased = lower(make(2, schedule="sequential", execution_phases=phases, num_replicas=2), 1)
    assert phased[-3:] == ["end of phase 0: wait 1", "join 0", "join 1"]
    monkeypatch.setattr(DeviceGroup, "is_joined", True)
    monkeypatch.setenv("PJRT_NPROC", "9")
    assert lower(make(2, schedule="sequential", num_replicas=2), 1)[-3:] == ["B0.0", "join 0", "join 1"]


@pytest.mark.thorough
@pytest.mark.parametrize("is_used", [True, False])
def test_a_row_without_gradients_is_joined_too(is_used):
    """Of its variables there are accumulators, which no program adds to."""

    def first(x, labels):
        weight = engine.get_variable("first", (12, 12))
        return jax.lax.stop_gradient(x @ weight) if is_used else x, labels

    beside.train(make([first, last_stage], 1, num_replicas=2), [models.elements_of(2)])


class Moves(watchers.Watcher):
    """A watcher that counts what is sent from which stage."""

    def __init__(self):
        self.stages = []

    def moved(self, launch, _target, _arrays):
        self.stages.append((launch.kind, launch.stage))


def test_what_a_program_of_all_replicas_sends_is_told_of_no_other():
    def first(x, labels):
        return models.dense("first", 8, x), labels

    def middle(x, labels):
        x = models.dense("middle", 8, x)
        return x - engine.cross_replica_sum(x) / 2, labels

    pipeline = make([first, middle, last_stage], num_replicas=2)
    data, moves = models.elements_of(4), Moves()
    state = pipeline.init(jax.random.key(0), data[0])
    with watching.watching(moves):
        pipeline.step(state, data)
    assert sorted(moves.stages) == [("forward", 0)] * 4 + [("forward", 2)] * 4


# Running several steps.


def run(pipeline, num_updates, **options):
    """What was told, and the state after; of `Pipeline.run` with data that ends after five updates."""
    data = models.elements_of(10)
    state = pipeline.init(jax.random.key(0), data[0])
    runner, told = pipeline.prepare(), []
    left = iter(data)

    def take(wanted):
        elements = [runner.place_element(jax.tree.leaves(one)) for one in itertools.islice(left, wanted)]
        if not elements:
            raise OutOfRangeError("The data ended.")
        return elements

    def tell(progress, count):
        told.append((count, progress.state.update_count))

    with contextlib.suppress(OutOfRangeError):
        state = pipeline.run(pipeline.place(state), take, [], tell, num_updates, **options)
    return told, state


@pytest.mark.thorough
def test_steps_are_run_one_after_another():
    told, state = run(make(), 4)
    assert sum(count for count, _updates in told) == 4
    assert told[-1][1] == 4
    other, data = make(), models.elements_of(8)
    expected = other.init(jax.random.key(0), data[0])
    for first in range(0, 8, 2):
        expected, _outputs = other.step(expected, data[first : first + 2])
    models.assert_trees_close(state.variables, expected.variables, 1e-6)


def test_steps_are_stopped_between_two():
    entered = []

    @contextlib.contextmanager
    def replacing():
        yield
        entered.append(None)

    options = {"should_stop": lambda: len(entered) == 2, "replacing": replacing}
    assert run(make(), 4, one_by_one=True, **options)[0] == [(1, 1), (1, 2)]


@pytest.mark.parametrize("one_by_one", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_data_ends_between_steps(one_by_one):
    """What was told before is kept; several micro-batches of a step that is not whole are dropped."""
    told, _state = run(make(), 9, one_by_one=one_by_one)
    assert told == [(1, number) for number in range(1, 6)]
