"""What `ipu_pipeline.engine` does, feature by feature; each function is a check that runs."""

from __future__ import annotations

import functools
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.features.values import (
    NUM_TOKENS,
    RATE,
    WIDTH,
    WORKS,
    Verdict,
    check_close,
    draw,
    layers,
    said_by,
    speaker,
)
from ipu_pipeline import engine, set_num_devices

set_num_devices(4)


def hidden(w: Any, x: Any, target: Any) -> Any:
    return jnp.tanh(x @ w), target


def last(w: Any, x: Any, target: Any) -> Any:
    return jnp.mean((x @ w - target) ** 2)


STAGES = [hidden, hidden, hidden, last]


def micro_batch(*shape: int, seed: int = 1) -> Any:
    x = draw(*shape, WIDTH, seed=seed)
    return x, np.sin(x)


def plain_loss(parameters: Any, x: Any, target: Any, last: Callable[..., Any] = last) -> Any:
    for w in parameters[:-1]:
        x, target = hidden(w, x, target)
    return last(parameters[-1], x, target)


def plain_gradients(micro_batches: Any) -> Any:
    """Their mean over the micro-batches, on one device."""
    found = [jax.grad(plain_loss)(layers(4), *one) for one in micro_batches]
    return jax.tree.map(lambda *parts: sum(parts) / len(parts), *found)


def pipeline_of(stages: Any = STAGES, **options: Any) -> Any:
    usual = {
        "parameters": layers(len(stages)),
        "num_micro_batches": 4,
        "optimizer": optax.sgd(RATE),
    }
    return engine.Pipeline(stages, **{**usual, **options})


def check_step(micro_batches: Any, num_micro_batches: int | None = 4, **options: Any) -> Any:
    """Compares the weights after a step with those of plain JAX."""
    pipeline = pipeline_of(num_micro_batches=num_micro_batches, **options)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    number = {"num_micro_batches": len(micro_batches)} if num_micro_batches is None else {}
    state, _outputs = pipeline.step(state, micro_batches, **number)
    compare_weights(pipeline, state, micro_batches)
    return pipeline


def compare_weights(pipeline: Any, state: Any, micro_batches: Any) -> None:
    gradients = plain_gradients(micro_batches)
    expected = [w - RATE * np.asarray(g) for w, g in zip(layers(4), gradients, strict=True)]
    check_close(jax.device_get(pipeline.parameters(state)), expected)


def documented_form() -> Verdict:
    check_step([micro_batch(2, seed=n) for n in range(4)])
    return Verdict(WORKS, "functions and pytrees")


def lengths_in_turn() -> Verdict:
    pipeline = pipeline_of()
    short, long = ([micro_batch(2, n, seed=s) for s in range(4)] for n in (3, 5))
    state = pipeline.init(jax.random.key(0), short[0])
    for micro_batches in (short, long, short):
        after, _outputs = pipeline.step(state, micro_batches)
        compare_weights(pipeline, after, micro_batches)
    return Verdict(WORKS, "one pipeline and state")


def lengths_mixed() -> Verdict:
    check_step([micro_batch(2, n, seed=n) for n in (3, 5, 3, 7)])
    return Verdict(WORKS, "lengths 3, 5, 3 and 7")


def fewer_micro_batches() -> Verdict:
    for schedule in ("gpipe", "1f1b"):
        check_step([micro_batch(2), micro_batch(2, seed=2)], None, schedule=schedule)
    return Verdict(WORKS, "GPipe and 1F1B")


def smaller_last() -> Verdict:
    check_step([*(micro_batch(2, seed=n) for n in range(3)), micro_batch(1)])
    return Verdict(WORKS, "2, 2, 2 and 1 rows")


