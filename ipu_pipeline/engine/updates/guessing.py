"""What a weight update can do before the values that join several devices are known.

A global norm, or whether all gradients are finite, is known only when all devices have all of their
gradients. Most of what follows from it seldom changes: gradients are not clipped, or everything is finite.
So each device may update with a guess of the choices among what it waits for (truth values, and integers
that tell which branch of a conditional is taken), and go on. Later the guess is compared with what they
were, and an update that was wrong is done again from the values before it.

Other values are not guessed. A guess settles an update if these do not matter then, as a norm does not
where nothing is clipped: what a selection or conditional does not choose is not looked at.

Source: post-validation, section 4 of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241),
which is for Adam with clipping and with a check for infinities.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs import partitioning
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.ground import jax_core

__all__ = ["Guess", "Guessing", "find_guessing"]

Guess: TypeAlias = "tuple[int, ...]"

_MOST_GUESSED = 4  # choices, of which all combinations of 1 and 0 are tried at the start
_OUTSIDE = -2  # stands for the last stage's outputs among the homes that a value depends on
# Where each element of all operands is the same, so is the result.
_LOGIC: Mapping[str, Callable[..., Any]] = {
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "eq": np.equal,
    "ne": np.not_equal,
}
_SAME_VALUE = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "convert_element_type")


@dataclass(frozen=True, eq=False)
class Guessing:
    """What is guessed of a weight update.

    Attributes:
      guessed: the late choices, scalars, by their numbers among the values that programs send.
      dtypes: their dtypes.
      others: the other late values, with their shapes and dtypes.
      joint: the numbers of the programs that join the gradients of several homes.
      state: the leaves of the optimizer's state that these programs make.
      make_state: makes those leaves from `state_arguments` and a guess, in this order.
      state_arguments: what it takes of the values before the update.
    """

    guessed: tuple[int, ...]
    dtypes: tuple[Any, ...]
    others: tuple[tuple[int, jax.ShapeDtypeStruct], ...]
    joint: frozenset[int]
    state: tuple[UpdateValue, ...]
    make_state: Callable[..., list[Any]]
    state_arguments: tuple[UpdateValue, ...]
    # jaxprs whose results must not depend on late values, each with the variables that are guessed, by the
    # place of the guess, and those that are late
    _programs: Sequence[tuple[Any, Mapping[Any, int], Collection[Any]]] = field(repr=False)

    @functools.cached_property
    def first(self) -> Guess | None:
        """The first guess: all are 1, if that settles the update. None if no guess does."""
        every = itertools.product((1, 0), repeat=len(self.guessed))
        return next((guess for guess in every if self.settles(guess)), None)

    def settles(self, guess: Guess) -> bool:
        """Whether the update needs no late value but those that are guessed."""
        return all(
            _is_settled(jaxpr, {var: guess[place] for var, place in places.items()}, late)
            for jaxpr, places, late in self._programs
        )


def find_guessing(
    placed: partitioning.Places,
    pieces: Sequence[partitioning.Piece],
    divided: Sequence[partitioning.Piece],
    results: Sequence[UpdateValue],
    labels: Mapping[Any, UpdateValue],
    sent: Mapping[Any, UpdateValue],
) -> Guessing | None:
    """Finds what may be guessed of an update. Returns None if nothing is late, or a guess cannot help.

    Args:
      placed: the update, with the home of each value.
      pieces: its programs before they were divided.
      divided: its programs, among them those of the joint home as they were.
      results: what they return in all, by position.
      labels: what the inputs of the update are.
      sent: the variables that programs send, with the values that they are.
    """
    needed = _find_needed_gradients(placed, labels)

    def is_late(var: Any, home: partitioning.Home) -> bool:
        return not needed[var] <= {home}

    late = {
        var: sent[var]
        for piece in pieces
        if piece.home != partitioning.JOINT
        for var in piece.program.inputs
        if var in sent and is_late(var, piece.home)
    }
    direct = any(
        var not in sent and is_late(var, piece.home)
        for piece in pieces
        if piece.home != partitioning.JOINT
        for var in piece.program.inputs
    )
    guessed = [var for var in late if var.aval.dtype in (np.bool_, np.int32) and not var.aval.shape]
    if not guessed or direct or len(guessed) > _MOST_GUESSED:
        return None
    places = {var: place for place, var in enumerate(guessed)}
    joint = [
        piece
        for piece in pieces
        if piece.home == partitioning.JOINT and any(needed[var] for var in piece.program.inputs)
    ]
    made = [place for piece in joint for place in piece.results if results[place].kind == UpdateKind.STATE]
    state = jaxprs.extract(placed.flat, [placed.flat.outputs[place] for place in made], guessed)
    programs = [
        (piece.program.closed_jaxpr.jaxpr, piece.program.inputs)
        for piece in pieces
        if piece.home != partitioning.JOINT
    ]
    programs.append((state.closed_jaxpr.jaxpr, state.inputs))

    def is_outside(var: Any, jaxpr: Any) -> bool:
        """Whether it comes from gradients or outputs, which the program of the state cannot take."""
        return jaxpr is state.closed_jaxpr.jaxpr and bool(needed[var])

    before = [var for var in state.inputs if var not in places]
    found = Guessing(
        tuple(late[var].key for var in guessed),
        tuple(var.aval.dtype for var in guessed),
        tuple((late[var].key, jaxprs.aval_struct(var.aval)) for var in late if var not in places),
        frozenset(map(divided.index, joint)),
        tuple(results[place] for place in made),
        _in_order(state, [*before, *guessed]),
        tuple(labels[var] for var in before if var in labels),
        [
            (
                jaxpr,
                {var: places[var] for var in inputs if var in places},
                [var for var in inputs if var not in places and (var in late or is_outside(var, jaxpr))],
            )
            for jaxpr, inputs in programs
        ],
    )
    has_all = all(var in labels for var in before)
    return found if has_all and found.first is not None else None


def _in_order(program: jaxprs.ExtractedJaxpr, order: Sequence[Any]) -> Callable[..., list[Any]]:
    """Makes a program take values in a given order, of which it may not need all."""

    def call(*values: Any) -> list[Any]:
        known = dict(zip(order, values, strict=True))
        return program(*(known[var] for var in program.inputs))

    return call


def _find_needed_gradients(
    placed: partitioning.Places, labels: Mapping[Any, UpdateValue]
) -> dict[Any, frozenset[int]]:
    """The homes whose gradients each value depends on."""
    needed: dict[Any, frozenset[int]] = {}
    for var in placed.flat.inputs:
        kind, own = labels[var].kind, placed.homes.get(var)
        if kind == UpdateKind.GRADIENT:
            assert own is not None
            needed[var] = frozenset([own])
        else:
            needed[var] = frozenset([_OUTSIDE] if kind == UpdateKind.OUTPUT else [])
    for equation in placed.flat.equations:
        read = [needed.get(atom, frozenset()) for atom in _variables(equation.invars)]
        needed.update(dict.fromkeys(equation.outvars, frozenset[int]().union(*read)))
    return needed


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jax_core.Literal)]


def _is_settled(jaxpr: Any, guess: Mapping[Any, Any], late: Collection[Any]) -> bool:
    """Whether no result of a jaxpr depends on late values, with a guess of others."""
    depending, _known = _follow(jaxpr, guess, late)
    return not any(var in depending for var in _variables(jaxpr.outvars))


def _follow(jaxpr: Any, guess: Mapping[Any, Any], late: Collection[Any]) -> tuple[set[Any], dict[Any, Any]]:
    """The variables that depend on late values, and those that are known from a guess."""
    known, depending = dict(guess), set(late)

    def value_of(atom: Any) -> Any:
        if isinstance(atom, jax_core.Literal):
            return atom.val if np.ndim(atom.val) == 0 else None
        return known.get(atom)

    def depends(atom: Any) -> bool:
        return not isinstance(atom, jax_core.Literal) and atom in depending

    for equation in jaxpr.eqns:
        name, values = equation.primitive.name, [value_of(atom) for atom in equation.invars]
        read = equation.invars
        if name in _LOGIC and all(value is not None for value in values):
            known[equation.outvars[0]] = _LOGIC[name](*values)
        elif name in _SAME_VALUE and values[0] is not None:
            known[equation.outvars[0]] = values[0]
        elif name == "select_n" and values[0] is not None:
            chosen = equation.invars[1 + int(values[0])]
            read = [chosen]
            if value_of(chosen) is not None:
                known[equation.outvars[0]] = value_of(chosen)
        elif name == "cond" and values[0] is not None:
            branch = equation.params["branches"][int(values[0])].jaxpr
            inner = dict(zip(branch.invars, equation.invars[1:], strict=True))
            within, found = _follow(
                branch,
                {var: value_of(atom) for var, atom in inner.items() if value_of(atom) is not None},
                [var for var, atom in inner.items() if depends(atom)],
            )
            for var, atom in zip(equation.outvars, branch.outvars, strict=True):
                if not isinstance(atom, jax_core.Literal) and atom in within:
                    depending.add(var)
                elif not isinstance(atom, jax_core.Literal) and atom in found:
                    known[var] = found[atom]
            continue
        if any(map(depends, read)):
            depending.update(equation.outvars)
    return depending, known
