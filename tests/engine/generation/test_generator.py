import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.engine.generation import conftest
from tests.engine.generation.conftest import LENGTH, WORDS, read, read_whole, write, write_whole
from tests.support.compilations import compilations

DRAWN = engine.Sampling(temperature=30.0, top_k=20, top_p=0.95)


def test_tokens_are_those_of_the_unsplit_model(generator, state, prompts, continuations):
    """More requests than slots, of different lengths: they join and leave between tokens."""
    assert len(prompts) > generator.num_slots
    numbers = [12, 1, 7, 12, 2]
    answers = generator.generate(state, prompts, max_new_tokens=numbers)
    assert [answer.dtype for answer in answers] == [np.int32] * len(prompts)
    wanted = [known[:number] for known, number in zip(continuations, numbers, strict=True)]
    assert [answer.tolist() for answer in answers] == wanted
    assert len({token for known in continuations for token in known}) > 10  # the model says something


def test_stop_tokens_end_a_request_and_are_its_last_token(generator, state, prompts, continuations):
    stop = continuations[0][4]
    answers = generator.generate(state, prompts, max_new_tokens=12, stop_tokens=[stop])
    for answer, known in zip(answers, continuations, strict=True):
        assert answer.tolist() == (known[: known.index(stop) + 1] if stop in known else known)


def test_what_is_drawn_depends_on_the_request_alone(generator, state, prompts):
    asked = {"max_new_tokens": 8, "seed": 3}
    samplings = [DRAWN, engine.Sampling(), DRAWN, DRAWN, DRAWN]
    together = generator.generate(state, prompts, sampling=samplings, **asked)
    alone = generator.generate(state, prompts[:1], sampling=DRAWN, **asked)
    np.testing.assert_array_equal(together[0], alone[0])
    greedy = generator.generate(state, prompts[1:2], **asked)
    np.testing.assert_array_equal(together[1], greedy[0])
    others = generator.generate(state, [prompts[0]] * 4, sampling=DRAWN, **asked)
    for tokens in zip(*others, strict=True):  # each has a key of its own, from its first token on
        assert len(set(map(int, tokens))) > 1
    again = generator.generate(state, prompts[:1], sampling=DRAWN, max_new_tokens=8, seed=4)
    assert again[0].tolist() != alone[0].tolist()


@pytest.mark.usefixtures("no_garbage")
def test_generating_between_training_steps(generator, trainer, state, prompts):
    """The state's arrays are used in place, and later ones give other tokens."""
    tokens = np.random.default_rng(7).integers(0, WORDS, (2, LENGTH)).astype(np.int32)
    trained, _outputs = trainer.step(state, tokens)
    before = generator.generate(trained, prompts[:1], max_new_tokens=5)
    later = trained
    for _step in range(5):
        later, _outputs = trainer.step(later, tokens)
    after = generator.generate(later, prompts[:1], max_new_tokens=5)
    assert before[0].tolist() != after[0].tolist()
    assert after[0].tolist() == conftest.write_unsplit(
        jax.device_get(trainer.parameters(later)), prompts[0], 5
    )

    def count(name):
        return sum(x.shape == later.variables[name].shape for x in jax.live_arrays())

    names = ("stage0/places", "words")
    found = {name: count(name) for name in names}
    with generator.serving(later):
        copies = {name: count(name) - found[name] for name in names}
    assert copies == {"stage0/places": 0, "words": 1}  # the second stage's device has none of the words


def make(parameters, stages=(read, write), **options):
    given = {"max_length": LENGTH, "num_slots": 2, "chunk_lengths": (1, 4), **options}
    return engine.Generator(list(stages), parameters=parameters, **given)


def test_all_is_compiled_beforehand(parameters, state, prompts):
    """The lengths may be an iterator: the check of them used it up, and no prompt's program was made."""
    generator = make(parameters)
    generator.compile(map(len, prompts), drawn=True)
    with compilations() as found:
        generator.generate(state, prompts, max_new_tokens=3)
        generator.generate(state, prompts, max_new_tokens=3, sampling=DRAWN)
    assert {*found} <= {"jit(convert_element_type)", "jit(broadcast_in_dim)"}  # which make empty caches


