"""Wrong calls: the stated error, from Python, before anything compiles."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import pipelining_ops
from ipu_pipeline.gradient_accumulation import GradientAccumulationReductionMethod
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule, pipeline
from tests import front

NOT_BUILT = {
    "gradient_accumulation_dtype": jnp.float32,
    "batch_serialization_iterations": 2,
    "recomputation_mode": "Auto",
    "forward_propagation_stages_poplar_options": [],
    "backward_propagation_stages_poplar_options": [],
    "weight_update_poplar_options": {},
    "offload_weight_update_variables": False,
    "replicated_optimizer_state_sharding": True,
    "offload_activations": True,
    "offload_gradient_accumulation_buffers": True,
    "replicated_weight_sharding": False,
    "offload_weights": False,
    "accumulate_outfeed": True,
    "accumulate_outfeed_dtype": jnp.float32,
    "outfeed_mask": [False],
}


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


@pytest.mark.parametrize("argument", NOT_BUILT)
def test_arguments_not_built_yet(argument):
    # Another argument is wrong too: what is not built comes first.
    with pytest.raises(NotImplementedError, match=f"^{argument} is not built yet"):
        compile_with(**{argument: NOT_BUILT[argument]}, gradient_accumulation_count=None)


def test_every_argument_is_built_or_refused():
    built = {
        "computational_stages",
        "gradient_accumulation_count",
        "repeat_count",
        "inputs",
        "infeed_queue",
        "outfeed_queue",
        "optimizer_function",
        "device_mapping",
        "pipeline_schedule",
        "continuous_weight_updates",
        "outfeed_loss",
        "reduction_method",
        "name",
    }
    assert built | set(NOT_BUILT) == set(inspect.signature(pipeline).parameters)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"continuous_weight_updates": True},
            NotImplementedError,
            "Continuous weight updates are currently not supported.",
        ),
        (
            {"gradient_accumulation_count": None},
            ValueError,
            "^gradient_accumulation_count must be specified.",
        ),
        ({"gradient_accumulation_count": 0}, ValueError, "gradient_accumulation_count must be .*got 0"),
        ({"gradient_accumulation_count": 2**31}, ValueError, "gradient_accumulation_count must be"),
        ({"gradient_accumulation_count": 2.5}, TypeError, "gradient_accumulation_count must be .*2.5"),
        (
            {"gradient_accumulation_count": ipu.placeholder(np.int32)},
            NotImplementedError,
            "gradient_accumulation_count as a placeholder",
        ),
        ({"repeat_count": 0}, ValueError, "repeat_count must be from 1.*got 0"),
        (
            {"computational_stages": front.first_stage},
            TypeError,
            "computational_stages argument needs to be a list or a tuple",
        ),
        ({"computational_stages": []}, ValueError, "at least one stage"),
        ({"computational_stages": [1]}, TypeError, r"computational_stages\[0\] must be a function; got 1"),
        (
            {"computational_stages": [[front.first_stage], front.second_stage]},
            NotImplementedError,
            "parallel stages",
        ),
        ({"infeed_queue": []}, TypeError, "infeed_queue is not an instance of ipu_infeed_queue"),
        ({"outfeed_queue": []}, TypeError, "outfeed_queue is not an instance of ipu_outfeed_queue"),
        ({"optimizer_function": optax.sgd(0.1)}, TypeError, "optimizer_function must be a function"),
        (
            {"optimizer_function": lambda rate, loss: loss},
            TypeError,
            "must return a pipelining_ops.OptimizerFunctionOutput",
        ),
        (
            {"optimizer_function": lambda rate, loss: OptimizerFunctionOutput("sgd", loss)},
            TypeError,
            "opt must be an optax.GradientTransformation",
        ),
        (
            {"optimizer_function": lambda rate, loss: OptimizerFunctionOutput(optax.sgd(1), loss[None])},
            ValueError,
            r"loss must be a scalar, but it has shape \(1,\)",
        ),
        ({"device_mapping": 0}, TypeError, "device_mapping argument needs to be a list or a tuple"),
        ({"device_mapping": [0]}, ValueError, "Each stage must be mapped to an IPU: 1 mappings != 2"),
        ({"device_mapping": [0, -1]}, ValueError, r"device_mapping\[1\] is -1"),
        ({"pipeline_schedule": "Grouped"}, TypeError, "not a member of the PipelineSchedule enumeration"),
        (
            {"reduction_method": "MEDIAN"},
            ValueError,
            "Cannot parse 'MEDIAN' as one of GradientAccumulationReductionMethod",
        ),
        (
            {"optimizer_function": None},
            ValueError,
            "An optimizer_function must be provided when outfeed_loss is True",
        ),
        (
            {"outfeed_queue": None},
            ValueError,
            "An outfeed_queue must be provided when outfeed_loss is True",
        ),
        (
            {"outfeed_queue": None, "outfeed_loss": False},
            ValueError,
            r"^The last computational stage has tensor outputs: float32\[\], float32\[\], but no",
        ),
        (
            {"computational_stages": [lambda rate, x, y: (rate, jnp.mean(x))]},
            ValueError,
            "No variables to optimize",
        ),
        (
            {"computational_stages": [front.first_stage, lambda rate, x: (rate, jnp.mean(x))]},
            TypeError,
            r"stage 1 \(<lambda>\) takes \(rate, x\), but what stage 0 \(first_stage\) returns gives it "
            r"\(float32\[\], float32\[4, 16\], int32\[4\]\)",
        ),
    ],
)
def test_wrong_calls(options, error, message):
    with pytest.raises(error, match=message):
        compile_with(**options)


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
    with pytest.raises(ValueError, match=r"Trying to capture the tensor a computed value"):
        front.compile_program(
            lambda given: pipeline([lambda given=given * 2: given + 1], gradient_accumulation_count=1),
            inputs=[rate],
        )
    uses = [jnp.sin, jnp.asarray, np.asarray, float, bool, lambda x: -x, lambda x: 2 * x, lambda x: x > 1]
    uses += [lambda x: optax.sgd(x).init({}), lambda x: jnp.where(True, x, 1), lambda x: x, np.negative]
    uses += [lambda x: jax.lax.mul(np.float32(1), x), lambda x: jax.jit(jnp.sin)(x), lambda x: x[0]]
    for use in uses:
        with pytest.raises(ValueError, match="Trying to capture the tensor rate"):
            with_stage(lambda given, use=use: use(rate))
    with pytest.raises(ValueError, match="Trying to capture the tensor rate"):
        front.compile_program(lambda: pipeline([lambda x: x], gradient_accumulation_count=1, inputs=[rate]))


def test_a_pipeline_in_a_stage():
    def stage(x):
        pipeline([lambda x: None], gradient_accumulation_count=1, inputs=[x])
        return x

    with pytest.raises(RuntimeError, match="within a computational stage; pipelines do not nest"):
        front.compile_program(lambda: pipeline([stage], gradient_accumulation_count=1, inputs=[1.0]))


def test_two_structures_of_optimizer_state_under_one_name():
    def train(optimizer, scope):
        def stage():
            with ipu.variable_scope(scope):
                return jnp.sum(ipu.get_variable("v", (2,)))

        pipeline(
            [stage],
            gradient_accumulation_count=1,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss),
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
        )

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


def test_a_pipeline_in_a_loop():
    def function(x):
        def body(carry, _element):
            pipeline([lambda x: None], gradient_accumulation_count=1, inputs=[carry])
            return carry, None

        return jax.lax.scan(body, x, None, length=2)[0]

    with pytest.raises(ValueError, match="a loop of ipu.loops is called inside the body of scan"):
        front.compile_program(function, inputs=[np.float32(1)])


def test_warnings_about_arguments_without_effect():
    with pytest.warns(UserWarning, match="reduction_method will have no effect"):
        compile_with(optimizer_function=None, outfeed_loss=False, reduction_method="mean")
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with pytest.warns(UserWarning, match="outfeed_queue will stay empty"):
        front.compile_program(
            lambda: pipeline([lambda: None], gradient_accumulation_count=1, outfeed_queue=queue)
        )


def test_an_outfeed_enqueued_to_twice():
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def function():
        for _time in range(2):
            pipeline([lambda: 1.0], gradient_accumulation_count=1, outfeed_queue=queue)

    with pytest.raises(ValueError, match="enqueued to only once"):
        front.compile_program(function)


def test_var_list_and_extra_arguments_of_the_update():
    def trains_biases(rate, loss):
        optimizer = optax.GradientTransformationExtraArgs(
            lambda parameters: (),
            lambda gradients, state, parameters, *, factor: (
                {name: -factor * g for name, g in gradients.items()},
                state,
            ),
        )
        return OptimizerFunctionOutput(
            optimizer,
            loss,
            compute_gradients_kwargs={"var_list": ["first/dense/bias"]},
            apply_gradients_kwargs={"factor": rate},
        )

    model = front.Model(optimizer_function=trains_biases)
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        before = session.variables
        session.run(model.initializer)
        model.run(session)
        after = session.variables
    assert [n for n in before if not np.array_equal(before[n], after[n])] == ["first/dense/bias"]
    with pytest.raises(ValueError, match="may only have `var_list`; got gate"):
        OptimizerFunctionOutput(optax.sgd(1), 0.0, compute_gradients_kwargs={"gate": 1})
    with pytest.raises(NotImplementedError, match="apply_gradients_args"):
        OptimizerFunctionOutput(optax.sgd(1), 0.0, apply_gradients_args=[1])


def test_reduction_methods_parse():
    for method in GradientAccumulationReductionMethod:
        assert GradientAccumulationReductionMethod.parse(method) is method
        assert GradientAccumulationReductionMethod.parse(method.name.lower()) is method
    assert [schedule.name for schedule in PipelineSchedule] == ["Grouped", "Interleaved", "Sequential"]
    assert pipelining_ops.pipeline.__doc__
