"""Loops on devices: a body, again and again, with a training step every so many iterations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.devices.compiler_options import NO_OPTIONS
from ipu_pipeline.engine.devices.elsewhere import absent
from ipu_pipeline.engine.devices.offloading import Offload
from ipu_pipeline.engine.devices.placing import put_host_copies
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import make_rows
from ipu_pipeline.engine.devices.sharding import Shard
from ipu_pipeline.engine.execution.agreeing import answer_everywhere
from ipu_pipeline.engine.execution.blocks.runner import BlockRunner
from ipu_pipeline.engine.execution.comparing import agree_on
from ipu_pipeline.engine.execution.contract import Iterated, Runner
from ipu_pipeline.engine.execution.runner import ColumnRunner
from ipu_pipeline.engine.loops.bodies import TracedBody
from ipu_pipeline.engine.planning.memory import plan_stages
from ipu_pipeline.engine.planning.memory_plans import IpuMemory
from ipu_pipeline.engine.planning.summaries import PipelineSummary
from ipu_pipeline.engine.planning.summarizing import estimate_bubble, find_shared, summarize_stages
from ipu_pipeline.engine.programs import differentiation
from ipu_pipeline.engine.programs.accumulation import Reduction
from ipu_pipeline.engine.programs.collecting import make_collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.state import Collected, OfReplicas, PipelineState, RunState, of_replica
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates import cutting
from ipu_pipeline.engine.updates.accumulators import plan_accumulators

__all__ = ["Loop"]

_NEVER = 2**31 - 1  # iterations per weight update of a loop that does not train


class Loop:
    """A traced body with its programs.

    With all its operations on one device, its runner runs a block of iterations as one program. With
    several shards, it runs one iteration, shard after shard, and with several replicas one of each. State
    that goes in is gone afterwards: its memory is reused.
    """

    def __init__(
        self,
        body: TracedBody,
        condition: Callable[[list[Any]], Any] | None = None,
        block_bytes: int = 64 * 2**20,
    ) -> None:
        """Builds the programs. It does not start JAX's backend.

        Args:
          body: the body.
          condition: of a loop that ends by itself: whether it goes on, from the carried values.
          block_bytes: how much of the device a block's feed and what it enqueues may take.
        """
        self.body = body
        self._condition = condition
        self._block_bytes = block_bytes
        training = body.training
        traced = body.pipeline
        self.updated_every = _NEVER if training is None else training.num_mini_batches
        self.updates: cutting.Updates | None = None
        self._goes_on = None if condition is None else jax.jit(self._holds)
        if training is None:
            self.programs: tuple[StagePrograms, ...] = differentiation.build(traced, (), Reduction.SUM)
        else:
            homes = {name: body.shards.index(body.shards[stage]) for name, stage in traced.owners.items()}
            self.updates = cutting.cut_updates(training.optimizer, homes, len(body.shards) - 1)
            self.programs = differentiation.build(
                traced,
                training.optimizer.trained,
                training.reduction,
                training.gradient_map,
                is_scaled=self.updates.loss_scale is not None,
            )
        self._timetable = schedules.timetable(
            "sequential", len(traced.stages), 1, body.shards, training is not None
        )
        self._num_replicas, self._has_identical_keys = 1, False
        self._devices: list[Any] | None = None
        self._runner: Runner[Any] | None = None

    @property
    def num_ipus(self) -> int:
        """How many IPUs each replica needs."""
        return max(self.body.shards) + 1

    @property
    def num_devices(self) -> int:
        """How many devices each replica needs."""
        return self.num_ipus

    @property
    def device_mapping(self) -> tuple[int, ...]:
        """The IPU of each shard."""
        return self.body.shards

    @property
    def num_replicas(self) -> int:
        """How many copies of it run at the same time."""
        return self._num_replicas

    @property
    def has_condition(self) -> bool:
        """Whether it ends by itself."""
        return self._condition is not None

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables by full name."""
        return self.body.pipeline.variables

    @property
    def is_one_program(self) -> bool:
        """Whether all operations are on one device."""
        return len(self.body.shards) == self._num_replicas == 1

    def set_replicas(self, num_replicas: int, identical_keys: bool = False) -> None:
        """Says how many replicas there are; see `Pipeline.set_replicas`."""
        self._has_identical_keys = identical_keys
        if isinstance(self._runner, ColumnRunner):
            self._runner.replicas.has_identical_keys = identical_keys
        if num_replicas != self._num_replicas:
            self._num_replicas, self._runner = num_replicas, None

    def prepare(self, devices: Sequence[Any]) -> Runner[Any]:
        """What runs the loop; starts JAX's backend.

        Args:
          devices: the JAX device of each IPU, those of one replica after those of the other. With other
            devices than before, everything is compiled again.

        Raises:
          ValueError: the loop is not the same in all processes.
        """
        size, number = self.num_ipus, self._num_replicas
        used = list(devices[: size * number])
        if self._runner is not None and used == self._devices:
            return self._runner
        traced = self.body.pipeline
        self._devices = used
        self._agree()
        first, last = self.body.num_read, self.body.num_read + len(self.body.changing)
        condition = None if self._condition is None else self._holds
        iterated = Iterated(traced.outputs[first:last], condition)
        is_enqueued = [number >= last for number in range(len(traced.outputs))]
        collecting = make_collecting(traced, lambda _outputs: is_enqueued, losses=False)
        if self.is_one_program:
            self._runner = BlockRunner(
                self._make_residence(used, 1),
                self.programs,
                collecting,
                donate=True,
                block_bytes=self._block_bytes,
                iterated=iterated,
            )
            return self._runner
        residence = self._make_residence(used, number)
        homes = [residence]
        if number > 1:
            homes = [self._make_residence(used[start:], 1) for start in range(0, size * number, size)]
        self._runner = runner = ColumnRunner(
            residence,
            homes,
            self.programs,
            lambda _count: self._timetable,
            True,
            collecting,
            NO_OPTIONS,
            iterated=iterated,
        )
        runner.replicas.has_identical_keys = self._has_identical_keys
        return self._runner

    def _make_residence(self, devices: Sequence[Any], num_replicas: int) -> Residence:
        traced, training = self.body.pipeline, self.body.training
        reduction = Reduction.SUM if training is None else training.reduction
        return Residence(
            traced,
            self.updates,
            make_rows(devices, self.body.shards, num_replicas),
            plan_accumulators(traced, self.programs, self.body.shards, reduction),
            [Offload.WEIGHT_UPDATE_VARIABLES] if training and training.offloads_state else [],
            [Shard.OPTIMIZER_STATE] if training and training.shards_state else [],
        )

    def _agree(self) -> None:
        """Sees that all processes of the run have the same loop."""
        assert self._devices is not None
        training = self.body.training
        if training is None:
            settings = "no training"
        else:
            settings = (
                f"{training.num_mini_batches} mini-batches, {training.reduction.name}, offloaded: "
                f"{training.offloads_state}, shared out: {training.shards_state}"
            )
        told = {
            "the number of replicas": str(self._num_replicas),
            "the shards": str(list(self.body.shards)),
            "the training step": settings,
        }
        agree_on("loop", self.body.pipeline, self.updates, told, self._devices)

    def plan_memory(self, num_iterations: int) -> tuple[IpuMemory, ...]:
        """What each IPU takes in a run of so many iterations; after `prepare`."""
        assert self._runner is not None
        shards, dtypes = self.body.shards, self._accumulator_dtypes
        stages = plan_stages(self.body.pipeline, self.programs, shards, [1] * len(shards))
        return self._runner.plan_memory(dtypes, stages, num_iterations)

    def summary(self, *, left_out: Collection[str] = ()) -> PipelineSummary:
        """What each part will need and do, before anything is compiled; see `Pipeline.summary`."""
        body, training = self.body, self.body.training
        memory = plan_stages(body.pipeline, self.programs, body.shards, [1] * len(body.shards))
        num_carried, dtypes = len(body.changing), self._accumulator_dtypes
        stages = summarize_stages(body.pipeline, self.programs, memory, dtypes, left_out, num_carried)
        return PipelineSummary(
            name="Loop",
            trains=training is not None,
            unit="iteration",
            schedule="",
            num_micro_batches=1 if training is None else training.num_mini_batches,
            num_serialized=1,
            chunk_size=1,
            stages=stages,
            shared=find_shared(body.pipeline, left_out),
            bubble=estimate_bubble(stages, lambda _count: self._timetable, 1, repeats=True),
        )

    @property
    def _accumulator_dtypes(self) -> Mapping[str, Any]:
        return {} if self.body.training is None else self.body.training.accumulator_dtypes

    def place(
        self, state: PipelineState, accumulators: Mapping[str, Any], num_accumulated: int
    ) -> RunState:
        """A state on the devices of the loop's shards.

        Args:
          state: variables, optimizer state, counts and key.
          accumulators: sums or means of gradients; those that are missing are zeros.
          num_accumulated: of how many iterations.
        """
        assert self._runner is not None
        return self._runner.place(state, self._accumulator_dtypes, accumulators, num_accumulated)

    def split_carried(self, carried: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The carried values that stay the same, and those that change."""
        changing = set(self.body.changing)
        constant = [value for number, value in enumerate(carried) if number not in changing]
        return constant, [carried[number] for number in self.body.changing]

    def join_carried(self, constant: Sequence[Any], changing: Sequence[Any]) -> list[Any]:
        """The inverse of `split_carried`."""
        rest, changed = iter(constant), iter(changing)
        numbers = range(self.body.num_carried)
        return [next(changed if number in self.body.changing else rest) for number in numbers]

    def absent_carried(self) -> list[Any]:
        """What stands for carried values that iterations gave, in a process without devices of the loop."""
        runner, first = self._runner, self.body.num_read
        assert runner is not None
        avals = self.body.pipeline.output_avals[first : first + len(self.body.changing)]
        rows = [home.rows[-1] for home in runner.homes]
        carried = [[absent(aval.shape, aval.dtype, row.replicated) for row in rows] for aval in avals]
        if len(rows) == 1:
            return [value for (value,) in carried]
        return [OfReplicas(tuple(values)) for values in carried]

    def goes_on(self, inputs: Sequence[Any], changing: Sequence[Any]) -> bool:
        """Whether the condition holds; True without one. Waits for the values.

        Raises:
          ValueError: it holds in some replicas only.
        """
        if self._goes_on is None:
            return True
        runner = self._runner
        assert runner is not None
        asked, rows = [], [home.rows[0] for home in runner.homes]
        for replica, (residence, row) in enumerate(zip(runner.homes, rows, strict=True)):
            if residence.has_peers:
                residence.begin_step()
            groups = ("inputs of the condition", inputs), ("carried values of the condition", changing)
            placed = [
                put_host_copies([of_replica(one, replica) for one in own], row, tag=residence.tag(what))
                for what, own in groups
            ]
            if row.is_here:
                asked.append(jax.device_put(self._goes_on(*placed), row.replicated))
            else:
                asked.append(absent((), np.dtype(bool), row.replicated))
        homes = [row.devices[0] for row in rows]
        answers = answer_everywhere(runner.residence, asked, homes, "condition of a loop")
        if len(set(answers)) > 1:
            going_on = [replica for replica, answer in enumerate(answers) if answer]
            raise ValueError(
                "ipu.loops.while_loop: condition must give the same in all replicas, which train and "
                f"compute together; it is True in replicas {going_on} of {len(answers)} only. Let it "
                "depend on what is the same in all, such as what cross_replica_ops.cross_replica_mean "
                "gives."
            )
        return answers[0]

    def _holds(self, inputs: list[Any], changing: list[Any]) -> Any:
        assert self._condition is not None
        return self._condition(self.join_carried(inputs[len(self.body.captured) :], changing))

    def split_enqueued(self, collected: Collected) -> list[list[Any]]:
        """What is enqueued, per entry of the body's `enqueued`."""
        first = self.body.num_read + len(self.body.changing)
        return [
            [collected.outputs[place - first] for place in places] for _entry, places in self.body.enqueued
        ]