def test_the_state_of_another_split(generator, parameters, prompts, continuations):
    def run(p, tokens):
        return write_whole(p[1], *read_whole(p[0], tokens))

    words = parameters[0]["words"]
    layers = [{name: x for name, x in p.items() if name != "words"} for p in parameters]
    together = [[{**own, "words": words} for own in layers]]
    whole = engine.Pipeline([run], parameters=together, num_micro_batches=1)
    state = whole.init(jax.random.key(0), np.zeros(LENGTH, np.int32))
    assert "stage0/1/keys" in state.variables
    (answer,) = generator.generate(generator.resplit(state), prompts[:1], max_new_tokens=12)
    assert answer.tolist() == continuations[0]


def test_a_model_that_was_split_with_its_parameters(plain, prompts, continuations):
    """Its variables have the paths of the parameters as their names, which `Shared` gives the generator."""

    def model(p, tokens):
        return write_whole(p["write"], *read_whole(p["read"], tokens))

    own = dict(zip(("read", "write"), plain, strict=True))
    tokens = np.zeros(LENGTH, np.int32)
    split = engine.split(model, 2, tokens, parameters=own, measure=False, num_micro_batches=1)
    state = engine.Pipeline(split, num_micro_batches=1).init(jax.random.key(0), tokens)
    shared = [engine.Shared(f"model/{name}", values) for name, values in own.items()]
    generator = make(shared)
    (answer,) = generator.generate(generator.resplit(state), prompts[:1], max_new_tokens=12)
    assert answer.tolist() == continuations[0]


def test_a_dict_of_variables_or_the_state_of_replicas(generator, state, prompts, continuations):
    variables = {name: np.asarray(value) for name, value in state.variables.items()}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    both = jax.device_put(variables, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for given in (variables, both):
        (answer,) = generator.generate(given, prompts[:1], max_new_tokens=12)
        assert answer.tolist() == continuations[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_replicas", "is_divided", "options"),
    [
        (2, (), {}),
        (2, (), {"shard": ["weights"]}),
        (1, ("trainer", "generator"), {}),
        (2, ("trainer",), {}),
    ],
    ids=["replicas", "weights shared out", "tensor parallel", "both, to single devices"],
)
def test_states_of_several_devices_for_each_stage(
    num_replicas, is_divided, options, parameters, prompts, continuations
):
    names = [f"stage{stage}/{name}" for stage in range(2) for name in ("queries", "keys", "values")]
    divided = engine.TensorParallel(2, dict.fromkeys(names, jax.sharding.PartitionSpec(None, "model")))
    of_trainer, of_generator = (divided if own in is_divided else None for own in ("trainer", "generator"))
    trainer = engine.Pipeline(
        [read_whole, write_whole],
        parameters=parameters,
        num_micro_batches=2,
        loss=lambda x: x,
        optimizer=optax.sgd(1.0),
        num_replicas=num_replicas,
        tensor_parallel=of_trainer,
        **options,
    )
    state = trainer.init(jax.random.key(0), np.zeros(LENGTH, np.int32))
    generator = make(parameters, tensor_parallel=of_generator)
    answers = generator.generate(state, prompts[:3], max_new_tokens=12)
    assert [answer.tolist() for answer in answers] == continuations[:3]


def test_values_that_skip_stages_and_parallel_stages():
    """Two stages at the same time keep something each, and the last one only passes the logits on."""

    def keep(name, x):
        old = engine.get_variable(name, (WORDS,), initializer="ones", trainable=False)
        engine.assign(name, old + jnp.sum(x, axis=0))
        return old + jnp.cumsum(x, axis=0)

    def begin(tokens, position):
        return jax.nn.one_hot(tokens * 7 % WORDS, WORDS), tokens

    def left(x, tokens):
        return keep("left", x), tokens

    def right(x, tokens):
        return keep("right", jnp.roll(2 * x, 1, axis=-1))

    def end(x, tokens, y):
        return x + 0.7 * y + jax.nn.one_hot((tokens + 2) % WORDS, WORDS)

    generator = engine.Generator(
        [begin, [left, right], end, lambda logits: logits], max_length=16, chunk_lengths=(1, 2)
    )
    prompts = [[3], [4, 1, 9]]
    for prompt, answer in zip(prompts, generator.generate({}, prompts, max_new_tokens=6), strict=True):
        tokens = list(prompt)
        for _token in range(6):
            count = np.bincount([token * 7 % WORDS for token in tokens], minlength=WORDS)
            logits = count + 0.7 * np.roll(2 * count, 1) + (np.arange(WORDS) == tokens[-1] + 2)
            tokens.append(int(np.argmax(logits)))
        assert answer.tolist() == tokens[len(prompt) :]


def read_one(p, tokens, position):
    (token,) = tokens  # more are an error
    x, position = read(p, token[None], position)
    return x[0], position


def write_one(p, x, position):
    return write(p, x[None], position)[0]


def test_stages_that_take_one_token_at_a_time(parameters, state, prompts, continuations):
    generator = make(parameters, [read_one, write_one], device_mapping=[0, 0])
    assert generator.token_by_token
    answers = generator.generate(state, prompts[2:4], max_new_tokens=4)
    assert [answer.tolist() for answer in answers] == [known[:4] for known in continuations[2:4]]


def test_random_keys_of_stages_depend_on_the_request_and_the_position():
    def stage(tokens, position):
        noise = jax.random.gumbel(engine.next_rng_key(), (WORDS,))
        total = engine.get_variable("total", (), jnp.int32, initializer=7, trainable=False)
        engine.assign("total", total + jnp.sum(tokens))
        return noise + total.astype(jnp.float32) * 0

    def write(prompts, **options):
        generator = engine.Generator([stage], max_length=8, num_slots=2, **options)
        return [answer.tolist() for answer in generator.generate({}, prompts, max_new_tokens=6)]

    first, second = write([[1], [1]])
    assert first != second
    assert len(set(first)) > 1
    assert write([[1]], num_groups=1) == [first]


# Serving.


def test_serving_streams_tokens_to_several_threads(generator, state, prompts, continuations):
    with generator.serving(state) as served:

        def ask(prompt):
            return list(served.submit(prompt, max_new_tokens=12))

        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(ask, prompts))
        late = served.submit(prompts[0], max_new_tokens=3)  # the end of the block waits for it
    assert answers == continuations
    assert late.is_done
    assert late.result(timeout=0).tolist() == continuations[0][:3]


