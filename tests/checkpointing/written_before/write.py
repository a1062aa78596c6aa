"""Writes what `test_written_before.py` reads: checkpoints, an exported program, and what they lead to.

    cd CLONE-OF-AN-EARLIER-COMMIT
    .venv/bin/python PATH-TO/written_before/write.py PATH-TO/written_before

It uses the public interface alone, so the package of either commit can run it, and the test builds the same
programs from it. Each `.tar.gz` is a directory that was written, and the `.npz` beside it has arrays: those
of the checkpoint (`saved/...`), what was dequeued when the session went on (`next`), and the arrays
afterwards (`ended/...`). What lies here was written by commit e95643a.

    python -m tests.checkpointing.written_before.write --go-on FOLDER

goes on from the directories in a folder instead, and writes the same arrays beside them.
"""

import itertools
import platform
import sys
import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

import ipu_pipeline as ipu

SEED, MICRO_BATCHES, ACCUMULATED, ITERATIONS = 11, 4, 4, 6


class Examples:
    """A data set of NumPy arrays, without end; its iterators say where they are, or they do not."""

    def __init__(self, has_state):
        rng = np.random.default_rng(1)
        self.x = rng.normal(size=(30, 4, 6)).astype(np.float32)
        self.y = rng.normal(size=(30, 4, 3)).astype(np.float32)
        self.has_state = has_state

    def __iter__(self):
        return (Stateful if self.has_state else Stateless)(self)


class Stateless:
    def __init__(self, examples):
        self.examples, self.number = examples, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        place = 7 * self.number % len(self.examples.x)
        return self.examples.x[place], self.examples.y[place]


class Stateful(Stateless):
    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def dense(name, x, size):
    with ipu.variable_scope(name):
        return ipu.layers.Dense(size, activation=jnp.tanh if size > 3 else None)(x)


def first_stage(x, y):
    x = dense("first", x, 8)
    with ipu.variable_scope("dropout"):
        return ipu.layers.Dropout(0.3)(x), y


def second_stage(x, y):
    with ipu.variable_scope("normalization"):
        x = ipu.layers.BatchNormalization()(x)
    return dense("second", x, 3), y


def find_loss(x, y):
    return jnp.mean((x - y) ** 2)


def make_optimizer():
    return optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(2)), optax.adam(0.01))


class Part:
    """A program with its queues."""

    def __init__(self, function, has_state=True):
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(Examples(has_state))
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            self.program = ipu.ipu_compiler.compile(lambda: function(self))
        self.start = self.infeed.initializer

    def run(self, session):
        """Once, and what it enqueued."""
        session.run(self.program)
        return session.run(self.outfeed.dequeue())


def train_pipeline(part):
    return ipu.pipelining_ops.pipeline(
        [first_stage, second_stage],
        gradient_accumulation_count=MICRO_BATCHES,
        repeat_count=2,
        infeed_queue=part.infeed,
        outfeed_queue=part.outfeed,
        optimizer_function=lambda x, y: ipu.pipelining_ops.OptimizerFunctionOutput(
            make_optimizer(), find_loss(x, y)
        ),
        outfeed_loss=True,
    )


def train_loop(part):
    """In two shards; six iterations are an update and half of the next one."""

    def body(x, y):
        with ipu.scopes.ipu_shard(0):
            x, y = first_stage(x, y)
        with ipu.scopes.ipu_shard(1):
            x, y = second_stage(x, y)
            loss = find_loss(x, y)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
            make_optimizer(), ACCUMULATED, reduction_method="SUM"
        )
        optimizer.minimize(loss)
        part.outfeed.enqueue(loss)

    return ipu.loops.repeat(ITERATIONS, body, infeed_queue=part.infeed)


def infer(part):
    return ipu.pipelining_ops.pipeline(
        [first_stage, lambda x, y: second_stage(x, y)[0]],
        gradient_accumulation_count=MICRO_BATCHES,
        infeed_queue=part.infeed,
        outfeed_queue=part.outfeed,
    )


PARTS = {"pipeline": lambda: Part(train_pipeline), "loop": lambda: Part(train_loop, has_state=False)}


def read_arrays(session, prefix):
    """All arrays of a session by path: variables, optimizer state, accumulators; keys as their data."""
    tree = session.take_snapshot(is_kept=False).arrays()
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": as_numbers(leaf) for path, leaf in leaves}


def as_numbers(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def describe_machine():
    """What the last bits depend on: XLA's version, and the instructions that it may use."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    wide = sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx")))
    return " ".join([jaxlib.__version__, platform.machine(), *wide])


def write_training(folder, name):
    """A checkpoint of a session that has trained, and what comes next; the session, which goes on."""
    session, part = ipu.Session(seed=SEED), PARTS[name]()
    session.run([ipu.global_variables_initializer(), part.start])
    part.run(session)
    session.save(folder / name)
    arrays = read_arrays(session, "saved/")
    arrays["next"] = np.asarray(part.run(session))
    arrays |= read_arrays(session, "ended/")
    write_arrays(folder / f"{name}.npz", arrays)
    return session


def write_exported(folder, session):
    """An exported program, and its predictions for two micro-batches."""
    part = Part(infer)
    session.run(part.start)
    predictions = part.run(session)
    session.export(folder / "exported", part.program)
    write_arrays(folder / "exported.npz", {"predictions": np.asarray(predictions)})


def write_arrays(path, arrays):
    np.savez_compressed(path, machine=describe_machine(), **arrays)


def pack(directory):
    """Puts a directory into one file beside it, without what differs from one time to the next."""
    packed = directory.with_suffix(".tar.gz")
    with tarfile.open(packed, "w:gz", compresslevel=9) as archive:
        archive.add(directory, ".", filter=forget_owner)


def forget_owner(info):
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def go_on(folder, name):
    """Restores a checkpoint, and trains once more."""
    part = PARTS[name]()
    with ipu.Session() as session:
        session.restore(folder / name)
        arrays = read_arrays(session, "saved/")
        session.run(part.start)
        arrays["next"] = np.asarray(part.run(session))
        write_arrays(folder / f"{name}.npz", arrays | read_arrays(session, "ended/"))


def predict(folder):
    """Runs the exported program."""
    elements = itertools.islice(Examples(True), MICRO_BATCHES)
    predictions = ipu.load_program(folder / "exported").run(elements)
    write_arrays(folder / "exported.npz", {"predictions": np.asarray(predictions)})


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # what runs once is faster to compile so
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # no folders in what is exported
    if sys.argv[1] == "--go-on":
        folder = Path(sys.argv[2])
        for name in PARTS:
            go_on(folder, name)
        predict(folder)
    else:
        write(Path(sys.argv[1]))


def write(target):
    """Writes and packs everything into a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with write_training(folder, "loop"):
            pass
        with write_training(folder, "pipeline") as session:
            write_exported(folder, session)
        for directory in ("loop", "pipeline", "exported"):
            pack(folder / directory)
        for path in sorted(folder.iterdir()):
            if path.is_file():
                (target / path.name).write_bytes(path.read_bytes())
                print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
