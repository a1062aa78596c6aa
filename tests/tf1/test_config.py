"""Devices. What touches the backend runs in a process of its own."""

import os
import textwrap

import jax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.utils import SelectionOrder
from tests.support import forked, front


def run(code, **environment):
    prelude = """
        import os, jax, numpy as np
        import ipu_pipeline as ipu
        from ipu_pipeline import config
        from ipu_pipeline.processes import device_selection
        from jax._src import xla_bridge
        def is_started():
            return xla_bridge.backends_are_initialized()
        def message(function, error):
            try:
                function()
            except error as caught:
                return str(caught)
            raise SystemExit("no error")
        def configure(**options):
            made = config.IPUConfig()
            for name, value in options.items():
                setattr(made, name, value)
            made.configure_ipu_system()
            return [device.id for device in device_selection.devices_for(0, 1)]
        def program(num_stages):
            queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                return queue, ipu.ipu_compiler.compile(lambda: ipu.pipelining_ops.pipeline(
                    [lambda x: x + 1] * num_stages, gradient_accumulation_count=1, inputs=[1.0],
                    outfeed_queue=queue))
        assert not is_started()
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(code)
    result = forked.run(source, {**os.environ, "JAX_PLATFORMS": "cpu", **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_devices_are_made_as_needed():
    run("""
        import optax, jax.numpy as jnp
        queue, three = program(3)
        def stage(x):
            x = x * jax.random.uniform(ipu.next_rng_key()) + jax.device_put(np.float32(2))
            return x @ ipu.get_variable("w", (2, 2))
        def optimize(loss):
            return ipu.pipelining_ops.OptimizerFunctionOutput(optax.adam(0.1), loss)
        def trained(rate):
            return rate * 2 + 1, ipu.pipelining_ops.pipeline(
                [stage, lambda x: jnp.mean(x)], 1, inputs=[np.ones((2, 2), "float32")],
                optimizer_function=optimize, outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue())
        rate = ipu.placeholder(np.float32)
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            compiled = ipu.ipu_compiler.compile(trained, [rate])
        session = ipu.Session()
        assert not is_started()  # neither compile nor a session starts the backend
        jnp.ones(1)  # which is not too early
        assert len(jax.devices()) == 3
        session.run(three)
        assert session.run(queue.dequeue()) == 4
        text = message(lambda: program(5), RuntimeError)
        assert "5 devices are needed, but JAX's CPU backend is already running with 3 device(s)" in text
        assert "configure_ipu_system()" in text and "ipu.set_num_devices(5)" in text
    """)


def test_selection_orders_and_exact_number():
    run("""
        order = ipu.utils.SelectionOrder
        assert configure(auto_select_ipus=4, selection_order=order.SNAKE) == [0, 1, 3, 2]
        assert len(jax.devices()) == 4
        assert configure(auto_select_ipus=4, selection_order=order.HOOF) == [0, 2, 3, 1]
        assert configure(auto_select_ipus=4, selection_order=order.ZIGZAG) == [0, 1, 2, 3]
        assert configure(auto_select_ipus=2) == [0, 1]
        assert configure(select_ipus=[3, 1]) == [3, 1]
        assert configure(auto_select_ipus=[1, 2]) == [0]
        assert [device.id for device in device_selection.devices_for(1, 2)] == [1, 2]
        assert "only 2 such device(s)" in message(lambda: device_selection.devices_for(2, 1), ValueError)
        configure(auto_select_ipus=2)
        queue, three = program(3)
        text = message(lambda: ipu.Session().run(three), ValueError)
        assert "needs 3 IPUs, but configure_ipu_system() selected 2" in text
    """)


def test_powers_of_two():
    run("""
        text = message(lambda: configure(auto_select_ipus=3), ValueError)
        assert text.startswith("Unsupported number of IPUs requested")
        assert "could not find an IPU device with 3 IPUs" in text
        assert "auto_round_num_ipus = True" in text and "require_power_of_two = False" in text
        assert not is_started()
        assert configure(auto_select_ipus=3, require_power_of_two=False) == [0, 1, 2]
    """)
    run("assert configure(auto_select_ipus=3, auto_round_num_ipus=True) == [0, 1, 2, 3]")


def test_a_count_already_set_is_not_lowered():
    run(
        "configure(auto_select_ipus=2); assert len(jax.devices()) == 4",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    run("""
        jax.config.update("jax_num_cpu_devices", 4)
        configure(auto_select_ipus=2, ipu_model=True)
        assert len(jax.devices()) == 4
    """)


def test_the_backend_is_running_already():
    run("""
        jax.devices()
        text = message(lambda: configure(auto_select_ipus=2), RuntimeError)
        assert "already running with 1 device(s)" in text
        assert configure(auto_select_ipus=1) == [0]
    """)


def test_an_array_made_too_early_is_told_at_compile():
    run("""
        jax.numpy.float32(2)
        text = message(lambda: program(3), RuntimeError)
        assert "3 devices are needed, but JAX's CPU backend is already running with 1 device(s)" in text
        assert "ipu.set_num_devices(3)" in text
        queue, one = program(1)
        ipu.Session().run(one)
        def loop():
            def body(x):
                with ipu.scopes.ipu_shard(0):
                    x = x + 1
                with ipu.scopes.ipu_shard(1):
                    return x * 2
            return ipu.loops.repeat(2, body, 1.0)
        def compile_loop():
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                ipu.ipu_compiler.compile(loop)
        assert "2 devices are needed" in message(compile_loop, RuntimeError)
    """)


def test_set_num_devices():
    run("""
        for wrong in (0, -1, True, 2.0, "4", None):
            text = message(lambda: ipu.set_num_devices(wrong), ValueError)
            assert text == f"set_num_devices: number must be an integer from 1; got {wrong!r}."
        ipu.set_num_devices(6)
        ipu.set_num_devices(4)
        assert not is_started()
        jax.numpy.float32(2)
        assert len(jax.devices()) == 4
        ipu.set_num_devices(4)
        ipu.set_num_devices(3)  # so many are there
        text = message(lambda: ipu.set_num_devices(5), RuntimeError)
        assert "5 devices are needed, but JAX's CPU backend is already running with 4 device(s)" in text
        queue, three = program(3)
        ipu.Session().run(three)
        message(lambda: program(5), RuntimeError)
    """)


def test_the_estimator_selects_devices_before_it_calls_functions(tmp_path):
    run(
        """
        from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator
        from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
        def model_fn(mode):
            jax.numpy.float32(2)
            assert len(jax.devices()) == 3
            raise SystemExit(0)  # the rest takes long
        def input_fn():
            jax.numpy.float32(2)
            return [np.ones(2, "float32")]
        options = config.IPUConfig()
        options.auto_select_ipus, options.require_power_of_two = 3, False
        run_config = RunConfig(IPURunConfig(8, options, num_shards=3))
        IPUPipelineEstimator(model_fn, os.environ["MODEL_DIR"], run_config).train(input_fn, steps=8)
        raise AssertionError("it was not called")
        """,
        MODEL_DIR=str(tmp_path),
    )


def test_import_is_light():
    run("""
        import sys
        from ipu_pipeline import datasets, tutorial_support
        datasets.load("digits")
        heavy = {"tensorflow", "tensorflow_datasets", "PIL", "orbax", "plotly", "flax", "torch"}
        assert not heavy & set(sys.modules)
    """)


def test_selection_order_is_a_permutation():
    for order in SelectionOrder:
        for size in (1, 2, 4, 8):
            assert sorted(order.permute(size)) == list(range(size))
    assert SelectionOrder.SNAKE.permute(8) == (0, 1, 3, 2, 4, 5, 7, 6)
    assert SelectionOrder.HOOF.permute(8) == (0, 2, 4, 6, 7, 5, 3, 1)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("auto_select_ipu", 2, AttributeError, "Did you mean 'auto_select_ipus'"),
        ("auto_select_ipus", 0, ValueError, "must be a number from 1.*got 0"),
        ("auto_select_ipus", [], ValueError, "got \\[\\]"),
        ("auto_select_ipus", True, ValueError, "got True"),
        ("select_ipus", [0, 0], ValueError, "different device indices"),
        ("selection_order", "SNAKE", TypeError, "must be one of SelectionOrder.AUTO, "),
        ("ipu_model", 1, TypeError, "must be True or False"),
        ("allow_recompute", 1, TypeError, "allow_recompute must be True or False"),
    ],
)
def test_wrong_settings(name, value, error, message):
    config = ipu.config.IPUConfig()
    with pytest.raises(error, match=message):
        setattr(config, name, value)


def test_nothing_or_too_much_selected():
    config = ipu.config.IPUConfig()
    with pytest.raises(ValueError, match="auto_select_ipus must be set"):
        config.configure_ipu_system()
    config.auto_select_ipus, config.select_ipus = 1, [0]
    with pytest.raises(ValueError, match="not both"):
        config.configure_ipu_system()
    with pytest.raises(AttributeError, match="'configure_ipu_system'"):
        config.configure_ipu_sistem()


def test_too_few_accelerators(monkeypatch):
    class Accelerator:
        platform = "gpu"

    monkeypatch.setattr(jax, "devices", lambda *platform: [Accelerator()])
    with pytest.raises(ValueError, match="there are 1 gpu device.*IPUConfig.ipu_model = True"):
        front.ipu_config(2).configure_ipu_system()
