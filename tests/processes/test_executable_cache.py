import grp
import os
import pwd
import stat

import jax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ground.host import check_files, make_own
from tests.support import forked

_COUNT = """
import collections
import jax
import numpy as np
import optax
import ipu_pipeline as ipu
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_rest: events.update([event]))
ipu.Session()
ipu.set_num_devices(2)
w, lengths = np.ones((4, 1), "float32"), (2, 3)  # micro-batches of two shapes
pipeline = ipu.engine.Pipeline(
    [lambda w, x: x @ w, lambda _w, x: x.sum()], num_micro_batches=2, parameters=[w, w],
    optimizer=optax.sgd(0.1), device_mapping=[0, 1],
)
elements = [np.ones((length, 4), "float32") for length in lengths]
print(*pipeline.step(pipeline.init(jax.random.key(0), elements[0]), elements)[1].losses)
for name in ("compile_requests_use_cache", "cache_hits", "cache_misses"):
    print(events[f"/jax/compilation_cache/{name}"])
"""

_ENABLE = """
import jax
import ipu_pipeline as ipu
jax.jit(lambda x: x + 1)(1.0)  # before: JAX has looked at its settings
ipu.config.enable_executable_cache({directory!r})
jax.jit(lambda x: x * 3)(1.0)
"""


def start(code, **variables):
    known = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    result = forked.run(code, known | variables)
    assert result.returncode == 0, result.stderr
    return result


def test_the_second_start_compiles_nothing(tmp_path):
    (losses, *first), (again, *second) = (
        start(_COUNT, IPU_PIPELINE_CACHE_DIR=str(tmp_path / "cache")).stdout.splitlines() for _start in "12"
    )
    assert losses == again
    (_requests, _hits, misses), (requests, hits, missed) = (map(int, each) for each in (first, second))
    assert misses > 5
    assert missed == 0
    assert hits == requests > 5


def test_enabled_after_the_first_compilation(tmp_path):
    start(_ENABLE.format(directory=str(tmp_path / "deep" / "cache")))
    assert list((tmp_path / "deep" / "cache").iterdir())


def test_the_variable_is_read_by_the_first_session_only(tmp_path):
    script = (
        "import os, jax, ipu_pipeline as ipu\n"
        "assert jax.config.jax_compilation_cache_dir is None\n"
        "ipu.Session()\n"
        f"assert jax.config.jax_compilation_cache_dir == {str(tmp_path)!r}\n"
        "os.environ['IPU_PIPELINE_CACHE_DIR'] = '/elsewhere'\n"
        "ipu.Session()\n"
        f"assert jax.config.jax_compilation_cache_dir == {str(tmp_path)!r}\n"
        f"ipu.config.enable_executable_cache({str(tmp_path / 'other')!r})\n"
        f"assert jax.config.jax_compilation_cache_dir == {str(tmp_path / 'other')!r}\n"
    )
    start(script, IPU_PIPELINE_CACHE_DIR=str(tmp_path))


def test_without_a_usable_directory_programs_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "cache")
    script = (
        "import warnings, jax, ipu_pipeline as ipu\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    ipu.Session()\n"
        "print(*(warning.message for warning in caught))\n"
        "assert jax.config.jax_compilation_cache_dir is None\n"
        "print(jax.jit(lambda x: x + 1)(1))\n"
    )
    told = start(script, IPU_PIPELINE_CACHE_DIR=directory).stdout
    assert f"the directory {directory} of enable_executable_cache (or IPU_PIPELINE_CACHE_DIR)" in told
    assert "Not a directory" in told
    assert told.endswith("2\n")


def refusal_of(directory):
    """Why a directory is not used; JAX's settings stay as they are."""
    known = jax.config.jax_compilation_cache_dir
    with pytest.warns(UserWarning, match="Compiled programs are not kept") as caught:
        ipu.config.enable_executable_cache(directory)
    assert jax.config.jax_compilation_cache_dir == known
    return str(caught[0].message)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path):
    """It was used, and its entries are machine code."""
    tmp_path.chmod(0o700)
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    told = refusal_of(cache)
    assert f"others can write to {cache} (chmod go-w {cache}). What is in it is run as machine code" in told
    assert "Name a directory of your own" in told
    cache.chmod(0o1777)  # the sticky bit: others may still add entries
    assert f"others can write to {cache} " in refusal_of(cache)
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert f"others can write to {cache} " in refusal_of(link)
    assert f"others can write to {cache} " in refusal_of(tmp_path / "missing" / ".." / "link")
    cache.chmod(0o700)
    (cache / "planted").touch()
    (cache / "planted").chmod(0o666)
    assert f"{cache / 'planted'} belongs to another user, or others can write to it" in refusal_of(cache)
    tmp_path.chmod(0o777)  # others could rename the directory, and make another one
    assert f"others can write to {tmp_path} " in refusal_of(cache)
    assert f"others can write to {tmp_path} " in refusal_of(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_users_own_directories_are_taken(tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)  # as /tmp
    old = os.umask(0)
    try:
        assert make_own(tmp_path / "deep" / "cache") == tmp_path / "deep" / "cache"
    finally:
        os.umask(old)
    for made in (tmp_path / "deep", tmp_path / "deep" / "cache"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    cache = tmp_path / "deep" / "cache"
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert make_own(link) == cache  # JAX gets the path without the link, which nobody can turn elsewhere
    cache.chmod(0o770)
    gid, user = cache.stat().st_gid, pwd.getpwuid(os.geteuid()).pw_name
    for group, is_taken in (
        (grp.struct_group((user, "x", gid, [])), True),  # the group that the user is alone in
        (grp.struct_group((user, "x", gid, [user, "another"])), False),
        (grp.struct_group(("staff", "x", gid, [])), False),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda _gid, group=group: group)
        if is_taken:
            assert make_own(cache) == cache
        else:
            with pytest.raises(PermissionError, match="others can write to"):
                make_own(cache)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    cache = make_own(tmp_path / "cache")
    (cache / "entry").touch()
    uid = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: uid + 1)  # also for root, whom that user could have run code
        with pytest.raises(PermissionError, match="belongs to another user"):
            make_own(cache)
        with pytest.raises(PermissionError, match="entry belongs to another user"):
            check_files(cache)
    check_files(cache)


_SWAP = """
import pathlib, warnings, jax
import ipu_pipeline as ipu
directory = pathlib.Path({directory!r})
ipu.config.enable_executable_cache(directory)
functions = [lambda x: x * 2, lambda x: x * 3, lambda x: x * 5]
assert [int(jax.jit(f)(7)) for f in functions] == [14, 21, 35]
first, second, *_others = files = sorted(directory.glob("jit__lambda*"))
contents = [file.read_bytes() for file in files]
assert len(files) == 3
first.write_bytes(contents[1]), second.write_bytes(contents[0])
jax.clear_caches()
hits = []
jax.monitoring.register_event_listener(lambda event, **_rest: hits.append(event.endswith("/cache_hits")))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert [int(jax.jit(f)(7)) for f in functions] == [14, 21, 35]
assert sum(hits) == 1
print(*(warning.message for warning in caught), sep="\\n")
"""


def test_an_entry_under_anothers_name_is_not_used(tmp_path):
    """A swapped entry computed x * 3 for x * 2."""
    told = start(_SWAP.format(directory=str(tmp_path / "cache"))).stdout.splitlines()
    assert len(told) == 1
    assert f"directory of compiled programs, {tmp_path / 'cache'}, is not what was written" in told[0]