def losses_per_token() -> Verdict:
    def summed(w: Any, x: Any, target: Any) -> Any:
        return jnp.sum((x @ w - target) ** 2), target.shape[0] * target.shape[1]

    micro_batches = [micro_batch(2, n, seed=n) for n in (3, 5, 3, 7)]
    stages = [hidden, hidden, hidden, summed]
    pipeline = pipeline_of(
        stages, loss=lambda loss, _number: loss, loss_weight=lambda _loss, number: number
    )
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    state, _outputs = pipeline.step(state, micro_batches)

    def loss(parameters: Any) -> Any:
        parts = [plain_loss(parameters, *one, last=summed) for one in micro_batches]
        return sum(part for part, _number in parts) / sum(number for _part, number in parts)

    expected = [w - RATE * g for w, g in zip(layers(4), jax.grad(loss)(layers(4)), strict=True)]
    check_close(jax.device_get(pipeline.parameters(state)), expected)
    return Verdict(WORKS, "`loss_weight`")


def schedules_by_name() -> Verdict:
    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    for name in ("gpipe", "1f1b", "zb_h1"):
        check_step(micro_batches, schedule=name)
    for name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        check_step(micro_batches, schedule=name, device_mapping=[0, 1, 0, 1])
    check_step(micro_batches, schedule="zbv", device_mapping=[0, 1, 1, 0])
    number = len(engine.schedules.named_schedules())
    run = "GPipe, 1F1B, interleaved 1F1B, ZB-H1, interleaved zero bubble, ZB-V"
    return Verdict(WORKS, f"{run}; {number} in all")


