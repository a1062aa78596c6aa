import gc
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.ground import checks
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline
from ipu_pipeline.tf1.session.store import Store
from tests.support import front, models
from tests.support.compilations import compilations


def expected_run(model, variables, num_updates, rate=0.1, dataset=None):
    """Losses and variables by the reference, from the session's variables."""
    traced = model.program.calls[0].pipeline.traced
    state = PipelineState(variables, None, np.int32(0), np.int32(0), jax.random.key(0))
    iterator = (dataset or front.data())()
    losses = []
    for _update in range(num_updates):
        micro_batches = [next(iterator) for _ in range(model.options["gradient_accumulation_count"])]
        state, outputs = reference.step(
            traced,
            state,
            micro_batches,
            np.float32(rate),
            optimizer=lambda rate, loss: optax.sgd(rate),
            reduction="sum",
        )
        losses += outputs.losses
    return np.array(losses), state.variables


def test_training_equals_the_reference():
    """From initial values that depend on the session's seed and the variable's name."""
    model = front.Model(repeat_count=2)
    with ipu.Session(seed=3) as session:
        session.run(ipu.global_variables_initializer())
        start, name = session.variables, "first/dense/kernel"
        key = jax.random.fold_in(jax.random.key(3), checks.hash_name(name))
        initial = jax.nn.initializers.glorot_uniform()(key, (12, 16), jnp.float32)
        np.testing.assert_array_equal(start[name], initial)
        session.run(model.initializer)
        losses = np.concatenate([model.run(session) for _ in range(2)])
        expected_losses, expected_variables = expected_run(model, start, 4)
        models.assert_trees_close(losses, expected_losses)
        models.assert_trees_close(session.variables, dict(sorted(expected_variables.items())))
        assert session.update_count() == 4


def test_computing_around_pipelines():
    """Segments run in order: a variable read after a pipeline has its new value, before it its old one."""
    outfeeds = [IPUOutfeedQueue(), IPUOutfeedQueue()]
    options = {"optimizer_function": front.optimizer_function, "outfeed_loss": True}

    def stage(rate, x):
        return rate, jnp.sum(x * ipu.get_variable("v", (), initializer=1.0))

    def function(rate, x):
        with ipu.variable_scope("model"):
            first = pipeline([stage], 1, inputs=[rate * 2, x], outfeed_queue=outfeeds[0], **options)
        with ipu.variable_scope("model", reuse=True):
            between = ipu.get_variable("v") * 10
            second = pipeline([stage], 1, inputs=[rate, x + between], outfeed_queue=outfeeds[1], **options)
            after = ipu.get_variable("v")
        return {"ops": (first, second), "between": between, "after": after, "x": x, "seven": 7}

    rate = ipu.placeholder(np.float32, name="rate")
    x = ipu.placeholder(np.float32, (2,), name="x")
    program = front.compile_program(function, [rate, x])
    assert len(program.calls) == 2
    with ipu.Session() as session:
        result = session.run(program, {rate: 0.5, x: [1.0, 2.0]})
        assert result["ops"] == (None, None)  # operations have no values
        assert result["between"] == -20  # v = 1 - 2*0.5*3 = -2
        assert result["after"] == -2 - 0.5 * (3 - 40)
        assert result["seven"] == 7
        np.testing.assert_array_equal(result["x"], [1, 2])
        assert session.variables["model/v"] == result["after"]
        assert [session.run(queue.dequeue())[0] for queue in outfeeds] == [3.0, -2.0 * (3 - 40)]


@pytest.mark.thorough
def test_optimizer_state_is_kept_by_pipeline_name():
    def momentum(rate, loss):
        return OptimizerFunctionOutput(optax.sgd(rate, momentum=0.9), loss)

    together = front.Model(repeat_count=2, optimizer_function=momentum)
    apart = [front.Model(optimizer_function=momentum) for _ in range(2)]
    with ipu.Session() as one, ipu.Session() as two:
        one.run(together.initializer)
        together.run(one)
        for model in apart:  # the second goes on with the first one's momentum
            two.run(model.initializer)
            if model is apart[1]:
                for _skip in range(3):
                    take = model.infeed.connect(lambda leaves: leaves)
                    take(1)
                    model.infeed.mark()
            model.run(two)
        models.assert_trees_close(one.variables, two.variables)
        other = front.Model()
        two.run(other.initializer)
        with pytest.raises(ValueError, match=r"optimizer state of another structure.*'Pipeline'.*trace"):
            other.run(two)


