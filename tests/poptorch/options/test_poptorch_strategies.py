"""Strategies: what they take, how they place blocks, and their errors."""

import copy
import pickle

import pytest

from ipu_pipeline.poptorch.enums import AutoStage, Liveness
from ipu_pipeline.poptorch.options.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    Placement,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

UNPHASED = [PipelinedExecution, ShardedExecution]
PHASED = [SerialPhasedExecution, ParallelPhasedExecution]
UNKNOWN = "^Unknown Block 'Z' list of expected Blocks: .'A', 'B'"


def place(strategy, *blocks):
    return [(placed.stage, placed.ipu) for placed in strategy.place(blocks)]


def test_the_schedule_of_a_pipelined_execution():
    strategy = PipelinedExecution("A", "B", schedule="ZB-H1")
    assert strategy.schedule == "zero_bubble"
    assert repr(strategy) == "PipelinedExecution(Stage('A'), Stage('B'), schedule='zero_bubble')"
    assert strategy != PipelinedExecution("A", "B")
    assert strategy == pickle.loads(pickle.dumps(strategy)) == strategy.clone()
    assert PipelinedExecution().schedule is None
    with pytest.raises(ValueError, match="PipelinedExecution: schedule must be one of .*; got 'fast'"):
        PipelinedExecution(schedule="fast")
    with pytest.raises(TypeError, match="schedule"):
        ShardedExecution("A", schedule="zero_bubble")


# Stages and phases


def test_a_stage():
    stage = Stage("A", "B")
    assert stage.blocks == ["A", "B"]
    assert stage.ipu_id is None
    assert stage.ipu(0) is stage
    assert stage.ipu_id == 0
    stage.blocks.append("C")
    assert stage.blocks == ["A", "B"]
    assert repr(stage) == "Stage('A', 'B').ipu(0)"
    assert repr(Stage("A")) == "Stage('A')"


def test_a_phase_of_stages():
    first, second = Stage("A"), Stage("B")
    phase = Phase(first, second)
    assert phase.stages == [first, second]
    assert phase.stage(1) is second
    assert phase.ipus(2, 0) is phase
    assert [first.ipu_id, second.ipu_id] == [2, 0]
    assert repr(phase) == "Phase(Stage('A').ipu(2), Stage('B').ipu(0))"


def test_names_make_one_stage_of_a_phase():
    phase = Phase("A", "B")
    assert phase.stages == [Stage("A", "B")]
    assert phase.ipus(3).stage(0).ipu_id == 3


PAIR = [Stage("A"), Stage("B")]


def test_checks_of_stages_and_phases():
    for make, error, match in [
        (lambda: Stage(), AssertionError, "needs at least one block"),
        (lambda: Stage(1), AssertionError, "must be a string; got 1"),
        (lambda: Stage("A", None), AssertionError, "must be a string; got None"),
        (lambda: Stage(["A"]), AssertionError, r"must be a string; got \['A'\]"),
        (lambda: Stage("A").ipu("0"), AssertionError, "ipu must be an integer; got '0'"),
        (lambda: Stage("A").ipu(None), AssertionError, "ipu must be an integer; got None"),
        (lambda: Stage("A").ipu(True), AssertionError, "ipu must be an integer; got True"),
        (lambda: Stage("A").ipu(-1), ValueError, r"Stage\('A'\): ipu must be at least 0; got -1"),
        (lambda: Phase(), AssertionError, "needs at least one stage"),
        (lambda: Phase("A", Stage("B")), AssertionError, "all stages, or all names; got 'A'"),
        (lambda: Phase(Stage("B"), 2), AssertionError, "all stages, or all names; got 2"),
        (lambda: Phase("A").stage(1), IndexError, "the index must be at least -1 and below 1; got 1"),
        (lambda: Phase("A").stage("A"), AssertionError, "the index must be an integer; got 'A'"),
        (lambda: Phase(*PAIR).ipus(0), AssertionError, "^Phase contains 2 stages but you provided 1 ipus$"),
        (lambda: Phase("A", "B").ipus(0, 1), AssertionError, "contains 1 stages but you provided 2 ipus"),
        (lambda: Phase("A").ipus("0"), AssertionError, "ipu must be an integer; got '0'"),
    ]:
        with pytest.raises(error, match=match):
            make()


# Pipelined and sharded


def test_stages_in_every_form():
    for kind in UNPHASED:
        for args, stages in [
            (("A", "B"), [Stage("A"), Stage("B")]),
            ((Stage("A").ipu(1), "B"), [Stage("A").ipu(1), Stage("B")]),
            ((["A", "B"], ("C",)), [Stage("A", "B"), Stage("C")]),
        ]:
            strategy = kind(*args)
            assert strategy.auto_stage is None
            for stage in stages:
                for block in stage.blocks:
                    assert strategy.stage(block) == stage
            assert repr(strategy) == f"{kind.__name__}({', '.join(map(repr, stages))})"
            with pytest.raises(AssertionError, match=UNKNOWN):
                strategy.stage("Z")


