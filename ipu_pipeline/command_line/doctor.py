"""`ipu-pipeline doctor`: checks what works on this machine, and what is missing for the rest."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ipu_pipeline.ground.cores import count_cores
from ipu_pipeline.ground.tables import align, describe_bytes, printable
from ipu_pipeline.ground.tested import TESTED, is_tested

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
    Feature("ray.train", ("ray",), "pip install 'ipu_pipeline[ray]'"),
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
        "Check the versions, devices and cores, the directory of compiled programs, and the packages of "
        "optional features: one line each. The exit status is 1 if something is wrong that every program "
        "needs, otherwise 0."
    )
    parser.set_defaults(call=lambda _parsed: _tell())


def _tell() -> int:
    found = [*_versions()]
    if all(finding.state != WRONG for finding in found):  # else JAX is not there, or broken
        found += [*_devices(), _cache()]
    distributions = importlib.metadata.packages_distributions()
    found += [*(_feature(feature, distributions) for feature in FEATURES), _compiler()]
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
    except Exception as error:  # whatever keeps JAX from being imported
        yield Finding(WRONG, "JAX", f"{text}: {_first_line(error)}")
        return
    state = OK if is_tested("jax", jax.__version__) else NOTE
    yield Finding(state, "JAX", f"{text}; tested with {' to '.join(TESTED['jax'])}")


def _devices() -> Iterator[Finding]:
    # A program that trains may want all of an accelerator's memory, or have it already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    try:
        devices = jax.devices()
    except Exception as error:  # whatever keeps JAX from starting
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


def _cache() -> Finding:
    from ipu_pipeline.processes import executable_cache

    subject, name = "compiled programs kept", executable_cache.CACHE_DIR_VARIABLE
    directory = os.environ.get(name)
    if not directory:
        return Finding(
            NOTE, subject, f"nowhere; {name} or config.enable_executable_cache names a directory"
        )
    if not os.path.lexists(directory):
        return Finding(OK, subject, f"in {printable(directory)}, which the first program makes")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        executable_cache.enable_executable_cache(directory)
    if told:
        return Finding(WRONG, subject, printable(str(told[0].message)))
    return Finding(OK, subject, f"in {printable(directory)}: {describe_bytes(_size_of(Path(directory)))}")


def _size_of(directory: Path) -> int:
    """The size of its files, without those that other processes remove meanwhile."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _feature(feature: Feature, distributions: Mapping[str, Sequence[str]]) -> Finding:
    """Whether its packages are installed."""
    lacking = [module for module in feature.modules if module not in distributions]
    if lacking:
        verb = "is" if len(lacking) == 1 else "are"
        text = f"{' and '.join(lacking)} {verb} not installed: {feature.mend}"
        return Finding(MISSING, feature.name, text)
    names = [distributions[module][0] for module in feature.modules]
    text = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Finding(OK, feature.name, text)


def _compiler() -> Finding:
    subject = "custom operations in C++"
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return Finding(MISSING, subject, "no g++ and no clang++: install a compiler")
    return Finding(OK, subject, found)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
