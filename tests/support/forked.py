"""Programs that start at once: forked from a process that has imported JAX and this library.

No backend runs there. What is about the start of a process, as imports are, starts one of its own.
"""

import atexit
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ_AT_START = "PYTHON"  # each value needs a process of its own
READ_LATER = ("IPU_PIPELINE_", "POPLAR_", "TF_POPLAR", "JAX_")

_SERVER = f"""
import gc, json, os, signal, sys
import jax, jax.numpy, numpy, optax
read, look_up = [], os._Environ.__getitem__
os._Environ.__getitem__ = lambda self, name: read.append(name) or look_up(self, name)
import ipu_pipeline
for name in dir(ipu_pipeline):
    getattr(ipu_pipeline, name)
os._Environ.__getitem__ = look_up
assert not [name for name in read if name.startswith({READ_LATER[:-1]})], read


def configure(variables):
    # JAX read its variables when it was imported.
    for name, text in variables.items():
        if name.lower() in jax.config.values:
            old = jax.config.values[name.lower()]
            if isinstance(old, bool):
                text = text.lower() in ("1", "true", "yes", "on")
            elif isinstance(old, (int, float)):
                text = type(old)(text)
            jax.config.update(name.lower(), text)


gc.freeze()  # a child looks for garbage among its own
for line in sys.stdin:
    code, folder, variables, files = json.loads(line)
    child = os.fork()
    if child == 0:
        for descriptor, path in enumerate([os.devnull, *files]):
            opened = os.open(path, os.O_WRONLY if descriptor else os.O_RDONLY)
            os.dup2(opened, descriptor)
            os.close(opened)
        signal.alarm(300)  # ends one that hangs
        os.environ.clear()
        os.environ.update(variables)
        configure(variables)
        os.chdir(folder)
        exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_servers = {}


def run(code, variables, folder=ROOT):
    """Runs a program to its end, with warnings as errors.

    Args:
      code: its text.
      variables: its environment.
      folder: where it runs.

    Returns:
      What `subprocess.run` would: the exit code, and what it wrote.
    """
    key = tuple(sorted(item for item in variables.items() if item[0].startswith(READ_AT_START)))
    if key not in _servers:
        _servers[key] = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={name: text for name, text in variables.items() if not name.startswith(READ_LATER)}
            | {"PYTHONPATH": str(ROOT)},
        )
    server = _servers[key]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        server.stdin.write(f"{json.dumps([code, str(folder), variables, [out.name, errors.name]])}\n")
        server.stdin.flush()
        exit_code = int(server.stdout.readline())
        return subprocess.CompletedProcess("forked", exit_code, out.read(), errors.read())


@atexit.register
def _end():
    for server in _servers.values():
        server.communicate()
    _servers.clear()
