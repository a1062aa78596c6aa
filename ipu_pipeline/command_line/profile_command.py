"""`ipu-pipeline profile`: runs a program for a short while, and writes its reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ipu_pipeline.command_line.main import open_page
from ipu_pipeline.command_line.run_command import add_script
from ipu_pipeline.ground.tables import printable, say_device
from ipu_pipeline.reports.analysis import analyse, find_host_time
from ipu_pipeline.reports.profile import read_profile
from ipu_pipeline.reports.report_files import PAGE, REPORTS, check_directory, read_manifest, remove_reports

# One step of one weight update is enough to see; programs that lack a flag are run without it.
_FLAGS = (("--batches-to-accumulate", "16"), ("--repeat-count", "1"), ("--steps", "1"))
_HELP_SECONDS = 120.0
_SYNTHETIC = "IPU_PIPELINE_SYNTHETIC_DATA"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    flags = " ".join(map(" ".join, _FLAGS))
    parser.description = (
        f"Run SCRIPT with the short settings {flags}, and write report.html, trace.json and profile.json "
        "to ./profile_SCRIPT. Flags that SCRIPT's --help does not list, or that ARGS has, are not added. "
        "Older reports in the folder are removed first."
    )
    parser.usage = (
        "ipu-pipeline profile [-h] [-m] [--synthetic] [--open] [--directory DIRECTORY] SCRIPT [ARGS ...]"
    )
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="replace the program's data by zeros that are already on the devices",
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    parser.add_argument("--directory", help="the folder of the reports; ./profile_SCRIPT by default")
    add_script(parser)
    parser.set_defaults(call=_run)


def _run(parsed: argparse.Namespace) -> int:
    return profile(
        parsed.script, parsed.arguments, parsed.is_module, parsed.synthetic, parsed.directory, parsed.open
    )


def profile(
    program: str,
    arguments: Sequence[str],
    is_module: bool = False,
    is_synthetic: bool = False,
    directory: str | None = None,
    opens: bool = False,
) -> int:
    """Runs a program and writes its reports."""
    if not is_module and not Path(program).exists():
        return _refuse(f"there is no program {program!r}")
    where = Path(directory or f"profile_{program.rpartition('.')[2] if is_module else Path(program).stem}")
    command = [sys.executable, "-m", "ipu_pipeline", "run", *(["-m"] if is_module else []), program]
    command += [*_find_flags(command, arguments), *arguments]
    removed = remove_reports(where)
    if removed:
        _say(f"Removed {len(removed)} older reports of {where}")
    try:
        check_directory(where, REPORTS)
    except (OSError, ValueError) as error:
        return _refuse(str(error).rstrip("."))
    environment = dict(os.environ)
    options = {"autoReport.all": "true", "autoReport.directory": str(where.absolute())}
    environment["POPLAR_ENGINE_OPTIONS"] = json.dumps(options)
    if is_synthetic:
        is_asked = environment.get(_SYNTHETIC) or "use_synthetic_data" in environment.get(
            "TF_POPLAR_FLAGS", ""
        )
        environment[_SYNTHETIC] = environment.get(_SYNTHETIC, "") if is_asked else "zeros"
    _say(f"Running {shlex.join(command[4:])}{' on synthetic data' if is_synthetic else ''}")
    try:
        status = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603  # the user's
    except KeyboardInterrupt:  # which the program got, too
        return 130
    finally:
        with contextlib.suppress(OSError):
            where.rmdir()  # if nothing was written
    written = [name for name in read_manifest(where) if name != "manifest.json"]
    if not written:
        return status or _refuse(f"{program} ran no pipeline or loop, so there is no report", 1)
    for name in written:
        _say(str(where / name))
    _tell_of_host(where / "profile.json")
    if opens and PAGE in written:
        open_page(where / PAGE)
    return 128 - status if status < 0 else status


def _find_flags(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The entries of `_FLAGS` that a program's help mentions and its arguments lack."""
    try:
        help_run = subprocess.run(  # noqa: S603  # the user's, too
            [*command, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    if help_run.returncode:  # a program without --help may have done anything
        return []
    names = {argument.partition("=")[0] for argument in arguments}
    flags: list[str] = []
    for flag, value in _FLAGS:
        if flag not in names and re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_run.stdout):
            flags += [flag, value]
    return flags


def _tell_of_host(file: Path) -> None:
    """Says so if IPUs waited for the host more than for anything else: nothing on the page matters more."""
    try:
        profile = read_profile(file.read_text(encoding="utf-8"))
        host_times = find_host_time(profile, analyse(profile))
    except (OSError, ValueError):
        return
    for facts, host in zip(profile.pipelines, host_times, strict=True):
        if host is not None and host.is_first:
            _say(printable(f"{facts.name}: {say_device(host.sentence, facts.device_word)}"))


def _refuse(text: str, status: int = 2) -> int:
    print(f"ipu-pipeline profile: {text}.", file=sys.stderr)  # noqa: T201  # a program
    return status


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # a program
