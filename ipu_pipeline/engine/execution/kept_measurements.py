"""Files that keep what was measured on a kind of device for later processes.

Each measurement has a file of its own, in JSON. The first process to measure writes it, and others keep to
that: no lock is needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from ipu_pipeline.ground.cores import count_cores

__all__ = ["describe_device", "digest", "find_directory", "keep", "read"]

T = TypeVar("T")

_FOLDER = "program_times"


def find_directory() -> Path | None:
    """The directory where times are kept: in that of JAX's compiled programs, else in the user's cache.

    Returns:
      The directory, which need not exist; None if there is no place for it.
    """
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # not in JAX's annotations
    if given and "://" not in given:
        return Path(given) / _FOLDER
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # the user has none
            return None
    return cache / "ipu_pipeline" / _FOLDER


def describe_device(device: Any) -> str:
    """What a measurement depends on besides what is measured."""
    cores = (_cpu_model(), count_cores()) if device.platform == "cpu" else None
    settings = os.environ.get("XLA_FLAGS", ""), jax.config.read("jax_disable_most_optimizations")
    kind = device.platform, device.device_kind, device.client.platform_version
    return str((*kind, cores, jax.__version__, *settings))


@functools.cache
def _cpu_model() -> str:
    """The model of the processor: machines that share a directory may differ."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return f"{platform.machine()} {platform.processor()}"


def digest(*texts: str) -> str:
    """A name for what the texts say."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def read(directory: Path | None, key: str, parse: Callable[[Any], T | None]) -> T | None:
    """What the file of a key says; None if there is none, or it says nothing usable."""
    if directory is None:
        return None
    try:
        return parse(json.loads((directory / f"{key}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def keep(
    directory: Path | None, key: str, fields: Mapping[str, Any], parse: Callable[[Any], T | None]
) -> T | None:
    """Writes the file of a key, unless another process did; arguments as in `read`.

    A directory that cannot be written is not used: what was measured is then known in this process only.

    Returns:
      What another process wrote meanwhile, which counts; None if there is nothing usable.
    """
    if directory is None:
        return None
    path = directory / f"{key}.json"
    written = directory / f"{key}.{os.getpid()}.{threading.get_ident()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            written.write_text(json.dumps(fields))
            os.link(written, path)
        except FileExistsError:
            if (other := read(directory, key, parse)) is not None:
                return other
            os.replace(written, path)  # it says nothing usable
        except OSError:  # a file system without links
            os.replace(written, path)
        finally:
            written.unlink(missing_ok=True)
    return None