def test_cancelled_requests_make_room(generator, state, prompts, continuations):
    with generator.serving(state):
        requests = [generator.submit(prompts[0], max_new_tokens=LENGTH - 1) for _slot in range(4)]
        waiting = generator.submit(prompts[1], max_new_tokens=12)
        for request in requests:
            next(iter(request))
            request.cancel()
        assert waiting.result(timeout=600).tolist() == continuations[1]
    for request in requests:
        assert request.result().tolist()[:1] == continuations[0][:1]


def test_an_interrupted_block_cancels_and_the_generator_goes_on(generator, state, prompts, continuations):
    with pytest.raises(KeyboardInterrupt), generator.serving(state):
        request = generator.submit(prompts[0], max_new_tokens=LENGTH - 1)
        raise KeyboardInterrupt
    assert request.is_done
    (answer,) = generator.generate(state, prompts[:1], max_new_tokens=12)
    assert answer.tolist() == continuations[0]


def test_an_interrupted_call_leaves_the_generator_usable(
    generator, state, prompts, continuations, monkeypatch
):
    def interrupt(request, token):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.Request, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generator.generate(state, prompts, max_new_tokens=12)

    def ask(prompt):
        (answer,) = generator.generate(state, [prompt], max_new_tokens=12)
        return answer.tolist()

    with ThreadPoolExecutor(2) as threads:  # one after the other
        assert list(threads.map(ask, prompts[:2])) == continuations[:2]
    assert generator.generate(state, [], max_new_tokens=1) == []


def test_calls_outside_and_within_serving(generator, state, prompts):
    with pytest.raises(RuntimeError, match="is not serving"):
        generator.submit([1], max_new_tokens=1)
    with generator.serving(state):
        with pytest.raises(RuntimeError, match="within `serving`"):
            generator.generate(state, prompts, max_new_tokens=1)
        with pytest.raises(RuntimeError, match="within `serving`"), generator.serving(state):
            pass
        with pytest.raises(TimeoutError, match="after 0 seconds"):
            generator.submit(prompts[0], max_new_tokens=20).result(timeout=0)
        with pytest.raises(ValueError, match="has the token 99"):  # and the others go on
            generator.submit([99], max_new_tokens=1)
        assert len(generator.submit(prompts[0], max_new_tokens=2).result(600)) == 2


