"""Makes the wheel and the archive of the sources, in dist: from the same files the same bytes.

    python scripts/make_dist.py [--to FOLDER]

They are built by setuptools, of the version that `dev` has, from a copy of the files that git knows. PyPI
shows the README without the files that it links to: the copy's links begin with the repository's address
(`Repository` of `project.urls` in pyproject.toml), and are plain text while there is none.

Times within them are the day of the newest release in CHANGELOG.md; owners and permissions are the same
wherever they are built. Setuptools makes wheels so by itself (SOURCE_DATE_EPOCH), and archives by what is
done here.
"""

import argparse
import datetime
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def newest_release(changelog: str) -> tuple[str, int]:
    """Its version, and the beginning of its day in seconds since 1970."""
    version, day = re.findall(r"^## (\d+\.\d+\.\d+), (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)[0]
    return version, int(datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())


def files() -> list[str]:
    """What the archive of the sources has: the files that git knows, with the tests and what they need."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def with_absolute_links(readme: str, version: str, address: str | None) -> str:
    """The README with links to the version's files in the repository; without them if it has no address."""

    def absolute(found: re.Match[str]) -> str:
        if address is None:
            return "" if found["picture"] else found["text"]
        view = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({address}/{view}/v{version}/{found['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?!https?:)(?P<path>[^)]+)\)", absolute, readme)


def _copy(target: Path, version: str) -> None:
    """Copies the files, with the permissions of plain ones."""
    for name in files():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    readme = target / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), version, urls.get("Repository")))
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _settle(path: Path, seconds: int) -> None:
    """Writes an archive anew, without what depends on where and when it was made."""
    written = io.BytesIO()
    with (
        tarfile.open(path) as found,
        gzip.GzipFile(filename="", mode="wb", fileobj=written, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as settled,
    ):
        for member in sorted(found.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, seconds
            plain.mode = 0o755 if member.isdir() else 0o644
            settled.addfile(plain, found.extractfile(member) if member.isfile() else None)
    path.write_bytes(written.getvalue())


def make(target: Path) -> list[Path]:
    """Makes both in a folder, and returns the path of the wheel and that of the archive."""
    version, seconds = newest_release((ROOT / "CHANGELOG.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        source.mkdir()
        _copy(source, version)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
        done = subprocess.run(
            command, env=environment, umask=0o022, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
        _settle(archive, seconds)
        target.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, target / path.name)) for path in (wheel, archive)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="the folder; by default dist")
    for path in make(parser.parse_args().to):
        print(path)
