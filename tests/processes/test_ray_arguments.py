"""What `ray.train` checks before a cluster starts, and what it says of one."""

import sys

import pytest

from ipu_pipeline import ray
from ipu_pipeline.errors import ProcessError


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
        ({"ipus_per_process": 0}, "ipus_per_process must be a whole number from 1; got 0"),
        ({"resources_per_process": {"CPU": 0}}, r"resources_per_process\['CPU'\] must be .*; got 0"),
        ({"resources_per_process": {"GPU": 1}}, "resources_per_process cannot have 'GPU'. Set use_gpu"),
        ({"max_failures": -2}, "max_failures must be a whole number from -1; got -2"),
        ({"memory_every": 0}, "memory_every must be a whole number from 1; got 0"),
        ({"death_timeout": 1}, "death_timeout must be seconds from 2; got 1"),
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


def make_node(**resources):
    return {"Alive": True, "NodeID": "a", "Resources": resources}


def test_open_ports(monkeypatch):
    monkeypatch.setattr(ray.ray, "nodes", lambda: [make_node(), make_node()])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.warns(UserWarning, match="no token: whoever reaches one of its ports can run any program"):
        ray._warn_of_open_ports()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray._warn_of_open_ports()


def test_a_cluster_that_never_has_room(monkeypatch, caplog):
    """Three processes of two CPUs on nodes of three and of two: there is room for two."""
    monkeypatch.setattr(ray.ray, "nodes", lambda: [make_node(CPU=3.0), make_node(CPU=2.0)])
    monkeypatch.setattr(ray, "_SECONDS_TO_COME", 0.0)
    asked = []
    monkeypatch.setattr(ray, "request_resources", lambda bundles: asked.append(bundles))
    ray._await_resources(2, {"CPU": 2.0})
    with pytest.raises(TimeoutError, match="3 processes need {'CPU': 2.0} each, .* room for 2"):
        ray._await_resources(3, {"CPU": 2.0})
    assert asked == [[{"CPU": 2.0}] * 3, []]
    assert "It is waited for" in caplog.text


def test_the_failure_that_others_follow_from(monkeypatch, caplog):
    monkeypatch.setattr(ray, "_last_failure", None)
    lost = ray.ray.exceptions.RayActorError()
    failures = ray._Failures()
    failures.after_exception(
        None, {0: ProcessError("Process 1 has ended."), 1: ValueError("no data\nat all")}
    )
    failures.after_exception(None, {0: lost})  # a later one
    assert ray._last_failure[1] == "process 1 raised ValueError: no data"
    assert "process 1 raised ValueError: no data." in caplog.text
    assert ray._describe_error(lost) == "was lost"