def test_a_stage_is_the_user_s_own():
    for kind in UNPHASED:
        stage = Stage("A")
        strategy = kind(stage, "B")
        strategy.stage("A").ipu(4)
        assert stage.ipu_id == 4
        assert place(strategy, ("A", None), ("B", None)) == [(0, 4), (1, 1)]


def test_the_same_as_the_ipu():
    for kind in UNPHASED:
        for args in [(), (AutoStage.SameAsIpu,)]:
            strategy = kind(*args)
            assert strategy.auto_stage is AutoStage.SameAsIpu
            assert repr(strategy) == f"{kind.__name__}(AutoStage.SameAsIpu)"
            blocks = [("0", 0), ("1", 1), (None, 3), ("2", 0)]
            assert place(strategy, *blocks) == [(0, 0), (1, 1), (3, 3), (0, 0)]
            assert strategy.place([]) == []
            # A block that is opened again need not say its IPU again; it may say another one.
            assert place(strategy, ("A", 2), ("B", 0), ("A", None), ("A", 1), ("A", None)) == [
                (2, 2), (0, 0), (2, 2), (1, 1), (1, 1)
            ]  # fmt: skip


def test_each_block_the_next_stage():
    for kind in UNPHASED:
        strategy = kind(AutoStage.AutoIncrement)
        # Listing 11 of PopTorch's user guide: blocks "0", "1", "2" on IPUs 0, 1, 0.
        assert place(strategy, ("0", 0), ("1", 1), ("2", 0)) == [(0, 0), (1, 1), (2, 0)]
        assert place(strategy, ("a", None), ("b", 0), ("c", None)) == [(0, 0), (1, 0), (2, 2)]
        # The same name is the same stage; blocks without a name are always new.
        assert place(strategy, ("a", 5), ("b", None), ("a", None)) == [(0, 5), (1, 1), (0, 5)]
        assert place(strategy, (None, 1), (None, 1), (None, None)) == [(0, 1), (1, 1), (2, 2)]
        # Each call starts anew.
        assert place(strategy, ("c", None)) == [(0, 0)]


def test_given_stages():
    for kind in UNPHASED:
        strategy = kind(Stage("B1").ipu(3), ["B2", "B3"], "B4")
        blocks = [("B1", 7), ("B2", None), ("B3", 0), ("B4", 2), ("B2", None), ("B4", None)]
        # The stage's IPU, else the block's, else the number of the stage.
        assert place(strategy, *blocks) == [(0, 3), (1, 1), (1, 0), (2, 2), (1, 1), (2, 2)]
        assert strategy.place([("B1", None)]) == [Placement(stage=0, ipu=3)]


def test_blocks_without_a_place():
    expected, missing = r"list of expected Blocks: \['B1'", "no IPU was specified for block"
    for kind in UNPHASED:
        for args, blocks, match in [
            (("B1", "B3"), [("B1", 0), ("B2", 0)], rf"^Unknown Block 'B2' {expected}, 'B3'\]$"),
            (("B1",), [(None, 0)], rf"^Unknown Block None {expected}\] \(a block gets a name"),
            ((), [("B0", 0), ("B1", None)], f"^poptorch.AutoStage.SameAsIpu was selected but {missing} B1"),
            ((), [(None, 1), (None, None)], f"{missing} None"),
        ]:
            with pytest.raises(AssertionError, match=match):
                kind(*args).place(blocks)


def test_checks_of_strategies():
    for kind in UNPHASED:
        for args, match in [
            (("A", "B", "A"), "^A associated with more than one stage$"),
            ((Stage("A", "B"), ["B"]), "^B associated with more than one stage$"),
            ((AutoStage.SameAsIpu, "A"), "takes one poptorch.AutoStage, or stages; got"),
            ((AutoStage.SameAsIpu, AutoStage.SameAsIpu), "takes one poptorch.AutoStage"),
            ((1,), "must be a Stage, the name of a block, or a list of names; got 1"),
            ((Phase("A"),), "must be a Stage, the name of a block, or a list of names; got Phase"),
            (([Stage("A")],), "must be a string; got Stage"),
            (([],), "needs at least one block"),
        ]:
            with pytest.raises(AssertionError, match=match):
                kind(*args)


