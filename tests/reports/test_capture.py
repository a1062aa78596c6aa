"""Traces of what runs: `ipu.reports.capture`, and what POPLAR_ENGINE_OPTIONS asks for."""

import itertools
import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from ipu_pipeline.engine.execution import observation
from ipu_pipeline.processes import launcher
from ipu_pipeline.processes.launcher import Failure, JobHistory
from ipu_pipeline.reports import device_events, trace_capture
from ipu_pipeline.reports.profile import ACTIONS, Event, EventKind, busy_time, read_profile
from ipu_pipeline.reports.report_files import check_directory, read_manifest, remove_reports, write_reports
from tests.support import front
from tests.support.programs import start

COUNT, WIDTH = 8, 64
COMPUTED = (EventKind.FORWARD, EventKind.BACKWARD)
HALVED = (EventKind.FORWARD, EventKind.INPUT_GRADIENTS, EventKind.WEIGHT_GRADIENTS)


def make_pipeline(mapping=(0, 1, 2, 3), plan=1, num_stages=4, **options):
    def make(index):
        def stage(x, y):
            x = jnp.tanh(x @ engine.get_variable(f"layer_{index}/weights", (WIDTH, WIDTH)))
            return jnp.mean((x - y) ** 2) if index == num_stages - 1 else (x, y)

        stage.__name__ = f"stage_{index}"
        return stage

    settings = {
        "num_micro_batches": COUNT,
        "optimizer": optax.sgd(0.1),
        "device_mapping": list(mapping),
        **({"dispatch_plan": engine.Chunking(plan)} if len(set(mapping)) > 1 else {}),
        **options,
    }
    pipeline = engine.Pipeline([make(index) for index in range(num_stages)], **settings)
    rng = np.random.default_rng(0)
    data = [tuple(rng.normal(size=(2, 4, WIDTH)).astype("float32")) for _ in range(COUNT)]
    return pipeline, data


def run(pipeline, data, num_steps=2, state=None):
    state = pipeline.init(jax.random.key(0), data[0]) if state is None else state
    for _step in range(num_steps):
        state, outputs = pipeline.step(state, data)
    return state, outputs


@pytest.fixture(scope="module")
def made():
    """A pipeline that several tests run, each with a state of its own."""
    return make_pipeline(schedule="interleaved")


@pytest.fixture(scope="module")
def traced(made, tmp_path_factory):
    """A step of it: where its reports are, and its profile."""
    directory = tmp_path_factory.mktemp("traced")
    with ipu.reports.capture(directory) as captured:
        run(*made, 1)
    return directory, captured.profile


def actions_of(events):
    return Counter((e.kind, e.stage, e.micro_batch, e.step) for e in events if e.kind in ACTIONS)


def check_order(events):
    """Nothing ran before what it depends on had ended, and nothing before it began."""
    ends = {(e.kind, e.stage, e.micro_batch, e.step): e.end for e in events if e.kind in ACTIONS}
    for event in events:
        assert event.begin <= event.end
        if event.kind is EventKind.FORWARD and event.stage:
            assert ends[EventKind.FORWARD, event.stage - 1, event.micro_batch, event.step] <= event.begin
        if event.kind in (EventKind.BACKWARD, *HALVED[1:]):
            others = [(EventKind.FORWARD, event.stage), (event.kind, event.stage + 1)]
            if event.kind is EventKind.WEIGHT_GRADIENTS:
                others = [(EventKind.INPUT_GRADIENTS, event.stage)]
            for kind, stage in others:
                end = ends.get((kind, stage, event.micro_batch, event.step), 0.0)
                assert end <= event.begin + 1e-6


CASES = {
    "two stages on each IPU": {"mapping": (0, 0, 1, 1)},
    "one program": {"mapping": (0, 0, 0, 0)},
    "looped": {"mapping": (0, 1, 0, 1), "schedule": "looped"},
    "halves": {"schedule": "zero_bubble"},
    "halves, chunks": {"schedule": "zero_bubble", "plan": 2},
}


def capture_whole(directory, call):
    """A profile of a call. On a machine that is busy, JAX's profiler misses a program now and then."""
    for _attempt in range(3):
        with ipu.reports.capture(directory) as captured:
            call()
        if captured.profile.num_lost == 0:
            break
    return captured.profile


