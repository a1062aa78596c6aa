"""`ipu-pipeline simulate` and `ipu-pipeline schedule`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_pipeline.command_line.main import main
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules import Cluster, Costs, LinkSpeed, Memory, Scenario, simulate
from ipu_pipeline.reports.predictions import study
from tests.support import traces


def run(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def fail(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


SMALL = ("simulate", "--stages", "2", "--micro-batches", "2", "--forward-cost", "1", "--backward-cost", "2")


def test_simulate_prints_tables_and_the_advice(capsys):
    text, advice = run(capsys, *SMALL).rsplit("\n\n", 1)
    expected = """\
2 stages on 2 devices, 2 micro-batches, schedule grouped, training

                 waiting for data only  in lock-step
step time                            9             9
devices compute                  66.7%         66.7%
idle, ramp up                    11.1%         13.9%
idle, ramp down                  22.2%         19.4%
idle, imbalance                   0.0%          0.0%
idle, transfers                   0.0%          0.0%
idle, host                        0.0%          0.0%

device  stages  work  computes
0       0          6     66.7%
1       1          6     66.7%

what if                                micro-batches  step time  computes  samples per time
grouped, as it is                                  2          9     66.7%             +0.0%
grouped                                            1          6     50.0%            -25.0%
grouped                                            4         15     80.0%            +20.0%
grouped                                            8         27     88.9%            +33.3%
"""
    assert text.startswith(expected)
    variants = schedules.what_if(Scenario(Costs.of(2, forward=1, backward=2), "grouped", 2))
    rows = [line.split() for line in text.splitlines()[-len(variants) :]]
    names = ["grouped, as it is", *(row.split or row.schedule for row in variants[1:])]
    assert [" ".join(row[:-4]) for row in rows] == names
    for cells, row in zip(rows, variants, strict=True):
        numbers = [row.num_micro_batches, row.step_time, 100 * row.utilisation, 100 * row.gain]
        assert [float(cell.rstrip("%")) for cell in cells[-4:]] == pytest.approx(numbers, abs=0.05)
    assert advice == (
        "The schedule zero_bubble instead of grouped would give 29% more samples per second (a step takes "
        "9 now, and 7 then).\n"
    )


def test_simulate_takes_the_time_of_weight_gradients(capsys):
    given = "--stages 2 --micro-batches 4 --schedule zero_bubble --weight-gradients-cost 0.5 --json"
    printed = json.loads(run(capsys, "simulate", *given.split()))
    assert printed["scenario"]["costs"]["weight_gradients"] == [0.5, 0.5]
    kinds = {action["kind"] for action in printed["free_running"]["actions"]}
    assert kinds == {"forward", "input gradients", "weight gradients"}
    with pytest.raises(SystemExit):
        run(capsys, "simulate", *given.replace("0.5", "3").split())
    assert "argument --weight-gradients-cost: Costs: weight_gradients are a part" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "mapping"),
    [
        ("looped", [0, 1, 2, 0, 1, 2]),
        ("zbv", [0, 1, 2, 2, 1, 0]),
        ("looped_zero_bubble", [0, 1, 2, 0, 1, 2]),
    ],
)
def test_some_schedules_have_two_stages_on_each_ipu(capsys, schedule, mapping):
    for command in ("simulate", "schedule"):
        options = (command, "--micro-batches", "3", "--schedule", schedule, "--stages")
        printed = json.loads(run(capsys, *options, "6", "--json"))
        assert printed.get("scenario", printed)["device_mapping"] == mapping
        assert "has two stages on each device; got 5" in fail(capsys, *options, "5")
        assert "needs a device_mapping" in fail(capsys, *options, "4", "--device-mapping", "0,1,0,0")


def test_simulate_prints_json(capsys):
    costs = Costs.of(3, forward=[1, 2, 1], backward=2, update=1, transfer=0.5, host=0.125)
    case = Scenario(costs, "interleaved", 8)
    options = "--stages 3 --micro-batches 8 --schedule interleaved --forward-cost 1,2,1 --backward-cost 2"
    options += " --update-cost 1 --transfer-cost 0.5,0.5 --host-cost 0.125 --json"
    printed = json.loads(run(capsys, "simulate", *options.split()))
    assert Scenario.from_dict(printed["scenario"]) == case
    simulation = simulate(case)
    for name, timeline in (("free_running", simulation.free_running), ("lock_step", simulation.lock_step)):
        assert printed[name]["step_time"] == timeline.step_time
        assert printed[name]["utilisation"] == timeline.utilisation
        assert printed[name]["idle"] == timeline.bubble.by_cause()
        assert [tuple(one.values()) for one in printed[name]["actions"]] == timeline.intervals()
        assert [tuple(one.values()) for one in printed[name]["transfers"]] == timeline.transfers()
    rows = schedules.what_if(case)
    assert [row["step_time"] for row in printed["what_if"]] == [row.step_time for row in rows]
    assert printed["advice"]["sentence"] == schedules.advise(case).sentence
    assert printed["advice"]["variant"]["gain"] == printed["advice"]["gain"]


def test_costs_from_a_file_and_from_options(capsys, tmp_path):
    case = Scenario(
        Costs.of(2, forward=[1, 3], backward=[2, 6], transfer={(0, 1): 0.5}, host=0.1, forward_cores=1.5),
        "interleaved",
        8,
        cores=2,
        memory=Memory((10, 20), (1, 2)),
        micro_batch_size=4,
    )
    profile = {"scenario": case.as_dict(), "events": []}
    for name, entries in (("bare", case.as_dict()), ("profile", profile)):
        (tmp_path / name).write_text(json.dumps(entries))
        given = ("simulate", "--json", "--costs-from", str(tmp_path / name))
        printed = json.loads(run(capsys, *given))
        assert Scenario.from_dict(printed["scenario"]) == case
    changed = json.loads(run(capsys, *given, "--micro-batches", "4", "--forward-cost", "5", "--cores", "4"))
    changed = Scenario.from_dict(changed["scenario"])
    assert changed.costs.forward == (5, 5)
    assert (changed.costs.backward, changed.costs.transfers) == ((2, 6), {(0, 1): 0.5})
    assert changed.costs.host == 0.1
    assert changed.costs.forward_cores == (1.5, 1.5)
    assert (changed.num_micro_batches, changed.schedule, changed.cores) == (4, "interleaved", 4)
    text = run(capsys, *given[::2], str(tmp_path / "profile"))
    assert "holds at most" in text
    assert "2 cores for all" in text
    assert "idle, shared cores" in text
    moved = json.loads(run(capsys, *given, "--device-mapping", "0,0"))
    assert moved["scenario"]["memory"] is None


def test_inference_chunks_and_a_device_mapping(capsys):
    options = "simulate --stages 4 --micro-batches 8 --inference --chunk-size 2 --json"
    options += " --device-mapping 0,1,0,1"
    found = Scenario.from_dict(json.loads(run(capsys, *options.split()))["scenario"])
    assert (found.training, found.chunk_size, found.device_mapping) == (False, 2, (0, 1, 0, 1))
    assert "2 micro-batches per program" in run(capsys, *options.replace("--json", "").split())


def test_what_if_of_many_actions_is_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("ipu_pipeline.command_line.simulate_command._MOST_ACTIONS", 4)
    text = run(capsys, *SMALL)
    assert text.endswith("More than 4 actions: --what-if simulates other schedules as well.\n")
    assert "interleaved" in run(capsys, *SMALL, "--what-if")
    assert json.loads(run(capsys, *SMALL, "--json"))["advice"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 0", "--stages: must be an integer of at least 1; got '0'"),
        ("--stages 4 --micro-batches 2.5", "--micro-batches: must be an integer of at least 1; got '2.5'"),
        ("--stages 4 --micro-batches 4 --forward-cost 1,2",
         "--forward-cost: must be one number or 4, one per stage; got 2. Give 4, or another --stages."),
        ("--stages 4 --micro-batches 4 --transfer-cost 1,2",
         "--transfer-cost: must be one number or 3, one per pair of neighbours; got 2. Give 3, or "
         "another --stages."),
        ("--stages 4 --forward-cost 1,x", "--forward-cost: must be a number of at least 0; got 'x'"),
        ("--stages 4 --host-cost -1", "--host-cost: must be a number of at least 0; got '-1'"),
        ("--stages 4 --host-cost nan", "--host-cost: must be a number of at least 0; got 'nan'"),
        ("--stages 4 --cores 0", "--cores: must be greater than 0; got '0'"),
        ("--stages 2 --micro-batches 4 --device-mapping 0",
         "--device-mapping: must have a device for each of the 2 stages; got 1. Give 2 numbers, or "
         "another --stages."),
        ("--device-mapping 0,-1", "--device-mapping: must be numbers from 0, as in 0,1,1,0; got '0,-1'"),
        ("--stages 2 --micro-batches 4 --chunk-size 3",
         "--chunk-size: must divide the number of micro-batches, 4; got 3. Give a divisor of it."),
        ("--stages 256 --micro-batches 9999",
         "--micro-batches: 9999 on 256 stages are 5119488 actions; a schedule has up to 4194304. "
         "Give fewer."),
        ("--stages 2 --micro-batches 4 --inference --backward-cost 1",
         "--backward-cost: there is none in inference. Leave it out."),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_the_option_the_rule_and_the_mend(capsys, options, message):
    assert fail(capsys, "simulate", *options.split()) == f"ipu-pipeline simulate: error: argument {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read '{file}': No such file or directory."),
        ("{", "must be a JSON file; '{file}' is not: Expecting property name"),
        ("[]", '\'{file}\' must have "costs", by itself or under "scenario"'),
        ('{"scenario": {"events": 1}}', "'{file}' must have \"costs\""),
        ('{"costs": {"forward": [-1]}}',
         "'{file}': Costs: forward must be finite and at least 0; got -1"),
        ('{"costs": {"forward": ["1"]}}', "'{file}': Scenario: the entries must be those of"),
        ('{"costs": {"forward": [1]}, "speed": 1}', "unexpected keyword argument 'speed'"),
    ],
)  # fmt: skip
def test_files_that_have_no_costs(capsys, tmp_path, text, message):
    file = tmp_path / "costs.json"
    if text is not None:
        file.write_text(text)
    said = fail(capsys, "simulate", "--costs-from", str(file))
    assert said.startswith("ipu-pipeline simulate: error: argument --costs-from: ")
    assert message.format(file=file) in said


def test_stages_that_a_file_does_not_have(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text('{"costs": {"forward": [1, 2]}}')
    said = fail(capsys, "simulate", "--costs-from", str(file), "--stages", "3")
    assert said.endswith("--stages: the file of --costs-from has 2 stages; got 3. Leave it out.")


CLUSTER = [*SMALL[:3], "--micro-batches", "4", "--replicas", "2", "--processes", "2"]


def test_a_cluster_from_options_and_from_a_file(capsys, tmp_path):
    options = "--sent-bytes 8 --gradient-bytes 10,20 --latency 0.5,1 --bandwidth 100"
    options += " --share-optimizer-state"
    text = run(capsys, *CLUSTER, *options.split())
    assert text.startswith(
        "2 stages on 2 devices, 4 micro-batches, schedule grouped, training, 2 replicas that share the "
        "optimizer state, 2 processes\n"
    )
    table = text[text.index("device  stages") :].splitlines()[1:5]
    assert [line.split()[:2] for line in table] == [[str(ipu), str(ipu % 2)] for ipu in range(4)]
    printed = json.loads(run(capsys, *CLUSTER, *options.split(), "--json"))
    found = Scenario.from_dict(printed["scenario"])
    assert found.cluster == Cluster(2, (0, 0, 1, 1), LinkSpeed(0.5, 100), LinkSpeed(1, 100), True)
    assert found.costs.num_sent_bytes == {(0, 1): 8, (1, 0): 8}
    assert found.costs.num_gradient_bytes == (10, 20)
    assert printed["free_running"]["step_time"] == simulate(found).free_running.step_time
    assert {action["kind"] for action in printed["free_running"]["actions"]} >= {"reduce", "gather"}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"scenario": printed["scenario"]}))
    for changes, expected in (
        ((), found.cluster),
        (("--processes", "4"), dataclasses.replace(found.cluster, processes=(0, 1, 2, 3))),
        (("--replicas", "4"), Cluster.of(4, 2, 2, within=LinkSpeed(0.5, 100), between=LinkSpeed(1, 100))),
    ):
        printed = json.loads(run(capsys, "simulate", "--json", "--costs-from", str(file), *changes))
        cluster = Scenario.from_dict(printed["scenario"]).cluster
        assert cluster == dataclasses.replace(expected, shards_optimizer_state=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 3",
         "--processes: must divide the number of devices, 4 (2 replicas of 2 devices); got 3. Give a "
         "divisor of it."),
        ("--replicas 1 --share-optimizer-state",
         "--share-optimizer-state: one replica shares it with no other. Give --replicas, or leave it "
         "out."),
        ("--bandwidth 1,0", "--bandwidth: must be greater than 0; got '1,0'"),
        ("--latency 1,2,3",
         "--latency: must be one number, or two (within a process, between processes); got 3."),
        ("--sent-bytes 1,2",
         "--sent-bytes: must be one number or 1, one per pair of neighbours; got 2. Give 1, or another "
         "--stages."),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_cluster_cannot_be(capsys, options, message):
    said = fail(capsys, *CLUSTER, *options.split())
    assert said == f"ipu-pipeline simulate: error: argument {message}"


def test_the_page_shows_all_replicas(capsys, tmp_path):
    file = tmp_path / "page.html"
    options = "--gradient-bytes 10 --latency 1 --bandwidth 1 --sent-bytes 1"
    run(capsys, *CLUSTER, *options.split(), "--html", str(file))
    text = file.read_text()
    assert '"ipus":[0,1,2,3]' in text.replace(" ", "")
    assert '"replicas":2' in text.replace(" ", "")
    assert "averaging of gradients" in text


UNEVEN = ("--stages", "4", "--micro-batches", "6", "--forward-cost", "1,2,1,1")
UNEVEN += ("--backward-cost", "2,3,2,2")


def test_the_best_order_and_how_good_it_is(capsys):
    text = run(capsys, "simulate", *UNEVEN, "--schedule", "searched")
    assert re.match(r"4 stages on 4 devices, 6 micro-batches, schedule searched.*, the best there is", text)
    assert re.search(r"^searched, as it is +6 +31 ", text, re.MULTILINE)
    found = json.loads(run(capsys, "simulate", *UNEVEN, "--schedule", "searched", "--json"))
    assert found["scenario"]["schedule"] == "searched"
    assert found["searched"]["step_time"] == found["free_running"]["step_time"] == 31
    assert found["searched"]["gap"] == 0
    assert all(row["step_time"] >= 31 for row in found["what_if"] if row["change"] == "schedule")


def test_a_limit_of_bytes(capsys, tmp_path):
    costs = Costs.of(3, forward=1.0, backward=2.0)
    scenario = Scenario(costs, "interleaved", 6, memory=Memory((100, 50, 0), (10, 10, 10)))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(scenario.as_dict()))
    options = ["simulate", "--costs-from", str(file), "--schedule", "searched"]
    found = [
        json.loads(run(capsys, *options, *limit, "--json"))
        for limit in ([], ["--bytes-per-ipu", "120"], ["--bytes-per-ipu", "110"])
    ]
    times = [one["searched"]["step_time"] for one in found]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert max(found[1]["searched"]["num_peak_bytes"]) <= 120
    assert Scenario.from_dict(found[1]["scenario"]).schedule.bytes_per_ipu == 120
    assert "device 0 needs 110 bytes (100 of them all the time), and the limit is 109" in fail(
        capsys, *options, "--bytes-per-ipu", "109"
    )
    said = fail(capsys, *options[:-2], "--bytes-per-ipu", "120")
    assert "only the schedule searched has a limit; got interleaved" in said


@pytest.mark.parametrize("command", ["simulate", "schedule"])
def test_an_example_with_its_command(capsys, command):
    text = run(capsys, command)
    given = "--stages 4 --micro-batches 8"
    assert "\ndevice 3  .  .  .  | F0 B0 F1" in text
    assert text.endswith(f"\n\nThis is ipu-pipeline {command} {given}; --help lists more options.\n")
    assert "This is" not in run(capsys, command, *given.split())


# `schedule`.


def test_the_best_staircase_of_equal_actions(capsys):
    text = run(capsys, "schedule", *UNEVEN[:4], "--schedule", "searched", "--width", "0")
    assert text.startswith("searched: 4 stages on 4 devices, 6 micro-batches, ")
    lines = [line.split()[2:] for line in text.splitlines() if line.startswith("device")]
    assert all(f"W{number}" in line for line in lines for number in range(6))


def test_a_staircase_with_its_phases(capsys):
    text = run(capsys, "schedule", "--stages", "4", "--micro-batches", "8", "--width", "0")
    expected = """\
