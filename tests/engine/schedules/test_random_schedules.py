"""Random orders of actions that are valid: pipelines that follow them equal the plain loop."""

import random

import pytest

from ipu_pipeline.engine.schedules import Action, ActionKind
from tests.support import scheduled

COUNT = 4
F, B, I, W = ActionKind  # noqa: E741  # as in torch's files


def draw(chance, mapping, halves):
    """Rows of a random order: again and again, one of the actions that can be done is drawn."""
    last = len(mapping) - 1
    done = set()
    left = [(kind, stage, number) for kind in (F, I, W) for stage in range(4) for number in range(COUNT)]
    rows = [[] for _ipu in range(max(mapping) + 1)]

    def can(kind, stage, number):
        needs = [(kind, stage, number - 1)] if number else []
        if kind == F:
            needs += [(F, stage - 1, number)] if stage else []
        elif kind == I:
            needs += [(F, stage, number)] if stage == last else [(F, stage, number), (I, stage + 1, number)]
        else:
            needs.append((I, stage, number))
        return all(need in done for need in needs)

    while left:
        action = chance.choice([one for one in left if can(*one)])
        own = [action]
        if action[0] == I and not halves:  # the weight gradients follow at once
            own.append((W, *action[1:]))
        for one in own:
            left.remove(one)
            done.add(one)
        kind, stage, number = action
        row = rows[mapping[stage]]
        if chance.random() < 0.1:
            row.append(None)
        row.append(Action(kind if halves or kind != I else B, stage, number))
    return [tuple(row) for row in rows]


@pytest.mark.parametrize(
    ("mapping", "halves"),
    [
        ((0, 1, 0, 1), True),
        pytest.param((0, 1, 2, 3), False, marks=pytest.mark.thorough),
        pytest.param((0, 1, 1, 0), True, marks=pytest.mark.thorough),
        pytest.param((2, 0, 0, 1), False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_random_schedules(mapping, halves, request):
    is_thorough = request.node.get_closest_marker("thorough") is not None
    for seed in range(8 if is_thorough else 1):
        rows = draw(random.Random(seed), mapping, halves)  # noqa: S311
        scheduled.check(lambda *_counts, rows=rows: rows, mapping, COUNT)
