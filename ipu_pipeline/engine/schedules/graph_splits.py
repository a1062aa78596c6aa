"""Finds where to cut a graph of layers: the order and the split whose step takes least. No JAX.

A split of a graph into stages that come one after another is a split of one of its topological orders
(Tarnawski, Phanishayee, Devanur, Mahajan and Paravecino, "Efficient algorithms for device placement of DNN
graph operators", 2020, who call a stage contiguous if no path leaves it and comes back). A graph that is a
chain has one order. Of others several are made, each with another idea of what comes first, and what is
best in these goes on: single layers move from stage to stage, wherever the graph allows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from ipu_pipeline.engine.schedules.layer_splits import (
    FoundSplit,
    Split,
    SplitProblem,
    find_split,
    num_simulations,
)

Order: TypeAlias = "tuple[int, ...]"  # layers, by their numbers in the graph
Stages: TypeAlias = "tuple[int, ...]"  # the stage of each layer

_NUM_DRAWN = 4  # orders whose choices are drawn


def find_graph_split(
    problem: SplitProblem, before: Sequence[Iterable[int]], most: int | None = None
) -> tuple[Order, SplitProblem, FoundSplit]:
    """Finds the order and the split that is judged best.

    Returns:
      The order, the problem with its layers in this order, and what was found of it.
    """
    most = num_simulations(problem) if most is None else most
    orders = find_orders(before, problem.sent_from)
    if len(orders) == 1 or problem.num_stages == 1:
        return orders[0], problem, find_split(problem, most)
    search = _Search(problem, before, most // 2)
    is_exact = search.judge_all()
    if not is_exact:
        for order in orders:
            with contextlib.suppress(ValueError):  # this order has no split that fits the memory
                result = find_split(reorder(problem, order), most // (4 * len(orders)))
                search.improve(_stages(order, result.split))
    order, split = _in_order(min(search.judgements, key=lambda stages: (search.judgements[stages], stages)))
    ordered = reorder(problem, order)
    result = find_split(ordered, most // 4, [split])
    return (
        order,
        ordered,
        dataclasses.replace(
            result, is_exact=is_exact, num_simulated=result.num_simulated + len(search.judgements)
        ),
    )


def find_orders(
    before: Sequence[Iterable[int]], weight: Callable[[int], float], *, keeps_last: bool = True
) -> list[Order]:
    """Makes topological orders of a graph, each once.

    They are the given one; depth first, which ends one branch before it begins another; breadth first,
    which has branches side by side; the order that keeps the fewest bytes (or seconds of sending them)
    until they have been read; and some that are drawn, the same each time.
    """
    number = len(before)
    predecessors = [set(nodes) for nodes in before]
    after = _find_after(predecessors)
    last = number - 1 if keeps_last else -1

    def make(rank: Callable[[int, int], Any]) -> Order:
        """Takes the node of the least rank, which is asked for when it could be the next one."""
        missing = [len(nodes) for nodes in predecessors]
        ready: list[tuple[bool, Any, int]] = []
        order: list[int] = []

        def add(node: int) -> None:
            heapq.heappush(ready, (node == last, rank(node, len(order)), node))

        for node in range(number):
            if not missing[node]:
                add(node)
        while ready:
            node = heapq.heappop(ready)[2]
            order.append(node)
            for successor in after[node]:
                missing[successor] -= 1
                if not missing[successor]:
                    add(successor)
        return tuple(order)

    generator = np.random.default_rng(0)
    orders = [
        tuple(range(number)),
        make(lambda _node, place: -place),
        make(lambda node, place: (-place, -node)),
        make(lambda _node, place: place),
        _keep_little(predecessors, after, weight, last),
    ]
    orders += [make(lambda _node, _place: generator.random()) for _time in range(_NUM_DRAWN)]
    return list(dict.fromkeys(orders))


def _keep_little(
    before: Sequence[set[int]], after: Sequence[Sequence[int]], weight: Callable[[int], float], last: int
) -> Order:
    """Takes the node next that adds least to what is kept: its own weight, without those it reads last."""
    number = len(before)
    missing = [len(nodes) for nodes in before]
    unread = list(map(len, after))
    ready = {node for node in range(number) if not missing[node]}
    order = []
    while ready:

        def added(node: int) -> tuple[bool, float, int]:
            freed = sum(weight(earlier) for earlier in before[node] if unread[earlier] == 1)
            return node == last, weight(node) - freed, node

        node = min(ready, key=added)
        ready.remove(node)
        order.append(node)
        for neighbour in before[node]:
            unread[neighbour] -= 1
        for neighbour in after[node]:
            missing[neighbour] -= 1
            if not missing[neighbour]:
                ready.add(neighbour)
    return tuple(order)


def reorder(problem: SplitProblem, order: Order) -> SplitProblem:
    """The same problem, with its layers in another order."""
    if order == tuple(range(problem.num_layers)):
        return problem
    place = np.argsort(order).tolist()

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[layer] for layer in order)

    def renamed(groups: Iterable[tuple[tuple[int, ...], int]]) -> tuple[tuple[tuple[int, ...], int], ...]:
        return tuple((tuple(place[layer] for layer in layers), size) for layers, size in groups)

    costs = problem.layers
    memory = problem.memory
    if memory is not None:
        memory = dataclasses.replace(
            memory,
            num_constant_bytes=permuted(memory.num_constant_bytes),
            num_held_bytes=permuted(memory.num_held_bytes),
            num_between_bytes=permuted(memory.num_between_bytes),
            num_temporary_bytes=permuted(memory.num_temporary_bytes),
            joined=renamed(memory.joined),
            shared=renamed(memory.shared),
            fed=renamed(memory.fed),
        )
    return dataclasses.replace(
        problem,
        layers=dataclasses.replace(
            costs,
            forward=permuted(costs.forward),
            backward=permuted(costs.backward),
            update=permuted(costs.update),
            forward_cores=permuted(costs.forward_cores),
            backward_cores=permuted(costs.backward_cores),
            weight_gradients=permuted(costs.weight_gradients),
            transfers={},
        ),
        memory=memory,
        sent=tuple(
            dataclasses.replace(
                value, maker=place[value.maker], readers=tuple(place[layer] for layer in value.readers)
            )
            for value in problem.sent
        ),
        fused=tuple(
            dataclasses.replace(pair, layers=(place[pair.layers[0]], place[pair.layers[1]]))
            for pair in problem.fused
        ),
    )


@dataclass
class _Search:
    """Simulates splits of a graph, as the stages of its layers, and not more than a number of them."""

    problem: SplitProblem
    before: Sequence[Iterable[int]]
    most: int
    judgements: dict[Stages, tuple[int, float]] = field(default_factory=dict)  # excess bytes, judged

    def judge(self, stages: Stages) -> tuple[int, float]:
        judgement = self.judgements.get(stages)
        if judgement is None:
            order, split = _in_order(stages)
            ordered = reorder(self.problem, order)
            judgement = self.judgements[stages] = ordered.excess(split), ordered.judge(split)
        return judgement

    def judge_all(self) -> bool:
        """Simulates all splits, if there are few enough; returns whether there are."""
        splits = list(itertools.islice(self._splits_from(()), self.most + 1))
        if len(splits) > self.most:
            return False
        for stages in splits:
            self.judge(stages)
        return True

    def _splits_from(self, begun: Stages) -> Iterator[Stages]:
        """All splits that begin with the stages of some layers."""
        layer, number = len(begun), self.problem.num_stages
        last = self.problem.num_layers - 1
        if layer > last:
            if len(set(begun)) == number:
                yield begun
            return
        first = max((begun[predecessor] for predecessor in self.before[layer]), default=0)
        for stage in range(number - 1 if layer == last else first, number):
            yield from self._splits_from((*begun, stage))

    def improve(self, stages: Stages) -> None:
        """Moves layers for as long as that helps."""
        best = self.judge(stages)
        is_better = True
        while is_better:
            is_better = False
            for neighbour in self._neighbours(stages):
                if len(self.judgements) >= self.most:
                    return
                judgement = self.judge(neighbour)
                if judgement < best:
                    stages, best, is_better = neighbour, judgement, True
                    break

    def _neighbours(self, stages: Stages) -> Iterator[Stages]:
        """The splits in which one layer is in the stage before or after, or two are in others.

        What has to go along does: what the layer needs, or what needs it.
        """
        steps = list(itertools.product(range(len(stages) - 1), (-1, 1)))
        singles = [(step, self._moved(stages, *step)) for step in steps]
        yield from (moved for _step, moved in singles if self._is_split(moved))
        for (layer, _step), moved in singles:
            if moved is None:
                continue
            for other, other_step in steps:
                # Either may be in a stage of its own, in whose place the other one comes.
                moved_again = self._moved(moved, other, other_step) if other != layer else None
                if self._is_split(moved_again) and moved_again != stages:
                    yield moved_again

    def _is_split(self, stages: Stages | None) -> TypeGuard[Stages]:
        return stages is not None and len(set(stages)) == self.problem.num_stages

    def _moved(self, stages: Stages, layer: int, step: int) -> Stages | None:
        """Moves a layer and what has to go along; None if the last one would, or there is no stage."""
        moved = list(stages)
        moving = [layer]
        while moving:
            layer = moving.pop()
            moved[layer] = stage = stages[layer] + step
            if layer == len(stages) - 1 or not 0 <= stage < self.problem.num_stages:
                return None
            along = self.before[layer] if step < 0 else self._after[layer]
            moving += [neighbour for neighbour in along if (moved[neighbour] - stage) * step < 0]
        return tuple(moved)

    @functools.cached_property
    def _after(self) -> list[list[int]]:
        return _find_after(self.before)


def _find_after(before: Sequence[Iterable[int]]) -> list[list[int]]:
    """The layers that need each layer's result."""
    after: list[list[int]] = [[] for _layer in before]
    for layer, layers in enumerate(before):
        for predecessor in layers:
            after[predecessor].append(layer)
    return after


def _stages(order: Order, split: Split) -> Stages:
    """The stage of each layer."""
    stages = [0] * len(order)
    for stage, (first, end) in enumerate(itertools.pairwise((*split, len(order)))):
        for place in range(first, end):
            stages[order[place]] = stage
    return tuple(stages)


def _in_order(stages: Stages) -> tuple[Order, Split]:
    """An order of the layers in which their stages come one after another, and its split."""
    order = tuple(sorted(range(len(stages)), key=lambda layer: (stages[layer], layer)))
    sizes = [stages.count(stage) for stage in range(max(stages))]
    return order, (0, *itertools.accumulate(sizes))
