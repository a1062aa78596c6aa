"""Compiled programs, kept in a directory for later processes; public as functions of `config`."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import jax

from ipu_pipeline.engine import jax_compat

__all__ = ["CACHE_DIR_VARIABLE", "enable_executable_cache", "enable_executable_cache_of_environment"]

CACHE_DIR_VARIABLE = "IPU_PIPELINE_CACHE_DIR"

_has_read_environment = False


def enable_executable_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory, for later processes: these need not compile them again.

    It is JAX's persistent compilation cache, set up to keep small and quickly compiled programs too.
    Programs are known by what they compute, the versions and the kind of device; nothing is ever deleted.
    Without it, programs that are the same on several CPU devices are compiled once per process; with it,
    once for each device.

    The environment variable IPU_PIPELINE_CACHE_DIR does the same, when the first `Session` is made.

    If the directory cannot be used, there is a warning, and programs are compiled without it.

    Args:
      directory: it is made if it does not exist.
    """
    global _has_read_environment
    _has_read_environment = True
    path = Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        warnings.warn(
            f"Compiled programs are not kept: the directory {path} of enable_executable_cache (or "
            f"{CACHE_DIR_VARIABLE}) cannot be used: {error}. Later processes compile them again.",
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax_compat.reset_persistent_cache()  # JAX looks at the settings once, when it first compiles


def enable_executable_cache_of_environment() -> None:
    """Does what IPU_PIPELINE_CACHE_DIR says, the first time it is called."""
    global _has_read_environment
    if not _has_read_environment and (directory := os.environ.get(CACHE_DIR_VARIABLE)):
        enable_executable_cache(directory)
    _has_read_environment = True
