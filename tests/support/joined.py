"""Several processes that jax.distributed joins, each of which runs the same function of a test module."""

import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ipu_pipeline.processes.launcher import hold_port

ROOT = Path(__file__).parents[2]


def start(function, num_processes, num_devices, *arguments, directory, joins_itself=False):
    """Starts the processes. Each calls the function with the arguments once it has joined.

    Args:
      function: of a module; what it returns is what `finish` gives of its process.
      num_processes: how many.
      num_devices: CPU devices of each; None if the function says it.
      *arguments: what can be pickled.
      directory: an empty one, for what they write.
      joins_itself: whether the function joins the processes, by the environment.
    """
    held = hold_port()
    address = f"127.0.0.1:{held.getsockname()[1]}"
    joined = None if joins_itself else address
    given = (function.__module__, function.__name__, joined, num_processes, num_devices, arguments)
    (directory / "given").write_bytes(pickle.dumps(given))
    # A thread per device (an emulated one sleeps in its own), and one that others can pull through. What
    # joins itself sees to that one. More would wait for the cores that the others use.
    num_threads = 1 if num_devices is None else num_devices + 1
    environment = {**os.environ, "PJRT_NPROC": f"{num_threads}", "PYTHONPATH": str(ROOT)}
    environment["JAX_PLATFORMS"] = "cpu"
    processes = []
    for number in range(num_processes):
        with (directory / f"log{number}").open("wb") as log:
            if joins_itself:
                environment["IPU_PIPELINE_COORDINATOR_ADDRESS"] = address
                environment["IPU_PIPELINE_NUM_PROCESSES"] = str(num_processes)
                environment["IPU_PIPELINE_PROCESS_ID"] = str(number)
            command = [sys.executable, "-m", "tests.support.joined", str(directory), str(number)]
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
    processes[0].held = held  # until the end
    return processes


def finish(processes, directory, timeout, dead=None):
    """What the function returned in each process. None of the processes is left, however this ends.

    Args:
      processes: from `start`.
      directory: as given there.
      timeout: in seconds.
      dead: the number of one that is to be killed on the way, and has no result.
    """
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            others = [process for number, process in enumerate(processes) if number != dead]
            has_failed = any(process.poll() not in (None, 0) for process in others)
            assert not has_failed, read_logs(processes, directory)
            if time.monotonic() > deadline:
                for process in processes:
                    process.send_signal(signal.SIGUSR1)
                raise AssertionError(f"not after {timeout} s\n{read_logs(processes, directory)}")
            time.sleep(0.02)
    finally:
        end(processes)
    codes = [process.returncode for process in processes]
    expected = [-signal.SIGKILL if number == dead else 0 for number in range(len(processes))]
    assert codes == expected, read_logs(processes, directory)
    return [
        None if number == dead else pickle.loads((directory / f"made{number}").read_bytes())
        for number in range(len(processes))
    ]


def end(processes):
    """Ends those that still run."""
    for process in processes:
        process.kill()
        process.wait()
    processes[0].held.close()


def read_logs(processes, directory):
    """The end of what each process wrote."""
    time.sleep(0.5)  # for those that are about to say why they end
    return "\n".join(
        f"--- process {number} ({process.poll()})\n{(directory / f'log{number}').read_text()[-4000:]}"
        for number, process in enumerate(processes)
    )


def run(function, num_processes, num_devices, *arguments, timeout=120, dead=None):
    """What a function returned in each of several processes; arguments as of `start` and `finish`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        processes = start(function, num_processes, num_devices, *arguments, directory=directory)
        return finish(processes, directory, timeout, dead)


def main(directory, number):
    import jax

    given = pickle.loads((directory / "given").read_bytes())
    module, function, address, num_processes, num_devices, arguments = given
    if address is None:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        made = getattr(importlib.import_module(module), function)(*arguments)
        (directory / f"made{number}").write_bytes(pickle.dumps(made))
        return
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(
        address,
        num_processes,
        number,
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=10,
        coordinator_bind_address=address,
    )
    made = getattr(importlib.import_module(module), function)(*arguments)
    has_lost_others = isinstance(made, Exception)
    (directory / f"made{number}").write_bytes(pickle.dumps(made))
    sys.stdout.flush()
    if has_lost_others:  # JAX would wait for them, and others must not take this one's end for the cause
        deadline = time.monotonic() + 20
        while len(list(directory.glob("made*"))) < num_processes - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        os._exit(0)
    jax.distributed.shutdown()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # one that hangs says where; SIGTERM is JAX's, once it has joined
    signal.alarm(600)  # nobody waits for this any more
    main(Path(sys.argv[1]), int(sys.argv[2]))
