"""What execution phases have on the devices: the plan against the arrays that are there."""

import gc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices import placement
from ipu_pipeline.engine.plan.run import Underway
from ipu_pipeline.engine.planning import plan_host_memory, plan_ipu_memory, plan_memory
from tests.support import watchers
from tests.support.memory import pipeline_memory_over_time

pytestmark = pytest.mark.usefixtures("no_garbage")

ALL = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]
WIDTH, ROWS, NUM_MICRO_BATCHES = 128, 64, 2


class PeakBytes(watchers.Watcher):
    """Watches a pipeline's programs for the most bytes on each device.

    A device that is late has all that pieces of work were given, until somebody has waited for them. A
    device of the host's is not late, so references take its place: what programs are given and make is
    kept until then.

    Attributes:
      peaks: by device.
    """

    def __init__(self, monkeypatch):
        self.peaks = {}
        self._before = _bytes_by_device()
        self._now, self._pieces = [], {}
        add, wait = Underway.add, Underway.wait

        def add_and_note(underway, arrays):
            add(underway, arrays)
            self._pieces.setdefault(id(underway), []).append(self._now)
            self._now = []

        def wait_and_drop(underway):
            wait(underway)
            pieces = self._pieces.get(id(underway), [])
            while underway._limit is not None and len(pieces) > underway._limit:
                # Devices do one thing after another: what was begun before has ended, too.
                self._pieces = {id(underway): pieces}
                del pieces[0]

        monkeypatch.setattr(Underway, "add", add_and_note)
        monkeypatch.setattr(Underway, "wait", wait_and_drop)

    def run(self, launch, function, arguments):
        results = super().run(launch, function, arguments)
        self._now += [*arguments, *results]
        for device, found in _bytes_by_device().items():
            found -= self._before.get(device, 0)
            self.peaks[device] = max(self.peaks.get(device, 0), found)
        return results


def _bytes_by_device():
    """Of live arrays in the memory of devices; those that share memory are counted once."""
    found = {}
    for array in jax.live_arrays():
        if array.sharding.memory_kind == "device" and not array.is_deleted():
            for shard in array.addressable_shards:
                known = found.setdefault(shard.device.id, {})
                known[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in found.items()}


def make_stage(index, num_stages, width=WIDTH):
    def stage(x, target):
        x = jnp.tanh(x @ engine.get_variable(f"kernel{index}", (x.shape[-1], width)))
        return jnp.mean((x - target[:, None]) ** 2) if index == num_stages - 1 else (x, target)

    return stage


def make(mapping, phases, offload=ALL, last_width=WIDTH, **options):
    options, last = {"optimizer": optax.adam(0.01), "donate": True} | options, len(mapping) - 1
    return engine.Pipeline(
        [*(make_stage(n, len(mapping)) for n in range(last)), make_stage(last, len(mapping), last_width)],
        num_micro_batches=NUM_MICRO_BATCHES,
        schedule="sequential",
        device_mapping=mapping,
        execution_phases=phases,
        offload=offload,
        dispatch_plan=engine.Chunking() if len(set(mapping)) > 1 else None,
        **options,
    )


def make_step(number=NUM_MICRO_BATCHES):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=ROWS).astype("float32"))
        for _ in range(number)
    ]


def compare(pipeline, monkeypatch, num_replicas=1):
    """By IPU, the planned bytes without temporaries, and the measured ones."""
    step = make_step(NUM_MICRO_BATCHES * num_replicas)
    state = pipeline.init(jax.random.key(0), step[0])
    state, outputs = pipeline.step(state, step)  # compiles
    jax.block_until_ready((state, outputs))
    del outputs
    gc.collect()
    peaks = Counter()
    for _ in range(8):  # less is found if the host is late, or what other tests have left behind goes
        watcher = PeakBytes(monkeypatch)
        with watching.watching(watcher):
            for _ in range(2):
                state, _outputs = pipeline.step(state, step)
        jax.block_until_ready((state, _outputs))
        del _outputs
        monkeypatch.undo()
        peaks |= watcher.peaks
    found = {}
    for plan in plan_ipu_memory(pipeline):
        resident = plan.num_variable_bytes + plan.num_optimizer_bytes + plan.num_accumulator_bytes
        planned = plan.num_device_bytes - plan.num_temporary_bytes
        found[plan.ipu] = planned, resident + peaks[plan.ipu]
    return found


def rarely(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


def phases_of(num_ahead, **fields):
    """Phases of a stage each, unless told otherwise."""
    return engine.ExecutionPhases(**{"of_levels": range(4), "num_ahead": num_ahead, **fields})


SERIAL, PARALLEL = (0, 0, 0, 0), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("mapping", "phases", "offload", "most"),
    [
        rarely(SERIAL, phases_of(0), ALL, 1.02),
        (SERIAL[:3], phases_of(1, of_levels=range(3)), ALL, 1.02),
        rarely(SERIAL, phases_of(2), ALL, 1.1),
        rarely(SERIAL, phases_of(0, keeps_values=False), ALL, 1.02),
        rarely(SERIAL, phases_of(0, of_levels=(0, 0, 1, 1)), ALL, 1.02),
        rarely(SERIAL, phases_of(0, of_levels=(0, 0, 1, 1), shares_last=False), ALL, 1.02),
        *(rarely(SERIAL, phases_of(0), [kind], 1.02) for kind in ALL),
        rarely(PARALLEL, phases_of(1), ALL, 1.15),
    ],
    ids=str,
)
def test_the_plan_has_what_is_there_at_most(mapping, phases, offload, most, monkeypatch):
    """At least what is measured, but for scalars and what is collected; and not much more."""
    pipeline = make(mapping, phases, offload)
    for planned, measured in compare(pipeline, monkeypatch).values():
        assert 0.98 * measured <= planned <= most * measured


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"donate": False},
        {"optimizer": CLIPPED},  # all gradients are needed twice, and stay between
        {"num_replicas": 2},
        {"num_replicas": 2, "shard": ["weights"]},
        {"num_replicas": 2, "shard": ["optimizer_state"]},
    ],
    ids=["not_donated", "clipped", "replicas", "sharded_weights", "sharded_state"],
)
def test_updates_of_other_kinds(options, monkeypatch):
    num_replicas = options.get("num_replicas", 1)
    pipeline = make(SERIAL, phases_of(0), **options)
    for planned, measured in compare(pipeline, monkeypatch, num_replicas).values():
        # Over replicas all gradients are on the devices at once, and as many zeros on their way from there.
        assert 0.98 * measured <= planned <= (1.1 if num_replicas == 1 else 1.4) * measured


