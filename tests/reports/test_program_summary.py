"""`Program.summary()` and `summarize`: what a program will need and do, before it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from examples import gpt
from ipu_pipeline import engine, loops
from ipu_pipeline.engine.inspect import summarize
from ipu_pipeline.engine.inspect.layers import find_layers, select_layers
from ipu_pipeline.engine.option_types import ONE_BY_ONE, Chunking
from ipu_pipeline.engine.planning import plan_memory, with_dispatch_plan
from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario
from ipu_pipeline.engine.schedules.schedule_definitions import interleaved
from ipu_pipeline.engine.schedules.simulator import simulate
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.pipelining_ops import (
    OptimizerFunctionOutput,
    RecomputationMode,
    pipeline,
)
from tests.support import forked, front
from tests.support.programs import environment

SMALL = """\
Pipeline: 2 stages on 2 IPUs, schedule grouped, 3 micro-batches per weight update
  378 parameters, 1.48 KiB, all trained
  stage  IPU  layers        parameters   size  sends  returns  holds  in flight  keeps     forward  \
  backward
  0      0    first/dense          208  832 B  256 B           256 B          3  768 B  3.62 kflop  \
3.30 kflop
  1      1    second/dense         170  680 B           256 B                           8.71 kflop
per micro-batch: sends to other IPUs, returns gradients to them, holds values until its backward
keeps: values held for all micro-batches in flight; forward, backward: estimated operations; \
the last stage does both in its forward
bubble: 29.1% of a step, estimated from these operations (25.0% if all actions took equally long)
busiest IPU: 1, with 56% of all operations
dispatch: one micro-batch per program: a step has fewer than 8 micro-batches"""


def test_of_a_small_model():
    program = front.Model().program
    assert str(program.summary()) == SMALL
    (call,) = program.summary().calls
    assert [stage.num_parameters for stage in call.stages] == [12 * 16 + 16, 16 * 10 + 10]
    assert call.num_parameter_bytes == 4 * call.num_parameters == 4 * call.num_trained
    plan = plan_memory(program.calls[0].pipeline)
    assert [stage.num_held_bytes for stage in call.stages] == [stage.num_held_bytes for stage in plan]
    assert [stage.num_live_bytes for stage in call.stages] == [stage.num_live_bytes for stage in plan]
    # The products of the layers alone: 2 x batch x inputs x outputs.
    assert call.stages[0].num_forward_flop >= 2 * 4 * 12 * 16


def trace_products(num_micro_batches, **options):
    """Two stages that multiply."""
    made = engine.Pipeline(
        [lambda w, x: x * w, lambda w, x: jnp.mean(x * w)],
        parameters=[np.float32(2)] * 2,
        num_micro_batches=num_micro_batches,
        optimizer=optax.sgd(0.1),
        **options,
    )
    made.trace(np.ones(3, np.float32))
    return summarize(made)


def test_of_stages_of_which_only_the_last_is_trained():
    """No stage has a backward of its own: the last one's is part of its forward."""
    summary = trace_products(2, trained=["stage1/parameter"])
    assert "2 parameters, 8 B, 1 trained" in str(summary)
    assert summary.bubble.lock_step_share == pytest.approx(1 / 3)


CODE = """
import jax
from jax._src import xla_bridge
from tests.support import front
summary = front.Model().program.summary()
print(summary)
assert not xla_bridge.backends_are_initialized()
"""


def test_of_backwards_in_halves():
    made = trace_gpt((1,) * 3, "zero_bubble", count=8)
    summary, plan = summarize(made), plan_memory(made)
    assert [stage.num_live_bytes for stage in summary.stages] == [stage.num_live_bytes for stage in plan]
    assert [stage.is_halved for stage in summary.stages] == [True] * len(plan)
    assert "the last stage does input gradients in its forward" in str(summary)
    assert summary.bubble.lock_step_share == pytest.approx(2 / (3 * 8 + 2))
    # The first stage has no program for input gradients, and the last one does them in its forward.
    forward, first, second = (
        [0.0 if own is None else own.num_operations for own in programs]
        for programs in zip(*((p.forward, p.backward, p.weights) for p in made.programs), strict=True)
    )
    assert first[0] == first[-1] == 0
    both = [sum(own) for own in zip(first, second, strict=True)]
    costs = Costs.of(3, forward=forward, backward=both, weight_gradients=second)
    timeline = simulate(Scenario(costs, "zero_bubble", 8)).free_running
    assert summary.bubble.share == pytest.approx(1 - timeline.utilisation)


