"""Wrong calls: the stated error, from Python, before anything compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.engine import schedules
from ipu_pipeline.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule, pipeline
from tests.support import front, models


def compile_with(**options):
    """Compiles a program; whatever comes of it, XLA is not asked."""
    events = []

    def listen(event, _duration, **_details):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        front.Model(**options)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        assert not [event for event in events if "backend_compile" in event or "mlir" in event]


COUNT, STAGES = "gradient_accumulation_count", "computational_stages"
OPTIMIZER, OUTFEED, LOSS = "optimizer_function", "outfeed_queue", "outfeed_loss"
DTYPE = "gradient_accumulation_dtype"
FIRST, SECOND = front.first_stage, front.second_stage


def optimizing(optimizer, **fields):
    return {OPTIMIZER: lambda rate, loss: OptimizerFunctionOutput(optimizer, loss, **fields)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"continuous_weight_updates": None}, TypeError, "weight_updates must be False; got None"),
        ({"name": ""}, TypeError, "name must be a non-empty string, or None; got ''"),
        ({DTYPE: "float8_e4m3fn"}, ValueError, "mix float8.* of variable first/dense/kernel"),
        (
            {OPTIMIZER: lambda loss: loss},
            TypeError,
            r"takes \(loss\), but what the last stage returns gives it",
        ),
        ({"continuous_weight_updates": True}, NotImplementedError, "Continuous weight updates are"),
        ({COUNT: None}, ValueError, "^gradient_accumulation_count must be specified."),
        ({COUNT: 0}, ValueError, "gradient_accumulation_count must be .*got 0"),
        ({COUNT: 2**31}, ValueError, "gradient_accumulation_count must be"),
        ({COUNT: 2.5}, TypeError, "gradient_accumulation_count must be .*2.5"),
        ({COUNT: ipu.placeholder(np.float32)}, TypeError, r"must be an integer scalar; got float32\[\]"),
        ({"repeat_count": 0}, ValueError, "repeat_count must be from 1.*got 0"),
        ({STAGES: front.first_stage}, TypeError, "computational_stages argument needs to be a list or a"),
        ({STAGES: []}, ValueError, "at least one stage"),
        ({STAGES: [1]}, TypeError, r"computational_stages\[0\] must be a function; got 1"),
        ({STAGES: [FIRST, [], SECOND]}, ValueError, r"s\[1\] must have .* list is empty"),
        (
            {STAGES: [[FIRST, abs], SECOND], "device_mapping": [0, 1]},
            ValueError,
            r"device_mapping\[0\] must be a list of 2 IPUs, as computational_stages\[0\] is; got 0",
        ),
        ({"infeed_queue": []}, TypeError, "infeed_queue is not an instance of ipu_infeed_queue"),
        ({OUTFEED: []}, TypeError, "outfeed_queue is not an instance of ipu_outfeed_queue"),
        ({OPTIMIZER: optax.sgd(0.1)}, TypeError, "optimizer_function must be a function"),
        (
            {OPTIMIZER: lambda rate, loss: loss},
            TypeError,
            "must return a pipelining_ops.OptimizerFunctionOutput",
        ),
        (optimizing("sgd"), TypeError, "opt must be an optax.GradientTransformation"),
        (
            optimizing(optax.MultiSteps(optax.sgd(0.1), 2)),
            TypeError,
            r"got MultiSteps, of which \.gradient_transformation\(\) gives one",
        ),
        (
            {OPTIMIZER: lambda rate, loss: OptimizerFunctionOutput(optax.sgd(1), loss[None])},
            ValueError,
            r"loss must be a scalar, but it has shape \(1,\)",
        ),
        ({"pipeline_schedule": "fast"}, ValueError, "pipeline_schedule must be one of grouped.*got 'fast'"),
        ({"pipeline_schedule": PipelineSchedule.Looped}, ValueError, r"Looped needs a .*got \[0, 1\]"),
        ({"device_mapping": 0}, TypeError, "device_mapping argument needs to be a list or a tuple"),
        ({"device_mapping": [0]}, ValueError, "Each stage must be mapped to an IPU: 1 mappings != 2"),
        ({"device_mapping": [0, -1]}, ValueError, r"device_mapping\[1\] is -1"),
        ({"pipeline_schedule": 3}, TypeError, "not a member of the PipelineSchedule enumeration"),
        ({"reduction_method": "MEDIAN"}, ValueError, "'MEDIAN' as one of GradientAccumulationReductionM"),
        ({OPTIMIZER: None}, ValueError, "An optimizer_function must be provided when outfeed_loss is True"),
        ({OUTFEED: None}, ValueError, "An outfeed_queue must be provided when outfeed_loss is True"),
        ({OUTFEED: None, LOSS: False}, ValueError, r"^The last .* has .*: float32\[\], float32\[\], but"),
        ({STAGES: [lambda rate, x, y: (rate, jnp.mean(x))]}, ValueError, "No variables to optimize"),
        (
            optimizing(optax.sgd(0.1), compute_gradients_args=[["nope"]]),
            ValueError,
            "'nope' to train does not exist",
        ),
        (
            {STAGES: [FIRST, lambda rate, x: (rate, jnp.mean(x))]},
            TypeError,
            r"stage 1 \(<lambda>\) takes \(rate, x\), but what stage 0 \(first_stage\) returns gives it "
            r"\(float32\[\], float32\[4, 16\], int32\[4\]\)",
        ),
    ],
)
def test_wrong_calls(options, error, message):
    with pytest.raises(error, match=message):
        compile_with(**options)


def run(model, num_runs=1, rate=0.1):
    """What each run enqueues, and the variables afterwards."""
    with front.session_of(model, seed=5) as session:
        return [model.run(session, rate) for _run in range(num_runs)], session.variables


def right(rate, x, labels):
    del rate, labels
    with ipu.variable_scope("right"):
        return ipu.layers.Dense(16, activation=jnp.tanh)(x)


def join(rate, x, labels, y):
    return front.second_stage(rate, x + y, labels)


def both(rate, x, labels):
    return *front.first_stage(rate, x, labels), right(rate, x, labels)


def test_parallel_stages():
    parallel = front.Model(computational_stages=[[front.first_stage, right], join])
    assert parallel.program.num_ipus == 3
    placed = {"device_mapping": [[2, 0], 1]}
    mapped = front.Model(computational_stages=[(front.first_stage, right), join], **placed)
    assert mapped.program.calls[0].pipeline.device_mapping == (2, 0, 1)
    expected = run(front.Model(computational_stages=[both, join]))
    models.assert_trees_close(run(mapped), expected)


def test_schedules():
    """Each has as many micro-batches in flight as the engine's; whose tests compare numbers."""
    expected = {
        PipelineSchedule.Grouped: (6, 5, 3, 1),
        PipelineSchedule.Sequential: (1, 1, 1, 1),
        PipelineSchedule.ZeroBubble: (4, 4, 3, 4),
        PipelineSchedule.LoopedZeroBubble: (4, 4, 2, 2),
        PipelineSchedule.VMin: (2, 2, 2, 1),
    }
    mappings = {PipelineSchedule.LoopedZeroBubble: [0, 1, 0, 1], PipelineSchedule.VMin: [0, 1, 1, 0]}
    in_flight = {}
    for schedule in expected:
        options = {STAGES: [FIRST, *[lambda *values: values] * 2, SECOND], COUNT: 6}
        options |= {"pipeline_schedule": schedule, "device_mapping": mappings.get(schedule)}
        made = front.Model(**options).program.calls[0].pipeline
        in_flight[schedule] = made.timetable(6).in_flight
    assert in_flight == expected


