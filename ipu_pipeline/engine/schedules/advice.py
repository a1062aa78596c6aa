"""Advises in a sentence what to change about a pipeline, and what that would gain. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.scenarios import Layer, Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.variants import Variant, make_even, what_if

__all__ = ["Advice", "advise"]

_LEAST_GAIN = 0.02  # in samples per second; less is not worth a change
_SHOWN = 0.5  # of the time gained: shared cores show a gain of at least this part of it
_ALIKE = 0.005  # of gains: among changes this close, one that changes a single thing is advised


@dataclass(frozen=True)
class Advice:
    """Advice on what to change.

    Example:
      >>> costs = engine.Costs.of(4, forward=1.0, backward=2.0)
      >>> advice = engine.advise(engine.Scenario(costs, "grouped", num_micro_batches=8))
      >>> advice.variant.schedule, round(advice.gain, 2)
      ('zero_bubble', 0.22)

    Attributes:
      sentence: the advice, for people, in a sentence or a few.
      gain: the predicted gain in samples per second, as a share; 0 if no change is worth it.
      variant: the change; None if no change is worth it.
      limiting_stage: the longest stage of the busiest device.
      even: the result if all stages took equally long; None if a device has several stages.
    """

    sentence: str
    gain: float
    variant: Variant | None
    limiting_stage: int
    even: Variant | None = None


def advise(
    scenario: Scenario,
    layers: Sequence[Sequence[Layer]] | None = None,
    variants: Sequence[Variant] | None = None,
    describe: Callable[[float], str] = "{:.4g}".format,
    step: str = "a step",
    shared_cores: float | None = None,
) -> Advice:
    """Advises what to change: the schedule, the split or the chunks, or if these gain nothing, the count.

    A larger gradient accumulation count always helps the pipeline, but it changes the training: weights are
    updated less often. So it comes last.

    Where devices share cores, a better split may gain nothing. So the sentence gives the step time both on
    shared cores and on devices with their own cores.

    Example:
      >>> costs = engine.Costs.of(3, forward=[1.0, 1.0, 3.0], backward=[2.0, 2.0, 6.0])
      >>> scenario = engine.Scenario(costs, "grouped", num_micro_batches=8)
      >>> print(engine.advise(scenario).sentence)
      The schedule zero_bubble instead of grouped would give 5% more samples per second (...

    Args:
      scenario: the pipeline as it is.
      layers: as for `what_if`.
      variants: the result of `what_if`; None: this function calls it.
      describe: formats a time, in the costs' unit, for the sentence.
      step: the words for a step in the sentence.
      shared_cores: the number of cores that the devices share where the pipeline runs now, if the scenario
        assumes that each has its own cores.

    Returns:
      The change with the largest predicted gain, if that is at least 2% more samples per second.
    """
    variants = what_if(scenario, layers) if variants is None else variants
    limiting, even = _find_limiting(scenario), make_even(scenario)
    is_other_count = {
        other: [row for row in variants[1:] if ("count" in row.change) == other] for other in (False, True)
    }
    for rows in is_other_count.values():
        best = max(rows, key=lambda row: (row.gain, -row.num_micro_batches), default=None)
        if best is not None and best.gain >= _LEAST_GAIN:
            near = [row for row in rows if row.gain >= best.gain - _ALIKE]
            best = min(near, key=lambda row: (" and " in row.change, -row.gain))
            sentence = _say(scenario, variants[0], best, limiting, describe, step)
            sentence += _say_beside(scenario, best.scenario, shared_cores, describe)
            return Advice(sentence, best.gain, best, limiting, even)
    if scenario.cores is not None and len(scenario.ipus) > 1:
        alone = advise(dataclasses.replace(scenario, cores=None), layers, describe=describe)
        if alone.variant is not None:
            here = f"{scenario.cores:g} core{'s' * (scenario.cores != 1)}"
            sentence = (
                f"No simulated change gains {_LEAST_GAIN:.0%} on the {here} that the devices share. "
                f"On devices with their own cores: {alone.sentence[0].lower()}{alone.sentence[1:]}"
            )
            return Advice(sentence, 0.0, None, limiting, even)
    used = variants[0].utilisation
    sentence = (
        f"No simulated change gains {_LEAST_GAIN:.0%}: devices compute for {used:.0%} of a step, and "
        f"stage {limiting} takes longest."
    )
    if even is not None and even.gain >= _LEAST_GAIN:
        own = scenario.layers if layers is None else layers
        sentence += _say_why_not_even(own[limiting] if own else None, limiting, even.gain)
        sentence += _say_beside(scenario, even.scenario, shared_cores, describe)
    return Advice(sentence, 0.0, None, limiting, even)


def _say_why_not_even(layers: Sequence[Layer] | None, stage: int, gain: float) -> str:
    """Why stages that take equally long are not advised, though they would gain something."""
    if layers is None:
        why = f"the layers of stage {stage} are not known. Move part of it to its neighbours"
    elif not layers:
        why = f"no part of stage {stage} can be moved alone. Cut it elsewhere"
    elif len(layers) < 2:
        why = f"stage {stage} has no second layer that could move. Make its layer smaller, or cut it in two"
    else:
        why = f"no split into whole layers comes close. Cut a layer of stage {stage} in two"
    return f" Stages that take equally long would give {gain:.0%} more samples per second, but {why}."


def _say_beside(
    scenario: Scenario, changed: Scenario, shared_cores: float | None, describe: Callable[[float], str]
) -> str:
    """What a step takes where cores are shared, or where they are not; "" if unknown, or the same."""
    cores = shared_cores if scenario.cores is None else None
    if cores is scenario.cores or len(scenario.ipus) == 1:
        return ""
    before, after = (
        predict_step_time(dataclasses.replace(one, cores=cores)) for one in (scenario, changed)
    )
    now, then = describe(before), describe(after)
    if [now, then] == [describe(predict_step_time(one)) for one in (scenario, changed)]:
        return ""
    if cores is None:
        return f" On devices with their own cores it takes {now} now, and {then} then."
    here = f" Here the devices share {cores:g} core{'s' * (cores != 1)}"
    here += f", on which it takes {now} now, and {then} then, if nothing else runs there"
    if before - after > _SHOWN * (predict_step_time(scenario) - predict_step_time(changed)):
        return f"{here}."
    return f"{here}: this machine cannot show the gain on separate devices."


def _find_limiting(scenario: Scenario) -> int:
    work = scenario.work_of_ipus()
    ipu = max(work, key=work.__getitem__)
    stages = [stage for stage, own in enumerate(scenario.device_mapping) if own == ipu]
    return max(stages, key=lambda stage: _work_of(scenario, stage))


def _work_of(scenario: Scenario, stage: int) -> float:
    return sum(scenario.work(kind, stage) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))


def _say(
    scenario: Scenario,
    before: Variant,
    best: Variant,
    limiting: int,
    describe: Callable[[float], str],
    step: str,
) -> str:
    gain = f"{best.gain:.0%} more samples per second"
    parts = []
    if "schedule" in best.change:
        parts.append(f"the schedule {best.schedule} instead of {before.schedule}")
    if "count" in best.change:
        parts.append(
            f"a gradient accumulation count of {best.num_micro_batches} instead of "
            f"{before.num_micro_batches}"
        )
    if best.change == "cluster":
        before_cluster, cluster = scenario.cluster, best.scenario.cluster
        if before_cluster.num_processes != cluster.num_processes:
            parts.append(f"{best.cluster} instead of {before_cluster.num_processes}")
        else:
            verb = "sharing" if cluster.shards_optimizer_state else "not sharing"
            parts.append(f"{verb} the optimizer state between the replicas")
    if best.change == "micro-batches per program":
        parts.append(f"{best.chunk_size} micro-batches per program (dispatch_plan)")
    if best.change == "split":
        work, total = scenario.work_of_ipus(), sum(scenario.work_of_ipus().values())
        slowest = work[scenario.device_mapping[limiting]] * len(work) / total if total else 1.0
        sentence = f"moving {best.split} would give {gain}"
        if _work_of(best.scenario, limiting) < _work_of(scenario, limiting):
            sentence = (
                f"Stage {limiting} is the bottleneck: its device has {slowest:.2g} times the mean work. "
                f"{sentence[0].upper()}{sentence[1:]}"
            )
    else:
        sentence = f"{' and '.join(parts)} would give {gain}"
    sentence = sentence[0].upper() + sentence[1:]
    sentence += f" ({step} takes {describe(before.step_time)} now, and {describe(best.step_time)} then)"
    if best.num_peak_bytes is not None and before.num_peak_bytes is not None:
        more = best.num_peak_bytes - before.num_peak_bytes
        if more > 0:
            sentence += f"; the fullest device would hold {more:,} bytes more"
    if "count" in best.change:
        count = best.num_micro_batches
        sentence += f". It changes training: each weight update then takes {count} micro-batches"
    return sentence + "."
