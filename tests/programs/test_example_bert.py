"""examples/bert.py: it learns, equals plain torch, and says what is wrong."""

import pytest
import torch

from tests.support.programs import run

PROGRAM = "examples/bert.py"
TINY = ["--layers-per-ipu", "0", "1", "--width", "8", "--heads", "2", "--accumulation", "2", "--batch", "2"]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Not where tests are collected, which each process does: to import transformers takes seconds."""
    global bert
    pytest.importorskip("transformers", reason="transformers is not installed")
    from examples import bert


def test_questions():
    questions = bert.Questions(50, 7)
    opened, closed = range(bert.OPENING, bert.OPENING + bert.KINDS), range(bert.CLOSING, bert.WORDS)
    lengths = set()
    for number in range(len(questions)):
        item, again = questions[number], questions[number]
        ids, mask = item["input_ids"], item["attention_mask"]
        assert all(torch.equal(item[name], again[name]) for name in item)
        assert ids.shape == mask.shape == item["token_type_ids"].shape == (bert.LENGTH,)
        lengths.add(int(mask.sum()))
        assert torch.equal(ids == bert.PADDING, mask == 0)
        assert sum(int(token) in opened for token in ids) == bert.KINDS
        assert sum(int(token) in closed for token in ids) == bert.KINDS
        asked = int(ids[1]) - bert.QUESTIONS
        start, end = int(item["start_positions"]), int(item["end_positions"])
        assert (ids[start], ids[end]) == (bert.OPENING + asked, bert.CLOSING + asked)
        assert end - start >= 2
        assert item["token_type_ids"][start] == 1
    assert len(lengths) > 3
    assert lengths <= set(range(bert.QUESTION_LENGTH + bert.SHORTEST, bert.LENGTH + 1))
    assert not torch.equal(questions[0]["input_ids"], bert.Questions(50, 8)[0]["input_ids"])
    with pytest.raises(IndexError):
        questions[50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers-per-ipu", "0", "2", "0", "2"], "only IPU 0 may have none"),
        (["--layers-per-ipu", "0"], "there must be a layer"),
        (["--heads", "3"], "must divide --width 32; got 3"),
        (["--check", "--dropout", "0.1"], "torch drops others than IPUs do"),
        (["--check", "--dtype", "bfloat16"], "--dtype must be one of float32, float64; got bfloat16"),
        (["--rate", "0"], "must be a finite number above 0"),
    ],
)
def test_arguments_that_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bert.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("--strategy sharded --attention eager", marks=pytest.mark.soak),
        "--dtype float64 --recompute --replicas 2 --layers-per-ipu 1 1 --device-iterations 2",
    ],
)
def test_equal_to_plain_torch(arguments):
    *_lines, checked, last = run(PROGRAM, "--check", *TINY, *arguments.split(), as_tests=True).splitlines()
    assert checked.startswith("As plain torch: the losses of 20 updates")
    assert last.startswith("Exact match")


@pytest.mark.soak
def test_it_learns():
    lines = run(PROGRAM).splitlines()
    assert lines[0] == "78,018 parameters, 6 layers on 4 IPUs"
    assert [line.partition(":")[0] for line in lines[1:-1]] == [f"Update {n}" for n in range(40, 241, 40)]
    assert float(lines[-1].split()[-1].rstrip("%")) > 95


@pytest.mark.thorough
def test_half_precision_and_dropout(capsys):
    bert.main([*TINY, "--updates", "8", "--dtype", "bfloat16", "--dropout", "0.1"])
    assert capsys.readouterr().out.splitlines()[-2].startswith("Update 8: loss")


@pytest.mark.thorough
def test_errors(capsys):
    for arguments, message in [
        (["--questions", "10"], "--questions: a call takes 256 of them; got 10"),
        (["--layers-per-ipu", "0", "1", "1"], "The model specifies the use of 3 IPUs"),
    ]:
        with pytest.raises(Exception, match=message):
            bert.main(arguments)
