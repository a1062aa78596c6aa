"""How often steps are timed in turns."""

import pytest

from ipu_pipeline.engine import measured_choices


@pytest.mark.parametrize(
    ("seconds", "given", "rounds"),
    [
        ({1: 0.6, 2: 0.3}, {}, 1),  # a round of two steps each takes 1.8 s
        ({1: 0.1, 2: 0.05}, {}, 3),
        ({1: 0.01}, {}, 13),  # until a quarter of a second has passed
        ({1: 0.6}, {"num_rounds": 4}, 4),
        ({1: 0.01}, {"most": 2}, 2),
    ],
    ids=str,
)
def test_long_steps_are_timed_in_fewer_rounds(monkeypatch, seconds, given, rounds):
    now, calls = [0.0], dict.fromkeys(seconds, 0)

    def make_step(size):
        def step():
            now[0] += seconds[size]
            calls[size] += 1

        return step

    monkeypatch.setattr(measured_choices.time, "perf_counter", lambda: now[0])
    found = measured_choices.time_in_turns({size: make_step(size) for size in seconds}, **given)
    assert found == pytest.approx(seconds)
    assert calls == dict.fromkeys(seconds, 2 * rounds)
