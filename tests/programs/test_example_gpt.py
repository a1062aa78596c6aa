"""examples/gpt.py: equal to plain JAX, resumed exactly, and its errors."""

import json
import math
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt
from ipu_pipeline import engine
from tests.support import models
from tests.support.programs import ROOT, begin, run

PROGRAM = "examples/gpt.py"
SMALL = ["--layers", "1", "2", "--width", "8", "--heads", "2", "--context", "12", "--batch", "2"]
SMALL += ["--micro-batches", "2", "--sample", "0", "--evaluate-every", "5"]


@pytest.fixture
def short_text(monkeypatch):
    """A text that is read fast."""
    text = "".join(f"def function{number}(x):\n    return x + {number}\n" for number in range(200))
    monkeypatch.setattr(gpt, "read_text", lambda: text)
    return text


def make_config(text, dtype="float32", **options):
    given = {"layers": (1, 1, 1, 1), "width": 8, "heads": 2, "context": 12, **options}
    return gpt.Config(vocabulary=len(text.characters), dtype=dtype, compute_dtype=dtype, **given)


def assemble(own):
    """The parameters of all stages; the table stands once among a model's own."""
    table, stages = own
    parameters = [dict(stage) for stage in stages]
    parameters[0]["characters"] = parameters[-1]["characters"] = table
    return parameters


def plain_forward(stages, parameters, tokens, rest):
    values = tokens, rest
    for stage, of_stage in zip(stages, parameters, strict=True):
        values = stage(of_stage, *values)
    return values


LAYOUT_2X2X2 = {"num_replicas": 2, "tensor_parallel": engine.TensorParallel(2, gpt.divide)}


@pytest.mark.thorough
def test_training_equals_plain_jax(short_text):
    """Two replicas of two stages, each divided."""
    steps = 40
    with jax.enable_x64(True):
        text = gpt.Text(short_text, context=12)
        config = make_config(text, "float64", layers=(1, 2))
        optimizer = gpt.make_optimizer(1e-2, steps, "float64")

        batches = [list(text.draw(3, step, num_micro_batches=4, size=2)) for step in range(1, steps + 1)]
        trainer = gpt.make_trainer(config, seed=3, num_micro_batches=2, optimizer=optimizer, **LAYOUT_2X2X2)
        state = trainer.init(jax.random.key(3), batches[0][0])
        parameters = models.on_one_device(trainer.parameters(state))
        own = (
            parameters[0]["characters"],
            [{name: part for name, part in p.items() if name != "characters"} for p in parameters],
        )
        stages, losses = gpt.make_stages(config, is_training=True), []

        def loss_of(own, tokens, targets):
            return plain_forward(stages, assemble(own), tokens, targets)

        for step in batches:
            state, outputs = trainer.step(state, step)
            losses += list(np.ravel(outputs.losses))
        with jax.numpy_dtype_promotion("standard"):
            groups = [[micro_batch] for step in batches for micro_batch in step]
            expected, own, _left = models.plain_loop(loss_of, own, groups, 4, optimizer, "MEAN")
        np.testing.assert_allclose(losses, np.ravel(expected), rtol=1e-12)
        models.assert_trees_close(trainer.parameters(state), assemble(own), 1e-12)
        assert state.variables["characters"].dtype == "float64"
        assert np.mean(losses[-40:]) < np.mean(losses[:40]) - 0.5  # it did learn something
        for name, variable in state.variables.items():  # each device has half of a block
            whole, part = variable.shape, variable.addressable_shards[0].data.shape
            is_divided = name.rpartition("/")[-1] in ("in", "out")
            assert math.prod(part) * (1 + is_divided) == math.prod(whole)
            assert len(variable.devices()) == 4


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_to_the_last_bit(short_text, tmp_path, capsys):
    """Also where passages are dropped at random: keys and data go on where they were."""
    options = [*SMALL, "--steps", "20", "--dropout", "0.2"]
    at_once = gpt.main([*options, "--log", str(tmp_path / "at_once")])
    folder = ["--checkpoint", str(tmp_path / "checkpoints"), "--log", str(tmp_path / "resumed")]
    gpt.main([*options, *folder, "--stop-at", "10"])
    with open(tmp_path / "resumed", "a") as log:  # of a run that was killed after step 10
        log.write(json.dumps({"step": 15, "loss": 0.0, "validation_loss": 0.0}) + '\n{"step": 2')
    resumed = gpt.main([*options, *folder, "--resume"])
    assert resumed.update_count == resumed.execution_count == 20
    again = gpt.main([*options, *folder, "--resume"])
    assert again.update_count == 20
    assert re.search(r"Done: 20 steps, held-out loss \d\.\d+\n$", capsys.readouterr().out)
    for state in (at_once, resumed):
        assert math.isfinite(np.sum(state.variables["characters"]))
    expected, found = ([np.asarray(leaf).tobytes() for leaf in plain(s)] for s in (at_once, resumed))
    assert found == expected
    expected, found = ((tmp_path / name).read_text().splitlines() for name in ("at_once", "resumed"))
    assert [json.loads(line) for line in found] == [json.loads(line) for line in expected]
    assert [json.loads(line)["step"] for line in found] == [5, 10, 15, 20]
    expected, found = (
        [leaf.devices() for leaf in jax.tree.leaves((s.variables, s.optimizer_state))]
        for s in (at_once, resumed)
    )
    assert found == expected
    for changed, message in [
        (
            ["--resume", "--rate", "0.001"],
            r"was trained with rate 0.003; now it is 0.001\. Resuming is exact",
        ),
        (["--resume", "--steps", "30"], r"with steps 20; now it is 30\..*and interrupt with --stop-at"),
        ([], "has a checkpoint of step 20. Go on with --resume, or give another"),
    ]:
        with pytest.raises(ValueError, match=message):
            gpt.main([*options, *folder, *changed])