def test_what_a_stage_raises_reaches_all_who_wait():
    def fail(x):
        raise ArithmeticError("no such word")

    def stage(tokens, position):
        logits = jax.ShapeDtypeStruct((WORDS,), jnp.float32)
        called = jax.pure_callback(fail, logits, tokens, vmap_method="sequential")
        return called + position.astype(jnp.float32)

    generator = engine.Generator([stage], max_length=4, chunk_lengths=(1,))
    with pytest.raises(Exception, match="no such word"):
        generator.generate({}, [[1]], max_new_tokens=2)
    with pytest.raises(Exception, match="no such word"), generator.serving({}):
        request = generator.submit([1], max_new_tokens=2)
        with pytest.raises(Exception, match="no such word"):
            request.result(timeout=600)
        with pytest.raises(RuntimeError, match="met an error"):
            generator.submit([1], max_new_tokens=1)


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"prompts": [[]]}, ValueError, "prompts[0] is empty"),
        ({"prompts": [[1], [40]]}, ValueError, "prompts[1] has the token 40, but tokens are from 0 to 39"),
        ({"prompts": [[-1]]}, ValueError, "has the token -1"),
        ({"prompts": [[0.5]]}, TypeError, "must be a sequence of integers"),
        ({"prompts": [[[1], [2]]]}, TypeError, "int64[2, 1]"),
        ({"prompts": ["hello"]}, TypeError, "Encode it with a tokenizer"),
        ({"prompts": [1, 2]}, TypeError, "give a list of one"),
        ({"prompts": "hello"}, TypeError, "prompts must be a list"),
        ({"max_new_tokens": LENGTH}, ValueError, "max_length, 24"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1; got 0"),
        ({"max_new_tokens": [1, 2]}, ValueError, "max_new_tokens must have one entry for each of the 1"),
        ({"sampling": 0.7}, TypeError, "sampling must be an engine.Sampling"),
        ({"stop_tokens": 3}, TypeError, "stop_tokens must be a list"),
        ({"stop_tokens": [WORDS]}, ValueError, "stop_tokens has the token 40"),
        ({"seed": -1}, ValueError, "seed must be an integer from 0"),
        ({"state": 3}, TypeError, "state must be"),
        (
            {"state": {}},
            ValueError,
            "lacks variables that the stages read and do not assign: stage0/keys (stage 0 (read))",
        ),
    ],
)
def test_wrong_requests(change, error, text, generator, state):
    arguments = {"state": state, "prompts": [[1]], "max_new_tokens": 1, **change}
    with pytest.raises(error, match=re.escape(text)):
        generator.generate(arguments.pop("state"), arguments.pop("prompts"), **arguments)


def test_states_that_do_not_fit(generator, state):
    wrong = {**state.variables, "words": np.zeros((3, 4), np.float32)}
    gone = {name: jnp.array(value) for name, value in jax.device_get(state.variables).items()}
    gone["words"].delete()
    for variables, message in (
        (wrong, r"variable words as float32\[40, 16\], but in the state it is float32"),
        (gone, "words.* has been deleted"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.generate(variables, [[1]], max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_length": 0}, ValueError, "max_length must be an integer of at least 1"),
        ({"num_slots": 3, "num_groups": 2}, ValueError, "num_slots must be a multiple of num_groups, 2"),
        ({"num_groups": 0}, ValueError, "num_groups must be"),
        ({"chunk_lengths": (4, 16)}, ValueError, "1 must be among them"),
        ({"token_by_token": "yes"}, TypeError, "token_by_token must be True, False, or None"),
        ({"stages": [lambda tokens, position: tokens]}, ValueError, "must return logits"),
        ({"stages": [lambda x: x]}, TypeError, "stage 0"),
        ({"device_mapping": [0, 1]}, ValueError, "device_mapping"),
    ],
)
def test_wrong_arguments(options, error, text):
    with pytest.raises(error, match=text):
        engine.Generator(**{"stages": [plain_stage], "max_length": 8, **options})


def plain_stage(tokens, position):
    return jnp.zeros((len(tokens), WORDS)) + position.astype(jnp.float32)


def test_too_few_devices():
    generator = engine.Generator([plain_stage], max_length=8, devices=jax.devices()[:1], device_mapping=[1])
    with pytest.raises(ValueError, match="needs 2 devices"):
        generator.generate({}, [[1]], max_new_tokens=1)


def test_caches_whose_shape_depends_on_the_chunk():
    def stage(tokens, position):
        old = engine.get_variable("cache", (len(tokens), 3), initializer="zeros", trainable=False)
        engine.assign("cache", old + 1)
        return plain_stage(tokens, position)

    with pytest.raises(ValueError, match="Its shape must not depend"):
        engine.Generator([stage], max_length=8, token_by_token=False)
