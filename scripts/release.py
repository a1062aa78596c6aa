"""Cuts a version from the changelog: names it in there, the package and CITATION.cff, commits and tags it.

    python scripts/release.py 0.2.0

What stands under "Unreleased" in CHANGELOG.md becomes the version's section, of today, and dist is made.
Nothing is sent anywhere: push the commit and the tag, and upload the two files that it names, yourself.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from ipu_pipeline.ground import user_warnings

ROOT = Path(__file__).parents[1]
CHANGELOG, PACKAGE, CITATION = Path("CHANGELOG.md"), Path("ipu_pipeline/__init__.py"), Path("CITATION.cff")
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
    for name, (_instead, until) in user_warnings.DEPRECATED_NAMES.items():
        if numbers >= [int(part) for part in until.split(".")]:
            raise ValueError(
                f"{name} is still there, and said that {until} is without it: take it away first"
            )
    head, found, rest = changelog.partition("## Unreleased\n")
    if not found or not re.split(r"^## ", rest, flags=re.MULTILINE)[0].strip():
        raise ValueError("CHANGELOG.md has nothing under '## Unreleased'")
    return f"{head}{found}\n## {version}, {day.isoformat()}\n{rest}"


def cite(citation: str, version: str, day: datetime.date) -> str:
    """CITATION.cff with the version and its day."""
    citation = re.sub(r"^version: .*$", f"version: {version}", citation, flags=re.MULTILINE)
    return re.sub(r"^date-released: .*$", f"date-released: {day.isoformat()}", citation, flags=re.MULTILINE)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="MAJOR.MINOR.PATCH")
    version = parser.parse_args().version
    if re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version) is None:
        sys.exit(f"A version is MAJOR.MINOR.PATCH, three numbers; got {version}")
    if changed := _git("status", "--porcelain"):
        sys.exit(f"Commit or undo what is changed first:\n{changed}")
    if f"v{version}" in _git("tag").split():
        sys.exit(f"There is a tag v{version} already")
    day = datetime.datetime.now(datetime.UTC).date()
    try:
        changelog = cut((ROOT / CHANGELOG).read_text(), version, day)
    except ValueError as error:
        sys.exit(str(error))
    (ROOT / CHANGELOG).write_text(changelog)
    package, count = _VERSION.subn(f'__version__ = "{version}"', (ROOT / PACKAGE).read_text())
    assert count == 1
    (ROOT / PACKAGE).write_text(package)
    (ROOT / CITATION).write_text(cite((ROOT / CITATION).read_text(), version, day))
    paths = list(map(str, (CHANGELOG, PACKAGE, CITATION)))
    try:  # first, since what fails can still be undone
        subprocess.run([sys.executable, ROOT / "scripts" / "make_dist.py"], check=True, cwd=ROOT)
    except subprocess.CalledProcessError:
        _git("checkout", "--quiet", "--", *paths)
        sys.exit("dist could not be made; nothing was changed")
    _git("commit", "--quiet", "--message", f"Version {version}", "--", *paths)
    _git("tag", f"v{version}")


if __name__ == "__main__":
    main()