def test_assigned_variables_and_execution_counts():
    def stage(x):
        count = ipu.get_variable("count", (), "int32", 0, trainable=False)
        ipu.assign("count", count + 1)
        return count, jax.random.uniform(ipu.next_rng_key())

    model = front.Pipelined([stage], 3, repeat_count=2, inputs=[1.0])
    with ipu.Session() as session:
        counts, noise = model.run(session)
        np.testing.assert_array_equal(counts, range(6))
        assert len(np.unique(noise)) == 6
        assert session.variables["count"] == 6
        session.run(ipu.global_variables_initializer())
        assert session.variables["count"] == 0
        np.testing.assert_array_equal(model.run(session)[1], noise)


def test_load_and_variables_are_copies():
    model = front.Model(device_mapping=[0, 0])
    with ipu.Session() as session:
        session.load({"first/dense/bias": [5] * 16})
        session.run(model.initializer)
        taken = session.variables
        assert list(taken) == ["first/dense/bias"]
        model.run(session, rate=1e-9)
        np.testing.assert_allclose(session.variables["first/dense/bias"], 5, rtol=1e-6)
        kept = session.variables
        model.run(session)
        assert not np.array_equal(kept["second/dense/bias"], session.variables["second/dense/bias"])
        with pytest.raises(ValueError, match="of dtype complex128, does not fit"):
            session.load({"first/dense/bias": np.zeros(16, complex)})
        with pytest.raises(ValueError, match=r"first/dense/bias has shape \(16,\); the value has \(3,\)"):
            session.load({"first/dense/bias": np.zeros(3)})


@pytest.mark.parametrize("mapping", [[0, 1], [0, 0]])
def test_end_of_data_in_a_run_keeps_completed_updates(mapping):
    """What an update has begun with stays in front of the run."""
    dataset = front.data(3 * 2 + 2)  # two updates and two of three micro-batches
    model = front.Model(dataset, repeat_count=5, device_mapping=mapping)
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        start = session.variables
        session.run(model.initializer)
        with pytest.raises(OutOfRangeError, match="ended after 8 elements"):
            session.run(model.program, {model.rate: 0.1})
        assert front.no_infeed_runs()
        assert model.infeed.position.count == 6
        expected_losses, expected_variables = expected_run(model, start, 2, dataset=dataset)
        models.assert_trees_close(session.variables, dict(sorted(expected_variables.items())))
        models.assert_trees_close(session.run(model.outfeed.dequeue()), expected_losses)
        assert session.update_count() == 2
        with pytest.raises(OutOfRangeError):
            session.run(model.program, {model.rate: 0.1})
        session.run(model.initializer)
        with pytest.raises(OutOfRangeError):
            session.run(model.program, {model.rate: 0.1})
        assert session.update_count() == 4


class CorruptedError(Exception):
    pass


def test_an_exception_in_the_dataset_reaches_the_caller():
    def iterate():
        yield from front.data(4)()
        raise CorruptedError("record 4")

    model = front.Model(iterate, device_mapping=[0, 0])
    with front.session_of(model) as session:
        model.run(session)
        with pytest.raises(CorruptedError, match="record 4") as error:
            model.run(session)
        assert error.traceback[-1].name == "iterate"
        assert session.update_count() == 1
        assert front.no_infeed_runs()


def test_nan_is_not_an_error():
    model = front.Model(device_mapping=[0, 0])
    with front.session_of(model) as session:
        model.run(session, rate=np.inf)
        assert np.isnan(model.run(session)).any()
        assert session.update_count() == 2