@pytest.mark.parametrize(
    "case", [case if case == "halves" else pytest.param(case, marks=pytest.mark.thorough) for case in CASES]
)
def test_every_action_has_one_event(case, tmp_path):
    pipeline, data = make_pipeline(**CASES[case])
    mapping = pipeline.device_mapping
    state, _outputs = run(pipeline, data)  # what nobody traced is not in the trace
    profile = capture_whole(tmp_path / "trace", lambda: run(pipeline, data, 2, state))
    assert profile.num_lost == profile.num_dropped == 0
    assert not profile.notes
    expected = Counter(
        (kind, stage, micro_batch, step)
        for kind in (HALVED if "halves" in case else COMPUTED)
        for stage in range(4)
        for micro_batch in range(COUNT)
        for step in (2, 3)
        if (kind, stage) != (EventKind.INPUT_GRADIENTS, 0)  # which nothing needs
    )
    assert actions_of(profile.events) == expected
    ipus = {event.stage: event.ipu for event in profile.events if event.kind in COMPUTED}
    assert [ipus[stage] for stage in range(4)] == list(mapping)
    updates = [event for event in profile.events if event.kind is EventKind.UPDATE]
    assert sorted((event.ipu, event.step) for event in updates) == [
        (number, step) for number in sorted(set(mapping)) for step in (2, 3)
    ]
    if "chunks" not in case and case != "one program":  # whose parts of a program are reckoned
        check_order(profile.events)
    assert read_profile((tmp_path / "trace" / "profile.json").read_text()) == _rounded(profile)


@pytest.mark.thorough
def test_replicas_have_ipus_and_micro_batches_of_their_own(tmp_path):
    pipeline, data = make_pipeline((0, 2), num_stages=2, num_replicas=2)
    state, _outputs = run(pipeline, 2 * data, 1)
    profile = capture_whole(tmp_path, lambda: run(pipeline, 2 * data, 2, state))
    assert profile.num_lost == profile.num_dropped == 0
    found = {(e.stage, e.micro_batch, e.step): e.ipu for e in profile.events if e.kind in COMPUTED}
    assert found == {
        (stage, micro_batch, step): 3 * (micro_batch % 2) + (0, 2)[stage]
        for stage in range(2)
        for micro_batch in range(2 * COUNT)
        for step in (1, 2)
    }
    assert set(actions_of(profile.events).values()) == {1}
    check_order(profile.events)
    updates = [(e.ipu, e.step) for e in profile.events if e.kind is EventKind.UPDATE]
    assert sorted(updates) == [(ipu, step) for ipu in (0, 2, 3, 5) for step in (1, 2)]
    sent = [e for e in profile.events if e.kind is EventKind.TRANSFER]
    assert {(e.source, e.ipu, e.micro_batch % 2) for e in sent} == {
        (first + source, first + target, replica)
        for replica, first in ((0, 0), (1, 3))
        for source, target in ((0, 2), (2, 0))
    }
    joined = [e for e in profile.events if e.name == "jit_join_parts"]
    assert Counter(e.ipu for e in joined) == dict.fromkeys((0, 2, 3, 5), 2)
    (facts,) = profile.pipelines
    assert (facts.num_replicas, facts.num_micro_batches, facts.is_one_program) == (2, COUNT, False)
    assert [device.ipu for device in profile.devices] == [0, 2, 3, 5]
    assert read_profile((tmp_path / "profile.json").read_text()) == _rounded(profile)


def _rounded(profile):
    """A profile as its file holds it."""
    return read_profile(profile.to_json())


def test_what_programs_take_alone_is_measured(made, traced):
    """Before the first recorded step."""
    (facts,) = traced[1].pipelines
    assert facts.costs == engine.planning.measure_costs(made[0])
    assert min(*facts.costs.forward, *facts.costs.backward, *facts.costs.update) > 0
    assert facts.costs.transfers.keys() == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}


def test_shared_programs_are_marked(tmp_path, traced):
    pipeline, data = make_pipeline((0, 1), plan=4, num_stages=2)
    with ipu.reports.capture(tmp_path) as captured:
        run(pipeline, data, 1)
    programs = {}
    for event in captured.profile.events:
        if event.kind in COMPUTED:
            programs.setdefault(event.program, []).append(event)
    assert Counter(map(len, programs.values())) == {4: 2 * (1 + 1), 8: 2}  # the last stage does both
    for together in programs.values():
        assert all(event.is_shared for event in together)
        assert len({(event.stage, event.ipu) for event in together}) == 1
        for before, after in itertools.pairwise(together):
            assert after.begin == pytest.approx(before.end)
    assert {event.stage for event in traced[1].events if event.is_shared} == {3}