grouped: 4 stages on 4 devices, 8 micro-batches, 22 time-steps, devices idle for 27% of them

time-step 1  2  3  | 4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 | 20 21 22
device 0  F0 F1 F2 | F3 .  F4 .  F5 .  F6 B0 F7 B1 .  B2 .  B3 .  B4 | B5 B6 B7
device 1  .  F0 F1 | F2 .  F3 .  F4 B0 F5 B1 F6 B2 F7 B3 .  B4 .  B5 | B6 B7 .
device 2  .  .  F0 | F1 .  F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 | B7 .  .
device 3  .  .  .  | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 | .  .  .
phases: ramp-up 1..3, main 4..19, ramp-down 20..22
in flight at most, by stage: 7 5 3 1
The default, as on Graphcore's IPUs: forwards run together, then backwards.
"""
    assert text == expected


def test_a_wide_staircase_is_cut_in_the_middle(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = run(capsys, "schedule", "--stages", "2", "--micro-batches", "50", "--schedule", "interleaved")
    assert text.splitlines()[2:] == [
        "time-step 1   | 2   3   4   5   ... 98  99  100 101 | 102",
        "device 0  F0  | .   F1  B0  F2  ... B47 F49 B48 .   | B49",
        "device 1  .   | F0  B0  F1  B1  ... F48 B48 F49 B49 | .",
        "phases: ramp-up 1, main 2..101, ramp-down 102",
        "Time-steps 6..97 do not fit in 60 characters, and are left out.",
        "in flight at most, by stage: 2 1",
        "1F1B: the bubble of Grouped with half of its activation memory.",
    ]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_no_line_is_wider_than_asked(capsys, count):
    for width in (36, 41, 57, 80, 120):
        options = f"schedule --stages 4 --micro-batches {count} --width {width}"
        lines = run(capsys, *options.split()).splitlines()[2:7]
        assert max(map(len, lines)) <= width
        assert lines[1].startswith("device 0  F0 ")
        assert lines[1].endswith(f"B{count - 1}")


SCHEDULE = ("schedule", "--micro-batches", "2", "--stages")


def test_several_stages_on_an_ipu_and_forwards_alone(capsys):
    text = run(capsys, *SCHEDULE, "3", "--device-mapping", "0,1,0")
    assert "device 0  F0.0 | F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 | B0.1" in text.splitlines()
    text = run(capsys, *SCHEDULE, "4", "--inference")
    assert "phases: ramp-up 1..3, ramp-down 4..5" in text.splitlines()


def test_a_staircase_as_json(capsys):
    options = "schedule --stages 2 --micro-batches 2 --schedule sequential --json"
    found = json.loads(run(capsys, *options.split()))
    assert found["phases"] == [
        {"name": "ramp-up", "first": 1, "last": 1},
        {"name": "main", "first": 2, "last": 7},
        {"name": "ramp-down", "first": 8, "last": 8},
    ]
    assert found["in_flight"] == [1, 1]

    def name(one):
        return one and f"{one['kind']} {one['stage']}.{one['micro_batch']}"

    assert [list(map(name, row)) for row in found["ipus"]] == [
        ["forward 0.0", None, None, "backward 0.0", "forward 0.1", None, None, "backward 0.1"],
        [None, "forward 1.0", "backward 1.0", None, None, "forward 1.1", "backward 1.1", None],
    ]


@pytest.mark.thorough
def test_a_reader_that_stops_reading():
    command = [sys.executable, "-m", "ipu_pipeline", "schedule", "--stages", "9", "--micro-batches", "3000"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, "--width", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout.read(8) == b"grouped:"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 4 --micro-batches 4 --width x", "argument --width: must be a number from 0; got 'x'"),
        ("--stages 9999 --micro-batches 9999", "schedule has up to 4194304. Give fewer."),
        ("--stages 2 --micro-batches 1 --schedule fastest", "argument --schedule: schedule must be one of"),
    ],
    ids=str,
)
def test_what_schedule_refuses(capsys, options, message):
    assert message in fail(capsys, "schedule", *options.split())


def test_it_advises_what_the_page_of_a_profile_does(capsys, tmp_path):
    """The page advised another move than `simulate --costs-from` of the same file."""
    costs = Costs.of(2, forward=[1e-3, 3e-3], backward=[2e-3, 6e-3])
    facts = dataclasses.replace(traces.make_facts(2, 8), costs=costs)
    profile = traces.make_profile(facts, traces.make_events(facts))
    (one,) = study(profile)
    assert "Moving dense1/a from stage 1 to 0" in one.advice[0]
    (tmp_path / "profile.json").write_text(profile.to_json())
    given = ("simulate", "--costs-from", str(tmp_path / "profile.json"))
    assert run(capsys, *given).endswith(f"\n\n{' '.join(one.advice)}\n")
    told = json.loads(run(capsys, *given, "--json"))
    assert told["advice"]["sentence"] == " ".join(one.advice)
    assert Scenario.from_dict(told["scenario"]).layers == one.predictions.simulation.scenario.layers
    # What layers take is not known of other costs.
    assert "dense1" not in run(capsys, *given, "--forward-cost", "1")
