"""XLA's options for the programs of stages: which program gets which, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ipu_pipeline import engine
from ipu_pipeline.engine.fronts import Hooks
from ipu_pipeline.pipelining_ops import PipelineStageOptions
from tests.support import front, models

FORWARD = "forward_propagation_stages_poplar_options"
BACKWARD = "backward_propagation_stages_poplar_options"
UPDATE = "weight_update_poplar_options"
PROTO = {"xla_dump_hlo_as_proto": True}
NONE = PipelineStageOptions()


def giving(**options):
    return PipelineStageOptions(compiler_options=options)


def make(mapping=None, trains=True, **options):
    return engine.Pipeline(
        models.mlp_stages(3),
        num_micro_batches=2,
        optimizer=optax.sgd(0.1) if trains else None,
        device_mapping=mapping,
        **options,
    )


def run(pipeline):
    batches = models.mlp_batches(np.random.default_rng(0), 2)
    state = pipeline.init(jax.random.key(3), batches[0])
    state, outputs = pipeline.step(state, batches)
    return models.on_one_device((state.variables, list(outputs.losses or outputs.outputs)))


@functools.cache
def plain():
    """What a pipeline without options gives."""
    return run(make())


def dumped(folder):
    """The programs of which XLA wrote something into a folder, without the trivial one."""
    names = {re.match(r"module_\d+\.jit_(\w+)\.", path.name)[1] for path in folder.iterdir()}
    return {name for name in names if "lambda" not in name}


def dumping(tmp_path, name):
    """An option that shows which programs are compiled with it."""
    (tmp_path / name).mkdir()
    return {"xla_dump_to": str(tmp_path / name)}


def test_every_program_gets_its_options(tmp_path):
    options = {
        "forward_options": [dumping(tmp_path, "forward0"), dumping(tmp_path, "forward1"), PROTO],
        "backward_options": [dumping(tmp_path, f"backward{n}") for n in range(3)],
        "update_options": dumping(tmp_path, "update"),
    }
    actual = run(make(**options))
    assert {path.name: dumped(path) for path in tmp_path.iterdir()} == {
        "forward0": {"stage0_forward"},
        "forward1": {"stage1_forward"},
        "backward0": {"stage0_backward"},
        "backward1": {"stage1_backward"},
        "backward2": {"stage2_forward_backward"},
        "update": {"stage0_update", "stage1_update", "stage2_update"},
    }
    # The last stage has one program, which gets both its options.
    assert ".pb" in {path.suffix for path in (tmp_path / "backward2").iterdir()}
    models.assert_trees_close(actual, plain())


def test_one_program_gets_all(tmp_path):
    """One IPU's has everything."""
    options = {"forward_options": [{}, dumping(tmp_path, "all"), {}], "update_options": PROTO}
    run(make([0, 0, 0], backward_options=[{}, {"xla_dump_hlo_as_text": True}, {}], **options))
    assert dumped(tmp_path / "all") == {"block"}
    assert {".txt", ".pb"} <= {path.suffix for path in (tmp_path / "all").iterdir()}


@pytest.mark.thorough
@pytest.mark.usefixtures("optimized")
def test_an_option_changes_what_is_compiled(tmp_path):
    """With fast math XLA may reorder sums: its code says so, in this stage's program only."""
    found = {}
    folders = [dumping(tmp_path, str(stage)) for stage in range(2)]
    jax.config.update("jax_enable_compilation_cache", False)  # which would skip the compilation
    compilation_cache.reset_cache()
    try:
        fast = {**folders[0], "xla_cpu_enable_fast_math": True}
        emitters = {"xla_cpu_use_fusion_emitters": True}  # see conftest
        actual = run(make(forward_options=[{**fast, **emitters}, {**folders[1], **emitters}, {}]))
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
    for stage in range(2):
        code = [path.read_text() for path in (tmp_path / str(stage)).glob("*stage*ir-no-opt.ll")]
        assert code
        found[stage] = any("reassoc" in text for text in code)
    assert found == {0: True, 1: False}
    models.assert_trees_close(actual, plain())


def test_forward_options_in_inference(tmp_path):
    run(make(trains=False, forward_options=[dumping(tmp_path, "0"), {}, {}]))
    assert dumped(tmp_path / "0") == {"stage0_forward"}
    for name, value in (("backward_options", [{}] * 3), ("update_options", {})):
        with pytest.raises(ValueError, match=f"{name} goes with an optimizer"):
            make(trains=False, **{name: value})


