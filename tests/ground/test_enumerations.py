"""Errors about members of enumerations, which list those that there are."""

import enum
import re

import pytest

from ipu_pipeline import engine
from ipu_pipeline.ground.checks import list_members, parse_member


class Number(enum.IntEnum):
    One = 1
    Two = 2


def test_members_and_values():
    assert list_members(Number) == "Number.One, Number.Two"
    assert parse_member(Number, 2, "It") is Number.Two
    assert parse_member(Number, Number.One, "It") is Number.One
    with pytest.raises(ValueError, match=r"^It must be one of Number\.One, Number\.Two; got \[1\]\.$"):
        parse_member(Number, [1], "It")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"recompute": True},
            "recompute, unless it is None, must be one of 'auto', 'recompute_then_backpropagate', "
            "'recompute_and_backpropagate_interleaved'; got True.",
        ),
        ({"shard": ["wei"]}, "shard: each entry must be one of 'optimizer_state', 'weights'; got 'wei'."),
        (
            {"offload": ["weight"]},
            "offload: each entry must be one of 'weight_update_variables', 'activations', "
            "'gradient_accumulation_buffers', 'weights'; got 'weight'.",
        ),
        ({"reduction": "avg"}, "reduction must be one of 'sum', 'mean', 'running_mean'; got 'avg'."),
    ],
)
def test_arguments_of_a_pipeline(options, told):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        engine.Pipeline([lambda x: x], num_micro_batches=1, **options)