def test_interrupted_initial_values_leave_a_session_as_it_was():
    def initializer(key, shape, dtype):
        made.append(shape)
        if len(made) == 4:
            raise KeyboardInterrupt
        return jnp.full(shape, len(made), dtype)

    def body():
        return sum(ipu.get_variable(name, (2,), initializer=initializer) for name in "ab")

    made, program = [], front.compile_program(body)
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        (before,) = session.run(program)
        with pytest.raises(KeyboardInterrupt):
            session.run(ipu.global_variables_initializer())
        np.testing.assert_array_equal(session.run(program)[0], before)
        session.run(ipu.global_variables_initializer())
        np.testing.assert_array_equal(session.run(program)[0], [5 + 6] * 2)


def test_uninitialised_deleted_and_closed():
    model = front.Model(device_mapping=[0, 0])
    session = ipu.Session()
    with pytest.raises(RuntimeError, match=r"has not been initialized.*infeed_queue.initializer"):
        model.run(session)
    session.run(model.initializer)
    model.run(session)
    session.run(model.infeed.deleter)
    with pytest.raises(RuntimeError, match="ended, by its `deleter`"):
        model.run(session)
    session.run(model.initializer)
    model.run(session)
    session.close()
    assert front.no_infeed_runs()
    with pytest.raises(RuntimeError, match="closed Session"):
        model.run(session)
    assert "first/dense/bias" in session.variables


@pytest.fixture(scope="module")
def model():
    return front.Model()


@pytest.mark.parametrize(
    ("feed", "error", "message"),
    [
        ({}, ValueError, "You must feed a value for placeholder 'rate'"),
        ({"rate": [1.0, 2.0]}, ValueError, r"Cannot feed value of shape \(2,\) for placeholder 'rate'"),
        ({"rate": "fast"}, ValueError, "placeholder 'rate'"),
        ({"rate": [[1], [1, 2]]}, ValueError, "is not an array"),
        ({"rate": 1j}, ValueError, "does not fit float32"),
        ({"rate": 0.1, "other": 1.0}, ValueError, "'other'.*is not an input of this program.*'rate'"),
        ({"rate": 0.1, "text": 1.0}, TypeError, "keys must be placeholders"),
    ],
)
def test_feed_dict_errors(model, feed, error, message):
    keys = {"rate": model.rate, "other": ipu.placeholder(np.float32, name="other"), "text": "text"}
    with ipu.Session() as session, pytest.raises(error, match=message):
        session.run(model.program, {keys[name]: value for name, value in feed.items()})


def test_placeholders_are_of_numbers():
    for dtype in (None, object, str, "M8[s]", [("a", "f4")], "no dtype"):
        with pytest.raises(TypeError, match="dtype must be one of numbers or booleans|not understood"):
            ipu.placeholder(dtype, [])
    for known in (np.float32, "bool", jnp.bfloat16, "complex64", np.int8):
        assert ipu.placeholder(known, []).dtype == np.dtype(known)


def test_wrong_fetches_and_seeds():
    with pytest.raises(TypeError, match="fetch must be a compiled program"):
        ipu.Session().run(front.first_stage)
    with pytest.raises(TypeError, match="seed must be an integer"):
        ipu.Session(seed="1")
    outfeed = IPUOutfeedQueue()
    with pytest.warns(UserWarning, match="wait_for_completion=True"):
        operation = outfeed.dequeue(wait_for_completion=True)
    with ipu.Session() as session, pytest.raises(ValueError, match="before any program"):
        session.run(operation)


def test_outfeed_modes_and_structures():
    def run(last_stage, mode=IPUOutfeedMode.ALL, runs=1):
        model = front.Pipelined([last_stage], 2, mode=mode, inputs=[np.float32(3)])
        operation = model.outfeed.dequeue()
        with ipu.Session() as session:
            for _run in range(runs):
                session.run(model.program)
            return session.run(operation)

    np.testing.assert_array_equal(run(lambda x: x * 2), [6, 6])
    assert run(lambda x: x * 2, runs=4).shape == (8,)
    assert run(lambda x: x * 2, runs=0).shape == (0,)
    pair = run(lambda x: (x, x[None]))
    assert isinstance(pair, list)
    assert [value.shape for value in pair] == [(2,), (2, 1)]
    assert run(lambda x: {"a": x})["a"].shape == (2,)
    assert run(lambda x: x * 2, IPUOutfeedMode.LAST) == 6
    with pytest.raises(ValueError, match="mode LAST and nothing has been enqueued"):
        run(lambda x: x * 2, IPUOutfeedMode.LAST, runs=0)