def test_options_that_contradict_each_other():
    fast, slow = {"xla_cpu_enable_fast_math": True}, {"xla_cpu_enable_fast_math": False}
    make(forward_options=[fast, slow, {}], backward_options=[slow, fast, {}], update_options=fast)
    make(forward_options=[{}, {}, fast], backward_options=[{}, {}, fast])
    text = (
        r"xla_cpu_enable_fast_math is True in forward_options\[2\] and False in backward_options\[2\], but "
        "forward and backward of the last stage are one program"
    )
    with pytest.raises(ValueError, match=text):
        make(forward_options=[{}, {}, fast], backward_options=[{}, {}, slow])
    options = {"update_options": slow, "hooks": Hooks(option_names={"update_options": "weights"})}
    text = r"is True in forward_options\[0\] and False in weights, but all stages are on one device"
    with pytest.raises(ValueError, match=text):
        make([0, 0, 0], forward_options=[fast, {}, fast], **options)
    with pytest.raises(ValueError, match="is 1 in .* and True in "):  # which are not the same to XLA
        make([0, 0, 0], forward_options=[{"xla_x": 1}, {"xla_x": True}, {}])
    with pytest.raises(ValueError, match="forward_options has 4 entries for 3 stages"):
        make(forward_options=[{}] * 4)
    with pytest.raises(TypeError, match=r"backward_options\[1\] must be a dict of compiler options; got 3"):
        make(backward_options=[{}, 3, {}])


def test_options_that_xla_refuses_are_found_before_anything_compiles(tmp_path):
    stages = [giving(xla_nonsense=1, **dumping(tmp_path, "0")), giving(xla_cpu_enable_fast_math="perhaps")]
    model = front.Model(**{FORWARD: stages, UPDATE: giving(xla_nonsense=1)})
    with front.session_of(model) as session:
        for _time in range(2):
            with pytest.raises(ValueError, match="^XLA refuses compiler options") as caught:
                model.run(session)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 3
    start = "the compiler option xla_nonsense with the value 1: "
    assert lines[0].startswith(f"{FORWARD}[0]: {start}")
    assert "No such compile option" in lines[0]
    start_of_other = "the compiler option xla_cpu_enable_fast_math with the value 'perhaps': "
    assert lines[1].startswith(f"{FORWARD}[1]: {start_of_other}")
    assert lines[2].startswith(f"{UPDATE}: {start}")
    assert dumped(tmp_path / "0") == set()


def test_each_argument_of_the_front_reaches_its_programs(tmp_path):
    first, second, update = (giving(**dumping(tmp_path, name)) for name in "abc")
    model = front.Model(**{FORWARD: [first, NONE], BACKWARD: [second, NONE], UPDATE: update})
    with front.session_of(model) as session:
        model.run(session)
    assert dumped(tmp_path / "a") == {"stage0_forward"}
    assert dumped(tmp_path / "b") == {"stage0_backward"}
    assert dumped(tmp_path / "c") == {"stage0_update", "stage1_update"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({FORWARD: NONE}, TypeError, f"{FORWARD} must be a list or a tuple of PipelineStageOptions"),
        ({BACKWARD: [{}, {}]}, TypeError, f"{BACKWARD} must be a list or a tuple of .*got one with {{}}"),
        ({FORWARD: [NONE]}, ValueError, f"{FORWARD} must have one .* 2 stages; it has 1"),
        ({UPDATE: [NONE]}, TypeError, f"{UPDATE} to be of type PipelineStageO.*list"),
        (
            {UPDATE: giving(xla_x=None)},
            TypeError,
            f"{UPDATE}: the compiler option xla_x must be .*; got None",
        ),
        (
            {FORWARD: [PipelineStageOptions(compiler_options={3: 1}), NONE]},
            TypeError,
            rf"{FORWARD}\[0\]: the names of compiler options are strings; got 3",
        ),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        front.Model(**options)


def test_wrong_fields():
    with pytest.raises(TypeError, match="PipelineStageOptions: matmul_options must be a dict; got 3"):
        PipelineStageOptions(matmul_options=3)
    with pytest.raises(TypeError, match="PipelineStageOptions: compiler_options must be a dict"):
        PipelineStageOptions(compiler_options=[("a", 1)])


def test_positions_are_graphcore_s():
    options = PipelineStageOptions({"a": 1}, {"b": 2}, {"c": 3})
    found = options.convolution_options, options.matmul_options, options.slice_options
    assert found == ({"a": 1}, {"b": 2}, {"c": 3})
    assert options.compiler_options is None
    message = "convolution_options is for Poplar's options.* as compiler_options="
    with pytest.raises(ValueError, match=message):
        PipelineStageOptions({"xla_cpu_enable_fast_math": False})


def test_what_has_no_effect_warns():
    poplar = PipelineStageOptions(convolution_options={"availableMemoryProportion": "0.1"})
    with pytest.warns(UserWarning, match=f"of {FORWARD}, {UPDATE} will have no effect") as caught:
        front.Model(**{FORWARD: [poplar, poplar], UPDATE: poplar})
    assert len(caught) == 1
    stages = [front.first_stage, lambda rate, x, labels: (jnp.sum(x), rate)]
    inferring = {"computational_stages": stages, "optimizer_function": None, "outfeed_loss": False}
    for argument, value in ((BACKWARD, [NONE] * 2), (UPDATE, NONE)):
        message = f"{argument} will have no effect since .* in inference"
        with pytest.warns(UserWarning, match=message) as caught:
            front.Model(**inferring, **{argument: value})
        assert len(caught) == 1
