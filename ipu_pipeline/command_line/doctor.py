"""Tells what of the library works on this machine, and what is missing for the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ipu_pipeline.ground.cores import count_cores
from ipu_pipeline.ground.tables import align, describe_bytes, printable

__all__ = ["add"]

OK = "ok"
NOTE = "note"  # it works, or may
MISSING = "missing"  # for a feature that not every program uses
WRONG = "wrong"  # for every program


class Finding(NamedTuple):
    """A line: one of the states above, of what, and what was found."""

    state: str
    subject: str
    text: str


class Feature(NamedTuple):
    """What needs packages that the library itself does not: their modules, and how to get them."""

    name: str
    modules: tuple[str, ...]
    mend: str


FEATURES = (
    Feature("poptorch", ("torch", "safetensors"), "pip install 'ipu_pipeline[torch]'"),
    Feature("report pages", ("plotly",), "pip install 'ipu_pipeline[reports]'"),
    Feature("layers.Flax", ("flax",), "pip install 'ipu_pipeline[flax]'"),
    Feature("TensorBoard's files", ("tensorboardX",), "pip install 'ipu_pipeline[tensorboard]'"),
    Feature(
        "MNIST of tensorflow-datasets",
        ("tensorflow_datasets", "importlib_resources", "PIL"),
        "pip install 'ipu_pipeline[datasets]'",
    ),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Tells, in a line each, which versions there are, which devices and how many cores, where compiled "
        "programs are kept, and what is missing for which feature. It ends with 1 if something is wrong "
        "that every program needs, else with 0."
    )
    parser.set_defaults(call=lambda _parsed: _tell())


def _tell() -> int:
    found = [*_versions(), *_devices(), *_caches(), *map(_feature, FEATURES), _compiler()]
    print("\n".join(align(found)))  # noqa: T201  # a program
    return int(any(finding.state == WRONG for finding in found))


def _versions() -> Iterator[Finding]:
    import ipu_pipeline

    folder = Path(ipu_pipeline.__file__).parent
    yield Finding(OK, "ipu_pipeline", f"{ipu_pipeline.__version__}, in {printable(str(folder))}")
    yield Finding(OK, "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    try:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    except importlib.metadata.PackageNotFoundError as error:
        yield Finding(WRONG, "JAX", f"{error.name} is not installed: pip install ipu_pipeline")
        return
    text = f"{versions['jax']}, jaxlib {versions['jaxlib']}"
    try:
        with warnings.catch_warnings(action="ignore"):  # what it warns of, a line says
            import jax

            from ipu_pipeline.ground import jax_compat
    except Exception as error:  # whatever keeps JAX from being imported
        yield Finding(WRONG, "JAX", f"{text}: {_first_line(error)}")
        return
    tested = f"tested with {jax_compat.OLDEST_TESTED} to {jax_compat.NEWEST_TESTED}"
    state = OK if jax_compat.is_tested(jax.__version_info__) else NOTE
    yield Finding(state, "JAX", f"{text}; {tested}")


def _devices() -> Iterator[Finding]:
    # A program that trains may want all of an accelerator's memory, or have it already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # whatever keeps JAX from being imported, or from starting
        yield Finding(WRONG, "devices", _first_line(error))
    else:
        first = devices[0]
        if first.platform == "cpu":
            text = "virtual ones of the CPU, as many as a program needs"
        else:
            text = f"{len(devices)} of {first.platform}, {printable(first.device_kind)}"
        yield Finding(OK, "devices", text)
    text = f"{count_cores()} that programs may use, of {os.cpu_count()}"
    yield Finding(OK, "cores", text)


def _caches() -> Iterator[Finding]:
    from ipu_pipeline.processes import executable_cache

    name = executable_cache.CACHE_DIR_VARIABLE
    directory = os.environ.get(name)
    if not directory:
        text = f"nowhere; {name} or config.enable_executable_cache names a directory"
        yield Finding(NOTE, "compiled programs kept", text)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        executable_cache.enable_executable_cache(directory)
    if told:
        yield Finding(WRONG, "compiled programs kept", printable(str(told[0].message)))
    else:
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        size = describe_bytes(sum(path.stat().st_size for path in files))
        yield Finding(OK, "compiled programs kept", f"in {printable(directory)}: {size}")


def _feature(feature: Feature) -> Finding:
    lacking = [module for module in feature.modules if importlib.util.find_spec(module) is None]
    if lacking:
        text = f"{' and '.join(lacking)} not installed: {feature.mend}"
        return Finding(MISSING, feature.name, text)
    found = importlib.metadata.packages_distributions()
    names = [found.get(module, [module])[0] for module in feature.modules]
    return Finding(
        OK, feature.name, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    )


def _compiler() -> Finding:
    subject = "custom operations in C++"
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return Finding(MISSING, subject, "no g++ and no clang++: install a compiler")
    return Finding(OK, subject, found)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