def test_the_best_schedule_for_the_stages_own_costs():
    searched = PipelineSchedule.searched(10**8)
    models.assert_trees_close(*(run(front.Model(pipeline_schedule=one)) for one in (searched, None)))
    with pytest.raises(ValueError, match="bytes_per_ipu must be an integer of at least 1, or None; got 0"):
        PipelineSchedule.searched(0)
    model = front.Model(pipeline_schedule=PipelineSchedule.searched(1))
    with pytest.raises(ValueError, match="bytes_per_ipu must be enough .*; device 0 needs"):
        run(model, 1)


def test_schedules_by_other_names_functions_and_files(tmp_path):
    path = tmp_path / "plan.csv"
    schedules.write_csv(schedules.all_forwards(2, 3, [0, 1]), path)
    for schedule in ("gpipe", schedules.all_forwards, path):
        model = front.Model(pipeline_schedule=schedule)
        assert model.program.calls[0].pipeline.timetable(3).in_flight == (3, 3)


def test_names_keep_optimizers_apart():
    def compile_one(name, repeat_count):
        stages = [lambda: jnp.square(ipu.get_variable("v", (), initializer=1.0))]
        options = {"repeat_count": repeat_count, "name": name}
        return front.Pipelined(stages, 1, optimizer=optax.sgd(0.25, 0.5), **options).program

    with ipu.Session() as session:
        session.run(compile_one(None, 1))
        assert session.variables["v"] == 0.5
        session.run(compile_one("other", 2))
        assert session.update_count() == session.update_count("Pipeline") == 1
        assert session.update_count("other") == 2
        assert session.variables["v"] == 0.0  # with the first one's momentum it would be -0.25