def test_nothing_starts_and_nothing_compiles():
    done = forked.run(CODE, environment(as_tests=True))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{SMALL}\n"


def trace_gpt(layers, schedule="grouped", count=64, plan=ONE_BY_ONE, **sizes):
    config = gpt.Config(layers, **{"width": 8, "heads": 2, "context": 12, "vocabulary": 20, **sizes})
    shapes = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    made = engine.Pipeline(
        gpt.make_stages(config, is_training=True),
        parameters=shapes,
        optimizer=optax.adamw(1e-3),
        num_micro_batches=count,
        schedule=schedule,
        dispatch_plan=plan,
    )
    made.trace((jax.ShapeDtypeStruct((2, config.context), np.int32),) * 2)
    return made


def test_a_gpt_of_12_blocks_fits_40_lines():
    made = trace_gpt((3,) * 4)
    summary = summarize(made)
    lines = str(summary).splitlines()
    assert len(lines) <= 40
    width, vocabulary, context = 8, 20, 12
    block = 2 * width + 3 * width**2 + width**2 + 8 * width**2
    assert summary.num_parameters == 12 * block + vocabulary * width + context * width + width
    assert sum("characters" in line and line.startswith("shared") for line in lines) == 1
    assert f"shared: characters ({vocabulary * width * 4} B) by stages 0, 3" in lines
    assert summary.bubble.lock_step_share == pytest.approx(3 / (64 + 3))
    chunked = summarize(with_dispatch_plan(made, Chunking(4)))
    assert chunked.bubble.lock_step_share == pytest.approx(3 / (16 + 3))
    assert "64 micro-batches per weight update, 4 per program\n" in str(chunked)
    assert len(str(chunked).splitlines()) <= 40


def make_block_stage(numbers, name="block_{}"):
    def stage(x, labels):
        for number in numbers:
            with ipu.variable_scope(name.format(number)):
                with ipu.variable_scope("attention"):
                    x = ipu.layers.Dense(12)(x)
                with ipu.variable_scope("mlp"):
                    x = ipu.layers.Dense(12)(ipu.layers.Dense(24)(x))
        return x, labels

    return stage


def compile_stages(*stages, trains=True, **options):
    def last(x, labels):
        return jnp.mean(x**2)

    def optimize(loss):
        return OptimizerFunctionOutput(optax.adam(0.1), loss)

    return front.compile_pipeline(
        [*stages, last],
        4,
        infeed_queue=IPUInfeedQueue(front.data()),
        outfeed_queue=IPUOutfeedQueue(),
        optimizer_function=optimize if trains else None,
        **options,
    )


def test_equal_layers_and_equal_stages_are_told_once():
    program = compile_stages(make_block_stage(range(3)), make_block_stage(range(3, 9)))
    lines = str(program.summary()).splitlines()
    sizes = {line.split()[0]: line.split()[1] for line in lines if line.strip().startswith("block_")}
    assert sizes["block_{0..2}/attention/dense"] == f"{3 * (12 * 12 + 12)}"
    assert sizes["block_{3..8}/mlp/dense"] == f"{6 * (12 * 24 + 24):,}"
    stages = [make_block_stage([number]) for number in range(35)]
    made = engine.Pipeline([*stages, lambda x, _labels: x], num_micro_batches=100)
    made.trace((jax.ShapeDtypeStruct((4, 12), np.float32), jax.ShapeDtypeStruct((4,), np.int32)))
    lines = str(summarize(made)).splitlines()
    assert len(lines) <= 40
    (line,) = (line for line in lines if "0..34" in line)
    assert line.split()[:3] == ["0..34", "0..34", "block_{0..34}"]
    assert f"35 x {12 * 12 + 12 + 12 * 24 + 24 + 24 * 12 + 12}" in line
    assert len(summarize(made).stages) == 36


