"""What a test leaves behind: the next test in this process would meet it."""

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import types
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import jax
import numpy as np

from tests.support import forked

ROOT = Path(__file__).parents[2]
# How long a thread that a test started may take to end; one that hangs fails that test.
JOIN_SECONDS = 60
# The watch ends by itself, a quarter of a minute after the last step that a test began.
FOR_GOOD = ("tqdm_monitor", "ipu_pipeline step watch")
# The latter two by torch's export and by tensorboardX, when they are first used.
CHANGED_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "CRC32C_SW_MODE")


# Module or class of the package -> what is in it, and the names that nothing but a test would bind again.
_tracked = {}
_modules = set()  # those that have been looked through for what is to be tracked


def state():
    """What must be the same after a test as before, by what it is called in the message."""
    found = {
        "the working directory": os.getcwd(),
        "the environment": {
            name: os.environ[name] for name in os.environ if name not in CHANGED_BY_LIBRARIES
        },
        "signal handlers": {number.name: handler(number) for number in signal.Signals},
        "an alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "JAX's configuration": dict(jax.config.values),
        "threads": set(filter(ends, threading.enumerate())),
        "child processes": child_processes(),
        # Not .mypy_cache and such: lint runs beside the tests. The site's sources are written to build.
        "files in the checkout": {name for name in os.listdir(ROOT) if name[0] != "." and name != "build"},
        "temporary files": {
            name
            for name in os.listdir(tempfile.gettempdir())
            if not name.startswith(("torchinductor_", "pymp-"))
            and not name.endswith("tfds")  # tensorflow-datasets makes one for good when it is imported
        },
        "logging": logging_state(),
        "sys": {
            "excepthook": sys.excepthook,
            "unraisablehook": sys.unraisablehook,
            "argv": list(sys.argv),
            "path": list(sys.path),
            "meta_path": [one for one in sys.meta_path if "ipu_pipeline" in repr(one)],
        },
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "NumPy's error handling": np.geterr(),
        "modules": dict(sys.modules),
        "the package": package_names(),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch's settings"] = {
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    return found


def differences(before):
    """A line for each thing that is not as it was."""
    for thread in threading.enumerate():
        if thread not in before["threads"] and ends(thread):
            thread.join(JOIN_SECONDS)
    after, lines = state(), []
    for what, old in before.items():
        new = after[what]
        if new == old:
            continue
        if isinstance(old, set):
            if more := sorted(map(str, new - old)):
                lines.append(f"{what}: {', '.join(more)} left")
        elif isinstance(old, dict):
            for name in {**old, **new}:
                was, now = old.get(name, GONE), new.get(name, GONE)
                if now == was or (was is GONE and what in ADDED_TO):
                    continue
                if what == "the package":
                    pairs = zip(_tracked[name][1], was, now, strict=True)
                    names = [one for one, a, b in pairs if a is not b and not is_hooked(b)]
                    if names:
                        lines.append(f"{what}: {name}: {', '.join(names)} bound to something else")
                else:
                    lines.append(f"{what}: {name} is {now!r}; it was {was!r}")
        else:
            lines.append(f"{what} is {new!r}; it was {old!r}")
    return lines


ADDED_TO = ("modules", "the package")  # by an import, which is no fault
GONE = "not there"


def handler(number):
    """Not the one that torch's data loader sets for good when it first starts a process."""
    found = signal.getsignal(number)
    return signal.SIG_DFL if "_set_SIGCHLD_handler" in repr(found) else found


def is_hooked(function):
    """Whether it is the `step` of an optimizer's class, in which torch puts a hook at the first use."""
    return getattr(function, "hooked", False)


def ends(thread):
    """Not those that a library starts once for good, nor those of XLA that have called Python."""
    return thread.name not in FOR_GOOD and not isinstance(thread, threading._DummyThread)


def child_processes():
    """Their numbers, ended or not, as long as nobody has asked for their status."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none
        return set()
    here, found = str(os.getpid()), set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == here:
                    found.add(name)
        except OSError:  # it has just ended
            continue
    return found - set(map(str, helpers()))


def helpers():
    """Processes that are started once, and end with this one."""
    yield from (server.pid for server in forked._servers.values())
    yield from (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid)


def logging_state():
    loggers = {name or "root": logging.getLogger(name) for name in ("", "ipu_pipeline", "jax", "absl")}
    return {"disabled up to": logging.root.manager.disable} | {
        name: (one.level, one.propagate, *one.handlers, *filter(is_removed, one.filters))
        for name, one in loggers.items()
    }


def is_removed(log_filter):
    """Not the one that is set for good when the package first writes a checkpoint."""
    return "_drop_repeated_errors" not in repr(log_filter)


def package_names():
    """The functions, classes, modules and constants in each module and class of the package."""
    for name in sys.modules.keys() - _modules:
        _modules.add(name)
        if name.startswith("ipu_pipeline") and (module := sys.modules[name]) is not None:
            track(name, module)
            for member in list(vars(module).values()):
                if isinstance(member, type) and member.__module__ == name:
                    track(f"{name}.{member.__qualname__}", member)
    return {name: tuple(map(own.get, names)) for name, (own, names) in _tracked.items()}


def track(name, holder):
    kinds = types.FunctionType | types.ModuleType | type | property | classmethod | staticmethod
    own = vars(holder)
    _tracked[name] = own, [one for one in own if isinstance(own[one], kinds) or one.isupper()]