def test_outside_of_scopes():
    with pytest.raises(RuntimeError, match="not placed on an IPU device"):
        ipu.ipu_compiler.compile(lambda: None)
    with pytest.raises(RuntimeError, match="not placed on an IPU device"):
        pipeline([lambda: 1], gradient_accumulation_count=1)
    with pytest.raises(ValueError, match="must be like"), ipu.scopes.ipu_scope("/device:CPU:0"):
        pass
    with pytest.raises(TypeError, match=r"inputs\[0\] must be a placeholder or an array"):
        front.compile_program(lambda x: x, inputs=["x"])


def test_captured_values():
    rate = ipu.placeholder(np.float32, name="rate")

    def with_stage(stage):
        front.compile_program(
            lambda given: pipeline([lambda: stage(given)], gradient_accumulation_count=1), inputs=[rate]
        )

    message = r"Trying to capture the tensor rate \(float32\[\]\) in stage 0.*`inputs` or the infeed"
    with pytest.raises(ValueError, match=message):
        with_stage(lambda given: given * 2)
    with pytest.raises(ValueError, match=r"Trying to capture the tensor float32"):
        front.compile_program(
            lambda given: pipeline([lambda given=given * 2: given + 1], gradient_accumulation_count=1),
            inputs=[rate],
        )
    with pytest.raises(ValueError, match=r"explicitly convert your object using jax.numpy.array"):
        with_stage(lambda given: jax.lax.mul(np.float32(1), rate))


def test_pipelines_do_not_nest():
    def stage(x):
        pipeline([lambda x: None], gradient_accumulation_count=1, inputs=[x])
        return x

    with pytest.raises(RuntimeError, match="within a computational stage; pipelines do not nest"):
        front.compile_pipeline([stage], 1, inputs=[1.0])
    with pytest.raises(ValueError, match="a loop of ipu.loops is called inside the body of scan"):
        front.compile_program(
            lambda x: jax.lax.scan(lambda carry, _element: (stage(carry), None), x, None, length=2)[0],
            inputs=[np.float32(1)],
        )


def test_two_structures_of_optimizer_state_under_one_name():
    def train(optimizer, name):
        queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        options = {"optimizer_function": front.minimizing(optimizer), "outfeed_queue": queue}
        pipeline([lambda: jnp.sum(ipu.get_variable(name, (2,)))], 1, **options)

    def function():
        train(optax.sgd(0.1), "a")
        train(optax.adam(0.1), "b")

    with pytest.raises(ValueError, match="Two pipelines of the program are named 'Pipeline'"):
        front.compile_program(function)


def test_an_outfeed_is_bound_by_what_compiled():
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def compile_one(stages):
        def function():
            pipeline(stages, gradient_accumulation_count=1, inputs=[1.0], outfeed_queue=queue)
            if len(stages) == 1:
                raise KeyError("wrong")

        return front.compile_program(function)

    with pytest.raises(KeyError):
        compile_one([lambda x: (x, x)])
    compile_one([lambda x: x, lambda x: x])
    with pytest.raises(ValueError, match="holds elements of one structure"):
        compile_one([lambda x: x, lambda x: (x, x)])


def test_warnings_about_arguments_without_effect():
    with pytest.warns(UserWarning, match="reduction_method will have no effect"):
        compile_with(optimizer_function=None, outfeed_loss=False, reduction_method="mean")
    with pytest.warns(UserWarning, match="outfeed_queue will stay empty"):
        front.Pipelined([lambda: None], 1)


def test_an_outfeed_enqueued_to_twice():
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def function():
        for _time in range(2):
            pipeline([lambda: 1.0], gradient_accumulation_count=1, outfeed_queue=queue)

    with pytest.raises(ValueError, match="enqueued to only once"):
        front.compile_program(function)


