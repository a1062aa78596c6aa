import os
import subprocess
import sys

import pytest

from tests.programs import ROOT, STEP3

_COUNT = """
import collections, runpy, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_rest: events.update([event]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
for name in ("compile_requests_use_cache", "cache_hits", "cache_misses"):
    print(name, events[f"/jax/compilation_cache/{name}"], file=sys.stderr)
"""

_ENABLE = """
import jax
import ipu_pipeline as ipu
jax.jit(lambda x: x + 1)(1.0)  # before: JAX has looked at its settings
ipu.config.enable_executable_cache({directory!r})
jax.jit(lambda x: x * 3)(1.0)
"""


def start(*arguments, **environment):
    known = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**known, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_the_second_start_of_step_3_compiles_nothing(tmp_path):
    counts = []
    for _start in range(2):
        program = [STEP3, "--dataset", "digits", "--steps", "2", "--repeat-count", "2"]
        result = start("-c", _COUNT, *program, IPU_PIPELINE_CACHE_DIR=str(tmp_path / "cache"))
        assert "Program ran successfully" in result.stdout
        lines = dict(line.split() for line in result.stderr.splitlines() if line.count(" ") == 1)
        counts.append({name: int(lines[name]) for name in lines if "cache" in name})
    first, second = counts
    assert first["cache_misses"] > 5
    assert second["cache_misses"] == 0
    assert second["cache_hits"] == second["compile_requests_use_cache"] > 5


def test_enabled_after_the_first_compilation(tmp_path):
    start("-c", _ENABLE.format(directory=str(tmp_path / "deep" / "cache")))
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
    start("-c", script, IPU_PIPELINE_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("is_in_environment", [False, True])
def test_without_a_usable_directory_programs_are_compiled_all_the_same(tmp_path, is_in_environment):
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "cache")
    call = f"ipu.config.enable_executable_cache({directory!r})"
    script = (
        "import warnings, jax, ipu_pipeline as ipu\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        f"    {'ipu.Session()' if is_in_environment else call}\n"
        "print(*(warning.message for warning in caught))\n"
        "assert jax.config.jax_compilation_cache_dir is None\n"
        "from tests.front import Model\n"
        "model = Model()\n"
        "with ipu.Session() as session:\n"
        "    session.run(model.initializer)\n"
        "    print(len(model.run(session)), 'losses')\n"
    )
    environment = {"IPU_PIPELINE_CACHE_DIR": directory} if is_in_environment else {}
    told = start("-c", script, **environment).stdout
    assert f"the directory {directory} of enable_executable_cache (or IPU_PIPELINE_CACHE_DIR)" in told
    assert "Not a directory" in told
    assert "3 losses" in told