def test_what_is_sent_is_counted(traced):
    """Activations one way, gradients the other."""
    sent = [event for event in traced[1].events if event.kind is EventKind.TRANSFER]
    assert Counter((event.source, event.ipu, event.stage) for event in sent) == {
        (a, b, a): COUNT for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4
    }
    assert {event.num_bytes for event in sent} == {4 * WIDTH * 4}
    edges = {(edge.source, edge.target): edge for edge in traced[1].pipelines[0].edges}
    assert edges[0, 1].num_forward_bytes == 4 * WIDTH * 4
    assert edges[1, 0].num_backward_bytes == 4 * WIDTH * 4


def test_the_pipeline_is_described(traced):
    (facts,) = traced[1].pipelines
    assert (facts.kind, facts.schedule, facts.num_micro_batches) == ("training", "interleaved", COUNT)
    assert (facts.micro_batch_size, facts.chunk_size, facts.trains) == (4, 1, True)
    assert [stage.name for stage in facts.stages][:2] == ["stage 0 (stage_0)", "stage 1 (stage_1)"]
    assert [stage.in_flight for stage in facts.stages] == [4, 3, 2, 1]
    for index, stage in enumerate(facts.stages):
        (layer,) = stage.layers
        assert (layer.name, layer.num_parameters) == (f"layer_{index}", WIDTH * WIDTH)
        assert (stage.num_parameters, stage.num_parameter_bytes) == (WIDTH * WIDTH, 4 * WIDTH * WIDTH)
        assert stage.forward_operations > 2 * 4 * WIDTH * WIDTH
        assert stage.is_fused == (index == 3)
    assert [ipu.num_variable_bytes for ipu in facts.memory] == [4 * WIDTH * WIDTH] * 4
    assert len(traced[1].devices) == 4


@pytest.mark.parametrize("mapping", [(0, 1), (0, 0)], ids=["two IPUs", "one IPU"])
def test_numbers_are_the_same_with_and_without(tmp_path, mapping):
    pipeline, data = make_pipeline(mapping, num_stages=2, optimizer=optax.adam(0.1))
    with ipu.reports.capture(tmp_path):  # whose first step is rehearsed
        state, traced = run(pipeline, data, 2)
    expected, losses = run(pipeline, data, 2)
    for name, value in expected.variables.items():
        np.testing.assert_array_equal(state.variables[name], value)
    np.testing.assert_array_equal(traced.losses, losses.losses)


def test_a_session_is_traced(tmp_path):
    model = front.Model(repeat_count=2, gradient_accumulation_count=4, device_mapping=[0, 0])
    with front.session_of(model) as session:
        model.run(session)
        with ipu.reports.capture(tmp_path) as captured:
            model.run(session)  # and dequeues
    (facts,) = captured.profile.pipelines
    assert facts.name == model.program.calls[0].name
    forwards = [event for event in captured.profile.events if event.kind is EventKind.FORWARD]
    assert Counter((event.stage, event.step) for event in forwards) == {
        (stage, step): 4 for stage in (0, 1) for step in (2, 3)
    }
    kinds = Counter(event.kind for event in captured.profile.events)
    assert kinds[EventKind.OUTFEED] == 1
    assert kinds[EventKind.INFEED_WAIT] >= 1
    assert all(event.ipu is None for event in captured.profile.events if event.kind is EventKind.OUTFEED)


def test_loops_are_traced(tmp_path):
    def program():
        def body(total, value):
            with ipu.scopes.ipu_shard(0):
                doubled = value * 2.0
            with ipu.scopes.ipu_shard(1):
                return total + jnp.sum(doubled), value

        return ipu.loops.repeat(3, body, [jnp.float32(0), jnp.ones(4)])[0]

    compiled = front.compile_program(program)
    with ipu.Session() as session, ipu.reports.capture(tmp_path) as captured:
        assert session.run(compiled) == [24.0]
    (facts,) = captured.profile.pipelines
    assert (facts.kind, facts.device_word) == ("loop", "IPU")
    found = {(event.stage, event.micro_batch) for event in captured.profile.events}
    assert {(stage, number) for stage in (0, 1) for number in range(3)} <= found


