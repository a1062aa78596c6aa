"""Cuts a version from the changelog: names it there and in the package, commits, tags, and makes dist.

    python scripts/release.py 0.2.0

What stands under "Unreleased" in CHANGELOG.md becomes the version's section, of today. Nothing is sent
anywhere: push the commit and the tag, and upload dist, yourself.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from ipu_pipeline.ground import deprecated

ROOT = Path(__file__).parents[1]
CHANGELOG, PACKAGE = Path("CHANGELOG.md"), Path("ipu_pipeline/__init__.py")
_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


def cut(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with the version's section; ValueError if there is none to be made of it."""
    numbers = [int(part) for part in version.split(".")]
    released = re.findall(r"^## (\d+)\.(\d+)\.(\d+), ", changelog, re.MULTILINE)
    if released:
        last = [int(part) for part in released[0]]
        major, minor, patch = last
        following = [[major, minor, patch + 1], [major, minor + 1, 0], [major + 1, 0, 0]]
        if numbers not in following:
            allowed = ", ".join(".".join(map(str, each)) for each in following)
            raise ValueError(f"{version} does not follow {'.'.join(map(str, last))}: one of {allowed} does")
    for name, (_instead, until) in deprecated.NAMES.items():
        if numbers >= [int(part) for part in until.split(".")]:
            raise ValueError(
                f"{name} is still there, and said that {until} is without it: take it away first"
            )
    head, found, rest = changelog.partition("## Unreleased\n")
    if not found or not re.split(r"^## ", rest, flags=re.MULTILINE)[0].strip():
        raise ValueError("CHANGELOG.md has nothing under '## Unreleased'")
    return f"{head}{found}\n## {version}, {day.isoformat()}\n{rest}"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="MAJOR.MINOR.PATCH")
    version = parser.parse_args().version
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        sys.exit(f"A version is MAJOR.MINOR.PATCH, three numbers; got {version}")
    if changed := _git("status", "--porcelain"):
        sys.exit(f"Commit or undo what is changed first:\n{changed}")
    if f"v{version}" in _git("tag").split():
        sys.exit(f"There is a tag v{version} already")
    try:
        changelog = cut((ROOT / CHANGELOG).read_text(), version, datetime.datetime.now(datetime.UTC).date())
    except ValueError as error:
        sys.exit(str(error))
    (ROOT / CHANGELOG).write_text(changelog)
    package = _VERSION.sub(f'__version__ = "{version}"', (ROOT / PACKAGE).read_text())
    (ROOT / PACKAGE).write_text(package)
    _git("commit", "--quiet", "--message", f"Version {version}", "--", str(CHANGELOG), str(PACKAGE))
    _git("tag", f"v{version}")
    subprocess.run([sys.executable, ROOT / "scripts" / "make_dist.py"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
