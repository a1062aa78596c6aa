import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.pipelining_ops import pipeline
from ipu_pipeline.tf1.session import exported_programs
from tests.support import forked, front
from tests.support.resumable import Batches, Training, make_stages


class Inference(front.Pipelined):
    """The model of `resumable` with an infeed; `last` changes what its last stage returns."""

    def __init__(self, last=None, count=4, inputs=(), mapping=None):
        stages = make_stages(3)
        if last is not None:
            end = stages[-1]
            stages[-1] = lambda x, y: last(*end(x, y))
        if inputs:
            first = stages[0]
            stages[0] = lambda *values: first(values[-2] * values[0], values[-1])
        super().__init__(stages, count, Batches(), inputs=inputs or None, device_mapping=mapping)

    def run(self, session, feed=None):
        session.run(self.initializer)
        return super().run(session, feed)


def elements(count):
    data = Batches()
    return [element for element, _number in zip(data, range(count), strict=False)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported program, its predictions for four micro-batches."""
    path = tmp_path_factory.mktemp("exported") / "program"
    training, model = Training(2), Inference()
    with ipu.Session(seed=3) as session:
        training.start(session)
        training.run(session, 3)
        expected = model.run(session)
        session.export(path, model.program)
    return path, expected


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loaded_program_gives_the_same(exported):
    path, expected = exported
    program = ipu.load_program(path)
    assert program.num_ipus == 3
    assert program.placeholders == {}
    assert jax.tree.map(lambda leaf: leaf.shape, program.element) == ((4, 6), (4, 3))
    found = program.run(elements(4))
    assert isinstance(found, list)
    assert_close(found, expected)
    assert_close(program.run(iter(elements(4))), expected)
    assert program.run(elements(9))[0].shape == (9, 4, 3)
    assert program.run([])[0].shape == (0, 4, 3)


@pytest.mark.thorough  # it starts a process
def test_without_the_users_code(exported, tmp_path):
    """In a process that has nothing but the library, and never unpickles."""
    path, expected = exported
    np.savez(tmp_path / "data.npz", *[leaf for element in elements(4) for leaf in element])
    script = f"""
import pickle
import numpy as np
import orbax.checkpoint
import ipu_pipeline as ipu
from ipu_pipeline.tf1.session import exported_programs
def refuse(*_arguments, **_options):
    raise AssertionError("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = refuse
data = np.load({str(tmp_path / "data.npz")!r})
arrays = [data[name] for name in data.files]
program = ipu.load_program({str(path)!r})
found = program.run(list(zip(arrays[::2], arrays[1::2])))
np.savez({str(tmp_path / "found.npz")!r}, *found)
"""
    result = forked.run(script, {**os.environ, "JAX_PLATFORMS": "cpu"})
    assert result.returncode == 0, result.stderr
    found = np.load(tmp_path / "found.npz")
    assert_close([found[name] for name in found.files], expected)


def test_several_stages_on_an_ipu(tmp_path):
    model = Inference(mapping=[1, 0, 1])
    with ipu.Session() as session:
        expected = model.run(session)
        session.export(tmp_path / "program", model.program)
        program = ipu.load_program(tmp_path / "program")
        assert program.num_ipus == 2
        before = jax.live_arrays()
        assert_close(program.run(elements(4)), expected)
        new = [array for array in jax.live_arrays() if not any(array is one for one in before)]
    kernels = {(array.shape, *array.devices()) for array in new if len(array.shape) == 2}
    devices = jax.devices()  # where the stages run, their weights are
    assert kernels == {
        *(((6, 16), devices[1]), ((16, 16), devices[0])),
        *(((16, 8), devices[1]), ((8, 3), devices[1])),
    }


def test_placeholders(tmp_path):
    factor, unused = ipu.placeholder(np.float32, [], "factor"), ipu.placeholder(np.float32, [2], "other")
    model = Inference(inputs=[factor, unused])
    with ipu.Session() as session:
        expected = model.run(session, {factor: 0.5, unused: [1, 2]})
        session.export(tmp_path / "free", model.program)
        session.export(tmp_path / "fixed", model.program, {factor: 0.5, unused: [1, 2]})
        with pytest.raises(ValueError, match="is not an input of this program"):
            session.export(tmp_path / "no", model.program, {ipu.placeholder(np.float32): 1})
        with pytest.raises(ValueError, match="Cannot feed value of shape"):
            session.export(tmp_path / "no", model.program, {factor: [1, 2]})
    program = ipu.load_program(tmp_path / "free")
    shapes = {name: shape.shape for name, shape in program.placeholders.items()}
    assert shapes == {"factor": (), "other": (2,)}
    assert_close(program.run(elements(4), {"factor": 0.5, "other": [1, 2]}), expected)
    other = program.run(elements(4), {"factor": 2.0, "other": [1, 2]})
    assert not np.allclose(other[0], expected[0])
    assert_close(ipu.load_program(tmp_path / "fixed").run(elements(4)), expected)
    for feed, message in (
        ({"factor": 1}, "a value for the placeholder 'other' is missing"),
        ({"factor": 1, "other": [1]}, r"'other' has shape \(2,\); got \(1,\)"),
        ({"rate": 1}, "there is no placeholder 'rate'; there are 'factor', 'other'"),
        ({"factor": 1j, "other": [1, 2]}, "does not fit float32"),
    ):
        with pytest.raises(ValueError, match=message):
            program.run(elements(1), feed)


def test_what_is_computed_before_the_pipeline(tmp_path):
    factor, stages = ipu.placeholder(np.float32, [], "factor"), [lambda scaled, x, y: (scaled * x, y)]
    queues = ipu.ipu_infeed_queue.IPUInfeedQueue(Batches()), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def compiled(value):
        scaled = value * ipu.get_variable("scale", [], initializer=np.float32(3))
        return pipeline(stages, 4, inputs=[scaled], infeed_queue=queues[0], outfeed_queue=queues[1])

    program = front.compile_program(compiled, [factor])
    with ipu.Session() as session:
        session.run(queues[0].initializer)
        session.run(program, {factor: 0.5})
        expected = session.run(queues[1].dequeue())
        with pytest.raises(ValueError, match="something is computed from placeholder 'factor'.*before the"):
            session.export(tmp_path / "no", program)
        session.export(tmp_path / "program", program, {factor: 0.5})
    assert_close(ipu.load_program(tmp_path / "program").run(elements(4)), expected)


def test_random_keys_and_assigned_variables(tmp_path):
    """A run goes over several executions, and another one goes on after it."""

    def noisy(x, y):
        noise = jax.random.normal(ipu.next_rng_key(), x.shape)
        count = ipu.get_variable("count", [], initializer=np.float32(0), trainable=False)
        ipu.assign("count", count + 1)
        return {"x": x + noise, "count": count, "y": (y, [y])}

    model = Inference(noisy, count=2)
    with ipu.Session(seed=9) as session:
        session.export(tmp_path / "program", model.program)
        session.run([model.initializer, model.program])
        first, second = (front.Pipelined.run(model, session) for _run in range(2))
    program = ipu.load_program(tmp_path / "program")
    assert_close(program.run(elements(4)), first)
    assert_close(program.run(elements(6)[4:]), second)
    np.testing.assert_array_equal(first["count"], range(4))
    np.testing.assert_array_equal(second["count"], [4, 5])


def test_a_program_without_an_infeed(tmp_path):
    """And without variables."""
    model = front.Pipelined([lambda x: x * 2, lambda x: x + 1], 3, inputs=[np.float32([3, 4])])
    with ipu.Session() as session:
        session.export(tmp_path / "program", model.program)
    loaded = ipu.load_program(tmp_path / "program")
    assert loaded.element is None
    np.testing.assert_array_equal(loaded.run(), [[7, 9]] * 3)
    with pytest.raises(ValueError, match="this program takes no elements"):
        loaded.run(elements(2))


def test_placeholders_of_one_name(tmp_path):
    one, other = ipu.placeholder(np.float32, [], "s"), ipu.placeholder(np.float32, [], "s")
    model = Inference(inputs=[one, other])
    with ipu.Session() as session, pytest.raises(ValueError, match="known by their names afterwards"):
        session.export(tmp_path / "program", model.program)


def test_the_variables_can_be_restored(exported):
    path, _expected = exported
    session = ipu.Session()
    session.restore(path, allow_partial=True)
    assert "a/dense/kernel" in session.variables


def test_what_cannot_be_exported(tmp_path):
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def both():
        return jnp.ones(2), pipeline([lambda x: x], 1, inputs=[np.ones(2)], outfeed_queue=queue)

    with ipu.Session() as session:
        for function, message in (
            (lambda: jnp.ones(2), "neither a pipeline nor a loop"),
            (lambda: ipu.loops.repeat(2, lambda x: x + 1, [1.0]), "it has a loop"),
            (both, "returns values of its own"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                session.export(tmp_path / "program", front.compile_program(function))
        message = "must be one inference pipeline; it has a pipeline that trains"
        with pytest.raises(NotImplementedError, match=message):
            session.export(tmp_path / "program", Training(2).program)
    assert not (tmp_path / "program").exists()


def test_structures_that_need_their_class(tmp_path):
    model, message = Inference(lambda x, _y: optax.TraceState(x)), "a TraceState needs its Python class"
    with ipu.Session() as session, pytest.raises(NotImplementedError, match=message):
        session.export(tmp_path / "program", model.program)


# Loading.


def test_wrong_elements(exported):
    program = ipu.load_program(exported[0])
    data = Batches()
    with pytest.raises(ValueError, match="LoadedProgram.run: element 1 must have the shape and dtype"):
        program.run([(data.x[0], data.y[0]), (data.x[0][:2], data.y[0])])
    with pytest.raises(ValueError, match="needs elements"):
        program.run()


def changed(path, target, **changes):
    shutil.copytree(path, target)
    document = checkpoint_directories.read_document(target)
    document["extra"]["program"].update(changes)
    document["sha256"] = checkpoint_directories._digest_of(document)
    (target / checkpoint_directories.DOCUMENT).write_text(json.dumps(document))
    return target


def test_other_versions_and_devices(exported, tmp_path, monkeypatch):
    path, _expected = exported
    with pytest.raises(CheckpointError, match="has version 7 of the format.* reads versions 1 to 2"):
        ipu.load_program(changed(path, tmp_path / "version", version=7))
    program = ipu.load_program(changed(path, tmp_path / "platform", platform="cuda"))
    message = "for devices of the kind 'cuda'; those that are selected are 'cpu'"
    with pytest.raises(ValueError, match=message):
        program.run(elements(1))
    with pytest.raises(RuntimeError, match="64 devices are needed"):
        ipu.load_program(changed(path, tmp_path / "many", num_ipus=64))
    with pytest.raises(CheckpointError, match="was exported with jax_enable_x64 True"):
        ipu.load_program(changed(path, tmp_path / "wide", has_wide_dtypes=True))
    other = changed(path, tmp_path / "jax", jax="0.1.2")
    monkeypatch.setattr(exported_programs.jax.export, "deserialize", lambda _content: 1 / 0)
    message = "stage0.jax_export, exported by JAX 0.1.2, cannot be read by JAX"
    with pytest.raises(CheckpointError, match=message):
        ipu.load_program(other)


def test_damage_is_found_before_anything_is_used(exported, tmp_path):
    path, _expected = exported
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "stage1.jax_export"
    content = file.read_bytes()
    file.write_bytes(content[:-7] + b"x" + content[-6:])
    with pytest.raises(CheckpointError, match="stage1.jax_export is damaged"):
        ipu.load_program(tmp_path / "copy")
    file.unlink()
    with pytest.raises(CheckpointError, match="stage1.jax_export of the checkpoint is missing"):
        ipu.load_program(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        ipu.load_program(tmp_path / "nowhere")


def test_a_checkpoint_is_no_program(tmp_path):
    with ipu.Session() as session:
        Inference().run(session)
        session.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="is a checkpoint and no exported program"):
        ipu.load_program(tmp_path / "checkpoint")


@pytest.mark.thorough
def test_before_any_run_it_makes_as_many_devices_as_the_program_needs(tmp_path):
    script = f"""
import numpy as np
import ipu_pipeline as ipu
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.zeros(3, np.float32)] * 8)
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
def model():
    return ipu.pipelining_ops.pipeline(
        [lambda x: x * 2, lambda x: x + 1], 2, infeed_queue=infeed, outfeed_queue=outfeed
    )
with ipu.scopes.ipu_scope("/device:IPU:0"):
    program = ipu.ipu_compiler.compile(model)
with ipu.Session(seed=1) as session:
    session.export({str(tmp_path / "program")!r}, program)
print(ipu.load_program({str(tmp_path / "program")!r}).num_ipus)
"""
    result = forked.run(script, {**os.environ, "JAX_PLATFORMS": "cpu"})
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr
