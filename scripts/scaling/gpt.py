"""A GPT and the devices that train it: what its stages compute, hold and send.

Sources of the formulas, for b sequences of s tokens, width h, a heads, and V words:

* A block's forward takes 24 b s h^2 + 4 b s^2 h operations, that of the logits 2 b s h V, and a backward
  twice as many (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", 2021, appendix). With recomputation there is a forward more; the last stage, whose forward
  and backward are one program, has nothing to recompute.
* A block's backward reads s b h (34 + 5 a s / h) bytes of activations in 16 bits (Korthikanti et al.,
  "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 2). The logits and their
  loss take 4 b s V bytes more (the same, section 4.3).
* A block has 12 h^2 + 13 h parameters, the embedding (V + s) h, the logits V h + 2 h, and these two are not
  tied. Each parameter takes 16 bytes: the variable, its accumulator, and Adam's two moments, in 32 bits
  each. Where R replicas share the optimizer's state, the moments take 8 / R in place of 8 (Rajbhandari et
  al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1).
* Adam's update reads variable, accumulator and moments, and writes variable and moments: 28 bytes per
  parameter, at the bandwidth of the memory.
* A stage sends b s h values of 16 bits, and gets as many gradients back.
* Replicas average gradients in 32 bits: see `ipu_pipeline.engine.schedules.clusters`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.schedules import LinkSpeed

__all__ = ["H100", "Device", "Gpt", "Stage", "split"]


@dataclass(frozen=True)
class Device:
    """A device and what joins it to others; times in seconds.

    Attributes:
      operations: per second, that a model reaches.
      num_bytes: of memory that a program may use.
      memory_bandwidth: bytes per second.
      within: links between devices of a process.
      between: links between processes.
      per_process: how many devices a process has.
      host: how long a host takes to start a program.
    """

    operations: float
    num_bytes: float
    memory_bandwidth: float
    within: LinkSpeed
    between: LinkSpeed
    per_process: int
    host: float


# NVIDIA's data sheets of the H100 SXM (989 Tflop/s in bfloat16, 80 GB, 3.35 TB/s, NVLink with 450 GB/s in
# each direction) and of the DGX H100 (a network card of 400 Gb/s for each of 8 devices). Ours: half of the
# operations are reached (Narayanan et al. reach 43% to 52% of an A100's), nine tenths of the memory can be
# used, links have 5 us and 10 us of latency, and a host starts a program in 40 us (benchmarks/dispatch).
H100 = Device(
    operations=0.5 * 989e12,
    num_bytes=0.9 * 80e9,
    memory_bandwidth=3.35e12,
    within=LinkSpeed(5e-6, 450e9),
    between=LinkSpeed(10e-6, 50e9),
    per_process=8,
    host=40e-6,
)


@dataclass(frozen=True)
class Gpt:
    """A GPT.

    Attributes:
      num_blocks: how many.
      width: h.
      num_heads: a.
      length: tokens of a sequence, s.
      num_words: V.
      num_sequences: of a weight update, in all replicas.
    """

    num_blocks: int
    width: int = 4096
    num_heads: int = 32
    length: int = 2048
    num_words: int = 51200
    num_sequences: int = 2048

    @property
    def num_parameters(self) -> int:
        """Of all of it."""
        return sum(stage.num_parameters for stage in split(self, 1, recompute=False))

    @property
    def sent_bytes(self) -> int:
        """What a stage sends of a sequence, in each direction."""
        return 2 * self.length * self.width


@dataclass(frozen=True)
class Stage:
    """A part of a GPT, per sequence of a micro-batch.

    Attributes:
      num_blocks: how many blocks it has.
      forward: operations.
      backward: likewise, with what is computed again.
      num_parameters: how many.
      held_bytes: what it holds of a sequence in flight.
      temporary_bytes: what it takes of a sequence while it runs.
    """

    num_blocks: int
    forward: float
    backward: float
    num_parameters: int
    held_bytes: float
    temporary_bytes: float


def split(model: Gpt, num_stages: int, *, recompute: bool) -> list[Stage]:
    """Splits a GPT between blocks, so that the slowest stage is as fast as can be.

    The first stage has the embedding and the last one the logits. Of the others, which have the same work,
    the later ones get the blocks that are left over, since they have fewer micro-batches in flight.

    Args:
      model: the GPT.
      num_stages: how many; at most one more than it has blocks.
      recompute: whether all but the last stage hold only what they are given.

    Returns:
      The stages, the first one first.
    """
    width, length, words = model.width, model.length, model.num_words
    block = 24.0 * length * width**2 + 4.0 * length**2 * width
    logits = 2.0 * length * width * words
    activations = length * width * (34 + 5 * model.num_heads * length / width)
    times = 4 if recompute else 3  # of a forward: it, the backward, and the forward again

    def slowest(of_last: int) -> float:
        before = -(-(model.num_blocks - of_last) // (num_stages - 1))
        return max(times * before * block, 3 * (of_last * block + logits))

    most = model.num_blocks - (num_stages - 1)
    of_last = most if num_stages == 1 else min(range(most + 1), key=lambda n: (slowest(n), n))
    counts = [0] * (num_stages - 1)
    for place in range(model.num_blocks - of_last):
        counts[-1 - place % len(counts)] += 1
    stages = []
    for place, count in enumerate([*counts, of_last]):
        is_last = place == num_stages - 1
        forward = count * block + is_last * logits
        own = count * activations + is_last * 4.0 * length * words
        parameters = count * (12 * width**2 + 13 * width)
        parameters += (place == 0) * (words + length) * width + is_last * (words * width + 2 * width)
        recomputes = recompute and not is_last
        held = 0.0 if is_last else float(model.sent_bytes) if recomputes else own
        temporary = own if recomputes or is_last else activations
        stages.append(
            Stage(count, forward, (3 if recomputes else 2) * forward, parameters, held, temporary)
        )
    return stages
