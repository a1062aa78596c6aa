"""What a plan has on devices, against the buffers that registers hold, instruction by instruction."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.execution import runner
from ipu_pipeline.engine.plan.memory import Sizes, follow_memory
from ipu_pipeline.engine.plan.plan import ALL

MEMORY = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]
ONE_BY_ONE = engine.Chunking(1)
COUNT, SMALL = 4, 16  # scalars and keys are kept for all steps


def first(w, x, y):
    return jnp.tanh(x @ w), y


def middle(w, x, y):
    return jax.nn.relu(x @ w) * x, y


def last(w, x, y):
    return ((x @ w - y) ** 2).mean()


def make(num_stages, **options):
    return engine.Pipeline(
        [first, *[middle] * (num_stages - 2), last],
        parameters=[np.ones((8, 8), np.float32)] * num_stages,
        num_micro_batches=COUNT,
        optimizer=optax.adam(0.1),
        donate=True,
        **{"dispatch_plan": ONE_BY_ONE, **options},
    )


def held_by(registers, devices):
    """By IPU, the bytes of the different buffers in device memory."""
    buffers = {}
    for array in registers:
        if isinstance(array, jax.Array) and not array.is_deleted():
            for shard in array.addressable_shards:
                is_here = array.sharding.memory_kind == "device" and shard.data.nbytes > SMALL
                if is_here and shard.device in devices:
                    buffers[devices[shard.device], shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    found = collections.Counter()
    for (ipu, _pointer), size in buffers.items():
        found[ipu] += size
    return found


def rarely(**options):
    return pytest.param(options, marks=pytest.mark.thorough)


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zero_bubble", "offload": MEMORY},
        {"num_replicas": 2, "shard": ["optimizer_state", "weights"]},
        *(rarely(schedule=name) for name in ("grouped", "interleaved", "sequential", "all_forwards")),
        *(rarely(schedule=name) for name in ("zero_bubble", "zero_bubble_h2")),
        rarely(offload=MEMORY),
        rarely(num_replicas=2),
        rarely(num_replicas=2, offload=MEMORY),
        rarely(dispatch_plan=engine.Chunking(2)),
        rarely(recompute="recompute_then_backpropagate"),
    ],
    ids=str,
)
def test_the_plan_has_what_registers_hold(num_stages, options, monkeypatch):
    pipeline = make(num_stages, **options)
    number = COUNT * options.get("num_replicas", 1)
    data = [(np.ones((4, 8), np.float32), np.ones((4, 8), np.float32))] * number
    state = pipeline.init(jax.random.key(0), data[0])
    state, _outputs = pipeline.step(state, data)
    own = pipeline.prepare()
    devices = {group.devices[0]: group.ipu for group in own.homes[0].groups}
    held = []

    def run(blocks, registers):
        for block in blocks:
            for function, reads, writes, frees in block:
                made = function(*[registers[register] for register in reads])
                for register, value in zip(writes, made, strict=True):
                    registers[register] = value
                held.append(held_by(registers, devices))
                for register in frees:
                    registers[register] = None

    monkeypatch.setattr(runner, "run", run)
    pipeline.step(state, data)
    size = Sizes(own.maker.layout, own.programs, own.chunk_size, {}, own.maker.dtypes)
    plan = own.find_plan(COUNT // own.chunk_size)
    planned = []
    for moment in follow_memory(plan, size, lambda value: size(value) > SMALL):
        found = collections.Counter()
        for (ipu, _category), num_bytes in moment.on_devices.items():
            found[ipu] += num_bytes
        planned.append(+found)
    assert planned == held
    assert ALL in plan.micro_batches