def test_repeats_and_runs_compile_nothing_new():
    model = front.Model(repeat_count=3, device_mapping=[0, 0])
    with front.session_of(model) as session:
        model.run(session)
        with compilations() as compiled:
            for _run in range(3):
                model.run(session)
    assert compiled == []


def test_a_run_places_what_has_changed_since_the_last(monkeypatch):
    """It looked at where every variable was, in every run."""
    placed = []
    place = StatePlacement.place_variables
    monkeypatch.setattr(
        StatePlacement, "place_variables", lambda self, new: placed.append(len(new)) or place(self, new)
    )
    model, other = front.Model(), front.Model(name="other")
    with front.session_of(model) as session:
        model.run(session)
        placed.clear()
        model.run(session)
        assert not placed
        session.load({"first/dense/bias": np.full(16, 3)})
        model.run(session, rate=1e-9)
        np.testing.assert_allclose(session.variables["first/dense/bias"], 3, rtol=1e-6)
        session.run(other.initializer)
        other.run(session)
        placed.clear()
        model.run(session)
        assert len(placed) == 1


def test_a_seed_that_is_set_during_a_run_holds_from_the_next_one(monkeypatch):
    """What the run left had the old key, and was given to all later runs."""
    model, keep = front.Model(), Store.keep
    with front.session_of(model) as session:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "keep", lambda store, *left: store.reset_seed(99) or keep(store, *left))
            model.run(session)
        state = session._store.make_pipeline_state(model.program.calls[0])
        assert jax.random.key_data(state.key).tolist() == [0, 99]


def test_integers_that_do_not_fit():
    for dtype, good, bad in [("uint8", 3, 300), ("int32", -7, 2**40), ("int32", 2.0, 2.5)]:
        placeholder = ipu.placeholder(dtype, name="number")
        program = front.compile_program(lambda number: number + 1, [placeholder])
        with ipu.Session() as session:
            session.run(program, {placeholder: good})
            with pytest.raises(ValueError, match=f"placeholder 'number'.*does not fit {dtype}"):
                session.run(program, {placeholder: bad})
    wide = ipu.placeholder(np.int64, name="number")
    program = front.compile_program(lambda number: number, [wide])
    with ipu.Session() as session:
        assert session.run(program[0], {wide: 5}).dtype == np.int32
        with pytest.raises(ValueError, match="does not fit int32"):
            session.run(program, {wide: 2**40})
    with pytest.raises(ValueError, match=r"inputs\[0\].*does not fit int32"):
        front.compile_program(lambda x: x, [np.int64(2**40)])
    with pytest.raises(ValueError, match="inputs: leaf 0.*does not fit int32"):
        front.compile_pipeline([lambda x: None], 1, inputs=[np.int64(2**40)])
    model = front.Pipelined([lambda x: x], 1, [np.int64(1), np.int64(2**40)])
    with front.session_of(model) as session:
        assert model.run(session) == [1]
        with pytest.raises(ValueError, match="element 1 of the dataset.*does not fit int32"):
            model.run(session)


def test_one_infeed_in_two_pipelines():
    outfeeds = [IPUOutfeedQueue(), IPUOutfeedQueue()]
    elements = [{"a": np.float32(n), "b": np.float32(100 + n)} for n in range(20)]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)

    def function():
        for name, outfeed in zip("ab", outfeeds, strict=True):
            stages = [lambda a, b, name=name: {"a": a, "b": b}[name] * 2]
            pipeline(stages, 2, infeed_queue=infeed, outfeed_queue=outfeed)

    program = front.compile_program(function)
    with ipu.Session() as session:
        session.run(infeed.initializer)
        for start in (0, 4):
            session.run(program)
            first, second = session.run([queue.dequeue() for queue in outfeeds])
            np.testing.assert_array_equal(first, [2 * start, 2 * start + 2])
            np.testing.assert_array_equal(second, [2 * (102 + start), 2 * (103 + start)])