def test_var_list_and_extra_arguments_of_the_update():
    def update(gradients, state, parameters, *, factor):
        return {name: -factor * g for name, g in gradients.items()}, state

    def trains_biases(rate, loss):
        optimizer = optax.GradientTransformationExtraArgs(lambda parameters: (), update)
        fields = {
            "apply_gradients_kwargs": {"factor": rate},
            "compute_gradients_args": [["first/dense/bias"]],
        }
        return OptimizerFunctionOutput(optimizer, loss, **fields)

    model = front.Model(optimizer_function=trains_biases)
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        before = session.variables
        session.run(model.initializer)
        model.run(session)
        after = session.variables
    assert [n for n in before if not np.array_equal(before[n], after[n])] == ["first/dense/bias"]


def test_a_dict_of_the_last_stage_is_one_argument_or_several():
    """As Graphcore passes it, or its entries by name where the optimizer function has their names."""

    def last(*values):
        return dict(zip(("rate", "training_loss"), SECOND(*values), strict=True))

    def as_one(outputs):
        return OptimizerFunctionOutput(optax.sgd(outputs["rate"]), outputs["training_loss"])

    def by_name(rate, training_loss):
        return OptimizerFunctionOutput(optax.sgd(rate), training_loss)

    found = []
    for stage, function in ((SECOND, by_name), (last, by_name), (last, as_one)):
        model = front.Model(computational_stages=[FIRST, stage], optimizer_function=function)
        with ipu.Session() as session:
            session.run(model.initializer)
            model.run(session)
            found.append(session.variables)
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


def var_list(names):
    return {"compute_gradients_kwargs": {"var_list": names}}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"apply_gradients_kwargs": ["factor"]}, TypeError, "apply_gradients_kwargs must be a dict"),
        ({"compute_gradients_kwargs": ["var_list"]}, TypeError, "compute_gradients_kwargs must be a dict"),
        ({"compute_gradients_kwargs": {"gate": 1}}, ValueError, "may only have `var_list`; got gate"),
        ({"apply_gradients_args": [1]}, TypeError, r"apply_gradients_args must be empty, .* Got \[1\]"),
        (
            {"compute_gradients_args": [["a"]], **var_list(["a"])},
            TypeError,
            "one argument, `var_list`, once",
        ),
        ({"compute_gradients_kwargs": {3: 1}}, ValueError, "may only have `var_list`; got 3"),
        (var_list("a/b"), ValueError, "got the string 'a/b'"),
        (var_list([]), ValueError, "var_list is empty"),
        (var_list(3), TypeError, "var_list must be a list of full names"),
        ({"compute_gradients_args": "a/b"}, TypeError, "compute_gradients_args must be a list or tuple"),
    ],
)
def test_wrong_fields_of_what_an_optimizer_function_returns(fields, error, message):
    with pytest.raises(error, match=message):
        OptimizerFunctionOutput(optax.sgd(1), 0.0, **fields)


def test_reduction_methods_parse():
    for method in GradientAccumulationReductionMethod:
        assert GradientAccumulationReductionMethod.parse(method) is method
        assert GradientAccumulationReductionMethod.parse(method.name.lower()) is method
    names = [schedule.name for schedule in PipelineSchedule]
    assert names == [known.member for known in schedules.SCHEDULES]


def test_gradient_maps_that_change_the_shape_or_capture():
    for mapped, message in (
        (
            lambda g, _rate: g.sum(),
            r"must return the gradient's shape.*first/dense/kernel.*it returned float32\[\]",
        ),
        (lambda g, rate: g * rate, "Trying to capture the tensor .* in the gradient_mapping_function"),
    ):

        def optimize(rate, loss, mapped=mapped):
            optimizer = ipu.optimizers.MapGradientOptimizer(optax.sgd(rate), lambda g, _v: mapped(g, rate))
            return OptimizerFunctionOutput(optimizer, loss)

        with pytest.raises(ValueError, match=message):
            front.Model(optimizer_function=optimize)


def test_a_count_in_an_array_is_checked_when_compiled():
    with pytest.raises(ValueError, match="gradient_accumulation_count must be from 1.*got 0"):
        front.Model(gradient_accumulation_count=jax.device_put(np.int32(0)))
