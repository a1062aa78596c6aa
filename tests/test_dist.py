"""The package as files to install: everything is in them, and it works where there is no repository."""

import datetime
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import ipu_pipeline
from tests.docs.test_readme import README, assert_is_what_the_example_prints, example
from tests.support.programs import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import make_dist  # scripts are no package
import release


def run(*command, **options):
    """What a process prints that has nothing of this one's environment that matters to Python or JAX."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON", "IPU_"))}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=kept, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, timeout=600)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel and the archive of the sources."""
    wheel, archive = make_dist.make(tmp_path_factory.mktemp("dist"))
    return {"wheel": wheel, "archive": archive}


@pytest.fixture
def wheel(dist):
    return dist["wheel"]


@pytest.mark.thorough
def test_the_whole_package_is_in_them_and_nothing_else(dist):
    files = set(make_dist.files())
    expected = {name for name in files if name.startswith("ipu_pipeline/")}
    assert expected >= {"ipu_pipeline/py.typed", "ipu_pipeline/data/digits.npz"}
    with zipfile.ZipFile(dist["wheel"]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert files >= {"tests/conftest.py", "Makefile", ".github/workflows/test.yml"}
    with tarfile.open(dist["archive"]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    found = {name for name in names if ".egg-info/" not in name}
    assert found == files | {"PKG-INFO"}


@pytest.mark.thorough
def test_links_of_the_description_work_anywhere(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        described = email.message_from_bytes(archive.read(metadata))
    assert described["Summary"].rstrip(".") in README.replace("**", "")
    links = re.findall(r"\]\(([^)]+)\)", described.get_payload())
    assert all(link.startswith("https://") for link in links)


def test_links_of_the_readme_in_a_distribution():
    readme = "[one](docs/a.md#b), [two](https://c.d)\n![three](e.svg)\n"
    at = "https://example.org/f"
    assert make_dist.with_absolute_links(readme, "1.2.3", at) == (
        f"[one]({at}/blob/v1.2.3/docs/a.md#b), [two](https://c.d)\n![three]({at}/raw/v1.2.3/e.svg)\n"
    )
    assert make_dist.with_absolute_links(readme, "1.2.3", None) == "one, [two](https://c.d)\n\n"


@pytest.mark.thorough
def test_both_are_reproducible(dist, tmp_path, monkeypatch):
    """From a copy in another folder, with newer files, other permissions and another umask."""
    names = make_dist.files()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    for path in tmp_path.rglob("*"):
        path.chmod(0o700)
    monkeypatch.setattr(make_dist, "ROOT", tmp_path)
    monkeypatch.setattr(make_dist, "files", lambda: names)
    before = os.umask(0o077)
    try:
        again = make_dist.make(tmp_path / "dist")
    finally:
        os.umask(before)
    assert [path.read_bytes() for path in again] == [dist[key].read_bytes() for key in ("wheel", "archive")]


@pytest.mark.thorough
def test_an_editable_install_is_a_path_which_type_checkers_follow(tmp_path):
    """It was a hook that imports, of which mypy and pyright know nothing."""
    make_dist._copy(tmp_path, "0")
    run(
        sys.executable,
        "-c",
        "from setuptools import build_meta; build_meta.build_editable('.')",
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(path).decode().strip() == str(tmp_path)


@pytest.fixture
def environment(tmp_path):
    """An empty one. It becomes large, and pytest would keep it."""
    path = tmp_path / "environment"
    venv.create(path, with_pip=False)
    yield path
    shutil.rmtree(path)


@pytest.mark.thorough
def test_the_readme_s_example_in_an_empty_environment(wheel, environment, tmp_path):
    """With the versions of this environment, which pip has at hand."""
    folder = tmp_path / "folder"
    folder.mkdir()
    python = environment / "bin" / "python"
    known = tmp_path / "known.txt"
    frozen = pip("freeze", "--exclude-editable").splitlines()
    known.write_text("\n".join(line for line in frozen if "==" in line))
    pip("--python", python, "install", "--quiet", "--no-compile", "--constraint", known, wheel)
    code = example() + "\nimport ipu_pipeline\nprint(ipu_pipeline.__file__)\n"
    *printed, path = run(python, "-W", "error", "-c", code, cwd=folder, timeout=300).splitlines()
    assert path.startswith(str(environment))
    assert_is_what_the_example_prints("".join(f"{line}\n" for line in printed))
    assert not [*folder.iterdir()]


CHANGELOG = "# Changelog\n\n## Unreleased\n\n- News.\n\n## 0.1.2, 2026-01-31\n\n- The first.\n"
DAY = datetime.date(2026, 2, 1)


@pytest.mark.parametrize("version", ["0.1.3", "1.0.0"])
def test_a_version_is_cut_from_the_changelog(version, monkeypatch):
    monkeypatch.setattr(release.user_warnings, "DEPRECATED_NAMES", {})
    found = release.cut(CHANGELOG, version, DAY)
    assert found == CHANGELOG.replace("Unreleased\n", f"Unreleased\n\n## {version}, 2026-02-01\n")
    assert make_dist.newest_release(found) == (version, 1769904000)
    with pytest.raises(ValueError, match="nothing under '## Unreleased'"):
        release.cut(found, f"{version[:-1]}{int(version[-1]) + 1}", DAY)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.1.2", "0.1.2 does not follow 0.1.2: one of 0.1.3, 0.2.0, 1.0.0 does"),
        ("0.2.0", "engine.Old is still there, and said that 0.2.0 is without it"),
    ],
)
def test_a_version_that_cannot_be(version, message, monkeypatch):
    names = {"engine.Old": release.user_warnings.Deprecated("engine.New", "0.2.0")}
    monkeypatch.setattr(release.user_warnings, "DEPRECATED_NAMES", names)
    with pytest.raises(ValueError, match=message):
        release.cut(CHANGELOG, version, DAY)


def test_the_version_is_the_same_everywhere():
    version, seconds = make_dist.newest_release((ROOT / "CHANGELOG.md").read_text())
    assert version == ipu_pipeline.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    day = datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
    assert release.cite(citation, version, day) == citation
    assert "\nversion: 9.8.7\ndate-released: 2026-02-01\n" in release.cite(citation, "9.8.7", DAY)