def test_a_list_is_checked_before_anything_runs():
    model = front.Model(device_mapping=[0, 0])
    scaled = front.compile_program(lambda: np.float32(2))
    with front.session_of(model) as session:
        for wrong in (None, "text"):
            with pytest.raises(TypeError, match="fetch must be"):
                session.run([model.program, wrong], {model.rate: 0.1})
        assert session.update_count() == 0
        assert session.run([model.program, (scaled,)], {model.rate: 0.1}) == [None, ([2.0],)]


def test_programs_with_the_same_names_and_other_shapes():
    def program(size):
        return front.compile_program(lambda: ipu.get_variable("v", (size,), initializer=1.0) * 2)

    programs = [program(2), program(3)]
    for chosen in programs:
        with ipu.Session() as session:
            session.run(ipu.global_variables_initializer())
            assert set(session.run(chosen)[0]) == {2.0}
        with pytest.raises(RuntimeError, match="closed"):
            session.run(chosen)


@pytest.mark.thorough
def test_programs_that_are_dropped_leave_next_to_nothing():
    client = jax.devices()[0].client

    def make_and_drop(number):
        for _ in range(number):
            optimize = lambda rate, loss: OptimizerFunctionOutput(optax.adam(rate), loss)  # noqa: E731
            model = front.Model(optimizer_function=optimize)
            with front.session_of(model) as session:
                model.run(session)
            del session, model
        for _ in range(3):
            gc.collect()  # the first frees what the next one finds to be unused
        num_bytes = sum(array.nbytes for array in jax.live_arrays())
        return len(gc.get_objects()), len(client.live_executables()), num_bytes

    num_objects, num_loaded, num_bytes = make_and_drop(2)
    objects_left, loaded_left, bytes_left = make_and_drop(2)
    # What JAX keeps in its caches of a few thousand entries; a program's own traces are 1600.
    assert (objects_left - num_objects) / 2 < 800
    assert loaded_left <= num_loaded
    assert bytes_left - num_bytes < 1000  # a few scalars that JAX keeps


def test_configuring_after_a_run_moves_the_program():
    model = front.Model()
    with front.session_of(model) as session:
        model.run(session)
        config = ipu.config.IPUConfig()
        config.select_ipus = [3, 2]
        config.configure_ipu_system()
        before = jax.live_arrays()
        model.run(session)
        new = [array for array in jax.live_arrays() if not any(array is one for one in before)]
    kernels = {(array.shape, *array.devices()) for array in new if array.shape in ((12, 16), (16, 10))}
    assert kernels == {((12, 16), jax.devices()[3]), ((16, 10), jax.devices()[2])}


def test_a_bigger_program_compiled_later_does_not_disturb():
    small = front.Model()
    with front.session_of(small) as session:
        small.run(session)
        with pytest.raises(RuntimeError, match="20 devices are needed"):
            front.Pipelined([lambda x: x] * 20, 1, inputs=[1.0])
        small.run(session)


def test_threads_run_one_after_another_and_read_meanwhile():
    """The runs of three threads are those of one, and readers find the variables of one update."""
    num_threads, num_runs = 3, 2
    model, other = front.Model(repeat_count=2), front.Model(repeat_count=2)
    with front.session_of(model, seed=3) as session, front.session_of(other, seed=3) as plain:
        for one in (session, plain):
            one.run(ipu.global_variables_initializer())
        errors, seen = [], []
        has_read, is_done = threading.Event(), threading.Event()

        def work():
            try:
                for _ in range(num_runs):
                    session.run(model.program, {model.rate: 0.01})
                has_read.wait()
            except BaseException as error:
                errors.append(error)

        def read():
            try:
                while not is_done.is_set():
                    seen.append((session.update_count(), session.variables))
                    session.variable_value(next(iter(seen[-1][1])))
                    session.take_snapshot()
                    has_read.set()
            except BaseException as error:
                errors.append(error)
                has_read.set()

        workers = [threading.Thread(target=work) for _ in range(num_threads)]
        reader = threading.Thread(target=read)
        for thread in (*workers, reader):
            thread.start()
        for thread in workers:
            thread.join()
        is_done.set()
        reader.join()
        assert not errors, errors
        for _ in range(num_threads * num_runs):
            plain.run(other.program, {other.rate: 0.01})
        assert session.update_count() == plain.update_count() == 2 * num_threads * num_runs
        for name, value in plain.variables.items():
            np.testing.assert_array_equal(session.variables[name], value)
        assert all(variables.keys() == plain.variables.keys() for _count, variables in seen)


