"""Compiled programs, kept in a directory for later processes; public as functions of `config`."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax

from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.host import check_files, make_own
from ipu_pipeline.processes.launcher import CACHE_DIR_VARIABLE

__all__ = ["CACHE_DIR_VARIABLE", "enable_executable_cache", "enable_executable_cache_of_environment"]

_CHECKED = "-checked"  # ends the keys of entries with a digest
_DIGEST_BYTES = hashlib.sha256().digest_size

_has_read_environment = False


def enable_executable_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory, for later processes: these need not compile them again.

    It is JAX's persistent compilation cache, set up to keep small and quickly compiled programs, too.
    Programs are identified by what they compute, the versions and the kind of device. Nothing is deleted.
    Without the cache, programs that are the same on several CPU devices are compiled once per process; with
    it, once for each device.

    The environment variable IPU_PIPELINE_CACHE_DIR does the same, when the first `Session` is made or the
    first pipeline is prepared.

    The directory must be the user's own, because it contains machine code that this process runs. It must
    neither belong to another user nor be writable by others, and the same holds for its files and for the
    directories above it; these may also be root's, or have the sticky bit, like /tmp. An entry that stands
    under another entry's name, or was changed, is not used, with a warning.

    If the directory cannot be used, there is a warning, and programs are compiled without it.

    Example:
      >>> ipu.config.enable_executable_cache("cache")
    """
    global _has_read_environment
    _has_read_environment = True
    path = Path(directory).absolute()
    try:
        path = make_own(path)
        check_files(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        mend = "Later processes compile them again."
        if isinstance(error, PermissionError) and error.errno is None:  # from `make_own` or `check_files`
            mend = (
                "What is in it is run as machine code, so no other user may be able to write it. Name a "
                "directory of your own, for example one in your home directory that does not exist yet: it "
                "is made so that only you can write to it."
            )
        warnings.warn(
            f"Compiled programs are not kept: the directory {path} of enable_executable_cache (or "
            f"{CACHE_DIR_VARIABLE}) cannot be used: {error}. {mend}",
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax_compat.reset_persistent_cache()  # JAX looks at the settings once, when it first compiles
    _check_entries(jax_compat.find_persistent_cache(), path)


def enable_executable_cache_of_environment() -> None:
    """Enables the cache of IPU_PIPELINE_CACHE_DIR, the first time it is called."""
    global _has_read_environment
    if not _has_read_environment and (directory := os.environ.get(CACHE_DIR_VARIABLE)):
        enable_executable_cache(directory)
    _has_read_environment = True


def _check_entries(cache: Any, directory: Path) -> None:
    """Makes entries valid only for the keys under which they were written: each begins with a digest.

    Entries that JAX wrote by itself have other names; they are neither used nor replaced.
    """
    if cache is None:
        return
    get, put = cache.get, cache.put
    wrong: list[str] = []

    def checked_get(key: str) -> bytes | None:
        entry = get(key + _CHECKED)
        if entry is None:
            return None
        content: bytes = entry[_DIGEST_BYTES:]
        if entry[:_DIGEST_BYTES] == _digest(key, content):
            return content
        wrong.append(key)
        if len(wrong) == 1:
            warnings.warn(
                f"An entry of the directory of compiled programs, {directory}, is not what was written "
                f"under its name, {key}{_CHECKED}. It is not used, nor are others like it: their programs "
                "are compiled. Delete what is in the directory, and see that nothing else writes there.",
                stacklevel=2,
            )
        return None

    cache.get = checked_get
    cache.put = lambda key, value: put(key + _CHECKED, _digest(key, value) + value)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()