def test_one_kind_is_not_the_other():
    assert PipelinedExecution("A") != ShardedExecution("A")
    assert PipelinedExecution("A") != PipelinedExecution(Stage("A").ipu(0))
    assert PipelinedExecution() == PipelinedExecution(AutoStage.SameAsIpu)
    assert PipelinedExecution() != PipelinedExecution(AutoStage.AutoIncrement)
    assert PipelinedExecution("A", "B") == PipelinedExecution(["A"], Stage("B"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(PipelinedExecution())


# Phased


def test_phases_in_every_form():
    for kind in PHASED:
        own = Phase(Stage("A").ipu(1))
        strategy = kind(own, [Stage("B"), Stage("C")], ["D", "E"], Stage("F"), "G", (Stage("H"),))
        assert strategy.phases[:3] == [
            Phase(Stage("A").ipu(1)),
            Phase(Stage("B"), Stage("C")),
            Phase("D", "E"),
        ]
        assert strategy.phases[3:] == [Phase(Stage("F")), Phase("G"), Phase("H")]
        assert strategy.phase(0) is own
        assert strategy.phase(1).ipus(0, 2).stages[1] is strategy.stage("C")
        assert strategy.stage("C").ipu_id == 2
        assert strategy.stage("E") == Stage("D", "E")
        with pytest.raises(AssertionError, match=f"{UNKNOWN}, 'C'"):
            strategy.stage("Z")
        with pytest.raises(IndexError, match=f"{kind.__name__}.phase: .* at least -6 and below 6; got 6"):
            strategy.phase(6)
        assert strategy.phase(-1) is strategy.phase(5)
        with pytest.raises(IndexError, match="must be at least -6 and below 6; got -7"):
            strategy.phase(-7)
        with pytest.raises(AssertionError, match="the index must be an integer; got 'A'"):
            strategy.phase("A")


def test_checks_of_phased_strategies():
    for kind in PHASED:
        for args, match in [
            ((), "explicitly specify the phases"),
            ((AutoStage.SameAsIpu,), "explicitly specify the phases"),
            (("A", "A"), "^A associated with more than one stage$"),
            (([Stage("A"), Stage("B", "A")],), "^A associated with more than one stage$"),
            ((Phase("A"), ["B", "A"]), "^A associated with more than one stage$"),
            ((1,), "must be a Phase, a Stage, the name of a block, or a list of stages or names; got 1"),
            (([],), "poptorch.Phase needs at least one stage"),
            (([["A"]],), r"takes its phases as arguments, as \w+\(\*phases\), .* got a list of lists"),
            (([Phase("A"), Phase("B")],), r"takes its phases as arguments, as \w+\(\*phases\)"),
            (([[Stage("A")], [Stage("B")]],), r"takes its phases as arguments, as \w+\(\*phases\)"),
        ]:
            with pytest.raises(AssertionError, match=match):
                kind(*args)


def test_setters_of_phased_strategies():
    separate = ("useSeparateBackwardPhase", "separate_backward_phase", False, True)
    alive, off_chip = Liveness.AlwaysLive, Liveness.OffChipAfterFwd
    for kind, setter, attribute, default, value in [
        (SerialPhasedExecution, *separate),
        (ParallelPhasedExecution, *separate),
        (SerialPhasedExecution, "setTensorsLiveness", "tensors_liveness", alive, off_chip),
        (ParallelPhasedExecution, "sendTensorsOffChipAfterFwd", "tensors_off_chip_after_fwd", False, True),
    ]:
        strategy = kind("A")
        assert getattr(strategy, attribute) is default
        assert f"{attribute}={default!r}" in repr(strategy)
        with pytest.raises(AssertionError, match=f"{setter}: .* must be .*; got 1"):
            getattr(strategy, setter)(1)
        assert getattr(strategy, attribute) is default
        assert getattr(strategy, setter)(value) is strategy
        assert getattr(strategy, attribute) is value
        assert strategy != kind("A")
        assert f"{attribute}={value!r}" in repr(strategy)
        assert repr(strategy).startswith(f"{kind.__name__}(Phase(Stage('A')), ")


# Copies


def test_copies():
    for strategy in [
        PipelinedExecution(),
        PipelinedExecution(Stage("A").ipu(1), ["B", "C"]),
        ShardedExecution("A", "B"),
        SerialPhasedExecution([Stage("A"), Stage("B")], "C").setTensorsLiveness(Liveness.OffChipAfterFwd),
        ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd(True),
    ]:
        pickled = pickle.loads(pickle.dumps(strategy))  # its own
        for made in (strategy.clone(), copy.deepcopy(strategy), pickled):
            assert type(made) is type(strategy)
            assert made == strategy
            assert repr(made) == repr(strategy)
            if "A" in repr(strategy) and "AutoStage" not in repr(strategy):
                made.stage("A").ipu(9)
                assert made != strategy
                assert strategy.stage("A").ipu_id != 9
                if hasattr(made, "phases"):  # its phases have the same stages
                    assert made.phase(0).stage(0) is made.stage("A")