@pytest.mark.thorough
def test_two_pipelines_that_are_called_the_same(tmp_path):
    """Their programs have the same names, and run on the same devices."""
    training, data = make_pipeline()
    other, _data = make_pipeline()
    states = [run(pipeline, data, 1)[0] for pipeline in (training, other)]

    def both():
        run(training, data, 1, states[0])
        run(other, data, 2, states[1])

    profile = capture_whole(tmp_path, both)
    assert profile.num_lost == 0
    assert [facts.name for facts in profile.pipelines] == ["Pipeline", "Pipeline_1"]
    assert [facts.costs is None for facts in profile.pipelines] == [False, True]
    for number, num_steps in enumerate([1, 2]):
        own = [event for event in profile.events if event.pipeline == number]
        assert set(actions_of(own).values()) == {1}
        assert len(actions_of(own)) == 2 * 4 * COUNT * num_steps
        check_order(own)


def test_chrome_trace(traced):
    directory, profile = traced
    document = json.loads((directory / "trace.json").read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert Counter(event["cat"] for event in events) == Counter(e.kind.value for e in profile.events)
    tracks = {}
    for event in events:
        span = event["ts"], event["ts"] + event["dur"]
        tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in tracks.values():
        spans.sort()
        assert all(end <= begin + 0.01 for (_b, end), (begin, _e) in itertools.pairwise(spans))
    names = {event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"device 0", "device 1", "device 2", "device 3", "Host"} <= names
    assert "forward of stage 1, micro-batch 2" in {event["name"] for event in events}


def test_a_long_run_is_recorded_in_part(made, tmp_path, caplog):
    pipeline, data = made
    state, _outputs = run(pipeline, data, 1)
    with ipu.reports.capture(tmp_path, max_actions=100) as captured:
        run(pipeline, data, 3, state)
    profile = captured.profile
    assert len(actions_of(profile.events)) <= 100
    assert profile.num_dropped > 50
    assert "max_actions=100" in profile.notes[0]
    assert profile.notes[0] in caplog.text


def test_a_report_says_that_the_job_was_started_again(made, tmp_path, monkeypatch):
    """Where there was no room to measure what programs take alone, the trace is all that there is."""

    def fail(_pipeline):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("ipu_pipeline.reports.recorder.measure_costs", fail)
    monkeypatch.setattr(trace_capture, "count_cores", lambda: 7)
    monkeypatch.setenv(launcher.MEMORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(launcher, "_useful", 75.0)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(time=lambda: 100.0))
    failure = Failure("process 1 was ended by SIGKILL", 50.0, 5, 6, 1, 4.25)
    JobHistory(0.0, 1, (failure,)).write(tmp_path)
    pipeline, data = made
    with ipu.reports.capture(tmp_path / "reports") as captured:
        run(pipeline, data, 1)
    assert captured.profile.pipelines[0].costs is None
    assert captured.profile.num_cores == 7
    assert len(actions_of(captured.profile.events)) == 2 * 4 * COUNT
    (note,) = captured.profile.notes
    assert note == (
        "The job has been started again once. The last time, training has gone on with run 5 (to step 6), "
        "4.2 s after process 1 was ended by SIGKILL; 1 run was done again. Its runs took 75% of its time "
        "until now (goodput)."
    )
    assert note in (tmp_path / "reports" / "report.html").read_text()


def test_first_runs_are_rehearsed(tmp_path, monkeypatch):
    """Also those of a pipeline that begins in the midst; and not where Python would see it."""
    rehearsed = []
    original = observation.rehearse

    def rehearse(watcher, runner, state, request):
        before = len(watcher.launched), runner.has_run
        original(watcher, runner, state, request)
        rehearsed.append((runner.has_run, len(watcher.launched) - before[0]))

    monkeypatch.setattr("ipu_pipeline.engine.pipeline.rehearse", rehearse)
    seen = []

    def report(value):
        seen.append(float(value))
        return value

    def printing(x, y):
        return jnp.mean((jax.pure_callback(report, y[0, 0], y[0, 0]) + x - y) ** 2)

    pipeline, data = make_pipeline(num_stages=3, mapping=(0, 1, 2))
    other, _data = make_pipeline(num_stages=2, mapping=(0, 1))
    calling = engine.Pipeline(
        [lambda x, y: (x * engine.get_variable("w", ()), y), printing],
        num_micro_batches=COUNT,
        optimizer=optax.sgd(0.1),
    )
    with ipu.reports.capture(tmp_path) as captured:
        run(pipeline, data, 2)
        run(other, data, 2)
        run(calling, data, 1)
    assert [has_run for has_run, _number in rehearsed] == [True, True, True, True, False]
    assert [number > 0 for _has_run, number in rehearsed] == [False, False, True, False, False]
    assert 0.0 not in seen
    for number, (num_stages, num_steps) in enumerate([(3, 2), (2, 2), (2, 1)]):
        own = [event for event in captured.profile.events if event.pipeline == number]
        num_forwards = sum(event.kind is EventKind.FORWARD for event in own)
        assert num_forwards == num_stages * num_steps * COUNT
        check_order(own)


def test_an_error_leaves_the_trace_of_what_ran(made, tmp_path):
    pipeline, data = made
    with pytest.raises(KeyError, match="mine"), ipu.reports.capture(tmp_path):
        with pytest.raises(RuntimeError, match="recorded already"), ipu.reports.capture(tmp_path / "other"):
            pass  # only one at a time
        run(pipeline, data, 1)
        raise KeyError("mine")
    assert read_profile((tmp_path / "profile.json").read_text()).events
    assert watching.current() is None


def test_another_profiler(made, tmp_path):
    pipeline, data = made
    expected = pytest.raises(RuntimeError, match="JAX's profiler, which runs already")
    with jax.profiler.trace(str(tmp_path / "other")), expected, ipu.reports.capture(tmp_path / "ours"):
        run(pipeline, data, 1)


def test_nothing_that_ran(tmp_path):
    with pytest.warns(UserWarning, match="nothing was run"), ipu.reports.capture(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_actions", [0, -1, 1.5, True, "10"])
def test_max_actions_is_checked(tmp_path, max_actions):
    with pytest.raises(ValueError, match="max_actions must be an integer of at least 1"):  # noqa: SIM117
        with ipu.reports.capture(tmp_path, max_actions=max_actions):
            pass


@pytest.mark.soak  # JAX's profiler drops programs where other processes take the cores
def test_threads_are_traced_together(tmp_path):
    made = [make_pipeline() for _ in range(2)]
    states = [run(pipeline, data, 1)[0] for pipeline, data in made]

    def work(number):
        run(*made[number], 2, states[number])

    with ipu.reports.capture(tmp_path) as captured, ThreadPoolExecutor() as threads:
        list(threads.map(work, range(2)))
    for number in range(2):
        own = [event for event in captured.profile.events if event.pipeline == number]
        assert len(actions_of(own)) == 2 * 4 * COUNT * 2
        check_order(own)


@pytest.mark.thorough
def test_no_thread_begins_the_recording_while_another_one_measures(tmp_path, monkeypatch):
    """What is measured would be part of the trace."""
    has_begun, other_runs = [], threading.Event()

    def measure(_pipeline):
        other_runs.wait(60)
        for _turn in range(1000):
            os.sched_yield()
        has_begun.append(watching.current()._has_begun)
        raise ValueError("not this time")

    monkeypatch.setattr("ipu_pipeline.reports.recorder.measure_costs", measure)
    made = [make_pipeline() for _ in range(2)]
    states = [run(pipeline, data, 1)[0] for pipeline, data in made]

    def second():
        other_runs.set()
        run(*made[1], 1, states[1])

    with ipu.reports.capture(tmp_path), ThreadPoolExecutor() as threads:
        for begun in (threads.submit(run, *made[0], 1, states[0]), threads.submit(second)):
            begun.result()
    assert has_begun in ([False], [False, False])


# Files.


def test_somebody_elses_file_is_left_alone(tmp_path):
    (tmp_path / "profile.json").write_text("mine")
    with pytest.raises(ValueError, match="has a file 'profile.json' that its manifest.json does not list"):  # noqa: SIM117
        with ipu.reports.capture(tmp_path):
            pass
    assert (tmp_path / "profile.json").read_text() == "mine"


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"), ipu.reports.capture(tmp_path / "file"):
        pass


def test_reports_are_removed_by_their_manifest_only(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    outside = tmp_path.parent / f"{tmp_path.name}_outside"
    outside.mkdir()
    (outside / "profile.json").write_text("mine")
    write_reports(tmp_path, {"profile.json": "{}", "trace.json": "{}"})
    os.unlink(tmp_path / "trace.json")
    (tmp_path / "trace.json").symlink_to(outside / "profile.json")  # in the place of a report
    assert set(read_manifest(tmp_path)) == {"manifest.json", "profile.json", "trace.json"}
    link = tmp_path.parent / f"{tmp_path.name}_link"
    link.symlink_to(tmp_path)
    assert remove_reports(link) == ()
    assert set(remove_reports(tmp_path)) == {"manifest.json", "profile.json"}
    assert kept.read_text() == (outside / "profile.json").read_text() == "mine"
    assert (tmp_path / "trace.json").is_symlink()


@pytest.mark.parametrize("names", [["../victim"], ["/etc/victim"], [".."], [1], "victim"])
def test_a_manifest_of_somebody_else(tmp_path, names):
    directory = tmp_path / "reports"
    directory.mkdir()
    (tmp_path / "victim").write_text("mine")
    for document in ({"format": "ipu_pipeline reports", "files": names}, {"files": ["x"]}, [], None):
        (directory / "manifest.json").write_text(json.dumps(document))
        remove_reports(directory)
        directory.mkdir(exist_ok=True)
    assert (tmp_path / "victim").read_text() == "mine"


def test_an_empty_directory_goes_with_its_reports(tmp_path):
    directory = tmp_path / "reports"
    check_directory(directory, ["profile.json"])
    write_reports(directory, {"profile.json": "{}"})
    assert oct(os.stat(directory / "profile.json").st_mode & 0o777) == oct(0o666 & ~_umask())
    remove_reports(directory)
    assert not directory.exists()
    assert remove_reports(directory) == ()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no profile of ipu_pipeline"),
        ("[]", "no profile of ipu_pipeline"),
        ('{"format": "other", "version": 1}', "the format must be"),
        ('{"format": "ipu_pipeline profile", "version": 7}', "a later ipu_pipeline"),
        ('{"format": "ipu_pipeline profile", "version": 1}', "damaged"),
    ],
)
def test_profiles_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        read_profile(text)


# Runs.


def test_costs_of_fewer_stages_are_damaged(traced):
    document = json.loads(traced[1].to_json())
    costs = document["pipelines"][0]["costs"]
    for name in ("forward", "backward", "update", "forward_cores", "backward_cores", "weight_gradients"):
        costs[name].pop()
    costs["num_gradient_bytes"].pop()
    costs["transfers"] = []
    with pytest.raises(ValueError, match=r"damaged .*costs of 3 of 4 stages"):
        read_profile(json.dumps(document))


def test_another_word_for_a_device_is_damage(traced):
    document = json.loads(traced[1].to_json())
    document["pipelines"][0]["device_word"] = "<script>alert(1)</script>"
    with pytest.raises(ValueError, match="damaged .*device_word '<script>"):
        read_profile(json.dumps(document))


def test_busy_time_counts_what_overlaps_once():
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.7)]
    assert busy_time(Event(EventKind.FORWARD, *span, 0) for span in spans) == 4.0
    assert busy_time([]) == 0.0