def test_reports_have_the_fullest_moment_all_the_time():
    pipeline = traced(phases_of(0))
    (plan,) = plan_ipu_memory(pipeline)
    assert plan.num_brought_bytes > 0
    assert plan.num_variable_bytes == plan.num_optimizer_bytes == plan.num_accumulator_bytes == 0
    simulation = engine.simulate(engine.Scenario(engine.Costs.of(4, forward=1.0), pipeline.timetable(2), 2))
    (held,) = pipeline_memory_over_time(pipeline, simulation.free_running.intervals())
    assert held.peak.num_bytes == held.planned_bytes == plan.num_device_bytes
    names = ("variables", "optimizer state", "accumulators")
    assert tuple(held.peak.parts[name] for name in names) == plan.num_state_bytes


def traced(phases, offload=ALL, **options):
    pipeline = make(SERIAL, phases, offload, **options)
    pipeline.trace(make_step(1)[0])
    return pipeline


def test_nothing_is_moved_where_all_stays_on_the_devices():
    for phases in (None, phases_of(None)):
        pipeline = traced(phases, ())
        assert plan_host_memory(pipeline, engine.LinkSpeed()) is None
    (plan,) = plan_ipu_memory(pipeline)
    assert plan.num_brought_bytes == 0
    assert plan.num_activation_bytes == sum(stage.num_live_bytes for stage in plan_memory(pipeline)) > 0
    (few,), (all_,) = (plan_ipu_memory(traced(phases_of(ahead))) for ahead in (0, None))
    assert few.num_brought_bytes < all_.num_brought_bytes  # nobody waits, so all of a step may be there
    with pytest.raises(ValueError, match="plan_host_memory goes with one replica.* num_replicas is 2"):
        plan_host_memory(traced(phases_of(0), num_replicas=2), engine.LinkSpeed())


@pytest.mark.parametrize(
    "phases", [phases_of(0), phases_of(1, of_levels=(0, 0, 1, 2), keeps_values=False)], ids=str
)
def test_what_the_simulator_counts_is_what_is_moved(phases, monkeypatch):
    pipeline = make(SERIAL, phases)
    step = make_step()
    state = pipeline.init(jax.random.key(0), step[0])
    state, _outputs = pipeline.step(state, step)
    moved = {"device": 0, "pinned_host": 0}
    plain = placement._put_as

    def put_as(arrays, row, sharding, *rest):
        for array in arrays:
            if isinstance(array, jax.Array) and array.sharding.memory_kind != sharding.memory_kind:
                moved[sharding.memory_kind] += array.nbytes
        return plain(arrays, row, sharding, *rest)

    monkeypatch.setattr(placement, "_put_as", put_as)
    pipeline.step(state, step)
    found = plan_host_memory(pipeline, engine.LinkSpeed())
    for way, kind in (("to", "device"), ("from", "pinned_host")):
        of_each = sum(sum(getattr(found, f"num_bytes_{way}_{one}")) for one in ("forward", "backward"))
        planned = NUM_MICRO_BATCHES * of_each + sum(getattr(found, f"num_bytes_{way}_update"))
        assert planned == pytest.approx(moved[kind], rel=1e-3), way  # but for scalars of the last stage


@pytest.mark.parametrize("of_levels", [(0, 1, 1), (0, 0, 1)])
def test_what_each_program_is_brought_and_leaves(of_levels):
    """In the same phase weights are brought once; what a backward reads, its own forward has left."""
    options = {"offload": ["weights", "activations"], "optimizer": optax.sgd(0.01), "last_width": 1}
    pipeline = make((0, 0, 0), phases_of(0, of_levels=of_levels), **options)
    pipeline.trace(make_step(1)[0])
    found = plan_host_memory(pipeline, engine.LinkSpeed())
    weights, hidden = (4 * 4 * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH), 4 * ROWS * WIDTH
    assert found.num_bytes_to_forward == weights
    assert found.num_bytes_from_backward == (0, 0, 0)
    kept = found.num_bytes_from_forward
    if of_levels[1]:  # the second stage's forward and backward are in one phase
        assert kept[0] >= hidden
        assert kept[1:] == (0, 0)
        assert found.num_bytes_to_backward == kept
    else:
        assert min(kept[:2]) >= 2 * hidden
        assert kept[2] == hidden  # the cotangent for the second stage
        assert found.num_bytes_to_backward == (kept[0], kept[1] + kept[2] + weights[1], 0)
