"""What `ray.train` checks before Ray is imported, and programs for it."""

import sys

import pytest

from ipu_pipeline import launching, ray


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_processes": 0}, "num_processes must be a whole number from 1, or a tuple .*; got 0"),
        ({"num_processes": (3, 2)}, r"num_processes .*; got \(3, 2\)"),
        ({"num_processes": (1, 2, 3)}, "num_processes"),
        ({"num_processes": True}, "num_processes"),
        (
            {"storage_path": "s3://bucket/jobs"},
            "storage_path must be a directory .*; got 's3://bucket/jobs'",
        ),
        ({"name": "a/b"}, "name must be a file's name; got 'a/b'"),
        ({"name": ".."}, "name must be a file's name; got '..'"),
        ({"ipus_per_process": 0}, "ipus_per_process must be a whole number from 1; got 0"),
        ({"resources_per_process": {"CPU": 0}}, r"resources_per_process\['CPU'\] must be .*; got 0"),
        ({"resources_per_process": {"GPU": 1}}, "resources_per_process cannot have 'GPU'. Set use_gpu"),
        ({"max_failures": -2}, "max_failures must be a whole number from -1; got -2"),
        ({"memory_every": 0}, "memory_every must be a whole number from 1; got 0"),
        ({"death_timeout": 1}, "death_timeout must be a number from 2; got 1"),
        (
            {"resize_every": 5},
            "resize_every has an effect with a least and a most number of processes only",
        ),
        ({"function": "train.py"}, r"function must be callable.* ray.program\('train.py'\)"),
    ],
    ids=str,
)
def test_arguments(given, message):
    arguments = {"function": print, "num_processes": 2, "storage_path": "jobs", **given}
    with pytest.raises((TypeError, ValueError), match=f"ray.train: {message}"):
        ray.train(**arguments)


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ray.program: there is no program .*/\[a\].py"):
        ray.program(tmp_path / "[a].py")


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)"])
def test_a_program_is_run_as_by_python(end, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "[a].py").write_text(
        f"import sys, beside\nprint(__name__, sys.argv[1:], beside.name)\n{end}\n"
    )
    ray.program(tmp_path / "[a].py", "--steps", 3)(ray.Attempt(0, 0, 1, tmp_path))
    assert capsys.readouterr().out == "__main__ ['--steps', '3'] beside\n"


def test_a_program_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "a.py").write_text("import sys\nsys.exit('no data')\n")
    with pytest.raises(RuntimeError, match="a.py ended with 'no data'"):
        ray.program(tmp_path / "a.py")(ray.Attempt(0, 0, 1, tmp_path))


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ipu_pipeline.launching.ray_job", raising=False)
    monkeypatch.delattr(launching, "ray_job", raising=False)  # else it is found there, and a job is run
    with pytest.raises(ImportError, match=r"ray.train needs Ray Train: pip install 'ipu_pipeline\[ray\]'"):
        ray.train(print, 2, storage_path="jobs")