def test_programs_of_one_name_are_told_apart():
    def made(number, device=0):
        return device_events.ProgramRun("jit_stage", device, number, number, number + 1)

    runs = [made(5), made(-2_000_000_000), made(4), made(-1_999_999_990), made(7_000_000), made(6, 1)]
    groups = device_events.group_runs(runs)
    numbers = sorted([run.number for run in group] for group in groups)
    assert numbers == [[-2_000_000_000, -1_999_999_990], [4, 5], [6], [7_000_000]]


# Whole programs.

PROGRAM = """
from tests.support import front
model = front.Model(repeat_count=1)
with front.session_of(model) as session:
    model.run(session)
raise SystemExit(3)
"""


@pytest.mark.thorough
def test_a_whole_program_is_traced_by_the_environment(tmp_path):
    options = {"autoReport.all": "true", "autoReport.directory": "./reports"}
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"POPLAR_ENGINE_OPTIONS": json.dumps(options)}
    done = start("program.py", "3", folder=tmp_path, **variables)
    assert done.returncode == 3, done.stderr
    profile = read_profile((tmp_path / "reports" / "profile.json").read_text())
    assert len(profile.pipelines) == 1
    assert "program.py 3" in profile.program
    assert actions_of(profile.events)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nothing", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"autoReport.all": "maybe"}', 'autoReport.all must be "true" or "false"; got \'maybe\''),
    ],
)
def test_engine_options_are_checked(monkeypatch, options, message):
    monkeypatch.setattr("ipu_pipeline.reports.trace_capture._has_read_environment", False)
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", options)
    with pytest.raises(ValueError, match=message):
        ipu.Session()


def test_engine_options_without_effect_are_told(monkeypatch):
    monkeypatch.setattr("ipu_pipeline.reports.trace_capture._has_read_environment", False)
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"target.workerStackSizeInBytes": "0x1000"}')
    with pytest.warns(UserWarning, match="'target.workerStackSizeInBytes' has no effect"), ipu.Session():
        assert watching.current() is None
