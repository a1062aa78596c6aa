"""What SpectraX does, feature by feature; each function is a check that runs.

The form is that of its documentation: a function of parameters and batch with `sxstage_iter` between
stages, `sxjit` with a schedule, `sxvalue_and_grad`. Each stage's parameters are put on its device
beforehand: to SpectraX, an array that lies on the first device belongs to the first stage, whatever
`assign_stage` says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import spectrax as spx
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from spectrax import nn
from spectrax.runtime import schedules
from spectrax.runtime.mpmd import pipeline_executor, sxjit, sxstage_iter, sxvalue_and_grad
from spectrax.runtime.types import MpMdMesh

from benchmarks.features.values import (
    DOES_NOT,
    NUM_TOKENS,
    RATE,
    WIDTH,
    WORKS,
    WORKS_WITH,
    Verdict,
    check_close,
    draw,
    layers,
    names_in,
    said_by,
    speaker,
)

WHOLE = P()  # on each device


def mesh_of(num_stages: int = 4, num_others: int = 1) -> MpMdMesh:
    """A mesh with an axis of stages, "pp", and one of devices of a stage, "tp"."""
    devices = np.array(jax.devices()[: num_stages * num_others]).reshape(num_stages, num_others)
    return MpMdMesh(Mesh(devices, ("pp", "tp")), "pp")


def placed(parameters: Any, mesh: Any = None, stages: Any = None, spec: Any = WHOLE) -> Any:
    """Puts each entry on its stage's devices."""
    mesh = mesh_of() if mesh is None else mesh
    stages = range(len(parameters)) if stages is None else stages
    return [
        jax.device_put(entry, NamedSharding(mesh.submesh(stage), spec))
        for entry, stage in zip(parameters, stages, strict=True)
    ]


def run_stages(ws: Any, x: Any, target: Any) -> Any:
    """The loss, with a boundary between each two layers."""
    for number, w in enumerate(ws):
        if number:
            x = sxstage_iter(x)
        x = jnp.tanh(x @ w) if number < len(ws) - 1 else x @ w
    return jnp.mean((x - target) ** 2)


def plain(ws: Any, x: Any, target: Any) -> Any:
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ ws[-1] - target) ** 2)


def batch(*shape: int, seed: int = 1) -> Any:
    x = draw(*shape, WIDTH, seed=seed)
    return x, np.sin(x)


def train_step(schedule: Any, function: Callable[..., Any] = run_stages, mesh: Any = None) -> Any:
    """A function from parameters and a batch to a loss and gradients."""
    mesh = mesh_of() if mesh is None else mesh
    compiled = sxjit(mesh=mesh, schedule=schedule, static_argnums=(), batch_argnums=(1, 2))(function)
    differentiated = sxvalue_and_grad(compiled, argnums=(0,))

    def step(parameters: Any, *values: Any) -> Any:
        loss, (gradients,) = differentiated(parameters, *values)
        return loss, gradients

    return step


def check_step(schedule: Any, x: Any, target: Any, mesh: Any = None, stages: Any = None) -> None:
    """Compares a loss and gradients with those of plain JAX."""
    ws = layers(4)
    found, gradients = train_step(schedule, mesh=mesh)(placed(ws, mesh, stages), x, target)
    expected, expected_gradients = jax.value_and_grad(plain)(ws, x, target)
    check_close([found, *gradients], [expected, *expected_gradients])


