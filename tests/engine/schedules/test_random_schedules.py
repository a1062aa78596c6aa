"""Random schedules: those that are valid run and equal the plain loop, spoiled ones are refused.

RANDOM_SCHEDULES=1000 python -m pytest -m thorough tests/engine/schedules/test_random_schedules.py
"""

import os
import random

import jax
import numpy as np
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.schedules import Action, ActionKind, ScheduleError, check
from tests.support import beside, models

NUM_SCHEDULES = int(os.environ.get("RANDOM_SCHEDULES", "20"))
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


def spoil(chance, rows):
    """Rows that lack an action, have one too many, or in an order that cannot be."""
    rows = [list(row) for row in rows]
    row = chance.choice([row for row in rows if row])
    places = [place for place, action in enumerate(row) if action is not None]
    place = chance.choice(places)
    way = chance.choice(["drop", "double", "other stage", "other number", "turn", "other IPU"])
    if way == "drop":
        row[place] = None
    elif way == "double":
        row.insert(chance.randrange(len(row) + 1), row[place])
    elif way == "other stage":
        row[place] = row[place]._replace(stage=row[place].stage + chance.choice([-1, 1, 4]))
    elif way == "other number":
        row[place] = row[place]._replace(micro_batch=row[place].micro_batch + chance.choice([-1, 1, COUNT]))
    elif way == "turn":
        row.reverse()
    else:
        action = row.pop(place)
        rows[(rows.index(row) + 1) % len(rows)].append(action)
    return [tuple(row) for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mapping", "halves"),
    [((0, 1, 2, 3), True), ((0, 1, 0, 1), False), ((0, 1, 1, 0), False), ((2, 0, 0, 1), True)],
    ids=str,
)
def test_random_schedules(mapping, halves):
    batches = models.mlp_batches(np.random.default_rng(0), COUNT)
    pipeline = engine.Pipeline(
        models.mlp_stages(4),
        num_micro_batches=COUNT,
        device_mapping=list(mapping),
        loss=lambda loss: loss,
        optimizer=models.showing_gradients(),
        schedule="zero_bubble" if halves else "sequential",
    )
    state = pipeline.init(jax.random.key(0), batches[0])
    runner, halved = pipeline.prepare(), pipeline.timetable(COUNT).halved
    expected, _outputs = pipeline.step(state, batches)
    plain, _outputs = beside.step_plainly(pipeline, beside.copied(state), batches)
    models.assert_trees_close(expected.variables, plain.variables, 1e-5)
    chance = random.Random(str((mapping, halves)))  # noqa: S311
    for _number in range(NUM_SCHEDULES):
        rows = draw(chance, mapping, halves)
        table = check(rows, 4, COUNT, mapping, training=True, halved=halved)
        runner.follow(lambda _count, table=table: table)
        found, _outputs = pipeline.step(state, batches)
        jax.tree.map(np.testing.assert_array_equal, found.variables, expected.variables)
        jax.tree.map(np.testing.assert_array_equal, found.optimizer_state, expected.optimizer_state)
        spoiled = spoil(chance, rows)
        with pytest.raises(ScheduleError):
            check(spoiled, 4, COUNT, mapping, training=True, halved=halved)