def plain(state):
    """The leaves of a state, its key as numbers."""
    key = jax.random.key_data(state.key)
    return jax.tree.leaves([state.variables, state.optimizer_state, key, state.execution_count])


@pytest.mark.thorough
def test_the_sample_is_the_model_s(short_text, capsys):
    """What is generated depends on the seed; what follows a position does not change its prediction."""
    text = gpt.Text(short_text, context=12)
    config = make_config(text)
    trainer = gpt.make_trainer(config, seed=1, num_micro_batches=1, optimizer=gpt.make_optimizer(1e-2, 10))
    state = trainer.init(jax.random.key(1), next(text.draw(0, 1, 1, 2)))
    predictor = gpt.make_predictor(config)
    first, again, other = (gpt.generate(predictor, state, text, "def f", 20, seed) for seed in (5, 5, 6))
    assert first == again != other
    assert first.startswith("def f")
    assert len(first) == 25
    ids = text.encode("return x")[None, :]
    tokens = np.zeros((1, 12), np.int32)
    tokens[0, :8] = ids
    _state, outputs = predictor.step(state, [(tokens, np.int32(7))])
    stages = gpt.make_stages(config, is_training=False)
    parameters = models.on_one_device(trainer.parameters(state))
    parameters[0]["positions"] = parameters[0]["positions"][:8]
    x, _rest = plain_forward(stages[:-1], parameters[:-1], ids, None)
    expected = gpt.predict(config, False, parameters[-1], x)[:, -1]
    models.assert_trees_close(outputs.outputs[0], expected)


@pytest.mark.thorough
def test_evaluation_is_without_dropout_and_always_the_same(short_text):
    text = gpt.Text(short_text, context=12)
    config = make_config(text, dropout=0.5)
    optimizer = gpt.make_optimizer(1e-2, 10)
    trainer = gpt.make_trainer(config, seed=1, num_micro_batches=2, optimizer=optimizer)
    held_out = list(text.for_evaluation(2, 3))
    evaluator = gpt.make_evaluator(config, 2)
    state = trainer.init(jax.random.key(1), held_out[0])
    later, outputs = evaluator.step(state, held_out)
    _state, again = evaluator.step(later, held_out)
    assert outputs.outputs == again.outputs
    stages = gpt.make_stages(config, is_training=False)
    parameters = models.on_one_device(trainer.parameters(state))
    expected = [plain_forward(stages, parameters, *each) for each in held_out]
    models.assert_trees_close(outputs.outputs, expected)
    assert all(stage.uses_key for stage in trainer.traced.stages)
    assert not any(stage.uses_key for stage in evaluator.traced.stages)


def test_dropout():
    x = jnp.ones(10_000, jnp.float32)
    dropped = np.asarray(gpt.drop(x, 0.2, jax.random.key(0)))
    assert set(dropped) == {0, np.float32(1.25)}
    assert abs(dropped.mean() - 1) < 0.02
    assert gpt.drop(x, 0.2, None) is x


