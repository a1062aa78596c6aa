"""What differs between versions of JAX; those that are not installed are stood in for."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ipu_pipeline.ground import jax_compat, jax_core


def trace(function, *arguments):
    return jax.make_jaxpr(function)(*arguments)


def test_bodies_that_stay_are_the_same_objects():
    one, other = trace(jnp.sin, 1.0), trace(jnp.cos, 1.0)
    value = (one, [other.jaxpr, "text"], None)
    seen = []
    found = jax_core.map_jaxprs(lambda jaxpr: seen.append(jaxpr) or jaxpr, value)
    assert seen == [one.jaxpr, other.jaxpr]
    assert found[0] is one
    assert found[1][0] is other.jaxpr
    changed = jax_core.map_jaxprs(lambda jaxpr: jaxpr.replace(eqns=[]), value)
    assert [len(jaxpr.eqns) for jaxpr in (changed[0], changed[1][0])] == [0, 0]
    assert (changed[1][1], changed[2]) == ("text", None)
    assert len(one.eqns) == 1


def test_what_is_closed_stays():
    one = trace(jnp.sin, 1.0)
    assert jax_core.close(one) is one
    assert jax_core.close(one.jaxpr).jaxpr is one.jaxpr


def test_counts_of_a_scan():
    def scanned(a, b, xs):
        return jax.lax.scan(lambda carry, x: ((carry[0] * a, carry[1] + x), x), b, xs)

    (equation,) = trace(scanned, 1.0, (1.0, 2.0), jnp.ones(3)).eqns
    assert jax_core.scan_counts(equation.params) == (1, 2)
    structure = SimpleNamespace(unpack=lambda: ([None], [None, None], [None]))
    assert jax_core.scan_counts({"ft_in": structure}) == (1, 2)  # as JAX 0.12 has it


@pytest.mark.parametrize("is_newer", [False, True])
def test_an_equation_is_reduced_by_the_rule_of_either_form(is_newer, monkeypatch):
    (equation,) = trace(lambda x: jax.lax.sin(x), 1.0).eqns
    given = []

    def rule(used, own):
        given.append((used, None))
        return [True], own

    def newer_rule(used, read_later, own):
        given.append((used, read_later))
        return [True], own

    monkeypatch.setattr(jax_compat, "dce_rules", {equation.primitive: newer_rule if is_newer else rule})
    assert jax_compat.reduce(equation, [False]) is equation
    assert given == [([False], [True] if is_newer else None)]
    monkeypatch.setattr(jax_compat, "dce_rules", {})
    assert jax_compat.reduce(equation, [False]) is equation
    assert len(given) == 1


def test_writes_in_place_with_the_function_of_either_form(monkeypatch):
    def write(x):
        written = jax.new_ref(x)
        written[...] = 2 * x
        return written[...]

    traced = trace(write, 3.0)
    expected = str(jax_compat.discharge(traced))
    discharge = jax_compat._discharge

    def older(jaxpr, consts):
        made = discharge(jax_core.ClosedJaxpr(jaxpr, consts))
        return made.jaxpr, made.consts

    def newer(closed_jaxpr):
        return jax_core.ClosedJaxpr(*discharge(closed_jaxpr.jaxpr, closed_jaxpr.consts))

    is_older = "consts" in inspect.signature(discharge).parameters
    monkeypatch.setattr(jax_compat, "_discharge", newer if is_older else older)
    assert str(jax_compat.discharge(traced)) == expected