def own_schedule() -> Verdict:
    def one_after_another(num_stages: int, num_micro_batches: int, _mapping: Any, _training: bool) -> Any:
        kinds = engine.ActionKind.FORWARD, engine.ActionKind.BACKWARD
        return [
            [engine.Action(kind, stage, number) for number in range(num_micro_batches) for kind in kinds]
            for stage in range(num_stages)
        ]

    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    check_step(micro_batches, schedule=one_after_another)
    rows = one_after_another(4, 4, (), True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.csv"
        engine.schedules.write_csv(rows, path)
        check_step(micro_batches, schedule=path)
    rows[0].reverse()
    said_by(lambda: check_step(micro_batches, schedule=lambda *_counts: rows), engine.ScheduleError)
    return Verdict(WORKS, "a function or a CSV file; a wrong one raises `ScheduleError`")


def tied_weights() -> Verdict:
    table, w = layers(2)
    shared = engine.Shared("table", table)

    def first(p: Any, x: Any, target: Any) -> Any:
        return jnp.tanh(x @ p["table"]) @ p["w"], target

    def final(p: Any, x: Any, target: Any) -> Any:
        return last(p["table"].T, x, target)

    parameters = [{"table": shared, "w": w}, {"table": shared}]
    pipeline = pipeline_of([first, final], parameters=parameters)
    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    state, _outputs = pipeline.step(state, micro_batches)

    def loss(table: Any) -> Any:
        losses = [final({"table": table}, *first({"table": table, "w": w}, *one)) for one in micro_batches]
        return sum(losses) / len(losses)

    check_close([state.variables["table"]], [table - RATE * jax.grad(loss)(table)])
    return Verdict(WORKS, "`engine.Shared`")


def another_split() -> Verdict:
    def run(parameters: Any, x: Any, target: Any) -> Any:
        for w in parameters:
            x = jnp.tanh(x @ w)
        return x, target

    def run_last(parameters: Any, x: Any, target: Any) -> Any:
        x, target = run(parameters[:-1], x, target)
        return last(parameters[-1], x, target)

    ws = layers(4)
    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    two, three = (
        pipeline_of(stages, parameters=parameters, optimizer=optax.adam(RATE))
        for stages, parameters in (
            ([run, run_last], [ws[:2], ws[2:]]),
            ([run, run, run_last], [ws[:1], ws[1:3], ws[3:]]),
        )
    )
    state = two.init(jax.random.key(0), micro_batches[0])
    state, _outputs = two.step(state, micro_batches)
    three.init(jax.random.key(0), micro_batches[0])
    moved = engine.resplit(state, three)
    on, _outputs = two.step(state, micro_batches)
    moved_on, _outputs = three.step(moved, micro_batches)
    check_close(
        [w for part in jax.device_get(three.parameters(moved_on)) for w in part],
        [w for part in jax.device_get(two.parameters(on)) for w in part],
    )
    return Verdict(WORKS, "`engine.resplit`")


def attend(stage: int, w: Any, x: Any, position: Any) -> Any:
    """Adds what the sum of the stage's inputs so far gives."""
    name = f"known{stage}"
    known = engine.get_variable(name, (NUM_TOKENS, WIDTH), initializer="zeros", trainable=False)
    known = jax.lax.dynamic_update_slice(known, x, (position, 0))
    engine.assign(name, known)
    is_known = jnp.arange(NUM_TOKENS) <= position + jnp.arange(len(x))[:, None]
    return x + jnp.tanh(is_known.astype(x.dtype) @ known @ w), position


def generator_of() -> Any:
    """A generator of a model of `speaker`, its variables, and what NumPy says after a word."""
    table, ws, head = speaker()

    def first(p: Any, tokens: Any, position: Any) -> Any:
        return attend(0, p["w"], p["table"][tokens], position)

    def final(p: Any, x: Any, position: Any) -> Any:
        return attend(3, p["w"], x, position)[0] @ p["head"]

    parameters = [{"table": table, "w": ws[0]}, *ws[1:3], {"w": ws[3], "head": head}]
    stages = [first, functools.partial(attend, 1), functools.partial(attend, 2), final]
    generator = engine.Generator(stages, parameters=parameters, max_length=NUM_TOKENS)

    def say(token: int, number: int) -> list[int]:
        known: list[Any] = [0] * 4
        found = []
        for _word in range(number):
            x = table[token]
            for stage, w in enumerate(ws):
                known[stage] = known[stage] + x
                x = x + np.tanh(known[stage] @ w)
            token = int(np.argmax(x @ head))
            found.append(token)
        return found

    variables = {
        "stage0/table": table,
        "stage0/w": ws[0],
        "stage1/parameter": ws[1],
        "stage2/parameter": ws[2],
        "stage3/w": ws[3],
        "stage3/head": head,
    }
    return generator, variables, say


def generation() -> Verdict:
    generator, variables, say = generator_of()
    found = generator.generate(variables, [[1], [2]], max_new_tokens=NUM_TOKENS - 1)
    expected = [say(token, NUM_TOKENS - 1) for token in (1, 2)]
    assert [text.tolist() for text in found] == expected, (found, expected)
    return Verdict(WORKS, "`engine.Generator`")


def continuous_batching() -> Verdict:
    generator, variables, say = generator_of()
    numbers = [7, 3, 5, 2, 6, 4, 7, 1, 3, 5]
    with generator.serving(variables):
        requests = [generator.submit([n], max_new_tokens=number) for n, number in enumerate(numbers)]
        found = [request.result(timeout=60).tolist() for request in requests]
    expected = [say(n, number) for n, number in enumerate(numbers)]
    assert found == expected, (found, expected)
    return Verdict(WORKS, "`Generator.submit`")


def stage_meshes() -> Verdict:
    def part(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "model")

    def product(w: Any, x: Any) -> Any:
        specs = {"in_specs": (P(None, "model"), P("model", None)), "out_specs": P()}
        return jax.shard_map(part, mesh=engine.stage_mesh(), **specs)(x, w)

    def mapped(w: Any, x: Any, target: Any) -> Any:
        return jnp.tanh(product(w, x)), target

    def final(w: Any, x: Any, target: Any) -> Any:
        x = jax.lax.with_sharding_constraint(x, P(None, "model"))
        return jnp.mean((x @ w - target) ** 2)

    parallel = engine.TensorParallel(2, lambda _variable: None)
    pipeline = pipeline_of([mapped, final], tensor_parallel=parallel)
    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    state, _outputs = pipeline.step(state, micro_batches)
    gradients = [jax.grad(plain_loss)(layers(2), *one) for one in micro_batches]
    mean = [sum(parts) / len(parts) for parts in zip(*gradients, strict=True)]
    expected = [w - RATE * np.asarray(g) for w, g in zip(layers(2), mean, strict=True)]
    check_close(jax.device_get(pipeline.parameters(state)), expected)
    return Verdict(WORKS, "`engine.stage_mesh`: `shard_map`, constraints")


def nan_origin() -> Verdict:
    def with_log(w: Any, x: Any, target: Any) -> Any:
        return jnp.mean((x @ w - jnp.log(target)) ** 2)

    pipeline = pipeline_of([hidden, hidden, hidden, with_log], check_nans=True)
    micro_batches = [(draw(2, WIDTH), np.full((2, WIDTH), sign, np.float32)) for sign in (1, 1, -1, 1)]
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    said = said_by(lambda: pipeline.step(state, micro_batches), FloatingPointError)
    assert "stage 3" in said, said
    assert "micro-batch 2" in said, said
    assert "on_engine.py" in said, said
    return Verdict(WORKS, "`check_nans=True` names operation, stage and micro-batch")


def own_check() -> Verdict:
    from jax.experimental import checkify

    def checked(w: Any, x: Any, target: Any) -> Any:
        checkify.check(jnp.all(target > 0), "targets must be positive")
        return hidden(w, x, target)

    pipeline = pipeline_of([hidden, checked, hidden, last])
    micro_batches = [(draw(2, WIDTH), np.full((2, WIDTH), sign, np.float32)) for sign in (1, 1, -1, 1)]
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    said = said_by(lambda: pipeline.step(state, micro_batches), checkify.JaxRuntimeError)
    assert "stage 1 (checked), micro-batch 2" in said, said
    return Verdict(WORKS, "`checkify.check` names stage and micro-batch")


def hang() -> Verdict:
    pipeline = pipeline_of()
    one = micro_batch(2)
    state = pipeline.init(jax.random.key(0), one)
    pipeline.step(state, [one] * 4)
    records: list[str] = []
    told = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())
            told.set()

    logging.getLogger("ipu_pipeline").addHandler(Handler())

    def slow() -> Any:
        yield one
        yield one
        told.wait(90)
        yield one
        yield one

    pipeline.step(state, slow())
    assert records, "no warning"
    assert "micro-batch 2 of the data" in records[0], records[0]
    line = next(line for line in records[0].splitlines() if "waits for" in line)
    return Verdict(WORKS, f"a warning: {line.strip()}")