def test_text_is_split_into_passages():
    text = gpt.Text("abcdefghij" * 10, context=4)
    assert len(text.training) == 90
    tokens, targets = next(text.draw(0, 1, 1, 3))
    assert tokens.shape == targets.shape == (3, 4)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal((tokens + 1) % 10, targets)
    micro_batches = list(text.for_evaluation(2, 3))
    assert [tokens.shape for tokens, _targets in micro_batches] == [(3, 4)] * 2
    np.testing.assert_array_equal(micro_batches[0][0][0], text.validation[:4])
    np.testing.assert_array_equal(micro_batches[1][1][-1], text.validation[-4:])
    with pytest.raises(ValueError, match="The text has 100 characters, too few for a context of 10"):
        gpt.Text("abcdefghij" * 10, context=10)


def test_the_text_is_the_standard_library_s():
    text = gpt.read_text()
    assert text == gpt.read_text()
    assert text.isascii()
    assert "class JSONDecodeError" not in text  # the json package is no module of the top
    assert "def namedtuple(" not in text or "import " in text
    assert text.count("\ndef ") > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "4"], "--layers: needs a number for each of at least two stages; got [4]"),
        (["--layers", "1", "0"], "--layers: must be at least 1; got 0"),
        (["--heads", "5"], "--heads: must divide --width 96; got 5"),
        (["--steps", "0"], "--steps: must be at least 1; got 0"),
        (["--steps", "many"], "--steps: invalid positive value: 'many'"),
        (["--sample", "-1"], "--sample: must be at least 0; got -1"),
        (["--dropout", "1"], "--dropout: must be at least 0 and below 1; got 1"),
        (["--rate", "nan"], "--rate: must be a finite number above 0; got nan"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--prompt", ""], "--prompt: must be at least one ASCII character; got ''"),
        (["--prompt", "\u00e4"], "--prompt: must be at least one ASCII character; got '\u00e4'"),
        (["--resume"], "--resume: needs --checkpoint DIR"),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpt.parse_arguments(options)
    assert stopped.value.code == 2
    assert f"argument {message}" in capsys.readouterr().err


def test_errors_of_what_is_there(short_text, tmp_path):
    with pytest.raises(ValueError, match="--prompt: the text has no '~'"):
        gpt.main([*SMALL, "--prompt", "~"])
    with pytest.raises(ValueError, match="--resume: there is no checkpoint in .*empty"):
        gpt.main([*SMALL, "--checkpoint", str(tmp_path / "empty"), "--resume"])
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        gpt.main([*SMALL, "--checkpoint", str(tmp_path / "file")])


@pytest.mark.thorough
def test_as_a_program(tmp_path):
    """In an empty folder, from nothing but the file."""
    program = tmp_path / "gpt.py"
    program.write_bytes((ROOT / PROGRAM).read_bytes())
    output = run(program, *SMALL, "--steps", "10", "--sample", "5", as_tests=True).splitlines()
    assert re.fullmatch(r"\d,\d{3} parameters in 2 stages; [\d,]+ characters to train on, .*", output[0])
    assert [line.partition(":")[0] for line in output[1:3]] == ["Step 5", "Step 10"]
    assert re.fullmatch(r"Done: 10 steps, held-out loss \d\.\d{4}", output[-1])
    errors = run(program, *SMALL, "--rate", "1e30", code=1, as_tests=True)
    assert re.fullmatch(r"Error: The loss of step \d is nan; try a lower --rate\.\n", errors)


def test_ctrl_c_while_losses_are_waited_for(monkeypatch):
    def interrupt(_array):
        raise KeyboardInterrupt

    values = [jnp.float32(1), jnp.float32(2)]
    assert gpt.mean(values) == 1.5
    monkeypatch.setattr(type(values[0]), "_value", property(interrupt))
    with pytest.raises(KeyboardInterrupt):
        gpt.mean(values)


@pytest.mark.thorough
def test_ctrl_c_ends_with_a_line(tmp_path):
    options = ("--steps", "1000000", "--dtype", "bfloat16")
    process = begin(ROOT / PROGRAM, *SMALL, *options, folder=tmp_path)
    for line in process.stdout:
        if line.startswith("Step 5:"):
            break
    process.send_signal(signal.SIGINT)
    _output, errors = process.communicate(timeout=240)
    assert re.fullmatch(r"Interrupted in step \d+\.\n", errors), errors
    assert process.returncode == 130