def test_names_with_odd_characters(capsys):
    odd = "\x1b[31m\n</script>\u202e {1..2} \N{PILE OF POO}" + "x" * 80

    def stage(x, labels):
        with ipu.variable_scope(odd):
            x = x @ ipu.get_variable("w", (12, 12)) + ipu.get_variable("...9..", (12,))
        return x * ipu.get_variable("." * 3000, ()), labels

    text = str(compile_stages(stage).summary())
    assert len(text.splitlines()) == 13
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "\\x1b[31m\\n</scr" in text


def test_variables_that_stages_share_and_parallel_stages():
    def tied(x, labels):
        with ipu.variable_scope("tied", reuse=True):
            return x @ ipu.get_variable("w", (12, 12)), labels

    def join(x, labels, other, _labels):
        return tied(x + other, labels)

    program = compile_stages(tied, [make_block_stage([0]), make_block_stage([1])], join)
    (call,) = program.summary().calls
    (shared,) = call.shared
    assert shared.stages == (0, 3)
    assert [spec.name for spec in shared.variables] == ["tied/w"]
    assert [stage.num_parameters for stage in call.stages] == [144, 768, 768, 0, 0]
    lines = str(call).splitlines()
    assert "shared: tied/w (576 B) by stages 0, 3" in lines
    assert "parallel: stages 1..2" in lines
    assert [stage.level for stage in call.stages] == [0, 1, 1, 2, 3]


def test_what_is_sent_agrees_with_the_placement():
    program = compile_stages(make_block_stage([0]), make_block_stage([1]), make_block_stage([2]))
    (call,), (placement,) = program.summary().calls, program.placement().calls
    assert [stage.num_sent_bytes for stage in call.stages] == [192, 192, 192, 0]
    assert [stage.num_returned_bytes for stage in call.stages] == [0, 192, 192, 192]
    sent = sum(edge.num_forward_bytes for edge in placement.edges if edge.source is not None)
    assert sum(stage.num_sent_bytes for stage in call.stages) == sent
    returned = sum(edge.num_backward_bytes for edge in placement.edges)
    assert sum(stage.num_returned_bytes for stage in call.stages) == returned


def test_of_inference_several_pipelines_and_loops():
    def body(count, x, labels):
        with ipu.scopes.ipu_shard(0):
            x = x @ ipu.get_variable("a", (12, 8))
        with ipu.scopes.ipu_shard(1):
            loss = jnp.sum(x @ ipu.get_variable("b", (8, 8)))
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 3)
        return count + 1, optimizer.minimize(loss)

    infeeds = [IPUInfeedQueue(front.data()) for _ in range(2)]

    def several():
        inference = pipeline(
            [lambda x, labels: x @ ipu.get_variable("w", (12, 12))],
            gradient_accumulation_count=2,
            infeed_queue=infeeds[0],
            outfeed_queue=IPUOutfeedQueue(),
            name="evaluation",
        )
        return loops.repeat(6, body, [np.float32(0)], infeeds[1]), inference

    inference, loop = front.compile_program(several).summary().calls
    assert str(inference).splitlines()[0] == (
        "evaluation: 1 stage on 1 IPU, schedule grouped, 2 micro-batches per execution, no training"
    )
    assert "backward" not in str(inference)
    assert "keeps" not in str(inference)
    assert "bubble: none, as everything is on one IPU" in str(inference)
    assert str(loop).splitlines()[0] == (
        "GradientAccumulationOptimizerV2: 2 parts on 2 IPUs, a weight update every 3 iterations"
    )
    assert [stage.num_parameters for stage in loop.stages] == [96, 64]
    assert loop.bubble.lock_step_share == pytest.approx(0.5)
    assert str(front.compile_program(lambda: 1.0).summary()) == "The program has no pipelines and no loops."


def test_recomputation_counts_once_it_is_configured():
    options = {"recomputation_mode": RecomputationMode.RecomputeAndBackpropagateInterleaved}
    program = compile_stages(make_block_stage([0]), make_block_stage([1]), **options)
    (before,) = program.summary().calls
    front.ipu_config(4, allow_recompute=True).configure_ipu_system()
    (after,) = program.summary().calls
    assert after.stages[1].num_held_bytes < before.stages[1].num_held_bytes
    assert after.stages[1].num_backward_flop > before.stages[1].num_backward_flop
    held = [stage.num_held_bytes for stage in before.stages]
    assert [stage.num_held_bytes for stage in plan_memory(program.calls[0].pipeline)] == held


