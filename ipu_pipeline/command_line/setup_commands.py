"""Commands for a start: `new` makes a project, `devices` lists devices, `doctor` checks what works."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import shutil
import string
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.ground.tables import align, describe_bytes, printable
from ipu_pipeline.ground.user_warnings import TESTED, is_tested

# `ipu-pipeline new`.

_TEMPLATES = ("README.md", "train.py", "test_train.py")


def add_new(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Create the folder NAME with a program that trains a model in two stages, a test that compares it "
        "with plain JAX, and a README that says how to run and profile them."
    )
    parser.add_argument("name", metavar="NAME", help="a folder that does not exist yet")
    parser.set_defaults(call=lambda parsed: _make_project(Path(parsed.name)))


def _make_project(folder: Path) -> int:
    if folder.exists() or folder.is_symlink():
        return _refuse(f"{str(folder)!r} exists already; give another name")
    if not folder.parent.is_dir():
        return _refuse(f"there is no folder {str(folder.parent)!r}")
    source = importlib.resources.files("ipu_pipeline.command_line") / "project"
    try:
        # Under another name until it is complete, so that an interrupted call leaves none of this name.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
            project = Path(temporary) / folder.name
            project.mkdir()
            for name in _TEMPLATES:
                text = (source / f"{name}.txt").read_text(encoding="utf-8")
                if name == "README.md":
                    text = string.Template(text).substitute(name=folder.name)
                (project / name).write_text(text, encoding="utf-8")
            project.rename(folder)
    except OSError as error:
        return _refuse(f"the folder {str(folder)!r} cannot be created: {error.strerror}")
    print(f"Created {folder}. Next:\n  cd {folder}\n  python train.py")  # noqa: T201  # a program
    return 0


def _refuse(message: str) -> int:
    print(f"ipu-pipeline new: {message}.", file=sys.stderr)  # noqa: T201  # a program
    return 2


# `ipu-pipeline devices`.


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "List JAX's devices on this machine. Each can be an IPU. This starts JAX's backend without "
        "reserving the memory of accelerators."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=lambda parsed: _list_devices(parsed.json))


def _list_devices(as_json: bool) -> int:
    jax = _import_jax()
    try:
        devices = [_describe_device(device) for device in jax.devices()]
    except RuntimeError as error:
        print(f"ipu-pipeline devices: JAX does not start: {error}", file=sys.stderr)  # noqa: T201  # a program
        return 1
    virtual = _describe_virtual(devices)
    if as_json:
        print(json.dumps({"devices": devices, **virtual}))  # noqa: T201  # a program
        return 0
    rows = [("id", "platform", "kind", "process", "memory", "in use")]
    rows += [
        (
            str(device["id"]),
            device["platform"],
            printable(device["kind"]),
            str(device["process"]),
            *("" if size is None else describe_bytes(size) for size in _sizes(device)),
        )
        for device in devices
    ]
    print("\n".join(align(rows, (0, 3, 4, 5))))  # noqa: T201  # a program
    if virtual["can_make_virtual"]:
        print(  # noqa: T201  # a program
            f"These are virtual devices on {virtual['num_cores']} cores. A program gets as many as its "
            "pipelines need; IPUConfig and ipu.set_num_devices ask for more."
        )
    else:
        print(  # noqa: T201  # a program
            f"IPUConfig.ipu_model = True makes as many virtual devices of the CPU ({virtual['num_cores']} "
            "cores) as a program needs instead."
        )
    return 0


def _import_jax() -> Any:
    """Imports JAX, late, since other commands are faster without it."""
    # A program that trains may want all of an accelerator's memory, or have it already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def _describe_device(device: Any) -> dict[str, Any]:
    try:
        stats = device.memory_stats() or {}
    except (RuntimeError, NotImplementedError, AttributeError):  # not all platforms know
        stats = {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": stats.get("bytes_limit"),
        "used_bytes": stats.get("bytes_in_use"),
    }


def _describe_virtual(devices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts about virtual devices: how many a program gets depends on its pipelines."""
    return {
        "can_make_virtual": devices[0]["platform"] == "cpu",
        "num_virtual": sum(device["platform"] == "cpu" for device in devices),
        "num_cores": count_cores(),
    }


def _sizes(device: dict[str, Any]) -> tuple[int | None, int | None]:
    return device["memory_bytes"], device["used_bytes"]


# `ipu-pipeline doctor`.

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
    """A feature that needs more packages than the library: their modules, and how to get them."""

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


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Check the versions, devices and cores, the directory of compiled programs, and the packages of "
        "optional features: one line each. The exit status is 1 if something is wrong that every program "
        "needs, otherwise 0."
    )
    parser.set_defaults(call=lambda _parsed: _run_checks())


def _run_checks() -> int:
    findings = [*_check_versions()]
    if all(finding.state != WRONG for finding in findings):  # else JAX is not there, or broken
        findings += [*_check_devices(), _check_cache()]
    distributions = importlib.metadata.packages_distributions()
    findings += [*(_check_feature(feature, distributions) for feature in FEATURES), _check_compiler()]
    print("\n".join(align(findings)))  # noqa: T201  # a program
    return int(any(finding.state == WRONG for finding in findings))


def _check_versions() -> Iterator[Finding]:
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


def _check_devices() -> Iterator[Finding]:
    jax = _import_jax()
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


def _check_cache() -> Finding:
    from ipu_pipeline.processes import executable_cache

    subject, name = "compiled programs kept", executable_cache.CACHE_DIR_VARIABLE
    directory = os.environ.get(name)
    if not directory:
        return Finding(
            NOTE, subject, f"nowhere; {name} or config.enable_executable_cache names a directory"
        )
    if not os.path.lexists(directory):
        return Finding(OK, subject, f"in {printable(directory)}, which the first program makes")
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        executable_cache.enable_executable_cache(directory)
    if problems:
        return Finding(WRONG, subject, printable(str(problems[0].message)))
    return Finding(OK, subject, f"in {printable(directory)}: {describe_bytes(_size_of(Path(directory)))}")


def _size_of(directory: Path) -> int:
    """The size of its files, without those that other processes remove meanwhile."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _check_feature(feature: Feature, distributions: Mapping[str, Sequence[str]]) -> Finding:
    """Whether its packages are installed."""
    lacking = [module for module in feature.modules if module not in distributions]
    if lacking:
        verb = "is" if len(lacking) == 1 else "are"
        text = f"{' and '.join(lacking)} {verb} not installed: {feature.mend}"
        return Finding(MISSING, feature.name, text)
    names = [distributions[module][0] for module in feature.modules]
    text = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Finding(OK, feature.name, text)


def _check_compiler() -> Finding:
    subject = "custom operations in C++"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return Finding(MISSING, subject, "no g++ and no clang++: install a compiler")
    return Finding(OK, subject, compiler)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
