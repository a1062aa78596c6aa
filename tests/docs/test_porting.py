"""docs/porting.md, and the tables of docs/api/names.md: they are what the package is, name by name."""

import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import pipelining_ops
from ipu_pipeline.graphcore import sdk_names
from tests.support import front
from tests.support.programs import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import graphcore_names  # it belongs to the site's configuration

ROWS = [*sdk_names.read_rows().values(), *graphcore_names.read_settings()]
STATUSES = ("same", "renamed", "no effect", "not there")


def find(name):
    """What stands under a dotted name of the package."""
    found = ipu
    for part in name.split("."):
        if isinstance(found, type) and found is ipu.config.IPUConfig:
            found = found()  # whose attributes are those of an object
        found = getattr(found, part)
    return found


def test_the_tables_have_each_row():
    lines = [line for line in graphcore_names.make_tables().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [row.name.partition(" ")[0] for row in ROWS]
    (line,) = (line for line in lines if line.startswith("| `optimizers.CrossReplicaOptimizer` "))
    assert line.endswith(
        "| The same. It makes replicas, as many as the selected IPUs allow; see "
        "[docs/replicas.md](/docs/replicas.md). |"
    )
    for target in re.findall(r"\]\(/([^)]+)\)", "\n".join(lines)):
        assert (ROOT / target).exists(), target


def faults_of(row):
    """What is not true of a row. What is not there is in tests/graphcore/test_sdk_names.py."""
    rules = {
        "a known status": row.status in STATUSES,
        "a name here, unless it is not there": bool(row.here) == (row.status != "not there"),
        "another name if it is renamed": row.status != "renamed" or row.here != row.name,
        "the same name if it is the same": row.status != "same" or row.here == row.name,
        "a reason": row.status not in ("no effect", "not there") or bool(row.why),
        "a sentence": row.why == "" or row.why.endswith("."),
        "that begins as one": not re.match(r"[a-z]", row.why.removeprefix("docs/pipeline")),
        "whole quotations": row.why.count("`") % 2 == 0,
        "code in quotations": not re.search(
            r"\w\(|[a-z]\.[a-z]{2}|\w_\w", re.sub(r"`[^`]*`|docs/\w+\.md", "", row.why)
        ),
    }
    return [(row.name, rule) for rule, is_kept in rules.items() if not is_kept]


def test_each_name_is_as_the_page_says():
    assert [fault for row in ROWS for fault in faults_of(row)] == []
    with warnings.catch_warnings(action="ignore"):
        for row in ROWS:
            if row.here and "*" not in row.name:
                find(row.here if row.status == "renamed" else row.name)
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) > 300


def test_all_public_modules_are_in_it():
    """What the package has besides Graphcore's names is ours."""
    ours = {"errors", "load_program", "next_rng_key", "ops", "ray", "reports", "set_num_devices"}
    known = {row.here.split(".")[0] for row in ROWS if row.status in ("same", "renamed")}
    assert {name for name in ipu.__all__ if not name.startswith("__")} - known == ours


def test_sentences_of_what_the_package_says():
    assert graphcore_names.as_sentence("optax.sgd(rate) does so") == "`optax.sgd(rate)` does so."
    assert (
        graphcore_names.as_sentence("infeeds fetch; IPUInfeedQueue says it")
        == "Infeeds fetch; `IPUInfeedQueue` says it."
    )


def test_the_error_that_the_page_shows():
    with pytest.raises(ModuleNotFoundError) as error:
        from ipu_pipeline.scopes import stochastic_rounding  # noqa: F401
    shown = " ".join((ROOT / "docs" / "porting.md").read_text().split())
    assert (
        f">>> from ipu_pipeline.scopes import stochastic_rounding ModuleNotFoundError: {error.value} ```"
        in shown
    )


@pytest.mark.parametrize("is_in_tuple", [False, True])
def test_a_last_stage_that_returns_one_value(is_in_tuple):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones((2, 3), np.float32)] * 4)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def last(x):
        loss = (x**2).mean()
        return (loss,) if is_in_tuple else loss

    def model():
        return pipelining_ops.pipeline(
            [ipu.layers.Dense(4), last],
            gradient_accumulation_count=4,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(optax.sgd(0.1), loss),
        )

    program = front.compile_program(model)
    with ipu.Session() as session:
        session.run([infeed.initializer, program])
        result = session.run(outfeed.dequeue())
    if is_in_tuple:
        assert isinstance(result, list)
        (result,) = result
    assert result.shape == (4,)


def test_between_the_gradients_and_the_update():
    """Each replica's gradient is changed before their mean; jax.grad gives that of something else."""
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(1), np.float32(3)])
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def body(x):
        optimizer = ipu.optimizers.MapGradientOptimizer(optax.sgd(1.0), lambda g, _w: jnp.minimum(g, 2.0))
        weight = ipu.get_variable("weight", initializer=0.0)
        train_op = ipu.optimizers.CrossReplicaOptimizer(optimizer).minimize(weight * x)
        return train_op, outfeed.enqueue(jax.grad(lambda x: 3 * x**2)(x))

    program = front.compile_program(lambda: ipu.loops.repeat(1, body, [], infeed))
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    with ipu.Session() as session:
        session.run([infeed.initializer, ipu.global_variables_initializer()])
        session.run(program)
        assert session.variables["weight"] == -(1 + 2) / 2
        np.testing.assert_array_equal(session.run(outfeed.dequeue()), [[6, 18]])
