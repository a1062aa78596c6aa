"""scratch"""
from __future__ import annotations
import functools, json, sys, time
from typing import Any
import numpy as np

def measure(side, case):
    import jax
    import optax
    from benchmarks.first_step import models
    from ipu_pipeline import engine
    if side != "plain":
        jax.config.update("jax_num_cpu_devices", models.NUM_STAGES)
    jax.devices()
    key = jax.block_until_ready(jax.random.key(0))
    model = models.Gpt(case)
    spent = {}
    parts = {"trace": "/jax/core/compile/jaxpr_trace_duration", "lower":"/jax/core/compile/jaxpr_to_mlir_module_duration", "xla":"/jax/core/compile/backend_compile_duration"}
    names = {v:k for k,v in parts.items()}
    def note(event, seconds, **rest):
        if event in names:
            spent.setdefault(names[event], []).append(seconds)
    jax.monitoring.register_event_duration_secs_listener(note)
    clock = [(time.perf_counter(), time.process_time())]
    def tick():
        clock.append((time.perf_counter(), time.process_time()))
    if side != "plain":
        table = lambda p: {k: engine.Shared("table", v) if k == "table" else v for k, v in p.items()}
        pipeline = engine.Pipeline(
            [engine.Stage(functools.partial(f, engine.next_rng_key), table(p)) for f, p in zip(model.stages, model.parameters)],
            num_micro_batches=models.NUM_MICRO_BATCHES, loss=lambda loss: loss, optimizer=models.make_optimizer(), donate=True, reduction="mean")
        pipeline.trace(model.micro_batches[0])
        tick()
        pipeline.prepare()
        tick()
        state = pipeline.init(key, model.micro_batches[0])
        tick()
        pipeline.compile(state)
        tick()
        state, outputs = pipeline.step(state, model.micro_batches)
        jax.block_until_ready((state, outputs.losses))
        tick()
        losses = np.asarray(jax.device_get(outputs.losses)).tolist()
        labels = ["trace", "prepare", "init", "compile", "step"]
    else:
        optimizer = models.make_optimizer()
        params = jax.device_put(model.parameters)
        params[-1].pop("table")
        def loss(params, key, tokens, targets):
            params = [*params[:-1], {**params[-1], "table": params[0]["table"]}]
            keys = iter(jax.random.split(key, 8))
            next_key = lambda: next(keys)
            values = tokens, targets
            for f, p in zip(model.stages[:-1], params[:-1]):
                values = f(next_key, p, *values)
            return model.stages[-1](next_key, params[-1], *values)
        @functools.partial(jax.jit, donate_argnums=(0,1))
        def step(params, state, key, batches):
            def accumulate(total, own):
                number, batch = own
                value, gradient = jax.value_and_grad(loss)(params, jax.random.fold_in(key, number), *batch)
                return jax.tree.map(jnp.add, total, gradient), value
            jnp = jax.numpy
            zeros = jax.tree.map(jnp.zeros_like, params)
            n = models.NUM_MICRO_BATCHES
            total, losses = jax.lax.scan(accumulate, zeros, (jnp.arange(n), batches))
            total = jax.tree.map(lambda g: g / n, total)
            changes, state = optimizer.update(total, state, params)
            return optax.apply_updates(params, changes), state, losses
        batches = tuple(np.stack(p) for p in zip(*model.micro_batches))
        state = jax.jit(optimizer.init)(params)
        tick()
        traced = step.trace(params, state, key, batches)
        tick()
        lowered = traced.lower()
        tick()
        compiled = lowered.compile()
        tick()
        out = step(params, state, key, batches)
        jax.block_until_ready(out)
        tick()
        losses = np.asarray(out[2]).tolist()
        labels = ["init", "trace", "lower", "compile", "step"]
    print(json.dumps(dict(side=side, case=case,
        seconds=round(clock[-1][0]-clock[0][0],2), cpu=round(clock[-1][1]-clock[0][1],2),
        split={l: (round(b[0]-a[0],2), round(b[1]-a[1],2)) for l,a,b in zip(labels, clock, clock[1:])},
        jax={k: (len(v), round(sum(v),2)) for k,v in spent.items()}, losses=[round(l,5) for l in losses[:3]])))

measure(*sys.argv[1:])
