"""`Program.placement()`: what went where, and what crosses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import engine, loops
from ipu_pipeline.engine.inspect import Edge, Part, Sent
from ipu_pipeline.ground.tables import describe_time
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.reports import program_summary
from ipu_pipeline.scopes import ipu_shard
from tests.support import front


def sharded_body(outfeed):
    def body(rate, x, labels):
        with ipu_shard(0):
            a = x @ ipu.get_variable("a", (12, 8))  # float32[4, 8]
        with ipu_shard(2):
            b = jnp.tanh(a) @ ipu.get_variable("b", (8, 8))
        with ipu_shard(0):
            c = jnp.sin(b)
        with ipu_shard(1):
            loss = jnp.mean((c + a) ** 2) + 0.0 * jnp.sum(labels.astype("float32"))
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(rate), 1)
        return rate, optimizer.minimize(loss), outfeed.enqueue(loss)

    return body


def test_of_a_sharded_loop():
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    infeed = IPUInfeedQueue(front.data())
    program = front.compile_program(
        lambda rate: loops.repeat(2, sharded_body(outfeed), [rate], infeed), inputs=[np.float32(0.1)]
    )
    (call,) = program.placement().calls
    assert call.name == "GradientAccumulationOptimizerV2"
    assert [(p.index, p.ipu, p.variables, p.num_variable_bytes) for p in call.parts] == [
        (0, 0, ("a",), 12 * 8 * 4),
        (1, 2, ("b",), 8 * 8 * 4),
        (2, 0, (), 0),
        (3, 1, (), 0),
    ]
    assert [p.num_operations for p in call.parts[:3]] == [1, 2, 1]
    block = 4 * 8 * 4
    assert call.edges == (
        Edge(None, 0, 4 * 12 * 4, 0),  # x
        Edge(None, 1, 4 * 4, 0),  # labels
        Edge(0, 1, 2 * block, 0),  # a and c
        Edge(0, 2, block, block),  # a; and the gradient of b
        Edge(1, 0, 0, 2 * block),  # the gradients of a and c
        Edge(2, 0, block, block),  # b; and the gradient of a
    )
    assert call.parts[1] == Part(1, 2, 2, ("b",), 256)


def test_of_a_pipeline_and_a_loop_as_a_table():
    model = front.Model()
    placement = model.program.placement()
    first, second = (f"{part.num_operations:<10}" for part in placement.calls[0].parts)
    assert str(placement) == (
        "Pipeline\n"
        "  stage  IPU  device            operations  bytes of variables  variables\n"
        f"  0      0    not selected yet  {first}  832                 first/dense/kernel\n"
        "                                                                first/dense/bias\n"
        f"  1      1    not selected yet  {second}  680                 second/dense/kernel\n"
        "                                                                second/dense/bias\n"
        "per micro-batch:\n"
        "  from   to     bytes forwards  bytes backwards\n"
        "  feed   IPU 0  192             0\n"
        "  feed   IPU 1  16              0\n"
        "  IPU 0  IPU 1  256             0\n"
        "  IPU 1  IPU 0  0               256\n"
        "per weight update:\n"
        "  from   to     bytes  what      read by\n"
        "  IPU 1  IPU 0  4      1 scalar\n"
        "dispatch: one micro-batch per program: a step has fewer than 8 micro-batches\n"
        "advice (by counted operations): A gradient accumulation count of 12 instead of 3 would give 4% "
        "more samples per second (a step on devices of their own takes 380 µs now, and 1.46 ms then). "
        "It changes training: each weight update then takes 12 micro-batches."
    )
    with front.session_of(model) as session:
        model.run(session)
    assert model.program.placement().devices == tuple(map(str, jax.devices()[:2]))
    assert str(jax.devices()[1]) in str(model.program.placement())
    both = front.compile_program(lambda: [loops.repeat(1, lambda: None), loops.repeat(2, lambda: None)])
    assert str(both.placement()).count("Loop\n") == 2
    none = front.compile_program(lambda: 1.0)
    assert str(none.placement()) == "The program has no pipelines and no loops."


def test_what_a_loop_carries_comes_from_the_last_shard():
    def body(count, x, labels):
        with ipu_shard(0):
            a = x @ ipu.get_variable("a", (12, 8)) + count
        with ipu_shard(1):
            return count + jnp.sum(a)

    infeed = IPUInfeedQueue(front.data())
    program = front.compile_program(lambda: loops.repeat(2, body, [np.float32(0)], infeed))
    (call,) = program.placement().calls
    block = 4 * 8 * 4
    assert call.edges == (Edge(None, 0, 4 * 12 * 4, 0), Edge(0, 1, block, 0), Edge(1, 0, 4, 0))
    assert "per iteration:" in str(program.placement())
    alone = front.compile_program(lambda: loops.repeat(2, lambda x: x + 1, [np.float32(0)]))
    assert str(alone.placement()).endswith("per iteration:\n  nothing crosses")


def test_it_neither_selects_devices_nor_minds_too_few():
    front.ipu_config(1).configure_ipu_system()
    placement = front.Model().program.placement()
    assert len(placement.devices) == 1
    assert "not selected yet" in str(placement)


def test_one_ipu_needs_no_edges_but_the_feed():
    model = front.Model(device_mapping=[0, 0])
    (call,) = model.program.placement().calls
    assert call.edges == (Edge(None, 0, 4 * 12 * 4 + 4 * 4, 0),)


def test_of_variables_that_stages_share():
    def times(x, scope, reuse=False):
        with ipu.variable_scope(scope, reuse=reuse):
            return x @ ipu.get_variable("w", (12, 12))

    def first(x, labels):
        return times(x, "tied"), labels

    def middle(x, labels):
        return times(x, "middle"), labels

    def last(x, labels):
        return jnp.mean(times(x, "tied", reuse=True) ** 2) + 0.0 * jnp.sum(labels.astype("float32"))

    size = 12 * 12 * 4
    copied = (
        Sent(0, 2, "tied/w", size, "stage 2"),
        Sent(2, 0, "gradient of tied/w", size, "the sum at its owner"),
    )
    for mapping, sent in [([0, 1, 2], copied), ([0, 1, 0], ())]:
        program = front.compile_pipeline(
            [first, middle, last],
            2,
            infeed_queue=IPUInfeedQueue(front.data()),
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            device_mapping=mapping,
            optimizer_function=lambda loss: front.optimizer_function(0.1, loss),
        )
        (call,) = program.placement().calls
        assert call.parts[0].variables == ("tied/w",)
        assert call.parts[2].variables == (("tied/w (a copy)",) if sent else ())
        assert call.parts[2].num_variable_bytes == (size if sent else 0)
        assert call.sent == sent
        assert ("gradient of tied/w" in str(program.placement())) == bool(sent)


def test_it_has_the_advice_of_the_page_and_of_the_engine():
    """Counted before anything is measured, and then by what was: the same move of a whole layer."""
    names = [[f"block_{number}" for number in own] for own in (range(4), [4])]

    def make_stage(index):
        def stage(parameters, x):
            for name in names[index]:
                x = jnp.tanh(x @ parameters[name]["up"]["kernel"]) @ parameters[name]["down"]["kernel"]
            return jnp.mean(x) if index else x

        kernel = {"kernel": np.ones((64, 64), np.float32)}
        return engine.Stage(stage, {name: {"up": kernel, "down": kernel} for name in names[index]})

    pipeline = engine.Pipeline(
        [make_stage(0), make_stage(1)],
        num_micro_batches=8,
        optimizer=optax.sgd(0.1),
    )
    pipeline.trace(np.ones((64, 64), np.float32))
    counted = str(
        program_summary.Placement((engine.inspect.find_facts(pipeline),), (), ((),))
    ).splitlines()[-1]
    assert counted.startswith("advice (by counted operations): Stage 0 is the bottleneck: ")
    assert "Moving stage0/block_3 from stage 0 to 1 would give " in counted
    scenario = dataclasses.replace(engine.planning.measure_scenario(pipeline), cores=None)
    measured = str(
        program_summary.Placement((engine.inspect.find_facts(pipeline),), (), ((),))
    ).splitlines()[-1]
    present, *others = engine.what_if(scenario, counts=[])
    assert "stage0/block_3 from stage 0 to 1" in {row.split for row in others}
    told = engine.advise(scenario).sentence.partition(" (a step takes")[0]
    takes = f"a step on devices of their own takes {describe_time(1e6 * present.step_time)} now"
    assert measured.startswith(f"advice (measured): {told} ({takes}, and ")