def test_weights_of_losses_are_nobodys():
    def optimize(loss):
        return OptimizerFunctionOutput(optax.sgd(0.1), loss, loss_weight=jnp.float32(2))

    program = front.compile_pipeline(
        [lambda x, labels: jnp.sum(x @ ipu.get_variable("w", (12, 2)))],
        2,
        infeed_queue=IPUInfeedQueue(front.data()),
        outfeed_queue=IPUOutfeedQueue(),
        optimizer_function=optimize,
    )
    assert program.summary().calls[0].num_parameters == 24


def test_a_number_of_micro_batches_that_is_known_at_run_only():
    made = trace_gpt((1, 1, 1), count=None)
    unknown, known = summarize(made), summarize(made, 8)
    assert unknown.bubble is None
    assert "it depends on the number of micro-batches" in str(unknown)
    assert "as many micro-batches as a run says per weight update" in str(unknown)
    assert [s.in_flight for s in unknown.stages] == [s.in_flight for s in known.stages] == [5, 3, 1]
    assert known.bubble.lock_step_share == pytest.approx(2 / 10)


def test_long_steps_are_estimated_from_shorter_ones(monkeypatch):
    made = trace_gpt((2, 1, 3), "interleaved", count=100)
    whole = summarize(made).bubble.share
    monkeypatch.setattr("ipu_pipeline.engine.inspect.estimates._MAX_SIMULATED", 200)
    assert summarize(made).bubble.share == pytest.approx(whole, abs=1e-3)
    assert 0 < whole < 1


def test_a_schedule_of_ones_own():
    assert "schedule of your own" in str(trace_products(4, schedule=interleaved))


def test_what_is_not_counted_is_said():
    def first(x, labels):
        return jax.pure_callback(np.sin, x, x) @ ipu.get_variable("w", (12, 12)), labels

    program = compile_stages(first, trains=False)
    assert "operations of pure_callback are not counted" in str(program.summary())
    assert program.summary().calls[0].stages[0].uncounted == {"pure_callback"}


def names(*given, limit=6):
    specs = [VariableSpec(name, (2,), np.dtype("float32"), None, True) for name in given]
    found = find_layers(specs)
    assert sum(layer.num_parameters for layer in found) == 2 * len(given)
    selected = select_layers(found, limit)
    assert sum(layer.num_bytes for layer in selected) == 8 * len(given)
    return [layer.name for layer in selected]


def test_layers_by_name():
    assert names() == []
    assert names("w") == ["w"]
    assert names("w", "b") == ["w, b"]
    assert names("dense/kernel", "dense/bias") == ["dense"]
    assert names("m/a/w", "m/b/w", "m/scale", "m/offset") == ["m/a", "m/b", "m/(scale, offset)"]
    torch = [f"layers.{number}.{name}" for number in range(12) for name in ("weight", "bias")]
    assert names(*torch) == ["layers.{0..11}"]
    assert names("h/a_01/w", "h/a_02/w", "h/a_04/w", "h/b/w") == ["h/a_{01..02}", "h/a_04", "h/b"]
    assert names("x1y1/w", "x1y2/w", "x1y3/v") == ["x1y{1..2}", "x1y3"]
    assert names("x9/w", "x10/w", "x11/w/v", "x11/w") == ["x{9..10}", "x11/w", "x11/w"]
    assert names("a.", "a.b") == ["a"]
    assert names("\u0663/w", "\u0664/w") == ["\u0663", "\u0664"]  # digits that are not counted on
    assert names("a/b/c", "a/d/e/f", "a/d/g/h", limit=2) == ["a/b", "a/d"]
    assert names("a/b/c", "a/d/e/f", "a/d/g/h", limit=3) == ["a/b", "a/d/e", "a/d/g"]
    assert names(*(f"w_{number}" for number in range(100))) == ["w_{0..99}"]