def test_python_that_is_called_back_may_read_the_session():
    """Also while the update of a pipeline waits for it."""
    found = []

    def optimizer_function(rate, loss):
        def update(updates, state, params=None):
            jax.debug.callback(lambda: found.append(session.variables))
            return optax.sgd(rate).update(updates, state, params)

        return OptimizerFunctionOutput(optax.GradientTransformation(optax.sgd(0.1).init, update), loss)

    model = front.Model(optimizer_function=optimizer_function)
    with ipu.Session() as session:
        session.run([model.initializer, ipu.global_variables_initializer()])
        model.run(session)
        jax.effects_barrier()
    assert len(found) == session.update_count() == 1


@pytest.mark.parametrize("mapping", [[0, 1], [0, 0]])  # called in the main thread, and in one of JAX
def test_python_that_is_called_back_may_not_run_the_session(mapping):
    told = []

    def call_session(_value):
        try:
            session.run(dequeue)  # not the model: XLA keeps what it calls, and that would keep the program
        except RuntimeError as error:
            told.append(str(error))

    def stage(rate, x, labels):
        jax.debug.callback(call_session, x[0, 0])
        return front.first_stage(rate, x, labels)

    model = front.Model(computational_stages=[stage, front.second_stage], device_mapping=mapping)
    dequeue = model.outfeed.dequeue()
    with front.session_of(model) as session:
        assert len(model.run(session)) == 3
    assert len(told) == 3
    assert all("within one of its runs" in message for message in told)


def test_a_signals_handler_may_save(tmp_path):
    handled, is_handled = [], threading.Event()

    def save(_number, _frame):
        session.save(tmp_path / "checkpoint")
        with pytest.raises(RuntimeError, match="within one of its runs"):
            model.run(session)
        handled.append(session.update_count())
        is_handled.set()

    def dataset():
        for number, element in enumerate(front.data()()):
            if number == 20:  # the run waits for more
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # which may be asleep
                is_handled.wait()
            yield element

    before = signal.signal(signal.SIGUSR1, save)
    try:
        model = front.Model(dataset, repeat_count=10)
        with front.session_of(model) as session:
            model.run(session)
            trained = session.variables
        with ipu.Session() as session:
            session.restore(tmp_path / "checkpoint", infeeds=False)
            assert session.variables.keys() == trained.keys()
            assert session.update_count() == handled[0] <= 20 // 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_waits_until_an_updates_state_is_in_its_place(monkeypatch):
    """Before that, the memory of the old state is gone, and the new one is not in its place."""
    model, numbers = front.Model(repeat_count=1), [signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM]
    seen, raised = [], []

    def read(number, _frame):
        seen.append((number, session.update_count(), session.variables))

    keep = Store.keep

    def signal_and_keep(store, *arguments):
        raised.append(numbers[len(raised)])
        signal.raise_signal(raised[-1])
        keep(store, *arguments)

    before = [signal.signal(number, read) for number in numbers]
    try:
        with front.session_of(model) as session:
            model.run(session)
            monkeypatch.setattr(Store, "keep", signal_and_keep)
            for count, number in enumerate(numbers, 2):
                model.run(session)
                assert seen[-1][:2] == (number, count)
                np.testing.assert_equal(seen[-1][2], session.variables)
            assert len(seen) == 3
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_data_set_that_runs_the_session_is_told():
    """It would wait for the run that waits for it. What it may do is read."""

    def dataset():
        for number, element in enumerate(front.data()()):
            assert isinstance(session.variables, dict)
            if number == 6:
                session.run(model.outfeed.dequeue())
            yield element

    with ipu.Session() as session:
        model = front.Model(dataset=dataset)
        session.run(ipu.global_variables_initializer())
        session.run(model.initializer)
        with pytest.raises(RuntimeError, match="A data set has called the session in the infeed's thread"):
            for _ in range(5):
                session.run(model.program, {model.rate: 0.01})