def debugger() -> Verdict:
    seen = []

    def looking(w: Any, x: Any, target: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            seen.append(np.asarray(x).max())
        return hidden(w, x, target)

    pipeline = pipeline_of([hidden, looking, hidden, last])
    one = micro_batch(2)
    state = pipeline.init(jax.random.key(0), one)
    with jax.disable_jit():
        pipeline.step(state, [one] * 4)
    assert len(seen) == 4
    return Verdict(WORKS, "`jax.disable_jit()`")


def first_step() -> Verdict:
    begin = time.perf_counter()
    pipeline = pipeline_of()
    micro_batches = [micro_batch(2, seed=n) for n in range(4)]
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    state, outputs = pipeline.step(state, micro_batches)
    jax.block_until_ready((state.variables, outputs.collected))
    return Verdict(WORKS, f"{time.perf_counter() - begin:.1f} s, with an update")


def split_advice() -> Verdict:
    wide = [draw(WIDTH, 64), *([draw(64, 64)] * 5), draw(64, WIDTH)]

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def final(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    given = {"num_micro_batches": 4, "optimizer": optax.sgd(RATE)}
    stages = engine.auto_stages([layer] * 6 + [final], 3, draw(4, WIDTH), parameters=wide, **given)
    assert "measured" in str(stages.table), stages.table
    pipeline = pipeline_of()
    one = micro_batch(2)
    pipeline.step(pipeline.init(jax.random.key(0), one), [one] * 4)
    assert "would" in engine.advise(engine.planning.measure_scenario(pipeline)).sentence
    return Verdict(WORKS, "`engine.auto_stages`; `engine.advise` for stages made by hand")


def cannot_trace() -> Verdict:
    def branching(w: Any, x: Any, target: Any) -> Any:
        return (x, target) if x.sum() > 0 else (x @ w, target)

    pipeline = pipeline_of([hidden, branching, hidden, last])
    try:
        pipeline.init(jax.random.key(0), micro_batch(2))
    except jax.errors.TracerBoolConversionError as error:
        (said,) = error.__notes__
    assert "stage 1 (branching)" in said, said
    assert "if x.sum() > 0" in said, said
    return Verdict(WORKS, "JAX's error with stage, shapes and line")