class Block(spx.Module):
    """A layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, rngs=spx.Rngs(number))

    def forward(self, x: Any) -> Any:
        """Applies it."""
        return jnp.tanh(self.linear(x))


def documented_form() -> Verdict:
    def make(number: int) -> Block:
        with spx.assign_stage(total=4, current=number):
            return Block(number)

    def run(model: Any) -> Any:
        x, target = batch(8)
        return spx.run(
            model, inputs=x, targets=target, mesh=mesh, mode="train", loss_fn=loss, schedule=schedule
        )

    def loss(y: Any, target: Any) -> Any:
        return jnp.mean((y - target) ** 2)

    mesh = spx.create_mesh(axis_dims=(4, 1, 1, 1, 1, 1), mpmd_axis="pp")
    schedule = schedules.Std1F1B(4)
    said_by(lambda: run(nn.PipelineSequential(*map(make, range(4)))), ValueError)
    blocks = []
    for number in range(4):
        with jax.default_device(jax.devices()[number]):
            blocks.append(make(number))
    model = nn.PipelineSequential(*blocks)
    x, target = batch(8)
    found, _gradients = run(model)
    check_close([found], [loss(model(x), target)])
    return Verdict(WORKS_WITH, "each stage's arrays made on its device, as in all checks below")


def lengths_in_turn() -> Verdict:
    step = train_step(schedules.Std1F1B(4))
    ws = layers(4)
    for length in (3, 5, 3):
        x, target = batch(8, length)
        loss, gradients = step(placed(ws), x, target)
        expected, expected_gradients = jax.value_and_grad(plain)(ws, x, target)
        check_close([loss, *gradients], [expected, *expected_gradients])
    return Verdict(WORKS, "one `sxjit` function")


def lengths_mixed() -> Verdict:
    parts = [batch(2, n)[0] for n in (3, 5, 3, 7)]
    said_by(lambda: check_step(schedules.GPipe(4), parts, batch(8, 3)[1]), ValueError)
    return Verdict(DOES_NOT, "a step takes one array, cut evenly")


def fewer_micro_batches() -> Verdict:
    check_step(schedules.GPipe(2), *batch(4))
    said_by(lambda: check_step(schedules.Std1F1B(2), *batch(4)), ValueError)
    return Verdict(WORKS_WITH, "GPipe; 1F1B raises ValueError")


def smaller_last() -> Verdict:
    return Verdict(DOES_NOT, said_by(lambda: check_step(schedules.GPipe(4), *batch(7)), ValueError))


def losses_per_token() -> Verdict:
    lengths = np.array([3, 5, 3, 7, 7, 2, 4, 1])
    x, target = batch(8, 7)
    target = np.concatenate([target, (np.arange(7) < lengths[:, None])[..., None]], axis=-1)

    def summed(ws: Any, x: Any, target: Any) -> Any:
        for number, w in enumerate(ws):
            if number:
                x = sxstage_iter(x)
            x = jnp.tanh(x @ w)
        return jnp.sum((x - target[..., :-1]) ** 2 * target[..., -1:]) * 4 / lengths.sum()

    def expected_loss(ws: Any) -> Any:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.sum((y - target[..., :-1]) ** 2 * target[..., -1:]) / lengths.sum()

    loss, gradients = train_step(schedules.Std1F1B(4), summed)(placed(layers(4)), x, target)
    expected, expected_gradients = jax.value_and_grad(expected_loss)(layers(4))
    check_close([loss, *gradients], [expected, *expected_gradients])
    return Verdict(WORKS_WITH, "own scaling of summed, padded losses")


def schedules_by_name() -> Verdict:
    x, target = batch(8)
    for schedule in (schedules.GPipe(4), schedules.Std1F1B(4), schedules.ZeroBubbleH1(4)):
        check_step(schedule, x, target)
    two = {"virtual_stages": 2}
    interleaved = schedules.InterleavedH1, schedules.Interleaved1F1BPlusOne, schedules.KimiK2
    for schedule in (*(kind(4, **two) for kind in interleaved), schedules.DualPipeV(4)):
        places = {schedule.logical_at(rank, virtual, 2): rank for rank in range(2) for virtual in range(2)}
        check_step(schedule, x, target, mesh_of(2), [places[stage] for stage in range(4)])
    return Verdict(WORKS, "GPipe, 1F1B, ZB-H1, three kinds of interleaved 1F1B, DualPipe-V")


def own_schedule() -> Verdict:
    class OneAfterAnother(schedules.Schedule):
        def build(self, n_stages: int) -> Any:
            rows = []
            for number in range(self.microbatches):
                forwards = [(schedules.Phase.FWD, stage) for stage in range(n_stages)]
                backwards = [(schedules.Phase.BWD, stage) for stage in reversed(range(n_stages))]
                for phase, stage in forwards + backwards:
                    row: list[Any] = [None] * n_stages
                    row[stage] = schedules.Action(phase, number)
                    rows.append(row)
            return rows

        def peak_activations(self, n_stages: int) -> int:
            return min(1, n_stages)

    check_step(OneAfterAnother(4), *batch(8))
    return Verdict(WORKS, "a subclass of `Schedule`")


def tied_weights() -> Verdict:
    def tied(parameters: Any, x: Any, target: Any) -> Any:
        table, w = parameters
        x = sxstage_iter(jnp.tanh(x @ table) @ w)
        return jnp.mean((x @ table.T - target) ** 2)

    def expected_loss(parameters: Any) -> Any:
        table, w = parameters
        return jnp.mean((jnp.tanh(x @ table) @ w @ table.T - target) ** 2)

    mesh, given = mesh_of(2), layers(2)
    x, target = batch(8)
    loss, gradients = train_step(schedules.Std1F1B(4), tied, mesh)(placed(given, mesh, [0, 0]), x, target)
    expected, expected_gradients = jax.value_and_grad(expected_loss)(given)
    check_close([loss, *gradients], [expected, *expected_gradients])
    return Verdict(WORKS, "an array that both stages read")


def another_split() -> Verdict:
    def halves(ws: Any, x: Any, target: Any) -> Any:
        for number, w in enumerate(ws):
            if number == 2:
                x = sxstage_iter(x)
            x = jnp.tanh(x @ w) if number < 3 else x @ w
        return jnp.mean((x - target) ** 2)

    x, target = batch(8)
    optimizer = optax.adam(RATE)
    ws = layers(4)
    weights, memory = ws, optimizer.init(ws)
    expected, expected_memory = ws, optimizer.init(ws)
    for function, mesh, stages in ((halves, mesh_of(2), [0, 0, 1, 1]), (run_stages, mesh_of(), range(4))):
        _loss, gradients = train_step(schedules.Std1F1B(4), function, mesh)(
            placed(jax.device_get(weights), mesh, stages), x, target
        )
        updates, memory = optimizer.update(jax.device_get(gradients), memory)
        weights = optax.apply_updates(jax.device_get(weights), updates)
        gradients = jax.grad(plain)(expected, x, target)
        updates, expected_memory = optimizer.update(gradients, expected_memory)
        expected = optax.apply_updates(expected, updates)
    check_close(weights, expected)
    return Verdict(WORKS_WITH, "own `jax.device_put`")


def generation() -> Verdict:
    def attend(w: Any, cache: Any, x: Any, position: Any) -> Any:
        cache = jax.lax.dynamic_update_slice(cache, x[:, None], (0, position, 0))
        known = (jnp.arange(NUM_TOKENS) <= position)[:, None]
        return cache, x + jnp.tanh(jnp.sum(cache * known, axis=1) @ w)

    def decode(parameters: Any, caches: Any, tokens: Any, position: Any, cut: Any = sxstage_iter) -> Any:
        table, ws, head = parameters
        x = table[tokens]
        found = []
        for number, w in enumerate(ws):
            x = cut(x) if number else x
            cache, x = attend(w, caches[number], x, position)
            found.append(cache)
        return jnp.argmax(x @ head, axis=-1).astype(jnp.int32), tuple(found)

    def uncut(*given: Any) -> Any:
        return decode(*given, cut=lambda x: x)

    mesh, cut = mesh_of(), sxjit(mesh=mesh_of(), static_argnums=())(decode)
    table, ws, head = speaker()
    (on_first,), on_all, (on_last,) = placed([table]), placed(ws), placed([head], mesh, [3])
    caches: Any = tuple(np.zeros((2, NUM_TOKENS, WIDTH), np.float32) for _stage in range(4))
    sides = [
        [cut, (on_first, on_all, on_last), tuple(placed(caches)), jnp.array([1, 2], jnp.int32)],
        [uncut, (table, ws, head), caches, jnp.array([1, 2], jnp.int32)],
    ]
    texts: Any = ([], [])
    for position in range(NUM_TOKENS):
        for side, text in zip(sides, texts, strict=True):
            function, parameters, caches, tokens = side
            side[3], side[2] = function(parameters, caches, tokens, jnp.int32(position))
            text.append(side[3].tolist())
    assert texts[0] == texts[1], texts
    assert len({token for row in texts[0] for token in row}) > 2, texts
    assert [len(cache.devices()) for cache in sides[0][2]] == [1] * 4
    return Verdict(WORKS_WITH, "own loop and caches")


def continuous_batching() -> Verdict:
    text = " ".join((pipeline_executor.__doc__ or "").split())
    said = "KV-cache layout, sampling, and final token routing remain the caller/runtime's job"
    assert f"request packing, {said}" in text, text
    assert not names_in(spx, "generat|request|continuous")
    return Verdict(DOES_NOT, "left to the caller")


def stage_meshes() -> Verdict:
    mesh = mesh_of(2, 2)

    def part(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "tp")

    def mapped(stage: int) -> Any:
        specs = {"in_specs": (P(None, "tp"), P("tp", None)), "out_specs": P()}
        return jax.shard_map(part, mesh=mesh.submesh(stage), **specs)

    def with_shard_map(ws: Any, x: Any, target: Any) -> Any:
        x = sxstage_iter(jnp.tanh(mapped(0)(x, ws[0])))
        return jnp.mean((mapped(1)(x, ws[1]) - target) ** 2)

    def with_constraint(ws: Any, x: Any, target: Any) -> Any:
        sharding = NamedSharding(mesh.submesh(0), P(None, "tp"))
        x = sxstage_iter(jax.lax.with_sharding_constraint(jnp.tanh(x @ ws[0]), sharding))
        return jnp.mean((x @ ws[1] - target) ** 2)

    given = layers(2)
    x, target = batch(8)
    expected, expected_gradients = jax.value_and_grad(plain)(given, x, target)
    for function in (with_shard_map, with_constraint):
        step = train_step(schedules.Std1F1B(4), function, mesh)
        loss, gradients = step(placed(given, mesh, spec=P("tp", None)), x, target)
        check_close([loss, *gradients], [expected, *expected_gradients])
    return Verdict(WORKS, "`mesh.submesh(stage)`: `shard_map`, constraints")


def logarithm(ws: Any, x: Any, target: Any) -> Any:
    for number, w in enumerate(ws):
        if number:
            x = sxstage_iter(x)
        x = jnp.tanh(x @ w)
    return jnp.mean((x - jnp.log(target)) ** 2)


def nan_origin() -> Verdict:
    x, target = batch(8)
    target = np.ones_like(target)
    target[4:6] = -1

    def run() -> Any:
        with jax.debug_nans(True):
            return train_step(schedules.Std1F1B(4), logarithm)(placed(layers(4)), x, target)

    said = said_by(run, FloatingPointError)
    assert "log" not in said, said
    return Verdict(DOES_NOT, "`jax_debug_nans` names a later operation, no stage")


def own_check() -> Verdict:
    def checked(ws: Any, x: Any, target: Any) -> Any:
        checkify.check(jnp.all(x > 0), "x must be positive")
        return run_stages(ws, x, target)

    step = train_step(schedules.Std1F1B(4), checked)
    sides = (step, checkify.checkify(step))
    said = [said_by(lambda side=side: side(placed(layers(4)), *batch(8)), ValueError) for side in sides]
    assert said[0] == said[1], said
    return Verdict(DOES_NOT, "ValueError, also within `checkify.checkify`")


def hang() -> Verdict:
    names = names_in(spx, "watch|hang|timeout|heartbeat")
    assert [name for name in names if "unchanged" not in name] == [], names
    return Verdict(DOES_NOT, "nothing of the kind")


def debugger() -> Verdict:
    seen = []

    def looking(ws: Any, x: Any, target: Any) -> Any:
        seen.append(isinstance(x, jax.core.Tracer))
        return run_stages(ws, x, target)

    with jax.disable_jit():
        train_step(schedules.Std1F1B(4), looking)(placed(layers(4)), *batch(8))
    assert all(seen), seen
    model = nn.PipelineSequential(nn.Linear(WIDTH, WIDTH, rngs=spx.Rngs(0)))
    assert not isinstance(model(batch(8)[0]), jax.core.Tracer)
    return Verdict(WORKS_WITH, "the model alone: in the pipeline, stages are always traced")


def first_step() -> Verdict:
    begin = time.perf_counter()
    jax.block_until_ready(train_step(schedules.Std1F1B(4))(placed(layers(4)), *batch(8)))
    return Verdict(WORKS, f"{time.perf_counter() - begin:.1f} s, without an update")


def split_advice() -> Verdict:
    assert not names_in(spx, "advi|suggest|balance")
    return Verdict(DOES_NOT, "`auto_split` cuts evenly or where it is told")


def cannot_trace() -> Verdict:
    def branching(ws: Any, x: Any, target: Any) -> Any:
        return run_stages(ws, x if x.sum() > 0 else -x, target)

    step = train_step(schedules.Std1F1B(4), branching)
    said_by(lambda: step(placed(layers(4)), *batch(8)), jax.errors.TracerBoolConversionError)
    return Verdict(WORKS_WITH, "JAX's traceback: the line, no stage")
